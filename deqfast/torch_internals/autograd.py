"""Graphs of torch.autograd: products with a recorded evaluation, the leaves behind it, and hooks.

`tests/test_torch_internals.py` tests what is assumed of torch here, assumption by assumption.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge, saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from . import pytree
from .weights import held_nodes, modules_of, present_hooks

Gradients = list[Tensor | None]


_states = WeakTensorKeyDictionary()
"""Leaves that stand for the state of an evaluation: nobody's, where one block is in another's cell."""


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
    """Vector-Jacobian product, None for an input that is not used. Hooks of an input wait for its whole gradient."""
    attached = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if not attached:
        return [None] * len(inputs)
    values, given = map(list, zip(*attached, strict=True))
    hooks = [tensor._backward_hooks for tensor in inputs if tensor._backward_hooks]
    with _no_hooks(hooks) if hooks else nullcontext():
        if options or any(y.shape != g.shape for y, g in zip(values, given, strict=True)):
            found = torch.autograd.grad(values, inputs, given, retain_graph=retain_graph, allow_unused=True, **options)
        else:  # past checks that take as long as the product with a small cell
            found = _engine_run_backward(
                tuple(values), tuple(given), retain_graph, False, tuple(inputs), True, accumulate_grad=False
            )
    return list(found)


def product(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], **options: Any) -> Gradients:
    """``vjp`` in a graph recorded ``for_products``: one of several, of which hooks of modules see none."""
    with _finds("multiplies"):
        return vjp(outputs, inputs, grads, **options)


@contextmanager
def for_products(cell: Any) -> Iterator[None]:
    """Context that records a graph for several products, and then a gradient.

    Backward hooks of the cell's modules see the gradient only. Tensors are saved past the hooks around: those of a
    checkpoint would compute them again for each product. Without any it sets none, which torch.func in a cell refuses.
    """
    hooks = [each for module in modules_of(cell) for each in (module._backward_hooks, module._backward_pre_hooks)]
    kept_tensors = saved_tensors_hooks(keep, kept) if present_hooks() else nullcontext()
    with _waiting(hooks, "multiplies"), kept_tensors:
        yield


@contextmanager
def _no_hooks(hooks: list[Any]) -> Iterator[None]:
    """Context in which these hooks of tensors are not called by this thread."""
    with _waiting(hooks, "takes_part"), _finds("takes_part"):
        yield


class _OfThread(threading.local):
    takes_part = False  # it finds a part of the gradient of a tensor, whose hooks are not to see it
    multiplies = False  # it finds a product on the way to a gradient, which hooks of modules are not to see


_thread, _hooks_lock = _OfThread(), threading.Lock()


@contextmanager
def _finds(what: str) -> Iterator[None]:
    """Context in which this thread computes `what`, so that hooks which wait for it are not called."""
    before = getattr(_thread, what)
    setattr(_thread, what, True)
    try:
        yield
    finally:
        setattr(_thread, what, before)


class _Hook:
    """A user's hook, which is not called by a thread that computes `what`. Copies of it are the user's hook."""

    def __init__(self, hook: Callable[..., Any], what: str) -> None:
        self.hook, self.what = hook, what
        self.contexts = 0  # how many contexts need it

    def __call__(self, *arguments: Any) -> Any:
        return None if getattr(_thread, self.what) else self.hook(*arguments)

    def __reduce__(self) -> Any:
        return _itself, (self.hook,)


def _itself(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


@contextmanager
def _waiting(dicts: Iterable[Any], what: str) -> Iterator[None]:
    """Context in which the hooks of these dicts are ``_Hook``s. The last of several contexts puts the user's back."""
    taken = []
    with _hooks_lock:
        for hooks in dicts:
            for key, hook in list(hooks.items()):
                own = hook if isinstance(hook, _Hook) else _Hook(hook, what)
                hooks[key] = own
                own.contexts += 1
                taken.append((hooks, key, own))
    try:
        yield
    finally:
        with _hooks_lock:
            for hooks, key, own in taken:
                own.contexts -= 1
                if not own.contexts and hooks.get(key) is own:  # else the user has removed it
                    hooks[key] = own.hook


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """Tensor, without its graph, which would hold itself by it, and its version, for ``kept``."""
    return tensor.detach(), tensor._version


def kept(saved: tuple[Tensor, int]) -> Tensor:
    """The tensor; RuntimeError if it has been modified since."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "deqfast: a tensor that the gradient of a block needs has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def keeps_graph() -> bool:
    """Return whether the backward pass of this thread keeps its graph, as retain_graph=True asks."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def not_leaves(tree: Any) -> Any:
    """Views of the leaves of a graph, which torch's counters of a module's work do not take from ``autograd.grad``."""
    return pytree.tree_map(lambda t: _following(t) if _requires_grad(t) and t.is_leaf else t, tree)


def _following(tensor: Tensor) -> Tensor:
    """The same tensor one node later: a view, or of a sparse one, which has none, a copy."""
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def _edge(tensor: Tensor) -> Any:
    """Node and number of the result that the tensor is of its graph; torch's own way makes a view of a leaf."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
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
    """Leaves that `outputs` depend on other than through those `excluded`; whether they depend on older nodes too.

    A node is older if its number is below `first`, because torch numbers the nodes of a thread as they are recorded.
    Two kinds of older nodes belong to the evaluation all the same. One is a weight held for the solve, whose age is the
    number from which on its own nodes count. The other is a weight's cast that autocast keeps, a "ToCopyBackward0".
    """
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
        elif edge[0]._sequence_nr() < first and edge[0].name() != "ToCopyBackward0":
            hides = True
        else:
            edges.extend((behind, first) for behind in edge[0].next_functions)
    return found, hides


def detached(tree: Any, requires_grad: bool = False) -> Any:
    """`tree` with its tensors cut from their graphs, as fresh leaves where `requires_grad`."""
    found = pytree.tree_map(torch.Tensor.detach, tree)
    if requires_grad:
        _states.update((leaf.requires_grad_(), None) for leaf in pytree.tree_leaves(found))
    return found
