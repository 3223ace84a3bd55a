"""Times of several calls in turns, so that all of them see the same quiet or noisy moments of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

ROUNDS = 7
FEWEST_ROUNDS = 3
SECONDS = 12.0  # after these, rounds beyond the fewest are given up
SHORTEST = 2e-3  # seconds that a round of a call should take: shorter calls are repeated within it
MOST_REPEATS = 200
COPY_ELEMENTS = 64 << 20  # fp32, read and written: many times what a cache holds

Key = TypeVar("Key", bound=Hashable)


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(
    call: Callable[[], Any], repeats: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Of one of `repeats` calls, until the device is done."""
    wait(device)
    start = clock()
    for _ in range(repeats):
        call()
    wait(device)
    return (clock() - start) / repeats


def in_turns(
    calls: Mapping[Key, Callable[[], Any]],
    device: str = "cpu",
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Seconds per call of every round; each round times all the calls one after the other.

    A first call warms up, a second says how often each call is repeated within a round. After `seconds`, rounds beyond
    ``FEWEST_ROUNDS`` are left out. A call that takes longer than `seconds` by itself is made once.
    """
    times: dict[Key, list[float]] = {key: [seconds_of(call, 1, device, clock)] for key, call in calls.items()}
    repeats = {}
    for key, call in calls.items():
        if times[key][0] <= seconds:
            times[key].clear()
            repeats[key] = max(1, min(MOST_REPEATS, round(SHORTEST / seconds_of(call, 1, device, clock))))
    deadline = time.monotonic() + seconds
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for key, count in repeats.items():
            times[key].append(seconds_of(calls[key], count, device, clock))
    return times


class Copy:
    """A large copy, to be timed in turns with what is compared with its rate."""

    def __init__(self, device: str = "cpu", elements: int = COPY_ELEMENTS) -> None:
        self.source = torch.ones(elements, device=device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        self.target.copy_(self.source)

    def rate(self, seconds: float) -> float:
        """Bytes per second, read and write counted."""
        return 2 * self.source.nbytes / seconds
