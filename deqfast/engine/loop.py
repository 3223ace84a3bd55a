"""The eager loop, its look at the number of running samples, and the parts of which its body is composed.

A solve is composed of the parts that its options need, so that no iteration tests for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.steps.reference import begun, evaluated
from ..solution import Status
from ..solvers.base import State
from ..state.evaluation import countable, evaluate, versions, writes
from ..state.packing import Packing
from ..torch_internals.ranks import InStep


def iterate(
    advance: Callable[[int, int], int | None],
    max_iter: int,
    watch: Watch,
    patience: int = 0,
    resume: Callable[[int], int] = lambda k: k,
) -> int:
    """Call `advance(first, until)` for runs of iterations until all samples are done; return their number.

    It may return the number of running samples. Else the host looks, as often as the watch says. After every `patience`
    iterations, and when all samples are done, `resume(k)` may let samples run again. It returns the number of the next
    iteration.
    """
    first = made = 0
    while first < max_iter:
        until = min(first + watch.every, max_iter)
        if patience:
            until = min(until, first - first % patience + patience)
        running = advance(first, until)
        made, first = made + until - first, until
        if first < max_iter:
            if type(running) is not int or watch.is_common:  # the result of a solver's own `advance` has no meaning
                running = watch.count()
            else:
                watch.known = running
            done = not running
            if patience and (done or first % patience == 0):
                first = watch.resumed(resume(first))
            elif done:
                break
    return made


class Watch:
    """Number of running samples that the host has read; -1 before."""

    every = 1  # iterations between two looks at the number
    is_common = False  # other processes count too

    def __init__(self, active: Tensor):
        self.active, self.known = active, -1

    def count(self) -> int:
        """Read the number, which waits for the device, and return it."""
        self.known = int(self.active)
        return self.known

    def resumed(self, k: int) -> int:
        """Forget the number, which is outdated; return the number of the next iteration, k if this process decides."""
        self.known = -1
        return k


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

    def resumed(self, k: int) -> int:
        self.arrived = None
        return super().resumed(k)


class CommonWatch(Watch):
    """Number on the rank on which most samples run. `known` is the number on this rank.

    All ranks have begun when a watch exists: the first exchange says that no start was refused.
    """

    is_common = True

    def __init__(self, active: Tensor, ranks: InStep) -> None:
        super().__init__(active)
        self.ranks = ranks
        ranks.most(0)

    def count(self) -> int:
        return self.ranks.most(super().count())

    def resumed(self, k: int) -> int:
        return -self.ranks.most(-super().resumed(k))  # the least: a rank without running samples ends its own solve


def watch_of(active: Tensor) -> Watch:
    """Watch of the device's counter `active`; late on a GPU, because reading it would wait."""
    return LateWatch(active) if active.is_cuda else Watch(active)


# Finished samples leave f's batch when they are this share of it; for fewer, moving the others does not pay.
COMPACT_SHARE = 0.25

StopFn = Callable[[Any, Any, int], Tensor]
Evaluation = Callable[[], tuple[Any, Tensor]]
"""Call of f at the present iterate, which returns f's value and its rows."""


def whole(f: Callable[[Any], Any], packing: Packing, state: State) -> Evaluation:
    """Evaluations of all samples."""
    z, unpack, pack = state.z, packing.unpack, packing.packer(state.z)
    is_rows, is_view, is_narrow = packing.is_rows, packing.is_view, packing.is_narrow

    def call() -> tuple[Any, Tensor]:
        if is_narrow:
            packing.round_(z)
        # A view for each call: f may set its gradient, its data or attributes.
        shown = z.view_as(z) if is_rows else unpack(z)
        before = z._version if is_view else versions(shown)
        value = f(shown)
        if (z._version if is_view else versions(shown)) != before:
            raise writes()
        return value, pack(value)

    return call


class Compaction:
    """Evaluations of the running samples, and perhaps some others.

    In f's value, rows of samples that are left out are undefined, and no solver reads them; with `fills` they are z.
    """

    def __init__(self, f: Callable[..., Any], packing: Packing, state: State, watch: Watch, fills: bool) -> None:
        self.f, self.packing, self.state, self.watch, self.fills = f, packing, state, watch, fills
        self.rows: Tensor | None = None
        self.samples = 0  # in all evaluations together

    def take_all(self) -> None:
        """Put all samples into the next batch, because some run again."""
        self.rows = None

    def __call__(self) -> tuple[Any, Tensor]:
        packing, z = self.packing, self.state.z
        packing.round_(z)
        self._drop()
        if (which := self.rows) is None:
            self.samples += packing.batch
            value = evaluate(self.f, packing.unpack(z), None)
            return value, packing.packer(z)(value)
        part, own = packing.resized(len(which)), z.index_select(0, which)
        self.samples += part.batch
        value = evaluate(self.f, part.unpack(own), which)
        rows = part.packer(own)(value)
        if self.fills:
            value = part.fill(packing.unpack(z), value, which)
        return value, rows.new_empty(packing.batch, rows.shape[1]).index_copy_(0, which, rows)

    def _drop(self) -> None:
        """Select the running rows again if enough others are done; this waits for the device."""
        size = self.packing.batch if self.rows is None else len(self.rows)
        if 0 < self.watch.known <= (1 - COMPACT_SHARE) * size:
            running = self.state.running.nonzero().flatten()
            self.rows = running if len(running) else self.rows


class Front:
    """Evaluations of the positions of a causal solve that may still run.

    They begin with the first one that runs in any sequence; reading its number waits for the device.
    ``f.from_position`` evaluates the positions from a number on.
    """

    def __init__(self, f: Any, packing: Packing, state: State) -> None:
        self.f, self.packing, self.state, self.length = f, packing, state, packing.length or 1
        self.rows = state.z  # f's last value, once it has returned one
        self.samples = 0  # positions in all evaluations together

    def __call__(self) -> tuple[Any, Tensor]:
        packing, z = self.packing, self.state.z
        packing.round_(z)
        first = int(self.state.running.view(-1, self.length).any(dim=0).int().argmax())
        count = packing.batch // self.length
        self.samples += count * (self.length - first)
        if not first:
            value = evaluate(self.f, packing.unpack(z))
            self.rows = packing.packer(z)(value)
            return value, self.rows
        before, part = packing.resized(count, first), packing.resized(count, self.length - first)
        self.rows = self.rows.clone()
        known, rest = self.rows.view(count, self.length, -1).split([first, self.length - first], dim=1)
        value = evaluate(self.f.from_position, packing.unpack(z), first, before.unpack(known.flatten(0, 1)))
        rest.copy_(part.rows_of_value(value).view_as(rest))
        return value, self.rows


def stop(stop_fn: StopFn, packing: Packing, state: State, value: Any, rows: Tensor, k: int) -> Tensor:
    """End samples by the caller's rule before step k; return the rows of f's value for the step.

    The rule may keep z, which is a copy, and must not write to f(z).
    """
    rows = countable(rows)
    before, status = versions(value), state.status
    ended = stop_fn(packing.unpack(state.z.clone()), value, k + 1)
    if versions(value) != before:
        raise ValueError("stop_fn must not modify its argument value, got a rule that works in place on it")
    parts = (ended.shape, ended.dtype, ended.device) if isinstance(ended, Tensor) else ()
    if parts != (status.shape, torch.bool, status.device):
        got = f"{tuple(ended.shape)} {ended.dtype} on {ended.device}" if parts else repr(ended)
        wanted = f"({packing.batch},) torch.bool on {status.device}"
        raise ValueError(f"stop_fn must return a mask {wanted}, got {got}")
    _end(state, ended, rows, k)
    return rows


def _end(state: State, ended: Tensor, rows: Tensor, k: int) -> None:
    """End the running samples of the mask at the present iterate, unless they have converged or are not finite."""
    assert state.rule is not None  # f has returned a value
    now = evaluated(state.z, rows, state.rule, begun(state.progress, k))
    converged = now.converged(state.rule)
    ended = ended & state.running & torch.isfinite(now.res_abs) & ~converged
    state.best.copy_(torch.where(ended[:, None], state.z, state.best))
    state.residual.copy_(torch.where(ended, torch.stack([now.res_rel, now.res_abs]), state.residual))
    state.iterations.copy_(torch.where(ended, state.iterations_at(k), state.iterations))
    state.status.masked_fill_(ended, Status.STOPPED)
    state.active -= ended.sum(dtype=torch.int32)
