"""Figures of a report: their number, lines and axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nc_study import figures
from nc_study.reporting.pictures import pictures
from nc_study.reporting.runs import collect
from scipy import stats
from study_helpers import made_up_result, made_up_settings

import deqfast


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


def test_dots_are_paired_by_seed_next_to_the_interval_the_papers_value_and_what_nc2_can_be(made_up):
    for seed in (0, 1):
        root = made_up(seed=seed, shift=2.0 + seed, model="explicit").parent
        made_up(seed=seed, shift=2.0 + seed)
    picture = next(pictures(collect([root]).groups[0]))
    _, minority, nc2, _ = picture.figure.subfigs[0].axes
    joined = [list(line.get_ydata()) for line in minority.lines if line.get_linewidth() == 0.6]
    assert joined == [pytest.approx([20.0, 22.0]), pytest.approx([20.1, 23.1])]
    (bar,) = (line for line in minority.lines if line.get_linewidth() == 2.5)
    half = stats.t.ppf(0.975, 1) * 0.5
    assert list(bar.get_ydata()) == pytest.approx([20.05 + 2.5 - half, 20.05 + 2.5 + half])
    crosses = [tuple(dots.get_offsets()[0]) for dots in minority.collections if len(dots.get_offsets()) == 1]
    assert crosses == [(0, 62.36), (1, 64.06)]
    levels = {text.get_text(): text.get_position()[1] for text in nc2.texts}
    features, labels = torch.eye(10, dtype=torch.float64), torch.arange(10)
    assert levels["orthogonal"] == pytest.approx(deqfast.neural_collapse(features, labels).nc2)
    features = torch.block_diag(torch.eye(3, dtype=torch.float64) - 1 / 3, torch.zeros(7, 7, dtype=torch.float64))
    assert levels["minority collapse"] == pytest.approx(deqfast.neural_collapse(features, labels).nc2_centered)


def test_the_features_figure_holds_cosines():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(30, 4)).astype(np.float32), np.repeat(np.arange(10), 3)
    features[:2] = [[3, 4, 0, 0], [-4, 3, 0, 0]]
    features[2] = 0
    figure = figures.features_figure({"deq-jfb": (features, labels)}, 10, 3, "heading")
    cosines = figure.axes[1].images[0].get_array()
    assert np.allclose(cosines[:3, :3], [[1, 0, 0], [0, 1, 0], [0, 0, 0]], atol=1e-6)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list("0123456789")
