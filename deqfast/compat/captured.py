"""Captured solves of a layer with torchdeq's interface, whose func is a new function in every call.

A capture fixes the memory of what func reads. Before a replay, what its closure holds is copied into that memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import CellType, FunctionType, MethodType
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
    """What a function reads through its closure.

    Attributes:
        key: what is not a tensor. Functions with equal keys do the same work with other tensors.
        modules: the modules that it reaches, whose parameters and buffers stay where they are.
        places: cells of closures with tensors, or (module, name) of a tensor that is neither parameter nor buffer.
        held: objects that the key knows by their identity.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.key: list[Any] = []
        self.modules: list[nn.Module] = []
        self.places: list[CellType | tuple[nn.Module, str]] = []
        self.held: list[Any] = []
        self._add(function, set())

    def _add(self, value: Any, seen: set[int]) -> None:
        """Add what a function, a module or another object reads."""
        is_new = id(value) not in seen
        seen.add(id(value))
        if isinstance(value, _PLAIN):
            self.key.append((type(value), value))
        elif isinstance(value, MethodType):
            self._add(value.__func__, seen)
            self._add(value.__self__, seen)
        elif isinstance(value, FunctionType):
            self.key.append(value.__code__)
            for content in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self._add(content, seen)
            for cell in value.__closure__ or () if is_new else ():
                self._add_cell(cell, seen)
        else:
            self.key.append(id(value))
            self.held.append(value)
            if isinstance(value, nn.Module) and is_new:
                self.modules.append(value)
                for module in value.modules():
                    self.places += [(module, name) for name, held in vars(module).items() if isinstance(held, Tensor)]

    def _add_cell(self, cell: CellType, seen: set[int]) -> None:
        try:
            leaves, spec = pytree.tree_flatten(cell.cell_contents)
        except ValueError:  # nothing is assigned yet
            return
        self.key.append(str(spec))
        self.places += [cell] * any(isinstance(leaf, Tensor) for leaf in leaves)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._add(leaf, seen)

    def swap(self, values: list[Any] | None = None) -> list[Any]:
        """Contents of the places, which get these `values`, if given."""
        owners = [(place, "cell_contents") if isinstance(place, CellType) else place for place in self.places]
        before = [getattr(owner, name) for owner, name in owners]
        for (owner, name), value in zip(owners, values or (), strict=False):
            owner.__dict__.__setitem__(name, value) if isinstance(owner, nn.Module) else setattr(owner, name, value)
        return before


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
