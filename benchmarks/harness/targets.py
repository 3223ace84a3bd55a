"""What deqfast promises of its speed and memory, and how each promise is read from measured rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
ITERATED = ("picard-128x8192", "anderson-m6-128x8192", "anderson-m6-bf16-128x8192", "broyden-n20-128x8192")


@dataclass(frozen=True)
class Target:
    """A bound on a column of a row; with `against`, on the gain over that provider of the case, or the share of its
    memory."""

    section: str
    case: str
    provider: str
    column: str  # "gain", "peak_bytes" (both `against` a peer), or any column of the row
    bound: float
    against: str | None = None

    @property
    def at_least(self) -> bool:
        return self.column == "gain"

    @property
    def what(self) -> str:
        """In words."""
        sign = ">=" if self.at_least else "<="
        names = {"gain": "faster than", "peak_bytes": "memory of", "floor_x": "the time of its bytes at the copy rate"}
        words = " ".join(filter(None, [names.get(self.column, self.column), self.against]))
        return f"{self.case} {self.provider}: {sign} {self.bound:g}x {words}"

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
        if value is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound


def _solve(case: str, column: str, bound: float, against: str | None = None) -> Target:
    return Target("solves", case, "cpp", column, bound, against)


# On two quiet CPU cores.
TARGETS = (
    *(_solve(case, "gain", bound, "torchdeq") for case, bound in zip(ITERATED, (3, 4.5, 7, 11), strict=True)),
    *(_solve(case, "floor_x", 1.5) for case in ITERATED),
    _solve("broyden-n20-128x8192", "peak_bytes", 1.0, "torchdeq"),
    _solve("anderson-m6-bf16-128x8192", "peak_bytes", 0.55, "torchdeq"),
    Target("nc", "nc-2000x8192-K100-fp64", "cpp", "gain", 500, "pinv"),
    Target("nc", "nc-2000x8192-K100-fp64", "cpp", "error", 1e-12),
)


def verdicts(rows: Sequence[Row]) -> list[tuple[Target, float | None, bool | None]]:
    """Every target with what was measured, and whether it is met; None for both where the rows do not tell."""
    values = [target.value(rows) for target in TARGETS]
    return [(target, value, target.met(value)) for target, value in zip(TARGETS, values, strict=True)]
