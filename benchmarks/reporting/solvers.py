"""Whole solves at the size of the headline: what README's table and the figures of the solvers are made from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .files import GAIN, PEER, Results
from .tables import Case, cases_of, threads_text

SECTION = "solves"
BATCH, DIM = STANDARD = (128, 8192)
OURS, EAGER = "cpp", "eager"
GAIN_OVER_PEER = GAIN + PEER


@dataclass(frozen=True)
class Headline:
    """The solves at the size of the headline by a number of threads."""

    threads: int
    cases: list[Case]

    def shape(self) -> str:
        return f"({BATCH}, {DIM}) fp32"

    def title(self) -> str:
        return f"{self.shape()}, {threads_text(self.threads)}"


def headlines(results: Results) -> list[Headline]:
    """On CPUs, the most threads first."""
    rows = [row for row in results.rows(SECTION) if (row.get("batch"), row.get("dim")) == STANDARD]
    rows = [row for row in rows if f"-{BATCH}x{DIM}" in row["case"] and "-fc-" not in row["case"]]
    cases = [case for case in cases_of(rows) if OURS in case.rows]
    numbers = sorted({case.threads for case in cases}, reverse=True)
    return [Headline(threads, [case for case in cases if case.threads == threads]) for threads in numbers]


def solver_text(case: str) -> str:
    """ "Anderson, m = 6, bf16 history" for "anderson-m6-bf16-128x8192"; any but the headline's size is told, too."""
    named, _, size = case.rpartition("-")
    kind, *rest = named.split("-")
    parts = [kind.capitalize()]
    for part in rest:
        window = re.fullmatch(r"([mn])(\d+)", part)
        parts.append(f"{window[1]} = {window[2]}" if window else f"{part} history" if part == "bf16" else part)
    if size != f"{BATCH}x{DIM}":
        parts.append(f"({size.replace('x', ', ')})")
    return ", ".join(parts)
