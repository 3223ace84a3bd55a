"""Attachment of a gradient to a solve.

The forward value is the solver's z*, in training and evaluation alike. Gradients attach to one more evaluation of the
cell at z*, in which samples whose solve broke down are replaced by a healthy one, and then get no gradient: one NaN
row of x cannot turn a weight gradient into NaN.

That evaluation's own graph gives the first derivatives. It is blind to how z* moves: with create_graph=True what is
missing for a second derivative, or an error in its place, goes past it, to the tensors it depends on, as a gradient
whose value is zero.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..grouping import Groups
from ..ops.double_backward import NoDoubleBackward
from ..packing import factors_of
from ..precision import float32_products_eps, residual_floor
from ..solution import Solution, Status
from ..transforms import Members
from ..uncompiled import untraced
from ..weights import held_nodes, next_node, present_hooks
from .samples import per_row, rows_of

if TYPE_CHECKING:
    from .base import Problem

Gradients = list[Tensor | None]
Evaluate = Callable[[Any, Any], Any]

_states = WeakTensorKeyDictionary()
"""Leaves that stand for the state of an evaluation: nobody's, where one block is in another's cell."""


class Recorded:
    """Evaluation at z* with its graph.

    Attributes:
        outputs: its leaves, in the order of z's.
        sources: the tensors outside that it depends on: those of x, then the leaves that the cell holds.
        hides: the cell holds a tensor that is no leaf either.
    """

    def __init__(self, evaluate: Evaluate, z: Any, x: Any) -> None:
        begin = next_node()
        valve = Valve()
        behind = valve(x)  # or a tensor of x could not be told from the same one held by the cell
        self.outputs = in_order_of(z, evaluate(not_leaves(z), behind))
        inputs = requiring_grad(behind)
        held, self.hides = leaves_behind(self.outputs, [*inputs, *pytree.tree_leaves(z)], begin)
        self.sources = [*requiring_grad(x), *held]
        self.held = held

    @property
    def is_differentiable(self) -> bool:
        """Answer whether there is anything to differentiate in."""
        return bool(self.sources) or self.hides


class Rule:
    """How gradients of z* enter the evaluation: as they come. Not differentiable twice.

    Args:
        name: what the error of a double backward calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        """What enters the evaluation for these gradients of z*, without graph."""
        return grads

    def pull_members(self, grads: list[Tensor], members: Members) -> list[Tensor]:
        """What enters for those of each member of a batch, (V, ...)."""
        pulled = [self.pull([g[i] for g in grads]) for i in range(members.count)]
        return [torch.stack(of_one) for of_one in zip(*pulled, strict=True)]

    def pull_with_graph(self, grads: list[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
        """What enters the evaluation, and what goes past it to the sources."""
        with torch.no_grad():
            pulled = self.pull(grads)
        return [self.refuse(u, sources) for u in pulled], [self.refuse(torch.zeros_like(s), sources) for s in sources]

    def refuse(self, grad: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """The gradient, whose own derivative is an error."""
        return NoDoubleBackward.apply(grad, self.name, *sources)


def attach(value: Any, recorded: Recorded, rule: Rule, broken: Tensor | None = None) -> Any:
    """`value`, a tree like z, with its gradient; itself where there is nothing to differentiate in.

    broken: (N,) mask of the rows that get no gradient; None: all do.
    """
    if not recorded.is_differentiable:
        return value
    values, spec = pytree.tree_flatten(value)
    tensors = (*values, *recorded.outputs, *recorded.sources)
    return pytree.tree_unflatten(list(_Attach.apply(rule, broken, recorded.hides, len(values), *tensors)), spec)


class _Attach(torch.autograd.Function):
    """Forward: the solver's values. Backward: what the rule makes of their gradients."""

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
        if not isinstance(ctx, BackwardCFunction):  # but a copy of it, run when the graph has been freed
            raise RuntimeError(
                "deqfast: compiled autograd does not keep the graph that the gradient of a block needs: compile the "
                "model, in which a block is an op, or use Reversible() or Unrolled()"
            )
        return untraced(_Attach.pull, ctx, grads)

    @staticmethod
    def pull(ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
        given = next((g for g in grads if g is not None), None)
        if given is None:  # behind a closed valve
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
                f"deqfast: create_graph=True through {ctx.rule.name} of a cell that holds a tensor computed outside of "
                "it, whose part in second derivatives would be lost: give it to the block in x"
            )
        else:
            pulled, past = ctx.rule.pull_with_graph(full, ctx.saved_tensors)
        return (*nothing, *[g.to(dtype) for g, dtype in zip(pulled, dtypes, strict=True)], *past)


def _pulled(rule: Rule, grads: list[Tensor]) -> list[Tensor]:
    members = Members.of(grads)
    if members is None:
        return rule.pull(grads)
    return [members.wrap(u) for u in rule.pull_members([members.unwrap(g) for g in grads], members)]


def in_order_of(z: Any, value: Any) -> list[Tensor]:
    """Leaves of `value` in the order of those of the tree `z`, by their keys."""
    return [value] if isinstance(value, Tensor) else pytree.tree_structure(z).flatten_up_to(value)


class Valve:
    """Identity of trees that lets gradients through or, while it is closed, stops them."""

    def __init__(self) -> None:
        self.is_closed = False

    def __call__(self, tree: Any) -> Any:
        return pytree.tree_map(lambda t: _Valve.apply(self, _check_sized(t)) if _requires_grad(t) else t, tree)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = False


def _check_sized(tensor: Tensor) -> Tensor:
    """The tensor; TypeError if it is nested and strided, which torch's custom functions do not take."""
    if tensor.is_nested and tensor.layout == torch.strided:
        raise TypeError(
            "x must hold no strided nested tensor that requires a gradient: make it with layout=torch.jagged, or use "
            "Unrolled()"
        )
    return tensor


class _Valve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, valve: Valve, tensor: Tensor) -> Tensor:
        ctx.valve = valve
        ctx.set_materialize_grads(False)  # zeros for what a closed valve behind has stopped would begin a solve
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None if ctx.valve.is_closed else grads[0]


def present_autocast(device: str) -> Callable[[], AbstractContextManager[None]]:
    """Context with the autocast state of now, for a backward pass."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, enabled=enabled, dtype=dtype)


def vjp(
    outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], retain_graph: bool = True, **options: Any
) -> Gradients:
    """Vector-Jacobian product, None where an input is not used. Hooks of an input wait for its whole gradient."""
    attached = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if not attached:
        return [None] * len(inputs)
    values, given = map(list, zip(*attached, strict=True))
    hooked = [tensor for tensor in inputs if tensor._backward_hooks]
    with _no_hooks(hooked) if hooked else nullcontext():
        found = torch.autograd.grad(values, inputs, given, retain_graph=retain_graph, allow_unused=True, **options)
    return list(found)


def product(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], **options: Any) -> Gradients:
    """``vjp`` in a graph recorded ``for_products``: one of several, of which hooks of modules see none."""
    before, _thread.multiplies = _thread.multiplies, True
    try:
        return vjp(outputs, inputs, grads, **options)
    finally:
        _thread.multiplies = before


@contextmanager
def for_products(cell: Any) -> Iterator[None]:
    """Context that records a graph for several products, and then a gradient.

    Backward hooks of the cell's modules see the gradient only. Tensors are saved past the hooks around: those of a
    checkpoint would compute them again for each product. Without any it sets none, which torch.func in a cell refuses.
    """
    for module in cell.modules() if isinstance(cell, nn.Module) else ():
        _make_wait(module._backward_hooks, "multiplies")
        _make_wait(module._backward_pre_hooks, "multiplies")
    with saved_tensors_hooks(keep, kept) if present_hooks() else nullcontext():
        yield


@contextmanager
def _no_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """Context in which hooks of the tensors are not called by this thread."""
    for tensor in tensors:
        _make_wait(tensor._backward_hooks, "takes_part")
    before, _thread.takes_part = _thread.takes_part, True
    try:
        yield
    finally:
        _thread.takes_part = before


class _OfThread(threading.local):
    takes_part = False  # it finds a part of the gradient of a tensor, whose hooks are not to see it
    multiplies = False  # it finds a product on the way to a gradient, which hooks of modules are not to see


_thread = _OfThread()


class _Hook:
    """Hook that waits for the gradient: while its thread `finds` something else it is not called."""

    def __init__(self, hook: Callable[..., Any], finds: str) -> None:
        self.hook, self.finds = hook, finds

    def __call__(self, *arguments: Any) -> Any:
        return None if getattr(_thread, self.finds) else self.hook(*arguments)


def _make_wait(hooks: Any, finds: str) -> None:
    """Make the hooks ``_Hook``s, for good."""
    for key, hook in list(hooks.items()):
        if not isinstance(hook, _Hook):
            hooks[key] = _Hook(hook, finds)


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """Tensor, without its graph, which would hold itself by it, and its version, for ``kept``."""
    return tensor.detach(), tensor._version


def kept(saved: tuple[Tensor, int]) -> Tensor:
    """The tensor; RuntimeError where it has been modified since."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "deqfast: a tensor that the gradient of a block needs has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def not_leaves(tree: Any) -> Any:
    """Views of the leaves of a graph, which torch's counters of a module's work do not take from ``autograd.grad``."""
    return pytree.tree_map(lambda t: _following(t) if _requires_grad(t) and t.is_leaf else t, tree)


def _following(tensor: Tensor) -> Tensor:
    """The same tensor one node later: a view, or of a sparse one, which has none, a copy."""
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def _edge(tensor: Tensor) -> Any:
    """Node and number of the result that the tensor is of its graph; torch's own way makes a view."""
    if tensor.layout == torch.strided:
        return tuple(get_gradient_edge(tensor)[:2])
    with torch.enable_grad():
        node: Any = tensor.clone().grad_fn
    return node.next_functions[0]


def requiring_grad(tree: Any) -> list[Tensor]:
    """The tensors of a tree that require a gradient."""
    return [leaf for leaf in pytree.tree_leaves(tree) if _requires_grad(leaf)]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def leaves_behind(outputs: list[Tensor], excluded: list[Tensor], first: int) -> tuple[list[Tensor], bool]:
    """Leaves that `outputs` depend on other than through those `excluded`; whether on more that is older than `first`,
    the number of a node. Weights held for the solve are no older than what they are made of."""
    edges: list[Any] = [(_edge(y), first) for y in outputs if y.requires_grad]
    begins = held_nodes()
    seen = {_edge(tensor) for tensor in excluded if tensor.requires_grad}
    found, hides = [], False
    while edges:
        edge, first = edges.pop()
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        first = begins.get(edge[0], first)
        if edge[0].name() == "torch::autograd::AccumulateGrad":
            if edge[0].variable not in _states:
                found.append(edge[0].variable)
        elif (
            edge[0]._sequence_nr() < first and edge[0].name() != "ToCopyBackward0"
        ):  # a weight that autocast keeps cast
            hides = True
        else:
            edges.extend((behind, first) for behind in edge[0].next_functions)
    return found, hides


def depends_on_others(values: list[Tensor], leaves: list[Tensor]) -> bool:
    """Answer whether the values of an adjoint depend on tensors that require a gradient other than through `leaves`."""
    attached: list[Any] = [v.grad_fn for v in values if getattr(v.grad_fn, "_forward_cls", None) is _Attach]
    sources = [source for node in attached for source in node.saved_tensors] if attached else values
    return any(node.hides for node in attached) or bool(leaves_behind(sources, leaves, 0)[0])


def sample_norms(
    leaves: Sequence[Tensor], groups: Groups | None, maximum: bool = False, factors: list[float] | None = None
) -> Tensor:
    """Norms of the samples, (B,) float64, which no square of a float32 leaves; `maximum`: largest magnitudes.

    `factors`: numbers that the leaves are divided by, see ``factors_of``.
    """
    if maximum:
        norms = [torch.nn.functional.pad(rows_of(leaf).abs(), (0, 1)).amax(dim=1).double() for leaf in leaves]
    else:
        norms = [torch.linalg.vector_norm(rows_of(leaf), dim=1, dtype=torch.float64) for leaf in leaves]
    if factors is not None:
        norms = [norm / factor for norm, factor in zip(norms, factors, strict=True)]
    if maximum:
        largest = norms[0] if len(norms) == 1 else torch.stack(norms).amax(dim=0)
        return largest if groups is None else groups.gather(largest[:, None]).amax(dim=1)
    if groups is not None:
        return groups.sums(torch.stack(norms).square().sum(dim=0)).sqrt()
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


@torch.no_grad()
def confirmed(solution: Solution, problem: Problem, z: Any, evaluation: list[Tensor]) -> Solution:
    """The solution, with samples INCONSISTENT that its solve took for converged and this evaluation at z* does not.

    Twice the residual or the tolerance is allowed, and the rounding of f. Nothing waits for the device.
    """
    if not len(solution.status):
        return solution
    leaves = pytree.tree_leaves(z)
    device = leaves[0].device
    values, states = ([t.dtype for t in tensors] for tensors in (evaluation, leaves))
    rounding = residual_floor(values, states, device, float32_products_eps(device))
    solver = problem.solver
    gaps = [y - one for y, one in zip(evaluation, leaves, strict=True)]
    factors = factors_of(problem.scale, pytree.tree_structure(z))
    size, gap = (sample_norms(of, problem.groups, solver.norm == "max", factors) for of in (evaluation, gaps))
    allowed = solution.residual.clamp_min(solver.tol).mul_(2)
    bound = (allowed + rounding) * size if solver.stop == "rel" else allowed + rounding * size
    if solver.offset:
        bound += allowed * solver.offset
    moved = (solution.status == Status.CONVERGED) & ~(gap <= bound)
    return replace(solution, status=solution.status.masked_fill(moved, Status.INCONSISTENT))


def detached(tree: Any, requires_grad: bool = False) -> Any:
    """`tree` with its tensors cut from their graphs, as fresh leaves where `requires_grad`."""
    found = pytree.tree_map(torch.Tensor.detach, tree)
    if requires_grad:
        _states.update((leaf.requires_grad_(), None) for leaf in pytree.tree_leaves(found))
    return found
