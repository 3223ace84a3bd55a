"""Figures of a report: which there are, and what their lines and axes say."""

from __future__ import annotations

import numpy as np
import pytest
from nc_study import figures
from study_helpers import made_up_result, made_up_settings


def network(model, **given):
    return made_up_result(made_up_settings(model=model, **given)).network


def lines(axis):
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_seeds_become_a_mean_and_a_band_and_networks_differ_in_more_than_colour():
    arms = {"explicit": "explicit", "deq-jfb": "deq"}
    curves = {arm: [network(model, seed=seed).curves for seed in (0, 1)] for arm, model in arms.items()}
    figure = figures.study_figure({"above": curves, "below": curves})
    assert len(figure.subfigs) == 2 and len(figure.subfigs[0].axes) == 4
    accuracy, nc1, nc2, _ = figure.subfigs[0].axes
    assert nc2.get_ylabel() == "NC2 centred" and nc2.lines[1].get_ydata()[-1] == pytest.approx(0.9)
    assert lines(accuracy)["DEQ, JFB"] == pytest.approx([41.6, 41.7, 41.8, 41.9])
    assert len(accuracy.collections) == 6, "a band for each network and group of classes"
    assert list(nc1.lines[0].get_xdata()) == [2, 4] and nc1.get_yscale() == "log"
    assert {(line.get_color(), line.get_marker()) for line in nc2.lines} == {("#0072B2", "o"), ("#D55E00", "s")}


def test_the_features_figure_holds_cosines():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(30, 4)).astype(np.float32), np.repeat(np.arange(10), 3)
    features[:2] = [[3, 4, 0, 0], [-4, 3, 0, 0]]
    features[2] = 0
    figure = figures.features_figure({"deq-jfb": (features, labels)}, 10, 3, "heading")
    cosines = figure.axes[1].images[0].get_array()
    assert np.allclose(cosines[:3, :3], [[1, 0, 0], [0, 1, 0], [0, 0, 0]], atol=1e-6)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list("0123456789")
