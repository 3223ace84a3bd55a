"""Weights that are computed from parameters, and kept for one solve.

``torch.nn.utils.parametrize`` computes a weight whenever it is read. A cell reads it at each evaluation, and spectral
norm in training then returns another weight each time. torch's own ``parametrize.cached`` keeps the first value for
every thread, which in a solve would have no graph. Here each thread keeps its own value, with a graph.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from . import pytree
from .dynamo import is_tracing, outside_exports
from .transforms import in_backward


def tensors_of(cell: Callable[..., Any]) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, each submodule listed once, a tied tensor under each of its names.

    Another callable has none. ``torch.func.functional_call`` does not restore what is swapped twice in one submodule.
    """
    tensors: dict[str, Tensor] = {}
    for path, module in cell.named_modules() if isinstance(cell, nn.Module) else ():
        tensors.update(module.named_parameters(path, recurse=False, remove_duplicate=False))
        tensors.update(module.named_buffers(path, recurse=False, remove_duplicate=False))
    return tensors


@dataclass
class _Held:
    """Value kept for one module that computes weights."""

    with_graph: bool  # whether the value is computed with a graph
    hooks: Any  # the hooks of saved tensors when the solve began
    value: Any = None  # a tensor or a tuple of them; None until it has been read
    first_node: int = 0  # autograd's number of the first node of the value's own graph


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.held: dict[nn.Module, _Held] = {}


_thread = _ThreadState()


def _value(module: nn.Module, compute: Callable[[], Any]) -> Any:
    """Value that this thread keeps for the module, computed at the first call; a fresh one if it keeps none."""
    held = _thread.held.get(module)
    if held is None or _in_own_checkpoint(held):
        return compute()
    if held.value is None:
        with outside_exports(torch.set_grad_enabled(held.with_graph)):
            held.first_node = next_node() if held.with_graph else 0
            held.value = compute()
    return held.value


class OncePerSolve(nn.Module):
    """Module whose value, a tensor or a tuple of them, is computed once per solve; a subclass defines ``compute``."""

    def compute(self) -> Any:
        """Value for the present parameters."""
        raise NotImplementedError

    def forward(self) -> Any:
        return _value(self, self.compute)


class _Holdable(ParametrizationList):
    """Class that a ParametrizationList has while any thread keeps its value; it returns the thread's value.

    A hook of the list could not prevent the computation, and a `forward` of the object would be copied with it.
    """

    def forward(self) -> Tensor:
        # Not by super(): another thread may reset the class meanwhile.
        weight: Tensor = _value(self, lambda: ParametrizationList.forward(self))
        return weight

    def _get_name(self) -> str:
        return ParametrizationList.__name__


_LISTS = (ParametrizationList, _Holdable)
_lock = threading.Lock()
_holders: Counter[nn.Module] = Counter()  # number of contexts that hold a list


@contextmanager
def _holdable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which those of the modules that are ParametrizationLists are ``_Holdable``."""
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    if not lists:
        yield
        return
    with _lock:
        for module in lists:
            _holders[module] += 1
            module.__class__ = _Holdable
    try:
        yield
    finally:
        with _lock:
            for module in lists:
                _holders[module] -= 1
                if not _holders[module]:
                    del _holders[module]
                    module.__class__ = ParametrizationList


NOTHING = nullcontext()


def hold_weights(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Compute the weights of these modules of a cell once, with a graph if one is recorded, and keep them.

    A value that the thread already keeps is not computed again. Inside of the cell's own activation checkpoint the
    weights are computed again, as in the backward pass. Weights that hooks load (offload, FSDP2) are not kept.
    """
    kinds: Any = map(type, modules)
    return _hold(modules) if any(map(_computes, kinds)) else NOTHING


@functools.cache
def _computes(kind: Any) -> bool:
    """Return whether modules of this class compute weights."""
    return kind in _LISTS or issubclass(kind, OncePerSolve)


@contextmanager
def _hold(modules: Sequence[nn.Module]) -> Iterator[None]:
    lists = [entry for entry in _parametrised(modules) if _can_be_held(entry[2])]
    others = [module for module in modules if isinstance(module, OncePerSolve) and _can_be_held(module)]
    if not (lists or others):
        yield
        return
    computing = [*(weight for *_, weight in lists), *others]
    with _holdable(computing):
        try:
            for module, name, weight in lists:
                _thread.held[weight] = _Held(torch.is_grad_enabled(), present_hooks())
                original: Any = weight.original if weight.is_tensor else weight.original0  # replicas have no parameters
                device = original.device.type
                with outside_exports(torch.autocast(device, enabled=False)):  # the cell may run without autocast
                    getattr(module, name)  # to read it computes it
            for once in others:
                _thread.held[once] = _Held(torch.is_grad_enabled(), present_hooks())
                once()
            yield
        finally:
            for module in computing:
                _thread.held.pop(module, None)


def _can_be_held(module: nn.Module) -> bool:
    """Return whether this thread does not keep the value yet, and the whole tensors are there.

    Offloaded ones are on meta. FSDP2 gathers the shards of its units at each evaluation.
    """
    tensors = chain(module.parameters(), module.buffers())
    is_there = [tensor.device.type != "meta" and not hasattr(tensor, "placements") for tensor in tensors]
    return module not in _thread.held and all(is_there)


def as_now(cell: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the cell with the weights kept now and, in a backward pass, with its present tensors.

    In the backward pass the tensors of a ``functional_call`` are gone. FSDP2 itself replaces shards by whole weights.
    """
    weights = dict(_thread.held)
    tensors = {name: tensor for name, tensor in tensors_of(cell).items() if not hasattr(tensor, "placements")}

    def call(z: Any, x: Any) -> Any:
        present = tensors_of(cell) if in_backward() else tensors
        swapped = {name: tensor for name, tensor in tensors.items() if present.get(name) is not tensor}
        with holding(weights):
            if not swapped:
                return cell(z, x)
            assert isinstance(cell, nn.Module)  # only a module has tensors
            return torch.func.functional_call(cell, swapped, (z, x), tie_weights=False)

    return call


def shards_weights(cell: Any) -> bool:
    """Return whether modules of the cell are units of FSDP2, whose weights are other tensors in a backward pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules_of(cell))


@contextmanager
def holding(weights: dict[nn.Module, _Held]) -> Iterator[None]:
    """Keep these weights and no others, also in a checkpoint that has begun since."""
    before = _thread.held
    _thread.held = {module: replace(held, hooks=present_hooks()) for module, held in weights.items()}
    try:
        with _holdable(weights):
            yield
    finally:
        _thread.held = before


def is_cached(cell: Callable[..., Any]) -> bool:
    """Return whether ``parametrize.cached`` keeps the first values of weights of `cell`."""
    return bool(parametrize._cache_enabled and _parametrised(modules_of(cell)))


def behind_held() -> set[Tensor]:
    """Return the parameters and buffers from which the values that this thread keeps are computed."""
    return {tensor for module in _thread.held for tensor in chain(module.parameters(), module.buffers())}


def held_nodes() -> dict[Node, int]:
    """Return the last node of each tensor that this thread keeps, and the number of the first that belongs to it."""
    if not _thread.held:
        return {}
    held = [(tensor, held.first_node) for held in _thread.held.values() for tensor in pytree.tree_leaves(held.value)]
    return {get_gradient_edge(t).node: first for t, first in held if isinstance(t, Tensor) and t.requires_grad}


def next_node() -> int:
    """Return the number that this thread gives to the next node that it records."""
    return int(torch.autograd._get_sequence_nr())


def modules_of(cell: Any) -> list[nn.Module]:
    """Return the modules of a cell, beginning with itself; none of another callable."""
    return list(cell.modules()) if isinstance(cell, nn.Module) else []


def attribute(cell: Any, name: str) -> Any:
    """Return this attribute of a cell, or None. (To find that a module has none, torch formats an error.)"""
    kind: Any = type(cell)
    if isinstance(cell, nn.Module) and kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, name):
        own = cell.__dict__
        if not (name in own or name in own["_modules"] or name in own["_parameters"] or name in own["_buffers"]):
            return None
    return getattr(cell, name, None)


def _parametrised(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, ParametrizationList]]:
    """Module, name and parametrisations of each tensor. Subclasses of torch's list are skipped."""
    if not any(type(module) in _LISTS for module in modules):  # this test is faster than finding their owners
        return []
    entries: list[tuple[nn.Module, str, Any]] = []
    for module in filter(parametrize.is_parametrized, modules):
        lists: Any = module.parametrizations
        entries += [(module, name, weight) for name, weight in lists.items() if type(weight) in _LISTS]
    return entries


def present_hooks() -> Any:
    """Return the innermost hooks of saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public function for this


def _in_own_checkpoint(held: _Held) -> bool:
    """Return whether an activation checkpoint has begun since the value was computed."""
    if is_tracing():
        return False
    hooks = present_hooks()
    return bool(hooks) and hooks != held.hooks and hooks[0].__module__ == "torch.utils.checkpoint"


def check_loaded(modules: Sequence[nn.Module], z0: Any) -> None:
    """Raise ValueError if a weight or buffer of these modules of a cell is on meta and z0 is not.

    torch.nn.functional.linear and conv2d then return memory that nothing has written to. If any module has a hook or a
    forward of its own, as with accelerate's offload, that may load the weights, and nothing is checked.
    """
    on_meta = [
        name
        for module in modules
        for name, weight in (*module._parameters.items(), *module._buffers.items())
        if weight is not None and weight.is_meta
    ]
    if not on_meta or any("forward" in vars(module) or module._forward_pre_hooks for module in modules):
        return
    for leaf in pytree.tree_leaves(z0):
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            raise ValueError(
                f"weights and buffers of the cell must be on the device of z0, {leaf.device}, got {on_meta[0]} on meta"
            )


@contextmanager
def undone(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Context that restores the modules' buffers, and torch's random state on the CPU and this device."""
    buffers = [(module, *named) for module in modules for named in module.named_buffers(recurse=False)]
    buffers = [entry for entry in buffers if entry[2].device.type != "meta"]  # offloaded: its hooks load a copy
    before = [buffer.clone() for *_, buffer in buffers]
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        for (module, name, buffer), value in zip(buffers, before, strict=True):
            setattr(module, name, buffer)  # the cell may have replaced it
            if not torch.equal(buffer, value):
                buffer.copy_(value)
