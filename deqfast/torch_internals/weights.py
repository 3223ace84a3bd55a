"""Parametrised weights, held for the length of a solve.

``torch.nn.utils.parametrize`` computes a weight anew whenever it is read: at each evaluation of a cell, with spectral
norm in training as another weight each time. torch's own ``parametrize.cached`` keeps what is read first, which in a
solve would be a value without a graph, and keeps it for every thread; here each thread holds its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from .dynamo import is_tracing, outside_exports
from .transforms import in_backward


def tensors_of(cell: Callable[..., Any]) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, those of each submodule once; none of another callable.

    For ``torch.func.functional_call``, which does not put back what it swaps under two names of one submodule.
    """
    found: dict[str, Tensor] = {}
    for path, module in cell.named_modules() if isinstance(cell, nn.Module) else ():
        found.update(module.named_parameters(path, recurse=False, remove_duplicate=False))
        found.update(module.named_buffers(path, recurse=False, remove_duplicate=False))
    return found


@dataclass
class _Held:
    """Parametrised tensor that is held.

    Attributes:
        with_graph: whether its value is computed with a graph.
        hooks: those of saved tensors when it began to be held.
        value: None until it has been read.
        age: number from which on the nodes of its own graph count.
    """

    with_graph: bool
    hooks: Any
    value: Tensor | None = None
    age: int = 0


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.held: dict[ParametrizationList, _Held] = {}


_thread = _OfThread()


class _Holdable(ParametrizationList):
    """ParametrizationList that gives what its thread holds. An instance stays one: other threads may be using it."""

    def forward(self) -> Tensor:
        held = _thread.held.get(self)
        if held is None or _in_own_checkpoint(held):
            return super().forward()
        if held.value is None:
            with outside_exports(torch.set_grad_enabled(held.with_graph)):
                held.age = next_node() if held.with_graph else 0
                held.value = super().forward()
        return held.value

    def _get_name(self) -> str:
        return ParametrizationList.__name__


@contextmanager
def hold_weights(cell: Callable[..., Any]) -> Iterator[None]:
    """Compute the parametrised tensors of the modules of `cell` once, with a graph if one is recorded, and hold them.

    What the thread holds already stays as it is. Inside an activation checkpoint of the cell's own they are computed
    anew, as they will be in the backward pass.
    """
    found = [found for found in _parametrised(cell) if found[2] not in _thread.held]
    try:
        for module, name, weight in found:
            weight.__class__ = _Holdable
            _thread.held[weight] = _Held(torch.is_grad_enabled(), present_hooks())
            original: Any = weight.original if weight.is_tensor else weight.original0  # a replica lists no parameters
            device = original.device.type
            with outside_exports(torch.autocast(device, enabled=False)):  # the cell may be outside of it
                getattr(module, name)
        yield
    finally:
        for *_, weight in found:
            _thread.held.pop(weight, None)


def as_now(cell: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The cell with the held weights of now and, in a backward pass, with the tensors of now: those of a
    ``functional_call`` are gone by then. FSDP2 puts what it gathers in the place of shards by itself."""
    weights = dict(_thread.held)
    tensors = {name: tensor for name, tensor in tensors_of(cell).items() if not hasattr(tensor, "placements")}

    def call(z: Any, x: Any) -> Any:
        present = tensors_of(cell) if in_backward() else tensors
        swapped = {name: tensor for name, tensor in tensors.items() if present.get(name) is not tensor}
        with holding(weights):
            if not swapped:
                return cell(z, x)
            assert isinstance(cell, nn.Module)  # no other has tensors
            return torch.func.functional_call(cell, swapped, (z, x), tie_weights=False)

    return call


def shards_weights(cell: Any) -> bool:
    """Return whether modules of the cell are units of FSDP2, whose weights are others in a backward pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        fsdp is not None and isinstance(cell, nn.Module) and any(isinstance(m, fsdp.FSDPModule) for m in cell.modules())
    )


@contextmanager
def holding(weights: dict[ParametrizationList, _Held]) -> Iterator[None]:
    """Hold these and no others, also in a checkpoint that has begun since; nothing where they are none."""
    before = _thread.held
    _thread.held = {weight: replace(held, hooks=present_hooks()) for weight, held in weights.items()}
    try:
        yield
    finally:
        _thread.held = before


def is_cached(cell: Callable[..., Any]) -> bool:
    """Return whether ``parametrize.cached`` keeps what weights of `cell` are when they are read first."""
    return bool(parametrize._cache_enabled and _parametrised(cell))


def check_not_cached(cell: nn.Module) -> None:
    """Raise RuntimeError where ``parametrize.cached`` keeps a weight of `cell`, which a graph would never see again."""
    if is_cached(cell):
        raise RuntimeError("cuda_graph cannot be used under parametrize.cached() with a cell of parametrised weights")


def held_nodes() -> dict[Node, int]:
    """Last node of each tensor that this thread holds, and the number from which on nodes belong to it."""
    held = [(held.value, held.age) for held in _thread.held.values() if held.value is not None]
    return {get_gradient_edge(value).node: age for value, age in held if value.requires_grad}


def next_node() -> int:
    """Number that no node has which this thread has recorded before, where gradients are recorded."""
    node: Any = get_gradient_edge(torch.zeros(0, requires_grad=True).view(0)).node
    return node._sequence_nr()


def _parametrised(cell: Any) -> list[tuple[nn.Module, str, ParametrizationList]]:
    """Module, name and parametrisations of each tensor. Subclasses of torch's list are left to themselves."""
    found = []
    for module in cell.modules() if isinstance(cell, nn.Module) else ():
        lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
        found += [(module, name, weight) for name, weight in lists.items()]
    return [entry for entry in found if type(entry[2]) in (ParametrizationList, _Holdable)]


def present_hooks() -> Any:
    """The innermost hooks of saved tensors that are set, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # there is no public way to ask


def _in_own_checkpoint(held: _Held) -> bool:
    """Return whether an activation checkpoint has begun since the tensor is held."""
    if is_tracing():
        return False
    hooks = present_hooks()
    return bool(hooks) and hooks != held.hooks and hooks[0].__module__ == "torch.utils.checkpoint"
