"""The regression gate: what is measured now beside a committed baseline, and what is said of the difference.

Counters are exact: one that is higher than in the baseline is worse. Ratios of times of one run are judged by a sign
test, which asks nothing of the noise but that it hits one pair of measurements independently of the next. With heavy
tails of 8 %, bursts in every tenth time and another 4 % from run to run, none of 200 runs without a slowdown is called
worse, of slowdowns by 1.3 and 1.5 times at least 90 and 98 % are (tests/benchmarks/test_gate.py).

A file of baselines is a record (see ``record``); its `remark` names what the rows depend on. Where that is another
than the baseline's, nothing is judged, and it is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .record import Row, read_record

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
GROUPS = {"counters": "counters", "triton": "counters", "cuda": "counters", "ratios": "all"}  # judged by --gate=...
# A ratio may exceed the baseline's by this much: medians of one and the same code were up to 9 % from their mean on a
# busy machine, where others' work leaves less of the cache and the memory to the side that needs more of them.
MARGIN = 1.15
PAIRS, MORE_PAIRS, BASELINE_PAIRS = 11, 61, 21
# Chance, at most, that a ratio at the very margin is called worse; of one below it that is far smaller.
ERROR = 0.05


class Verdict(Enum):
    """What is said of a case; the value is for people."""

    WORSE = "worse"
    MISSING = "missing"
    BETTER = "better"
    SAME = "same"
    NOT_JUDGED = "not judged"

    @property
    def fails(self) -> bool:
        return self in (Verdict.WORSE, Verdict.MISSING)


@dataclass(frozen=True)
class Finding:
    """Of the case `case` of a group of baselines; `text` says what differs, by how much, and from which commit."""

    group: str
    case: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Baseline:
    """The rows of a group by case, the commit and day of their measurement, and what they depend on."""

    group: str
    rows: dict[str, Row]
    commit: str
    depends_on: str

    @classmethod
    def read(cls, folder: Path, group: str) -> Baseline:
        """Without rows where there is no file."""
        path = folder / f"{group}.json"
        if not path.exists():
            return cls(group, {}, "", "")
        data = read_record(path)
        commit, _, changed = data["machine"]["commit"].partition("+")
        since = f"{commit[:8]}{'+' if changed else ''}{changed} of {data['date'][:10]}"
        return cls(group, {row["case"]: row for row in data["rows"]}, since, data["remark"])

    def unfit(self, depends_on: str) -> str | None:
        """Why rows that depend on `depends_on` cannot be compared with these, if they cannot."""
        if not self.rows or depends_on == self.depends_on:
            return None
        return f"the baseline is of {self.depends_on}, this is {depends_on}"

    def missing(self, case: str) -> Finding:
        text = f"has no baseline; accept it with {update_of(self.group)}"
        return Finding(self.group, case, Verdict.MISSING, text)

    def left_over(self, cases: Iterable[str]) -> list[Finding]:
        """A finding for each row of a case that is measured no more."""
        text = f"has a baseline ({self.commit}) and is measured no more; accept it with {update_of(self.group)}"
        gone = sorted(set(self.rows) - set(cases))
        return [Finding(self.group, case, Verdict.MISSING, text) for case in gone]


def update_of(group: str) -> str:
    """The command that writes the baseline of this group anew."""
    return f"`pytest benchmarks --gate={GROUPS[group]} --update-baseline`"


def change(now: float, before: float) -> str:
    """ "3 -> 4 (+33 %)"."""
    share = f" ({now / before - 1:+.0%})".replace("%", " %") if before else ""
    return f"{before:.4g} -> {now:.4g}{share}" if isinstance(now, float) else f"{before} -> {now}{share}"


def counters_of(row: Row) -> dict[str, int]:
    return {name: value for name, value in row.items() if name not in ("section", "case", "provider")}


def judge_counters(row: Row, baseline: Baseline) -> Finding:
    """Worse where one counter is higher, whatever the others gain; a counter on one side only is missing."""
    case = row["case"]
    if case not in baseline.rows:
        return baseline.missing(case)
    now, before = counters_of(row), counters_of(baseline.rows[case])
    if now.keys() != before.keys():
        names = ", ".join(sorted(now.keys() ^ before.keys()))
        text = f"{names}: in the baseline or now, not both; accept it with {update_of(baseline.group)}"
        return Finding(baseline.group, case, Verdict.MISSING, text)
    rises = [f"{name} {change(now[name], before[name])}" for name in now if now[name] > before[name]]
    falls = [f"{name} {change(now[name], before[name])}" for name in now if now[name] < before[name]]
    verdict = Verdict.WORSE if rises else Verdict.BETTER if falls else Verdict.SAME
    return Finding(baseline.group, case, verdict, f"{'; '.join(rises + falls) or 'as'} since {baseline.commit}")


def chance_of(above: int, pairs: int) -> float:
    """That at least `above` of `pairs` fair coins show heads."""
    return sum(math.comb(pairs, k) for k in range(above, pairs + 1)) / 2**pairs


def shown(hits: Iterable[bool]) -> bool:
    """Whether more than half of all pairs would hit, by a sign test at the level ``ERROR``."""
    hits = list(hits)
    return chance_of(sum(hits), len(hits)) <= ERROR


def judge_ratio(
    group: str, case: str, before: float, commit: str, measure: Callable[[int], list[float]], margin: float = MARGIN
) -> Finding:
    """A ratio of times, smaller is better, beside that of the baseline. `measure(n)` gives n pairs, freshly measured.

    The median of ``PAIRS`` within the margin is the same. Else ``MORE_PAIRS`` new ones decide alone: worse where their
    median is shown to lie above the baseline times `margin`, better where below the baseline divided by it.
    """
    ratios, verdict = measure(PAIRS), Verdict.SAME
    if not before / margin <= statistics.median(ratios) <= before * margin:
        ratios = measure(MORE_PAIRS)
        if shown(ratio > before * margin for ratio in ratios):
            verdict = Verdict.WORSE
        elif shown(ratio < before / margin for ratio in ratios):
            verdict = Verdict.BETTER
    return Finding(group, case, verdict, ratio_text(ratios, before, commit, margin))


def ratio_text(ratios: list[float], before: float, commit: str, margin: float) -> str:
    low, median, high = statistics.quantiles(ratios)
    spread = f"quartiles {low:.3g} to {high:.3g} of {len(ratios)} pairs"
    text = f"time / reference {change(median, before)}, {spread}, margin {margin - 1:.0%}, since {commit}"
    return text.replace("%,", " %,")


def report(findings: list[Finding], update: bool) -> list[str]:
    """What a run found, worst first, as lines of text; what is the same is counted only."""
    lines = []
    for verdict in Verdict:
        of_it = [finding for finding in findings if finding.verdict is verdict]
        name = "new or gone" if update and verdict is Verdict.MISSING else verdict.value
        lines += [f"{name}: {len(of_it)}"] if of_it else []
        if verdict is not Verdict.SAME and name != "new or gone":
            lines += dict.fromkeys(f"  {finding.group}: {finding.case}: {finding.text}" for finding in of_it)
    if not update and any(finding.verdict is Verdict.BETTER for finding in findings):
        lines.append("What is better is kept only by a new baseline: run again with --update-baseline, and commit it.")
    return lines


def row_of_ratios(case: str, provider: str, ratios: list[float]) -> Row:
    """The row of a baseline of ratios."""
    low, median, high = statistics.quantiles(ratios)
    facts: dict[str, Any] = {"ratio": median, "quartiles": [low, high], "pairs": len(ratios)}
    return {"section": "ratios", "case": case, "provider": provider, **facts}
