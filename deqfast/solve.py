"""Solve fixed-point problems: the only iteration loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .execution.loop import (
    Compaction,
    Keep,
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
    drop_converged: bool = False,
    trace: bool = False,
) -> Solution:
    """Solve z = f(z) for every sample of a batch, without gradient.

    The state is float32, or float64 if any tensor of z0 is. A sample that is done is frozen, and its result does not
    depend on the others. Residuals are right at any scale that the dtype can represent. Anderson and Broyden leave out
    secant pairs whose squares overflow or underflow (in float32, lengths outside 3e-16 to 2e19). If no pair remains,
    the step is the plain fixed-point step.

    Args:
        f: takes and returns the structure of z0; called under the caller's autocast state. Its argument is the solver's
            own memory: f must neither modify it nor keep it after the call.
        z0: a floating-point or complex tensor (B, ...) or a pytree of them; dimension 0 is the batch. A complex number
            counts as two real ones.
        solver: a solver or the name of one, "broyden", "anderson" or "picard".
        kernel: "auto", "triton", "cuda", "cpp" or "torch", see ``backends``.
        groups: for an f that couples rows of z, such as the nodes of a graph. (N,) integers from 0, the sample of each
            of the N rows of z0, in any order; or "batch", for one sample of all rows. Residual, history and freezing
            are then per sample, and B in the Solution is the number of samples. Samples are padded with zeros to the
            longest. Reuse ``Groups`` for many solves. None: each row is a sample, and f must not couple rows.
        scale: the typical size of each tensor's numbers, in a tree like z0 (a tuple for a tuple), from 2^-60 to 2^60.
            Each tensor is divided by its size for residuals and steps: the larger the size, the less the tensor counts.
            Sizes are rounded to powers of two, so that the division is exact. None: no division.
        stop_fn: a second rule that ends samples. stop_fn(z, value, k) is given the iterate z, f(z) and the number
            k = 1, 2, ... of the evaluation. It returns a mask (B,) of the samples to end as they are, STOPPED. It gets
            all samples; those that `drop_converged` leaves out have z as their value. Only samples that run and have
            not converged can be ended. Nothing waits for the device. It may keep z, and must not write to f(z).
        drop_converged: leave samples that are done out of f's batch, if f treats samples independently. f is then
            called as f(z, rows): rows (b,) int64 are the samples in z; None: all of them.
        trace: record the residuals of the best iterate after every evaluation.

    Returns:
        Solution, whose `value` has the structure, dtypes and memory order of z0.

    Raises:
        TypeError, ValueError: an argument is not as above. Or z0 is not finite; the text names its rows. Or f returns
            another shape or works in place on its argument. Or stop_fn returns another mask or writes to f(z).
        RuntimeError: a kernel chosen by name cannot run; z0 belongs to torch.func or forward-mode AD.

    Examples:
        >>> solution = deqfast.solve(torch.cos, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5))
        >>> solution
        Solution(2 CONVERGED, evaluations=6)
        >>> round(float(solution.value[0, 0]), 3)
        0.739
    """
    options: dict[str, Any] = {"groups": groups, "scale": scale, "stop_fn": stop_fn}
    return solve_keeping(None, f, z0, as_solver(solver), kernel, drop_converged=drop_converged, trace=trace, **options)


def solve_keeping(
    keep_inverse: Keep | None,
    f: Callable[..., Any],
    z0: Any,
    solver: Solver,
    kernel: str,
    *,
    groups: Groups | Tensor | str | None,
    scale: Any,
    stop_fn: StopFn | None,
    drop_converged: bool,
    trace: bool,
) -> Solution:
    """As ``solve``; `keep_inverse` is called with the estimate of the inverse Jacobian at the end."""
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}")
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
        run = Run(solver.wrap(f, begun.packing, begun.state), begun.packing, solver, begun.state, batches, stop_fn)
        if is_exporting():
            evaluations = export(run, keep_inverse is not None)
        else:
            iterations = solver.max_iter if begun.packing.batch else 0
            evaluations = iterate(run.advance, iterations, watch, solver.patience, run.resume)
        return begun.finish(evaluations, batches.sample_evaluations)
