"""Samples around class means, and the definitions of the metrics with D x D matrices in float64."""

import math

import pytest
import torch
from correctness import rounding
from torch.utils import _pytree as pytree

EXACT_RTOL = rounding(torch.float64, 5000)  # well conditioned sums of at most this number of terms
GPU_RTOL = rounding(torch.float32)  # there sums of features that are shorter than float64 are in float32
ROUNDING = rounding(torch.float64) ** 0.5  # distances that would be zero without rounding: roots of differences
PINV_RTOL = 1e-12  # eigenvalues of Sigma_B below this share of the largest are zero in the reference

KEPT_FIELDS = ("nc1", "rank", "condition", "nc2", "nc2_paper", "nc2_centered", "nc3", "nc3_centered", "num_classes")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


def rtol_on(device, dtype):
    return GPU_RTOL if device == "cuda" and dtype != torch.float64 else EXACT_RTOL


def assert_alike(result, expected):
    """Equal results, up to the order of the sums in a library's products."""
    for ours, theirs in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
        is_number = isinstance(theirs, float)
        assert ours == (pytest.approx(theirs, rel=EXACT_RTOL, abs=EXACT_RTOL, nan_ok=True) if is_number else theirs)


def make_samples(rows, columns, classes, noise=0.3, offset=0.0, dtype=torch.float32, seed=0):
    """Features around random class means and labels in random order; every class occurs if there are enough rows."""
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


def awkward(dtype=torch.float64):
    """Imbalanced classes, the fourth without samples, a row that is not finite, and a classifier with a bias."""
    features, labels, weight = make_samples(400, 20, 6, offset=1.0, dtype=dtype)
    features, labels = imbalanced(features, labels)
    features[7, 3] = math.nan
    weight = torch.cat([weight[:3], weight[:1] + 1, weight[3:]])  # the row of no samples would win most decisions
    return features, labels + (labels > 2), weight, torch.linspace(-1, 1, 7, dtype=torch.float64)


def class_means(features, labels):
    return torch.stack([features[labels == k].mean(0) for k in labels.unique()])


def naive(features, labels, center="class-means"):
    """NC1 and the rank of Sigma_B as the paper defines them, D x D pseudo-inverse in float64."""
    features, labels = features.double().cpu(), labels.cpu()
    means = class_means(features, labels)
    deviations = features - means[torch.unique(labels, return_inverse=True)[1]]
    between = means - (means.mean(0) if center == "class-means" else features.mean(0))
    sigma_w = deviations.T @ deviations / len(features)
    sigma_b = between.T @ between / len(means)
    nc1 = torch.trace(sigma_w @ torch.linalg.pinv(sigma_b, hermitian=True, rtol=PINV_RTOL)) / len(means)
    return nc1.item(), int(torch.linalg.matrix_rank(sigma_b, hermitian=True, rtol=PINV_RTOL))


def naive_simplex(means, scale):
    gram = means @ means.T
    classes = len(means)
    target = scale * (torch.eye(classes, dtype=means.dtype) - torch.ones(classes, classes, dtype=means.dtype) / classes)
    return (gram / gram.norm() - target).norm().item()


def simplex_vertices(classes, columns):
    """Rows of a simplex equiangular tight frame in R^columns, float64."""
    identity = torch.eye(classes, columns, dtype=torch.float64)
    return math.sqrt(classes / (classes - 1)) * (identity - identity.mean(0))


def assert_metrics_close(result, expected, rtol=EXACT_RTOL, fields=KEPT_FIELDS):
    for field in fields:
        got, want = getattr(result, field), getattr(expected, field)
        assert got == pytest.approx(want, rel=rtol, abs=rtol, nan_ok=True), field
