"""Blocks in compiled regions: a whole solve is one op of the graph.

``torch.compile`` traces tensors, but not the choices of a solve, such as the number of evaluations or the kernel. A
traced block therefore becomes the op ``solve_block``, which runs the block uncompiled, and its gradient becomes
``pull_block``. The op's arguments are the tensors that the block reads: x, z0, `groups`, and the parameters and buffers
of the cell. The rest, such as solver and hooks, is found in the live block by its number.

An op returns only tensors. The last one of ``solve_block`` is therefore a ticket, which is saved for the backward pass.
While it exists, the graph that autograd has recorded in ``solve_block`` is kept for ``pull_block``.
"""

from __future__ import annotations

import ast
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.refusals import Refusals, check_served
from ..gradients import Unrolled
from ..gradients.base import depends_on_others
from ..ops.registry import library
from ..solution import Solution
from ..state.groups import Grouping, Groups
from ..state.packing import rows_dtype
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, keeps_graph, vjp
from ..torch_internals.dispatch import as_outside, without_modes
from ..torch_internals.dynamo import constant_in_traces, untraced
from ..torch_internals.transforms import in_forward_mode, in_reverse_mode, in_torch_func
from ..torch_internals.weights import holding, tensors_of

REFUSES: Refusals = {
    "trace of a Solution": "a graph cannot know its length: compile without it",
    "a gradient of torch.func": "it would miss the block's part: leave the gradient out of compiled code, as "
    "torch.compiler.disable(torch.func.grad(f))",
}
Block = Any
"""A ``DEQBlock``, whose module imports this one."""
_numbers = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
_locks: weakref.WeakKeyDictionary[Block, threading.RLock] = weakref.WeakKeyDictionary()  # of their tensors
_recorded: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by ticket: values with their graph, its leaves


def new_number(block: Block) -> Tensor:
    """Number by which compiled code finds the block while it exists; unique among all blocks.

    It is a tensor, because code would be compiled again for each int.
    """
    number = next(_numbers)
    _live[number] = block
    with without_modes():  # in a mode it would have no value to read later
        return torch.tensor(number, device="cpu")


def solve_traced(block: Block, x: Any, z0: Any, return_solution: bool, groups: Grouping) -> Any:
    """``DEQBlock.forward`` in a region that ``torch.compile`` traces.

    Within ``vmap``, ``jvp`` and forward-mode AD the block runs uncompiled, between two graphs.

    Raises:
        ValueError: the call is within a gradient of torch.func, or has trace=True and `return_solution`.
        RuntimeError: torch.export traces with strict=True.
        TypeError: x or z0 holds anything other than tensors, None, truth values and strings in dicts, lists and tuples.
    """
    if _is_transformed():
        value, solution = untraced(block._run, x, z0, groups)
        return (value, solution) if return_solution else value
    check_served("torch.compile", REFUSES, ["trace of a Solution"] * (block.trace and return_solution))
    groups = block.groups if groups is None else groups
    if not isinstance(block.adjoint, Unrolled):
        z0 = detached(z0)
    cell = block.cell if isinstance(block.cell, nn.Module) else None
    parameters = dict(cell.named_parameters()) if cell is not None else {}
    buffers = dict(cell.named_buffers()) if cell is not None else {}
    index = groups.index if isinstance(groups, Groups) else groups
    tensors: list[Tensor] = []
    call = _numbered((x, z0, index, torch.is_grad_enabled(), parameters, buffers), tensors)  # fields of ``_Call``
    described = repr((call, [isinstance(tensor, nn.Parameter) for tensor in tensors]))
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    device = pytree.tree_leaves(z0)[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if any(wanted):
        results = _Solve.apply(block._number, described, wanted, autocast, *tensors)
    else:
        results = torch.ops.deqfast.solve_block(tensors[0], block._number, described, tensors, wanted, autocast)[:-1]
    *values, status, iterations, relative, absolute, calls = results
    value = pytree.tree_unflatten(values, pytree.tree_structure(z0))
    if not return_solution:
        return value
    solver = block.current_solver
    residual = absolute if solver.is_absolute else relative
    return value, Solution(detached(value), status, iterations, residual, relative, absolute, calls[0], calls[1])


@constant_in_traces
def _is_transformed() -> bool:
    """Return whether the trace is within torch.func or forward-mode AD.

    Raises ValueError in reverse mode, and RuntimeError in a strict export, whose program would hold a block's number.

    Dynamo runs this function uncompiled, and the error ends the trace. If dynamo traced the error, it would then
    compile the calls inside of the transform, which fails in torch.
    """
    if torch.compiler.is_exporting():
        raise RuntimeError("deqfast: torch.export serves blocks with strict=False and in evaluation mode: call eval()")
    check_served("torch.compile", REFUSES, ["a gradient of torch.func"] * in_reverse_mode())
    return in_torch_func() or in_forward_mode()


@dataclass(frozen=True)
class _Call:
    """Call of a block, with the tensors that the op was given."""

    x: Any
    z0: Any
    groups: Tensor | str | None
    records: bool  # whether a graph is recorded, for a gradient
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, described: str, tensors: list[Tensor]) -> _Call:
        """Return the described call of these tensors."""
        leaves, spec, _ = _parsed(described)
        return cls(*pytree.tree_unflatten([tensors[leaf] if type(leaf) is int else leaf for leaf in leaves], spec))


# An op takes tensors, numbers, strings and lists, but no trees. A record outside of the graph would be lost when torch
# keeps compiled code on disk. Dynamo traces ``repr`` of a tree, but not ``treespec_dumps`` of its structure.
def _numbered(tree: Any, tensors: list[Tensor]) -> Any:
    """The tree with positions in place of its tensors, which are appended to `tensors`. It holds no other integers."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return len(tensors) - 1
    if type(tree) is dict:
        return {key: _numbered(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_numbered(value, tensors) for value in tree])
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    allowed = "tensors, None, truth values and strings in dicts, lists and tuples"
    raise TypeError(f"under torch.compile x and z0 must hold {allowed}, got {type(tree).__name__}")


@functools.lru_cache(maxsize=1024)
def _parsed(described: str) -> tuple[list[Any], pytree.TreeSpec, list[bool]]:
    """Leaves and structure of a numbered call, and which of its tensors are parameters."""
    call, are_parameters = ast.literal_eval(described)
    return *pytree.tree_flatten(call), are_parameters


class _Solve(torch.autograd.Function):
    """``solve_block`` with ``pull_block`` as its backward."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, described: str, wanted: list[bool], autocast: Any, *tensors: Tensor) -> Any:
        *results, ticket = torch.ops.deqfast.solve_block(tensors[0], number, described, tensors, wanted, autocast)
        ctx.save_for_backward(ticket, *[tensor for tensor, want in zip(tensors, wanted, strict=True) if want])
        ctx.wanted, ctx.values = wanted, len(results) - 5
        ctx.mark_non_differentiable(*results[-5:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ticket, *inputs = ctx.saved_tensors
        pulled = iter(torch.ops.deqfast.pull_block(ticket, inputs, grads[: ctx.values]))
        return None, None, None, None, *[next(pulled) if want else None for want in ctx.wanted]


class _Plain(nn.Module):
    """Solve of a block, without its hooks and subclass, which are traced."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any, z0: Any, groups: Any) -> tuple[Any, Solution]:
        return self.block._run(x, z0, groups)


def _solve_block(
    first: Tensor, number: Tensor, described: str, tensors: list[Tensor], wanted: list[bool], autocast: Any
) -> list[Tensor]:
    block = _live.get(int(number))
    if block is None:
        raise RuntimeError("deqfast: the block of this compiled code no longer exists: compile the model again")
    with as_outside():
        call, leaves = _with_leaves(described, tensors, wanted)
        swapped, leaves = _swaps(block, call, leaves)
        value, solution = _run(block, call, swapped, autocast)
        ticket = torch.tensor(next(_numbers), device="cpu")
        if call.records:
            _keep(pytree.tree_leaves(value), leaves, ticket)
        return [*_results(call, value, solution), ticket]


def _with_leaves(described: str, tensors: list[Tensor], wanted: list[bool]) -> tuple[_Call, list[Tensor]]:
    """Return the call with the tensors as leaves of a new graph, and the leaves that need a gradient."""
    *_, are_parameters = _parsed(described)
    fresh = [
        nn.Parameter(tensor.detach(), want) if is_parameter else tensor.detach().requires_grad_(want)
        for tensor, want, is_parameter in zip(tensors, wanted, are_parameters, strict=True)
    ]
    return _Call.of(described, fresh), [leaf for leaf, want in zip(fresh, wanted, strict=True) if want]


def _swaps(block: Block, call: _Call, leaves: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tensors to swap into the block, by name, and all leaves. Some of the leaves are the block's own tensors.

    A tensor that the op received unchanged stays the block's own: a hook may replace it, other threads may read it.
    """
    own, named = tensors_of(block.cell), call.parameters | call.buffers
    fresh_of = {id(own[name]): tensor for name, tensor in named.items()}
    pairs = [(name, tensor, named.get(name, fresh_of[id(tensor)])) for name, tensor in own.items()]
    stays = {id(t): tensor for _, tensor, t in pairs if _is_same(tensor, t, call.records)}
    swapped = {f"block.cell.{name}": t for name, _, t in pairs if id(t) not in stays}
    return swapped, [stays.get(id(leaf), leaf) for leaf in leaves]


def _run(block: Block, call: _Call, swapped: dict[str, Tensor], autocast: torch.dtype | None) -> tuple[Any, Solution]:
    """Value and Solution of the block with these tensors in place of its own, in the modes of the traced call."""
    device = pytree.tree_leaves(call.z0)[0].device.type
    autocasts = torch.autocast(device, dtype=autocast, enabled=autocast is not None)
    torch.clear_autocast_cache()  # its casts may be of older weights; compiled code uses none
    exclusive = _locks.setdefault(block, threading.RLock()) if swapped else nullcontext()
    arguments = call.x, call.z0, call.groups
    with torch.set_grad_enabled(call.records), autocasts, holding({}), exclusive:
        return torch.func.functional_call(_Plain(block), swapped, arguments, tie_weights=False)


def _results(call: _Call, value: Any, solution: Solution) -> list[Tensor]:
    """Results of the op without its ticket."""
    pairs = zip(pytree.tree_leaves(call.z0), pytree.tree_leaves(value), strict=True)
    calls = torch.tensor([solution.evaluations, solution.sample_evaluations], device="cpu")
    values = [_like(z0, z.detach()) for z0, z in pairs]
    residuals = solution.residual_rel, solution.residual_abs
    return _apart([*values, solution.status, solution.iterations, *residuals, calls])


def _apart(results: list[Tensor], others: Sequence[Tensor] = ()) -> list[Tensor]:
    """`results`, with copies of those that share memory with others, as the results of an op may not."""
    seen, apart = {tensor.untyped_storage().data_ptr() for tensor in others}, []
    for result in results:
        apart.append(result.clone() if result.untyped_storage().data_ptr() in seen else result)
        seen.add(apart[-1].untyped_storage().data_ptr())
    return apart


def _is_same(own: Tensor, received: Tensor, records: bool) -> bool:
    """Return whether the op received the cell's own tensor; for a graph, also a leaf with the same requires_grad."""
    return own.is_set_to(received) and (not records or own.is_leaf and own.requires_grad == received.requires_grad)


def _keep(values: list[Tensor], leaves: list[Tensor], ticket: Tensor) -> None:
    """Keep the graph of the values while the ticket exists; RuntimeError if it leads to other leaves too."""
    if depends_on_others(values, leaves):
        what = "a tensor that requires a gradient and is neither in x nor a parameter of the cell"
        remedy = "Its gradient would be lost: register it, or give it to the block in x"
        raise RuntimeError(f"deqfast: under torch.compile the cell depends on {what}. {remedy}")
    if not leaves:
        return
    _recorded[int(ticket)] = values, leaves
    weakref.finalize(ticket, _recorded.pop, int(ticket), None).atexit = False


def _like(pattern: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the memory order that ``torch.empty_like(pattern)`` has, as the op has promised."""
    result = torch.empty_like(pattern)
    return tensor if tensor.stride() == result.stride() else result.copy_(tensor)


def _fake_solve_block(first: Tensor, number: Tensor, described: str, tensors: list[Tensor], *_: Any) -> list[Tensor]:
    call = _Call.of(described, tensors)
    starts = pytree.tree_leaves(call.z0)
    samples = starts[0].shape[0]
    if isinstance(call.groups, Tensor):
        samples = torch.library.get_ctx().new_dynamic_size()
    elif call.groups is not None:
        samples = torch.sym_min(samples, 1)
    state = rows_dtype(starts)
    rows = [starts[0].new_empty(samples, dtype=dtype) for dtype in (torch.int8, torch.int32, state, state)]
    host = [torch.empty(shape, dtype=torch.int64, device="cpu") for shape in ((2,), ())]
    return [torch.empty_like(z0) for z0 in starts] + rows + host


def _pull_block(ticket: Tensor, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    if int(ticket) not in _recorded:
        gone = "deqfast: the graph of a block in a compiled region is gone"
        raise RuntimeError(f"{gone}: hooks on saved tensors must keep its ticket, an integer, as it is")
    values, leaves = _recorded[int(ticket)]
    with as_outside():
        pulled = vjp(values, leaves, grads, keeps_graph())
    pairs = zip(inputs, pulled, strict=True)
    return _apart([torch.zeros_like(tensor) if grad is None else _like(tensor, grad) for tensor, grad in pairs], grads)


def _fake_pull_block(ticket: Tensor, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
    # It reads from the device, which a CUDA graph cannot.
    library.define(name + schema, tags=(torch.Tag.cudagraph_unsafe, *tags))
    library.impl(name, run, "CompositeExplicitAutograd")  # autograd works inside, as in the block without compilation
    torch.library.register_fake(f"deqfast::{name}", fake, lib=library)


# `first` is the first of the tensors: an activation checkpoint takes its device, and sees no tensor in a list.
_register(
    "solve_block",
    "(Tensor first, Tensor number, str described, Tensor[] tensors, bool[] wanted, ScalarType? autocast) -> Tensor[]",
    _solve_block,
    _fake_solve_block,
    torch.Tag.nondeterministic_seeded,  # hooks may draw a mask: from torch 2.14 on, two calls are never merged
)
_register("pull_block", "(Tensor ticket, Tensor[] inputs, Tensor[] grads) -> Tensor[]", _pull_block, _fake_pull_block)
