"""Neural-collapse metrics NC1-NC4 of the features under a classifier, as a function and as a torchmetrics metric.

Notation: N samples h_i in R^D with labels y_i in K classes; class means mu_k; H-bar the (D, K) matrix of class means.

    Sigma_W = (1/N) sum_i (h_i - mu_{y_i})(h_i - mu_{y_i})^T        Sigma_B = (1/K) sum_k (mu_k - c)(mu_k - c)^T
    NC1 = tr(Sigma_W Sigma_B^+) / K
    NC2 = || H-bar^T H-bar / ||H-bar^T H-bar||_F - a (I - 11^T / K) ||_F
    NC3 = || W / ||W||_F - H-bar^T / ||H-bar||_F ||_F
    NC4 = share of the samples on which argmax_k (W h)_k is the class of the nearest mean

Sigma_B has rank K - 1 at most, so no D x D matrix is formed. With the thin SVD R diag(s) V^T of the centred class means
(D, K), NC1 = (1/N) sum_j sum_i (R_j / s_j . (h_i - mu_{y_i}))^2 over the singular values kept. Two passes read the
features, the ops ``class_means`` and ``within_class_scatter`` of ``deqfast.ops``: sums over each class, then deviations
from the class means (before any product) and their projections. Labels are sorted once, and sums are formed in the
order of the rows within a class: the same inputs give the same bits.

Source: Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from .ops import Kernel, check_kernel_name, choose_kernel
from .ops.collapse.reference import row_blocks

__all__ = ["NCResult", "NeuralCollapse", "neural_collapse"]

MAX_STREAMING_FEATURES = 1024

_FEATURE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LABEL_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CENTERS = ("class-means", "samples")
_EPS64 = torch.finfo(torch.float64).eps
_RANK_FACTOR = 16.0  # singular values below this many rounding errors are noise
_NC1_RESOLUTION = {torch.bfloat16: 1e-5, torch.float16: 1e-7}  # below it NC1 measures the rounding of the features
_NO_SAMPLES = "the metric has no samples; call update(features, labels) before compute()"


@dataclass(frozen=True)
class NCResult:
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


@torch.no_grad()
def neural_collapse(
    features: Tensor,
    labels: Tensor,
    classifier_weight: Tensor | None = None,
    num_classes: int | None = None,
    rtol: float | None = None,
    center: str = "class-means",
    kernel: str = "auto",
) -> NCResult:
    """Measure NC1-NC4 of ``features`` (Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A).

    Classes without samples are dropped, with their rows of ``classifier_weight``: K is the number of classes seen, and
    both rules that NC4 compares choose among these; ties go to the lowest index. Rows with a non-finite feature are
    left out and counted. No gradient is recorded.

    The kernels cpp and torch compute everything in float64 whatever the dtype of the features, as do triton and cuda
    for float64 features. For the other dtypes, triton and cuda form differences, sums of up to 256 rows and projections
    in float32: NC1 has a relative error below 1e-5, also where it is tiny or the features have a large offset in
    common; all else is float64.

    Args:
        features: (N, D), float16, bfloat16, float32 or float64, N and D at least 1, any strides, CPU or CUDA.
        labels: (N,), uint8 or a signed integer dtype, values in [0, num_classes), on the device of ``features``.
        classifier_weight: (num_classes, D), a dtype and the device as above. Without it NC3 and NC4 are None.
        num_classes: number of classes; None takes the rows of ``classifier_weight``, else the largest label plus one.
        rtol: singular values of the centred class means up to ``rtol`` times the largest count as zero, in [0, 1). For
            means that nearly coincide it decides the answer: see ``rank`` and ``condition``. None is 16 eps of the
            dtype of ``features``, of float32 for float16 and bfloat16: what these round away in single samples averages
            out in the means. Singular values within the float64 rounding of the means are never kept.
        center: "class-means" subtracts the mean of the class means (the paper's choice), "samples" the mean over all
            samples; the two differ when classes are imbalanced.
        kernel: "auto", "cpp", "triton", "cuda" or "torch", for the passes over the features; NC4 is left to torch.
            "auto" is cpp on the CPU and cuda, else triton, on CUDA tensors; torch, with a warning, where these are not
            available. Features whose rows have gaps between their elements are copied first.

    Returns:
        NCResult. Warns when the features are float16 or bfloat16 and NC1 is below what these resolve.

    Raises:
        TypeError: an argument is not of the type or dtype above.
        ValueError: a shape, device, label, ``num_classes``, ``rtol``, ``center`` or ``kernel`` is not as above, or
            features are so large that their sums overflow.
        RuntimeError: ``kernel`` is not available, or does not run on the device of ``features``.
    """
    _check_features(features)
    _check_labels(labels, features)
    if features.shape[0] == 0:
        raise ValueError(f"features has no rows (shape {tuple(features.shape)}); at least one sample is needed")
    _check_rtol(rtol)
    _check_center(center)
    if num_classes is not None:
        _check_count("num_classes", num_classes)
    weight = _checked_weight(classifier_weight, features, num_classes)
    if num_classes is None and weight is not None:
        num_classes = weight.shape[0]
    chosen = choose_kernel(kernel, features.device)
    samples = _Samples.grouped(features, labels, _check_label_range(labels, num_classes))

    samples, stats = _class_means(samples, chosen)
    excluded = features.shape[0] - samples.count
    samples, stats, weight = _drop_empty_classes(samples, stats, weight)
    if samples.num_classes == 0:
        return _undefined(excluded, with_nc3=weight is not None, with_nc4=weight is not None)
    between = _between_classes(stats, center, _default_rtol(features.dtype) if rtol is None else rtol)
    means = stats.means
    within = chosen.op("within_class_scatter")(
        samples.features, samples.rows, samples.offsets, means, between.whitening
    )
    agreement = None if weight is None else _agreement(samples, means, weight)
    return _result(stats, between, within, weight, agreement, excluded, _NC1_RESOLUTION.get(features.dtype, 0.0))


class NeuralCollapse(Metric):
    """NC1-NC4 as a ``torchmetrics.Metric`` (Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A).

    ``update(features, labels)`` per batch, ``compute()`` for the ``NCResult`` over all batches (and all processes),
    ``reset()``. The result is that of ``neural_collapse`` on the batches put together.

    By default the state is the list of feature and label batches, copied (a buffer may be reused) and kept in their
    dtype: N x D memory, twice that during ``compute``, and all of it on every process after a distributed sync. With
    ``streaming=True`` it is a count and a mean per class and one D x D within-class scatter in float64, each batch
    centred on its own class means before any product: memory does not grow with N, and NC4, which needs the samples, is
    None.

    Processes without samples may take part in a distributed sync. A clone or a pickle copies the classifier.

    Args:
        num_classes: number of classes; labels are in [0, num_classes).
        classifier_weight: (num_classes, D) tensor, or a module whose ``weight`` is one and is read at every
            ``compute``, or None. Can be set later as an attribute. It is no parameter and no state of the metric, and
            may be on another device.
        rtol: as in ``neural_collapse``.
        center: as in ``neural_collapse``.
        streaming: keep moments instead of features.
        num_features: D, at most 1024; needed with ``streaming=True`` unless ``classifier_weight`` tells it.
        kernel: as in ``neural_collapse``; with ``streaming=True`` for the class means, the scatter is left to torch.
        **kwargs: of ``torchmetrics.Metric``; ``compute_with_cache`` is False by default, as the classifier may change.

    Raises:
        TypeError: an argument, or a batch given to ``update``, is not of the type or dtype ``neural_collapse`` takes.
        ValueError: an argument or a batch is out of range; ``compute`` without samples. Labels out of range raise in
            ``update`` when streaming (it waits for the device), else in ``compute``.
        RuntimeError: ``kernel`` cannot serve, at the same places.

    Example::

        metric = NeuralCollapse(num_classes=10, classifier_weight=model.fc)
        for images, labels in loader:
            metric.update(model.features(images), labels)
        result = metric.compute()
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    features: list[Tensor]
    labels: list[Tensor]
    moments: Tensor
    precision: Tensor
    excluded: Tensor
    classifier_weight: Tensor | nn.Module | None

    def __init__(
        self,
        num_classes: int,
        classifier_weight: Tensor | nn.Module | None = None,
        rtol: float | None = None,
        center: str = "class-means",
        streaming: bool = False,
        num_features: int | None = None,
        kernel: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"compute_with_cache": False, **kwargs})
        _check_count("num_classes", num_classes)
        _check_rtol(rtol)
        _check_center(center)
        if num_features is not None:
            _check_count("num_features", num_features)
        self.num_classes = num_classes
        self.num_features = num_features
        self.rtol = rtol
        self.center = center
        self.streaming = streaming
        self.kernel = check_kernel_name(kernel)
        self.classifier_weight = classifier_weight
        if streaming:
            self._add_moment_states()
        else:
            self.add_state("features", default=[], dist_reduce_fx="cat")
            self.add_state("labels", default=[], dist_reduce_fx="cat")

    def _add_moment_states(self) -> None:
        if self.num_features is None and (weight := self._read_weight()) is not None:
            self.num_features = weight.shape[1]
        if self.num_features is None:
            raise ValueError("num_features is None; streaming=True needs it, or a classifier_weight (num_classes, D)")
        if self.num_features > MAX_STREAMING_FEATURES:
            raise ValueError(
                f"num_features is {self.num_features}; streaming=True keeps a D x D matrix and allows at most "
                f"{MAX_STREAMING_FEATURES}: use streaming=False"
            )
        shape = (self.num_classes + self.num_features, 1 + self.num_features)
        self.add_state("moments", default=torch.zeros(shape, dtype=torch.float64), dist_reduce_fx=_merge_moments)
        # (default rtol, NC1 resolution) of the coarsest dtype seen
        self.add_state("precision", default=torch.zeros(2, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("excluded", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``classifier_weight`` is checked and stays outside of the module tree."""
        if name == "classifier_weight":
            # Registered, the classifier's parameters would show up again in the metric's parameters() and state_dict().
            object.__setattr__(self, name, self._checked_classifier(value))
        else:
            super().__setattr__(name, value)

    def _checked_classifier(self, value: Any) -> Tensor | nn.Module | None:
        if value is None:
            return None
        weight = value.weight if isinstance(value, nn.Module) and hasattr(value, "weight") else value
        if not isinstance(weight, Tensor):
            raise TypeError(f"classifier_weight is a {_name(value)}; give a tensor, a module with a weight, or None")
        _check_weight(weight, self.num_classes, self.num_features)
        return value if isinstance(value, nn.Module) else value.detach()

    def _read_weight(self) -> Tensor | None:
        classifier = self.classifier_weight
        return classifier.weight.detach() if isinstance(classifier, nn.Module) else classifier  # type: ignore[operator]

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch: features (N, D), labels (N,), dtypes as in ``neural_collapse``; N may be 0."""
        _check_features(features)
        _check_labels(labels, features)
        width = self.features[0].shape[1] if self.num_features is None and len(self.features) else self.num_features
        if width is not None and features.shape[1] != width:
            raise ValueError(f"features has shape {tuple(features.shape)}; it must be (N, {width})")
        if self.streaming:
            self._update_moments(features, labels)
        else:
            self.features.append(features.detach().clone())
            self.labels.append(labels.to(torch.int64, copy=True))

    def _update_moments(self, features: Tensor, labels: Tensor) -> None:
        if features.device != self.moments.device:
            raise ValueError(f"features is on {features.device}; it must be on {self.moments.device} as the metric is")
        if features.shape[0] == 0:
            return
        _check_label_range(labels, self.num_classes)
        samples = _Samples.grouped(features, labels, self.num_classes)
        samples, stats = _class_means(samples, choose_kernel(self.kernel, features.device))
        self.moments = _merge_moments([self.moments, _batch_moments(samples, stats)])
        self.excluded = self.excluded + (features.shape[0] - samples.count)
        facts = (_default_rtol(features.dtype), _NC1_RESOLUTION.get(features.dtype, 0.0))
        self.precision = torch.maximum(self.precision, self.precision.new_tensor(facts))

    @torch.no_grad()
    def compute(self) -> NCResult:
        """Return the ``NCResult`` of all samples since the last ``reset``."""
        if self.streaming:
            return self._compute_moments()
        if len(self.features) == 0:
            raise ValueError(_NO_SAMPLES)
        features, labels = dim_zero_cat(self.features), dim_zero_cat(self.labels)
        weight = self._read_weight()
        weight = None if weight is None else weight.to(features.device)
        return neural_collapse(features, labels, weight, self.num_classes, self.rtol, self.center, self.kernel)

    def _compute_moments(self) -> NCResult:
        counts, means, scatter = _unpack(self.moments, self.num_classes)
        default_rtol, resolution = self.precision.tolist()
        excluded = int(self.excluded)
        seen = counts.nonzero()[:, 0]
        weight = self._read_weight()
        if len(seen) == 0 and excluded == 0:
            raise ValueError(_NO_SAMPLES)
        if len(seen) == 0:
            return _undefined(excluded, with_nc3=weight is not None, with_nc4=False)
        if weight is not None:
            weight = weight.to(means.device, torch.float64)[seen]
        stats = _ClassMeans(counts[seen], means[seen], torch.zeros_like(means[0]))
        between = _between_classes(stats, self.center, default_rtol if self.rtol is None else self.rtol)
        whitening = between.whitening
        within = ((scatter @ whitening) * whitening).sum(0).clamp_min(0)
        return _result(stats, between, within, weight, None, excluded, resolution)

    def _wrap_compute(self, compute: Callable) -> Callable:
        # torchmetrics maps a function over the fields of what compute returns, which a frozen dataclass refuses.
        @functools.wraps(compute)
        def opaque() -> _Opaque:
            return _Opaque(compute())

        wrapped = super()._wrap_compute(opaque)

        @functools.wraps(compute)
        def transparent() -> NCResult:
            return wrapped().value

        return transparent

    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        if not self.streaming and torch.distributed.is_initialized():
            self._agree_on_layout(process_group or self.process_group)
        super()._sync_dist(dist_sync_fn, process_group)

    def _agree_on_layout(self, group: Any | None) -> None:
        """Give a process without samples zero rows of the others' width and dtype: gathering needs like tensors."""
        mine = (self.features[0].shape[1], self.features[0].dtype) if len(self.features) else None
        layouts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(layouts, mine, group=group)
        found = {layout for layout in layouts if layout is not None}
        if len(found) > 1:
            raise ValueError(f"features have (columns, dtype) {layouts} on the processes; they must be alike on all")
        if mine is None and found:
            width, dtype = found.pop()
            self.features = [torch.empty((0, width), dtype=dtype, device=self.device)]
            self.labels = [torch.empty(0, dtype=torch.int64, device=self.device)]


class _Opaque:
    """A value that torchmetrics does not look into."""

    def __init__(self, value: NCResult) -> None:
        self.value = value


@dataclass(frozen=True)
class _Samples:
    """Features (N, D), and the rows that count with their labels (M,), class after class."""

    features: Tensor
    rows: Tensor
    labels: Tensor
    num_classes: int

    @classmethod
    def grouped(cls, features: Tensor, labels: Tensor, num_classes: int) -> _Samples:
        if features.shape[1] > 1 and features.stride(1) != 1:
            features = features.contiguous()
        labels, rows = torch.sort(labels.long(), stable=True)
        return cls(features, rows, labels, num_classes)

    @property
    def count(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Class k has rows[offsets[k]:offsets[k + 1]]; (K + 1,) int64."""
        return torch.searchsorted(self.labels, torch.arange(self.num_classes + 1, device=self.labels.device))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (features, labels) of a few rows at a time, in float64 and free to be overwritten."""
        return row_blocks(self.features, self.rows, self.labels, self.num_classes)

    def finite(self) -> _Samples:
        """Without the rows that hold a feature that is not finite."""
        kept = torch.cat([features.isfinite().all(1) for features, _ in self.blocks()]).nonzero()[:, 0]
        return _Samples(self.features, self.rows[kept], self.labels[kept], self.num_classes)


class _ClassMeans(NamedTuple):
    """Counts (K,) and class means, as ``local`` (K, D) relative to ``shift`` (D,).

    The shift is one of the samples, so that an offset common to all of them costs no digits.
    """

    counts: Tensor
    local: Tensor
    shift: Tensor

    @property
    def means(self) -> Tensor:
        return self.local + self.shift


class _Between(NamedTuple):
    """Thin SVD of the centred class means (K, D): directions (D, min(K, D)), singular values, which of these count."""

    centred: Tensor
    directions: Tensor
    singular: Tensor
    kept: Tensor

    @property
    def whitening(self) -> Tensor:
        """Directions over their singular values (D, K - 1), zero where these do not count.

        Projections on them have no unit: their squares overflow no dtype.
        """
        scaled = self.directions * torch.where(self.kept, self.singular.reciprocal(), 0.0)
        return scaled[:, : len(self.centred) - 1].contiguous()


def _class_means(samples: _Samples, kernel: Kernel) -> tuple[_Samples, _ClassMeans]:
    """Means of all classes (those of empty classes are zero) and the samples without non-finite rows."""
    local, shift = kernel.op("class_means")(samples.features, samples.rows, samples.offsets)
    # A non-finite feature makes the mean of its class non-finite: only then are the rows to leave out searched for.
    if not bool(local.isfinite().all()):
        samples = samples.finite()
        local, shift = kernel.op("class_means")(samples.features, samples.rows, samples.offsets)
        if not bool(local.isfinite().all()):
            wide = kernel.name in ("torch", "cpp") or samples.features.dtype == torch.float64
            raise ValueError(
                f"features holds values whose sums overflow {'float64' if wide else 'float32'}; scale them (no metric "
                "depends on it)"
            )
    return samples, _ClassMeans(samples.offsets.diff().to(torch.float64), local, shift)


def _drop_empty_classes(
    samples: _Samples, stats: _ClassMeans, weight: Tensor | None
) -> tuple[_Samples, _ClassMeans, Tensor | None]:
    """Renumber the classes that have samples as 0 .. K-1."""
    present = stats.counts > 0
    seen = present.nonzero()[:, 0]
    if len(seen) == samples.num_classes:
        return samples, stats, weight
    labels = (present.cumsum(0) - 1)[samples.labels]
    samples = replace(samples, labels=labels, num_classes=len(seen))
    stats = stats._replace(counts=stats.counts[seen], local=stats.local[seen])
    return samples, stats, None if weight is None else weight[seen]


def _between_classes(stats: _ClassMeans, center: str, rtol: float) -> _Between:
    """SVD of the centred class means, and the singular values that are neither below rtol nor rounding."""
    local, counts = stats.local, stats.counts
    middle = local.mean(0) if center == "class-means" else counts @ local / counts.sum()
    centred = local - middle
    directions, singular, _ = torch.linalg.svd(centred.T, full_matrices=False)
    rounding = _RANK_FACTOR * _EPS64 * torch.linalg.vector_norm(local)
    kept = singular > torch.maximum(rtol * singular[0], rounding)
    kept[len(counts) - 1 :] = False  # either centre leaves one linear dependence between the K rows
    return _Between(centred, directions, singular, kept)


def _agreement(samples: _Samples, means: Tensor, weight: Tensor) -> Tensor:
    """Share of the samples on which the classifier chooses the nearest class mean.

    With d = h - mu_y, |h - mu_k|^2 is |mu_y - mu_k|^2 - 2 d . mu_k up to a term without k: an offset of the features
    cancels no digits, as it would in |mu_k|^2 - 2 h . mu_k.
    """
    agreed = torch.zeros((), dtype=torch.int64, device=means.device)
    gaps = _squared_distances(means)
    for features, labels in samples.blocks():
        chosen = (features @ weight.T).argmax(1)
        deviations = features.sub_(means.index_select(0, labels))
        nearest = gaps.index_select(0, labels).addmm_(deviations, means.T, alpha=-2).argmin(1)
        agreed += (nearest == chosen).sum()
    return torch.where(weight.isfinite().all(), agreed.to(torch.float64) / samples.count, math.nan)


def _squared_distances(points: Tensor) -> Tensor:
    """|p_i - p_j|^2 for the rows of ``points``, (K, K)."""
    first, second = torch.triu_indices(len(points), len(points), offset=1, device=points.device)
    distances = points.new_zeros(len(points), len(points))
    distances[first, second] = nn.functional.pdist(points).square_()
    return distances + distances.T


def _simplex_distance(means: Tensor, scale: float) -> Tensor:
    """|| M M^T / ||M M^T||_F - scale (I - 11^T / K) ||_F for class means M (K, D)."""
    gram = means @ means.T
    target = torch.eye(len(means), dtype=means.dtype, device=means.device) - 1 / len(means)
    return torch.linalg.vector_norm(gram / torch.linalg.vector_norm(gram) - scale * target)


def _duality_distance(weight: Tensor, means: Tensor) -> Tensor:
    """|| W / ||W||_F - M / ||M||_F ||_F for W and M (K, D)."""
    return torch.linalg.vector_norm(weight / torch.linalg.vector_norm(weight) - means / torch.linalg.vector_norm(means))


def _result(
    stats: _ClassMeans,
    between: _Between,
    within: Tensor,
    weight: Tensor | None,
    agreement: Tensor | None,
    excluded: int,
    resolution: float,
) -> NCResult:
    """Put the metrics together and bring them to the host at once."""
    num_classes, means = len(stats.counts), stats.means
    rank = between.kept.sum()
    smallest = torch.where(between.kept, between.singular, math.inf).amin()
    centred = torch.where(rank > 0, between.centred, math.nan)  # else it is rounding
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
        values["nc3"] = _duality_distance(weight, means)
        values["nc3_centered"] = _duality_distance(weight, centred)
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


def _undefined(excluded: int, with_nc3: bool, with_nc4: bool) -> NCResult:
    """The result when no row is finite."""
    nc3, nc4 = math.nan if with_nc3 else None, math.nan if with_nc4 else None
    return NCResult(
        nc1=math.nan,
        rank=0,
        condition=math.nan,
        nc2=math.nan,
        nc2_paper=math.nan,
        nc2_centered=math.nan,
        nc3=nc3,
        nc3_centered=nc3,
        nc4=nc4,
        num_classes=0,
        excluded=excluded,
    )


# Moments are packed in one (K + D, 1 + D) tensor, [count, mean] per class above [0, scatter], because torchmetrics
# reduces each state on its own while counts, means and the scatter can only be merged together.


def _pack(counts: Tensor, means: Tensor, scatter: Tensor) -> Tensor:
    top = torch.cat([counts[:, None], means], dim=1)
    return torch.cat([top, nn.functional.pad(scatter, (1, 0))])


def _unpack(moments: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (K,), means (K, D) and the within-class scatter (D, D)."""
    top, bottom = moments[:num_classes], moments[num_classes:]
    return top[:, 0], top[:, 1:], bottom[:, 1:]


def _batch_moments(samples: _Samples, stats: _ClassMeans) -> Tensor:
    """Moments of one batch, its within-class scatter about its own class means."""
    means = stats.means
    scatter = means.new_zeros(means.shape[1], means.shape[1])
    for features, labels in samples.blocks():
        deviations = features.sub_(means.index_select(0, labels))
        scatter.addmm_(deviations.T, deviations)
    return _pack(stats.counts, means, scatter)


def _merge_moments(parts: Iterable[Tensor]) -> Tensor:
    """Moments of the union of sets of samples: their scatters plus that of their class means about the joint ones.

    Pairwise update of Chan, Golub & LeVeque (1983) for any number of parts; ``parts`` is a list or a stacked tensor.
    """
    parts = list(parts)
    num_classes = parts[0].shape[0] - parts[0].shape[1] + 1
    counts, means, scatters = zip(*(_unpack(part, num_classes) for part in parts), strict=True)
    total = torch.stack(counts).sum(0)
    share = [(count / total.clamp_min(1))[:, None] for count in counts]
    joint, scatter = means[0].clone(), scatters[0].clone()
    for mean, fraction in zip(means[1:], share[1:], strict=True):
        joint += fraction * (mean - means[0])
    for other in scatters[1:]:
        scatter += other
    for count, mean in zip(counts, means, strict=True):
        gap = mean - joint
        scatter.addmm_((count[:, None] * gap).T, gap)
    return _pack(total, joint, scatter)


def _default_rtol(dtype: torch.dtype) -> float:
    return _RANK_FACTOR * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _name(value: object) -> str:
    return type(value).__name__


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {_name(value)}; it must be a tensor of dtype {allowed}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; it must be one of {allowed}")


def _check_features(features: Tensor) -> None:
    _check_tensor("features", features, _FEATURE_DTYPES)
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features has shape {tuple(features.shape)}; it must be (N, D): flatten or pool the rest")


def _check_labels(labels: Tensor, features: Tensor) -> None:
    _check_tensor("labels", labels, _LABEL_DTYPES)
    if labels.ndim != 1 or len(labels) != len(features):
        raise ValueError(f"labels has shape {tuple(labels.shape)}; it must be ({len(features)},) as features has rows")
    if labels.device != features.device:
        raise ValueError(f"labels is on {labels.device}; it must be on {features.device} as features is")


def _check_label_range(labels: Tensor, num_classes: int | None) -> int:
    """The number of classes: as given, or the largest label plus one."""
    low, high = torch.stack(labels.aminmax()).tolist()
    if num_classes is None:
        num_classes = high + 1
    for value in (low, high):
        if not 0 <= value < num_classes:
            raise ValueError(f"labels holds {value}; every label must be in [0, {max(num_classes, 1)})")
    return num_classes


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {_name(value)}; it must be an int")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


def _check_rtol(rtol: float | None) -> None:
    if rtol is None:
        return
    if not isinstance(rtol, (int, float)) or isinstance(rtol, bool):
        raise TypeError(f"rtol is {rtol!r}, a {_name(rtol)}; it must be a float in [0, 1) or None")
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol is {rtol}; it must be in [0, 1), or None for 16 eps of the features' dtype")


def _check_center(center: str) -> None:
    if center not in _CENTERS:
        raise ValueError(f"center is {center!r}; it must be one of {_CENTERS}")


def _check_weight(weight: Tensor, num_classes: int | None, width: int | None) -> None:
    _check_tensor("classifier_weight", weight, _FEATURE_DTYPES)
    expected = f"({'num_classes' if num_classes is None else num_classes}, {'D' if width is None else width})"
    fits = weight.ndim == 2 and num_classes in (None, weight.shape[0]) and width in (None, weight.shape[1])
    if not fits or weight.shape[0] == 0:
        raise ValueError(f"classifier_weight has shape {tuple(weight.shape)}; it must be {expected}")


def _checked_weight(weight: Tensor | None, features: Tensor, num_classes: int | None) -> Tensor | None:
    """The classifier in float64."""
    if weight is None:
        return None
    _check_weight(weight, num_classes, features.shape[1])
    if weight.device != features.device:
        raise ValueError(f"classifier_weight is on {weight.device}; it must be on {features.device} as features is")
    return weight.to(torch.float64)
