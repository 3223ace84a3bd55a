"""Solve fixed-point problems: the only iteration loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .checks import check_count
from .exported import iterate_in_graph
from .exporting import is_exporting, outside_exports
from .grouping import Groups
from .ops import choose_kernel
from .ops.steps.reference import begun, evaluated
from .packing import Packing, evaluate, versions
from .solution import Solution, Status
from .solvers import Solver, as_solver
from .solvers.base import State
from .solvers.multisecant import Multisecant
from .transforms import check_plain, values

# On a GPU a look at the count of running samples costs a copy and a launch; an evaluation in vain costs less than that.
CHECK_EVERY_ON_GPU = 2
# Finished samples leave f's batch when they are this share of it: fewer are not worth moving the others.
COMPACT_SHARE = 0.25

Halt = Callable[[Any, Any, int], Tensor]


def solve(
    f: Callable[..., Any],
    z0: Any,
    solver: str | Solver = "broyden",
    kernel: str = "auto",
    check_every: int | None = None,
    compact: bool = False,
    trace: bool = False,
    keep_inverse: bool = False,
    groups: Groups | Tensor | str | None = None,
    halt: Halt | None = None,
    scale: Any = None,
) -> Solution:
    """Solve z = f(z) for every sample of a batch, without gradient.

    The state is float32 (float64 if any of z0 is). A sample that is done is frozen; the answer for a sample does not
    depend on the others. Residuals are right at any scale that the dtype holds; pairs of Anderson or Broyden whose
    squares it does not hold (in float32 those shorter than 3e-16 or longer than 2e19) are left out of a step, which is
    the plain fixed-point step where none is left.

    Args:
        f: takes and returns the structure of z0; called under the caller's autocast state. Its argument is the solver's
            own memory: it may neither be modified nor kept beyond the call.
        z0: a floating-point or complex tensor (B, ...) or a pytree of them; dimension 0 is the batch. A complex number
            counts as two real ones.
        solver: a solver or the name of one, "broyden", "anderson" or "picard".
        kernel: "auto", "triton", "cuda", "cpp" or "torch", see ``backends``.
        check_every: iterations between looks at whether all samples are done (None: 1 on the CPU, 2 on a GPU). On a GPU
            the count comes one look late, so that the host never waits for the step it has just queued.
        compact: leave samples that are done out of f's batch, for an f that treats every sample by itself. f is then
            called as f(z, rows): rows (b,) int64 are the samples that z holds; None: all of them.
        trace: record the residuals of the best iterate after every evaluation.
        groups: for an f that couples rows of z, as a graph does its nodes: (N,) integers, the sample that each of the N
            rows of z0 belongs to, from 0, in any order; or "batch", for one sample of all rows. Residual, history and
            freezing are then those of such samples, whose number is the Solution's B. Samples are lengthened to the
            longest with zeros, in memory and in time. ``Groups`` are made once for many solves. None: each row is a
            sample, and f must not couple rows.
        halt: rule of the caller's own beside the solver's: halt(z, value, k), given the iterate z, f(z) and the number
            k = 1, 2, ... of the evaluation, returns a mask (B,) of the samples to end as they are, HALTED. It is asked
            about all samples, with z as the value of those that `compact` leaves out, and counts for those that run and
            have not converged; nothing waits for the device. It may keep z, and must not write to f(z).
        scale: the typical size of each tensor's numbers, in a tree like z0 (a tuple for a tuple), from 2^-60 to 2^60.
            Residuals and steps are those of the divided tensors: the larger its number, the less a tensor counts. Each
            acts as the power of two nearest to it, which rounds nothing. None: the numbers are of one size.
        keep_inverse: keep the history of Anderson or Broyden, and with it ``Solution.transposed_inverse``.

    Returns:
        Solution, whose `value` has the structure, dtypes and memory order of z0.

    Raises:
        TypeError, ValueError: an argument is not as above; z0 is not finite, naming its rows; f returns another shape
            or works in place on its argument; halt returns no such mask or writes to f(z).
        RuntimeError: a kernel asked for by name cannot serve; z0 belongs to torch.func or forward-mode AD.

    Examples:
        >>> solution = deqfast.solve(torch.cos, torch.zeros(2, 3), deqfast.Anderson(tol=1e-5))
        >>> solution
        Solution(2 CONVERGED, evaluations=6)
        >>> round(float(solution.value[0, 0]), 3)
        0.739
    """
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}")
    solver = as_solver(solver)
    if check_every is not None:
        check_count("check_every", check_every)
    check_inverse(solver, keep_inverse)
    if halt is not None and not callable(halt):
        raise TypeError(f"halt must be callable, got {halt!r}")
    if compact and groups is not None:
        raise ValueError("compact cannot be combined with groups: f could not tell which rows are left")
    check_plain("solve", z0)
    packing = Packing(z0, groups, scale)
    chosen = choose_kernel(kernel, packing.device)
    with outside_exports(torch.no_grad()):
        # In inference mode what f does in place would not be counted.
        with outside_exports(torch.inference_mode(False)), outside_exports(torch.no_grad()):
            state = solver.init(finite_rows(packing, z0), chosen, keep_inverse)
        if trace:
            state.trace = state.z.new_empty(solver.max_iter, 2, packing.batch)
        watch = watch_of(state.active)
        run = Run(f, packing, solver, state, Compaction(watch, halt is not None) if compact else Whole(), halt)
        if is_exporting():
            evaluations = export(run)
        else:
            evaluations = iterate(run.advance, solver.max_iter, watch, check_every) if packing.batch else 0
        solution = solution_of(packing, solver, state, evaluations, run.batches.sample_evaluations)
        if keep_inverse:
            solution = replace(solution, transposed_inverse=inverse_of(packing, solver, state))
        return solution


def check_inverse(solver: Solver, keep_inverse: bool) -> None:
    """Raise ValueError where an inverse is to be kept that the solver has not."""
    if keep_inverse and not isinstance(solver, Multisecant):
        raise ValueError(f"only Anderson and Broyden have an inverse to keep, which SHINE needs, got {solver}")


def finite_rows(packing: Packing, z0: Any) -> Tensor:
    """Rows (B, D) of z0; ValueError naming those that are not finite, but for an export, which cannot look."""
    z = packing.pack(z0)
    # A finite sum has finite terms only; one that is not may have overflown.
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
    """``Solution.transposed_inverse`` of a solve that has come to `state`."""
    assert isinstance(solver, Multisecant)
    gradients = packing.transposed()
    return lambda v: gradients.unpack(solver.transposed_inverse(state, gradients.pack(v)))


def iterate(advance: Callable[[int, int], None], max_iter: int, watch: Watch, check_every: int | None) -> int:
    """Call `advance(first, until)` for runs of iterations until all samples are done; return their number."""
    check_every = check_every or (CHECK_EVERY_ON_GPU if watch.active.is_cuda else 1)
    for first in range(0, max_iter, check_every):
        until = min(first + check_every, max_iter)
        advance(first, until)
        if until < max_iter and watch.count() == 0:
            return until
    return max_iter


def export(run: Run) -> Any:
    """Iterate where torch.export traces; the number of evaluations, a tensor if a loop of the graph counts them."""
    run.advance(0, 1)
    if type(run.batches) is Whole and run.halt is None and run.state.trace is None:
        evaluations = iterate_in_graph(run.f, run.packing, run.solver, run.state)
        if evaluations is not None:
            run.batches.sample_evaluations = evaluations * run.packing.batch
            return evaluations
    run.advance(1, run.solver.max_iter)
    return run.solver.max_iter


class Watch:
    """Number of running samples, as the host knows it; -1 before the first look."""

    def __init__(self, active: Tensor):
        self.active, self.known = active, -1

    def count(self) -> int:
        """Look, which waits for the device, and return the number."""
        self.known = int(self.active)
        return self.known


class LateWatch(Watch):
    """Number at the look before, which the device has reached while the host was queueing what followed."""

    def __init__(self, active: Tensor):
        super().__init__(active)
        self.pinned = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=active.is_cuda)
        self.arrived: torch.cuda.Event | None = None

    def count(self) -> int:
        if self.arrived is None:
            self.arrived = torch.cuda.Event()
        else:
            self.arrived.synchronize()
            self.known = self.pinned.tolist()[0]
        self.pinned.copy_(self.active, non_blocking=True)
        self.arrived.record(torch.cuda.current_stream(self.active.device))
        return self.known


def watch_of(active: Tensor) -> Watch:
    """Watch of the device's counter `active`: late on a GPU, where a look would wait."""
    return LateWatch(active) if active.is_cuda else Watch(active)


class Whole:
    """Batches of all samples, which f is called with."""

    def __init__(self) -> None:
        self.sample_evaluations = 0

    def evaluate(self, f: Callable[..., Any], packing: Packing, state: State) -> tuple[Any, Tensor]:
        """Call f; its value, and its rows (B, D)."""
        self.sample_evaluations += packing.batch
        value = evaluate(f, packing.unpack(state.z))
        return value, packing.pack_value(value, state.z)


class Compaction(Whole):
    """Batches of the running samples, or some more. Rows of others hold nothing, which no solver reads; where it
    `fills`, the value has their z.
    """

    def __init__(self, watch: Watch, fills: bool) -> None:
        super().__init__()
        self.watch, self.fills = watch, fills
        self.rows: Tensor | None = None

    def evaluate(self, f: Callable[..., Any], packing: Packing, state: State) -> tuple[Any, Tensor]:
        self._drop(packing, state)
        if self.rows is None:
            self.sample_evaluations += packing.batch
            value = evaluate(f, packing.unpack(state.z), None)
            return value, packing.pack_value(value, state.z)
        part = packing.resized(len(self.rows))
        self.sample_evaluations += part.batch
        z = state.z.index_select(0, self.rows)
        value = evaluate(f, part.unpack(z), self.rows)
        rows = torch.empty_like(state.z).index_copy_(0, self.rows, part.pack_value(value, z))
        if self.fills:
            value = part.fill(packing.unpack(state.z), value, self.rows)
        return value, rows

    def _drop(self, packing: Packing, state: State) -> None:
        """Take the rows anew where enough of them are done; finding them waits for the device."""
        size = packing.batch if self.rows is None else len(self.rows)
        if 0 < self.watch.known <= (1 - COMPACT_SHARE) * size:
            running = state.running.nonzero().flatten()
            self.rows = running if len(running) else self.rows


@dataclass
class Run:
    """Solve under way, whose iterations advance the state in place."""

    f: Callable[..., Any]
    packing: Packing
    solver: Solver
    state: State
    batches: Whole
    halt: Halt | None = None

    def advance(self, first: int, until: int) -> None:
        """Run the iterations first ... until - 1."""
        for k in range(first, until):
            value, rows = self.batches.evaluate(self.f, self.packing, self.state)
            if k == 0:
                self.state.stall_floor = self.packing.stall_floor(value)
            if self.halt is not None:
                self._end(self._asked(self.halt, value, k + 1), rows, k)
            self.solver.advance(self.state, rows, k, k + 1 == self.solver.max_iter)
            if self.state.trace is not None:
                self.state.trace[k].copy_(self.state.residual)

    def _asked(self, halt: Halt, value: Any, k: int) -> Tensor:
        """The mask of samples to end, by the rule, which may keep z, a copy of the solver's, but not write to f(z)."""
        before, status = versions(value), self.state.status
        ended = halt(self.packing.unpack(self.state.z.clone()), value, k)
        if versions(value) != before:
            raise ValueError("halt must not modify its argument value, got a rule that works in place on it")
        parts = (ended.shape, ended.dtype, ended.device) if isinstance(ended, Tensor) else ()
        if parts != (status.shape, torch.bool, status.device):
            got = f"{tuple(ended.shape)} {ended.dtype} on {ended.device}" if parts else repr(ended)
            wanted = f"({self.packing.batch},) torch.bool on {status.device}"
            raise ValueError(f"halt must return a mask {wanted}, got {got}")
        return ended

    def _end(self, ended: Tensor, rows: Tensor, k: int) -> None:
        """End the running samples of the mask, unless they have converged or are not finite, at the present iterate."""
        state, solver = self.state, self.solver
        now = evaluated(state.z, rows, solver.offset, solver.norm == "max", begun(state.progress, k))
        converged = now.converged(solver.tol, solver.stop == "abs", state.stall_floor, solver.offset)
        ended = ended & state.running & torch.isfinite(now.res_abs) & ~converged
        state.best.copy_(torch.where(ended[:, None], state.z, state.best))
        state.residual.copy_(torch.where(ended, torch.stack([now.res_rel, now.res_abs]), state.residual))
        state.iterations.masked_fill_(ended, k + 1)
        state.status.masked_fill_(ended, Status.HALTED)
        state.active -= ended.sum(dtype=torch.int32)


def solution_of(packing: Packing, solver: Solver, state: State, evaluations: int, sample_evaluations: int) -> Solution:
    """Solution of a solve that has come to `state` in so many calls of f."""
    measure = int(solver.stop == "abs")
    traces: list[Any] = [None, None] if state.trace is None else [state.trace[:evaluations, i] for i in range(2)]
    return Solution(
        value=packing.unpack(state.best),
        status=state.status,
        iterations=state.iterations,
        residual=state.residual[measure],
        residual_rel=state.residual[0],
        residual_abs=state.residual[1],
        evaluations=evaluations,
        sample_evaluations=sample_evaluations,
        trace=traces[measure],
        trace_rel=traces[0],
        trace_abs=traces[1],
    )
