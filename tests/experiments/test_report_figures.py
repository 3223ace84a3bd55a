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


def network(model, **given):
    return made_up_result(made_up_settings(**given)).networks[model]


def lines(axis):
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_the_mean_over_seeds_is_of_the_epochs_that_all_have():
    epochs, values = figures.over_seeds([([1, 2, 4], [1.0, None, 3.0]), ([1, 2, 4, 5], [3.0, 2.0, 5.0, 9.0])])
    assert epochs == [1, 4] and values.tolist() == [[1, 3], [3, 5]]
    assert figures.over_seeds([([1], [None])])[0] == [] and figures.over_seeds([])[0] == []


def test_seeds_become_a_mean_and_a_band():
    curves = {"deq": [network("deq", seed=seed).curves for seed in (0, 1)]}
    figure = figures.study_figure({"above": curves, "below": curves})
    assert len(figure.subfigs) == 2 and len(figure.subfigs[0].axes) == 4
    accuracy, nc1, *_ = figure.subfigs[0].axes
    assert lines(accuracy)["DEQ, overall"] == pytest.approx([41.6, 41.7, 41.8, 41.9])
    assert len(accuracy.collections) == 3, "a band for each group of classes"
    assert list(nc1.lines[0].get_xdata()) == [2, 4] and nc1.get_yscale() == "log"
    assert figures.png(figure).startswith(b"\x89PNG")


def test_the_networks_differ_in_more_than_colour():
    figure = figures.study_figure({"heading": {model: [network(model).curves] for model in ("explicit", "deq")}})
    nc2 = figure.subfigs[0].axes[2]
    assert {(line.get_color(), line.get_marker()) for line in nc2.lines} == {("#0072B2", "o"), ("#D55E00", "s")}
    figures.png(figure)


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


@pytest.mark.parametrize("classes", [10, 100])
def test_radius_and_confusions_hold_every_class(classes):
    labels, values = np.repeat(np.arange(classes), 6).tolist(), np.linspace(0.5, 1.2, 6 * classes).tolist()
    rows = {"one": ([SpectralRadius(labels, values)], classes // 2)}
    figure = class_figures.radius_figure(rows, classes, "heading")
    (axis,) = figure.axes
    assert sum(len(points.get_offsets()) for points in axis.collections) == 6 * classes
    assert any(list(line.get_ydata()) == [1, 1] for line in axis.lines), "the line at 1"
    assert len(axis.get_xticks()) == 10
    figures.png(figure)
    counts = np.arange(classes**2).reshape(classes, classes)
    rows = {("one", "explicit"): ([counts], classes // 2), ("one", "deq"): ([counts, counts], classes // 2)}
    figure = class_figures.confusion_figure(rows, "heading")
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


def test_the_features_figure_is_the_same_every_time(made_up):
    path = made_up(features=True) / "features.npz"
    drawn = [
        figures.png(class_figures.features_figure(dict.fromkeys(("explicit", "deq"), path), 3, 10, "heading"))
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


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


def test_half_of_figure_3_says_what_is_missing(made_up):
    assert "Not run: balanced" in plans(made_up(majority=5, ratio=100).parent)["figure3"].caption


def test_a_hundred_classes_are_no_figure_of_the_paper(made_up):
    found = plans(made_up(dataset="cifar100", ratio=100, features=True).parent)
    assert set(found) == {"courses", "k3-r100-features", "solver", "radius", "confusion"}
    assert not any(plan.title.startswith("Figure") for plan in found.values())


def test_the_explicit_network_alone_has_no_solver(made_up):
    assert set(plans(made_up(model="explicit").parent)) == {"courses", "confusion"}


def test_files_of_further_groups_have_names_of_their_own(made_up, tmp_path, monkeypatch):
    root = made_up("a", model="explicit").parent
    made_up("b", model="explicit", lr=0.5)
    made_up("c", model="explicit", lr=0.6)
    plan = pictures.Plan("figure4", "title", "caption", lambda: figures.plt.figure(figsize=(1, 1)))
    monkeypatch.setattr(pictures, "plan_pictures", lambda group: iter([plan]))
    for number, group in enumerate(collect([root]).groups):
        (drawn,) = pictures.draw_all(group, tmp_path, first=number == 0)
        assert (tmp_path.parent / drawn.path).exists()
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(names) == 3 and names[-1] == "figure4.png"
    assert all(name.startswith("cifar10-quick-broyden-jfb-") for name in names[:2])


def test_labels_that_would_cover_one_another_are_pushed_apart():
    points = np.array([[0.0, 0.0], [100.0, 10.0]])
    places = {0: np.array([50.0, 5.0]), 1: np.array([50.0, 5.0]), 2: np.array([52.0, 5.1]), 3: np.array([0.0, 0.0])}
    moved = class_figures.spread_apart(places, points)
    scaled = np.array([moved[label] / [100, 10] for label in range(4)])
    apart = np.linalg.norm(scaled[:, None] - scaled, axis=-1)[np.triu_indices(4, 1)]
    assert apart.min() > 0.99 * class_figures.LABEL_DISTANCE
    assert moved[3].tolist() == [0, 0] and class_figures.spread_apart({}, points) == {}


def test_a_setting_has_as_many_majority_classes_as_its_data_tell(made_up):
    (group,) = collect([made_up(dataset="cifar100").parent]).groups
    assert group.majority(Setting("cifar100", 3, 10)) == 30 and group.majority(Setting("cifar100")) == 100
