"""The eager loop, and its look at the number of running samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def iterate(
    advance: Callable[[int, int], None],
    max_iter: int,
    watch: Watch,
    patience: int = 0,
    resume: Callable[[int], int] = lambda k: k,
) -> int:
    """Call `advance(first, until)` for runs of iterations until all samples are done; return their number.

    The host looks as often as the watch says. After every `patience` iterations, and when all samples are done,
    `resume(k)` may let samples run again. It returns the number of the next iteration.
    """
    first = made = 0
    while first < max_iter:
        until = min(first + watch.every, max_iter)
        if patience:
            until = min(until, first - first % patience + patience)
        advance(first, until)
        made, first = made + until - first, until
        if first < max_iter:
            done = watch.count() == 0
            if patience and (done or first % patience == 0):
                first = resume(first)
                watch.forget()
            elif done:
                break
    return made


class Watch:
    """Number of running samples that the host has read; -1 before.

    Attributes:
        every: iterations between two looks at the number.
    """

    every = 1

    def __init__(self, active: Tensor):
        self.active, self.known = active, -1

    def count(self) -> int:
        """Read the number, which waits for the device, and return it."""
        self.known = int(self.active)
        return self.known

    def forget(self) -> None:
        """Forget the number, which is outdated."""
        self.known = -1


class LateWatch(Watch):
    """Number at the previous look, which the device has computed meanwhile, so that the host does not wait."""

    every = 2  # a look costs a copy and a launch: more than one surplus evaluation

    def __init__(self, active: Tensor):
        super().__init__(active)
        self.pinned = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=active.is_cuda)
        self.arrived: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None

    def count(self) -> int:
        if self.arrived is None:
            self.arrived = torch.cuda.Event()
            # Kept, because looking it up takes as long as recording.
            self.stream = torch.cuda.current_stream(self.active.device)
        else:
            self.arrived.synchronize()
            self.known = self.pinned.tolist()[0]
        self.pinned.copy_(self.active, non_blocking=True)
        self.arrived.record(self.stream)
        return self.known

    def forget(self) -> None:
        super().forget()
        self.arrived = None


def watch_of(active: Tensor) -> Watch:
    """Watch of the device's counter `active`; late on a GPU, because reading it would wait."""
    return LateWatch(active) if active.is_cuda else Watch(active)
