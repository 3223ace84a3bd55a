"""Making rows of cases: every provider's answer is checked, then all of a case are timed in turns with a large copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .entry import FOREIGN, Case, Contender, Skipped
from .record import Row, write_record
from .timing import Copy, Graph, buffers, in_turns, repeats_of, wait

COPY = ("copy", "")
BENCHMARK_ROUNDS = 3  # that pytest-benchmark times by itself, beside those in turns
LARGE_SECONDS = 1800  # after which a case of ``--full`` is given up, measured together with all its providers
LONG = 1.0  # seconds; of a longer call it times one
SMALL_COPY = 1 << 12  # elements
Outcome = Row | Exception  # the error where a provider of our own is wrong: it gets no row


def measure(
    case: Case, providers: Sequence[str], device: str, copy: Copy, **turns: Any
) -> tuple[dict[str, Outcome], dict[str, Contender]]:
    """Rows of the providers, of one of our own that is wrong the error; and those that can be called again.

    turns: arguments of ``in_turns``.
    """
    about = {"section": case.section, "case": case.name}
    rows: dict[str, Row] = {provider: {**about, "provider": provider} for provider in providers}
    failed: dict[str, Exception] = {}
    contenders: dict[str, Contender] = {}
    calls: dict[Any, Callable[[], Any]] = {}
    for provider, row in rows.items():
        try:
            contender = case.contender(provider, device)
            calls |= {(provider, part): call for part, call in parts_of(contender, device).items()}
            row |= contender.facts
            contenders[provider] = contender
        except Skipped as reason:
            row["skipped"] = str(reason)
        except Exception as error:  # one provider must not cost the others their rows
            failed[provider] = error
    if contenders:
        calls[COPY] = Graph([copy]) if device == "cuda" else copy
        times = in_turns(calls, device, **turns)
    for provider, contender in contenders.items():
        try:
            contender.verify()
        except AssertionError as error:
            failed[provider] = error
        else:
            own = {part: seconds for (name, part), seconds in times.items() if name == provider}
            add_times(rows[provider], own, copy.rate(min(times[COPY])))
    compare(case, list(rows.values()))
    for provider in set(failed) & set(FOREIGN):  # others' code: a row says so
        wrong = failed.pop(provider)
        rows[provider]["fault"] = f"{type(wrong).__name__}: {(str(wrong).splitlines() or [''])[0]}"
    return rows | failed, contenders


def parts_of(contender: Contender, device: str) -> dict[str, Callable[[], Any]]:
    """What is timed of a contender; on a GPU what needs no host as a graph, over buffers in turns."""
    parts: dict[str, Callable[[], Any]] = {"whole": contender.call}
    if contender.f is not None:
        parts["f"] = contender.f
    if device == "cuda" and contender.another is not None:
        parts = {part: Graph([call]) for part, call in parts.items()}
        others = [contender.another() for _ in range(buffers(contender.facts["bytes"]) - 1)]
        parts["whole"] = Graph([contender.call, *others])
    return parts


def add_times(row: Row, times: dict[str, list[float]], copy_rate: float) -> None:
    """Add the columns of times; least times are compared with the copy's least, of the same rounds."""
    row |= columns_of(times["whole"])
    row["copy_gb_per_s"] = copy_rate / 1e9
    own = row["ms_min"]
    if "f" in times:
        row["f_ms"] = 1e3 * min(times["f"])
        own -= row["f_ms"]
        row["solver_ms"] = own / row.get("evaluations", 1)
    if "f_ms" in row and "evaluations" in row:
        row["share_of_f"] = own / row["f_ms"]
    if "bytes" in row:
        row["floor_ms"] = 1e-6 * row["bytes"] / row["copy_gb_per_s"]
        row["floor_x"] = own / row["floor_ms"]


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
            row["gains"] = gains


class Board:
    """What was measured in a session. A case is measured when the first of its providers is asked for.

    journal: a file that has all rows at any time, so that nothing is lost with the process; small: times are of no use.
    """

    def __init__(self, device: str, journal: Path | None = None, small: bool = False) -> None:
        self.device, self.journal, self.small = device, journal, small
        self.rows: list[Row] = []
        self._copy: Copy | None = None
        self._outcomes: dict[tuple[str, str], dict[str, Outcome]] = {}
        self._contenders: dict[str, Contender] = {}  # of the case that was measured last

    def run(self, benchmark: Any, case: Case, provider: str, together: Sequence[str]) -> None:
        """The test of one provider: fails where it is wrong, keeps its row, and has pytest-benchmark time a few calls.

        together: all providers of the case that are asked for in this session. Those few calls are for
        pytest-benchmark's own tables and files; what is compared is taken in turns, in `extra_info`.
        """
        key = (case.section, case.name)
        if key not in self._outcomes:
            self._contenders = {}  # frees their tensors
            self._copy = self._copy or Copy(self.device, *[SMALL_COPY] * self.small)
            turns = {"rounds": 1, "seconds": 0.1} if self.small else {}
            self._outcomes[key], self._contenders = measure(case, together, self.device, self._copy, **turns)
        outcome = self._outcomes[key][provider]
        if isinstance(outcome, Exception):
            raise outcome
        self.add(outcome)
        if "skipped" in outcome:
            pytest.skip(outcome["skipped"])
        if "fault" in outcome:
            pytest.xfail(outcome["fault"])
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
