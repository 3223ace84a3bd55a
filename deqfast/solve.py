"""The only iteration loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ops import choose_kernel
from .packing import Packing
from .solution import Solution
from .solvers import Solver, as_solver
from .solvers.base import STALL_UNITS, State, check_count

# On a GPU a look at the count of running samples waits for the device; an evaluation in vain costs less than that.
CHECK_EVERY_ON_GPU = 2


def solve(
    f: Callable[[Any], Any],
    z0: Any,
    solver: str | Solver = "broyden",
    kernel: str = "auto",
    check_every: int | None = None,
) -> Solution:
    """Solve z = f(z) for every sample of a batch, without gradient.

    f: takes and returns the structure of z0; called under the caller's autocast state. Its argument is the solver's own
        memory: it may neither be modified nor kept beyond the call.
    z0: a floating-point tensor (B, ...) or a pytree of them; dimension 0 is the batch.
    solver: a solver or the name of one; kernel: "auto", "triton", "cuda", "cpp" or "torch" (see ``deqfast.backends``).
    check_every: iterations between looks at whether all samples are done (None: 1 on the CPU, 2 on a GPU).

    The state is float32 (float64 if any of z0 is); squared norms must be representable, so that in float32 those of
    f(z) - z and f(z) have to lie between about 1e-18 and 1e18. A sample that is done is frozen; the answer for a sample
    does not depend on the others. Raises ValueError for a z0 that is not finite, naming its rows, and for an f that
    returns another shape; RuntimeError where a kernel asked for by name cannot serve.
    """
    if not callable(f):
        raise TypeError(f"f must be callable, got {f!r}")
    solver = as_solver(solver)
    if check_every is not None:
        check_count("check_every", check_every)
    packing = Packing(z0)
    chosen = choose_kernel(kernel, packing.device)
    check_every = check_every or (1 if packing.device.type == "cpu" else CHECK_EVERY_ON_GPU)
    with torch.no_grad():
        state = solver.init(finite_rows(packing, z0), chosen)
        evaluations = _iterate(f, packing, solver, state, check_every) if packing.batch else 0
        return Solution(
            value=packing.unpack(state.best),
            status=state.status,
            iterations=state.iterations,
            residual=state.residual[int(solver.stop == "abs")],
            residual_rel=state.residual[0],
            residual_abs=state.residual[1],
            evaluations=evaluations,
        )


def finite_rows(packing: Packing, z0: Any) -> Tensor:
    """The rows of z0; ValueError naming those that are not finite."""
    z = packing.pack(z0)
    finite = torch.isfinite(z).all(dim=1)
    if not bool(finite.all()):
        raise not_finite(finite)
    return z


def not_finite(finite: Tensor) -> ValueError:
    """The error for a z0 whose rows are finite as the mask (B,) says."""
    rows = (~finite).nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return ValueError(f"z0 must be finite; it is not in {len(rows)} of {len(finite)} rows: {shown}")


def _iterate(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State, check_every: int) -> int:
    """Run the solve; return the number of calls of f."""
    for k in range(solver.max_iter):
        value = f(packing.unpack(state.z))
        rows = packing.pack_value(value, state.z)
        if k == 0 and packing.runs_low_precision(value):
            state.stall_floor = STALL_UNITS * packing.low_precision_eps(value)
        last = k + 1 == solver.max_iter
        solver.advance(state, rows, k, last)
        if last or ((k + 1) % check_every == 0 and int(state.active) == 0):
            return k + 1
    raise AssertionError("max_iter is at least 1")
