"""Captured solves of a layer with torchdeq's interface, whose func is a new function in every call.

A capture fixes the memory of what func reads. Before a replay, what func reads now is copied into that memory.
"""

from __future__ import annotations

import dis
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.plan import Plan, run
from ..engine.runners.cuda_graph import MAX_GRAPHS, Graphs
from ..solution import Solution, Status
from ..state.packing import Packing
from ..state.rows import per_row
from ..torch_internals import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Reads:
    """What a function reads: through its closure, its defaults, its globals, and the objects and modules among these.

    Of globals, and of an object's attributes, those count whose names the code reads and does not set, and all tensors
    of modules. Functions of other files are known by their identity.

    Attributes:
        key: what is not a tensor. Functions with equal keys do the same work with other tensors.
        modules: the modules that it reaches, whose parameters and buffers stay where they are.
        places: (owner, name) of contents with tensors. The owner is a cell of a closure or a dict.
        held: objects that the key knows by their identity.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.key: list[Any] = []
        self.modules: list[nn.Module] = []
        self.places: list[tuple[CellType | dict[str, Any], str]] = []
        self.held: list[Any] = []
        self._names: frozenset[str] = frozenset()  # in the code of all functions
        self._seen: set[int] = set()
        self._objects: list[Any] = []  # left to add, when the names are known
        self._add(function)
        while self._objects:
            self._add_object(self._objects.pop())

    def _add(self, value: Any) -> None:
        """Add what a function, a module or another object reads."""
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        if isinstance(value, _PLAIN):
            self.key.append((type(value), repr(value)))  # 0.0 is not -0.0, and NaN is NaN
        elif isinstance(value, MethodType):
            self._add(value.__func__)
            self._add(value.__self__)
        elif isinstance(value, FunctionType):
            self.key.append(value.__code__)
            if is_new:
                self._add_function(value)
        else:
            self.key.append(id(value))
            self.held.append(value)
            if is_new and not isinstance(value, (type, ModuleType, Tensor)):
                self._objects.append(value)
                self.modules += [value] * isinstance(value, nn.Module)

    def _add_object(self, value: Any) -> None:
        """Add what an object holds under the names in the code, and all tensors of a module's."""
        if not isinstance(value, nn.Module):
            held: dict[str, Any] = getattr(value, "__dict__", {})
            for name in sorted(self._names & held.keys()):
                self._add_content(held, name, held[name])
            return
        for module in value.modules():
            forward = getattr(type(module).forward, "__code__", None)
            own = _names_in(forward) if forward else frozenset()
            for name, content in vars(module).items():
                if name[0] == "_":  # of torch: parameters, buffers, submodules and hooks
                    continue
                if name in own or name in self._names or _has_tensors(content):
                    self._add_content(vars(module), name, content)

    def _add_function(self, function: FunctionType) -> None:
        names = _names_in(function.__code__)
        self._names |= names
        for content in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            for leaf in pytree.tree_leaves(content):
                self._add(leaf)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # nothing is assigned yet
                self._add_content(cell, "cell_contents", cell.cell_contents)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, FunctionType) and value.__globals__ is not function.__globals__:
                self.key.append(id(value))
                self.held.append(value)
            elif not isinstance(value, (type, ModuleType, BuiltinFunctionType)):
                self._add_content(function.__globals__, name, value)

    def _add_content(self, owner: CellType | dict[str, Any], name: str, content: Any) -> None:
        if _is_plain(content):  # the usual case, a setting of a module
            self.key.append((name, type(content), repr(content)))
            return
        leaves, spec = pytree.tree_flatten(content)
        self.key.append((name, str(spec)))
        self.places += [(owner, name)] * _has_tensors(leaves)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._add(leaf)

    def swap(self, values: list[Any] | None = None) -> list[Any]:
        """Contents of the places, which get these `values`, if given."""
        before = [owner.cell_contents if isinstance(owner, CellType) else owner[name] for owner, name in self.places]
        for (owner, name), value in zip(self.places, values or (), strict=False):
            if isinstance(owner, CellType):
                owner.cell_contents = value
            else:
                owner[name] = value
        return before


def _is_plain(content: Any) -> bool:
    kind = type(content)
    return kind in _PLAIN or (kind is tuple and all([type(entry) in _PLAIN for entry in content]))


def _has_tensors(content: Any) -> bool:
    return not _is_plain(content) and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(content))


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a code, and functions that it makes, read and do not set."""
    steps = list(dis.get_instructions(code))
    read, stored = ({step.argval for step in steps if step.opname.startswith(kind)} for kind in ("LOAD_", "STORE_"))
    names = (read - stored) & {*code.co_names}
    return frozenset(names.union(*(_names_in(const) for const in code.co_consts if isinstance(const, CodeType))))


class Calls(nn.Module):
    """Cell of the calls with equal keys; x: the x of the plan, and the contents of the places."""

    def __init__(self, reads: Reads, relaxation: float) -> None:
        super().__init__()
        self.reached, self.held, self.relaxation = nn.ModuleList(reads.modules), reads.held, relaxation
        self.present: Any = None  # the plan's cell and what it reads, during a call

    def forward(self, z: Any, x: Any) -> Any:
        (cell, reads), tau = self.present, self.relaxation
        before = reads.swap(x[1])
        try:
            value = cell(z, x[0])
        finally:
            reads.swap(before)
        return value if tau == 1.0 else pytree.tree_map(lambda y, z: tau * y + (1 - tau) * z, value, z)


class Captures:
    """Captured solves of a layer, which is pickled and copied without them."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Calls, Graphs]] = {}
        self._alone = threading.RLock()

    def __reduce__(self) -> tuple[type[Captures], tuple[()]]:
        return Captures, ()

    def solve(self, plan: Plan, relaxation: float, ends_in_f: bool) -> tuple[Any, Solution]:
        """The value that torchdeq's solver returns, f at the best iterate or the iterate itself; and the Solution."""
        reads = Reads(plan.cell)
        key, x = (*reads.key, relaxation), (plan.x, reads.swap())
        with self._alone, torch.no_grad():
            if key not in self._calls:
                while len(self._calls) >= MAX_GRAPHS:
                    self._calls.pop(next(iter(self._calls)))
                calls = Calls(reads, relaxation)
                self._calls[key] = calls, Graphs(calls)
            calls, graphs = self._calls[key]
            calls.present = plan.cell, reads
            try:
                solution = run(replace(plan, cell=calls, x=x, graphs=graphs))
                values = Packing(plan.z0).check_value(calls(solution.value, x)) if ends_in_f else []
            finally:
                calls.present = None  # the closure would keep the graph of this training step
        if not ends_in_f:
            return solution.value, solution
        leaves, spec = pytree.tree_flatten(solution.value)
        broken = solution.status == Status.NONFINITE
        kept = [torch.where(per_row(broken, z), z, y.to(z.dtype)) for y, z in zip(values, leaves, strict=True)]
        return pytree.tree_unflatten(kept, spec), solution
