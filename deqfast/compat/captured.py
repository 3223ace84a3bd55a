"""Captured solves of a layer with torchdeq's interface, whose func is a new function in every call.

A capture fixes the memory of what func reads. What it reads through its closure is therefore found, and copied into
that memory before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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


@dataclass
class Reads:
    """What a function reads through its closure.

    Attributes:
        key: what is not a tensor. Functions with equal keys do the same work with other tensors.
        modules: the modules that it reaches, whose parameters and buffers stay where they are.
        places: cells of closures with tensors, or (module, name) of a tensor that is neither parameter nor buffer.
        held: objects that the key knows by their identity.
    """

    key: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    places: list[CellType | tuple[nn.Module, str]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def of(self, value: Any) -> None:
        """Add what a function, a module or an object reads."""
        if isinstance(value, _PLAIN):
            self.key.append((type(value), value))
            return
        known = id(value) in map(id, self.held)
        self.held.append(value)
        if isinstance(value, MethodType):
            self.of(value.__func__)
            self.of(value.__self__)
        elif isinstance(value, FunctionType):
            self.key.append(value.__code__)
            for content in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self.of(content)
            for cell in () if known else value.__closure__ or ():
                self._of_cell(cell)
        else:
            self.key.append(id(value))
            if isinstance(value, nn.Module) and not known:
                self.modules.append(value)
                for module in value.modules():
                    self.places += [(module, name) for name, held in vars(module).items() if isinstance(held, Tensor)]

    def _of_cell(self, cell: CellType) -> None:
        try:
            leaves, spec = pytree.tree_flatten(cell.cell_contents)
        except ValueError:  # nothing is assigned yet
            return
        self.key.append(str(spec))
        self.places += [cell] * any(isinstance(leaf, Tensor) for leaf in leaves)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self.of(leaf)

    def values(self) -> list[Any]:
        """Contents of the places."""
        return [
            place.cell_contents if isinstance(place, CellType) else vars(place[0])[place[1]] for place in self.places
        ]

    @contextmanager
    def replaced(self, values: list[Any]) -> Iterator[None]:
        """Context in which the places have other contents."""
        before = self.values()
        self._put(values)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, values: list[Any]) -> None:
        for place, value in zip(self.places, values, strict=True):
            if isinstance(place, CellType):
                place.cell_contents = value
            else:
                vars(place[0])[place[1]] = value


class Calls(nn.Module):
    """Cell of the calls with equal keys; x: the x of the plan, and the contents of the places."""

    def __init__(self, reads: Reads, relaxation: float) -> None:
        super().__init__()
        self.reached, self.held, self.relaxation = nn.ModuleList(reads.modules), reads.held, relaxation
        self.latest: tuple[Callable[[Any, Any], Any], Reads]

    def forward(self, z: Any, x: Any) -> Any:
        (cell, reads), tau = self.latest, self.relaxation
        with reads.replaced(x[1]):
            value = cell(z, x[0])
        if tau == 1.0:
            return value
        return pytree.tree_map(lambda y, z: tau * y + (1 - tau) * z, value, z)


class Captures:
    """Captured solves of a layer, which is pickled and copied without them."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Calls, Graphs]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_calls": {}}

    def solve(self, plan: Plan, relaxation: float, ends_in_f: bool) -> tuple[Any, Solution]:
        """The value that torchdeq's solver returns, f at the best iterate or the iterate itself; and the Solution."""
        reads = Reads()
        reads.of(plan.cell)
        key = *reads.key, relaxation
        if key not in self._calls:
            while len(self._calls) >= MAX_GRAPHS:
                self._calls.pop(next(iter(self._calls)))
            calls = Calls(reads, relaxation)
            self._calls[key] = calls, Graphs(calls, True)
        calls, graphs = self._calls[key]
        calls.latest, x = (plan.cell, reads), (plan.x, reads.values())
        with torch.no_grad():
            solution = run(replace(plan, cell=calls, x=x, graphs=graphs))
            if not ends_in_f:
                return solution.value, solution
            broken = solution.status == Status.NONFINITE
            values = Packing(plan.z0).check_value(calls(solution.value, x))
        leaves, spec = pytree.tree_flatten(solution.value)
        kept = [torch.where(per_row(broken, z), z, y.to(z.dtype)) for y, z in zip(values, leaves, strict=True)]
        return pytree.tree_unflatten(kept, spec), solution
