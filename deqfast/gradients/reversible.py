"""Backpropagation through a reversible iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._checks import check_count, check_number
from ..engine.plan import Plan
from ..ops.double_backward import NoDoubleBackward
from ..solution import Solution
from ..state.evaluation import evaluate
from ..state.norms import sample_norms
from ..state.packing import Packing
from ..torch_internals import autograd, pytree
from ..torch_internals.autograd import Gradients
from ..torch_internals.dynamo import outside_exports, uncompiled, untraced
from ..torch_internals.weights import shards_weights
from .base import Recorded
from .unrolled import Iterated, Judge, Repeated

# Largest distance from the start at which the reversed steps may end, in lengths of the iterates.
_LOST = 1e-3


@dataclass(frozen=True)
class Reversible(Iterated):
    """Exact backpropagation through an iteration of two states, in the memory of one evaluation of the cell.

    The iteration starts at y = z = z0. A step is y <- (1 - r) y + r f(z), then z <- (1 - r) z + r f(y), with
    r = relaxation. The backward pass reverses the steps instead of keeping the iterates. The states are float64, in
    which a reversed half-step multiplies rounding by 1 / (1 - r). Source: McCallum et al., arXiv 2509.12917.

    Args:
        steps: number of steps of two calls each, at least 1; None takes half of the solver's max_iter, and at most
            as many as can be reversed by the factor above: 21 at a relaxation of 0.5.
        relaxation: weight of f in a step, in (0, 0.99]. A value near 1 needs fewer steps, but fewer can be reversed.

    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: the cell holds a tensor with a gradient that is neither a leaf nor in x, or a module that is a
            unit of FSDP2. In the backward pass, x or a tensor of the cell has been written to. Or the reversed
            steps do not lead to z0, because the cell has changed or the rounding error has grown too large.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Reversible(steps=15))
        >>> block(torch.randn(4, 3)).sum().backward()
    """

    steps: int | None = None
    relaxation: float = 0.5

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
        check_number("relaxation", self.relaxation, 0.0, 0.99, low_open=True)

    @property
    def _reversed(self) -> int:
        """Steps after which rounding has grown by (1 - r)^(-2 steps) to what `_check` allows."""
        return int(math.log(_LOST / torch.finfo(torch.float64).eps) / (-2 * math.log1p(-self.relaxation)))

    def iterate(self, plan: Plan, packing: Packing, z: Any, x: Any) -> tuple[Any, Solution]:
        if shards_weights(plan.cell):
            raise RuntimeError("deqfast: Reversible does not support a cell sharded by fully_shard: shard the block")
        steps = self.steps or max(1, min(plan.solver.max_iter // 2, self._reversed))
        run = _Run(plan.cell, self.relaxation, steps, autograd.detached(z), x, plan.groups)
        judge = Judge(packing, plan.solver)
        with outside_exports(torch.no_grad()):
            run.forward(judge)
            solution = judge.solution(run.tree(run.ends[1]))
        if not torch.is_grad_enabled():
            return solution.value, solution
        recorded = Recorded(plan.cell, solution.value, x)
        if recorded.hides:
            lost = "the gradient of a tensor that the cell holds and that is computed outside of it"
            raise RuntimeError(f"deqfast: Reversible would lose {lost}: give it to the block in x")
        run.repeated.end(recorded.held)
        sources = recorded.sources
        leaves, spec = pytree.tree_flatten(solution.value)
        return pytree.tree_unflatten(list(_Reversed.apply(run, len(leaves), *leaves, *sources)), spec), solution


class _Run:
    """Steps from z0, and their reversal."""

    def __init__(
        self, cell: Callable[[Any, Any], Any], relaxation: float, steps: int, z0: Any, x: Any, groups: Any
    ) -> None:
        self.cell, self.relaxation, self.steps = cell, relaxation, steps
        self.x = pytree.tree_map(lambda leaf: leaf, x)  # the caller may fill its containers again
        leaves, self.spec = pytree.tree_flatten(z0)
        self.start = [leaf.clone() for leaf in leaves]  # the caller may overwrite its memory before the backward pass
        self.autocast = autograd.present_autocast(self.start[0].device.type)
        self.repeated = Repeated(cell, self.start, x)
        self.lengths = partial(sample_norms, groups=groups)
        self.ends = [[_widened(leaf) for leaf in self.start] for _ in range(2)]  # y and z

    def tree(self, state: list[Tensor]) -> Any:
        """Return a float64 state as a tree like z0."""
        return pytree.tree_unflatten([s.to(leaf.dtype) for s, leaf in zip(state, self.start, strict=True)], self.spec)

    def _mix(self, state: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        return [s + self.relaxation * (_widened(v) - s) for s, v in zip(state, values, strict=True)]

    def forward(self, judge: Judge) -> None:
        """Take all steps, and let `judge` see the evaluations."""
        y, z = self.ends
        for _ in range(self.steps):
            y = self._mix(y, self._value(z, judge))
            z = self._mix(z, self._value(y, judge))
        self.ends = [y, z]

    def _value(self, state: list[Tensor], judge: Judge) -> list[Tensor]:
        at = self.tree(state)
        value = judge.packing.check_value(evaluate(self.cell, at, self.x))
        judge.see(at, pytree.tree_unflatten(value, self.spec))
        return value

    def pull(self, grads: list[Tensor], sources: list[Tensor]) -> Gradients:
        """Reverse the steps, and return the gradients in the sources for the gradients of z."""
        ends, cell = [list(state) for state in self.ends], uncompiled(self.repeated)
        passed = [[torch.zeros_like(end) for end in ends[0]], [_widened(grad) for grad in grads]]
        # Gradients of a half-step end at x; if x was computed from another source, the outer pass differentiates that.
        x = pytree.tree_map(lambda t: t.detach().requires_grad_() if autograd.requiring_grad(t) else t, self.x)
        in_x = autograd.requiring_grad(x)
        gradients: Gradients = [None] * (len(in_x) + len(sources))
        with self.autocast():
            for half in range(2 * self.steps):
                at, other = half % 2, 1 - half % 2  # z was moved by f(y), and before that y by f(z)
                z = autograd.detached(self.tree(ends[at]), requires_grad=True)
                with torch.enable_grad():
                    values = autograd.in_order_of(z, cell(autograd.not_leaves(z), autograd.not_leaves(x)))
                scaled = [self.relaxation * grad for grad in passed[other]]
                pulled = autograd.vjp(values, [*pytree.tree_leaves(z), *in_x, *sources], scaled)
                passed[at] = [_sum(p, g) for p, g in zip(passed[at], pulled, strict=False)]
                passed[other] = [(1 - self.relaxation) * p for p in passed[other]]
                gradients = [_sum(a, b) for a, b in zip(gradients, pulled[len(grads) :], strict=True)]
                pairs = zip(ends[other], values, strict=True)
                ends[other] = [(s - self.relaxation * _widened(v.detach())) / (1 - self.relaxation) for s, v in pairs]
        self._check(ends)
        # Gradients that the cell adds without x: a leaf counts among those held, and one that x has twice counts once.
        by_cell = gradients[len(in_x) :]
        for i, source in enumerate(sources[: len(in_x)]):
            if not any(source is other for other in (*sources[:i], *sources[len(in_x) :])):
                gradients[i] = _sum(gradients[i], by_cell[i])
        return [*gradients[: len(in_x)], *by_cell[len(in_x) :]]

    def _check(self, ends: list[list[Tensor]]) -> None:
        """Raise RuntimeError if a sample of the states `ends` is not at its start."""
        size = self.lengths(self.ends[1]) + self.lengths([_widened(leaf) for leaf in self.start])
        known = (size > 0) & torch.isfinite(size)  # samples of zeros are at their start, broken ones are not checked
        off = [self.lengths([a - b for a, b in zip(state, self.start, strict=True)]) / size for state in ends]
        distances = torch.stack(off)[:, known].nan_to_num(torch.inf)
        distance = float(distances.max()) if distances.numel() else 0.0
        if distance > _LOST:
            raise RuntimeError(
                f"deqfast: the reversed steps of Reversible end {distance:.1g} lengths of a sample's iterates off z0: "
                f"take fewer steps than {self.steps}, a relaxation below {self.relaxation}, or a cell that does not "
                "change before the backward pass"
            )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _sum(a: Tensor | None, b: Tensor | None) -> Any:
    return a if b is None else b if a is None else a + b


class _Reversed(torch.autograd.Function):
    """Values of a run, with its gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *tensors: Tensor) -> Any:
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors[count:])
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return untraced(_Reversed.pull, ctx, grads)

    @staticmethod
    def pull(ctx: Any, grads: tuple[Tensor, ...]) -> Any:
        sources = list(ctx.saved_tensors)
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError(
                "deqfast: the graph of Reversible is used again: pass retain_graph=True to the first backward pass, "
                "unless the cell has changed and reads the block's own value now"
            )
        try:
            with torch.no_grad():
                pulled = run.pull(list(grads), sources)
        except BaseException:
            ctx.run = run
            raise
        if torch.is_grad_enabled():
            pulled = [g if g is None else NoDoubleBackward.apply(g, "Reversible", *grads, *sources) for g in pulled]
        if autograd.keeps_graph():  # else the run is freed, as torch frees saved tensors
            ctx.run = run
        return (*[None] * (2 + ctx.count), *pulled)
