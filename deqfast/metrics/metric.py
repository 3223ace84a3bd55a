"""Neural-collapse metrics accumulated over batches and processes, as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from .._checks import check_count
from ..ops import check_kernel_name, choose_kernel
from . import checks
from .neural_collapse import NC1_RESOLUTION, NCResult, geometry_of, make_result, neural_collapse, undefined
from .statistics import Classifier, ClassMeans, Samples, between_classes, class_means, default_rtol

MAX_STREAMING_FEATURES = 1024

_IN_MODULE = {"classifier_weight": "weight", "classifier_bias": "bias"}  # what a module given for it must have
_NO_SAMPLES = "the metric is empty; call update(features, labels) before compute()"


class NeuralCollapse(Metric):
    """Metric NC1-NC4 for ``torchmetrics`` (Sun & Shi, NeurIPS 2024, arXiv 2410.23391, Appendix A).

    ``update(features, labels)`` per batch, ``compute()`` for the ``NCResult`` over all batches (and all processes),
    ``reset()``. The result equals ``neural_collapse`` on all batches concatenated.

    By default the state is a list of copies of the feature and label batches, in their dtypes. It takes N x D memory,
    twice that during ``compute``, and all of it on every process after a distributed sync. With ``streaming=True`` the
    state is a count and a mean per class, and one D x D within-class scatter, in float64. Each batch is centred on its
    own class means before any product. Memory does not grow with N. NC4 needs the samples, except in "zhu": else None.

    A method that raises leaves the metric as it was. Processes without samples may take part in a distributed sync.

    Args:
        num_classes: number of classes; labels are in [0, num_classes).
        classifier_weight: (num_classes, D) tensor, or a module with such a ``weight``, or None. Every ``compute`` reads
            it; it can be set later, and may be on another device. Clones copy it. It is neither parameter nor state.
        rtol, center, geometry, convention: as in ``neural_collapse``.
        streaming: keep moments instead of features.
        num_features: D, at most 1024; needed with ``streaming=True`` unless ``classifier_weight`` is given.
        kernel: as in ``neural_collapse``. With ``streaming=True`` it computes the class means, torch the scatter.
        classifier_bias: (num_classes,) tensor, or a module with such a ``bias``, or None, as ``classifier_weight``. The
            bias of a module given as ``classifier_weight`` is not read: give the module here too.
        per_class: as in ``neural_collapse``. Not with ``streaming=True``, which keeps one scatter for all classes.
        **kwargs: of ``torchmetrics.Metric``; ``compute_with_cache`` defaults to False: the classifier may change.

    Raises:
        TypeError: an argument or a batch has another type or dtype than ``neural_collapse`` takes.
        ValueError: an argument or a batch is out of range; ``compute`` without samples. Labels out of range raise in
            ``update`` when streaming (it waits for the device), else in ``compute``.
        RuntimeError: ``kernel`` is not available; raised at the same places.

    Examples:
        >>> classifier = torch.nn.Linear(64, 10)
        >>> metric = deqfast.NeuralCollapse(num_classes=10, classifier_weight=classifier)
        >>> for _ in range(5):
        ...     metric.update(torch.randn(100, 64), torch.arange(100) % 10)
        >>> metric.compute().rank
        9
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
    classifier_bias: Tensor | nn.Module | None

    def __init__(
        self,
        num_classes: int,
        classifier_weight: Tensor | nn.Module | None = None,
        rtol: float | None = None,
        center: str | None = None,
        streaming: bool = False,
        num_features: int | None = None,
        kernel: str = "auto",
        geometry: bool = False,
        *,
        classifier_bias: Tensor | nn.Module | None = None,
        convention: str = "sun",
        per_class: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"compute_with_cache": False, **kwargs})
        check_count("num_classes", num_classes)
        self.center = checks.check_options(rtol, center, convention, num_features=num_features)
        if per_class and streaming:
            raise ValueError("per_class=True needs the samples; streaming=True keeps none: use streaming=False")
        self.num_classes, self.num_features, self.rtol = num_classes, num_features, rtol
        self.streaming, self.kernel = streaming, check_kernel_name(kernel)
        self.geometry, self.convention, self.per_class = geometry, convention, per_class
        self.classifier_weight, self.classifier_bias = classifier_weight, classifier_bias
        if streaming:
            self._add_moment_states()
        else:
            self.add_state("features", default=[], dist_reduce_fx="cat")
            self.add_state("labels", default=[], dist_reduce_fx="cat")

    def _add_moment_states(self) -> None:
        if self.num_features is None and (weight := self._read("classifier_weight")) is not None:
            self.num_features = weight.shape[1]
        if self.num_features is None:
            raise ValueError("num_features is None; streaming=True needs it, or a classifier_weight (num_classes, D)")
        if self.num_features > MAX_STREAMING_FEATURES:
            most = f"streaming=True keeps a D x D matrix and allows at most {MAX_STREAMING_FEATURES}"
            raise ValueError(f"num_features is {self.num_features}; {most}: use streaming=False")
        shape = (self.num_classes + self.num_features, 1 + self.num_features)
        self.add_state("moments", default=torch.zeros(shape, dtype=torch.float64), dist_reduce_fx=_merge_moments)
        # (default rtol, NC1 resolution) of the coarsest dtype seen
        self.add_state("precision", default=torch.zeros(2, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("excluded", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch and return its own result."""
        with self._undone_on_error():
            return super().forward(*args, **kwargs)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric; ValueError if it has another number of classes or of features."""
        for name in ("num_classes", "num_features"):
            own, given = (getattr(metric, name, None) for metric in (self, incoming_state))
            if None not in (own, given) and own != given:
                raise ValueError(f"incoming_state has {name} {given}; it must be {own}")
        with self._undone_on_error():
            super().merge_state(incoming_state)
            widths = {part.shape[1] for part in ([] if self.streaming else self.features)}
            if len(widths) > 1:
                raise ValueError(f"incoming_state has features of another width: {sorted(widths)}")

    def reset(self) -> None:
        """Forget all samples."""
        for name in () if self.streaming else self._defaults:
            setattr(self, name, [])  # a sync has left a tensor, which torchmetrics would clear like a list
        super().reset()

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the states of all processes, see ``torchmetrics.Metric.sync``."""
        with self._undone_on_error():
            super().sync(*args, **kwargs)

    def _wrap_update(self, update: Callable) -> Callable:
        return self._undone_on_error()(super()._wrap_update(update))

    def _wrap_compute(self, compute: Callable) -> Callable:
        # Without this torchmetrics would leave the states of all processes.
        return self._undone_on_error()(super()._wrap_compute(compute))

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Context that leaves the metric as it was if it raises. Tensors of the state are replaced, not written to."""
        before = {name: list(value) if isinstance(value, list) else value for name, value in self.__dict__.items()}
        try:
            yield
        except BaseException:
            self.__dict__.update(before)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the classifier is checked and is not registered as a submodule."""
        if name in _IN_MODULE:
            # If registered, its parameters would also appear in the metric's parameters() and state_dict().
            object.__setattr__(self, name, self._checked(name, value))
        else:
            super().__setattr__(name, value)

    def _checked(self, name: str, value: Any) -> Tensor | nn.Module | None:
        if value is None:
            return None
        part = getattr(value, _IN_MODULE[name], None) if isinstance(value, nn.Module) else value
        if not isinstance(part, Tensor):
            allowed = f"a tensor, a module with a {_IN_MODULE[name]}, or None"
            raise TypeError(f"{name} is a {type(value).__name__}; give {allowed}")
        if name == "classifier_bias":
            checks.check_bias(part, self.num_classes)
        else:
            checks.check_weight(part, self.num_classes, self.num_features)
        return value if isinstance(value, nn.Module) else value.detach()

    def _read(self, name: str) -> Tensor | None:
        value = getattr(self, name)
        return getattr(value, _IN_MODULE[name]).detach() if isinstance(value, nn.Module) else value

    def _classifier_on(self, device: torch.device) -> list[Tensor | None]:
        """Weight and bias as they are now."""
        parts = [self._read(name) for name in _IN_MODULE]
        return [None if part is None else part.to(device) for part in parts]

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch: features (N, D), labels (N,), dtypes as in ``neural_collapse``; N may be 0."""
        checks.check_features(features)
        checks.check_vector("labels", labels, checks.LABEL_DTYPES, features, "features")
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
        checks.check_label_range(labels, self.num_classes)
        samples = Samples.grouped(features, labels, self.num_classes)
        samples, stats = class_means(samples, choose_kernel(self.kernel, features.device))
        self.moments = _merge_moments([self.moments, _batch_moments(samples, stats)])
        self.excluded = self.excluded + (features.shape[0] - samples.count)
        facts = (default_rtol(features.dtype), NC1_RESOLUTION.get(features.dtype, 0.0))
        self.precision = torch.maximum(self.precision, self.precision.new_tensor(facts))

    @torch.no_grad()
    def compute(self) -> NCResult:
        """Return the ``NCResult`` of all samples since the last ``reset``."""
        if self.streaming:
            return self._compute_moments()
        if len(self.features) == 0:
            raise ValueError(_NO_SAMPLES)
        features, labels = dim_zero_cat(self.features), dim_zero_cat(self.labels)
        weight, bias = self._classifier_on(features.device)
        options = self.num_classes, self.rtol, self.center, self.kernel, self.geometry
        more: dict[str, Any] = {"convention": self.convention, "per_class": self.per_class}
        return neural_collapse(features, labels, weight, *options, classifier_bias=bias, **more)

    def _compute_moments(self) -> NCResult:
        counts, means, scatter = _unpack(self.moments, self.num_classes)
        default_rtol, resolution = self.precision.tolist()
        excluded = int(self.excluded)
        seen = counts.nonzero()[:, 0]
        if len(seen) == 0 and excluded == 0:
            raise ValueError(_NO_SAMPLES)
        weight, bias = self._classifier_on(means.device)
        checks.check_classifier(weight, bias, self.num_classes, means, "the metric")
        classifier = Classifier.of(weight, bias)
        if len(seen) == 0:
            return undefined(excluded, self.convention, classifier, kept=False)
        if classifier is not None:
            classifier = classifier.rows(seen)
        stats = ClassMeans(counts[seen], means[seen], torch.zeros_like(means[0]))
        between = between_classes(stats, self.center, default_rtol if self.rtol is None else self.rtol)
        whitening = between.whitening
        within = ((scatter @ whitening) * whitening).sum(0).clamp_min(0)
        result = make_result(stats, between, within, classifier, None, excluded, resolution, self.convention)
        return result._replace(geometry=geometry_of(stats, classifier)) if self.geometry else result

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> nn.Module:
        """Move the metric with the model that holds it. Dtypes stay; only ``set_dtype`` changes the features' dtype."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(fn(tensor.new_empty(0)).device)

        own = [name for name in self._defaults if name != "features"]
        super()._apply(fn if self._dtype_convert else move, [*exclude_state, *own])
        for name in own:
            state = getattr(self, name)
            setattr(self, name, move(state) if isinstance(state, Tensor) else [move(part) for part in state])
            default = self._defaults[name]
            self._defaults[name] = move(default) if isinstance(default, Tensor) else default
        return self

    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        if not self.streaming and torch.distributed.is_initialized():
            self._agree_on_layout(process_group or self.process_group)
        super()._sync_dist(dist_sync_fn, process_group)

    def _agree_on_layout(self, group: Any | None) -> None:
        """Give a process without samples an empty tensor of the others' width and dtype, which gathering needs."""
        mine = (self.features[0].shape[1], self.features[0].dtype) if len(self.features) else None
        layouts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(layouts, mine, group=group)
        known = {layout for layout in layouts if layout is not None}
        if len(known) > 1:
            raise ValueError(f"features have (columns, dtype) {layouts} on the processes; they must be the same on all")
        if mine is None and known:
            width, dtype = known.pop()
            self.features = [torch.empty((0, width), dtype=dtype, device=self.device)]
            self.labels = [torch.empty(0, dtype=torch.int64, device=self.device)]


# Moments are packed in one (K + D, 1 + D) tensor: [count, mean] per class above [0, scatter]. torchmetrics reduces each
# state separately, but counts, means and the scatter can only be merged together.


def _pack(counts: Tensor, means: Tensor, scatter: Tensor) -> Tensor:
    top = torch.cat([counts[:, None], means], dim=1)
    return torch.cat([top, nn.functional.pad(scatter, (1, 0))])


def _unpack(moments: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (K,), means (K, D) and the within-class scatter (D, D)."""
    top, bottom = moments[:num_classes], moments[num_classes:]
    return top[:, 0], top[:, 1:], bottom[:, 1:]


def _batch_moments(samples: Samples, stats: ClassMeans) -> Tensor:
    """Moments of one batch, its within-class scatter about its own class means."""
    means = stats.means
    scatter = means.new_zeros(means.shape[1], means.shape[1])
    for features, labels in samples.blocks():
        deviations = features.sub_(means.index_select(0, labels))
        scatter.addmm_(deviations.T, deviations)
    if not bool(scatter.isfinite().all()):
        why = "features holds values whose squares overflow float64, which streaming=True sums"
        raise ValueError(f"{why}: scale them (no metric depends on it), or use streaming=False")
    return _pack(stats.counts, means, scatter)


def _merge_moments(parts: Iterable[Tensor]) -> Tensor:
    """Moments of a union of sets of samples: their scatters, plus the scatter of their means about the joint means.

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
