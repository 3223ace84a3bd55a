"""Compiled solves: the cell, the solver's steps and the loop around them in one graph, which runs without Python.

The loop is torch's ``while_loop``, which ends when no sample runs any more. Its steps are the C++ kernels of the eager
loop, called as C functions. Inductor compiles the cell, with its own rounding: a compiled solve agrees with the eager
one to rounding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops import Kernel, choose_kernel
from ...solution import Solution
from ...solvers import Auto, MixedAnderson, Solver
from ...state.evaluation import evaluate
from ...state.packing import Packing
from ...torch_internals import pytree
from ...torch_internals.dynamo import Codes, is_failed_trace, reason
from ..refusals import Refusals, check_ops, check_served, kinds
from ..solve import Inverse, Options, Solve, inverse_of, not_finite, solution_of
from .code_loop import IS_NEW, KERNEL, Loop, code_options, loop_of, solve_in_code

_WHOLE_BATCHES = "its code is one loop for whole batches"
REFUSES: Refusals = {
    "drop_converged": _WHOLE_BATCHES,
    "trace": _WHOLE_BATCHES,
    "stop_fn": _WHOLE_BATCHES,
    "groups": _WHOLE_BATCHES,
    "scale": _WHOLE_BATCHES,
    "lockstep": "its loop asks no other process",
    MixedAnderson: "its loop calls no Python",
    "cuda_graph": "it serves CPUs",
    Auto: "its stages depend on values",
}


def check_solver(solver: Solver, owner: str = "") -> None:
    """Raise ValueError if compiled code cannot run the steps of this solver; `owner` says whose it is."""
    check_served("compile", REFUSES, kinds(solver), owner)
    check_ops("compile=True", solver, owner)


class Compiled:
    """Compiled solves: one for each solver and shape of a sample, for any batch; `refusal` begins its error."""

    def __init__(self, refusal: str = "the solve cannot be compiled") -> None:
        self._refusal = refusal
        self._codes = Codes(solve_in_code, _options)
        self._loops: dict[Any, Loop] = {}

    def solve(self, cell: Any, x: Any, z0: Any, options: Options) -> Solution:
        """Solve as ``deqfast.solve`` for f = cell(., x).

        Raises:
            ValueError: `solver` is not deqfast's own; as ``deqfast.solve``.
            RuntimeError: z0 has no kernel "cpp", z0 has less precision than float32 before torch 2.14, or torch.compile
                cannot compile the cell, with the reason.
        """
        packing, solver = Packing(z0), options.solver
        key = packing.signature(), packing.products_eps, solver, options.kernel, options.keeps_inverse
        with torch.inference_mode(False), torch.no_grad():
            z = packing.pack(z0)
            if key not in self._loops:
                _check(packing, options)
                self._loops[key] = loop_of(packing, options, z, Kernel(KERNEL))
            loop = self._loops[key]
            if not packing.batch:
                return Solve(z0, options)(cell, z0)
            history = loop.new_history(packing.batch)
            # Without a graph: otherwise code would be compiled for each choice of tensors that require a gradient.
            x = x.detach() if isinstance(x, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, x)
            value, status, iterations, relative, absolute, evaluations, *values = self._run(
                key, cell, x, packing, loop, z, history
            )
            calls = int(evaluations)
            if not calls:
                raise not_finite(torch.isfinite(z).all(dim=1))
            inverse = None
            if options.keeps_inverse:
                estimate = inverse_of(packing, solver, loop.state(z, values[0], history, iterations))
                inverse = partial(_estimated, estimate, history)
            ended = status, iterations, (relative, absolute), calls
            return solution_of(packing, solver, packing.unpack(value), *ended, inverse=inverse)

    def _run(self, key: Any, cell: Any, x: Any, packing: Packing, loop: Loop, z: Tensor, history: Tensor) -> Any:
        try:
            return self._codes.call(key, cell, x, loop, z, history)
        except Exception as error:
            # An error of the cell itself says more.
            packing.check_value(evaluate(cell, packing.unpack(z), x))
            said = self._refusal if is_failed_trace(error) else "an evaluation failed"
            raise RuntimeError(f"compile=True: {said}: {reason(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        """State without the compiled code, which lives in one process."""
        return {**self.__dict__, "_loops": {}}


def _estimated(estimate: Inverse, history: Tensor, v: Any) -> Any:
    """The estimate for v, which reads views of the history: their memory is used again once this tensor is gone."""
    return estimate(v)


def _check(packing: Packing, options: Options) -> None:
    """Raise the errors of ``Compiled.solve`` if the solve cannot be compiled."""
    kernel = options.kernel
    check_solver(options.solver)
    if packing.is_narrow and not IS_NEW:
        dtypes = ", ".join(str(leaf.dtype) for leaf in packing.leaves)
        raise RuntimeError(
            f"compile=True: torch {torch.__version__} does not round rows of {packing.dtype} to a state of {dtypes}: "
            f"take a z0 of {packing.dtype}, or torch 2.14"
        )
    chosen = choose_kernel(kernel, packing.device)
    if chosen.name != KERNEL:
        raise RuntimeError(
            f"compile=True runs on kernel {KERNEL!r}, for tensors on the CPU; here kernel={kernel!r} is {chosen.name!r}"
        )


def _options() -> dict[str, Any]:
    # Freezing treats the weights of code without gradients as constants.
    return {**code_options(), "cpp_wrapper": True, "freezing": False}
