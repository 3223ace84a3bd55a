"""The regression gate (--gate, --update-baseline): what is counted now beside a committed baseline.

Counters are exact: one that is higher than in the baseline is worse. A baseline is a JSON file with a line for each
case. What our own code does depends on no version of torch, so ``counters.json`` judges on all of them. What a compiler
makes of a kernel has a baseline per compiler (``triton-3.9.json``); without one kernels are not judged, and that is
said.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from .record import provenance, read_record, stale_extensions, write_json

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
GATE_HELP = "judge counters by the committed baselines instead of measuring the suite: two minutes"
UPDATE_HELP = "with --gate: write what is counted to benchmarks/baselines/, to commit"
WORSE, MISSING, BETTER, SAME, NOT_JUDGED = "worse", "missing", "better", "same", "not judged"

Counters = dict[str, Any]  # counter -> value
Rows = dict[str, Counters]  # case -> its counters


class Finding(NamedTuple):
    """A verdict on a case; `text` says what differs, by how much, and from which commit."""

    case: str
    verdict: str
    text: str


class Baseline(NamedTuple):
    """The counters of every case, and the commit and day of their measurement.

    name: "counters", or a compiler with its version, as "triton-3.9".
    """

    name: str
    rows: Rows
    since: str = ""

    @classmethod
    def read(cls, folder: Path, name: str) -> Baseline:
        """The committed baseline; without rows where there is no file."""
        path = folder / f"{name}.json"
        if not path.exists():
            return cls(name, {})
        data = read_record(path)
        named = ((case, zip(data["columns"], values, strict=True)) for case, *values in data["rows"])
        rows = {case: {column: value for column, value in row if value is not None} for case, row in named}
        return cls(name, rows, f"{data['commit'][:8]} of {data['date'][:10]}")

    def write(self, folder: Path) -> Path:
        """A line per case, null where a case has not that counter, with commit, date and command of this run."""
        run = provenance()
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        rows = [[case, *map(row.get, columns)] for case, row in self.rows.items()]
        head = {"commit": run["machine"]["commit"], "date": run["date"], "command": run["command"]}
        path = folder / f"{self.name}.json"
        write_json(path, head | {"columns": columns, "rows": rows})
        return path

    def judge(self, rows: Rows, alike: bool = True) -> list[Finding]:
        """A finding for every case of the baseline or of now.

        alike: a counter on one side only is missing; False: only what both sides have is compared, as where kernels
        were compiled for other architectures.
        """
        gone = [case for case in self.rows if case not in rows]
        found = [self._judge_case(case, row, alike) for case, row in rows.items()]
        return found + [self._missing(case, f"has a baseline ({self.since}) and is measured no more") for case in gone]

    def _judge_case(self, case: str, now: Counters, alike: bool) -> Finding:
        """Worse where one counter is higher, whatever the others gain."""
        if case not in self.rows:
            return self._missing(case, "has no baseline")
        before = self.rows[case]
        if alike and now.keys() != before.keys():
            names = ", ".join(sorted(now.keys() ^ before.keys()))
            return self._missing(case, f"{names}: in the baseline or now, not both")
        both = [name for name in now if name in before]
        if not both:
            return Finding(case, NOT_JUDGED, f"nothing that the baseline ({self.since}) has too")
        rises = [f"{name} {change(now[name], before[name])}" for name in both if now[name] > before[name]]
        falls = [f"{name} {change(now[name], before[name])}" for name in both if now[name] < before[name]]
        verdict = WORSE if rises else BETTER if falls else SAME
        return Finding(case, verdict, f"{'; '.join(rises + falls) or 'as'} since {self.since}")

    def _missing(self, case: str, what: str) -> Finding:
        """A difference that only a new baseline accepts."""
        return Finding(case, MISSING, f"{what}; accept it with `pytest benchmarks --gate --update-baseline`")


def change(now: int, before: int) -> str:
    """ "3 -> 4 (+33%)"."""
    return f"{before} -> {now}" + (f" ({now / before - 1:+.0%})" if before else "")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "deqfast's regression gate")
    group.addoption("--gate", action="store_true", help=GATE_HELP)
    group.addoption("--update-baseline", action="store_true", help=UPDATE_HELP)


class Gate:
    """The pytest plugin: selects the tests marked `gate`, judges for them or writes baselines, tells at the end."""

    def __init__(self, config: pytest.Config, folder: Path = BASELINES) -> None:
        config.addinivalue_line("markers", "gate: judged by --gate, which selects no other test")
        self.on, self.update, self.folder = config.getoption("gate"), config.getoption("update_baseline"), folder
        self.said: dict[str, list[str]] = {verdict: [] for verdict in (WORSE, MISSING, BETTER, SAME, NOT_JUDGED)}
        self.written: list[Path] = []
        if self.update and not self.on:
            raise pytest.UsageError("--update-baseline: only with --gate")
        if self.on and config.getoption("numprocesses", None):
            raise pytest.UsageError("--gate tells everything at the end of one process: no -n")
        if self.on and (stale := stale_extensions()):
            raise pytest.UsageError(f"--gate: {'; '.join(stale)}")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        dropped = [item for item in items if bool(item.get_closest_marker("gate")) != self.on]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.on:
            return
        terminalreporter.section("update of the baselines" if self.update else "gate")
        lines = [f"written: {path}" for path in self.written]
        for verdict, texts in self.said.items():
            lines += [f"{verdict}: {len(texts)}"] * bool(texts)
            lines += [f"  {text}" for text in texts if verdict != SAME]
        if self.said[BETTER]:
            lines.append("What is better is kept only by a new baseline: run again with --update-baseline; commit it.")
        for line in lines:
            terminalreporter.write_line(line)

    def judge(self, name: str, rows: Rows, compiler: str = "") -> None:
        """Judge all cases of a baseline, or write it; fails the test where one is worse or missing.

        compiler: whose kernels these are; they are not judged where it has no baseline.
        """
        baseline = Baseline.read(self.folder, name)
        findings: list[Finding] = []
        if self.update:
            self.written.append(Baseline(name, rows).write(self.folder))
        elif baseline.rows or not compiler:
            findings = baseline.judge(rows, alike=not compiler)
        else:
            findings = [Finding("all cases", NOT_JUDGED, f"no baseline for {compiler}")]
        self._say(name, findings)

    def not_judged(self, name: str, why: str) -> NoReturn:
        """Skip the test, and say so at the end too."""
        self._say(name, [Finding("all cases", NOT_JUDGED, why)])
        pytest.skip(f"not judged: {why}")

    def _say(self, name: str, findings: list[Finding]) -> None:
        for case, verdict, text in findings:
            self.said[verdict].append(f"{name}: {case}: {text}")
        if failing := Counter(finding.verdict for finding in findings if finding.verdict in (WORSE, MISSING)):
            counts = ", ".join(f"{count} {verdict}" for verdict, count in failing.items())
            pytest.fail(f"{name}: {counts}, see the table at the end", pytrace=False)
