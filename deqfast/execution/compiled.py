"""Compiled solves: cell, solver steps and the loop around them in one graph, which runs without Python.

The loop is torch's ``while_loop``, left when no sample is running any more; the steps are the ops ``*_chained``, which
do what those of the ordinary loop do, bit by bit. What the cell computes is inductor's, whose rounding is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from ..ops import choose_kernel
from ..solution import Solution
from ..solvers import Anderson, Broyden, Picard, Solver
from ..solvers.base import State
from ..solvers.multisecant import MultisecantState
from ..state.packing import Packing, evaluate
from ..torch_internals.dynamo import Codes, is_tracing, reason
from ..torch_internals.transforms import check_plain
from .loop import check_inverse, finite_rows, inverse_of, solution_of

KERNEL = "cpp"  # what has the chained steps
# Before 2.14 inductor fails where a loop's body could use memory again.
OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "allow_buffer_reuse": TorchVersion(torch.__version__) >= "2.14",
    "freezing": False,  # it takes the weights of a code without gradients for constants
}


class Compiled:
    """Compiled solves: one for each solver and shape of a sample, which serves any batch.

    Args:
        refusal: begins the error of a solve that cannot be compiled.
    """

    def __init__(self, refusal: str = "the solve cannot be compiled") -> None:
        self._refusal = refusal
        self._codes = Codes(_iterate, options=OPTIONS)

    def solve(self, cell: Any, x: Any, z0: Any, solver: Solver, kernel: str, keep_inverse: bool = False) -> Solution:
        """Solve as ``deqfast.solve`` for f = cell(., x).

        Raises:
            ValueError: another solver than deqfast's own; as ``deqfast.solve``.
            RuntimeError: no kernel "cpp" for z0, or a cell that torch.compile cannot take, with the reason.
        """
        if type(solver) not in (Picard, Anderson, Broyden):
            raise ValueError(f"compile=True serves Picard, Anderson and Broyden, got {solver}")
        check_inverse(solver, keep_inverse)
        check_plain("solve", z0)
        packing = Packing(z0)
        with torch.inference_mode(False), torch.no_grad():
            state = solver.init(finite_rows(packing, z0), _kernel(kernel, packing), keep_inverse)
            count = torch.zeros(1, dtype=torch.int64, device=packing.device)
            if packing.batch:
                # Without graph, or what requires a gradient and what does not would be compiled apart.
                x = pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, x)
                self._run(_Solve(cell, x, packing, solver, state, count))
            evaluations = int(count)
            solution = solution_of(packing, solver, state, evaluations, evaluations * packing.batch)
            if keep_inverse:
                solution = replace(solution, transposed_inverse=inverse_of(packing, solver, state))
            return solution

    def _run(self, solve: _Solve) -> None:
        key = solve.packing.resized(0).signature(), solve.solver
        try:
            self._codes.call(key, *solve.arguments())
        except Exception as error:
            if evaluations := int(solve.count):
                raise RuntimeError(f"compile=True: evaluation {evaluations + 1} failed: {reason(error)}") from error
            # An error of the cell's own says more.
            solve.packing.check_value(evaluate(solve.cell, solve.packing.unpack(solve.state.z), solve.x))
            raise RuntimeError(f"compile=True: {self._refusal}: {reason(error)}") from error
        if not int(solve.count):
            raise RuntimeError(f"compile=True: torch {torch.__version__} ran a copy of the solve; use compile=False")


@dataclass
class _Solve:
    """Solve to be run by compiled code."""

    cell: Callable[[Any, Any], Any]
    x: Any
    packing: Packing
    solver: Solver
    state: State
    count: Tensor  # evaluations so far, (1,) int64

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``_iterate``; what compiled code reads of an object it checks at every call."""
        state = self.state
        name, tensors, numbers = self.solver.operation(state)
        step = getattr(torch.ops.deqfast, f"{name}_chained").default
        kept = isinstance(state, MultisecantState)
        before = (torch.empty_like(state.z),) if kept else ()
        shared = torch.ops.deqfast.chain_state([*state.monitor(), *(tensors[1:] if kept else tensors), self.count])
        packing, done = self.packing.resized(0), torch.zeros((), dtype=torch.bool, device=self.packing.device)
        return self.cell, self.x, packing, self.solver, step, numbers, done, state.z, before, shared


def _iterate(
    cell: Callable[[Any, Any], Any],
    x: Any,
    packing: Packing,
    solver: Solver,
    step: Callable[..., tuple[Tensor, Tensor]],
    numbers: tuple[float, ...],
    done: Tensor,
    z: Tensor,
    before: tuple[Tensor, ...],
    shared: Tensor,
) -> Tensor:
    """All iterations from z; `before` is f at the iterate before, where the step needs it, `shared` its other state."""

    def body(done: Tensor, z: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        of_batch = packing.resized(z.shape[0])
        value = cell(of_batch.unpack(z), x)
        fz = of_batch.pack_value(value, z)
        floor = of_batch.stall_floor(value)
        rule = solver.max_iter, *solver.rule(floor)
        if before and not is_tracing():  # run as written, where the cell may return one buffer again and again
            fz = fz.clone()
        following, done = step(z, fz, *before, shared, *rule, *numbers)
        return done, following, *((fz,) if before else ())

    return torch.while_loop(lambda done, z, *before: ~done, body, (done, z, *before))[1]


def _kernel(kernel: str, packing: Packing) -> Any:
    chosen = choose_kernel(kernel, packing.device)
    if chosen.name != KERNEL:
        raise RuntimeError(
            f"compile=True runs on kernel {KERNEL!r}, for tensors on the CPU; here kernel={kernel!r} is {chosen.name!r}"
        )
    return chosen
