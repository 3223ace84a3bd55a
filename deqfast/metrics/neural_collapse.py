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
"""

from __future__ import annotations

import math
import warnings
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import choose_kernel
from ..state.norms import lengths
from . import statistics
from .checks import LABEL_DTYPES, check_classifier, check_features, check_label_range, check_options, check_vector
from .conventions import VectorSpread, nc2, nc3, simplex_distance, spread
from .geometry import ClassGeometry, class_geometry, unit
from .statistics import Between, Classifier, ClassMeans, Samples

NC1_RESOLUTION = {torch.bfloat16: 1e-5, torch.float16: 1e-7}  # below it NC1 measures the rounding of the features
BIAS_ONLY = "zhu"  # its NC4 is of the bias, and needs no samples
_SPREADS = ("nc2_means", "nc2_classifier")


class NCResult(NamedTuple):
    """Neural-collapse metrics as Python numbers. ``neural_collapse`` has the formulas of each convention, and sources.

    Attributes:
        nc1: tr(Sigma_W Sigma_B^+) / K. NaN when the class means coincide or there is one class (``rank`` is 0 then).
        rank: numerical rank of Sigma_B: singular values of the centred class means that were kept.
        condition: smallest kept singular value over the largest; NaN when ``rank`` is 0.
        nc2: NC2 of the convention. NaN with one class, or when all class means are zero.
        nc2_paper: NC2 of "sun" with S = (I - 11^T / K) / (K - 1) as printed there; at least 1 - 1/sqrt(K - 1).
        nc2_centered: the NC2 of "sun" with centred class means; NaN when ``rank`` is 0, as ``nc3_centered``.
        nc3: NC3 of the convention; None without a classifier.
        nc3_centered: the NC3 of "sun" with centred class means. The classifier is not centred; None without it.
        nc4: NC4 of the convention; None without a classifier, and when streaming, except in "zhu".
        num_classes: K, the number of classes with at least one sample kept.
        excluded: rows left out because a feature was not finite.
        geometry: how near class means and classifier are to what the class sizes predict, see
            ``class_geometry``; None if not requested or no row is finite. ``cdnv`` is None when streaming.
        convention: which paper's ``nc2``, ``nc3`` and ``nc4`` these are.
        nc1_per_class: NC1 of each class by its label, tr(Sigma_k Sigma_B^+) / K with the covariance Sigma_k of class k.
            Their mean, weighted by the class sizes, is ``nc1``. NaN without samples; None if not requested.
        nc2_means: the whole NC2 of "papyan", of the centred class means; None in another convention.
        nc2_classifier: the same of the rows of the classifier, not centred; also None without one.
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
    convention: str = "sun"
    nc1_per_class: tuple[float, ...] | None = None
    nc2_means: VectorSpread | None = None
    nc2_classifier: VectorSpread | None = None


@torch.no_grad()
def neural_collapse(
    features: Tensor,
    labels: Tensor,
    classifier_weight: Tensor | None = None,
    num_classes: int | None = None,
    rtol: float | None = None,
    center: str | None = None,
    kernel: str = "auto",
    geometry: bool = False,
    *,
    classifier_bias: Tensor | None = None,
    convention: str = "sun",
    per_class: bool = False,
) -> NCResult:
    """Measure NC1-NC4 of ``features`` as Sun & Shi define them, or as another paper does, without gradient.

    Classes without samples are dropped, with their rows of ``classifier_weight``: K counts the others, and both rules
    that NC4 compares choose among these. Ties go to the lowest index. Rows that are not finite are left out.

    The kernels cpp and torch compute in float64 for every dtype of the features, triton and cuda for float64 features.
    For other dtypes, triton and cuda form differences, sums of up to 256 rows and projections in float32; all else is
    float64. NC1 then has a relative error below 1e-5, even if it is tiny or the features share a large offset.

    ``convention`` says which paper's NC2, NC3 and NC4 are measured. c is the centre of the class means. H (K, D) has
    the class means mu_k as rows, and M the rows mu_k - c. W and b are weight and bias of the classifier. The simplex is
    S = (I - 11^T / K) / sqrt(K - 1). ^A is A / norm(A), and norms are Frobenius norms. NC1 differs by c only.

    | convention | c | NC2 | NC3 | NC4 |
    |---|---|---|---|---|
    | "sun" | mean of the class means | ``norm(^(H H^T) - S)`` | ``norm(^W - ^H)`` | share of agreement |
    | "papyan" | mean of all samples | mean ``abs(cos + 1/(K-1))`` of M's rows | ``norm(^W - ^M)^2`` | 1 - that share |
    | "zhu" | mean of all samples | ``norm(^(W W^T) - S)`` | ``norm(^(W M^T) - S)`` | ``norm(W c + b)`` |
    | "kothapalli" | mean of the class means | ``norm(^(M M^T) - S)`` | ``norm(^(W M^T) - S)`` | share of agreement |

    NC2 of "papyan" has two more parts, and all three also of W: see ``nc2_means`` and ``nc2_classifier``. In "zhu" NC2
    is NaN without a classifier, and NC4 depends on the scale of W and of the features.

    Sources: Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A. Papyan et al., PNAS 2020, arXiv 2008.08186. Zhu et
    al., NeurIPS 2021, arXiv 2105.02375. Kothapalli et al., NeurIPS 2023, arXiv 2307.01951.

    Args:
        features: (N, D), float16, bfloat16, float32 or float64, N and D at least 1, any strides, CPU or CUDA.
        labels: (N,), uint8 or a signed integer dtype, values in [0, num_classes), on the device of ``features``.
        classifier_weight: (num_classes, D), a dtype and the device as above. Without it NC3 and NC4 are None.
        num_classes: number of classes; None takes the rows of ``classifier_weight``, else the largest label plus one.
        rtol: singular values of the centred class means up to ``rtol`` times the largest count as 0, in [0, 0.99], as
            do those within float64's rounding. It decides the result if means nearly coincide: see ``condition``. None
            is 16 eps of the dtype of ``features``, but of float32 for shorter ones: roundings average out in the means.
        center: c, "class-means" for their mean or "samples" for the mean of all samples; None: the convention's.
        kernel: "auto", "cpp", "triton", "cuda" or "torch", for the passes over the features; torch computes NC4. "auto"
            is cpp on a CPU, else cuda, triton, or torch with a warning. Rows with gaps are copied first.
        geometry: also measure ``class_geometry``, of means that are not centred. torch makes one more pass.
        classifier_bias: (num_classes,), a dtype and the device as above; None is 0. It enters NC4 and, in ``geometry``,
            ``logits``. It needs ``classifier_weight``. NC3 ignores it in every convention.
        convention: "sun", "papyan", "zhu" or "kothapalli", see above.
        per_class: also measure ``nc1_per_class``. torch makes one more pass over the features.

    Returns:
        NCResult. Warns when the features are float16 or bfloat16 and NC1 is below what these resolve.

    Raises:
        TypeError: an argument has another type or dtype than above.
        ValueError: a shape, device, label, number or choice is not as above, or sums of features overflow.
        RuntimeError: ``kernel`` is not available, or does not run on the device of ``features``.

    Examples:
        >>> means = torch.randn(10, 64)
        >>> labels = torch.arange(500) % 10
        >>> result = deqfast.neural_collapse(means[labels] + 0.1 * torch.randn(500, 64), labels, means)
        >>> result.num_classes, result.rank, result.nc4
        (10, 9, 1.0)
    """
    check_features(features)
    check_vector("labels", labels, LABEL_DTYPES, features, "features")
    if features.shape[0] == 0:
        raise ValueError(f"features is empty (shape {tuple(features.shape)}); at least one sample is needed")
    center = check_options(rtol, center, convention, num_classes=num_classes)
    check_classifier(classifier_weight, classifier_bias, num_classes, features, "features")
    classifier = Classifier.of(classifier_weight, classifier_bias)
    if num_classes is None and classifier is not None:
        num_classes = len(classifier.weight)
    chosen = choose_kernel(kernel, features.device)
    samples = Samples.grouped(features, labels, check_label_range(labels, num_classes))

    samples, stats = statistics.class_means(samples, chosen)
    excluded, counts = features.shape[0] - samples.count, stats.counts
    samples, stats, classifier = statistics.drop_empty_classes(samples, stats, classifier)
    if samples.num_classes == 0:
        return undefined(excluded, convention, classifier, True, len(counts) if per_class else None)
    rtol = statistics.default_rtol(features.dtype) if rtol is None else rtol
    between = statistics.between_classes(stats, center, rtol)
    means, project = stats.means, chosen.op("within_class_scatter")
    within = project(samples.features, samples.rows, samples.offsets, means, between.whitening)
    agreement = None
    if classifier is not None and convention != BIAS_ONLY:
        agreement = statistics.nearest_mean_agreement(samples, stats, classifier)
    nc1s = None
    if per_class:
        seen = statistics.within_class_traces(samples, means, between.whitening)
        nc1s = torch.full_like(counts, math.nan).masked_scatter(counts > 0, seen)
    resolution = NC1_RESOLUTION.get(features.dtype, 0.0)
    result = make_result(stats, between, within, classifier, agreement, excluded, resolution, convention, nc1s)
    if not geometry:
        return result
    traces = statistics.within_class_traces(samples, means, over=stats.size)
    return result._replace(geometry=geometry_of(stats, classifier, traces))


def geometry_of(stats: ClassMeans, classifier: Classifier | None, traces: Tensor | None = None) -> ClassGeometry:
    """``class_geometry`` of the metrics' statistics, for traces over the square of their size."""
    weight, bias = (None, None) if classifier is None else classifier.scaled(stats.size)
    return class_geometry(stats.means / stats.size, stats.counts, weight, traces, classifier_bias=bias)


def make_result(
    stats: ClassMeans,
    between: Between,
    within: Tensor,
    classifier: Classifier | None,
    agreement: Tensor | None,
    excluded: int,
    resolution: float,
    convention: str,
    nc1s: Tensor | None = None,
) -> NCResult:
    """Collect the metrics and copy them to the host at once."""
    means, rank = unit(stats.means), between.kept.sum()
    smallest = torch.where(between.kept, between.singular, math.inf).amin()
    centred = unit(torch.where(rank > 0, between.centred, math.nan))  # else it is rounding
    weight = None if classifier is None else unit(classifier.weight)
    values = {
        "nc1": torch.where(rank > 0, within.sum() / stats.counts.sum(), math.nan),
        "rank": rank.to(torch.float64),
        "condition": torch.where(rank > 0, smallest / between.singular[0], math.nan),
        "nc2": nc2(convention, means, centred, weight),
        "nc2_paper": simplex_distance(means @ means.T, power=2),
        "nc2_centered": simplex_distance(centred @ centred.T),
    }
    if convention == "papyan":
        values["nc2_means"] = spread(centred)
    if classifier is not None and weight is not None:
        values["nc3"] = nc3(convention, means, centred, weight)
        values["nc3_centered"] = torch.linalg.vector_norm(weight - centred)
        if convention == "papyan":
            values["nc2_classifier"] = spread(weight)
        if convention == BIAS_ONLY:
            values["nc4"] = lengths(classifier.logits(between.middle + stats.shift))
    if agreement is not None:
        values["nc4"] = 1 - agreement if convention == "papyan" else agreement
    if nc1s is not None:
        values["nc1_per_class"] = torch.where(rank > 0, nc1s, math.nan)
    host: dict[str, Any] = dict.fromkeys(("nc3", "nc3_centered", "nc4")) | _on_host(values)
    host["rank"] = int(host["rank"])
    if host["nc1"] < resolution:
        below = f"NC1 = {host['nc1']:.1e} is below what half-precision features resolve (about {resolution:.0e})"
        warnings.warn(f"{below}: it is their rounding; give float32 features", stacklevel=4)
    return NCResult(num_classes=len(stats.counts), excluded=excluded, convention=convention, **host)


def _on_host(values: dict[str, Tensor]) -> dict[str, Any]:
    """Copy scalars and vectors at once, as numbers, tuples and ``VectorSpread``."""
    flat, host = iter(torch.cat([value.flatten() for value in values.values()]).tolist()), {}
    for name, value in values.items():
        numbers = tuple(islice(flat, value.numel()))
        host[name] = VectorSpread(*numbers) if name in _SPREADS else numbers if value.ndim else numbers[0]
    return host


def undefined(
    excluded: int, convention: str, classifier: Classifier | None, kept: bool, per_class: int | None = None
) -> NCResult:
    """Result if all rows are non-finite; kept: whether the samples were, per_class: how many classes, or None."""
    host: dict[str, Any] = dict.fromkeys(("nc1", "condition", "nc2", "nc2_paper", "nc2_centered"), math.nan)
    host |= dict.fromkeys(("nc3", "nc3_centered", "nc4"), None if classifier is None else math.nan)
    if not (kept or convention == BIAS_ONLY):
        host["nc4"] = None
    if convention == "papyan":
        host |= dict.fromkeys(_SPREADS[: 1 if classifier is None else 2], VectorSpread(math.nan, math.nan, math.nan))
    if per_class is not None:
        host["nc1_per_class"] = (math.nan,) * per_class
    return NCResult(rank=0, num_classes=0, excluded=excluded, convention=convention, **host)
