"""Figures of a report: what their lines and axes say, and that the same run gives the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from nc_study import figures
from nc_study.config import Setting
from nc_study.record import SpectralRadius
from nc_study.reporting import class_figures, pictures
from nc_study.reporting.runs import collect
from study_helpers import made_up_result, made_up_settings

CIFAR10 = Setting("cifar10", 5, 10)


def network(model, **given):
    return made_up_result(made_up_settings(**given)).networks[model]


def lines(axis):
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_the_mean_over_seeds_is_of_the_epochs_that_all_have():
    epochs, values = figures.over_seeds([([1, 2, 4], [1.0, None, 3.0]), ([1, 2, 4, 5], [3.0, 2.0, 5.0, 9.0])])
    assert epochs == [1, 4] and values.tolist() == [[1, 3], [3, 5]]
    assert figures.over_seeds([([1], [None])])[0] == [] and figures.over_seeds([])[0] == []


def test_seeds_become_a_mean_and_a_band_and_networks_differ_in_more_than_colour():
    curves = {model: [network(model, seed=seed).curves for seed in (0, 1)] for model in ("explicit", "deq")}
    figure = figures.study_figure({"above": curves, "below": curves})
    assert len(figure.subfigs) == 2 and len(figure.subfigs[0].axes) == 4
    accuracy, nc1, nc2, _ = figure.subfigs[0].axes
    assert lines(accuracy)["DEQ, overall"] == pytest.approx([41.6, 41.7, 41.8, 41.9])
    assert len(accuracy.collections) == 6, "a band for each network and group of classes"
    assert list(nc1.lines[0].get_xdata()) == [2, 4] and nc1.get_yscale() == "log"
    assert {(line.get_color(), line.get_marker()) for line in nc2.lines} == {("#0072B2", "o"), ("#D55E00", "s")}
    assert figures.png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("study, groups", [("cifar_balanced", 2), ("cifar_lt", 3)])
def test_the_solver_is_shown_by_group_and_class(study, groups):
    figure = figures.solver_figure({"heading": ([network("deq", study=study)], 3 if groups == 3 else 10)})
    evaluations, residual, converged, per_class = figure.subfigs[0].axes
    assert lines(evaluations)["all samples"] == [11] * 4 and lines(converged)["all samples"] == [90] * 4
    assert len(evaluations.lines) == groups
    shown = np.concatenate([container.lines[0].get_ydata() for container in per_class.containers])
    assert shown == pytest.approx([11 * (1 + k / 100) for k in range(10)])
    assert per_class.get_xlabel() == "class" and residual.get_xlabel() == "epoch"
    figures.png(figure)


@pytest.mark.parametrize("setting, classes", [(CIFAR10, 10), (Setting("cifar100", 5, 10), 100)])
def test_radius_and_confusions_hold_every_class(setting, classes):
    labels, values = np.repeat(np.arange(classes), 6).tolist(), np.linspace(0.5, 1.2, 6 * classes).tolist()
    figure = class_figures.radius_figure({setting: [SpectralRadius(labels, values)]}, "heading")
    (axis,) = figure.axes
    assert sum(len(points.get_offsets()) for points in axis.collections) == 6 * classes
    assert any(list(line.get_ydata()) == [1, 1] for line in axis.lines), "the line at 1"
    assert len(axis.get_xticks()) == 10
    figures.png(figure)
    counts = np.arange(classes**2).reshape(classes, classes)
    figure = class_figures.confusion_figure({(setting, "explicit"): [counts], (setting, "deq"): [counts] * 2}, "")
    explicit, deq = (axis.images[0].get_array() for axis in figure.axes[:2])
    assert np.allclose(explicit, deq) and np.allclose(explicit.sum(1), 100)
    assert len(figure.axes[0].texts) == (100 if classes == 10 else 0)
    figures.png(figure)


def test_the_gram_matrix_holds_cosines():
    features = np.array([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]], dtype=np.float32)
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert np.allclose(class_figures.gram(features), expected, atol=1e-6)


def test_features_are_sorted_by_class_and_refused_where_they_do_not_fit(made_up, monkeypatch):
    path = made_up(model="deq", features=True) / "features.npz"
    features, labels = class_figures.read_features(path, "deq")
    assert features.shape == (20, 4) and labels.tolist() == sorted(labels.tolist())
    with pytest.raises(class_figures.NoFeatures, match="does not hold the features of the explicit network"):
        class_figures.read_features(path, "explicit")
    group = {"features": np.array([[1.0], [np.inf], [2.0], [3.0]], dtype=np.float16), "labels": np.array([1, 0, 0, 1])}
    monkeypatch.setattr(class_figures, "read_arrays", lambda _: {"deq": group})
    with pytest.raises(class_figures.NoFeatures, match="3 images with finite features"):
        class_figures.read_features(path, "deq")
    monkeypatch.setattr(class_figures, "FEWEST_IMAGES", 3)
    assert class_figures.read_features(path, "deq")[0].tolist() == [[2], [1], [3]]


def test_the_features_figure_names_the_classes_and_is_the_same_every_time(made_up):
    paths = dict.fromkeys(("explicit", "deq"), made_up(features=True) / "features.npz")
    figure, again = (class_figures.features_figure(paths, CIFAR10, "heading") for _ in range(2))
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list("0123456789")
    assert figures.png(figure) == figures.png(again)


def plans(root):
    (group,) = collect([root]).groups
    return {plan.name: plan for plan in pictures.plan_pictures(group)}


def test_the_papers_figures_have_their_names_and_the_rest_is_shown_together(made_up):
    root = made_up(study="cifar_balanced").parent
    for majority, ratio in ((5, 100), (3, 100), (7, 100), (3, 10), (7, 10)):
        made_up(majority=majority, ratio=ratio, features=(majority, ratio) == (3, 10))
    found = plans(root)
    assert set(found) == {f"figure{number}" for number in "2345"} | {"courses", "solver", "radius", "confusion"}
    assert found["figure4"].title == "Figure 4 of the paper, not comparable with it"
    assert "balanced: both networks seed 0; (5,5) R = 100: both networks seed 0" in found["figure3"].caption
    assert "(3,7) R = 10: both" in found["courses"].caption and "(7,3) R = 10: both" in found["courses"].caption
    assert "H Hᵀ" in found["figure2"].caption and "perplexity 30" in found["figure2"].caption


@pytest.mark.parametrize(
    "given, names",
    [
        ({"dataset": "cifar100", "features": True}, {"courses", "k3-r100-features", "solver", "radius", "confusion"}),
        ({"model": "explicit", "majority": 5}, {"figure3", "confusion"}),
    ],
)
def test_pictures_are_of_what_there_is(made_up, given, names):
    found = plans(made_up(ratio=100, **given).parent)
    assert set(found) == names
    assert "figure3" not in found or "Not run: balanced" in found["figure3"].caption


def test_files_of_further_groups_have_names_of_their_own(made_up, tmp_path, monkeypatch):
    root = made_up("a", model="explicit").parent
    (group,) = collect([root]).groups
    plan = pictures.Picture("figure4", "title", "caption", lambda: figures.plt.figure(figsize=(1, 1)))
    monkeypatch.setattr(pictures, "plan_pictures", lambda group: iter([plan]))
    (tmp_path / "figures").mkdir()
    for prefix in ("", "group2-"):
        (drawn,) = pictures.draw_all(group, tmp_path / "figures", prefix)
        assert drawn.path == f"figures/{prefix}figure4.png" and (tmp_path / drawn.path).exists()
