"""The options --gate and --update-baseline: which tests they select, baselines to and fro, the table at the end."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from .gate import BASELINE_PAIRS, BASELINES, MARGIN, Baseline, Counters, Finding, Verdict, ratio_row, report
from .record import stale_extensions

GATE_HELP = """judge by the committed baselines, on the CPU, instead of measuring the suite: `counters` (exact: calls of
f, operations, host waits, allocations of our own code, on any supported torch; registers, stack, shared memory of
compiled kernels; none may rise; two minutes) or `all`, the default, with ratios of times taken in turns (two minutes
more, on a quiet machine). Kernels of a compiler without a baseline are judged by the limits of the hardware alone, and
ratios not at all on another machine than the baseline's; both is said"""
UPDATE_HELP = """with --gate[=counters]: write what is measured to benchmarks/baselines/, to be committed; judge nothing
but the limits of the hardware"""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "deqfast's regression gate")
    group.addoption("--gate", nargs="?", const="all", choices=("all", "counters"), help=" ".join(GATE_HELP.split()))
    group.addoption("--update-baseline", action="store_true", help=" ".join(UPDATE_HELP.split()))


class Gate:
    """Selects the tests marked `gate`, judges for them, and keeps what it found."""

    def __init__(self, config: pytest.Config, folder: Path = BASELINES) -> None:
        config.addinivalue_line("markers", "gate(mode): judged by --gate=mode and --gate=all")
        self.mode, self.update = config.getoption("gate"), config.getoption("update_baseline")
        self.folder = folder
        self.baseline = functools.cache(functools.partial(Baseline.read, folder))
        self.rows: dict[str, dict[str, Counters]] = {}
        self.findings: list[Finding] = []
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
        for line in [*report(self.findings, self.update), *(f"written: {path}" for path in self.written)]:
            terminalreporter.write_line(line)

    def not_judged(self, name: str, why: str) -> NoReturn:
        """Skip the test, and say so at the end too."""
        self.findings.append(Finding(name, "all cases", Verdict.NOT_JUDGED, why))
        pytest.skip(f"not judged: {why}")

    def counters(self, case: str, counters: Counters) -> None:
        """Judge what our own code did in a case; fails the test where a counter rose."""
        self._keep("counters", {case: counters}, [self.baseline("counters").judge(case, counters)])

    def compiled(self, name: str, rows: dict[str, Counters], broken: dict[str, str], depends_on: str) -> None:
        """Judge all the kernels that a compiler made: by its baseline `name`, and always by what limits are `broken`.

        A compiler without a baseline is judged by the limits alone; kernels that break them become no baseline.
        """
        baseline = self.baseline(name)
        findings = [Finding(name, case, Verdict.WORSE, text) for case, text in broken.items()]
        if baseline.rows or self.update:
            findings += [baseline.judge(case, row, alike=False) for case, row in rows.items()]
            findings += baseline.left_over(rows)
        else:
            told = f"no baseline for {depends_on}: {len(rows)} kernels judged by the limits of the hardware alone"
            findings.append(Finding(name, "all cases", Verdict.NOT_JUDGED, told))
        self._keep(name, rows, findings)
        if self.update and broken:
            pytest.fail(f"{name}.json is not written, limits are broken by: {', '.join(broken)}", pytrace=False)
        if self.update:
            self._write(name, rows, depends_on)

    def ratio(self, case: str, measure: Callable[[int], list[float]], depends_on: str, margin: float = MARGIN) -> None:
        """Judge the ratio that `measure(pairs)` gives; fails the test where it is worse."""
        baseline = self.baseline("ratios")
        if self.update:
            self._keep("ratios", {case: ratio_row(measure(BASELINE_PAIRS))}, [])
        elif unfit := baseline.unfit(depends_on):
            self.not_judged("ratios", unfit)
        else:
            self._keep("ratios", {}, [baseline.judge_ratio(case, measure, margin)])

    def close(self, name: str, cases: Iterable[str], depends_on: str = "") -> None:
        """End a baseline after its last case: fail for cases there are no more, or write the new baseline."""
        cases = list(cases)
        if self.update:
            self._write(name, cases, depends_on)
        elif unfit := self.baseline(name).unfit(depends_on):
            self.not_judged(name, unfit)
        self._keep(name, {}, self.baseline(name).left_over(cases))

    def _keep(self, name: str, rows: dict[str, Counters], findings: list[Finding]) -> None:
        self.rows.setdefault(name, {}).update(rows)
        self.findings += findings
        failing = Counter(finding.verdict.value for finding in findings if finding.verdict.fails)
        if failing and not self.update:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in failing.items())
            pytest.fail(f"{name}: {counts}, see the table at the end", pytrace=False)

    def _write(self, name: str, cases: Iterable[str], depends_on: str) -> None:
        """Write the new baseline, only whole: where some of `cases` were not measured, the test fails."""
        rows = self.rows.get(name, {})
        if absent := sorted(set(cases) - set(rows)):
            pytest.fail(f"{name}.json is not written, not measured were: {', '.join(absent)}", pytrace=False)
        self.written.append(Baseline(name, rows, depends_on=depends_on).write(self.folder))
