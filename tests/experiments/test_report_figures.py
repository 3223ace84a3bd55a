"""Figures of a report: their number, lines and axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection
from nc_study import figures
from nc_study.reporting.document import TEMPLATES
from nc_study.reporting.pictures import pictures
from nc_study.reporting.runs import collect
from runs import style
from scipy import stats
from study_helpers import made_up_result, made_up_settings

import deqfast


def network(model, **given):
    return made_up_result(made_up_settings(model=model, **given)).network


def test_seeds_become_a_mean_and_a_band_and_networks_differ_in_more_than_colour():
    arms = {"explicit": "explicit", "deq-jfb": "deq"}
    curves = {arm: [network(model, seed=seed).curves for seed in (0, 1)] for arm, model in arms.items()}
    figure = figures.study_figure({"above": curves, "below": curves})
    assert len(figure.axes) == 8
    accuracy, nc1, nc2, _ = figure.axes[:4]
    assert nc2.get_ylabel() == "NC2 centred" and nc2.lines[1].get_ydata()[-1] == pytest.approx(0.9)
    jfb = [line for line in accuracy.lines if line.get_marker() == "s" and line.get_linestyle() == "-"]
    assert list(jfb[0].get_ydata()) == pytest.approx([41.6, 41.7, 41.8, 41.9])
    explained = ["explicit", "DEQ, JFB", "majority classes", "minority classes"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == explained
    assert len(accuracy.collections) == 6, "a band for each network and group of classes"
    assert list(nc1.lines[0].get_xdata()) == [2, 4] and nc1.get_yscale() == "log"
    assert {(line.get_color(), line.get_marker()) for line in nc2.lines} == {(style.BLUE, "o"), (style.PURPLE, "s")}


def test_dots_are_paired_by_seed_next_to_the_interval_the_papers_gain_and_a_ring(made_up, monkeypatch):
    for seed in (0, 1):
        root = made_up(seed=seed, shift=2.0 + seed, model="explicit").parent
        made_up(seed=seed, shift=2.0 + seed, adjoint="implicit")
    monkeypatch.setattr("nc_study.reporting.pictures.broken", lambda network: network.curves["overall"][-1] > 44)
    picture = next(pictures(collect([root]).groups[0]))
    overall, minority, nc2 = picture.figure.axes
    assert (picture.name, nc2.get_ylabel()) == ("pairs", "NC2 centred")
    half = stats.t.ppf(0.975, 1) * 0.5
    (bar,) = minority.containers[0].lines[2]
    assert bar.get_segments()[0][:, 1] == pytest.approx([2.5 - half, 2.5 + half])
    dots = [tuple(one.get_offsets()[0]) for one in overall.collections if isinstance(one, PathCollection)]
    heights = [pytest.approx(one) for one in (2.0, 3.0, 3.0, 73.84 - 72.57)]
    assert [height for _, height in dots] == heights, "both seeds, the ring of the second, the paper's gain"
    assert len({place for place, _ in dots}) == 3, "only the ring is over a dot"


def test_the_floor_of_nc2_that_the_report_names():
    """Class means at right angles have the least NC2 of features that are not negative."""
    features, labels = torch.eye(10, dtype=torch.float64), torch.arange(10)
    text = (TEMPLATES / "report.md").read_text()
    assert f"below an NC2 of\n  {deqfast.neural_collapse(features, labels).nc2:.2f} in ten classes" in text


def test_the_features_figure_holds_cosines():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(30, 4)).astype(np.float32), np.repeat(np.arange(10), 3)
    features[:2] = [[3, 4, 0, 0], [-4, 3, 0, 0]]
    features[2] = 0
    figure = figures.features_figure({"deq-jfb": (features, labels)}, 10, 3, "heading")
    cosines = figure.axes[1].images[0].get_array()
    assert np.allclose(cosines[:3, :3], [[1, 0, 0], [0, 1, 0], [0, 0, 0]], atol=1e-6)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list("0123456789")
