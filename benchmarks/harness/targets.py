"""Targets of deqfast's speed and memory, which are the rows of benchmarks/targets.csv; measured rows judge them.

`set_for` is two quiet cores of a CPU, or a GPU. What is set for an H100 counts as missed until it is measured. Of
several providers the best counts, of several cases the worst. The target for nc1-50000x512-K10-fp32 is a gain and not a
time: two passes take 0.1 ms, while the host takes 2 to 4 ms for 82 launches, five waits and cuSOLVER's SVD.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .record import Row

# Column of a target -> the text after its bound.
COLUMNS = {
    "gain": "x faster than",
    "peak_bytes": "x memory of",
    "floor_x": "x the time of its bytes at the copy rate",
    "ms": " ms",
    "ms_min": "x the time of",
    "busy": " of the time the device is busy",
    "steps_per_second": " steps a second together",
    "error": " relative error",
    "host_waits": " host waits",
    "share_of_f": "x the time of f",
    "over_flop": "x the ratio of operations to the explicit network",
    "nc_share": " of an explicit epoch for NC1-NC4, given the features",
    "paper_hours": " hours for this network's 20 of the paper's 40 trainings, extrapolated",
}
GPU = ("cuda", "triton", "cuda-graph", "triton-graph")  # peak_bytes leaves out the memory of a graph
MOST = ("gain", "busy", "steps_per_second")  # at least the bound; all other columns at most
ITERATED = ("picard-128x8192", "anderson-m6-128x8192", "anderson-m6-bf16-128x8192", "broyden-n20-128x8192")


@dataclass(frozen=True)
class Target:
    """Bound on a column of a row; with `against`, on the gain over that provider or the share of its column."""

    set_for: str
    section: str
    cases: tuple[str, ...]
    providers: tuple[str, ...]
    column: str
    bound: float
    against: str
    device: str  # for a case whose providers have the same names on every device

    @property
    def on_gpu(self) -> bool:
        return self.set_for != "cpu"

    @property
    def awaited(self) -> bool:
        """Whether it counts as missed until it is measured."""
        return self.set_for == "H100"

    @property
    def what(self) -> str:
        """Target in words."""
        who = " or ".join(self.providers) if self.providers != GPU else "the best GPU kernel or graph"
        who += " on a GPU" if self.device == "cuda" else ""
        words = " ".join(filter(None, [COLUMNS[self.column], self.against]))
        return f"{', '.join(self.cases)} {who}: {'>=' if self.column in MOST else '<='} {self.bound:g}{words}"

    def value(self, rows: Sequence[Row]) -> float | None:
        """Measured value of the best provider in the worst case; None if the rows do not have it."""
        best, worst = (max, min) if self.column in MOST else (min, max)
        values = []
        for case in self.cases:
            own = [row for row in rows if (row["section"], row["case"]) == (self.section, case)]
            by_name = {row["provider"]: row for row in own if self.device in ("", row.get("device"))}
            each = [self._of(by_name[name], by_name) for name in self.providers if name in by_name]
            values.append(best((value for value in each if value is not None), default=None))
        return None if None in values else worst(value for value in values if value is not None)

    def _of(self, row: Row, by_name: dict[str, Row]) -> float | None:
        own = row.get("gains", {}).get(self.against) if self.column == "gain" else row.get(self.column)
        if not self.against or own is None or self.column == "gain":
            return own
        theirs = by_name.get(self.against, {}).get(self.column)
        return own / theirs if theirs else None

    def met(self, value: float) -> bool:
        return value >= self.bound if self.column in MOST else value <= self.bound


def _read(cases: str, providers: str, bound: str, **given: str) -> Target:
    who = GPU if providers == "GPU" else tuple(providers.split())
    return Target(cases=tuple(cases.split("; ")), providers=who, bound=float(bound), **given)


with open(Path(__file__).parents[1] / "targets.csv") as _file:
    TARGETS = [_read(**row) for row in csv.DictReader(_file)]


def verdicts(targets: Iterable[Target], rows: Sequence[Row]) -> list[str]:
    """Sentences on the targets that the rows decide."""
    values = [(target, value) for target in targets if (value := target.value(rows)) is not None]
    return [f"{'met' if target.met(value) else 'MISSED'} {target.what}: {value:.3g}" for target, value in values]
