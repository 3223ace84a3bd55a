"""Tests of NC1-NC4 against their definitions, D x D matrices in float64, and of the metric built on them."""

import copy
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

import deqfast
from deqfast import NCResult, NeuralCollapse, neural_collapse
from deqfast.ops.collapse import reference

EXACT_RTOL = 1e-12  # float64 against float64, well conditioned
COLLAPSED_RTOL = 1e-6  # against a pseudo-inverse that itself loses digits, or features that are mostly offset
ROUNDING = 1e-7  # distances that are zero but for rounding (square roots of float64 differences)
PINV_RTOL = 1e-12  # eigenvalues of Sigma_B below this share of the largest are zero in the reference
REPEATS = 10
DISTRIBUTED_TIMEOUT = 120.0

# The package's function hides the module of the same name.
MODULE = sys.modules["deqfast.neural_collapse"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
KEPT_FIELDS = ("nc1", "rank", "condition", "nc2", "nc2_paper", "nc2_centered", "nc3", "nc3_centered", "num_classes")


def make_samples(rows, columns, classes, noise=0.3, offset=0.0, dtype=torch.float32, seed=0):
    """Features around random class means and labels in random order; every class is there when rows allow."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, columns, generator=generator, dtype=torch.float64) + offset
    labels = (torch.arange(rows) % classes)[torch.randperm(rows, generator=generator)]
    features = means[labels] + noise * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, columns, generator=generator, dtype=torch.float64)
    return features.to(dtype), labels, weight.to(dtype)


def imbalanced(features, labels):
    """Class k keeps about every (k + 1)-th of its samples."""
    occurrence = torch.zeros_like(labels)
    for k in labels.unique():
        occurrence[labels == k] = torch.arange(int((labels == k).sum()))
    keep = occurrence % (labels + 1) == 0
    return features[keep], labels[keep]


def class_means(features, labels):
    return torch.stack([features[labels == k].mean(0) for k in labels.unique()])


def naive(features, labels, center="class-means", pinv_rtol=PINV_RTOL):
    """NC1 and the rank of Sigma_B as the paper defines them, D x D pseudo-inverse in float64."""
    features, labels = features.double().cpu(), labels.cpu()
    means = class_means(features, labels)
    deviations = features - means[torch.unique(labels, return_inverse=True)[1]]
    between = means - (means.mean(0) if center == "class-means" else features.mean(0))
    sigma_w = deviations.T @ deviations / len(features)
    sigma_b = between.T @ between / len(means)
    nc1 = torch.trace(sigma_w @ torch.linalg.pinv(sigma_b, hermitian=True, rtol=pinv_rtol)) / len(means)
    return nc1.item(), int(torch.linalg.matrix_rank(sigma_b, hermitian=True, rtol=pinv_rtol))


def naive_simplex(means, scale):
    gram = means @ means.T
    classes = len(means)
    target = scale * (torch.eye(classes, dtype=means.dtype) - torch.ones(classes, classes, dtype=means.dtype) / classes)
    return (gram / gram.norm() - target).norm().item()


def simplex_vertices(classes, columns):
    """Rows of a simplex equiangular tight frame in R^columns, float64."""
    identity = torch.eye(classes, columns, dtype=torch.float64)
    return math.sqrt(classes / (classes - 1)) * (identity - identity.mean(0))


def assert_close(result, expected, rtol=EXACT_RTOL, fields=KEPT_FIELDS):
    for field in fields:
        got, want = getattr(result, field), getattr(expected, field)
        assert got == pytest.approx(want, rel=rtol, abs=rtol, nan_ok=True), field


# --- NC1 against the definition


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("center", ["class-means", "samples"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "classes"), [(256, 64, 4), (777, 63, 10), (600, 256, 100), (500, 7, 20)])
@pytest.mark.parametrize("balanced", [True, False])
def test_nc1_agrees_with_pseudo_inverse(rows, columns, classes, balanced, dtype, center, device):
    features, labels, _ = make_samples(rows, columns, classes, dtype=dtype)
    if not balanced:
        features, labels = imbalanced(features, labels)
    expected, rank = naive(features, labels, center)
    result = neural_collapse(features.to(device), labels.to(device), center=center)
    assert result.nc1 == pytest.approx(expected, rel=EXACT_RTOL)
    assert result.rank == rank == min(classes - 1, columns)


def test_one_feature():
    features, labels, weight = make_samples(63, 1, 3, dtype=torch.float64)
    result = neural_collapse(features, labels, weight)
    assert result.nc1 == pytest.approx(naive(features, labels)[0], rel=EXACT_RTOL)
    assert (result.rank, result.condition) == (1, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strided_views(dtype):
    features, labels, weight = make_samples(777, 63, 5, dtype=dtype)
    wide = torch.full((777, 2 * 63 + 1), math.nan, dtype=dtype)
    wide[:, 1::2] = features
    spaced = torch.full((2 * 777,), -1)
    spaced[::2] = labels
    repeated = features[:1].expand(777, 63)
    for view, dense in ((wide[:, 1::2], features), (features.T.contiguous().T, features), (repeated, repeated.clone())):
        result, expected = neural_collapse(view, spaced[::2], weight), neural_collapse(dense, labels, weight)
        assert_close(result, expected, fields=(*KEPT_FIELDS, "nc4"))


def test_center_of_samples_differs_under_imbalance():
    features, labels = imbalanced(*make_samples(777, 63, 10)[:2])
    by_class, by_sample = (neural_collapse(features, labels, center=c).nc1 for c in ("class-means", "samples"))
    assert abs(by_class / by_sample - 1) > math.sqrt(COLLAPSED_RTOL)


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-5])
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("streaming", [False, True])
def test_collapsed_features_with_offset(noise, offset, streaming):
    features, labels, _ = make_samples(777, 63, 10, noise=noise, offset=offset)
    expected, _ = naive(features, labels)
    metric = NeuralCollapse(10, streaming=streaming, num_features=63)
    metric.update(features, labels)
    assert metric.compute().nc1 == pytest.approx(expected, rel=COLLAPSED_RTOL)


@pytest.mark.parametrize("first_row", [1.0, math.nan])
def test_offset_costs_no_digits(first_row):
    features, labels, _ = make_samples(777, 63, 10, offset=1e8, dtype=torch.float64)
    expected, _ = naive(features[1:] - 1e8, labels[1:])  # the subtraction is exact
    features[0] *= first_row
    if first_row == 1.0:
        features, labels = features[1:], labels[1:]
    assert neural_collapse(features, labels).nc1 == pytest.approx(expected, rel=EXACT_RTOL)


def test_minority_collapse_in_float32():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(10, 64, generator=generator)
    means[3:] = means[3] + 1e-3 * torch.randn(7, 64, generator=generator) / 8
    labels = torch.arange(1000) % 10
    features = means[labels] + 1e-4 * torch.randn(1000, 64, generator=generator)
    expected, rank = naive(features, labels)
    result = neural_collapse(features, labels)
    assert result.nc1 == pytest.approx(expected, rel=COLLAPSED_RTOL)
    assert result.rank == rank == 9
    assert result.condition < 1e-3


def test_nc1_ignores_rotation_scale_and_offset():
    features, labels, _ = make_samples(500, 63, 10, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(63, 63, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    expected = neural_collapse(features, labels).nc1
    for same in (features @ rotation, features * 1e30, features * 1e-30, features + 3.0):
        assert neural_collapse(same, labels).nc1 == pytest.approx(expected, rel=EXACT_RTOL)


def test_no_matrix_of_the_size_of_the_features_squared():
    features, labels, weight = make_samples(6, 200_000, 3)  # D x D would take 320 GB
    assert neural_collapse(features, labels, weight).rank == 2


def test_blocks_do_not_change_the_result(monkeypatch):
    features, labels, weight = make_samples(777, 63, 10)
    expected = neural_collapse(features, labels, weight, kernel="torch")
    for rows in (1, 10, 776, 777, 10_000):
        monkeypatch.setattr(reference, "_MIN_BLOCK_ROWS", rows)
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", {"cpu": 1})
        assert_close(neural_collapse(features, labels, weight, kernel="torch"), expected, fields=(*KEPT_FIELDS, "nc4"))


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits_every_time(device):
    features, labels, weight = (x.to(device) for x in make_samples(5000, 63, 10))
    expected = neural_collapse(features, labels, weight)
    for _ in range(REPEATS):
        assert neural_collapse(features.clone(), labels, weight) == expected


# --- NC2, NC3, NC4


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_simplex_is_fully_collapsed(classes):
    vertices = simplex_vertices(classes, 120)
    labels = torch.arange(3 * classes) % classes
    result = neural_collapse(vertices[labels], labels, 7.0 * vertices)
    assert result.nc1 == pytest.approx(0, abs=EXACT_RTOL)
    assert result.rank == classes - 1
    assert result.condition == pytest.approx(1, rel=EXACT_RTOL)
    for distance in (result.nc2, result.nc2_centered, result.nc3, result.nc3_centered):
        assert distance == pytest.approx(0, abs=ROUNDING)
    assert result.nc2_paper == pytest.approx(1 - 1 / math.sqrt(classes - 1), abs=ROUNDING)
    assert result.nc4 == 1.0


def test_values_stated_for_ten_classes():
    labels = torch.arange(30) % 10
    orthogonal = neural_collapse(torch.eye(10, 16)[labels], labels)
    assert round(orthogonal.nc2, 3) == 0.320
    assert orthogonal.nc2_centered == pytest.approx(0, abs=ROUNDING)
    simplex = neural_collapse(simplex_vertices(10, 16)[labels], labels)
    assert round(simplex.nc2_paper, 3) == 0.667


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("center", ["class-means", "samples"])
def test_nc2_and_nc3_agree_with_the_definitions(dtype, center):
    features, labels, weight = make_samples(777, 63, 10, offset=0.5, dtype=dtype)
    features, labels = imbalanced(features, labels)
    result = neural_collapse(features, labels, weight, center=center)
    means, weight = class_means(features.double(), labels), weight.double()
    centred = means - (means.mean(0) if center == "class-means" else features.double().mean(0))
    expected = {
        "nc2": naive_simplex(means, 1 / 3),
        "nc2_paper": naive_simplex(means, 1 / 9),
        "nc2_centered": naive_simplex(centred, 1 / 3),
        "nc3": (weight / weight.norm() - means / means.norm()).norm().item(),
        "nc3_centered": (weight / weight.norm() - centred / centred.norm()).norm().item(),
    }
    for name, value in expected.items():
        assert getattr(result, name) == pytest.approx(value, rel=EXACT_RTOL), name


def test_nc3_ends_at_two():
    features, labels, _ = make_samples(100, 63, 4, dtype=torch.float64)
    means = class_means(features, labels)
    assert neural_collapse(features, labels, -3 * means).nc3 == pytest.approx(2, rel=EXACT_RTOL)
    assert neural_collapse(features, labels, means - means.mean(0)).nc3_centered == pytest.approx(0, abs=ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("offset", "dtype"), [(0.0, torch.float64), (1e8, torch.float64), (0.0, torch.float32), (100.0, torch.float32)]
)
def test_nc4_agrees_with_the_two_rules(offset, dtype, device):
    features, labels, _ = make_samples(777, 5, 10, noise=1.0, offset=offset, dtype=dtype)
    without_offset = features.double() - offset
    means = class_means(without_offset, labels)
    weight = means - means.mean(0) + 0.2
    nearest = torch.cdist(without_offset, means, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    expected = (nearest == (features.double() @ weight.T).argmax(1)).double().mean().item()
    result = neural_collapse(features.to(device), labels.to(device), weight.to(device))
    assert 0 < expected < 1
    assert result.nc4 == pytest.approx(expected, rel=EXACT_RTOL)


def test_nc4_ties_go_to_the_lowest_index():
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
    labels = torch.tensor([0, 1, 0, 1, 2])
    # All zero weights tie everywhere, so the classifier says 0; only the samples nearest to the mean of class 0 agree.
    nearest = torch.cdist(features, class_means(features, labels)).argmin(1)
    result = neural_collapse(features, labels, torch.zeros(3, 2))
    assert result.nc4 == pytest.approx((nearest == 0).double().mean().item(), rel=EXACT_RTOL)
    # All zero features tie in both rules.
    assert neural_collapse(torch.zeros(6, 4), torch.arange(6) % 3, torch.randn(3, 4)).nc4 == 1.0


def test_a_classifier_that_is_not_finite_gives_nan():
    features, labels, weight = make_samples(100, 7, 4)
    weight[1, 2] = math.nan
    result = neural_collapse(features, labels, weight)
    assert math.isnan(result.nc3) and math.isnan(result.nc4)
    assert result.nc1 == neural_collapse(features, labels).nc1


def test_without_classifier_nc3_and_nc4_are_none():
    features, labels, _ = make_samples(100, 7, 4)
    result = neural_collapse(features, labels)
    assert (result.nc3, result.nc3_centered, result.nc4) == (None, None, None)


# --- Edge cases


def test_empty_classes_are_dropped():
    features, labels, weight = make_samples(500, 63, 4, dtype=torch.float64)
    expected = neural_collapse(features, labels, weight)
    spread = torch.tensor([1, 3, 4, 8])
    larger = torch.full((10, 63), 100.0, dtype=torch.float64)  # rows that would win every argmax
    larger[spread] = weight
    result = neural_collapse(features, spread[labels], larger)
    assert_close(result, expected, fields=(*KEPT_FIELDS, "nc4"))
    assert result.num_classes == 4
    assert neural_collapse(features, spread[labels], num_classes=20).num_classes == 4


def test_classes_of_one_sample():
    features, labels, _ = make_samples(100, 63, 4, dtype=torch.float64)
    features = torch.cat([features, torch.randn(3, 63, dtype=torch.float64)])
    labels = torch.cat([labels, torch.tensor([4, 5, 6])])
    assert neural_collapse(features, labels).nc1 == pytest.approx(naive(features, labels)[0], rel=EXACT_RTOL)
    only = neural_collapse(features[:4], torch.arange(4))
    assert only.nc1 == pytest.approx(0, abs=EXACT_RTOL)
    assert only.rank == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_duplicate_means_lower_the_rank(dtype, offset):
    features, labels, _ = make_samples(400, 63, 5, offset=offset, dtype=dtype)
    order = torch.randperm(int((labels == 4).sum()), generator=torch.Generator().manual_seed(0))
    features = torch.cat([features, features[labels == 4][order]])
    labels = torch.cat([labels, torch.full_like(order, 5)])
    expected, rank = naive(features, labels)
    result = neural_collapse(features, labels)
    assert result.rank == rank == 4
    assert result.nc1 == pytest.approx(expected, rel=EXACT_RTOL)


def test_dependent_means_lower_the_rank():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(8, 3, generator=generator, dtype=torch.float64) @ torch.randn(
        3, 63, generator=generator, dtype=torch.float64
    )
    labels = torch.arange(80) % 8
    noise = torch.randn(80, 63, generator=generator, dtype=torch.float64)
    noise -= class_means(noise, labels)[labels]
    features = means[labels] + noise
    expected, rank = naive(features, labels)
    result = neural_collapse(features, labels)
    assert result.rank == rank == 3
    assert result.nc1 == pytest.approx(expected, rel=EXACT_RTOL)


def test_rank_stays_below_the_number_of_classes(monkeypatch):
    monkeypatch.setattr(MODULE, "_RANK_FACTOR", 0.0)  # nothing counts as rounding
    for center in ("class-means", "samples"):
        features, labels = imbalanced(*make_samples(777, 63, 10, offset=10.0)[:2])
        assert neural_collapse(features, labels, rtol=0.0, center=center).rank == 9


def test_one_class_has_no_nc1():
    features, _, weight = make_samples(50, 7, 2)
    result = neural_collapse(features, torch.zeros(50, dtype=torch.int64), weight)
    assert (result.rank, result.num_classes, result.nc4) == (0, 1, 1.0)
    for value in (result.nc1, result.condition, result.nc2, result.nc2_paper, result.nc2_centered, result.nc3_centered):
        assert math.isnan(value)
    assert 0 <= result.nc3 <= 2


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_coinciding_means_have_no_nc1(dtype, streaming):
    labels = torch.arange(3000) % 3
    constant = torch.full((3000, 7), 0.1, dtype=dtype)
    mirrored = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.1
    for features in (constant, mirrored.repeat_interleave(3, 0)):
        metric = NeuralCollapse(3, torch.eye(3, 7), streaming=streaming, num_features=7)
        metric.update(features, labels)
        result = metric.compute()
        assert result.rank == 0
        assert all(math.isnan(x) for x in (result.nc1, result.condition, result.nc2_centered, result.nc3_centered))
        assert math.isfinite(result.nc2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0], [5, 17, 200], [776]])
def test_rows_that_are_not_finite_are_left_out(rows, dtype, bad):
    features, labels, weight = make_samples(777, 63, 10, dtype=dtype)
    keep = torch.ones(777, dtype=torch.bool)
    keep[rows] = False
    expected = neural_collapse(features[keep], labels[keep], weight)
    features[rows, 3] = bad
    result = neural_collapse(features, labels, weight)
    assert result.excluded == len(rows)
    assert_close(result, expected, fields=(*KEPT_FIELDS, "nc4"))


def test_opposite_infinities_are_left_out():
    features, labels, _ = make_samples(100, 7, 4)
    features[4], features[8] = math.inf, -math.inf
    result = neural_collapse(features, labels)
    assert result.excluded == 2
    assert math.isfinite(result.nc1)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_class_or_everything_not_finite(streaming):
    features, labels, weight = make_samples(100, 7, 4)
    features[labels == 2] = math.nan
    for count, expected_classes in ((int((labels == 2).sum()), 3), (100, 0)):
        metric = NeuralCollapse(4, weight, streaming=streaming)
        metric.update(features, labels)
        result = metric.compute()
        assert (result.excluded, result.num_classes) == (count, expected_classes)
        assert math.isnan(result.nc1) == math.isnan(result.nc3) == (expected_classes == 0)
        features[:] = math.nan
    assert result.rank == 0
    assert result.nc4 is None if streaming else math.isnan(result.nc4)


@pytest.mark.filterwarnings("ignore:NC1 = 0")
def test_default_rtol_follows_the_dtype():
    def three_means(ratio, dtype):
        means = torch.zeros(3, 4, dtype=torch.float64)
        means[0, 0], means[1, 0], means[2, 1] = 1.0, -1.0, ratio
        labels = torch.arange(300) % 3
        return means[labels].to(dtype), labels

    for ratio, dtype, rank in [
        (1e-4, torch.float32, 2),
        (2e-5, torch.bfloat16, 2),
        (1e-6, torch.float32, 1),
        (1e-6, torch.float16, 1),
        (1e-6, torch.float64, 2),
        (1e-13, torch.float64, 2),
        (1e-16, torch.float64, 1),
    ]:
        assert neural_collapse(*three_means(ratio, dtype), rtol=None).rank == rank, (ratio, dtype)


def test_rtol_decides_for_near_degenerate_means():
    features, labels, _ = make_samples(400, 63, 5, noise=0.0, dtype=torch.float64)
    features[labels == 4] = features[labels == 3] + 1e-5
    noise = 1e-3 * torch.randn(400, 63, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features += noise - class_means(noise, labels)[labels]
    loose, tight = neural_collapse(features, labels, rtol=1e-4), neural_collapse(features, labels, rtol=1e-7)
    assert (loose.rank, tight.rank) == (3, 4)
    assert loose.condition > 1e-4 > tight.condition > 1e-7
    assert tight.nc1 > 100 * loose.nc1
    assert loose.nc1 == pytest.approx(naive(features, labels, pinv_rtol=1e-8)[0], rel=EXACT_RTOL)
    assert tight.nc1 == pytest.approx(naive(features, labels, pinv_rtol=1e-14)[0], rel=COLLAPSED_RTOL)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_half_precision_below_its_resolution_warns(dtype, noise, streaming):
    features, labels, _ = make_samples(500, 63, 10, noise=noise)
    metric = NeuralCollapse(10, streaming=streaming, num_features=63)
    metric.update(features.to(dtype), labels)
    with pytest.warns(UserWarning, match="half-precision features resolve"):
        metric.compute()
    metric.reset()
    metric.update(features, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.compute()


def test_warning_points_at_the_caller():
    features, labels, _ = make_samples(500, 63, 10, noise=1e-3, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="NC1") as record:
        neural_collapse(features, labels)
    assert [Path(warning.filename).name for warning in record] == [Path(__file__).name]


# --- What the call leaves alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_not_written_and_no_gradient_is_recorded(dtype):
    features, labels, weight = (x.clone() for x in make_samples(100, 7, 4, dtype=dtype))
    before = features.clone()
    result = neural_collapse(features.requires_grad_(), labels, weight.requires_grad_())
    assert torch.equal(features.detach(), before)
    assert features.grad_fn is None and isinstance(result.nc1, float)


def test_autocast_and_matmul_precision_have_no_say():
    features, labels, weight = make_samples(500, 63, 10, noise=1e-4)
    expected = neural_collapse(features, labels, weight)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert neural_collapse(features, labels, weight) == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_result_is_plain_and_frozen():
    features, labels, weight = make_samples(100, 7, 4)
    result = neural_collapse(features, labels, weight)
    fields = dataclasses.asdict(result)
    assert NCResult(**json.loads(json.dumps(fields))) == result
    assert {name for name, value in fields.items() if type(value) is int} == {"rank", "num_classes", "excluded"}
    assert all(type(value) in (int, float) for value in fields.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.nc1 = 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_label_dtypes(dtype):
    features, labels, weight = make_samples(100, 7, 4)
    assert neural_collapse(features, labels.to(dtype), weight) == neural_collapse(features, labels, weight)


# --- Bad arguments

GOOD = {"features": torch.ones(6, 4), "labels": torch.arange(6) % 3}
BAD = [
    ({"features": [[1.0]]}, TypeError, r"features is a list; .*float16, bfloat16, float32, float64"),
    ({"features": torch.ones(6, 4, dtype=torch.int64)}, TypeError, r"features has dtype torch\.int64"),
    ({"features": torch.ones(6, 4, 2, 2)}, ValueError, r"features has shape \(6, 4, 2, 2\).*flatten or pool"),
    ({"features": torch.ones(6)}, ValueError, r"features has shape \(6,\)"),
    ({"features": torch.ones(6, 0)}, ValueError, r"features has shape \(6, 0\)"),
    ({"features": torch.ones(0, 4), "labels": torch.arange(0)}, ValueError, r"features has no rows .*\(0, 4\)"),
    ({"labels": [0, 1, 2, 0, 1, 2]}, TypeError, r"labels is a list; .*int64"),
    ({"labels": torch.ones(6)}, TypeError, r"labels has dtype torch\.float32"),
    ({"labels": torch.ones(6, dtype=torch.bool)}, TypeError, r"labels has dtype torch\.bool"),
    ({"labels": torch.arange(5)}, ValueError, r"labels has shape \(5,\); it must be \(6,\)"),
    ({"labels": torch.zeros(6, 1, dtype=torch.int64)}, ValueError, r"labels has shape \(6, 1\)"),
    ({"labels": torch.tensor([0, 1, 2, 0, 1, -1])}, ValueError, r"labels holds -1; .*\[0, 3\)"),
    ({"num_classes": 2}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({"classifier_weight": torch.ones(2, 4)}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({"num_classes": 0}, ValueError, r"num_classes is 0; it must be at least 1"),
    ({"num_classes": 3.0}, TypeError, r"num_classes is 3\.0, a float; it must be an int"),
    ({"num_classes": True}, TypeError, r"num_classes is True, a bool"),
    ({"classifier_weight": nn.Linear(4, 3)}, TypeError, r"classifier_weight is a Linear"),
    ({"classifier_weight": torch.ones(3, 4).int()}, TypeError, r"classifier_weight has dtype torch\.int32"),
    ({"classifier_weight": torch.ones(3, 5)}, ValueError, r"classifier_weight has shape \(3, 5\).*\(num_classes, 4\)"),
    ({"classifier_weight": torch.ones(4)}, ValueError, r"classifier_weight has shape \(4,\)"),
    ({"classifier_weight": torch.ones(0, 4)}, ValueError, r"classifier_weight has shape \(0, 4\)"),
    ({"classifier_weight": torch.ones(3, 4), "num_classes": 5}, ValueError, r"shape \(3, 4\); it must be \(5, 4\)"),
    ({"rtol": -1e-3}, ValueError, r"rtol is -0\.001; it must be in \[0, 1\)"),
    ({"rtol": 1.0}, ValueError, r"rtol is 1\.0"),
    ({"rtol": math.nan}, ValueError, r"rtol is nan"),
    ({"rtol": "auto"}, TypeError, r"rtol is 'auto', a str"),
    ({"center": "mean"}, ValueError, r"center is 'mean'; .*'class-means', 'samples'"),
    ({"labels": torch.zeros(6, dtype=torch.int64, device="meta")}, ValueError, r"labels is on meta; it must be on cpu"),
    ({"classifier_weight": torch.ones(3, 4, device="meta")}, ValueError, r"classifier_weight is on meta; .*cpu"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(arguments, error, message):
    neural_collapse(**GOOD)
    with pytest.raises(error, match=message):
        neural_collapse(**{**GOOD, **arguments})


def test_overflowing_sums_are_an_error():
    features = torch.full((6, 4), 1.7e308, dtype=torch.float64)
    features[0] *= -1
    with pytest.raises(ValueError, match="features holds values whose sums overflow float64"):
        neural_collapse(features, GOOD["labels"])


# --- The metric


def in_pieces(metric, features, labels, sizes=(1, 63, 200)):
    for size in sizes:
        metric.update(features[:size], labels[:size])
        features, labels = features[size:], labels[size:]
    metric.update(features, labels)
    return metric


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_metric_in_pieces_equals_the_function(dtype, device):
    features, labels, weight = (x.to(device) for x in make_samples(777, 63, 10, dtype=dtype))
    expected = neural_collapse(features, labels, weight)
    assert in_pieces(NeuralCollapse(10, weight).to(device), features, labels).compute() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("center", ["class-means", "samples"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(), (1, 63, 200), (0, 5, 0), (1,) * 50])
def test_streaming_equals_the_function(sizes, dtype, center, device):
    features, labels, weight = (x.to(device) for x in make_samples(777, 63, 10, offset=1.0, dtype=dtype))
    features[3, 4] = math.nan
    expected = neural_collapse(features, labels, weight, center=center)
    metric = NeuralCollapse(10, weight, center=center, streaming=True).to(device)
    result = in_pieces(metric, features, labels, sizes).compute()
    assert_close(result, expected)
    assert (result.excluded, result.nc4) == (1, None)


def test_streaming_drops_empty_classes_and_keeps_rtol():
    features, labels, weight = make_samples(400, 63, 5, noise=0.0)
    features[labels == 4] = features[labels == 3] + 1e-4
    metric = NeuralCollapse(9, torch.cat([torch.ones(2, 63), weight, torch.ones(2, 63)]), streaming=True)
    metric.update(features, labels + 2)
    assert_close(metric.compute(), neural_collapse(features, labels, weight))
    assert (metric.compute().rank, metric.compute().num_classes) == (4, 5)
    metric.rtol = 1e-3
    assert metric.compute().rank == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_reset_forgets(streaming):
    features, labels, weight = make_samples(777, 63, 10)
    metric = NeuralCollapse(10, weight, streaming=streaming)
    metric.update(torch.full((5, 63), math.nan), torch.arange(5))
    metric.update(100 * features, labels)
    metric.reset()
    metric.update(features, labels)
    assert_close(metric.compute(), neural_collapse(features, labels, weight), fields=(*KEPT_FIELDS, "excluded"))


@pytest.mark.parametrize("streaming", [False, True])
def test_forward_gives_the_batch_and_accumulates(streaming):
    features, labels, weight = make_samples(777, 63, 10)
    metric = NeuralCollapse(10, weight, streaming=streaming)
    for part in (slice(0, 300), slice(300, 500), slice(500, 777)):
        assert_close(metric(features[part], labels[part]), neural_collapse(features[part], labels[part], weight))
    assert_close(metric.compute(), neural_collapse(features, labels, weight))


@pytest.mark.parametrize("streaming", [False, True])
def test_merge_state(streaming):
    features, labels, weight = make_samples(777, 63, 10, offset=1.0)
    first, second = (NeuralCollapse(10, weight, streaming=streaming) for _ in range(2))
    first.update(features[:100], labels[:100])
    second.update(features[100:], labels[100:])
    first.merge_state(second)
    assert_close(first.compute(), neural_collapse(features, labels, weight))


@pytest.mark.parametrize("streaming", [False, True])
def test_classifier_is_read_when_computing(streaming):
    features, labels, weight = make_samples(777, 63, 10)
    classifier = nn.Linear(63, 10)
    metric = NeuralCollapse(10, classifier, streaming=streaming)
    metric.update(features, labels)
    before = metric.compute().nc3
    with torch.no_grad():
        classifier.weight.copy_(weight)
    expected = neural_collapse(features, labels, weight).nc3
    assert before != metric.compute().nc3 == pytest.approx(expected, rel=EXACT_RTOL)
    metric.classifier_weight = None
    assert metric.compute().nc3 is None
    metric.classifier_weight = nn.Parameter(weight)
    assert metric.compute().nc3 == pytest.approx(expected, rel=EXACT_RTOL)
    assert not list(metric.parameters()) and not list(metric.children()) and not metric.state_dict()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone()])
def test_copies_and_pickles(duplicate, streaming):
    features, labels, weight = make_samples(777, 63, 10)
    classifier = nn.Linear(63, 10, bias=False)
    with torch.no_grad():
        classifier.weight.copy_(weight)
    metric = NeuralCollapse(10, classifier, streaming=streaming)
    metric.update(features[:500], labels[:500])
    twin = duplicate(metric)
    twin.update(features[500:], labels[500:])
    assert_close(twin.compute(), neural_collapse(features, labels, weight))
    assert_close(metric.compute(), neural_collapse(features[:500], labels[:500], weight))


def test_batches_are_copied():
    features, labels, _ = make_samples(200, 7, 4)
    metric, buffer, label_buffer = NeuralCollapse(4), torch.empty(100, 7), torch.empty(100, dtype=torch.int64)
    for part in (slice(0, 100), slice(100, 200)):
        buffer.copy_(features[part])
        label_buffer.copy_(labels[part])
        metric.update(buffer, label_buffer)
    assert metric.compute() == neural_collapse(features, labels, num_classes=4)


@pytest.mark.parametrize("streaming", [False, True])
def test_inference_mode_and_gradients(streaming):
    features, labels, weight = make_samples(777, 63, 10)
    metric = NeuralCollapse(10, weight, streaming=streaming)
    with torch.inference_mode():
        metric.update(features[:300].clone(), labels[:300])
    metric.update(features[300:].requires_grad_(), labels[300:])
    assert_close(metric.compute(), neural_collapse(features, labels, weight))


def test_metric_collection():
    features, labels, weight = make_samples(777, 63, 10)
    both = MetricCollection({"list": NeuralCollapse(10, weight), "stream": NeuralCollapse(10, weight, streaming=True)})
    both.update(features, labels)
    expected = neural_collapse(features, labels, weight)
    for result in both.compute().values():
        assert_close(result, expected)


def test_streaming_limit():
    NeuralCollapse(2, streaming=True, num_features=MODULE.MAX_STREAMING_FEATURES)
    with pytest.raises(ValueError, match=r"num_features is 1025; .*at most 1024: use streaming=False"):
        NeuralCollapse(2, streaming=True, num_features=MODULE.MAX_STREAMING_FEATURES + 1)
    with pytest.raises(ValueError, match="num_features is None; streaming=True needs it"):
        NeuralCollapse(2, streaming=True)


BAD_METRICS = [
    ({"num_classes": 0}, ValueError, r"num_classes is 0"),
    ({"num_classes": "ten"}, TypeError, r"num_classes is 'ten', a str"),
    ({"num_features": -1}, ValueError, r"num_features is -1"),
    ({"num_features": 2.0}, TypeError, r"num_features is 2\.0, a float"),
    ({"rtol": 2.0}, ValueError, r"rtol is 2\.0"),
    ({"center": None}, ValueError, r"center is None"),
    ({"classifier_weight": nn.ReLU()}, TypeError, r"classifier_weight is a ReLU; give a tensor, a module"),
    ({"classifier_weight": torch.ones(2, 7)}, ValueError, r"shape \(2, 7\); it must be \(3, D\)"),
    ({"classifier_weight": nn.Linear(7, 3), "num_features": 8}, ValueError, r"shape \(3, 7\); it must be \(3, 8\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_METRICS)
def test_bad_metric_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        NeuralCollapse(**{"num_classes": 3, **arguments})


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_updates(streaming):
    metric = NeuralCollapse(3, streaming=streaming, num_features=7)
    with pytest.raises(ValueError, match="the metric has no samples; call update"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of compute before update as well
        metric.compute()
    with pytest.raises(ValueError, match=r"features has shape \(4, 8\); it must be \(N, 7\)"):
        metric.update(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels has shape \(3,\); it must be \(4,\)"):
        metric.update(torch.ones(4, 7), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"features has dtype torch\.int64"):
        metric.update(torch.ones(4, 7).long(), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels holds 3; every label must be in \[0, 3\)"):
        metric.update(torch.ones(4, 7), torch.arange(4))
        metric.compute()


def test_batches_of_different_width():
    metric = NeuralCollapse(3)
    metric.update(torch.ones(3, 7), torch.arange(3))
    with pytest.raises(ValueError, match=r"features has shape \(3, 8\); it must be \(N, 7\)"):
        metric.update(torch.ones(3, 8), torch.arange(3))


def test_streaming_names_a_device_mismatch():
    metric = NeuralCollapse(3, streaming=True, num_features=7).to("meta")
    with pytest.raises(ValueError, match="features is on cpu; it must be on meta"):
        metric.update(torch.ones(3, 7), torch.arange(3))


# --- Several processes. The workers run this file as a script.

WORLD_SIZE = 2
SHARES = {"uneven": (slice(0, 600), slice(600, 777)), "second without samples": (slice(0, 777), slice(0, 0))}


def distributed_samples():
    features, labels, weight = make_samples(777, 63, 10, offset=1.0)
    features[[5, 700]] = math.nan
    return features, labels, weight


def distributed_results(rank):
    """Every scenario on one of the processes: the result, and the result after more samples and a second sync."""
    features, labels, weight = distributed_samples()
    results = {}
    for name, shares in SHARES.items():
        for streaming in (False, True):
            metric = NeuralCollapse(10, weight, streaming=streaming)
            mine = features[shares[rank]], labels[shares[rank]]
            if len(mine[0]):
                in_pieces(metric, *mine, sizes=(40, 41))
            first = metric.compute()
            metric.update(features[:50] + rank, labels[:50])
            results[f"{name}, streaming={streaming}"] = [
                dataclasses.asdict(first),
                dataclasses.asdict(metric.compute()),
            ]
    return results


def worker(rank, rendezvous, output):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    results = distributed_results(rank)
    torch.distributed.destroy_process_group()
    Path(output).write_text(json.dumps(results))


@pytest.fixture(scope="module")
def from_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    outputs = [folder / f"rank{rank}.json" for rank in range(WORLD_SIZE)]
    path = os.pathsep.join([str(Path(deqfast.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "rendezvous"), str(output)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        errors = [process.communicate(timeout=DISTRIBUTED_TIMEOUT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [json.loads(output.read_text()) for output in outputs]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", SHARES)
def test_two_processes_equal_one(from_two_processes, name, streaming):
    features, labels, weight = distributed_samples()
    more = torch.cat([features, features[:50], features[:50] + 1])
    more_labels = torch.cat([labels, labels[:50], labels[:50]])
    first, second = (results[f"{name}, streaming={streaming}"] for results in from_two_processes)
    assert first == second
    expected = [neural_collapse(features, labels, weight), neural_collapse(more, more_labels, weight)]
    for result, one in zip(first, expected, strict=True):
        result = NCResult(**result)
        assert_close(result, one, fields=(*KEPT_FIELDS, "excluded"))
        assert result.nc4 is None if streaming else result.nc4 == pytest.approx(one.nc4, rel=EXACT_RTOL)


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:])
