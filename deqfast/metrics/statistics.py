"""Statistics of grouped features from which the neural-collapse metrics are formed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import Kernel
from ..ops.collapse.reference import row_blocks
from ..state.norms import largest, lengths

_EPS64 = torch.finfo(torch.float64).eps
_RANK_FACTOR = 16.0  # singular values below this many rounding errors are noise
_SMALL_SVD = 1 << 18  # K^2 D of 10 x 512 is a fifth of it


@dataclass(frozen=True)
class Samples:
    """Features (N, D), and the rows that count with their labels (M,), sorted by class."""

    features: Tensor
    rows: Tensor
    labels: Tensor
    num_classes: int

    @classmethod
    def grouped(cls, features: Tensor, labels: Tensor, num_classes: int) -> Samples:
        """Sort labels (N,) and rows by class, in the order of the rows within one."""
        if features.shape[1] > 1 and features.stride(1) != 1:
            features = features.contiguous()
        labels, rows = torch.sort(labels.long(), stable=True)
        return cls(features, rows, labels, num_classes)

    @property
    def count(self) -> int:
        """M, the number of rows that count."""
        return len(self.rows)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Bounds of the classes, (K + 1,) int64: class k has rows[offsets[k]:offsets[k + 1]]."""
        return torch.searchsorted(self.labels, torch.arange(self.num_classes + 1, device=self.labels.device))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (features, labels) of a few rows at a time, in float64 and free to be overwritten."""
        return row_blocks(self.features, self.rows, self.labels, self.num_classes)

    def finite(self) -> Samples:
        """Samples left when the rows that hold a feature that is not finite are dropped."""
        kept = torch.cat([features.isfinite().all(1) for features, _ in self.blocks()]).nonzero()[:, 0]
        return Samples(self.features, self.rows[kept], self.labels[kept], self.num_classes)


class ClassMeans(NamedTuple):
    """Counts (K,) and class means, as ``local`` (K, D) relative to ``shift`` (D,).

    The shift is one of the samples, so that an offset common to all of them costs no digits.
    """

    counts: Tensor
    local: Tensor
    shift: Tensor

    @property
    def means(self) -> Tensor:
        """Class means (K, D)."""
        return self.local + self.shift

    @property
    def size(self) -> Tensor:
        """Power of two near the largest number of ``means``. Over it, their squares neither overflow nor underflow."""
        most = largest(self.means.flatten())
        return most / torch.frexp(most).mantissa


class Classifier(NamedTuple):
    """Weight (K, D) and bias (K,) or None of a linear classifier, in float64."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor | None, bias: Tensor | None) -> Classifier | None:
        """Return both in float64, or None without a weight."""
        if weight is None:
            return None
        return cls(weight.to(torch.float64), None if bias is None else bias.to(torch.float64))

    def rows(self, seen: Tensor) -> Classifier:
        """Return the rows of the classes `seen`."""
        return Classifier(self.weight[seen], None if self.bias is None else self.bias[seen])

    def scaled(self, size: Tensor) -> Classifier:
        """Return the classifier for features divided by `size`, with all logits divided by one number."""
        weight = largest(self.weight.flatten())
        return Classifier(self.weight / weight, None if self.bias is None else self.bias / weight / size)

    def logits(self, features: Tensor) -> Tensor:
        """Logits (..., K) of features (..., D)."""
        return nn.functional.linear(features, self.weight, self.bias)


class Between(NamedTuple):
    """Thin SVD of the centred class means (K, D): directions (D, min(K, D)), singular values, which of these count.

    ``middle`` (D,) was subtracted from the class means relative to their shift.
    """

    centred: Tensor
    middle: Tensor
    directions: Tensor
    singular: Tensor
    kept: Tensor

    @property
    def whitening(self) -> Tensor:
        """Directions divided by their singular values (D, K - 1); zero for values that do not count.

        Projections on them are dimensionless, so that their squares do not overflow.
        """
        scaled = self.directions * torch.where(self.kept, self.singular.reciprocal(), 0.0)
        return scaled[:, : len(self.centred) - 1].contiguous()


def class_means(samples: Samples, kernel: Kernel) -> tuple[Samples, ClassMeans]:
    """Means of all classes (zero for empty classes), and the samples without non-finite rows."""
    local, shift = kernel.op("class_means")(samples.features, samples.rows, samples.offsets)
    # A non-finite feature makes the mean of its class non-finite. Only then search for the rows to leave out.
    if not bool(local.isfinite().all()):
        samples = samples.finite()
        local, shift = kernel.op("class_means")(samples.features, samples.rows, samples.offsets)
        if not bool(local.isfinite().all()):
            wide = kernel.name in ("torch", "cpp") or samples.features.dtype == torch.float64
            sums = f"sums overflow {'float64' if wide else 'float32'}"
            raise ValueError(f"features holds values whose {sums}; scale them (no metric depends on it)")
    return samples, ClassMeans(samples.offsets.diff().to(torch.float64), local, shift)


def drop_empty_classes(
    samples: Samples, stats: ClassMeans, classifier: Classifier | None
) -> tuple[Samples, ClassMeans, Classifier | None]:
    """Renumber the classes that have samples as 0 .. K-1."""
    present = stats.counts > 0
    seen = present.nonzero()[:, 0]
    if len(seen) == samples.num_classes:
        return samples, stats, classifier
    labels = (present.cumsum(0) - 1)[samples.labels]
    samples = replace(samples, labels=labels, num_classes=len(seen))
    stats = stats._replace(counts=stats.counts[seen], local=stats.local[seen])
    return samples, stats, None if classifier is None else classifier.rows(seen)


def between_classes(stats: ClassMeans, center: str, rtol: float) -> Between:
    """SVD of the centred class means, and the singular values that are neither below rtol nor rounding."""
    local, counts = stats.local, stats.counts
    middle = local.mean(0) if center == "class-means" else counts @ local / counts.sum()
    centred = local - middle
    device = centred.device
    directions, singular, _ = torch.linalg.svd(centred.T.to(svd_device(centred.shape, device)), full_matrices=False)
    # Pageable memory is staged before such a copy returns, so it needs no wait.
    directions, singular = (part.to(device, non_blocking=True) for part in (directions, singular))
    rounding = _RANK_FACTOR * _EPS64 * lengths(local.flatten())
    kept = singular > torch.maximum(rtol * singular[0], rounding)
    kept[len(counts) - 1 :] = False  # either centre leaves one linear dependence between the K rows
    return Between(centred, middle, directions, singular, kept)


def svd_device(shape: torch.Size, device: torch.device) -> torch.device:
    """Return where to decompose a matrix of this shape on `device`: a small one on the CPU, else where it is.

    With an H100 the CPU was faster for 10 x 512, copies included, and slower from about 100 x 2048. Nothing in between
    was measured: the limit is only a few times the work of the former. Either way the host waits once.
    """
    short, long = sorted(shape)
    return torch.device("cpu") if short**2 * long <= _SMALL_SVD else device


def within_class_traces(
    samples: Samples, means: Tensor, directions: Tensor | None = None, over: Tensor | None = None
) -> Tensor:
    """Mean of |h - mu_k|^2 over the samples of each class (K,); NaN for empty classes.

    With directions R (D, R) it is the mean of |R^T (h - mu_k)|^2; with a length `over`, of squares in its units.
    """
    sums, index = means.new_zeros(len(means)), torch.arange(len(means), device=means.device)
    for features, labels in samples.blocks():
        deviations = features.sub_(means.index_select(0, labels))
        if over is not None:
            deviations /= over
        squares = (deviations if directions is None else deviations @ directions).square_().sum(1)
        sums += (labels == index[:, None]).to(squares.dtype) @ squares
    return sums / samples.offsets.diff()


def nearest_mean_agreement(samples: Samples, stats: ClassMeans, classifier: Classifier) -> Tensor:
    """Share of the samples on which the classifier chooses the nearest class mean.

    With d = h - mu_y, |h - mu_k|^2 is |mu_y - mu_k|^2 - 2 d . mu_k up to a term without k: an offset of the features
    cancels no digits, as it would in |mu_k|^2 - 2 h . mu_k. All are divided by the size of the means.
    """
    size, means = stats.size, stats.means / stats.size
    scaled = classifier.scaled(size)
    agreed = torch.zeros((), dtype=torch.int64, device=means.device)
    gaps = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist").square_()
    for features, labels in samples.blocks():
        chosen = scaled.logits(features.div_(size)).argmax(1)
        deviations = features.sub_(means.index_select(0, labels))
        nearest = gaps.index_select(0, labels).addmm_(deviations, means.T, alpha=-2).argmin(1)
        agreed += (nearest == chosen).sum()
    finite = functools.reduce(torch.logical_and, [part.isfinite().all() for part in classifier if part is not None])
    return torch.where(finite, agreed.to(torch.float64) / samples.count, math.nan)


def default_rtol(dtype: torch.dtype) -> float:
    """Share of the largest singular value up to which others are noise, for features of `dtype`."""
    return _RANK_FACTOR * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
