"""Neural-collapse metrics NC1-NC4 of the features under a classifier.

Notation: N samples h_i in R^D with labels y_i in K classes; class means mu_k; H-bar the (D, K) matrix of class means.

    Sigma_W = (1/N) sum_i (h_i - mu_{y_i})(h_i - mu_{y_i})^T        Sigma_B = (1/K) sum_k (mu_k - c)(mu_k - c)^T
    NC1 = tr(Sigma_W Sigma_B^+) / K
    NC2 = || H-bar^T H-bar / ||H-bar^T H-bar||_F - a (I - 11^T / K) ||_F
    NC3 = || W / ||W||_F - H-bar^T / ||H-bar||_F ||_F
    NC4 = share of the samples on which argmax_k (W h)_k is the class of the nearest mean

Sigma_B has rank K - 1 at most, so no D x D matrix is formed. With the thin SVD R diag(s) V^T of the centred class means
(D, K), NC1 = (1/N) sum_j sum_i (R_j / s_j . (h_i - mu_{y_i}))^2 over the singular values kept. Two passes read the
features, the ops ``class_means`` and ``within_class_scatter`` of ``deqfast.ops``. The first sums over each class. The
second projects the deviations from the class means, which are formed before any product. Labels are sorted once, and
sums follow the order of the rows within a class: the same inputs give the same bits.

Source: Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import choose_kernel
from .checks import check_features, check_label_range, check_labels, check_options, checked_weight
from .geometry import ClassGeometry, class_geometry
from .statistics import (
    Between,
    ClassMeans,
    Samples,
    between_classes,
    class_means,
    default_rtol,
    drop_empty_classes,
    nearest_mean_agreement,
    within_class_traces,
)

NC1_RESOLUTION = {torch.bfloat16: 1e-5, torch.float16: 1e-7}  # below it NC1 measures the rounding of the features


class NCResult(NamedTuple):
    """Neural-collapse metrics as Python numbers.

    Source: Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A; NC4 is defined there and not measured.

    Attributes:
        nc1: tr(Sigma_W Sigma_B^+) / K. NaN when the class means coincide or there is one class (``rank`` is 0 then).
        rank: numerical rank of Sigma_B: singular values of the centred class means that were kept.
        condition: smallest kept singular value over the largest; NaN when ``rank`` is 0.
        nc2: distance of the normalised Gram matrix of the class means from the simplex, target of unit norm
            (a = 1/sqrt(K - 1)), class means not centred. NaN with one class, or when all class means are zero.
        nc2_paper: the same with a = 1/(K - 1) as the paper prints it; never below 1 - 1/sqrt(K - 1).
        nc2_centered: ``nc2`` of the centred class means; NaN when ``rank`` is 0, as is ``nc3_centered``.
        nc3: distance of the normalised classifier from the normalised class means; None without a classifier.
        nc3_centered: ``nc3`` of the centred class means (the classifier is taken as it is); None without a classifier.
        nc4: share of the samples on which the classifier (no bias) agrees with the nearest class mean; None without a
            classifier, and when the samples were not kept (``streaming=True``).
        num_classes: K, the number of classes with at least one sample kept.
        excluded: rows left out because a feature was not finite.
        geometry: how near class means and classifier are to what the class sizes predict, see
            ``metrics.class_geometry``; None unless it was asked for, and without a finite row. ``cdnv`` is None when
            the samples were not kept.
    """

    nc1: float
    rank: int
    condition: float
    nc2: float
    nc2_paper: float
    nc2_centered: float
    nc3: float | None
    nc3_centered: float | None
    nc4: float | None
    num_classes: int
    excluded: int
    geometry: ClassGeometry | None = None


@torch.no_grad()
def neural_collapse(
    features: Tensor,
    labels: Tensor,
    classifier_weight: Tensor | None = None,
    num_classes: int | None = None,
    rtol: float | None = None,
    center: str = "class-means",
    kernel: str = "auto",
    geometry: bool = False,
) -> NCResult:
    """Measure NC1-NC4 of ``features`` (Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A).

    Classes without samples are dropped, with their rows of ``classifier_weight``: K is the number of classes seen, and
    both rules that NC4 compares choose among these. Ties go to the lowest index. Rows with a non-finite feature are
    left out and counted. No gradient is recorded.

    The kernels cpp and torch compute in float64 for every dtype of the features, triton and cuda for float64 features.
    For other dtypes, triton and cuda form differences, sums of up to 256 rows and projections in float32; all else is
    float64. NC1 then has a relative error below 1e-5, even if it is tiny or the features share a large offset.

    Args:
        features: (N, D), float16, bfloat16, float32 or float64, N and D at least 1, any strides, CPU or CUDA.
        labels: (N,), uint8 or a signed integer dtype, values in [0, num_classes), on the device of ``features``.
        classifier_weight: (num_classes, D), a dtype and the device as above. Without it NC3 and NC4 are None.
        num_classes: number of classes; None takes the rows of ``classifier_weight``, else the largest label plus one.
        rtol: singular values of the centred class means up to ``rtol`` times the largest count as 0, in [0, 0.99]. For
            means that nearly coincide it decides the answer: see ``rank`` and ``condition``. None is 16 eps of the
            dtype of ``features``; of float32 for float16 and bfloat16, whose roundings average out in the means.
            Singular values within the float64 rounding of the means are never kept.
        center: "class-means" subtracts the mean of the class means (the paper's choice), "samples" the mean over all
            samples; the two differ when classes are imbalanced.
        kernel: "auto", "cpp", "triton", "cuda" or "torch", for the passes over the features; torch computes NC4.
            "auto" is cpp on the CPU; on CUDA tensors cuda, else triton. If these are not available it is torch, with a
            warning. Features whose rows have gaps between their elements are copied first.
        geometry: also measure how near class means and classifier are to what the class sizes predict. The means are
            not centred then, and torch makes one more pass over the features.

    Returns:
        NCResult. Warns when the features are float16 or bfloat16 and NC1 is below what these resolve.

    Raises:
        TypeError: an argument has another type or dtype than above.
        ValueError: a shape, device, label, ``num_classes``, ``rtol``, ``center`` or ``kernel`` is not as above, or
            features are so large that their sums overflow.
        RuntimeError: ``kernel`` is not available, or does not run on the device of ``features``.

    Examples:
        >>> means = torch.randn(10, 64)
        >>> labels = torch.arange(500) % 10
        >>> result = deqfast.neural_collapse(means[labels] + 0.1 * torch.randn(500, 64), labels, means)
        >>> result.num_classes, result.rank, result.nc4
        (10, 9, 1.0)
        >>> 0 < result.nc1 < 0.1
        True
    """
    check_features(features)
    check_labels(labels, features)
    if features.shape[0] == 0:
        raise ValueError(f"features is empty (shape {tuple(features.shape)}); at least one sample is needed")
    check_options(rtol, center, num_classes=num_classes)
    weight = checked_weight(classifier_weight, features, num_classes)
    if num_classes is None and weight is not None:
        num_classes = weight.shape[0]
    chosen = choose_kernel(kernel, features.device)
    samples = Samples.grouped(features, labels, check_label_range(labels, num_classes))

    samples, stats = class_means(samples, chosen)
    excluded = features.shape[0] - samples.count
    samples, stats, weight = drop_empty_classes(samples, stats, weight)
    if samples.num_classes == 0:
        return undefined(excluded, with_nc3=weight is not None, with_nc4=weight is not None)
    between = between_classes(stats, center, default_rtol(features.dtype) if rtol is None else rtol)
    means = stats.means
    within = chosen.op("within_class_scatter")(
        samples.features, samples.rows, samples.offsets, means, between.whitening
    )
    agreement = None if weight is None else nearest_mean_agreement(samples, means, weight)
    result = make_result(stats, between, within, weight, agreement, excluded, NC1_RESOLUTION.get(features.dtype, 0.0))
    if not geometry:
        return result
    return result._replace(geometry=class_geometry(means, stats.counts, weight, within_class_traces(samples, means)))


def make_result(
    stats: ClassMeans,
    between: Between,
    within: Tensor,
    weight: Tensor | None,
    agreement: Tensor | None,
    excluded: int,
    resolution: float,
) -> NCResult:
    """Collect the metrics and copy them to the host at once."""
    num_classes, means = len(stats.counts), _unit(stats.means)
    rank = between.kept.sum()
    smallest = torch.where(between.kept, between.singular, math.inf).amin()
    centred = _unit(torch.where(rank > 0, between.centred, math.nan))  # else it is rounding
    unit = 1 / math.sqrt(num_classes - 1) if num_classes > 1 else math.nan
    values = {
        "nc1": torch.where(rank > 0, within.sum() / stats.counts.sum(), math.nan),
        "rank": rank.to(torch.float64),
        "condition": torch.where(rank > 0, smallest / between.singular[0], math.nan),
        "nc2": _simplex_distance(means, unit),
        "nc2_paper": _simplex_distance(means, unit**2),
        "nc2_centered": _simplex_distance(centred, unit),
    }
    if weight is not None:
        values["nc3"] = torch.linalg.vector_norm(_unit(weight) - means)
        values["nc3_centered"] = torch.linalg.vector_norm(_unit(weight) - centred)
    if agreement is not None:
        values["nc4"] = agreement
    host: dict[str, Any] = dict.fromkeys(("nc3", "nc3_centered", "nc4"))
    host.update(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
    host["rank"] = int(host["rank"])
    if host["nc1"] < resolution:
        warnings.warn(
            f"NC1 = {host['nc1']:.1e} is below what half-precision features resolve (about {resolution:.0e}): it is "
            "their rounding; give float32 features",
            stacklevel=4,
        )
    return NCResult(num_classes=num_classes, excluded=excluded, **host)


def undefined(excluded: int, with_nc3: bool, with_nc4: bool) -> NCResult:
    """Result if all rows are non-finite."""
    nc3, nc4 = math.nan if with_nc3 else None, math.nan if with_nc4 else None
    nan: dict[str, Any] = dict.fromkeys(("nc1", "condition", "nc2", "nc2_paper", "nc2_centered"), math.nan)
    return NCResult(rank=0, nc3=nc3, nc3_centered=nc3, nc4=nc4, num_classes=0, excluded=excluded, **nan)


def _unit(matrix: Tensor) -> Tensor:
    """The matrix over its norm."""
    return matrix / torch.linalg.vector_norm(matrix)


def _simplex_distance(means: Tensor, scale: float) -> Tensor:
    """|| M M^T / ||M M^T||_F - scale (I - 11^T / K) ||_F for class means M (K, D) of norm 1.

    Of another norm, fourth powers of their scale could overflow or underflow.
    """
    target = torch.eye(len(means), dtype=means.dtype, device=means.device) - 1 / len(means)
    return torch.linalg.vector_norm(_unit(means @ means.T) - scale * target)
