"""Attachment of a gradient to a solve. The one place that touches autograd for solves.

The forward value is the solver's z*, in training and evaluation alike. Gradients attach to one more evaluation of the
cell at z*, in which samples whose solve broke down are replaced by a healthy one, and then get no gradient: one NaN
row of x cannot turn a weight gradient into NaN.

That evaluation's own graph serves first derivatives. It is blind to how z* moves, so with create_graph=True the
gradients go past it, straight to the tensors it depends on, as a differentiable function of these or as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ..grouping import Groups
from ..ops.double_backward import NoDoubleBackward
from ..solution import Solution, Status
from ..solvers.base import STALL_UNITS
from .samples import per_row

if TYPE_CHECKING:
    from .base import Problem

Gradients = list[Tensor | None]


class Attachment:
    """Evaluation at z* that gradients enter as they come; a subclass transforms them before. Not differentiable twice.

    Args:
        name: what the error of a double backward calls it.
        evaluate: the map (z, x) -> z whose graph is recorded.
        z: z*, a tree of detached tensors.
        x: the second argument of `evaluate`.
        broken: (N,) mask of the rows that get no gradient; None: all do.
    """

    def __init__(
        self, name: str, evaluate: Callable[[Any, Any], Any], z: Any, x: Any, broken: Tensor | None = None
    ) -> None:
        self.name, self.evaluate, self.z, self.x, self.broken = name, evaluate, z, x, broken
        self.evaluation: list[Tensor] = pytree.tree_leaves(evaluate(z, x))
        self.inputs = requiring_grad(x)
        self.others = _leaves_behind(self.evaluation, self.inputs, pytree.tree_leaves(z))

    def attach_to(self, problem: Problem, solution: Solution) -> tuple[Any, Solution]:
        """The solution's value with the gradient, and the solution in the light of this evaluation."""
        leaves = pytree.tree_leaves(self.z)
        return self.attach(solution.value), confirmed(solution, problem, leaves, self.evaluation)

    def attach(self, value: Any) -> Any:
        """`value`, a tree like z, with the gradient; itself where there is nothing to differentiate in."""
        if not self.inputs and not self.others:
            return value
        values, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten(list(_Attach.apply(self, *values, *self.evaluation, *self.sources)), spec)

    @property
    def sources(self) -> list[Tensor]:
        """The tensors outside that the evaluation depends on: those in x, and the leaves that the cell holds."""
        return [*self.inputs, *self.others]

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        """What enters the evaluation for these gradients of z*, without graph."""
        return grads

    def gradients(self, grads: list[Tensor]) -> Gradients:
        """Gradients in the sources as functions of these, whose own derivatives are right or an error."""
        with torch.no_grad():
            found = self.products(self.z, self.pull(grads))
        return [g if g is None else NoDoubleBackward.apply(g, self.name, *self.sources) for g in found]

    def products(self, z: Any, grads: list[Tensor]) -> Gradients:
        """Products of `grads` with the Jacobian in the sources of an evaluation at `z`; with graph where that is on."""
        create_graph, valve = torch.is_grad_enabled(), Valve()
        with torch.enable_grad():
            x = valve(self.x)
            evaluation = pytree.tree_leaves(self.evaluate(valve(z), x))
        with valve.closed():
            return vjp(evaluation, [*requiring_grad(x), *self.others], grads, create_graph=create_graph)

    def masked(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """`grads` with zeros for the broken samples."""
        if self.broken is None:
            return list(grads)
        return [torch.where(per_row(self.broken, g), torch.zeros_like(g), g) for g in grads]


class _Attach(torch.autograd.Function):
    """Forward: the solver's values. Backward: gradients of the evaluation or, differentiable, of its sources."""

    @staticmethod
    def forward(ctx: Any, attachment: Attachment, *tensors: Tensor) -> Any:
        ctx.attachment = attachment
        ctx.set_materialize_grads(False)
        # Copies, not views: users may work in place on the output of a layer.
        return tuple(value.clone() for value in tensors[: len(attachment.evaluation)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a: Attachment = ctx.attachment
        nothing = [None] * len(a.evaluation)
        if all(g is None for g in grads):  # behind a closed valve
            return (None, *nothing, *nothing, *[None] * len(a.sources))
        masked = a.masked([torch.zeros_like(y) if g is None else g for g, y in zip(grads, a.evaluation, strict=True)])
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *nothing, *nothing, *a.gradients(masked))
        with torch.no_grad():
            pulled = [g.to(y.dtype) for g, y in zip(a.pull(masked), a.evaluation, strict=True)]
        return (None, *nothing, *pulled, *[None] * len(a.sources))


class Valve:
    """Identity of trees that lets gradients through or, while it is closed, stops them."""

    def __init__(self) -> None:
        self.is_closed = False

    def __call__(self, tree: Any) -> Any:
        return pytree.tree_map(lambda t: _Valve.apply(self, t) if _requires_grad(t) else t, tree)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = False


class _Valve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, valve: Valve, tensor: Tensor) -> Tensor:
        ctx.valve = valve
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None if ctx.valve.is_closed else grads[0]


def vjp(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], **options: Any) -> Gradients:
    """Vector-Jacobian product, None where an input is not used; the graph is kept."""
    attached = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if not attached:
        return [None] * len(inputs)
    return list(
        torch.autograd.grad(
            [y for y, _ in attached], inputs, [g for _, g in attached], retain_graph=True, allow_unused=True, **options
        )
    )


def requiring_grad(tree: Any) -> list[Tensor]:
    """The tensors of a tree that require a gradient."""
    return [leaf for leaf in pytree.tree_leaves(tree) if _requires_grad(leaf)]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _leaves_behind(outputs: list[Tensor], inputs: list[Tensor], excluded: list[Tensor]) -> list[Tensor]:
    """The leaves that `outputs` depend on other than through the non-leaf `inputs`, without those `excluded`."""
    seen = {(x.grad_fn, x.output_nr) for x in inputs if not x.is_leaf}
    edges: list[Any] = [get_gradient_edge(y)[:2] for y in outputs if y.requires_grad]
    own, found = {id(leaf) for leaf in excluded}, []
    while edges:
        edge = edges.pop()
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        leaf = getattr(edge[0], "variable", None)
        if leaf is None:
            edges.extend(edge[0].next_functions)
        elif id(leaf) not in own:
            found.append(leaf)
    return found


def sample_norms(leaves: Sequence[Tensor], groups: Groups | None) -> Tensor:
    """Norms of the samples, (B,), in float32 or float64."""
    dtype = torch.promote_types(leaves[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(leaf.flatten(1), dim=1, dtype=dtype) for leaf in leaves]
    if groups is not None:
        return groups.sums(sum(norm.square() for norm in norms)).sqrt()
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


@torch.no_grad()
def confirmed(solution: Solution, problem: Problem, z: list[Tensor], evaluation: list[Tensor]) -> Solution:
    """The solution, with samples INCONSISTENT that its solve took for converged and this evaluation at z* does not.

    Twice the residual or the tolerance is allowed, and the rounding of f. Nothing waits for the device.
    """
    if not len(solution.status):
        return solution
    device = z[0].device.type
    dtypes = [y.dtype for y in evaluation]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    rounding = STALL_UNITS * max(torch.finfo(dtype).eps for dtype in dtypes)
    size = sample_norms(evaluation, problem.groups)
    gap = sample_norms([y - one for y, one in zip(evaluation, z, strict=True)], problem.groups)
    allowed = solution.residual.clamp_min(problem.solver.tol).mul_(2)
    allowed = (allowed + rounding) * size if problem.solver.stop == "rel" else allowed + rounding * size
    moved = (solution.status == Status.CONVERGED) & ~(gap <= allowed)
    return replace(solution, status=solution.status.masked_fill(moved, Status.INCONSISTENT))


def detached(tree: Any, requires_grad: bool = False) -> Any:
    """`tree` with its tensors cut from their graphs, as fresh leaves where `requires_grad`."""
    return pytree.tree_map(lambda t: t.detach().requires_grad_(requires_grad), tree)
