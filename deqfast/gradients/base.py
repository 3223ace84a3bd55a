"""Base of the adjoints: attachment of a gradient to the value of a solve.

The forward value is the solver's z*, in training and evaluation. Its gradient comes from one more evaluation,
y = f(z*, x). A ``Rule`` maps the gradient g of z* to u. The graph of y then gives the gradients (df/dx)^T u in x, and
(df/dw)^T u in each weight w. ``JFB`` has u = g. ``Implicit`` has u = (I - J^T)^-1 g, with J = df/dz at z*.

In y a healthy sample replaces each broken one, which gets no gradient: a NaN row of x makes no weight's gradient NaN.

The graph of y treats z* as a constant. With create_graph=True a rule therefore also returns gradients in the tensors
that y depends on, with value zero. Their derivative is the part of the second derivative that y lacks, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .._checks import ChecksKeywords
from ..engine.plan import Plan, run
from ..engine.solve import Options
from ..ops.double_backward import NoDoubleBackward
from ..solution import Solution, Status
from ..state.floors import float32_products_eps, residual_floor
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..state.rows import per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import (
    Gradients,
    Graph,
    edge_of,
    in_order_of,
    keeps_graph,
    not_leaves,
    requiring_grad,
    with_nodes,
)
from ..torch_internals.dynamo import untraced
from ..torch_internals.transforms import Members
from ..torch_internals.weights import next_node
from .derivative import Derivative

Evaluate = Callable[[Any, Any], Any]


class Recorded:
    """Evaluation y = f(z*, x) with its graph, which is searched for leaves only when they are asked for."""

    def __init__(self, evaluate: Evaluate, z: Any, x: Any) -> None:
        first = next_node()
        inner = with_nodes(x)  # else a tensor of x could not be distinguished from the same one held by the cell
        self.outputs = in_order_of(z, evaluate(not_leaves(z), inner))  # leaves, in the order of z's
        self.in_x, state = requiring_grad(x), requiring_grad(z)  # tensors that require a gradient
        self.graph = Graph(self.outputs, [*requiring_grad(inner), *state] if self.in_x else state, first)
        self.is_of_state = bool(state)

    @property
    def is_differentiable(self) -> bool:
        """Whether a tensor other than z that requires a gradient takes part."""
        if self.in_x or not self.is_of_state:
            return bool(self.in_x or self.graph.ends)
        return bool(self.graph.ends) and (bool(self.held) or self.hides)

    @property
    def held(self) -> list[Tensor]:
        """Leaves that the cell holds."""
        return self.graph.behind[0]

    @property
    def hides(self) -> bool:
        """Whether the cell holds a tensor that was computed outside, hence not a leaf."""
        return self.graph.behind[1]

    @property
    def sources(self) -> list[Tensor]:
        """The outside tensors on which the evaluation depends: those of x, then the leaves that the cell holds."""
        return [*self.in_x, *self.held]


class Rule:
    """Map from the gradients g of z* to the gradients u of the evaluation y; here u = g. Not differentiable twice.

    Args:
        name: name of the adjoint, for the error of a double backward.
    """

    has_second_derivatives = False

    def __init__(self, name: str) -> None:
        self.name = name

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        """u for these g, without graph."""
        return grads

    def pull_members(self, grads: list[Tensor], members: Members) -> list[Tensor]:
        """u for the g of each member of a batch, (V, ...)."""
        pulled = [self.pull([g[i] for g in grads]) for i in range(members.count)]
        return [torch.stack(values) for values in zip(*pulled, strict=True)]

    def pull_with_graph(self, grads: list[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
        """u with a graph, and further gradients in the sources, see the module's docstring."""
        with torch.no_grad():
            pulled = self.pull(grads)
        return [self.refuse(u, sources) for u in pulled], []

    def refuse(self, grad: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """Return the gradient; its own derivative raises an error."""
        return NoDoubleBackward.apply(grad, self.name, *sources)


def attach(value: Any, recorded: Recorded, rule: Rule, broken: Tensor | None = None) -> Any:
    """Return `value`, a tree like z, with its gradient; without one if nothing requires it.

    broken: (N,) mask of the rows that get no gradient; None: all do.
    """
    if not recorded.is_differentiable:
        return value
    if type(rule) is Rule and broken is None and _is_alike(value, y := recorded.outputs[0]):
        in_x = [_anchor(t) for t in recorded.in_x]
        return _in_place_of(y, value, partial(_refused, rule, recorded.graph, in_x))
    values, spec = ([value], None) if isinstance(value, Tensor) else pytree.tree_flatten(value)
    sources = recorded.sources if rule.has_second_derivatives else recorded.in_x
    to = _To(rule, recorded.graph, broken, values, [y.dtype for y in recorded.outputs], sources)
    attached = list(_Attach.apply(to, *recorded.outputs, *sources))
    return attached[0] if spec is None else pytree.tree_unflatten(attached, spec)


def _is_alike(value: Any, y: Tensor) -> bool:
    """Return whether a copy of y can take this value; on a GPU a second copy would be another launch."""
    if type(value) is not Tensor or type(y) is not Tensor or not value.is_cpu or not y.requires_grad:
        return False
    return value.dtype is y.dtype and value.layout is torch.strided and value.stride() == y.stride()


def _in_place_of(y: Tensor, value: Tensor, hook: Callable[..., Any]) -> Tensor:
    """Copy of the value whose gradient is y's. torch's own node takes half of the time of a Python Function."""
    copy = y.clone()
    copy.data.copy_(value)  # neither recorded nor counted as in-place work
    copy.grad_fn.register_prehook(hook)  # type: ignore[union-attr]  # y requires a gradient
    return copy


def _anchor(tensor: Tensor) -> Tensor:
    """A tensor without elements whose graph leads to this one's, or a leaf, or a sparse tensor, itself.

    Held by a node, a tensor that in-place work makes depend on the node would be in a cycle that nothing frees.
    """
    return tensor if tensor.is_leaf or tensor.layout is not torch.strided else tensor.unsqueeze(0)[:0].clone()


def _refused(rule: Rule, graph: Graph, in_x: list[Tensor], grads: tuple[Tensor | None, ...]) -> Any:
    """Hook of a node: with create_graph=True, u for this g, whose own derivative raises an error.

    in_x: tensors whose graphs lead to those of x.
    """
    if not torch.is_grad_enabled() or grads[0] is None:
        return None
    return tuple(_with_graph(rule, graph, [grads[0]], [*in_x, *graph.behind[0]])[0])


def _with_graph(rule: Rule, graph: Graph, grads: list[Tensor], sources: list[Tensor]) -> tuple[list[Tensor], Gradients]:
    """``Rule.pull_with_graph``; RuntimeError if the cell holds a tensor that was computed outside."""
    if graph.behind[1]:
        why = "because the cell holds a tensor computed outside of it: give it to the block in x"
        lost = "would lose a part of second derivatives"
        raise RuntimeError(f"deqfast: create_graph=True through {rule.name} {lost}, {why}")
    return rule.pull_with_graph(grads, sources)


@dataclass
class _To:
    """What a gradient is attached to."""

    rule: Rule
    graph: Graph
    broken: Tensor | None
    values: list[Tensor]  # the solver's, until they have been copied
    dtypes: list[torch.dtype]  # of the evaluation y
    saved: list[Tensor]  # for second derivatives, the sources; those of x only if the rule has none


class _Attach(torch.autograd.Function):
    """Copy of the solver's values; the evaluation y receives the rule's u of their gradients g."""

    @staticmethod
    def forward(ctx: Any, to: _To, *tensors: Tensor) -> Any:
        values, saved, to.values, to.saved = to.values, to.saved, [], []
        ctx.to, ctx.shapes = to, [value.shape for value in values]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        # Copies, not views: users may work in place on the output of a layer.
        return tuple([value.clone() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not isinstance(ctx, BackwardCFunction):  # a copy of it, run after the graph has been freed
            why = "compiled autograd does not keep the graph that the gradient of a block needs"
            use = "compile the model, in which a block is an op, or use Reversible(), Unrolled() or, on a CPU, JFB()"
            raise RuntimeError(f"deqfast: {why}: {use}")
        return untraced(_Attach.pull, ctx, grads)

    @staticmethod
    def pull(ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
        to, inputs = ctx.to, len(ctx.needs_input_grad)
        if to is None:
            raise RuntimeError("deqfast: a second backward pass through a block needs retain_graph=True in the first")
        full: list[Any] = list(grads)
        if any([g is None for g in grads]):
            known = next((g for g in grads if g is not None), None)
            if known is None:  # the valve is closed
                return (None,) * inputs
            full = [known.new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.shapes, strict=True)]
        if to.broken is not None:
            full = [torch.where(per_row(to.broken, g), torch.zeros_like(g), g) for g in full]
        past: Gradients = []
        if not torch.is_grad_enabled():
            pulled = _pulled(to.rule, full)
        else:
            pulled, past = _with_graph(to.rule, to.graph, full, _sources(ctx))
        pulled = [g if g.dtype == dtype else g.to(dtype) for g, dtype in zip(pulled, to.dtypes, strict=True)]
        if not keeps_graph():
            ctx.to = None  # as torch frees saved tensors; it may lead back here, if work in place made x depend on z*
        return (None, *pulled, *past, *[None] * (inputs - 1 - len(pulled) - len(past)))


def _pulled(rule: Rule, grads: list[Tensor]) -> list[Tensor]:
    members = Members.of(grads)
    if members is None:
        return rule.pull(grads)
    return [members.wrap(u) for u in rule.pull_members([members.unwrap(g) for g in grads], members)]


def _sources(node: Any) -> list[Tensor]:
    """``Recorded.sources`` of the evaluation of this node."""
    saved = list(node.saved_tensors)
    return saved if node.to.rule.has_second_derivatives else [*saved, *node.to.graph.behind[0]]


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
            edges.extend(node.next_functions[: len(node.to.dtypes) if attached else None])
    return False


def depends_on_others(values: list[Tensor], leaves: list[Tensor]) -> bool:
    """Return whether the values of an adjoint depend on tensors that require a gradient other than through `leaves`."""
    attached: list[Any] = [v.grad_fn for v in values if getattr(v.grad_fn, "_forward_cls", None) is _Attach]
    sources = [source for node in attached for source in _sources(node)] if attached else values
    return any(node.to.graph.behind[1] for node in attached) or bool(Graph(sources, leaves, 0).behind[0])


def confirmed(solution: Solution, options: Options, z: Any, evaluation: list[Tensor]) -> Solution:
    """Return the solution, with the status INCONSISTENT for converged samples that this evaluation at z* contradicts.

    A difference of twice the residual or the tolerance, plus the rounding of f, is allowed. Nothing waits for a GPU.
    """
    if solution.may_include(Status.CONVERGED) and len(solution.status):
        with torch.no_grad():
            return _compared(solution, options, z, evaluation)
    return solution


def _compared(solution: Solution, options: Options, z: Any, evaluation: list[Tensor]) -> Solution:
    leaves = pytree.tree_leaves(z)
    device = leaves[0].device
    rounding = residual_floor(evaluation, leaves, device, float32_products_eps(device))
    solver = options.solver
    gaps = [y - leaf for y, leaf in zip(evaluation, leaves, strict=True)]
    factors = factors_of(options.scale, pytree.tree_structure(z))
    arguments = options.groups, solver.norm == "max", factors, options.state_group
    size, gap = sample_norms(evaluation, *arguments), sample_norms(gaps, *arguments)
    allowed = solution.residual.clamp_min(solver.tol).mul_(2)
    bound = allowed + rounding * size if solver.is_absolute else (allowed + rounding) * size
    if solver.offset:
        bound += allowed * solver.offset
    met = gap <= bound
    if solution.counts is not None and bool(met.all()):
        return solution
    moved = (solution.status == Status.CONVERGED) & ~met
    return solution.changed(status=solution.status.masked_fill(moved, Status.INCONSISTENT), arriving=None)


@dataclass(frozen=True)
class Adjoint(ChecksKeywords):
    """Base of the adjoints, which attach a gradient to the value of a solve.

    A subclass is a frozen dataclass of its settings and defines ``differentiate``, for torch.func also ``derivative``.
    """

    def __call__(self, plan: Plan) -> tuple[Any, Solution]:
        """Value of the plan, with its gradient if one is recorded, and the Solution of the forward solve."""
        solution = run(plan)
        return self.differentiate(plan, solution) if plan.is_differentiated else (solution.value, solution)

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        """``solution.value`` with its gradient, and the solution as the gradient's evaluation confirms it."""
        raise NotImplementedError(f"{type(self).__name__} must define differentiate(plan, solution)")

    def derivative(self, plan: Plan) -> Derivative:
        """Derivative of the value under torch.func and in forward-mode AD; raises unless a subclass defines it."""
        return Derivative(type(self).__name__)
