"""Interleaved times of several calls, so that all of them see the same quiet or noisy moments of the machine.

On the CPU, and for calls that involve the host, the host's clock is used. Kernels on a GPU are timed without the host,
as a CUDA graph between two events. The graph alternates between buffers, so that none is still in the cache when it is
used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from deqfast.torch_internals import graphs

ROUNDS = 7
FEWEST_ROUNDS = 3
SECONDS = 12.0  # after these, rounds above the fewest are left out
SHORTEST = 2e-3  # least seconds for a round of a call: shorter calls are repeated within it
MOST_REPEATS = 200
CALLS_PER_GRAPH = 20  # a shorter graph would show the cost of its launch
MOST_BUFFERS = 512
COPY_ELEMENTS = 64 << 20  # fp32, read and written: many times the size of a cache

Key = TypeVar("Key", bound=Hashable)
Call = Callable[[], Any]


class Graph:
    """Sequence of calls on a GPU without the host, at least `least` of them in a graph; the time is of one call."""

    def __init__(self, calls: Sequence[Call], least: int = CALLS_PER_GRAPH) -> None:
        calls = [*calls] * -(-least // len(calls))

        def work() -> None:
            for call in calls:
                call()

        self.replay = captured(work).replay
        self.calls = calls  # kept, because a graph does not keep the tensors that it works on
        self.share = 1 / len(calls)

    def __call__(self) -> None:
        self.replay()

    def seconds(self, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.replay()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) * self.share / repeats


def captured(work: Callable[[], Any]) -> Any:
    """Graph of `work`, which runs once before."""
    graphs.aside(work)
    (graph,) = graphs.capture([work])
    graph.instantiate()  # now, not in the first replay
    return graph


def buffers(nbytes: int) -> int:
    """Number of alternating buffers of `nbytes` on the GPU, so that each has left the cache when it is used again."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_BUFFERS, 2 * cache // max(nbytes, 1) + 2))


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Call, repeats: int, device: str, waits: bool = True) -> float:
    """Time per call of `repeats` calls, until the device has finished; without `waits`, until they are queued."""
    wait(device)
    if isinstance(call, Graph):
        return call.seconds(repeats)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if waits:
        wait(device)
    return (time.perf_counter() - start) / repeats


def repeats_of(seconds: float) -> int:
    """Number of calls of this length within a round."""
    return max(1, min(MOST_REPEATS, round(SHORTEST / max(seconds, 1e-9))))


def in_turns(
    calls: Mapping[Key, Call],
    device: str = "cpu",
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
) -> dict[Key, list[float]]:
    """Seconds per call of every round; each round times all the calls one after the other.

    A first call warms up. A second one determines how often each call is repeated within a round. After `seconds`,
    rounds above ``FEWEST_ROUNDS`` are left out. A call that takes longer than `seconds` by itself is made once.
    """
    times: dict[Key, list[float]] = {key: [seconds_of(call, 1, device)] for key, call in calls.items()}
    repeats = {}
    for key, call in calls.items():
        if times[key][0] <= seconds:
            times[key].clear()
            repeats[key] = repeats_of(seconds_of(call, 1, device))
    deadline = time.monotonic() + seconds
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for key, count in repeats.items():
            times[key].append(seconds_of(calls[key], count, device))
    return times


class Copy:
    """Large copy, whose rounds interleave with the calls that are compared with its rate."""

    def __init__(self, device: str = "cpu", elements: int = COPY_ELEMENTS) -> None:
        self.source = torch.ones(elements, device=device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        self.target.copy_(self.source)

    def rate(self, seconds: float) -> float:
        """Bytes per second, counting read and write."""
        return 2 * self.source.nbytes / seconds
