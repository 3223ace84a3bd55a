"""Blocks under the transforms of torch.func and in forward-mode AD.

There a solve is a function of tensors alone: of its start, and of the x, the parameters and the buffers that the cell
computes with. It is taken out of all transforms: vmaps fold into the batch, so that every sample of every member is
judged, accelerated and frozen by itself, while the cell is called inside of a vmap of its own. Derivatives attach to
the values that come back, and are made of solves and calls of the cell that are transformed in turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..adjoints.confirm import confirmed
from ..ops.double_backward import NoDoubleBackward
from ..solution import Solution
from ..solve import solve
from ..state.packing import Packing
from ..state.rows import per_row
from ..torch_internals.autograd import present_autocast
from ..torch_internals.transforms import constant, forward_mode, is_transformed, over_members, without_tangent
from ..torch_internals.weights import tensors_of
from .plan import check_served

if TYPE_CHECKING:
    from ..adjoints.base import Adjoint, Problem

Tensors = list[Tensor]


class Map:
    """Function of a state, the leaves of a tree like z, and of all tensors that it computes with.

    A subclass defines ``__call__`` or ``bind``.
    """

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        """Next state; `rows` are tensors with one row per row of the state, `others` any."""
        return self.bind(rows, others)(state)

    def bind(self, rows: Tensors, others: Tensors) -> Callable[[Tensors], Tensors]:
        """Function of the state alone, outside of all transforms."""
        return lambda state: self(state, rows, others)

    def folded(self, members: int, dims: list[int | None], randomness: str) -> Map:
        """The map of the rows of all members of a vmap, where `dims` are the dimensions 0 or None of `others`."""
        return _Folded(self, members, dims, randomness)


@dataclass(frozen=True)
class _Folded(Map):
    base: Map
    members: int
    dims: list[int | None]
    randomness: str

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        call = torch.vmap(self.base, in_dims=(0, 0, self.dims), randomness=self.randomness)
        return [t.flatten(0, 1) for t in call(unfold(state, self.members), unfold(rows, self.members), others)]


class Cell(Map):
    """The cell of a problem. Its `others` are the tensors of x, then the parameters and buffers of the cell."""

    def __init__(self, problem: Problem) -> None:
        self.cell, self.packing = problem.cell, Packing(problem.z0)
        leaves, self.x_spec = pytree.tree_flatten(problem.x)
        self.x_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.in_x = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        held = tensors_of(self.cell)
        self.names = list(held)
        self.others = [*(leaves[i] for i in self.in_x), *held.values()]
        self.autocast = present_autocast(self.packing.device.type)

    def x_of(self, others: Tensors) -> Any:
        """The tree x with these tensors."""
        leaves = list(self.x_leaves)
        for i, tensor in zip(self.in_x, others, strict=False):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self.x_spec)

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        arguments = pytree.tree_unflatten(state, self.packing.spec), self.x_of(others)
        with self.autocast():
            if isinstance(self.cell, nn.Module):
                held = dict(zip(self.names, others[len(self.in_x) :], strict=True))
                value = torch.func.functional_call(self.cell, held, arguments, tie_weights=False)
            else:
                value = self.cell(*arguments)
        return self.packing.check_value(value)


class _OfValues(torch.autograd.Function):
    """Results of a task on the values of its tensors, outside of all transforms; without derivative."""

    @staticmethod
    def forward(task: Task, states: int, rows: int, *tensors: Tensor) -> Any:
        return task([tensor.detach() for tensor in tensors], states, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.results = len(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, task: Task, states: int, rows: int, *tensors: Tensor) -> Any:
        folded, dims = _fold(tensors, in_dims[3:], states + rows, info.batch_size)
        results = _OfValues.apply(task.folded(info.batch_size, dims, info.randomness), states, rows, *folded)
        return tuple(unfold(results, info.batch_size)), (0,) * len(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return (None,) * ctx.results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


@dataclass(frozen=True)
class Task:
    """Work on the values of a map's tensors.

    Attributes:
        base: the map.
        work: takes the map as a function of the state, the state, and the number of members folded into its rows;
            returns tensors with the rows or the samples as dimension 0.
        members: that number.
    """

    base: Map
    work: Callable[[Callable[[Tensors], Tensors], Tensors, int], Sequence[Tensor]]
    members: int = 1

    def __call__(self, tensors: Tensors, states: int, rows: int) -> tuple[Tensor, ...]:
        bound = self.base.bind(tensors[states : states + rows], tensors[states + rows :])
        return tuple(self.work(bound, tensors[:states], self.members))

    def folded(self, members: int, dims: list[int | None], randomness: str) -> Task:
        return replace(self, base=self.base.folded(members, dims, randomness), members=members * self.members)

    def run(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        """Results for these tensors, which may be transformed."""
        return list(_OfValues.apply(self, len(state), len(rows), *state, *rows, *others))


class Derivative(ABC):
    """Derivative of a state in the tensors that its map computes with."""

    @abstractmethod
    def pull(self, base: Map, grads: Tensors, at: At) -> Tensors:
        """Gradients in the tensors of `at` that are to be differentiated, for these gradients of the state."""

    @abstractmethod
    def push(self, base: Map, tangents: Tensors, at: At) -> Tensors:
        """Tangents of the state for these of the tensors of `at` that are to be differentiated."""


@dataclass(frozen=True)
class At:
    """Point at which a map is differentiated.

    Attributes:
        state, rows, others: its arguments.
        chosen: positions, among rows and others, of those to differentiate in.
        members: number of members of vmaps folded into the rows.
    """

    state: Tensors
    rows: Tensors
    others: Tensors
    chosen: list[int]
    members: int

    @property
    def given(self) -> Tensors:
        """The tensors to differentiate in."""
        return [[*self.rows, *self.others][i] for i in self.chosen]

    def of_given(self, base: Map) -> Callable[[Tensors], Tensors]:
        """The map as a function of the tensors to differentiate in, in the dtypes of the state."""

        def call(given: Tensors) -> Tensors:
            tensors = [*self.rows, *self.others]
            for i, tensor in zip(self.chosen, given, strict=True):
                tensors[i] = tensor
            value = base(self.state, tensors[: len(self.rows)], tensors[len(self.rows) :])
            return in_dtypes_of(self.state, value)

        return call


class _Attached(torch.autograd.Function):
    """Copy of a state, with its derivative."""

    @staticmethod
    def forward(derivative: Derivative, base: Map, members: int, states: int, rows: int, *tensors: Tensor) -> Any:
        return tuple(tensor.clone() for tensor in tensors[:states])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.derivative, ctx.base, ctx.members, ctx.states, ctx.rows, *tensors = inputs
        ctx.save_for_backward(*output, *tensors[ctx.states :])
        ctx.save_for_forward(*output, *tensors[ctx.states :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        derivative: Derivative,
        base: Map,
        members: int,
        states: int,
        rows: int,
        *tensors: Tensor,
    ) -> Any:
        folded, dims = _fold(tensors, in_dims[5:], states + rows, info.batch_size)
        base = base.folded(info.batch_size, dims, info.randomness)
        found = _Attached.apply(derivative, base, info.batch_size * members, states, rows, *folded)
        return tuple(unfold(found, info.batch_size)), (0,) * len(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[5 + ctx.states :]
        found: list[Tensor | None] = [None] * len(needed)
        if any(grad is not None for grad in grads):
            at = _point(ctx, list(ctx.saved_tensors), needed)
            full = [torch.zeros_like(z) if g is None else g for g, z in zip(grads, at.state, strict=True)]
            pulled = over_members(lambda grads: ctx.derivative.pull(ctx.base, grads, at), full)
            for i, grad in zip(at.chosen, pulled, strict=True):
                found[i] = grad
        return (*[None] * (5 + ctx.states), *found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given = tangents[5 + ctx.states :]
        chosen = [t for t in given if t is not None]
        with forward_mode():  # which torch closes for this call, and so would lose what outer levels differentiate
            saved = [without_tangent(tensor) for tensor in ctx.saved_tensors]
            at = _point(ctx, saved, [tangent is not None for tangent in given])
            return tuple(over_members(lambda tangents: ctx.derivative.push(ctx.base, tangents, at), chosen))


def _point(ctx: Any, tensors: Tensors, needed: Sequence[bool]) -> At:
    split = ctx.states + ctx.rows
    given = tensors[ctx.states :]
    chosen = [i for i, need in enumerate(needed) if need and (given[i].is_floating_point() or given[i].is_complex())]
    return At(tensors[: ctx.states], tensors[ctx.states : split], tensors[split:], chosen, ctx.members)


def attached(
    derivative: Derivative, base: Map, state: Tensors, rows: Tensors, others: Tensors, members: int = 1
) -> Tensors:
    """Copy of the state, differentiable in `rows` and `others` as `derivative` says."""
    return list(_Attached.apply(derivative, base, members, len(state), len(rows), *state, *rows, *others))


class Once(Derivative):
    """Derivative of another map at a state held fixed. Not differentiable in turn.

    Args:
        name: what the error of a second derivative calls it.
        surrogate: the map to differentiate, made of the state's own.
    """

    def __init__(self, name: str, surrogate: Callable[[Map], Map] = lambda base: base) -> None:
        self.name, self.surrogate = name, surrogate

    def pull(self, base: Map, grads: Tensors, at: At) -> Tensors:
        pulled = torch.func.vjp(at.of_given(self.surrogate(base)), at.given)[1](grads)[0]
        return self._refuse(pulled, grads, at)

    def push(self, base: Map, tangents: Tensors, at: At) -> Tensors:
        pushed = jvp(at.of_given(self.surrogate(base)), at.given, tangents)
        return self._refuse(pushed, tangents, at)

    def _refuse(self, found: Tensors, given: Tensors, at: At) -> Tensors:
        sources = (*given, *at.state, *at.rows, *at.others)
        return [NoDoubleBackward.apply(tensor, self.name, *sources) for tensor in found]


class Refused(Derivative):
    """Derivative that is not there: an error."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def pull(self, base: Map, grads: Tensors, at: At) -> Tensors:
        raise RuntimeError(self.reason)

    def push(self, base: Map, tangents: Tensors, at: At) -> Tensors:
        raise RuntimeError(self.reason)


def solve_transformed(problem: Problem, adjoint: Adjoint) -> tuple[Any, Solution]:
    """Value of a block whose tensors belong to transforms, with its derivative, and the Solution."""
    check_served("torch.func", problem.given())
    base, z0 = Cell(problem), pytree.tree_leaves(problem.z0)
    _check_held(base, z0)
    forward = _Forward(problem, base.packing.spec)
    *value, status, iterations, residual, relative, absolute = Task(base, forward).run(z0, [], base.others)
    solution = Solution(
        value=pytree.tree_unflatten(value, base.packing.spec),
        status=status,
        iterations=iterations,
        residual=residual,
        residual_rel=relative,
        residual_abs=absolute,
        evaluations=forward.evaluations,
        sample_evaluations=forward.sample_evaluations,
    )
    z, x, broken = problem.without_broken(solution)
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    others = [*leaves, *base.others[len(leaves) :]]
    found = attached(adjoint.derivative(problem), base, pytree.tree_leaves(z), [], others)
    found = [torch.where(per_row(broken, v), v, f) for v, f in zip(value, found, strict=True)]
    return pytree.tree_unflatten(found, base.packing.spec), solution


@dataclass
class _Forward:
    """The forward solve on the values of all members, with the number of evaluations once it is done."""

    problem: Problem
    spec: pytree.TreeSpec
    evaluations: int = 0
    sample_evaluations: int = 0

    def __call__(self, f: Callable[[Tensors], Tensors], z0: Tensors, members: int) -> Sequence[Tensor]:
        spec = self.spec

        def cell(z: Any) -> Any:
            return pytree.tree_unflatten(f(pytree.tree_leaves(z)), spec)

        problem = replace(self.problem, options=for_members(self.problem.options, members))
        solution = solve(cell, pytree.tree_unflatten(z0, spec), problem.solver, **problem.options)
        leaves = pytree.tree_leaves(solution.value)
        solution = confirmed(solution, problem, solution.value, f(leaves))
        self.evaluations, self.sample_evaluations = solution.evaluations, solution.sample_evaluations
        measures = solution.residual, solution.residual_rel, solution.residual_abs
        return [*leaves, solution.status, solution.iterations, *(m.clone() for m in measures)]


def for_members(options: dict[str, Any], members: int) -> dict[str, Any]:
    """Options of a solve of so many members folded into one batch."""
    groups = options.get("groups")
    return options if groups is None or members == 1 else {**options, "groups": groups.repeated(members)}


def _check_held(base: Cell, z0: Tensors) -> None:
    """RuntimeError if the cell computes with a tensor of a transform or graph that is not in `others`."""
    with torch.enable_grad():
        found = base([constant(z) for z in z0], [], [constant(tensor) for tensor in base.others])
    if any(is_transformed(y) for y in found):
        raise RuntimeError(
            "deqfast: under torch.func and forward-mode AD the cell may hold no tensor that is transformed or requires "
            "a gradient but its parameters and buffers, as the derivative in it would be lost: give it to the block in "
            "x, or make the cell an nn.Module"
        )


def jvp(f: Callable[[Tensors], Tensors], given: Tensors, tangents: Tensors) -> Tensors:
    """Product of the Jacobian of f with tangents.

    By two transpositions: forward-mode AD does not nest in itself.
    """
    value, product = torch.func.vjp(f, given)[:2]
    return transpose(product, value)(tangents)[0]


def transpose(product: Callable[[Tensors], Any], at: Tensors) -> Callable[[Tensors], Any]:
    """Transposed product of a linear function of tensors shaped as these."""
    return torch.func.vjp(lambda v: product(v)[0], [torch.zeros_like(t) for t in at])[1]


def in_dtypes_of(state: Tensors, found: Tensors) -> Tensors:
    """`found` in the dtypes of the state."""
    return [y.to(z.dtype) for y, z in zip(found, state, strict=True)]


def _fold(
    tensors: Sequence[Tensor], dims: Sequence[int | None], of_rows: int, members: int
) -> tuple[Tensors, list[int | None]]:
    """Tensors of a vmap outside of it, the first `of_rows` folded; dimensions of the vmap in the others."""
    moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
    for i in range(of_rows):
        moved[i] = (moved[i] if dims[i] is not None else moved[i].expand(members, *moved[i].shape)).flatten(0, 1)
    return moved, [None if dim is None else 0 for dim in dims[of_rows:]]


def unfold(tensors: Sequence[Tensor], members: int) -> Tensors:
    """Tensors (V, B, ...) of those whose rows (V * B, ...) are of so many members."""
    return [t.unflatten(0, (members, len(t) // members)) for t in tensors]
