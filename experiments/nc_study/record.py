"""Records of a run, as types: a line per epoch, and the result. Files are read back by the same types, so that a
damaged one, or one of another format, raises an error that names the place."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from runs.provenance import Recorded
from runs.steps import EAGER, GRAPHED

from .config import ARMS, Experiment, Setting

FORMAT = 5  # increased when a name or a meaning in a record changes
AVERAGED = 10  # epochs at the end over which accuracies are averaged, as in the paper
GROUPS = ("overall", "majority", "minority")
SHOTS = ("many", "medium", "few")
"""Classes of more than 100 training images, of 20 to 100, and of fewer (Liu et al., CVPR 2019)."""
LATE = {name: f"{name}, last epochs" for name in GROUPS}
"""Names of the accuracies' means over the last epochs."""
COLLAPSE = ("nc1", "nc2", "nc3", "nc4")
CENTRED = ("nc2_centered", "nc3_centered")
SOLVER_MEANS = ("iterations", "residual", "converged")
SOLVER_COUNTS = ("max_iter", "nonfinite", "stalled", "skipped")
MEASURED = (*COLLAPSE, *CENTRED)
"""Metrics of neural collapse that a record has."""
SOLVED = (*SOLVER_MEANS, "skipped")
"""Columns of the curves of a DEQ."""
PASSES = ("test", "nc")
"""Passes with fixed weights, whose solves have columns of their own, such as `test_converged`."""
LARGEST = 1e100
"""Largest number of a record: reports square numbers and add them."""

Number = float | None
"""Number that may be undefined: a mean without terms, a metric of coinciding class means."""

Curves = dict[str, tuple[int | float | None, ...]]
"""Course of a training as columns by name, with a value for each epoch: see `results.curves`."""

Collapse = dict[str, int | float | None]
"""Fields of `deqfast.NCResult` of the training images; None if a metric is not defined."""


def _check_collapse(collapse: Collapse | None) -> None:
    if collapse is not None and (absent := [name for name in MEASURED if name not in collapse]):
        raise ValueError(f"nc has no {absent[0]}")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value; the deviation of a single one is 0."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.2f}±{self.std:.2f}"


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies in percent, mean over the classes of a group; a balanced study has no minority."""

    overall: Spread
    majority: Spread | None = None
    minority: Spread | None = None


@dataclass(frozen=True)
class SolverSummary:
    """Means over the solved samples (residual: relative, of the finite ones; converged: a share of 1). Then the numbers
    of samples by their ending, or left out of the loss as skipped. A run has means of its epochs."""

    iterations: Number
    residual: Number
    converged: Number
    max_iter: int
    nonfinite: int
    stalled: int
    skipped: int


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time."""

    train: float
    test: float
    metrics: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.train + self.test + self.metrics


@dataclass(frozen=True)
class Epoch:
    """Line of a finished epoch. Accuracies are in percent, of the test images except the training accuracy, and None if
    they were not evaluated. Loss and training accuracy are None if no sample was kept."""

    epoch: int
    lr: float
    loss: Number
    train_accuracy: Number
    overall: Number
    majority: Number
    minority: Number
    train_solver: SolverSummary | None
    nc: Collapse | None
    seconds: Seconds
    many: Number = None
    medium: Number = None
    few: Number = None
    test_solver: SolverSummary | None = None
    """Solves of the test images; None without an evaluation or a fixed point, and in old records."""
    nc_solver: SolverSummary | None = None
    """Solves of the training images of which neural collapse was measured, likewise."""

    def __post_init__(self) -> None:
        _check_collapse(self.nc)


@dataclass(frozen=True)
class SpectralRadius:
    """Radius of the Jacobian df/dz at the fixed points of some training images, and their classes."""

    labels: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Parameters of the last block; forward FLOPs per image of all before it and of one evaluation of it; and the
    number of evaluations. FLOPs are those of convolutions and the classifier, 2 for a product and its sum."""

    last_parameters: int
    flops_before: int
    flops_evaluation: int
    evaluations: float

    @property
    def flops(self) -> float:
        """Forward FLOPs per image of the whole network."""
        return self.flops_before + self.evaluations * self.flops_evaluation


@dataclass(frozen=True)
class NetworkResult:
    """Result of one network. `accuracy` is the mean over the last `epochs_averaged` epochs, everything else is after
    the last one."""

    parameters: int
    accuracy: Accuracy
    epochs_averaged: int
    nc: Collapse
    solver: SolverSummary | None
    seconds: Seconds
    curves: Curves
    spectral_radius: SpectralRadius | None
    cost: Cost | None = None
    """None in old records."""

    def __post_init__(self) -> None:
        _check_collapse(self.nc)
        names = ("epoch", "lr", "loss", "train_accuracy", *GROUPS, *MEASURED)
        if absent := [name for name in (*names, *(SOLVED if self.solver else ())) if name not in self.curves]:
            raise ValueError(f"curves have no {absent[0]}")
        epochs = len(self.curves["epoch"])
        if not epochs or any(len(column) != epochs for column in self.curves.values()):
            raise ValueError("curves must have a value for each epoch, and an epoch")
        pairs = zip(self.curves["loss"], self.curves["train_accuracy"], strict=True)
        if None in (*self.curves["epoch"], *self.curves["lr"]) or any((a is None) != (b is None) for a, b in pairs):
            raise ValueError("curves must have a number and a rate of each epoch, and accuracies with its loss")
        numbers = [value for column in (*self.curves.values(), self.nc.values()) for value in column if value]
        if any(abs(value) > LARGEST for value in numbers):
            raise ValueError(f"curves and nc must be at most {LARGEST:g} in size")

    def quantity(self, name: str) -> Number:
        """Quantity of a claim, after the last epoch. It is an accuracy by the name of its group, a metric of neural
        collapse, or an accuracy's mean over the last epochs."""
        if name in LATE.values():
            spread = getattr(self.accuracy, name.partition(",")[0])
            return spread.mean if spread else None
        return self.curves[name][-1] if name in GROUPS else self.nc[name]


@dataclass(frozen=True)
class KernelChoice:
    """Kernel requested, kernel used, and why they differ (None if they do not)."""

    requested: str
    used: str
    reason: str | None


@dataclass(frozen=True)
class RunResult(Recorded):
    """Everything there is to know about a finished run."""

    format: int
    arm: str
    settings: Experiment
    train_images_per_class: tuple[int, ...]
    kernel: KernelChoice
    network: NetworkResult
    command: str
    steps: str = EAGER
    """How training steps ran, EAGER or GRAPHED. Records from before there was a choice lack it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.settings
        if self.steps not in (EAGER, GRAPHED):
            raise ValueError(f"steps {self.steps}: {EAGER} or {GRAPHED}")
        if self.arm not in ARMS or self.arm != settings.arm:
            raise ValueError(f"arm {self.arm}: {settings.arm}, as the settings say, and one of {', '.join(ARMS)}")
        if "auto" in (settings.preset, settings.dataset, settings.device, settings.precision):
            raise ValueError("settings must have a preset, data set, device and precision, not auto")

    @property
    def setting(self) -> Setting:
        """Setting of the run, its place in the paper's tables."""
        return self.settings.setting


@dataclass(frozen=True)
class Begun:
    """First record of a started run."""

    format: int
    settings: Experiment
