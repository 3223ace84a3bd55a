"""From cases to rows: every provider's answer is checked, then all of a case are timed in turns with a large copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .entry import FOREIGN, Case, Contender, Skipped
from .record import Row
from .timing import Copy, in_turns

COPY = ("copy", "")
LARGE_SECONDS = 1800  # after which a case of ``--full`` is given up, measured together with all its providers
Outcome = Row | Exception  # the error where a provider of our own is wrong: it gets no row


def parametrize(cases: Sequence[Case]) -> Callable[[Any], Any]:
    """Mark a test of (case, provider) to be run for all of `cases`, as part of the suite."""
    ids = [(case, provider, f"{case.name}-{provider}") for case in cases for provider in case.providers]
    large = (pytest.mark.full, pytest.mark.timeout(LARGE_SECONDS))
    given = [pytest.param(case, provider, id=name, marks=large if case.full else ()) for case, provider, name in ids]
    timed = pytest.mark.benchmark(timer=REPLAY.time)

    def mark(test: Any) -> Any:
        return pytest.mark.suite(timed(pytest.mark.parametrize(("case", "provider"), given)(test)))

    return mark


class Replay:
    """A clock on which rounds pass as they were timed before: pytest-benchmark itself does not time calls in turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def play(self, benchmark: Any, seconds: Sequence[float]) -> None:
        """Have `benchmark` see rounds of these lengths."""
        rounds = iter(seconds)

        def wait() -> None:
            self.now += next(rounds)

        benchmark.pedantic(wait, rounds=len(seconds))


REPLAY = Replay()


def measure(case: Case, providers: Sequence[str], device: str, copy: Copy, **turns: Any) -> dict[str, Outcome]:
    """Rows of the providers; of one of our own that is wrong the error. `turns`: of ``in_turns``."""
    outcomes: dict[str, Outcome] = {}
    contenders: dict[str, Contender] = {}
    for provider in providers:
        row: Row = {"section": case.section, "case": case.name, "provider": provider, **case.size()}
        try:
            contenders[provider] = case.contender(provider, device)
            outcomes[provider] = row | contenders[provider].facts
        except Skipped as reason:
            outcomes[provider] = row | {"skipped": str(reason)}
        except Exception as error:  # one provider must not cost the others their rows
            outcomes[provider] = refused(row, error)
    calls: dict[Any, Callable[[], Any]] = {COPY: copy}
    for provider, contender in contenders.items():
        calls[provider, "whole"] = contender.call
        if contender.f is not None:
            calls[provider, "f"] = contender.f
    times = in_turns(calls, device, **turns) if contenders else {}
    for provider, contender in contenders.items():
        outcomes[provider] = timed(outcomes[provider], contender, times, provider, copy)
    compare(case, [row for row in outcomes.values() if isinstance(row, dict)])
    return outcomes


def refused(row: Row, error: Exception) -> Outcome:
    """What is kept of a provider that failed: a row that says so if it is others' code, else the error."""
    if row["provider"] not in FOREIGN:
        return error
    return row | {"problem": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def timed(row: Outcome, contender: Contender, times: dict[Any, list[float]], provider: str, copy: Copy) -> Outcome:
    """The row with its times; least times are compared with the copy's least, of the same rounds."""
    assert isinstance(row, dict)
    try:
        contender.verify()
    except AssertionError as error:
        return refused(row, error)
    whole, f = times[provider, "whole"], times.get((provider, "f"))
    row |= {"ms": 1e3 * statistics.median(whole), "ms_min": 1e3 * min(whole), "rounds": [1e3 * s for s in whole]}
    row["copy_gb_per_s"] = copy.rate(min(times[COPY])) / 1e9
    own = row["ms_min"]
    if f is not None:
        row["f_ms"] = 1e3 * min(f)
        own -= row["f_ms"]
        row["solver_ms"] = own / row["evaluations"]
    if "bytes" in row:
        row["floor_ms"] = 1e-6 * row["bytes"] / row["copy_gb_per_s"]
        row["floor_x"] = own / row["floor_ms"]
    return row


def compare(case: Case, rows: Sequence[Row]) -> None:
    """How many times as fast as each peer of the case a row is: per iteration and without f where that is told."""
    by_provider = {row["provider"]: row for row in rows if "ms" in row}
    for provider, row in by_provider.items():
        column = "solver_ms" if "solver_ms" in row else "ms_min"
        peers = [peer for peer in case.peers if peer in by_provider and peer != provider]
        gains = {peer: by_provider[peer][column] / row[column] for peer in peers}
        if gains and min(row[column], *gains.values()) > 0:  # else the time of f hides the solver's
            row |= {"gains": gains, "peer": peers[0], "gain": gains[peers[0]]}


class Board:
    """What was measured in a session. A case is measured when the first of its providers is asked for."""

    def __init__(self, device: str) -> None:
        self.device, self.rows = device, []
        self._copy: Copy | None = None
        self._outcomes: dict[tuple[str, str], dict[str, Outcome]] = {}

    rows: list[Row]

    def outcome(self, case: Case, provider: str, together: Sequence[str]) -> Outcome:
        """Of one provider; `together`: all the providers of the case that are asked for in this session."""
        key = (case.section, case.name)
        if key not in self._outcomes:
            self._copy = self._copy or Copy(self.device)
            self._outcomes[key] = measure(case, together, self.device, self._copy)
        return self._outcomes[key][provider]

    def run(self, benchmark: Any, case: Case, provider: str, together: Sequence[str]) -> None:
        """The test of one provider: fails where it is wrong, keeps its row and tells pytest-benchmark its rounds."""
        outcome = self.outcome(case, provider, together)
        if isinstance(outcome, Exception):
            raise outcome
        self.rows.append(outcome)
        if "skipped" in outcome:
            pytest.skip(outcome["skipped"])
        if "problem" in outcome:
            pytest.xfail(outcome["problem"])
        benchmark.group = f"{case.section} {case.name}"
        benchmark.extra_info.update(outcome)
        REPLAY.play(benchmark, [1e-3 * ms for ms in outcome["rounds"]])
