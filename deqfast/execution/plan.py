"""Plan of a forward pass: what is solved, how it is executed, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..solution import Solution
from ..solvers import Solver
from ..state.groups import Groups
from ..state.rows import per_row, without_broken
from ..torch_internals import pytree
from ..torch_internals.dynamo import is_exporting
from ..torch_internals.transforms import in_forward_mode, in_torch_func
from .compiled import Compiled
from .cuda_graph import Graphs
from .linearised import Linearised
from .loop import Keep, StopFn

Context = Literal["eager", "torch.func", "torch.export"]


def present_context() -> Context:
    """Return where this call runs; "torch.func" stands for forward-mode AD too.

    ``torch.compile`` does not count: it runs a block as one op, and that op runs eagerly.
    """
    if is_exporting():
        return "torch.export"
    return "torch.func" if in_torch_func() or in_forward_mode() else "eager"


def reciprocal(scale: Any) -> Any:
    """Tree of the reciprocals, None for None. A gradient has the inverse scale of its tensor."""
    return None if scale is None else pytree.tree_map(lambda number: 1 / number, scale)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forward pass of a block: solve z = cell(z, x) from z0.

    Attributes:
        cell: the map (z, x) -> z.
        x: the injection, a tensor or a pytree.
        z0: start of the iteration.
        solver: the solver of the forward solve.
        groups: samples of several rows, if any; of the backward solve too.
        scale: sizes of the tensors of the state, if given.
        per_sample: which tensors of x have a row per row of z, see ``DEQBlock``.
        kernel: name of the kernels of all solves, forward and backward.
        drop_converged: give the cell only the rows of running samples.
        graphs: if given, these capture the forward solve and replay it.
        compiled: if given, its code runs the forward solve.
        linearised: if given, its code runs the backward solve of ``Implicit``.
        context: where the forward pass runs.
        trace: record the residual after every evaluation.
        stop_fn: a second rule that ends samples.
        keep_inverse: called with the estimate of the inverse Jacobian by the solver's history, for ``SHINE``.
        on_backward: called with the Solution of a backward solve.
        advances: the returned value is not z* but the result of the gradient's own calls of the cell.
    """

    # What is solved.
    cell: Callable[[Any, Any], Any]
    x: Any
    z0: Any
    solver: Solver
    groups: Groups | None = None
    scale: Any = None
    per_sample: Any = None
    # How it is executed.
    kernel: str = "auto"
    drop_converged: bool = False
    graphs: Graphs | None = None
    compiled: Compiled | None = None
    linearised: Linearised | None = None
    context: Context = field(default_factory=present_context)
    # What is recorded, and what is called back.
    trace: bool = False
    stop_fn: StopFn | None = None
    keep_inverse: Keep | None = None
    on_backward: Callable[[Solution], None]
    advances: bool = False

    @property
    def is_differentiated(self) -> bool:
        """Whether the value gets a gradient from torch.autograd."""
        return self.context != "torch.export" and torch.is_grad_enabled()

    @property
    def holds_weights(self) -> bool:
        """Whether parametrised weights are computed once per solve; graphs and transforms compute their own."""
        return self.context == "torch.export" or (self.context == "eager" and self.graphs is None)

    def without_broken(self, solution: Solution) -> tuple[Any, Any, Tensor | None]:
        """(z*, x, broken), see ``rows.without_broken``."""
        return without_broken(self.cell, self.x, solution, self.groups, self.per_sample)

    def forward_value(self, solution: Solution, outputs: list[Tensor], broken: Tensor | None) -> Any:
        """Value that gets the gradient: z*, or `outputs` in all rows that did not break down."""
        if not self.advances:
            return solution.value
        leaves, spec = pytree.tree_flatten(solution.value)
        advanced = [y.detach().to(z.dtype, copy=True) for z, y in zip(leaves, outputs, strict=True)]
        if broken is not None:
            advanced = [torch.where(per_row(broken, z), z, y) for z, y in zip(leaves, advanced, strict=True)]
        return pytree.tree_unflatten(advanced, spec)
