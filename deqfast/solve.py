"""Solve fixed-point problems: the only iteration loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._checks import check_count
from .execution.loop import (
    Compaction,
    Run,
    StopFn,
    Whole,
    begin,
    export,
    iterate,
    watch_of,
)
from .execution.refusals import check_served, kinds
from .solution import Solution
from .solvers import Solver, as_solver
from .state.groups import Groups
from .torch_internals.dynamo import is_exporting, outside_exports
from .torch_internals.transforms import check_plain


def solve(
    f: Callable[..., Any],
    z0: Any,
    solver: str | Solver = "broyden",
    kernel: str = "auto",
    *,
    groups: Groups | Tensor | str | None = None,
    scale: Any = None,
    stop_fn: StopFn | None = None,
    sync_every: int | None = None,
    drop_converged: bool = False,
    trace: bool = False,
    keep_inverse: bool = False,
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
        groups: for an f that couples rows of z, as a graph does its nodes: (N,) integers, the sample that each of the N
            rows of z0 belongs to, from 0, in any order; or "batch", for one sample of all rows. Residual, history and
            freezing are then those of such samples, whose number is the Solution's B. Samples are lengthened to the
            longest with zeros, in memory and in time. ``Groups`` are made once for many solves. None: each row is a
            sample, and f must not couple rows.
        scale: the typical size of each tensor's numbers, in a tree like z0 (a tuple for a tuple), from 2^-60 to 2^60.
            Residuals and steps are those of the divided tensors: the larger its number, the less a tensor counts. Each
            acts as the power of two nearest to it, which rounds nothing. None: the numbers are of one size.
        stop_fn: rule of the caller's own next to the solver's. stop_fn(z, value, k) is given the iterate z, f(z) and
            the number k = 1, 2, ... of the evaluation. It returns a mask (B,) of the samples to end as they are,
            STOPPED. It is asked about all samples, with z as the value of those that `drop_converged` leaves out, and
            counts for those that run and have not converged. Nothing waits for the device. It may keep z, and must not
            write to f(z).
        sync_every: iterations between looks at whether all samples are done (None: 1 on the CPU, 2 on a GPU). On a GPU
            the count comes one look late, so that the host never waits for the step it has just queued.
        drop_converged: leave samples that are done out of f's batch, for an f that treats every sample by itself. f is
            then called as f(z, rows): rows (b,) int64 are the samples that z holds; None: all of them.
        trace: record the residuals of the best iterate after every evaluation.
        keep_inverse: keep the history of Anderson or Broyden, and with it ``Solution.transposed_inverse``.

    Returns:
        Solution, whose `value` has the structure, dtypes and memory order of z0.

    Raises:
        TypeError, ValueError: an argument is not as above; z0 is not finite, naming its rows; f returns another shape
            or works in place on its argument; stop_fn returns no such mask or writes to f(z).
        RuntimeError: a kernel asked for by name cannot serve; z0 belongs to torch.func or forward-mode AD.

    Examples:
        >>> solution = deqfast.solve(torch.cos, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5))
        >>> solution
        Solution(2 CONVERGED, evaluations=6)
        >>> round(float(solution.value[0, 0]), 3)
        0.739
    """
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}")
    solver = as_solver(solver)
    if sync_every is not None:
        check_count("sync_every", sync_every)
    if stop_fn is not None and not callable(stop_fn):
        raise TypeError(f"stop_fn must be callable, got {stop_fn!r}")
    if groups is not None:
        check_served("drop_converged", ["groups"] * drop_converged)
    if is_exporting():
        check_served("torch.export", kinds(solver))
    check_plain("solve", z0)
    begun = begin(z0, solver, kernel, groups=groups, scale=scale, keep_inverse=keep_inverse, trace=trace)
    with outside_exports(torch.no_grad()):
        watch = watch_of(begun.state.active)
        batches = Compaction(watch, stop_fn is not None) if drop_converged else Whole()
        run = Run(f, begun.packing, solver, begun.state, batches, stop_fn)
        if is_exporting():
            evaluations = export(run, keep_inverse)
        else:
            iterations = solver.max_iter if begun.packing.batch else 0
            evaluations = iterate(run.advance, iterations, watch, sync_every, solver.patience, run.resume)
        return begun.finish(evaluations, batches.sample_evaluations)
