"""The conventions of four papers on closed forms, NC1 of each class, and a classifier with a bias."""

import math
from itertools import product

import pytest
import torch
from collapse_samples import EXACT_RTOL, ROUNDING, assert_alike, awkward, class_means, simplex_vertices

from deqfast import NeuralCollapse, neural_collapse
from deqfast.metrics.checks import CENTRES

every_convention = pytest.mark.parametrize("convention", CENTRES)
DOUBLE = {"dtype": torch.float64}


def assert_fields(result, expected):
    for name, value in expected.items():
        assert getattr(result, name) == pytest.approx(value, rel=EXACT_RTOL, abs=ROUNDING, nan_ok=True), name


@every_convention
@pytest.mark.parametrize("classes", [2, 5, 100])
def test_the_simplex_is_collapsed(convention, classes):
    """Off-centre means and the bias that makes up for them, except in the convention that does not centre."""
    vertices, labels = simplex_vertices(classes, 120), torch.arange(4 * classes) % classes
    offset = torch.zeros(120, **DOUBLE) if convention == "sun" else torch.linspace(-1, 2, 120, **DOUBLE)
    weight = 3 * vertices
    result = neural_collapse(
        (vertices + offset)[labels], labels, weight, classifier_bias=-weight @ offset, convention=convention
    )
    agree = {"papyan": 0, "zhu": 0}.get(convention, 1)
    assert_fields(
        result, {"nc1": 0, "nc2": 0, "nc3": 0, "nc3_centered": 0, "nc4": agree, "rank": classes - 1, "condition": 1}
    )
    if convention == "sun":
        assert result.nc2_paper == pytest.approx(1 - 1 / math.sqrt(classes - 1), abs=ROUNDING)
    assert result.convention == convention
    if convention == "papyan":
        assert max(*result.nc2_means, *result.nc2_classifier) < ROUNDING
    else:
        assert result.nc2_means is result.nc2_classifier is None


# Two classes of 3 and 1 samples, means (0, 3) and (4, 3); centre (2, 3) of the means, (1, 3) of the samples.
TWO = torch.tensor([[1.0, 3], [-1, 3], [0, 3], [4, 3]], **DOUBLE), torch.tensor([0, 0, 0, 1])
OF_TWO = torch.tensor([[-1.0, 0], [1, 1]], **DOUBLE), torch.tensor([0.0, -4], **DOUBLE)
BY_HAND = {
    # H H^T = (9, 9; 9, 25), <W, H> = 7, |W|^2 = 3, |H|^2 = 34. The classifier chooses 1 if x > 1/2, wrongly for x = 1.
    "sun": (1 / 16, math.sqrt(2 - 16 / math.sqrt(868)), math.sqrt(2 - 14 / math.sqrt(102)), 3 / 4),
    # M = (-1, 0; 3, 0) has the cosine -1, and <W, M> = 4.
    "papyan": (1 / 20, 0, 2 - 8 / math.sqrt(30), 1 / 4),
    # W W^T = (1, -1; -1, 2), W M^T = (1, -3; -1, 3), W c + b = (-1, 0).
    "zhu": (1 / 20, math.sqrt(2 - 5 / math.sqrt(7)), math.sqrt(2 - 8 / math.sqrt(20)), 1),
    # M = (-2, 0; 2, 0): its Gram matrix and W M^T are the simplex.
    "kothapalli": (1 / 16, 0, 0, 3 / 4),
}


@every_convention
@pytest.mark.parametrize("kernel", ["cpp", "torch"], indirect=True)
def test_two_classes_by_hand(convention, kernel):
    weight, bias = OF_TWO
    result = neural_collapse(*TWO, weight, kernel=kernel, classifier_bias=bias, convention=convention, per_class=True)
    assert_fields(result, dict(zip(("nc1", "nc2", "nc3", "nc4"), BY_HAND[convention], strict=True)))
    within = {"class-means": 1 / 12, "samples": 1 / 15}[CENTRES[convention]]  # 2/3 over 4 or 5, and over K
    assert result.nc1_per_class == pytest.approx((within, 0), rel=EXACT_RTOL)
    if convention == "papyan":  # lengths 1 and 3; of W 1 and sqrt(2), with the cosine -1 / sqrt(2)
        assert result.nc2_means == pytest.approx((math.sqrt(2) / 2, 0, 0), abs=ROUNDING)
        root = math.sqrt(2)
        assert result.nc2_classifier == pytest.approx((root * (root - 1) ** 2, 0, 1 - 1 / root), abs=ROUNDING)
    if convention == "sun":  # without its bias the classifier always chooses 1
        assert neural_collapse(*TWO, weight, kernel=kernel).nc4 == 1 / 4


@every_convention
@pytest.mark.parametrize("streaming", [False, True], ids=["list", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_defined_is_nan(convention, streaming, dtype):
    """A single class, means that coincide, and no finite row; None is what was not asked for."""
    rows, labels, weight = torch.randn(600, 3, dtype=dtype), torch.arange(600) % 2, torch.randn(2, 3, **DOUBLE)
    cases = {
        "single": (rows, torch.zeros_like(labels)),
        "coinciding": (torch.full_like(rows, 0.1), labels),  # up to the rounding of their sums
        "mirrored": (rows[:300].repeat_interleave(2, 0) + 0.1, labels),
        "lost": (torch.full_like(rows, math.nan), labels),
    }
    nan_of_means = {"papyan": ("nc2", "nc3"), "zhu": ("nc3",), "kothapalli": ("nc2", "nc3"), "sun": ()}[convention]
    for (name, (features, classes)), given in product(cases.items(), (weight, None)):
        options = {"num_features": 3, "convention": convention, "per_class": not streaming}
        metric = NeuralCollapse(2, given, streaming=streaming, **options)
        metric.update(features, classes)
        result = metric.compute()
        undefined = {"nc1", *nan_of_means} | ({"nc2"} if name in ("single", "lost") else set())
        undefined |= {"nc2"} if given is None and convention == "zhu" else set()
        undefined |= {"nc3", "nc4"} if name == "lost" else set()
        for field in undefined:
            value = getattr(result, field)
            without = given is None and field != "nc1" and field != "nc2"
            without |= field == "nc4" and streaming and convention != "zhu"
            assert value is None if without else math.isnan(value), (name, field)
        assert streaming or all(map(math.isnan, result.nc1_per_class)) and len(result.nc1_per_class) == 2
        centred = (result.condition, result.nc2_centered, *[result.nc3_centered] * (given is not None))
        assert all(map(math.isnan, centred)) and result.rank == 0, name
        assert (result.num_classes, result.excluded) == {"single": (1, 0), "lost": (0, 600)}.get(name, (2, 0))
        if convention == "sun" and name in ("coinciding", "mirrored"):
            assert math.isfinite(result.nc2)
        if convention == "papyan":
            assert all(map(math.isnan, result.nc2_means))
            assert (result.nc2_classifier is None) == (given is None)


@pytest.mark.parametrize("kernel", ["cpp", "torch"], indirect=True)
@pytest.mark.parametrize("center", ["class-means", "samples"])
def test_nc1_of_each_class_agrees_with_its_definition(center, kernel):
    features, labels, weight, bias = awkward()
    options = {"center": center, "kernel": kernel, "classifier_bias": bias}
    result = neural_collapse(features, labels, weight, per_class=True, **options)
    assert_alike(result._replace(nc1_per_class=None), neural_collapse(features, labels, weight, **options))
    kept = features.isfinite().all(1)
    features, labels = features[kept], labels[kept]
    means = class_means(features, labels)
    centred = means - (means.mean(0) if center == "class-means" else features.mean(0))
    inverse = torch.linalg.pinv(centred.T @ centred / 6, hermitian=True, rtol=1e-12)
    expected, sizes = [math.nan] * 7, torch.bincount(labels, minlength=7)
    for label in labels.unique().tolist():
        inside = features[labels == label]
        deviations = inside - inside.mean(0)
        expected[label] = torch.trace(deviations.T @ deviations @ inverse).item() / len(inside) / 6
    assert result.nc1_per_class == pytest.approx(expected, rel=EXACT_RTOL, nan_ok=True)
    mean = sum(int(n) * value for n, value in zip(sizes, result.nc1_per_class, strict=True) if n) / len(labels)
    assert mean == pytest.approx(result.nc1, rel=EXACT_RTOL)
