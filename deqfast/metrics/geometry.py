"""Geometry of class means and classifier under imbalance: distances of their Gram matrices to what theory predicts.

Notation: class sizes n_k, k = 1 .. K; D = diag(n); C = I - 11^T / K; C D^(1/2) = V S U^T its SVD. All targets are
global optima of cross-entropy with free features and a vanishing penalty of features and classifier, up to a factor:

    simplex     Gram of the means C                           of the classifier C                     (equal sizes)
    orthogonal  Gram of the means D^(-1/2)                    of the classifier C D^(1/2) C           (features >= 0)
    SELI        Gram of the means D^(-1/2) U S U^T D^(-1/2)   of the classifier V S V^T               (free features)

The distance of a matrix M, one row per class, to a target T is ||M M^T / ||M M^T||_F - T / ||T||_F||_F, between 0 and
sqrt(2) for these positive semidefinite matrices. With equal sizes SELI is the simplex.

The logits of a class mean h_k are W h_k + b. A softmax ignores a constant added to all, so their mean is subtracted.
All margins of the three targets are equal: their logits are C up to a factor. The distance of such logits Z (K, K) is
||Z / ||Z||_F - C / ||C||_F||_F, between 0 and 2. It includes the bias.

The orthogonal frame's lengths: orthogonal means h_k = r_k e_k and W = sum_k g_k C e_k e_k^T decouple the problem. Class
k has the margin g_k r_k = 1 at the least penalty g_k^2 (1 - 1/K) + n_k r_k^2. Hence r_k^2 is proportional to n_k^(-1/2)
and g_k^2 to n_k^(1/2).

Sources: Dang et al., ICML 2024, arXiv 2401.02058 (features of a ReLU). Thrampoulidis et al., NeurIPS 2022, arXiv
2208.05512 (SELI). Papyan et al., PNAS 2020, arXiv 2008.08186 (equinorm, equiangular). Galanti et al., ICLR 2022, arXiv
2112.15121 (CDNV). Fang et al., PNAS 2021, arXiv 2101.12699 (minority collapse).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._checks import check_count
from ..state.norms import largest, lengths
from .checks import check_classifier, check_features, check_vector

_ROUNDING = 16 * torch.finfo(torch.float64).eps  # of vectors whose largest entry is 1
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


class VectorGeometry(NamedTuple):
    """Geometry of K vectors, one per class: of the class means or of the rows of a classifier. All are numbers.

    Attributes:
        simplex: distance of the Gram matrix, not centred, to the simplex.
        simplex_centered: the same after the mean of the vectors has been subtracted.
        orthogonal, seli: as `simplex`, to the orthogonal frame and to SELI of these class sizes.
        equinorm: standard deviation of the centred vectors' lengths over their mean; 0 at the simplex.
        equiangular: mean of |cos + 1 / (K - 1)| over pairs of centred vectors; 0 at the simplex.
        majority_cosine, minority_cosine, between_cosine: mean cosine of two vectors, not centred, of majority classes,
            of minority classes (near 1 in a classifier whose minority collapses) and of both. NaN without a pair.
    """

    simplex: float
    simplex_centered: float
    orthogonal: float
    seli: float
    equinorm: float
    equiangular: float
    majority_cosine: float
    minority_cosine: float
    between_cosine: float


class ClassGeometry(NamedTuple):
    """What ``class_geometry`` returns.

    Attributes:
        means: ``VectorGeometry`` of the class means.
        classifier: ``VectorGeometry`` of the rows of the classifier; None without one.
        cdnv: mean over pairs of classes of (t_i + t_j) / (2 |mu_i - mu_j|^2), t the `traces`; None without them.
        num_classes: K, the number of classes with at least one sample.
        logits: distance of the class means' logits from the targets', with the bias; None without a classifier.
    """

    means: VectorGeometry
    classifier: VectorGeometry | None
    cdnv: float | None
    num_classes: int
    logits: float | None = None


@torch.no_grad()
def class_geometry(
    means: Tensor,
    counts: Tensor,
    classifier_weight: Tensor | None = None,
    traces: Tensor | None = None,
    majority: int | None = None,
    *,
    classifier_bias: Tensor | None = None,
) -> ClassGeometry:
    """Measure how near class means and classifier are to the simplex, an orthogonal frame and SELI.

    Under imbalance the simplex is not the optimum: for features of a ReLU it is the orthogonal frame, for others SELI.
    Both depend on the class sizes. The module's docstring has the formulas. Classes without samples are dropped.

    Args:
        means: (K, D), class means, not centred; float16, bfloat16, float32 or float64, K and D at least 1.
        counts: (K,), samples of each class, at least 0; int32, int64, float32 or float64.
        classifier_weight: (K, D), dtypes as of the means, or None.
        traces: (K,), mean of |h - mu_k|^2 over the samples of class k, for ``cdnv``; or None.
        majority: how many of the first classes are the majority, at least 1; None takes those with the most samples.
        classifier_bias: (K,), dtypes as of the means, for ``logits``; None is 0. It needs ``classifier_weight``.

    Returns:
        ClassGeometry. Numbers that are not defined, such as those of a single class, are NaN.

    Raises:
        TypeError: an argument has another type or dtype than above.
        ValueError: a shape or a number is not as above, or no class has a sample.

    Examples:
        >>> counts = torch.tensor([16, 16, 1, 1])
        >>> geometry = deqfast.metrics.class_geometry(torch.diag(counts.double() ** -0.25), counts)
        >>> round(geometry.means.orthogonal, 6), geometry.means.simplex > 0.5
        (0.0, True)
    """
    check_features(means)
    num_classes = means.shape[0]
    check_vector("counts", counts, COUNT_DTYPES, means, "means")
    if not bool(((counts >= 0) & (counts < math.inf)).all()) or not bool((counts > 0).any()):
        raise ValueError(f"counts is {counts.tolist()}; it must be finite and at least 0, and one more than 0")
    check_classifier(classifier_weight, classifier_bias, num_classes, means, "means")
    if traces is not None:
        check_vector("traces", traces, COUNT_DTYPES, means, "means")
    if majority is not None:
        check_count("majority", majority)
    seen = counts > 0
    first = torch.arange(num_classes, device=counts.device) < majority if majority else counts == counts.max()
    points, sizes, large = means[seen].double(), counts[seen].double(), first[seen]
    rows, bias = (None if part is None else part[seen].double() for part in (classifier_weight, classifier_bias))
    return ClassGeometry(
        means=_geometry(points, sizes, large, for_means=True),
        classifier=None if rows is None else _geometry(rows, sizes, large, for_means=False),
        cdnv=None if traces is None else _cdnv(points, traces[seen].double()),
        num_classes=len(points),
        logits=None if rows is None else _logit_distance(points, rows, bias),
    )


def simplex(sizes: Tensor) -> Tensor:
    """The Gram matrix (K, K) of the simplex ETF, of means and classifier, for class sizes or another K rows."""
    return torch.eye(len(sizes), dtype=sizes.dtype, device=sizes.device) - 1 / len(sizes)


def orthogonal_frame(sizes: Tensor, for_means: bool) -> Tensor:
    """The Gram matrix (K, K) of the optimum with features that are not negative: of its means, or of its classifier."""
    return torch.diag(sizes.rsqrt()) if for_means else (simplex(sizes) * sizes.sqrt()) @ simplex(sizes)


def seli(sizes: Tensor, for_means: bool) -> Tensor:
    """The Gram matrix (K, K) of the simplex-encoded-labels interpolation: of its means, or of its classifier."""
    left, singular, right = torch.linalg.svd(simplex(sizes) * sizes.sqrt())
    if not for_means:
        return (left * singular) @ left.T
    scaled = right.T / sizes.sqrt()[:, None]
    return (scaled * singular) @ scaled.T


def gram_distance(vectors: Tensor, target: Tensor) -> Tensor:
    """||V V^T / ||V V^T||_F - T / ||T||_F||_F of vectors V (K, D) and a target T (K, K). NaN if either is zero."""
    vectors = unit(vectors)  # else fourth powers could overflow
    gram = vectors @ vectors.T
    return torch.linalg.vector_norm(unit(gram) - unit(target))


def unit(matrix: Tensor) -> Tensor:
    """The matrix over its norm, NaN if it is zero. No square overflows or underflows."""
    scaled = matrix / matrix.abs().amax()
    return scaled / torch.linalg.vector_norm(scaled)


def _logit_distance(means: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """||Z / ||Z||_F - C / ||C||_F||_F of the logits Z (K, K) of the class means, centred over the classes."""
    longest, steepest = largest(means.flatten()), largest(weight.flatten())
    logits = nn.functional.linear(means / longest, weight / steepest)
    if bias is not None:  # the products or the bias, whichever are smaller, count by their share
        highest = largest(bias)
        share = longest / highest * steepest
        logits = share.clamp_max(1) * logits + share.reciprocal().clamp_max(1) * (bias / highest)
    logits = logits - logits.mean(1, keepdim=True)
    target = simplex(logits) if len(means) > 1 else torch.full_like(logits, math.nan)
    return float(torch.linalg.vector_norm(unit(logits) - unit(target)))


def _geometry(vectors: Tensor, sizes: Tensor, large: Tensor, for_means: bool) -> VectorGeometry:
    """``VectorGeometry`` of vectors (K, D); large: mask (K,) of the majority."""
    count = len(vectors)
    vectors = vectors / (vectors.abs().amax() if count > 1 else math.nan)
    centred = vectors - vectors.mean(0)
    lengths = torch.linalg.vector_norm(centred, dim=1)
    # Centred equal vectors are only rounding errors, so the centred measures are not defined.
    centred = torch.where(lengths.amax() > _ROUNDING * count, centred, math.nan)
    lengths = torch.linalg.vector_norm(centred, dim=1)
    between, angles = cosines(vectors), cosines(centred)
    upper = torch.ones_like(angles, dtype=torch.bool).triu(1)
    both, neither = large[:, None] & large, ~large[:, None] & ~large
    values = [
        gram_distance(vectors, simplex(sizes)),
        gram_distance(centred, simplex(sizes)),
        gram_distance(vectors, orthogonal_frame(sizes, for_means)),
        gram_distance(vectors, seli(sizes, for_means)),
        lengths.std(correction=0) / lengths.mean(),
        (angles[upper] + 1 / max(1, count - 1)).abs().mean(),
        *(between[upper & pairs].mean() for pairs in (both, neither, ~both & ~neither)),
    ]
    return VectorGeometry(*torch.stack(values).tolist())


def cosines(vectors: Tensor) -> Tensor:
    """The cosines (K, K) of the vectors (K, D)."""
    scaled = vectors / vectors.abs().amax(dim=1, keepdim=True)
    directions = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return directions @ directions.T


def _cdnv(means: Tensor, traces: Tensor) -> float:
    first, second = torch.triu_indices(len(means), len(means), offset=1, device=means.device)
    gaps = lengths(means[first] - means[second])
    return float(((traces[first] / 2 + traces[second] / 2) / gaps / gaps).mean())
