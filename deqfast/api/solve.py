"""Fixed points without gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._checks import check_callable, check_flag
from ..engine.loop import StopFn
from ..engine.refusals import check_served, kinds
from ..engine.solve import Options, Solve
from ..solution import Solution
from ..solvers import Solver, as_solver
from ..state.groups import Grouping
from ..torch_internals.ranks import as_ranks
from ..torch_internals.transforms import check_plain, check_values, present_context
from ..transforms.export import solve_in_export
from .refusals import REFUSED, check_together


def solve(
    f: Callable[..., Any],
    z0: Any,
    solver: str | Solver = "broyden",
    kernel: str = "auto",
    *,
    groups: Grouping = None,
    scale: Any = None,
    stop_fn: StopFn | None = None,
    drop_converged: bool = False,
    trace: bool = False,
    lockstep: Any = None,
    state_group: Any = None,
    causal: bool = False,
) -> Solution:
    """Solve z = f(z) for every sample of a batch, without gradient.

    The state is float32, or float64 if any tensor of z0 is. A sample that is done is frozen, and its result does not
    depend on the others. Residuals are right at any scale that the dtype can represent. Anderson and Broyden leave out
    secant pairs whose squares overflow or underflow (in float32, lengths outside 3e-16 to 2e19), if need be all.

    Args:
        f: takes and returns the structure of z0; called under the caller's autocast state. Its argument is the solver's
            own memory: f must neither modify it nor keep it after the call.
        z0: floating-point or complex tensors (B, ...), a tensor or a pytree. A complex number counts as two real ones.
        solver: a solver or the name of one, "broyden", "anderson", "picard" or "auto".
        kernel: "auto", "triton", "cuda", "cpp" or "torch", see ``backends``.
        groups: for an f that couples rows of z, such as the nodes of a graph. (N,) integers from 0, the sample of each
            of the N rows of z0, in any order; or "batch", for one sample of all rows. Residual, history and freezing
            are then per sample, and B in the Solution is the number of samples. Reuse ``Groups`` for many solves. None:
            each row is a sample, and f must not couple rows.
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
        lockstep: a process group whose processes end the solve together, see the page More than one process.
        state_group: a process group whose processes have parts of each sample, as for ``DEQBlock``.
        causal: dimension 1 of each tensor of z0 is a sequence, and f is causal: its value at a position depends on this
            and earlier positions only. Then the result at a position does so too, bit for bit. Weights and residuals of
            a position are those of the sequence up to it, and it ends when all earlier ones have. The last position
            speaks for the sample. An attribute `from_position` of f is called as f.from_position(z, first, value), see
            ``CellHooks``. For Picard, Anderson and Broyden.

    Returns:
        Solution, whose `value` has the structure, dtypes and memory order of z0.

    Raises:
        TypeError, ValueError: an argument is not as above. Or z0 is not finite; the text names the samples. Or f
            returns another shape or works in place on its argument. Or stop_fn returns another mask or writes to f(z).
        RuntimeError: a kernel chosen by name cannot run; z0 belongs to torch.func or forward-mode AD.

    Examples:
        >>> solution = deqfast.solve(torch.cos, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5))
        >>> solution
        Solution(2 CONVERGED, evaluations=6)
        >>> round(float(solution.value[0, 0]), 3)
        0.739
    """
    check_callable("f", f)
    solver = as_solver(solver)
    if stop_fn is not None:
        check_callable("stop_fn", stop_fn)
    flags = dict(drop_converged=drop_converged, trace=trace, causal=causal)
    given: dict[str, Any] = {name: check_flag(name, value) for name, value in flags.items()}
    given |= dict(lockstep=as_ranks("lockstep", lockstep), state_group=as_ranks("state_group", state_group))
    options = Options(solver=solver, kernel=kernel, groups=groups, scale=scale, stop_fn=stop_fn, **given)
    check_together([*options.given(), *kinds(solver)])
    context = present_context()
    if context == "torch.export":
        check_served(context, REFUSED[context], [*options.given(), *["trace of a Solution"] * options.trace])
        return solve_in_export(f, z0, options)
    if context == "torch.func":
        check_plain("solve", z0)
    check_values("z0", z0)
    return Solve(z0, options)(f, z0)
