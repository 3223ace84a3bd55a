"""Attachment of a gradient to the value of a solve.

The forward value is the solver's z*, in training and evaluation. Its gradient comes from one more evaluation,
y = f(z*, x). A ``Rule`` maps the gradient g of z* to u. The graph of y then gives the gradients (df/dx)^T u in x, and
(df/dw)^T u in each weight w. ``JFB`` has u = g. ``Implicit`` has u = (I - J^T)^-1 g, with J = df/dz at z*.

In y a healthy sample replaces each sample whose solve broke down; the latter gets no gradient. So one NaN row of x
cannot make a weight's gradient NaN.

The graph of y treats z* as a constant. With create_graph=True a rule therefore also returns gradients in the tensors
that y depends on. Their values are zero. Their derivative is the part of the second derivative that y lacks; a rule
without second derivatives raises there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..ops.double_backward import NoDoubleBackward
from ..state.rows import per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import (
    Gradients,
    Valve,
    edge_of,
    in_order_of,
    leaves_behind,
    not_leaves,
    requiring_grad,
)
from ..torch_internals.dynamo import untraced
from ..torch_internals.transforms import Members
from ..torch_internals.weights import next_node

Evaluate = Callable[[Any, Any], Any]


class Recorded:
    """Evaluation y = f(z*, x) with its graph.

    Attributes:
        outputs: its leaves, in the order of z's.
        sources: the outside tensors that it depends on: those of x, then the leaves that the cell holds.
        hides: whether the cell holds a tensor that was computed outside, hence not a leaf.
    """

    def __init__(self, evaluate: Evaluate, z: Any, x: Any) -> None:
        begin = next_node()
        valve = Valve()
        inner = valve(x)  # else a tensor of x could not be distinguished from the same one held by the cell
        self.outputs = in_order_of(z, evaluate(not_leaves(z), inner))
        inputs = requiring_grad(inner)
        held, self.hides = leaves_behind(self.outputs, [*inputs, *pytree.tree_leaves(z)], begin)
        self.sources = [*requiring_grad(x), *held]
        self.held = held

    @property
    def is_differentiable(self) -> bool:
        """Return whether a tensor that requires a gradient takes part."""
        return bool(self.sources) or self.hides


class Rule:
    """Map from the gradients g of z* to the gradients u of the evaluation y; here u = g. Not differentiable twice.

    Args:
        name: name of the adjoint, for the error of a double backward.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        """u for these g, without graph."""
        return grads

    def pull_members(self, grads: list[Tensor], members: Members) -> list[Tensor]:
        """u for the g of each member of a batch, (V, ...)."""
        pulled = [self.pull([g[i] for g in grads]) for i in range(members.count)]
        return [torch.stack(of_one) for of_one in zip(*pulled, strict=True)]

    def pull_with_graph(self, grads: list[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
        """u with a graph, and further gradients in the sources, see the module's docstring."""
        with torch.no_grad():
            pulled = self.pull(grads)
        return [self.refuse(u, sources) for u in pulled], [self.refuse(torch.zeros_like(s), sources) for s in sources]

    def refuse(self, grad: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """Return the gradient; its own derivative raises an error."""
        return NoDoubleBackward.apply(grad, self.name, *sources)


def attach(value: Any, recorded: Recorded, rule: Rule, broken: Tensor | None = None) -> Any:
    """Return `value`, a tree like z, with its gradient; without one if nothing requires it.

    broken: (N,) mask of the rows that get no gradient; None: all do.
    """
    if not recorded.is_differentiable:
        return value
    values, spec = pytree.tree_flatten(value)
    tensors = (*values, *recorded.outputs, *recorded.sources)
    return pytree.tree_unflatten(list(_Attach.apply(rule, broken, recorded.hides, len(values), *tensors)), spec)


class _Attach(torch.autograd.Function):
    """Copy of the solver's values; the evaluation y receives the rule's u of their gradients g."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, broken: Tensor | None, hides: bool, count: int, *tensors: Tensor) -> Any:
        ctx.rule, ctx.broken, ctx.hides, ctx.count = rule, broken, hides, count
        ctx.meta = [(tensor.shape, tensor.dtype) for tensor in tensors[: 2 * count]]
        ctx.save_for_backward(*tensors[2 * count :])
        ctx.set_materialize_grads(False)
        # Copies, not views: users may work in place on the output of a layer.
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not isinstance(ctx, BackwardCFunction):  # a copy of it, run after the graph has been freed
            raise RuntimeError(
                "deqfast: compiled autograd does not keep the graph that the gradient of a block needs: compile the "
                "model, in which a block is an op, or use Reversible() or Unrolled()"
            )
        return untraced(_Attach.pull, ctx, grads)

    @staticmethod
    def pull(ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
        given = next((g for g in grads if g is not None), None)
        if given is None:  # the valve is closed
            return (None,) * len(ctx.needs_input_grad)
        shapes, dtypes = [shape for shape, _ in ctx.meta[: ctx.count]], [dtype for _, dtype in ctx.meta[ctx.count :]]
        full = [given.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]
        if ctx.broken is not None:
            full = [torch.where(per_row(ctx.broken, g), torch.zeros_like(g), g) for g in full]
        nothing = [None] * (4 + ctx.count)
        if not torch.is_grad_enabled():
            pulled, past = _pulled(ctx.rule, full), [None] * (len(ctx.needs_input_grad) - 4 - 2 * ctx.count)
        elif ctx.hides:
            raise RuntimeError(
                f"deqfast: create_graph=True through {ctx.rule.name} would lose a part of second derivatives, "
                "because the cell holds a tensor computed outside of it: give it to the block in x"
            )
        else:
            pulled, past = ctx.rule.pull_with_graph(full, ctx.saved_tensors)
        return (*nothing, *[g.to(dtype) for g, dtype in zip(pulled, dtypes, strict=True)], *past)


def _pulled(rule: Rule, grads: list[Tensor]) -> list[Tensor]:
    members = Members.of(grads)
    if members is None:
        return rule.pull(grads)
    return [members.wrap(u) for u in rule.pull_members([members.unwrap(g) for g in grads], members)]


def leads_to(values: list[Tensor], tensors: list[Tensor]) -> bool:
    """Return whether the graph of an adjoint's values leads to one of the tensors, without the second derivatives."""
    edges = [edge_of(value) for value in requiring_grad(values)]
    ends, seen = {edge_of(tensor) for tensor in tensors}, set()
    while edges:
        edge = edges.pop()
        if edge in ends:
            return True
        node = edge[0]
        if node is not None and node not in seen:
            seen.add(node)
            attached = getattr(node, "_forward_cls", None) is _Attach  # its last edges lead to all sources
            first = len(node.meta) + (node.broken is not None) if attached else None
            edges.extend(node.next_functions[:first])
    return False


def depends_on_others(values: list[Tensor], leaves: list[Tensor]) -> bool:
    """Return whether the values of an adjoint depend on tensors that require a gradient other than through `leaves`."""
    attached: list[Any] = [v.grad_fn for v in values if getattr(v.grad_fn, "_forward_cls", None) is _Attach]
    sources = [source for node in attached for source in node.saved_tensors] if attached else values
    return any(node.hides for node in attached) or bool(leaves_behind(sources, leaves, 0)[0])
