"""What deqfast promises of its speed and memory, and how each promise is read from measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
# Column of a target -> what stands behind its bound.
COLUMNS = {
    "gain": "x faster than",
    "peak_bytes": "x memory of",
    "floor_x": "x the time of its bytes at the copy rate",
    "ms": " ms",
    "error": " relative error",
    "over_flop": "x the ratio of operations to the explicit network",
    "nc_share": " of an explicit epoch for NC1-NC4, given the features",
}
ITERATED = ("picard-128x8192", "anderson-m6-128x8192", "anderson-m6-bf16-128x8192", "broyden-n20-128x8192")


def within(value: float | None, bound: float, at_least: bool) -> bool | None:
    """Whether a bound is met; None where there is no value."""
    if value is None:
        return None
    return value >= bound if at_least else value <= bound


@dataclass(frozen=True)
class Target:
    """A bound on a column of a row; with `against`, on the gain over that provider of the case, or the share of its
    memory."""

    section: str
    case: str
    provider: str
    column: str  # of ``COLUMNS``; "gain" and "peak_bytes" are `against` a peer
    bound: float
    against: str | None = None

    @property
    def at_least(self) -> bool:
        return self.column == "gain"

    @property
    def words(self) -> str:
        """What is bounded: "x faster than torchdeq"."""
        return " ".join(filter(None, [COLUMNS[self.column], self.against])).strip()

    @property
    def what(self) -> str:
        """The whole target in words."""
        space = "" if COLUMNS[self.column].startswith("x") else " "
        return f"{self.case} {self.provider}: {'>=' if self.at_least else '<='} {self.bound:g}{space}{self.words}"

    def value(self, rows: Sequence[Row]) -> float | None:
        """What was measured; None where the rows do not tell."""
        found = {row["provider"]: row for row in rows if (row["section"], row["case"]) == (self.section, self.case)}
        row = found.get(self.provider, {})
        if self.column == "gain":
            return row.get("gains", {}).get(self.against)
        if self.against is None:
            return row.get(self.column)
        own, theirs = row.get(self.column), found.get(self.against, {}).get(self.column)
        return own / theirs if own is not None and theirs else None

    def met(self, value: float | None) -> bool | None:
        return within(value, self.bound, self.at_least)


def _solve(case: str, column: str, bound: float, against: str | None = None) -> Target:
    return Target("solves", case, "cpp", column, bound, against)


# On two quiet CPU cores.
TARGETS = (
    *(_solve(case, "gain", bound, "torchdeq") for case, bound in zip(ITERATED, (3, 4.5, 7, 11), strict=True)),
    *(_solve(case, "floor_x", 1.5) for case in ITERATED),
    _solve("broyden-n20-128x8192", "peak_bytes", 1.0, "torchdeq"),
    _solve("anderson-m6-bf16-128x8192", "peak_bytes", 0.55, "torchdeq"),
    Target("nc", "nc-50000x512-K10-fp32", "cpp", "ms", 1000),  # NC1 to NC4
    Target("nc", "nc1-2000x8192-K100-fp64", "cpp", "gain", 500, "pinv"),
    Target("nc", "nc1-2000x8192-K100-fp64", "cpp", "error", 1e-12),
)
# Of the study's training step: its time over the explicit network's, over the ratio of their floating-point operations;
# and NC1-NC4, given the features, as a share of an explicit epoch.
FLOP_TARGET = 1.15
NC_TARGETS = {"cpu": 0.03, "cuda": 0.01}
STUDY_TARGETS = tuple(
    Target("training step", case, provider, column, bound)
    for case in ("width 16, batch 32, jfb", "width 64, batch 128, jfb")
    for provider, column, bound in (("deq", "over_flop", FLOP_TARGET), ("explicit", "nc_share", NC_TARGETS["cpu"]))
)


# How the unit of a GPU's target is written behind a number; a share is told in percent.
UNITS = {"us": " us", "h": " h", "count": "", "x": "x", "share": "%"}


@dataclass(frozen=True)
class GpuTarget:
    """A bound that gpu.sh judges on an H200. unit: of ``UNITS``; of: what a ratio or a share is of."""

    what: str
    bound: float
    unit: str
    of: str = ""
    at_least: bool = False

    @property
    def text(self) -> str:
        """ ">=12x torchdeq", for the table of gpu.sh."""
        return self.words(">=", "<=", UNITS)

    def words(self, at_least: str, at_most: str, units: Mapping[str, str]) -> str:
        """The bound behind `at_least` or `at_most`, with its unit as `units` has it."""
        amount = 100 * self.bound if self.unit == "share" else self.bound
        return f"{at_least if self.at_least else at_most}{amount:g}{units[self.unit]} {self.of}".rstrip()

    def met(self, value: float | None) -> bool | None:
        return within(value, self.bound, self.at_least)


_CELL = "fully connected cell, D = 256, B = 128, bf16 weights, 30 iterations"
# The name by which the sections of gpu.py judge -> the target.
GPU_TARGETS = {
    "copy share": GpuTarget("solver steps from D = 8192 on", 0.85, "share", "of the copy rate", at_least=True),
    "anderson step": GpuTarget("Anderson step, m = 6, bf16 history, (128, 8192)", 20, "us"),
    "anderson step, large": GpuTarget("Anderson step, m = 6, bf16 history, (32, 65536)", 34, "us"),
    "broyden step": GpuTarget("Broyden step, n = 18, (128, 8192)", 58, "us"),
    "anderson solve": GpuTarget("Anderson solve, (128, 8192): gain", 12, "x", "torchdeq", at_least=True),
    "broyden solve": GpuTarget("Broyden solve, (128, 8192): gain", 8, "x", "torchdeq", at_least=True),
    "anderson memory": GpuTarget("Anderson solve, bf16 history, (128, 8192): memory", 0.55, "x", "torchdeq's memory"),
    "broyden memory": GpuTarget("Broyden solve, (128, 8192): memory", 1, "x", "torchdeq's memory"),
    "waits": GpuTarget("solve, (128, 8192): host waits", 1, "count", "and one for every check"),
    "solver share": GpuTarget("solve of the bf16 residual cell: the solver's time", 0.4, "share", "of f"),
    "cell solve": GpuTarget("solve of the bf16 residual cell: gain", 3, "x", "torchdeq", at_least=True),
    "norm": GpuTarget("normalisation, ReLU and sum of a cell, (128, 512, 4, 4) bf16", 6, "us"),
    "fc": GpuTarget(_CELL, 120, "us"),
    "fc gain": GpuTarget(f"{_CELL}: gain", 40, "x", "torchdeq", at_least=True),
    "nc": GpuTarget("NC1, N = 50000, D = 512, K = 10", 120, "us"),
    "nc share": GpuTarget("NC1-NC4", NC_TARGETS["cuda"], "share", "of an epoch"),
    "training step": GpuTarget("a DEQ's training step over the explicit one's", FLOP_TARGET, "x", "the ratio of FLOPs"),
    "paper": GpuTarget("the paper's 40 trainings of 100 epochs, extrapolated", 1, "h"),
}


def verdicts(rows: Sequence[Row]) -> list[tuple[Target, float | None, bool | None]]:
    """Every target with what was measured, and whether it is met; None for both where the rows do not tell."""
    found = [(target, target.value(rows)) for target in (*TARGETS, *STUDY_TARGETS)]
    return [(target, value, target.met(value)) for target, value in found]
