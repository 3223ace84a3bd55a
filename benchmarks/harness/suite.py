"""Rows of the cases: every provider's answer is checked, then rounds of all of them and of a large copy interleave."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .entry import FOREIGN, Case, Contender, Skipped, fault
from .record import Row, write_record
from .timing import Copy, Graph, buffers, in_turns, repeats_of, wait

COPY = ("copy", "")
BENCHMARK_ROUNDS = 3  # that pytest-benchmark times by itself, in addition to the interleaved ones
LARGE_SECONDS = 1800  # after which a case of ``--full``, with all its providers, is given up
LONG = 1.0  # seconds; a longer call is timed once
SMALL_COPY = 1 << 12  # elements
Outcome = Row | Exception  # the error if a provider of our own is wrong: it gets no row


def measure(
    case: Case, providers: Sequence[str], device: str, copy: Copy, **turns: Any
) -> tuple[dict[str, Outcome], dict[str, Contender]]:
    """Rows of the providers, or the error if one of our own is wrong; and the providers that can be called again.

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
            row |= fault(reason)
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
            add_times(rows[provider], own, copy.rate(min(times[COPY])), device)
    compare(case, list(rows.values()))
    for provider in set(failed) & set(FOREIGN):  # others' code: the row has the fault
        rows[provider] |= fault(failed.pop(provider))
    return rows | failed, contenders


def parts_of(contender: Contender, device: str) -> dict[str, Callable[[], Any]]:
    """Timed calls of a contender; on a GPU, calls without the host as a graph over alternating buffers."""
    parts: dict[str, Callable[[], Any]] = {"whole": contender.call}
    if contender.f is not None:
        parts["f"] = contender.f
    if device == "cuda" and contender.another is not None:
        parts = {part: Graph([call]) for part, call in parts.items()}
        others = [contender.another() for _ in range(buffers(contender.facts["bytes"]) - 1)]
        parts["whole"] = Graph([contender.call, *others])
    return parts


def add_times(row: Row, times: dict[str, list[float]], copy_rate: float, device: str) -> None:
    """Add the columns of times; least times are compared with the least time of the copy in the same rounds.

    On a GPU f is timed without the host, and its time is not subtracted: the host's own time may hide it.
    """
    row |= columns_of(times["whole"])
    row["copy_gb_per_s"] = copy_rate / 1e9
    own = row["ms_min"]
    if "device_ms" in row:
        row["busy"] = row["device_ms"] / own
    if "f" in times:
        row["f_ms"] = 1e3 * min(times["f"])
        own -= row["f_ms"]
        row["share_of_f"] = own / row["f_ms"]
        if device == "cuda":
            return
        row["solver_ms"] = own / row.get("evaluations", 1)
    if "bytes" in row:
        row["floor_ms"] = 1e-6 * row["bytes"] / row["copy_gb_per_s"]
        row["floor_x"] = own / row["floor_ms"]


def columns_of(seconds: Sequence[float]) -> Row:
    """Columns of the times of a call's rounds."""
    low, _, high = statistics.quantiles(seconds) if len(seconds) > 1 else [*seconds] * 3
    return {
        "ms": 1e3 * statistics.median(seconds),
        "ms_min": 1e3 * min(seconds),
        "ms_quartiles": [1e3 * low, 1e3 * high],
        "rounds": len(seconds),
    }


def compare(case: Case, rows: Sequence[Row]) -> None:
    """Add the speed of each row relative to the peers of the case: per iteration and without f if that was measured."""
    by_provider = {row["provider"]: row for row in rows if "ms" in row}
    for provider, row in by_provider.items():
        column = "solver_ms" if "solver_ms" in row else "ms_min"
        peers = [peer for peer in case.peers if peer in by_provider and peer != provider]
        gains = {peer: by_provider[peer][column] / row[column] for peer in peers}
        if gains and min(row[column], *gains.values()) > 0:  # else f's time hides the solver's
            row["gains"] = gains


class Board:
    """Rows measured in a session. A case is measured when the first of its providers is needed.

    journal: a file with all rows so far, so that nothing is lost with the process. small: times are meaningless.
    """

    def __init__(self, device: str, journal: Path | None = None, small: bool = False) -> None:
        self.device, self.journal, self.small = device, journal, small
        self.rows: list[Row] = []
        self._copy: Copy | None = None
        self._outcomes: dict[tuple[str, str], dict[str, Outcome]] = {}
        self._contenders: dict[str, Contender] = {}  # of the case measured last

    def run(self, benchmark: Any, case: Case, provider: str, together: Sequence[str]) -> None:
        """Test one provider: fail if it is wrong, keep its row, and have pytest-benchmark time a few calls.

        together: all providers of the case in this session. The few calls are for pytest-benchmark's own tables and
        files. Comparisons use the interleaved rounds, in `extra_info`.
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
