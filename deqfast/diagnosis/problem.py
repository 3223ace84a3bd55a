"""Fixed-point problem of a block. Evaluations are counted, and the block does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cells.protocol import solving
from ..engine.plan import Plan, run
from ..engine.solve import Solve
from ..solution import Solution
from ..solvers import Solver
from ..state.evaluation import countable
from ..state.norms import sample_norms
from ..state.packing import Packing
from ..state.rows import mark_samples, settled, take_rows
from ..torch_internals import pytree
from ..torch_internals.autograd import detached
from ..torch_internals.dynamo import uncompiled
from ..torch_internals.weights import hold_weights, modules_of, undone


class Problem:
    """Problem z = cell(z, x) of a plan, from its start, without records and accelerations: the plain loop solves it."""

    def __init__(self, plan: Plan) -> None:
        z0, x = (pytree.tree_map_only(Tensor, countable, tree) for tree in (plan.z0, plan.x))
        options = replace(plan.options, stop_fn=None, trace=False, drop_converged=False)
        plan = replace(plan, z0=detached(z0), x=x, options=options, on_backward=lambda solution: None)
        self.plan = replace(plan, graphs=None, compiled=None, linearised=None)
        self.packing = Packing(z0, plan.groups, options.scale)
        self.marks = mark_samples(x, self.packing.leaves[0].shape[0], plan.per_sample)  # leaves with a row per row of z
        self.evaluations = 0
        self._cell = uncompiled(plan.cell)
        if None in self.marks:
            first = torch.arange(self.packing.leaves[0].shape[0], device=self.packing.device) == 0
            with self.held(seed=0):  # at a random state, since z0 may be zeros, which hide a weight
                marks = settled(self.marks, self._cell, self.map(torch.randn_like, z0), x, first)
                self.marks = [bool(mark) for mark in marks]

    def cell(self, z: Any, x: Any) -> Any:
        """Value of the cell, counted."""
        self.evaluations += 1
        return self._cell(z, x)

    def f(self, z: Any) -> Any:
        """Value of the cell at the plan's x."""
        return self.cell(z, self.plan.x)

    @contextmanager
    def held(self, seed: int) -> Iterator[None]:
        """Context of one solve, in which the cell does not change. It restores buffers and random states."""
        modules, device = modules_of(self.plan.cell), self.packing.device
        with undone(modules, device), torch.inference_mode(False), torch.enable_grad():
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would change all devices
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            with solving(modules, cancelled=True), hold_weights(modules):
                yield

    def as_it_is(self, z0: Any = None) -> Solution:
        """Solution by the block's solver, or by the cell's own ``fixed_point``."""
        plan = self.plan if z0 is None else replace(self.plan, z0=z0)
        solution = run(plan)
        self.evaluations += solution.evaluations
        return solution

    def solve(self, solver: Solver, f: Callable[[Any], Any], z0: Any = None, trace: bool = False) -> Solution:
        """Solution of z = f(z) by any solver."""
        start = self.plan.z0 if z0 is None else z0
        return Solve(start, replace(self.plan.options, solver=solver, trace=trace, causal=False))(f, start)

    def leaves(self, tree: Any) -> list[Tensor]:
        """Leaves of a tree like z."""
        return self.packing.spec.flatten_up_to(tree)

    def norms(self, tree: Any) -> Tensor:
        """Norms of the samples of a tree like z, (B,) float64."""
        return sample_norms(self.leaves(tree), self.packing.groups, factors=self.packing.factors)

    def distances(self, a: Any, b: Any) -> Tensor:
        """Distances of the samples of two trees, relative to the longer one; 0 between zeros, NaN if not finite."""
        gap, size = self.norms(self.map(torch.sub, a, b)), torch.maximum(self.norms(a), self.norms(b))
        return torch.where(size == 0, 0.0, gap / size)

    def map(self, function: Callable[..., Tensor], *trees: Any) -> Any:
        """Tree like z of the function's values at the leaves of trees like z."""
        leaves = zip(*map(self.leaves, trees), strict=True)
        return pytree.tree_unflatten([function(*each) for each in leaves], self.packing.spec)

    def taken(self, z: Any, rows: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        """These rows of z, and f for them only."""
        x = take_rows(self.plan.x, self.marks, rows)
        return self.map(lambda leaf: leaf.index_select(0, rows), z), lambda part: self.cell(part, x)
