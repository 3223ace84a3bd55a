"""The regression gate (--gate, --update-baseline): what is measured now beside a committed baseline.

Counters are exact: one that is higher than in the baseline is worse. Ratios of times of one run are judged by a sign
test, which asks nothing of the noise but that it hits one pair of measurements independently of the next. With heavy
tails of 8 %, bursts in every tenth time and another 4 % from run to run, none of 200 runs without a slowdown is called
worse, of slowdowns by 1.3 and 1.5 times at least 90 and 98 % are (tests/benchmarks/test_gate.py).

A baseline is a JSON file with a line for each case. What our own code does depends on no version of torch, so
``counters.json`` judges on all of them. What a compiler makes of a kernel has a baseline per compiler
(``triton-3.9.json``); without one, kernels are judged by the limits of the hardware alone, and that is said.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from .record import provenance, read_record, stale_extensions, write_json

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
# A ratio may exceed the baseline's by this much: medians of one and the same code were up to 9 % from their mean on a
# busy machine, where others' work leaves less of the cache and the memory to the side that needs more of them.
MARGIN = 1.15
PAIRS, MORE_PAIRS, BASELINE_PAIRS = 11, 61, 21
# Chance, at most, that a ratio at the very margin is called worse; of one below it that is far smaller.
ERROR = 0.05
GATE_HELP = """judge by the committed baselines, on the CPU, instead of measuring the suite: `counters` (exact, on any
supported torch, two minutes) or `all`, the default, with ratios of times taken in turns (two minutes more, on a quiet
machine). What a baseline of another compiler or machine cannot judge is said"""
UPDATE_HELP = "with --gate[=counters]: write what is measured to benchmarks/baselines/, to commit; judges limits alone"
WORSE, MISSING, BETTER, SAME, NOT_JUDGED = "worse", "missing", "better", "same", "not judged"

Counters = dict[str, Any]  # counter -> value


class Finding(NamedTuple):
    """A verdict on a case; `text` says what differs, by how much, and from which commit."""

    case: str
    verdict: str
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
        named = ((case, zip(data["columns"], values, strict=True)) for case, *values in data["rows"])
        rows = {case: {column: value for column, value in row if value is not None} for case, row in named}
        return cls(name, rows, f"{data['commit'][:8]} of {data['date'][:10]}", data["depends_on"])

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

    def missing(self, case: str, what: str) -> Finding:
        """A difference that only a new baseline accepts."""
        mode = "" if self.name == "ratios" else "=counters"
        return Finding(case, MISSING, f"{what}; accept it with `pytest benchmarks --gate{mode} --update-baseline`")

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
            return Finding(case, NOT_JUDGED, f"nothing that the baseline ({self.since}) has too")
        rises = [f"{name} {change(now[name], before[name])}" for name in both if now[name] > before[name]]
        falls = [f"{name} {change(now[name], before[name])}" for name in both if now[name] < before[name]]
        verdict = WORSE if rises else BETTER if falls else SAME
        return Finding(case, verdict, f"{'; '.join(rises + falls) or 'as'} since {self.since}")

    def judge_ratio(self, case: str, measure: Callable[[int], list[float]], margin: float = MARGIN) -> Finding:
        """A ratio of times, smaller is better, beside the baseline's. `measure(n)` gives n freshly measured pairs.

        The median of ``PAIRS`` within the margin is the same. Else ``MORE_PAIRS`` new ones decide alone: worse where
        their median is shown to lie above the baseline times `margin`, better where below the baseline divided by it.
        """
        if case not in self.rows:
            return self.missing(case, "has no baseline")
        before: float = self.rows[case]["ratio"]
        ratios, verdict = measure(PAIRS), SAME
        if not before / margin <= statistics.median(ratios) <= before * margin:
            ratios = measure(MORE_PAIRS)
            if shown(ratio > before * margin for ratio in ratios):
                verdict = WORSE
            elif shown(ratio < before / margin for ratio in ratios):
                verdict = BETTER
        low, median, high = statistics.quantiles(ratios)
        spread = f"quartiles {low:.3g} to {high:.3g} of {len(ratios)} pairs"
        text = f"time / reference {change(median, before)}, {spread}, margin {margin - 1:.0%}, since {self.since}"
        return Finding(case, verdict, text)


def change(now: float, before: float) -> str:
    """ "3 -> 4 (+33%)"."""
    share = f" ({now / before - 1:+.0%})" if before else ""
    return f"{before:.4g} -> {now:.4g}{share}" if isinstance(now, float) else f"{before} -> {now}{share}"


def shown(hits: Iterable[bool]) -> bool:
    """Whether more than half of all pairs would hit, by a sign test at the level ``ERROR``: fair coins rarely do."""
    from scipy.stats import binomtest  # measuring, on a machine that has little, does without it

    hits = list(hits)
    return bool(hits) and binomtest(sum(hits), len(hits), alternative="greater").pvalue <= ERROR


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "deqfast's regression gate")
    group.addoption("--gate", nargs="?", const="all", choices=("all", "counters"), help=" ".join(GATE_HELP.split()))
    group.addoption("--update-baseline", action="store_true", help=UPDATE_HELP)


class Gate:
    """The pytest plugin: selects the tests marked `gate`, judges for them or writes baselines, tells at the end."""

    def __init__(self, config: pytest.Config, folder: Path = BASELINES) -> None:
        config.addinivalue_line("markers", "gate(mode): judged by --gate=mode and --gate=all")
        self.mode, self.update = config.getoption("gate"), config.getoption("update_baseline")
        self.folder = folder
        self.baseline = functools.cache(functools.partial(Baseline.read, folder))
        self.rows: dict[str, dict[str, Counters]] = defaultdict(dict)  # of an update, by the name of the baseline
        self.said: dict[str, list[str]] = {verdict: [] for verdict in (WORSE, MISSING, BETTER, SAME, NOT_JUDGED)}
        self.written: list[Path] = []
        if self.update and self.mode is None:
            raise pytest.UsageError("--update-baseline: say which, --gate or --gate=counters")
        if self.mode and config.getoption("numprocesses", None):
            raise pytest.UsageError("--gate runs in one process, so that nothing else runs beside what it times: no -n")
        if self.mode and (stale := stale_extensions()):
            raise pytest.UsageError(f"--gate: {'; '.join(stale)}")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        dropped = [item for item in items if not self._selects(item.get_closest_marker("gate"))]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]

    def _selects(self, mark: pytest.Mark | None) -> bool:
        return (self.mode in ("all", mark.args[0])) if mark and self.mode else bool(mark) == bool(self.mode)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.mode is None:
            return
        terminalreporter.section("update of the baselines" if self.update else f"gate={self.mode}")
        lines = [f"written: {path}" for path in self.written]
        for verdict, texts in self.said.items():
            lines += [f"{verdict}: {len(texts)}"] * bool(texts)
            lines += [f"  {text}" for text in dict.fromkeys(texts) if verdict != SAME]
        if self.said[BETTER]:
            lines.append("What is better is kept only by a new baseline: run again with --update-baseline; commit it.")
        for line in lines:
            terminalreporter.write_line(line)

    def counters(self, case: str, now: Counters) -> None:
        """Judge what our own code did in a case; fails the test where a counter rose."""
        if self.update:
            self.rows["counters"][case] = now
        else:
            self._say("counters", [self.baseline("counters").judge(case, now)])

    def compiled(self, name: str, rows: dict[str, Counters], broken: dict[str, str], depends_on: str) -> None:
        """Judge all the kernels that a compiler made: by its baseline `name`, and always by what limits are `broken`.

        A compiler without a baseline is judged by the limits alone; kernels that break them become no baseline.
        """
        baseline = self.baseline(name)
        findings = [Finding(case, WORSE, text) for case, text in broken.items()]
        if baseline.rows:
            findings += [baseline.judge(case, row, alike=False) for case, row in rows.items()]
            findings += baseline.left_over(rows)
        else:
            text = f"no baseline for {depends_on}: {len(rows)} kernels judged by the limits of the hardware alone"
            findings.append(Finding("all cases", NOT_JUDGED, text))
        if not self.update:
            self._say(name, findings)
        elif broken:
            pytest.fail(f"{name}.json is not written, limits are broken by: {', '.join(broken)}", pytrace=False)
        else:
            self.rows[name] = rows
            self.close(name, rows, depends_on)

    def ratio(self, case: str, measure: Callable[[int], list[float]], depends_on: str, margin: float = MARGIN) -> None:
        """Judge the ratio that `measure(pairs)` gives; fails the test where it is worse."""
        if self.update:
            self.rows["ratios"][case] = {"ratio": statistics.median(measure(BASELINE_PAIRS))}
        else:
            self._check_fit("ratios", depends_on)
            self._say("ratios", [self.baseline("ratios").judge_ratio(case, measure, margin)])

    def close(self, name: str, cases: Iterable[str], depends_on: str = "") -> None:
        """End a baseline after its last case: fail for cases there are no more, or write the new one, only whole."""
        if not self.update:
            self._check_fit(name, depends_on)
            self._say(name, self.baseline(name).left_over(cases))
        elif absent := sorted(set(cases) - set(self.rows[name])):
            pytest.fail(f"{name}.json is not written, not measured were: {', '.join(absent)}", pytrace=False)
        else:
            self.written.append(Baseline(name, self.rows[name], depends_on=depends_on).write(self.folder))

    def not_judged(self, name: str, why: str) -> NoReturn:
        """Skip the test, and say so at the end too."""
        self._say(name, [Finding("all cases", NOT_JUDGED, why)])
        pytest.skip(f"not judged: {why}")

    def _check_fit(self, name: str, depends_on: str) -> None:
        baseline = self.baseline(name)
        if baseline.rows and depends_on != baseline.depends_on:
            self.not_judged(name, f"the baseline is of {baseline.depends_on}, this is {depends_on}")

    def _say(self, name: str, findings: list[Finding]) -> None:
        for case, verdict, text in findings:
            self.said[verdict].append(f"{name}: {case}: {text}")
        if failing := Counter(finding.verdict for finding in findings if finding.verdict in (WORSE, MISSING)):
            counts = ", ".join(f"{count} {verdict}" for verdict, count in failing.items())
            pytest.fail(f"{name}: {counts}, see the table at the end", pytrace=False)
