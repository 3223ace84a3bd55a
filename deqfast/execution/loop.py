"""The iteration loop of eager solves, their beginning and their end."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import choose_kernel
from ..ops.steps.reference import begun, evaluated
from ..solution import Solution, Status
from ..solvers import Solver
from ..solvers.base import State
from ..solvers.multisecant import Multisecant, begun_state
from ..state.groups import Groups
from ..state.packing import Packing, evaluate, kept, versions
from ..torch_internals.dynamo import is_exporting, outside_exports
from ..torch_internals.transforms import values
from .export import iterate_in_code, iterate_in_graph

# Finished samples leave f's batch when they are this share of it; for fewer, moving the others does not pay.
COMPACT_SHARE = 0.25


StopFn = Callable[[Any, Any, int], Tensor]
Keep = Callable[[Callable[[Any], Any]], None]
"""Called with v -> (I - J^T)^-1 v, an estimate for v like z0, J the Jacobian of f at the value of a solve."""


@dataclass(frozen=True)
class Begun:
    """Solve that has begun, with its state."""

    packing: Packing
    solver: Solver
    state: State
    keep_inverse: Keep | None = None

    def finish(self, evaluations: int, sample_evaluations: int, state: State | None = None) -> Solution:
        """Solution after this number of calls of f; `state`: a copy of its state if the solve will run again."""
        state = self.state if state is None else state
        if self.keep_inverse is not None:
            self.keep_inverse(inverse_of(self.packing, self.solver, state))
        return solution_of(self.packing, self.solver, state, evaluations, sample_evaluations)


def begin(
    z0: Any,
    solver: Solver,
    kernel: str,
    *,
    groups: Groups | Tensor | str | None = None,
    scale: Any = None,
    keep_inverse: Keep | None = None,
    trace: bool = False,
) -> Begun:
    """Begin a solve: pack z0, check that it is finite, choose the kernel and make the solver's state.

    Raises:
        TypeError, ValueError: z0, `groups` or `scale` are not as ``deqfast.solve`` takes them; the solver has no
            inverse to keep.
        RuntimeError: the kernel of this name cannot run.
    """
    check_inverse(solver, keep_inverse)
    packing = Packing(z0, groups, scale)
    chosen = choose_kernel(kernel, packing.device)
    # In inference mode torch does not count in-place operations of f.
    with _outside_inference(), outside_exports(torch.no_grad()):
        state = begun_state(solver, finite_rows(packing, z0), chosen, keep_inverse is not None)
        if trace:
            state.trace = state.z.new_empty(solver.max_iter, 2, packing.batch)
    return Begun(packing, solver, state, keep_inverse)


def _outside_inference() -> AbstractContextManager[None]:
    return outside_exports(torch.inference_mode(False)) if torch.is_inference_mode_enabled() else nullcontext()


def check_inverse(solver: Solver, keep_inverse: Keep | None) -> None:
    """Raise ValueError if an inverse is to be kept and the solver has none."""
    if keep_inverse is not None and not isinstance(solver, Multisecant):
        raise ValueError(f"SHINE needs the history of Anderson or Broyden, got {solver}")


def finite_rows(packing: Packing, z0: Any) -> Tensor:
    """Rows (B, D) of z0; raises ValueError for rows that are not finite, except in an export, which has no values."""
    z = packing.pack(z0)
    # A finite sum has finite terms only; a sum that is not finite may have overflowed.
    if not is_exporting() and not math.isfinite(float(values(z).sum())):
        finite = torch.isfinite(z).all(dim=1)
        if not bool(values(finite).all()):
            raise not_finite(finite)
    return z


def not_finite(finite: Tensor) -> ValueError:
    """Error for a z0 whose rows are finite as the mask (B,) says."""
    rows = (~finite).nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return ValueError(f"z0 must be finite; it is not in {len(rows)} of {len(finite)} rows: {shown}")


def inverse_of(packing: Packing, solver: Solver, state: State) -> Callable[[Any], Any]:
    """Estimate v -> (I - J^T)^-1 v of a solve at `state`, see ``Keep``."""
    assert isinstance(solver, Multisecant)
    gradients = packing.transposed()
    return lambda v: gradients.unpack(solver.transposed_inverse(state, gradients.pack(v)))


def iterate(
    advance: Callable[[int, int], None],
    max_iter: int,
    watch: Watch,
    patience: int = 0,
    resume: Callable[[int], int] = lambda k: k,
    every: int | None = None,
) -> int:
    """Call `advance(first, until)` for runs of iterations until all samples are done; return their number.

    After every `patience` iterations, and when all samples are done, `resume(k)` may let samples run again. It returns
    the number of the next iteration. The host looks at the count of running samples after `every` iterations; None: as
    the watch says.
    """
    every = every or watch.every
    first = made = 0
    while first < max_iter:
        until = min(first + every, max_iter)
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


def export(run: Run, keeps_inverse: bool) -> Any:
    """Iterate under torch.export; return the number of evaluations, a tensor if a loop of the graph counts them."""
    solve = run.f, run.packing, run.solver, run.state
    is_loop = type(run.batches) is Whole and run.stop_fn is None and run.state.trace is None
    evaluations = iterate_in_code(*solve) if is_loop and not keeps_inverse else None
    if evaluations is None:
        run.advance(0, 1)
        evaluations = iterate_in_graph(*solve) if is_loop else None
    if evaluations is None:
        run.advance(1, run.solver.max_iter)
        return run.solver.max_iter
    run.batches.sample_evaluations = evaluations * run.packing.batch
    return evaluations


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
    """Number at the previous check, which the device has computed meanwhile, so that the host does not wait."""

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


class Whole:
    """Batches of all samples, which f is called with."""

    def __init__(self) -> None:
        self.sample_evaluations = 0

    def take_all(self) -> None:
        """Put all samples into the next batch, because some run again."""

    def evaluate(self, f: Callable[..., Any], packing: Packing, state: State) -> tuple[Any, Tensor]:
        """Call f; return its value, and rows of it."""
        return self._called(f, packing, state.z)

    def _called(
        self, f: Callable[..., Any], packing: Packing, rows: Tensor, *which: Tensor | None
    ) -> tuple[Any, Tensor]:
        self.sample_evaluations += packing.batch
        value = evaluate(f, packing.unpack(rows), *which)
        return value, packing.pack_value(value, rows)


class Compaction(Whole):
    """Batches of the running samples, and perhaps some others. In f's value, rows of samples that are left out are
    undefined, and no solver reads them; with `fills` they are z.
    """

    def __init__(self, watch: Watch, fills: bool) -> None:
        super().__init__()
        self.watch, self.fills = watch, fills
        self.rows: Tensor | None = None

    def take_all(self) -> None:
        self.rows = None

    def evaluate(self, f: Callable[..., Any], packing: Packing, state: State) -> tuple[Any, Tensor]:
        self._drop(packing, state)
        if (which := self.rows) is None:
            return self._called(f, packing, state.z, None)
        part = packing.resized(len(which))
        value, rows = self._called(f, part, state.z.index_select(0, which), which)
        if self.fills:
            value = part.fill(packing.unpack(state.z), value, which)
        return value, rows.new_empty(packing.batch, rows.shape[1]).index_copy_(0, which, rows)

    def _drop(self, packing: Packing, state: State) -> None:
        """Select the running rows again if enough others are done; this waits for the device."""
        size = packing.batch if self.rows is None else len(self.rows)
        if 0 < self.watch.known <= (1 - COMPACT_SHARE) * size:
            running = state.running.nonzero().flatten()
            self.rows = running if len(running) else self.rows


@dataclass
class Run:
    """Running solve, whose iterations advance the state in place."""

    f: Callable[..., Any]
    packing: Packing
    solver: Solver
    state: State
    batches: Whole
    stop_fn: StopFn | None = None
    made: int = 0  # evaluations; a solver may skip numbers

    def advance(self, first: int, until: int) -> None:
        """Run the iterations first ... until - 1."""
        solver, state = self.solver, self.state
        for k in range(first, until):
            last = k + 1 == solver.max_iter
            value, rows = self.batches.evaluate(self.f, self.packing, state)
            if k == 0:
                state.rule = solver.rule(self.packing.stall_floor(value))
            if self.stop_fn is not None:
                rows = kept(rows)
                self._end(self._asked(self.stop_fn, value, k + 1), rows, k)
            solver.advance(state, rows, k, last)
            if state.trace is not None:
                state.trace[self.made].copy_(state.residual)
            self.made += 1

    def resume(self, k: int) -> int:
        """Let the solver resume samples; return the number of the next evaluation, max_iter if none follows."""
        self.batches.take_all()
        return self.solver.resume(self.state, k, self.solver.max_iter)

    def _asked(self, stop_fn: StopFn, value: Any, k: int) -> Tensor:
        """Mask of samples to end, by the rule. It may keep z, which is a copy, and must not write to f(z)."""
        before, status = versions(value), self.state.status
        ended = stop_fn(self.packing.unpack(self.state.z.clone()), value, k)
        if versions(value) != before:
            raise ValueError("stop_fn must not modify its argument value, got a rule that works in place on it")
        parts = (ended.shape, ended.dtype, ended.device) if isinstance(ended, Tensor) else ()
        if parts != (status.shape, torch.bool, status.device):
            got = f"{tuple(ended.shape)} {ended.dtype} on {ended.device}" if parts else repr(ended)
            wanted = f"({self.packing.batch},) torch.bool on {status.device}"
            raise ValueError(f"stop_fn must return a mask {wanted}, got {got}")
        return ended

    def _end(self, ended: Tensor, rows: Tensor, k: int) -> None:
        """End the running samples of the mask at the present iterate, unless they have converged or are not finite."""
        state = self.state
        assert state.rule is not None  # f has returned a value
        now = evaluated(state.z, rows, state.rule, begun(state.progress, k))
        converged = now.converged(state.rule)
        ended = ended & state.running & torch.isfinite(now.res_abs) & ~converged
        state.best.copy_(torch.where(ended[:, None], state.z, state.best))
        state.residual.copy_(torch.where(ended, torch.stack([now.res_rel, now.res_abs]), state.residual))
        state.iterations.copy_(torch.where(ended, state.iterations_at(k), state.iterations))
        state.status.masked_fill_(ended, Status.STOPPED)
        state.active -= ended.sum(dtype=torch.int32)


def solution_of(packing: Packing, solver: Solver, state: State, evaluations: int, sample_evaluations: int) -> Solution:
    """Solution of a solve that ended in `state`, after this number of calls of f."""
    measure = int(solver.is_absolute)
    residuals = state.residual.unbind()
    traces: list[Any] = [None, None] if state.trace is None else [state.trace[:evaluations, i] for i in range(2)]
    return Solution(
        value=packing.unpack(state.best),
        status=state.status,
        iterations=state.iterations,
        residual=residuals[measure],
        residual_rel=residuals[0],
        residual_abs=residuals[1],
        evaluations=evaluations,
        sample_evaluations=sample_evaluations,
        trace=traces[measure],
        trace_rel=traces[0],
        trace_abs=traces[1],
    )
