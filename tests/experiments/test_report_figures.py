"""Figures of a report: what their lines and axes say, and that the same run gives the same bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from nc_study import figures
from nc_study.config import StudyError
from nc_study.reporting import class_figures, pictures
from nc_study.reporting.runs import collect


@pytest.fixture
def summary(made_up):
    """The network's share of a made-up result."""

    def read(model, **given):
        return json.loads((made_up(**given) / "result.json").read_text())["models"][model]

    return read


def lines(axis):
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_the_mean_over_seeds_is_of_the_epochs_that_all_have():
    epochs, values = figures.over_seeds([([1, 2, 4], [1.0, None, 3.0]), ([1, 2, 4, 5], [3.0, 2.0, 5.0, 9.0])])
    assert epochs == [1, 4] and values.tolist() == [[1, 3], [3, 5]]
    assert figures.over_seeds([([1], [None])])[0] == [] and figures.over_seeds([])[0] == []


def test_seeds_become_a_mean_and_a_band(summary):
    curves = {"deq": [summary("deq", seed=seed)["curves"] for seed in (0, 1)]}
    figure = figures.study_figure({"above": curves, "below": curves})
    assert len(figure.subfigs) == 2 and len(figure.subfigs[0].axes) == 4
    accuracy, nc1, *_ = figure.subfigs[0].axes
    assert lines(accuracy)["DEQ, overall"] == pytest.approx([41.6, 41.7, 41.8, 41.9])
    assert len(accuracy.collections) == 3, "a band for each group of classes"
    assert list(nc1.lines[0].get_xdata()) == [2, 4] and nc1.get_yscale() == "log"
    figures.images(figure, "png")


def test_the_networks_differ_in_more_than_colour(summary):
    curves = {model: [summary(model, seed=seed)["curves"]] for seed, model in enumerate(("explicit", "deq"))}
    figure = figures.study_figure({"heading": curves})
    nc2 = figure.subfigs[0].axes[2]
    assert {(line.get_color(), line.get_marker()) for line in nc2.lines} == {("#0072B2", "o"), ("#D55E00", "s")}
    figures.images(figure, "png")


@pytest.mark.parametrize("balanced", [False, True])
def test_the_solver_is_shown_by_group_and_class(summary, balanced):
    given = {"study": "cifar_balanced"} if balanced else {}
    one = summary("deq", **given)
    figure = figures.solver_figure([one["curves"]], [one["solver"]], 10 if balanced else 3, "heading")
    evaluations, residual, converged, per_class = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "evaluations a sample",
        "relative residual",
        "converged (%)",
        "evaluations, last epoch",
    ]
    assert lines(evaluations)["all samples"] == [11] * 4 and lines(converged)["all samples"] == [90] * 4
    assert len(evaluations.lines) == (2 if balanced else 3)
    shown = np.concatenate([container.lines[0].get_ydata() for container in per_class.containers])
    assert shown == pytest.approx([11 * (1 + k / 100) for k in range(10)])
    assert per_class.get_xlabel() == "class" and residual.get_xlabel() == "epoch"
    figures.images(figure, "png")


@pytest.mark.parametrize("classes", [10, 100])
def test_radius_and_confusions_hold_every_class(classes):
    labels, values = np.repeat(np.arange(classes), 6), np.linspace(0.5, 1.2, 6 * classes)
    figure = class_figures.radius_figure([(labels, values)], classes // 2, classes, "heading")
    (axis,) = figure.axes
    assert sum(len(points.get_offsets()) for points in axis.collections) == 6 * classes
    assert axis.get_ylabel() == "spectral radius of ∂f/∂z at z*" and axis.get_xlabel() == "class"
    assert any(list(line.get_ydata()) == [1, 1] for line in axis.lines), "the line at 1"
    assert len(axis.get_xticks()) == 10
    figures.images(figure, "png")
    counts = np.arange(classes**2).reshape(classes, classes)
    figure = class_figures.confusion_figure({"explicit": [counts], "deq": [counts, counts]}, classes // 2, "heading")
    explicit, deq = (axis.images[0].get_array() for axis in figure.axes[:2])
    assert np.allclose(explicit, deq) and np.allclose(explicit.sum(1), 100)
    assert len(figure.axes[0].texts) == (100 if classes == 10 else 0)
    figures.images(figure, "png")


def test_the_gram_matrix_holds_cosines():
    features = np.array([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]], dtype=np.float32)
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert np.allclose(class_figures.gram(features), expected, atol=1e-6)


def test_features_are_sorted_by_class_without_those_that_are_not_finite():
    group = {"features": np.array([[1.0], [np.inf], [2.0], [3.0]], dtype=np.float16), "labels": np.array([1, 0, 0, 1])}
    features, labels = class_figures.finite_features(group)
    assert features.tolist() == [[2], [1], [3]] and labels.tolist() == [0, 1, 1]


def test_features_that_do_not_fit_are_an_error(made_up):
    path = made_up(model="deq", features=True) / "features.npz"
    assert class_figures.read_features(path, "deq")["features"].shape == (20, 4)
    with pytest.raises(StudyError, match="does not hold the features of the explicit network"):
        class_figures.read_features(path, "explicit")


def test_the_features_figure_is_the_same_every_time(made_up):
    path = made_up(features=True) / "features.npz"
    arrays = {model: class_figures.read_features(path, model) for model in ("explicit", "deq")}

    def drawn():
        figure = class_figures.features_figure(arrays, 3, 10, "heading")
        titles = [axis.get_title() for axis in figure.axes[:4]]
        return titles, figures.images(figure, "png", "svg")

    titles, first = drawn()
    assert titles == ["explicit", "DEQ", "explicit", "DEQ"]
    assert first["png"].startswith(b"\x89PNG") and b"<svg" in first["svg"]
    assert drawn()[1] == first
    assert b"<dc:date>" not in first["svg"]


def plans(root):
    (group,) = collect([root]).groups
    return {plan.name: plan.caption for plan in pictures.plan_pictures(group)}


def test_the_papers_figures_have_their_names(made_up):
    root = made_up(study="cifar_balanced").parent
    for majority, ratio in ((5, 100), (3, 100), (7, 100), (3, 10), (7, 10)):
        made_up(majority=majority, ratio=ratio, features=(majority, ratio) == (3, 10))
    found = plans(root)
    assert {"figure2", "figure3", "figure4", "figure5", "k3-r10-course", "k7-r10-course"} <= set(found)
    assert not {"balanced-course", "k5-r100-course", "k3-r100-course", "k3-r10-features"} & set(found)
    assert found["figure4"].startswith("Figure 4 of the paper: (3, 7), R = 100; quick preset on cifar10, Broyden, JFB")
    assert "not comparable with the paper" in found["figure4"]
    assert found["figure3"].startswith("Figure 3 of the paper: balanced and (5, 5), R = 100;")
    assert "H Hᵀ" in found["figure2"] and "perplexity 30" in found["figure2"]
    for cell in ("balanced", "k3-r10", "k7-r100"):
        assert {f"{cell}-solver", f"{cell}-radius", f"{cell}-confusion"} <= set(found)


def test_half_of_figure_3_says_what_is_missing(made_up):
    found = plans(made_up(majority=5, ratio=100).parent)
    assert "Not run: balanced" in found["figure3"]


def test_a_hundred_classes_are_no_figure_of_the_paper(made_up):
    found = plans(made_up(dataset="cifar100", ratio=100, features=True).parent)
    assert not any(name.startswith("figure") for name in found)
    assert not any(caption.startswith("Figure") for caption in found.values())


def test_files_of_further_groups_have_names_of_their_own(made_up, tmp_path, monkeypatch):
    root = made_up("a", model="explicit").parent
    made_up("b", model="explicit", lr=0.5)
    made_up("c", model="explicit", lr=0.6)
    picture = pictures.Plan("figure4", "caption", lambda: figures.plt.figure(figsize=(1, 1)))
    monkeypatch.setattr(pictures, "plan_pictures", lambda group: iter([picture]))
    for number, group in enumerate(collect([root]).groups):
        (tmp_path / "figures").mkdir(exist_ok=True)
        drawn = pictures.pictures_of(group, pictures.FigureFolder(tmp_path / "figures"), first=number == 0)
        assert drawn.count == 1 and (tmp_path / f"{drawn.blocks[0].stem}.svg").exists()
    names = sorted(path.name for path in (tmp_path / "figures").glob("*.png"))
    assert len(names) == 3 and names[-1] == "figure4.png"
    assert all(name.startswith("cifar10-quick-broyden-jfb-") for name in names[:2])


def test_labels_that_would_cover_one_another_are_pushed_apart():
    points = np.array([[0.0, 0.0], [100.0, 10.0]])
    places = {0: np.array([50.0, 5.0]), 1: np.array([50.0, 5.0]), 2: np.array([52.0, 5.1]), 3: np.array([0.0, 0.0])}
    moved = class_figures.spread_apart(places, points)
    scaled = np.array([moved[label] / [100, 10] for label in range(4)])
    apart = np.linalg.norm(scaled[:, None] - scaled, axis=-1)[np.triu_indices(4, 1)]
    assert apart.min() > 0.99 * class_figures.LABEL_DISTANCE
    assert moved[3].tolist() == [0, 0]
    assert class_figures.spread_apart({}, points) == {}


def test_the_explicit_network_alone_has_no_solver(made_up):
    found = plans(made_up(model="explicit").parent)
    assert set(found) == {"k3-r10-course", "k3-r10-confusion"}
