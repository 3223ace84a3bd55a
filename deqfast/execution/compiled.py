"""Compiled solves: cell, solver steps and the loop around them in one graph, which runs without Python.

The loop is torch's ``while_loop``, left when no sample is running any more. Its steps are the C++ kernels of the
ordinary loop, called as C functions. What the cell computes is inductor's, whose rounding is its own: a compiled solve
agrees with the ordinary one to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..ops import Kernel, choose_kernel, empty_history
from ..ops.steps import PROGRESS
from ..ops.steps.loops import PARTS, c_functions
from ..solution import Solution
from ..solvers import Anderson, Broyden, Picard, Solver
from ..solvers.base import State
from ..solvers.multisecant import MultisecantState
from ..state.packing import Packing, evaluate
from ..torch_internals import pytree
from ..torch_internals.dynamo import Codes, is_failed_trace, reason
from ..torch_internals.transforms import check_plain
from .loop import Begun, check_inverse, inverse_of, not_finite

KERNEL = "cpp"  # the kernel whose steps are C functions
IS_NEW = TorchVersion(torch.__version__) >= "2.14"
OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "allow_buffer_reuse": IS_NEW,  # else inductor fails where a loop's body could use memory again
    "emulate_precision_casts": True,  # else f is given a bfloat16 state that nobody has rounded
    "freezing": False,  # it takes the weights of a code without gradients for constants
}


class Compiled:
    """Compiled solves: one for each solver and shape of a sample, which serves any batch.

    Args:
        refusal: begins the error of a solve that cannot be compiled.
    """

    def __init__(self, refusal: str = "the solve cannot be compiled") -> None:
        self._refusal = refusal
        self._codes = Codes(_solve, _options)
        self._loops: dict[Any, _Loop] = {}

    def solve(self, cell: Any, x: Any, z0: Any, solver: Solver, kernel: str, keep_inverse: bool = False) -> Solution:
        """Solve as ``deqfast.solve`` for f = cell(., x).

        Raises:
            ValueError: another solver than deqfast's own; as ``deqfast.solve``.
            RuntimeError: no kernel "cpp" for z0, a z0 of less than float32 before torch 2.14, or a cell that
                torch.compile cannot take, with the reason.
        """
        check_plain("solve", z0)
        packing = Packing(z0)
        key = packing.signature_of_sample(), packing.products_eps, solver, kernel, keep_inverse
        with torch.inference_mode(False), torch.no_grad():
            z = packing.pack(z0)
            if key not in self._loops:
                self._loops[key] = _loop_of(solver, kernel, packing, z, keep_inverse)
            loop = self._loops[key]
            if not packing.batch:
                return Begun(packing, solver, loop.start, keep_inverse).finish(0, 0)
            history = loop.new_history(packing.batch)
            # Without graph, or what requires a gradient and what does not would be compiled apart.
            x = x.detach() if isinstance(x, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, x)
            value, status, iterations, relative, absolute, evaluations, *values = self._run(
                key, cell, x, packing, loop, z, history
            )
            calls = int(evaluations)
            if not calls:
                raise not_finite(torch.isfinite(z).all(dim=1))
            solution = Solution(
                value=packing.unpack(value),
                status=status,
                iterations=iterations,
                residual=absolute if solver.is_absolute else relative,
                residual_rel=relative,
                residual_abs=absolute,
                evaluations=calls,
                sample_evaluations=calls * packing.batch,
            )
            if not keep_inverse:
                return solution
            inverse = inverse_of(packing, solver, loop.state(z, values[0], history, iterations))

            def transposed_inverse(v: Any, history: Tensor = history) -> Any:  # whose memory goes out again without it
                return inverse(v)

            return replace(solution, transposed_inverse=transposed_inverse)

    def _run(self, key: Any, cell: Any, x: Any, packing: Packing, loop: _Loop, z: Tensor, history: Tensor) -> Any:
        try:
            return self._codes.call(key, cell, x, loop, z, history)
        except Exception as error:
            # An error of the cell's own says more.
            packing.check_value(evaluate(cell, packing.unpack(z), x))
            said = self._refusal if is_failed_trace(error) else "an evaluation failed"
            raise RuntimeError(f"compile=True: {said}: {reason(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        """State without what was compiled, which lives in one process."""
        return {**self.__dict__, "_loops": {}}


@dataclass(frozen=True, eq=False)
class _Loop:
    """What a compiled loop is made for: its step, and what it asks of the tensors of ``ops.steps.loops``.

    Attributes:
        start: the state of a solve of no sample, which has the shapes of one.
        values, integers: elements of `values` and of `counts` for one sample.
        history: number of the tensors in `history`, and the shape of one for one sample.
    """

    packing: Packing
    solver: Solver
    start: State
    step: Callable[..., Tensor]
    numbers: tuple[float, ...]
    dim: int
    values: int
    integers: int
    history: tuple[int, ...]
    history_dtype: torch.dtype
    keep_inverse: bool

    def new_history(self, batch: int) -> Tensor:
        """The tensor `history` of a solve of so many samples."""
        return empty_history((self.history[0], batch, *self.history[1:]), self.history_dtype, self.start.z.device)

    def state(self, z: Tensor, values: Tensor, history: Tensor, iterations: Tensor) -> State:
        """The state of a solve with an inverse that has ended, of rows z (B, D)."""
        assert isinstance(self.start, MultisecantState)
        of_sample = self.start.gram.shape[1:]
        gram = values[-len(z) * math.prod(of_sample) :].view(len(z), *of_sample)
        return replace(self.start, left=history[0], df=history[1], gram=gram, iterations=iterations)


def _loop_of(solver: Solver, kernel: str, packing: Packing, z: Tensor, keep_inverse: bool) -> _Loop:
    if type(solver) not in (Picard, Anderson, Broyden):
        raise ValueError(f"compile=True serves Picard, Anderson and Broyden, got {solver}")
    check_inverse(solver, keep_inverse)
    _check_rounding(packing)
    start = solver.init(z[:0], _kernel(kernel, packing), keep_inverse)
    name, _, numbers = solver.operation(start)
    parts, dim = PARTS[name], z.shape[1]
    histories = [getattr(start, part) for part in parts.history] or [z.new_empty(0)]
    return _Loop(
        packing=packing.resized(0),
        solver=solver,
        start=start,
        step=getattr(torch.ops.deqfast, name.replace("step", "loop")).default,
        numbers=numbers,
        dim=dim,
        values=2 * dim + 2 + len(PROGRESS) + sum(math.prod(getattr(start, part).shape[1:]) for part in parts.values),
        integers=1 + len(parts.counts),
        history=(len(parts.history), *histories[0].shape[1:]),
        history_dtype=histories[0].dtype,
        keep_inverse=keep_inverse,
    )


def _solve(cell: Callable[[Any, Any], Any], x: Any, loop: _Loop, z0: Tensor, history: Tensor) -> tuple[Tensor, ...]:
    """All iterations from the rows z0; see ``ops.steps.loops``."""
    batch = z0.shape[0]
    values, counts, status, running = torch.ops.deqfast.loop_begin(z0, loop.values * batch, 2 + loop.integers * batch)

    def body(running: Tensor) -> tuple[Tensor]:
        batch = status.shape[0]  # a loop takes no size from outside
        of_batch = loop.packing.resized(batch)
        # A copy, which costs nothing unless the cell works in place on it. It would work in the memory of the steps.
        z = values[: batch * loop.dim].view(batch, loop.dim).clone()
        value = cell(of_batch.unpack(z), x)
        rule = loop.solver.rule(of_batch.stall_floor(value))
        numbers = [float(number) for number in (*rule, *loop.numbers)]
        fz = of_batch.pack_value(value, z)
        return (loop.step(values, counts, status, history, fz, loop.solver.max_iter, numbers),)

    (running,) = torch.while_loop(torch.clone, body, (running,))
    results = torch.ops.deqfast.loop_end(values, counts, status, running, batch, loop.dim)
    return (*results, values) if loop.keep_inverse else results


def _check_rounding(packing: Packing) -> None:
    short = [leaf.dtype for leaf in packing.leaves if leaf.dtype in (torch.bfloat16, torch.float16)]
    if short and not IS_NEW:
        raise RuntimeError(
            f"compile=True: torch {torch.__version__} gives the cell a {short[0]} state that is not rounded, "
            "which 2.14 does not: take a float32 z0"
        )


def _options() -> dict[str, Any]:
    return {**OPTIONS, "aot_inductor.custom_ops_to_c_shims": c_functions()}


def _kernel(kernel: str, packing: Packing) -> Kernel:
    chosen = choose_kernel(kernel, packing.device)
    if chosen.name != KERNEL:
        raise RuntimeError(
            f"compile=True runs on kernel {KERNEL!r}, for tensors on the CPU; here kernel={kernel!r} is {chosen.name!r}"
        )
    return chosen
