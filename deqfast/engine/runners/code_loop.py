"""Whole solves as one torch ``while_loop`` over the C++ steps, for compiled code and exports.

The steps are called as C functions, see ``ops.steps.loops``. The loop ends when no sample is running any more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ...ops import Kernel
from ...ops.steps import PROGRESS
from ...ops.steps.loops import PARTS, c_functions
from ...solvers import Solver
from ...solvers.base import State
from ...solvers.multisecant import MultisecantState
from ...state.packing import Packing
from ..solve import Options, init_of

KERNEL = "cpp"  # the kernel whose steps are C functions
IS_NEW = TorchVersion(torch.__version__) >= "2.14"


def code_options() -> dict[str, Any]:
    """Options of inductor for code that holds a solve."""
    return {
        "allow_buffer_reuse": IS_NEW,  # else inductor fails if a loop's body could reuse memory
        "emulate_precision_casts": True,  # else f is given a bfloat16 state that has not been rounded
        "aot_inductor.custom_ops_to_c_shims": c_functions(),
    }


@dataclass(frozen=True, eq=False)
class Loop:
    """The step of a loop, and the sizes of its tensors, see ``ops.steps.loops``."""

    packing: Packing
    solver: Solver
    start: State  # of a solve without samples; its tensors have the right shapes per sample
    step: Callable[..., Tensor]
    numbers: tuple[float, ...]
    dim: int
    values: int  # elements of `values` for one sample
    integers: int  # likewise of `counts`
    history: tuple[int, ...]  # number of the tensors in `history`, and the shape of each for one sample
    history_dtype: torch.dtype
    keep_inverse: bool

    def new_history(self, batch: int) -> Tensor:
        """The tensor `history` of a solve of `batch` samples."""
        shape = self.history[0], batch, *self.history[1:]
        return self.start.kernel.history(shape, self.history_dtype, self.start.z.device)

    def state(self, z: Tensor, values: Tensor, history: Tensor, iterations: Tensor) -> State:
        """State at the end of a solve that keeps its inverse, for rows z (B, D)."""
        assert isinstance(self.start, MultisecantState)
        shape = self.start.gram.shape[1:]
        gram = values[-len(z) * math.prod(shape) :].view(len(z), *shape)
        return replace(self.start, left=history[0], df=history[1], gram=gram, iterations=iterations)


def loop_of(packing: Packing, options: Options, z: Tensor, kernel: Kernel) -> Loop:
    """Loop for batches of any size with samples like the rows z (B, D), if the solver ``has_ops``."""
    solver, start = options.solver, init_of(options)(z[:0], kernel)
    name, _, numbers = solver.operation(start)
    parts, dim = PARTS[name], z.shape[1]
    histories = [getattr(start, part) for part in parts.history] or [z.new_empty(0)]
    return Loop(
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
        keep_inverse=options.keeps_inverse,
    )


def solve_in_code(
    cell: Callable[[Any, Any], Any], x: Any, loop: Loop, z0: Tensor, history: Tensor, solve: int = 0
) -> tuple[Tensor, ...]:
    """Run all iterations from the rows z0; for `solve` and the order of the steps see ``ops.steps.loops``."""
    batch = z0.shape[0]
    elements, integers = loop.values * batch, 2 + loop.integers * batch
    values, counts, status, running = torch.ops.deqfast.loop_begin(z0, elements, integers, solve)

    def body(running: Tensor) -> tuple[Tensor]:
        batch = status.shape[0]  # a loop takes no size from outside
        packing = loop.packing.resized(batch)
        # A copy, since a cell that works in place would write to the memory of the steps. Otherwise it costs nothing.
        iterate = values[: batch * loop.dim].view(batch, loop.dim)
        packing.round_(iterate)
        z = iterate.clone()
        value = cell(packing.unpack(z), x)
        rule = loop.solver.rule(packing.stall_floor(value))
        numbers = [float(number) for number in (*rule, *loop.numbers)]
        fz = packing.rows_of_value(value).clone()
        return (loop.step(values, counts, status, history, fz, loop.solver.max_iter, numbers),)

    (running,) = torch.while_loop(torch.clone, body, (running,))
    results = torch.ops.deqfast.loop_end(values, counts, status, running, batch, loop.dim)
    return (*results, values) if loop.keep_inverse else results
