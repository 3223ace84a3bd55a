"""The targets beside what was measured: met, missed, or not measured and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .files import Results
from .words import link, listed, plural, table

MET, MISSED, ABSENT, NO_GPU = "met", "missed", "not measured", "not measured: no GPU"


@dataclass(frozen=True)
class Verdict:
    """One target; `bound` and `measured` as text, `state` one of the four above."""

    what: str
    bound: str
    measured: str
    state: str
    command: str
    file: str | None = None


def state_of(value: Any, limit: float, at_least: bool) -> str:
    """Of a number, or of those of several runs, all of which must meet the limit."""
    values = value if isinstance(value, list) else [value]
    missed = sum(not (one >= limit if at_least else one <= limit) for one in values)
    if not missed:
        return MET
    return MISSED if missed == len(values) else f"{MISSED} in {missed} of {len(values)} runs"


def counts_text(found: Sequence[Verdict]) -> str:
    if not found:
        return "There are no targets."
    """ "Of 5 targets, 3 are met, 1 is missed and 1 is not measured for want of a GPU."."""
    kinds = Counter(MISSED if verdict.state.startswith(MISSED) else verdict.state for verdict in found)
    endings = {MET: "met", MISSED: "missed", ABSENT: "not measured yet", NO_GPU: "not measured for want of a GPU"}
    parts = [f"{kinds[kind]} {'is' if kinds[kind] == 1 else 'are'} {text}" for kind, text in endings.items() if kinds[kind]]
    return f"Of {plural(len(found), 'target')}, {listed(parts)}."


def verdicts(results: Results) -> list[Verdict]:
    return []


def bound(case: str, key: str) -> float | None:
    return {"picard": 3, "anderson-m6": 4.5, "anderson-m6-bf16": 7, "broyden-n20": 11}.get(case.removesuffix("-128x8192"))


def summary(results: Results, page: str = "") -> list[str]:
    """How many targets are met, and every one that is missed."""
    found = verdicts(results)
    lines = [f"{counts_text(found)} {link('All targets', f'{page}#targets')}."]
    missed = [verdict for verdict in found if verdict.state.startswith(MISSED)]
    if missed:
        lines += ["", "Missed:", ""]
        lines += [f"- {verdict.what}: {verdict.measured}, target {verdict.bound}" for verdict in missed]
    return lines


def target_section(results: Results) -> list[str]:
    header = ["what", "target", "measured", "", "file", "command"]
    body = [[v.what, v.bound, v.measured, v.state, link(v.file, f"results/{v.file}") if v.file else "", f"`{v.command}`"]
            for v in verdicts(results)]  # fmt: skip
    return table(header, body, text=header)
