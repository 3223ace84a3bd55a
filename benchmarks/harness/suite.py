"""From cases to rows: every provider's answer is checked, then all of a case are timed in turns with a large copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .entry import FOREIGN, Case, Contender, Skipped
from .record import Row, write_record
from .timing import Copy, Graph, buffers, in_turns, repeats_of, wait

COPY, IN_PLACE = ("copy", ""), "in place"
BENCHMARK_ROUNDS = 3  # that pytest-benchmark times by itself, beside those in turns
LARGE_SECONDS = 1800  # after which a case of ``--full`` is given up, measured together with all its providers
LONG = 1.0  # seconds; of a longer call it times one
SMALL_COPY = 1 << 12  # elements
Outcome = Row | Exception  # the error where a provider of our own is wrong: it gets no row
Times = dict[Any, list[float]]


def measure(
    case: Case, providers: Sequence[str], device: str, copy: Copy, **turns: Any
) -> tuple[dict[str, Outcome], dict[str, Contender]]:
    """Rows of the providers, of one of our own that is wrong the error; and those that can be called again.

    turns: arguments of ``in_turns``.
    """
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
    times: Times = {}
    if contenders:
        calls: dict[Any, Callable[[], Any]] = {COPY: Graph([copy]) if device == "cuda" else copy}
        for provider, contender in list(contenders.items()):
            try:
                calls |= {(provider, part): call for part, call in parts_of(contender, device).items()}
            except RuntimeError as error:  # a kernel that cannot be captured
                outcomes[provider] = refused(outcomes[provider], error)
                del contenders[provider]
        times = in_turns(calls, device, **turns)
    for provider, contender in contenders.items():
        outcomes[provider] = timed(outcomes[provider], contender, times, provider, copy)
    compare(case, [row for row in outcomes.values() if isinstance(row, dict)])
    return outcomes, contenders


def parts_of(contender: Contender, device: str) -> dict[str, Callable[[], Any]]:
    """What is timed of a contender; on a GPU what needs no host as a graph, over buffers in turns and over one."""
    parts: dict[str, Callable[[], Any]] = {"whole": contender.call}
    if contender.f is not None:
        parts["f"] = contender.f
    if device != "cuda" or contender.another is None:
        return parts
    count = buffers(contender.facts["bytes"]) if "bytes" in contender.facts else 1
    graphs: dict[str, Callable[[], Any]] = {part: Graph([call]) for part, call in parts.items()}
    graphs[IN_PLACE] = graphs["whole"]
    graphs["whole"] = Graph([contender.call, *(contender.another() for _ in range(count - 1))])
    return graphs


def refused(row: Outcome, error: Exception) -> Outcome:
    """What is kept of a provider that failed: a row that says so if it is others' code, else the error."""
    if isinstance(row, Exception) or row["provider"] not in FOREIGN:
        return error
    return row | {"problem": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def timed(row: Outcome, contender: Contender, times: Times, provider: str, copy: Copy) -> Outcome:
    """The row with its times; least times are compared with the copy's least, of the same rounds."""
    assert isinstance(row, dict)
    try:
        contender.verify()
    except AssertionError as error:
        return refused(row, error)
    row |= columns_of(times[provider, "whole"])
    row["copy_gb_per_s"] = copy.rate(min(times[COPY])) / 1e9
    own = row["ms_min"]
    if (provider, IN_PLACE) in times:
        row["in_place_ms"] = 1e3 * min(times[provider, IN_PLACE])
    if (provider, "f") in times:
        row["f_ms"] = 1e3 * min(times[provider, "f"])
        own -= row["f_ms"]
        row["solver_ms"] = own / row.get("evaluations", 1)
    if "f_ms" in row and "evaluations" in row:
        row["share_of_f"] = own / row["f_ms"]
    if "bytes" in row:
        row["floor_ms"] = 1e-6 * row["bytes"] / row["copy_gb_per_s"]
        row["floor_x"] = own / row["floor_ms"]
    return row


def columns_of(seconds: Sequence[float]) -> Row:
    """The columns that say how long the rounds of a call took."""
    low, _, high = statistics.quantiles(seconds) if len(seconds) > 1 else [*seconds] * 3
    return {
        "ms": 1e3 * statistics.median(seconds),
        "ms_min": 1e3 * min(seconds),
        "ms_quartiles": [1e3 * low, 1e3 * high],
        "rounds": len(seconds),
    }


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
    """What was measured in a session. A case is measured when the first of its providers is asked for.

    journal: a file that has all rows at any time, so that nothing is lost with the process; small: times are of no use.
    """

    rows: list[Row]

    def __init__(self, device: str, journal: Path | None = None, small: bool = False) -> None:
        self.device, self.journal, self.small, self.rows = device, journal, small, []
        self._copy: Copy | None = None
        self._outcomes: dict[tuple[str, str], dict[str, Outcome]] = {}
        self._contenders: dict[str, Contender] = {}  # of the case that was measured last

    def outcome(self, case: Case, provider: str, together: Sequence[str]) -> Outcome:
        """The outcome of one provider; `together`: all providers of the case that are asked for in this session."""
        key = (case.section, case.name)
        if key not in self._outcomes:
            self._contenders = {}
            self._copy = self._copy or Copy(self.device, *[SMALL_COPY] * self.small)
            turns = {"rounds": 1, "seconds": 0.1} if self.small else {}
            self._outcomes[key], self._contenders = measure(case, together, self.device, self._copy, **turns)
        return self._outcomes[key][provider]

    def run(self, benchmark: Any, case: Case, provider: str, together: Sequence[str]) -> None:
        """The test of one provider: fails where it is wrong, keeps its row, and has pytest-benchmark time a few calls.

        Those are for pytest-benchmark's own tables and files; what is compared is taken in turns, in `extra_info`.
        """
        outcome = self.outcome(case, provider, together)
        if isinstance(outcome, Exception):
            raise outcome
        self.add(outcome)
        if "skipped" in outcome:
            pytest.skip(outcome["skipped"])
        if "problem" in outcome:
            pytest.xfail(outcome["problem"])
        benchmark.group = f"{case.section} {case.name}"
        benchmark.extra_info.update(outcome)
        contender, seconds = self._contenders.pop(provider), 1e-3 * outcome["ms_min"]

        def call() -> None:
            contender.call()
            wait(self.device)

        rounds = 1 if seconds > LONG else BENCHMARK_ROUNDS
        benchmark.pedantic(call, rounds=rounds, iterations=repeats_of(seconds))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.journal is not None:
            write_record(self.journal, self.rows, self.device, "the run did not come to its end")
