"""The options --gate and --update-baseline: which tests they select, baselines to and fro, the table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from .gate import (
    BASELINE_PAIRS,
    BASELINES,
    GROUPS,
    MARGIN,
    Baseline,
    Finding,
    Verdict,
    judge_counters,
    judge_ratio,
    report,
    row_of_ratios,
    update_of,
)
from .record import Row, write_record
from .sources import stale_extensions

GATE_HELP = """judge by the committed baselines, on the CPU, instead of measuring the suite: `counters` (exact: calls of
f, torch operations, host waits, allocations, registers of compiled kernels; none may rise; two minutes) or `all`, the
default, with ratios of times taken in turns (two minutes more, on a quiet machine). Without it the gate's tests are not
run. Nothing is judged, and that is said, where versions (for ratios: the processor) are not those of the baseline.
Fails where something is worse or has no baseline"""
REQUIRED_HELP = f"""with --gate: fail, instead of saying so, where the baseline of one of these groups is of other
versions, so that nothing would be judged; of {", ".join(GROUPS)}, separated by commas"""
UPDATE_HELP = "with --gate[=counters]: write what is measured to benchmarks/baselines/, to be committed; judge nothing"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "deqfast's regression gate")
    group.addoption("--gate", nargs="?", const="all", choices=("all", "counters"), help=" ".join(GATE_HELP.split()))
    group.addoption("--gate-required", metavar="GROUP[,GROUP]", help=" ".join(REQUIRED_HELP.split()))
    group.addoption("--update-baseline", action="store_true", help=UPDATE_HELP)


def required_groups(given: str | None, mode: str | None) -> list[str]:
    """The groups of --gate-required; UsageError for one that --gate=`mode` does not judge."""
    groups = given.split(",") if given is not None else []
    judged = [group for group in GROUPS if mode in ("all", GROUPS[group])]
    for group in groups:
        if group not in judged:
            allowed = f"judges {', '.join(judged)}" if mode else "is not given"
            raise pytest.UsageError(
                f"--gate-required: {group!r} is not judged: --gate{f'={mode}' * bool(mode)} {allowed}"
            )
    return groups


class Gate:
    """Selects the tests marked `gate`, judges for them, and keeps what it found."""

    def __init__(self, config: pytest.Config, folder: Path = BASELINES) -> None:
        config.addinivalue_line("markers", "gate(mode): judged by --gate=mode and --gate=all")
        self.mode, self.update = config.getoption("gate"), config.getoption("update_baseline")
        self.required = required_groups(config.getoption("gate_required"), self.mode)
        self.folder = folder
        self.baselines: dict[str, Baseline] = {}
        self.rows: dict[str, dict[str, Row]] = {}
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

    def baseline(self, group: str) -> Baseline:
        if group not in self.baselines:
            self.baselines[group] = Baseline.read(self.folder, group)
        return self.baselines[group]

    def require(self, group: str, depends_on: str) -> None:
        """Skip the test, or fail it if so required, where the baseline depends on something else than `depends_on`."""
        unfit = self.baseline(group).unfit(depends_on)
        if not unfit or self.update:
            return
        self.findings.append(Finding(group, "all cases", Verdict.NOT_JUDGED, unfit))
        if group in self.required:
            text = f"{group}: not judged, which --gate-required asks for: {unfit}; with these versions, renew it by "
            pytest.fail(text + update_of(group), pytrace=False)
        pytest.skip(f"not judged: {unfit}")

    def counters(self, group: str, rows: list[Row]) -> None:
        """Judge each row; fails the test with what is worse."""
        self._keep(group, rows, [judge_counters(row, self.baseline(group)) for row in rows])

    def ratio(
        self, group: str, case: str, provider: str, measure: Callable[[int], list[float]], margin: float = MARGIN
    ) -> None:
        """Judge the ratio that `measure(pairs)` gives; fails the test where it is worse."""
        baseline = self.baseline(group)
        if self.update:
            row = row_of_ratios(case, provider, measure(BASELINE_PAIRS))
            self._keep(group, [row], [])
        elif case not in baseline.rows:
            self._keep(group, [], [baseline.missing(case)])
        else:
            finding = judge_ratio(group, case, baseline.rows[case]["ratio"], baseline.commit, measure, margin)
            self._keep(group, [], [finding])

    def _keep(self, group: str, rows: list[Row], findings: list[Finding]) -> None:
        self.rows.setdefault(group, {}).update({row["case"]: row for row in rows})
        self.findings += findings
        failing = Counter(finding.verdict.value for finding in findings if finding.verdict.fails)
        if failing and not self.update:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in failing.items())
            pytest.fail(f"{group}: {counts}, see the table at the end", pytrace=False)

    def close(self, group: str, cases: Iterable[str], depends_on: str) -> None:
        """After the last case of a group: fail for baselines of cases there are no more, or write the new baseline.

        It is written only whole: where some of `cases` were not measured, the test fails.
        """
        self._keep(group, [], self.baseline(group).left_over(cases))
        if self.update:
            self._write(group, cases, depends_on)

    def whole(self, group: str, rows: list[Row], depends_on: str) -> None:
        """``counters`` and ``close`` of a group whose rows are all there at once, as one judgement."""
        baseline, cases = self.baseline(group), [row["case"] for row in rows]
        findings = [judge_counters(row, baseline) for row in rows]
        self._keep(group, rows, [*findings, *baseline.left_over(cases)])
        if self.update:
            self._write(group, cases, depends_on)

    def _write(self, group: str, cases: Iterable[str], depends_on: str) -> None:
        rows = self.rows.get(group, {})
        absent = sorted(set(cases) - set(rows))
        if absent:
            pytest.fail(f"{group}.json is not written, not measured were: {', '.join(absent)}", pytrace=False)
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{group}.json"
        write_record(path, list(rows.values()), remark=depends_on)
        self.written.append(path)
