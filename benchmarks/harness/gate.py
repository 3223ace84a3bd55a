"""The regression gate: what is measured now beside a committed baseline, and what is said of the difference.

Counters are exact: one that is higher than in the baseline is worse. Ratios of times of one run are judged by a sign
test, which asks nothing of the noise but that it hits one pair of measurements independently of the next. With heavy
tails of 8 %, bursts in every tenth time and another 4 % from run to run, none of 200 runs without a slowdown is called
worse, of slowdowns by 1.3 and 1.5 times at least 90 and 98 % are (tests/benchmarks/test_gate.py).

A baseline is a JSON file with a line for each case. What our own code does depends on no version of torch, so
``counters.json`` judges on all of them. What a compiler makes of a kernel has a baseline per compiler
(``triton-3.9.json``); without one, kernels are judged by the limits of the hardware alone, and that is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .files import write_json
from .record import provenance, read_record

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
# A ratio may exceed the baseline's by this much: medians of one and the same code were up to 9 % from their mean on a
# busy machine, where others' work leaves less of the cache and the memory to the side that needs more of them.
MARGIN = 1.15
PAIRS, MORE_PAIRS, BASELINE_PAIRS = 11, 61, 21
# Chance, at most, that a ratio at the very margin is called worse; of one below it that is far smaller.
ERROR = 0.05

Counters = dict[str, Any]  # counter -> value


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
    """Verdict on the case `case` of a baseline; `text` says what differs, by how much, and from which commit."""

    baseline: str
    case: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Baseline:
    """The counters of every case, the commit and day of their measurement, and what they depend on.

    name: "counters", "ratios", or a compiler with its version, as "triton-3.9".
    """

    name: str
    rows: dict[str, Counters]
    since: str = ""
    depends_on: str = ""

    @classmethod
    def read(cls, folder: Path, name: str) -> Baseline:
        """The committed baseline; without rows where there is no file."""
        path = folder / f"{name}.json"
        if not path.exists():
            return cls(name, {})
        data = read_record(path)
        head, _, changed = data["commit"].partition("+")
        since = f"{head[:8]}{'+' * bool(changed)}{changed} of {data['date'][:10]}"
        named = ((case, zip(data["columns"], values, strict=True)) for case, *values in data["rows"])
        rows = {case: {column: value for column, value in row if value is not None} for case, row in named}
        return cls(name, rows, since, data["depends_on"])

    def write(self, folder: Path) -> Path:
        """A line per case, null where a case has not that counter, with commit, date and command of this run."""
        run = provenance()
        head = {"commit": run["machine"]["commit"], "date": run["date"], "command": run["command"]}
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.name}.json"
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        rows = [[case, *map(row.get, columns)] for case, row in self.rows.items()]
        write_json(path, head | {"depends_on": self.depends_on, "columns": columns, "rows": rows})
        return path

    def unfit(self, depends_on: str) -> str | None:
        """Why what depends on `depends_on` cannot be compared with these rows, if it cannot."""
        if not self.rows or depends_on == self.depends_on:
            return None
        return f"the baseline is of {self.depends_on}, this is {depends_on}"

    def missing(self, case: str, what: str) -> Finding:
        """A difference that only a new baseline accepts."""
        mode = "" if self.name == "ratios" else "=counters"
        accept = f"accept it with `pytest benchmarks --gate{mode} --update-baseline`"
        return Finding(self.name, case, Verdict.MISSING, f"{what}; {accept}")

    def left_over(self, cases: Iterable[str]) -> list[Finding]:
        """A finding for each row of a case that is measured no more."""
        text = f"has a baseline ({self.since}) and is measured no more"
        return [self.missing(case, text) for case in sorted(set(self.rows) - set(cases))]

    def judge(self, case: str, now: Counters, alike: bool = True) -> Finding:
        """Worse where one counter is higher, whatever the others gain.

        alike: a counter on one side only is missing; False: only what both sides have is compared, as where kernels
        were compiled for other architectures.
        """
        if case not in self.rows:
            return self.missing(case, "has no baseline")
        before = self.rows[case]
        if alike and now.keys() != before.keys():
            names = ", ".join(sorted(now.keys() ^ before.keys()))
            return self.missing(case, f"{names}: in the baseline or now, not both")
        both = [name for name in now if name in before]
        if not both:
            text = f"nothing that the baseline ({self.since}) has too"
            return Finding(self.name, case, Verdict.NOT_JUDGED, text)
        rises = [f"{name} {change(now[name], before[name])}" for name in both if now[name] > before[name]]
        falls = [f"{name} {change(now[name], before[name])}" for name in both if now[name] < before[name]]
        verdict = Verdict.WORSE if rises else Verdict.BETTER if falls else Verdict.SAME
        return Finding(self.name, case, verdict, f"{'; '.join(rises + falls) or 'as'} since {self.since}")

    def judge_ratio(self, case: str, measure: Callable[[int], list[float]], margin: float = MARGIN) -> Finding:
        """A ratio of times, smaller is better, beside the baseline's. `measure(n)` gives n freshly measured pairs.

        The median of ``PAIRS`` within the margin is the same. Else ``MORE_PAIRS`` new ones decide alone: worse where
        their median is shown to lie above the baseline times `margin`, better where below the baseline divided by it.
        """
        if case not in self.rows:
            return self.missing(case, "has no baseline")
        before: float = self.rows[case]["ratio"]
        ratios, verdict = measure(PAIRS), Verdict.SAME
        if not before / margin <= statistics.median(ratios) <= before * margin:
            ratios = measure(MORE_PAIRS)
            if shown(ratio > before * margin for ratio in ratios):
                verdict = Verdict.WORSE
            elif shown(ratio < before / margin for ratio in ratios):
                verdict = Verdict.BETTER
        low, median, high = statistics.quantiles(ratios)
        spread = f"quartiles {low:.3g} to {high:.3g} of {len(ratios)} pairs"
        text = f"time / reference {change(median, before)}, {spread}, margin {margin - 1:.0%}, since {self.since}"
        return Finding(self.name, case, verdict, text)


def ratio_row(ratios: list[float]) -> Counters:
    """The row of a baseline of ratios."""
    low, median, high = (float(f"{value:.4g}") for value in statistics.quantiles(ratios))
    return {"ratio": median, "low": low, "high": high, "pairs": len(ratios)}


def change(now: float, before: float) -> str:
    """ "3 -> 4 (+33%)"."""
    share = f" ({now / before - 1:+.0%})" if before else ""
    return f"{before:.4g} -> {now:.4g}{share}" if isinstance(now, float) else f"{before} -> {now}{share}"


def shown(hits: Iterable[bool]) -> bool:
    """Whether more than half of all pairs would hit, by a sign test at the level ``ERROR``: fair coins rarely do."""
    hits = list(hits)
    return sum(math.comb(len(hits), k) for k in range(sum(hits), len(hits) + 1)) / 2 ** len(hits) <= ERROR


def report(findings: list[Finding], update: bool) -> list[str]:
    """What a run found, worst first, as lines of text; what is the same is counted only."""
    lines = []
    for verdict in Verdict:
        of_it = [finding for finding in findings if finding.verdict is verdict]
        name = "new or gone" if update and verdict is Verdict.MISSING else verdict.value
        lines += [f"{name}: {len(of_it)}"] if of_it else []
        if verdict is not Verdict.SAME and name != "new or gone":
            lines += dict.fromkeys(f"  {finding.baseline}: {finding.case}: {finding.text}" for finding in of_it)
    if not update and any(finding.verdict is Verdict.BETTER for finding in findings):
        lines.append("What is better is kept only by a new baseline: run again with --update-baseline, and commit it.")
    return lines
