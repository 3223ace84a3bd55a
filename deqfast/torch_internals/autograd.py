"""Graphs of torch.autograd: products with a recorded evaluation, the leaves on which it depends, and hooks.

`tests/test_torch_internals.py` tests each assumption about torch in this module.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge, saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from . import pytree
from .weights import held_nodes, modules_of, present_hooks

Gradients = list[Tensor | None]


_states = WeakTensorKeyDictionary()
"""Leaves that replace the state of an evaluation, so that no gradient leaves a block within another block's cell."""


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
    """Return the tensor; raise TypeError if it is nested and strided, which torch's custom functions do not take."""
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
        ctx.set_materialize_grads(False)  # a closed valve passes None; zeros in its place would begin a solve
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None if ctx.valve.is_closed else grads[0]


def present_autocast(device: str) -> Callable[[], AbstractContextManager[None]]:
    """Context with the present autocast state, for a backward pass."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, enabled=enabled, dtype=dtype)


def vjp(
    outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], retain_graph: bool = True, **options: Any
) -> Gradients:
    """Vector-Jacobian product, None for an unused input. Hooks of inputs are not called: it is only a part."""
    attached = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if not attached:
        return [None] * len(inputs)
    values, vectors = map(list, zip(*attached, strict=True))
    hooks = [tensor._backward_hooks for tensor in inputs if tensor._backward_hooks]
    with _no_hooks(hooks) if hooks else nullcontext():
        if options or any(y.shape != g.shape for y, g in zip(values, vectors, strict=True)):
            options |= {"retain_graph": retain_graph, "allow_unused": True}
            return list(torch.autograd.grad(values, inputs, vectors, **options))
        # Skips checks that take as long as a product of a small cell.
        arguments = tuple(values), tuple(vectors), retain_graph, False, tuple(inputs), True
        return list(_engine_run_backward(*arguments, accumulate_grad=False))


def multiplier(outputs: list[Tensor], inputs: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor | None]]:
    """``product`` of these outputs and inputs, as a function of the gradients: for many products, one after another."""
    alike = all([y.requires_grad and y.shape == z.shape for y, z in zip(outputs, inputs, strict=True)])
    if not alike or any([z._backward_hooks for z in inputs]):
        return partial(product, outputs, inputs)
    values, leaves, dtypes = tuple(outputs), tuple(inputs), [y.dtype for y in outputs]

    def multiply(grads: list[Tensor]) -> Sequence[Tensor | None]:
        vectors = tuple([g if g.dtype is dtype else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)])
        before, _thread.multiplies = _thread.multiplies, True
        try:
            return _engine_run_backward(values, vectors, True, False, leaves, True, accumulate_grad=False)
        finally:
            _thread.multiplies = before

    return multiply


def product(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], **options: Any) -> Gradients:
    """``vjp`` in a graph recorded ``for_products``: one of several products, which hooks of modules do not see."""
    with _finds("multiplies"):
        return vjp(outputs, inputs, grads, **options)


@contextmanager
def for_products(cell: Any) -> Iterator[None]:
    """Context that records a graph for several products, and then a gradient.

    Backward hooks of the cell's modules run only for the gradient. Saved tensors bypass the surrounding hooks, because
    those of a checkpoint would compute them again for each product. Without such hooks none are set, because torch.func
    in a cell refuses them.
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


class _ThreadState(threading.local):
    takes_part = False  # this thread computes a part of a tensor's gradient, which the tensor's hooks must not see
    multiplies = False  # this thread computes a product for a gradient, which hooks of modules must not see


_thread, _hooks_lock = _ThreadState(), threading.Lock()


@contextmanager
def _finds(what: str) -> Iterator[None]:
    """Context in which this thread computes `what`; hooks that must not see it are not called."""
    before = getattr(_thread, what)
    setattr(_thread, what, True)
    try:
        yield
    finally:
        setattr(_thread, what, before)


class _Hook:
    """Wrapper of a user's hook, not called by a thread that computes `what`. A copy of it is the user's own hook."""

    def __init__(self, hook: Callable[..., Any], what: str) -> None:
        self.hook, self.what = hook, what
        self.contexts = 0  # number of contexts that need it

    def __call__(self, *arguments: Any) -> Any:
        return None if getattr(_thread, self.what) else self.hook(*arguments)

    def __reduce__(self) -> Any:
        return _itself, (self.hook,)


def _itself(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


@contextmanager
def _waiting(dicts: Iterable[Any], what: str) -> Iterator[None]:
    """Context in which the hooks of these dicts are ``_Hook``s. The last of several contexts restores the originals."""
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
    """Tensor and its version, for ``kept``. Without its graph, to avoid a reference cycle."""
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
    """Return whether the backward pass of this thread keeps its graph (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def not_leaves(tree: Any) -> Any:
    """Views in place of leaves: FlopCounterMode fails if ``autograd.grad`` meets a module's input that is a leaf."""
    if isinstance(tree, Tensor):
        return _following(tree) if tree.requires_grad and tree.is_leaf else tree
    return pytree.tree_map(lambda t: _following(t) if _requires_grad(t) and t.is_leaf else t, tree)


def with_nodes(tree: Any) -> Any:
    """The tree with a node of its own for each tensor that requires a gradient."""
    if isinstance(tree, Tensor) and tree.layout == torch.strided and not tree.is_nested:
        return tree.view_as(tree) if tree.requires_grad else tree
    return pytree.tree_map(lambda t: _following(_check_sized(t)) if _requires_grad(t) else t, tree)


def _following(tensor: Tensor) -> Tensor:
    """The same tensor one node later: a view, or a copy of a sparse tensor, which has no views."""
    return tensor.view_as(tensor) if tensor.layout == torch.strided else tensor.clone()


def edge_of(tensor: Tensor) -> Any:
    """Node of the tensor, and the tensor's number among its results. torch's public function adds a view to leaves."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    if tensor.layout == torch.strided:
        return tuple(get_gradient_edge(tensor)[:2])
    with torch.enable_grad():
        node: Any = tensor.clone().grad_fn
    return node.next_functions[0]


def requiring_grad(tree: Any) -> list[Tensor]:
    """The tensors of a tree that require a gradient."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    return [leaf for leaf in pytree.tree_leaves(tree) if _requires_grad(leaf)]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class Graph:
    """Graph of an evaluation, without its tensors.

    A node is older than the evaluation if its number is below `first`, because torch numbers the nodes of a thread as
    they are recorded. Two kinds of older nodes still belong to the evaluation. One is a weight held for the solve; its
    `age` is the number from which on its nodes count. The other is a weight's cast kept by autocast, a
    "ToCopyBackward0". Nothing is searched beyond the `excluded` tensors.
    """

    def __init__(self, outputs: Iterable[Tensor], excluded: Iterable[Tensor], first: int) -> None:
        self.ends, self.excluded = edges_of(outputs), edges_of(excluded)
        self.first, self.ages = first, held_nodes()

    @cached_property
    def behind(self) -> tuple[list[Tensor], bool]:
        """Leaves that the outputs depend on, except through those excluded; and whether they depend on older nodes."""
        edges, seen = [(edge, self.first) for edge in self.ends], set(self.excluded)
        leaves, hides = [], False
        while edges:
            edge, first = edges.pop()
            if edge in seen or edge[0] is None:
                continue
            seen.add(edge)
            first = self.ages.get(edge[0], first)
            if edge[0].name() == "torch::autograd::AccumulateGrad":
                if edge[0].variable not in _states:
                    leaves.append(edge[0].variable)
            elif edge[0]._sequence_nr() < first and edge[0].name() != "ToCopyBackward0":
                hides = True
            else:
                edges.extend([(behind, first) for behind in edge[0].next_functions])
        return leaves, hides


def edges_of(tensors: Iterable[Tensor]) -> list[Any]:
    """``edge_of`` for those of the tensors that require a gradient."""
    return [edge_of(t) if t.grad_fn is None else (t.grad_fn, t.output_nr) for t in tensors if t.requires_grad]


def detached(tree: Any, requires_grad: bool = False) -> Any:
    """`tree` with its tensors cut from their graphs, with `requires_grad` as fresh leaves."""
    constant = tree.detach() if isinstance(tree, Tensor) else pytree.tree_map(torch.Tensor.detach, tree)
    if requires_grad:
        _states.update((leaf.requires_grad_(), None) for leaf in pytree.tree_leaves(constant))
    return constant
