"""NC1-NC4 against their definitions, D x D matrices in float64."""

import math
from contextlib import nullcontext

import pytest
import torch
from collapse_samples import (
    EXACT_RTOL,
    KEPT_FIELDS,
    assert_metrics_close,
    class_means,
    every_device,
    imbalanced,
    make_samples,
    naive,
    naive_simplex,
    rtol_on,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from deqfast import NeuralCollapse, neural_collapse
from deqfast.metrics.statistics import ClassMeans, between_classes, svd_device
from deqfast.ops.collapse import reference


@every_device
@pytest.mark.parametrize("center", ["class-means", "samples"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "classes"), [(256, 64, 4), (777, 63, 10), (600, 256, 100), (500, 7, 20), (63, 1, 3)]
)
@pytest.mark.parametrize("balanced", [True, False])
def test_nc1_agrees_with_pseudo_inverse(rows, columns, classes, balanced, dtype, center, device):
    features, labels, _ = make_samples(rows, columns, classes, dtype=dtype)
    if not balanced:
        features, labels = imbalanced(features, labels)
    expected, rank = naive(features, labels, center)
    result = neural_collapse(features.to(device), labels.to(device), center=center)
    assert result.nc1 == pytest.approx(expected, rel=rtol_on(device, dtype))
    assert result.rank == rank == min(classes - 1, columns)


def test_blocks_do_not_change_the_result(monkeypatch):
    features, labels, weight = make_samples(777, 63, 10)
    expected = neural_collapse(features, labels, weight, kernel="torch")
    for rows in (1, 10, 776, 777, 10_000):
        monkeypatch.setattr(reference, "_MIN_BLOCK_ROWS", rows)
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", {"cpu": 1})
        assert_metrics_close(
            neural_collapse(features, labels, weight, kernel="torch"), expected, fields=(*KEPT_FIELDS, "nc4")
        )


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


@every_device
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
    # With weights of zero the classifier says 0; the samples nearest to the mean of class 0 agree.
    nearest = torch.cdist(features, class_means(features, labels)).argmin(1)
    nc4 = neural_collapse(features, labels, torch.zeros(3, 2)).nc4
    assert nc4 == pytest.approx((nearest == 0).double().mean().item(), rel=EXACT_RTOL)
    assert neural_collapse(torch.zeros(6, 4), torch.arange(6) % 3, torch.randn(3, 4)).nc4 == 1.0  # ties in both rules


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_are_not_finite_and_classes_without_samples_are_left_out(dtype, bad):
    features, labels, weight = make_samples(777, 63, 4, dtype=dtype)
    kept = torch.ones(777, dtype=torch.bool)
    kept[[0, 5, 17, 200, 776]] = False
    expected = neural_collapse(features[kept], labels[kept], weight)
    features[~kept, 3] = bad
    spread = torch.tensor([1, 3, 4, 8])
    larger = torch.full((10, 63), 100.0, dtype=dtype)  # rows that would win every argmax
    larger[spread] = weight
    result = neural_collapse(features, spread[labels], larger)
    assert_metrics_close(result, expected, fields=(*KEPT_FIELDS, "nc4"))
    assert (result.excluded, result.num_classes) == (5, 4)
    assert neural_collapse(features, spread[labels], num_classes=20).num_classes == 4


@pytest.mark.parametrize(
    ("ratio", "dtype", "rank"),
    [
        (1e-4, torch.float32, 2),
        (2e-5, torch.bfloat16, 2),
        (1e-6, torch.float32, 1),
        (1e-6, torch.float16, 1),
        (1e-13, torch.float64, 2),
        (1e-16, torch.float64, 1),
    ],
)
def test_default_rtol_and_the_warning_follow_the_coarsest_dtype(ratio, dtype, rank):
    means, labels = torch.zeros(3, 4, dtype=torch.float64), torch.arange(300) % 3
    means[0, 0], means[1, 0], means[2, 1] = 1.0, -1.0, ratio
    features, is_short = means[labels], dtype in (torch.bfloat16, torch.float16)
    metric, other = (NeuralCollapse(3, num_features=4, streaming=True) for _ in range(2))
    metric.update(features.to(dtype), labels)
    metric.update(features, labels)
    other.update(features, labels)
    metric.merge_state(other)
    for compute in (lambda: neural_collapse(features.to(dtype), labels, rtol=None), metric.compute):
        with pytest.warns(UserWarning, match="below what half") if is_short else nullcontext():
            assert compute().rank == rank


def numbers_of(result):
    leaves = pytree.tree_leaves(result)
    return [float(leaf) for leaf in leaves if isinstance(leaf, (int, float))]


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
@pytest.mark.parametrize("convention", ["sun", "papyan", "zhu", "kothapalli"])
@pytest.mark.parametrize(
    ("size", "length"), [(1e160, 1), (1e300, 1), (1e-160, 1), (1e-290, 1), (1, 1e200), (1, 1e-200), (1e120, 1e170)]
)
def test_no_square_of_a_float64_overflows_or_underflows(size, length, convention, kernel):
    """No metric but the norm of the logits depends on these factors, and the bias has both."""
    features, labels, weight = make_samples(200, 12, 5, dtype=torch.float64)
    bias, factor = torch.randn(5, dtype=torch.float64), size * length
    options = {"convention": convention, "kernel": kernel, "geometry": True, "per_class": True}
    expected = neural_collapse(features, labels, weight, classifier_bias=bias, **options)
    result = neural_collapse(features * size, labels, weight * length, classifier_bias=bias * factor, **options)
    if convention == "zhu":
        result = result._replace(nc4=result.nc4 / factor)
    torch.testing.assert_close(numbers_of(result), numbers_of(expected), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_streaming_refuses_squares_that_overflow():
    metric = NeuralCollapse(2, streaming=True, num_features=3)
    with pytest.raises(ValueError, match="squares overflow float64"):
        metric.update(1e200 * torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2)


def test_small_matrices_are_decomposed_on_the_host():
    """What comes back is on the GPU."""
    gpu, host = torch.device("cuda"), torch.device("cpu")
    for shape, place in (((10, 512), host), ((512, 10), host), ((100, 2048), gpu), ((100, 512), gpu)):
        assert svd_device(torch.Size(shape), gpu) == place and svd_device(torch.Size(shape), host) == host
        with FakeTensorMode():
            counts = torch.ones(shape[0], dtype=torch.float64, device=gpu)
            local = torch.ones(shape, dtype=torch.float64, device=gpu)
            between = between_classes(ClassMeans(counts, local, local[0]), "class-means", 0.0)
            assert all(part.device.type == "cuda" for part in between)
            assert between.whitening.shape == (shape[1], min(shape[0] - 1, shape[1]))
