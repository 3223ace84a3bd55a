"""Measurements of a cell: solves, contraction, dependence on the start and on x, errors of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..engine.plan import Plan
from ..gradients import JFB, Adjoint, Implicit, Neumann, Phantom
from ..ops.steps.reference import Evaluation
from ..solution import Solution, Status
from ..solvers import Anderson, Broyden, Picard, Solver
from ..state.floors import float32_products_eps, residual_floor
from ..state.norms import sample_norms
from ..state.packing import is_of_state
from ..state.rows import per_row, rows_of
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, not_leaves, vjp
from .problem import Problem

TOLERANCES = (1e-2, 1e-3, 1e-5)
TIGHT = min(TOLERANCES)  # float32 reaches it, and numbers measured at such a z* are right to about a percent
BUDGET = 100  # evaluations of a trial: a cell that needs more is too slow to train
NORM_PRODUCTS = 20  # of a power iteration for the norm, which is then at most a few percent too low
EXACT = Implicit(Broyden(1e-6, 200))  # errors measured against it are far above 1e-6
UNCOUPLED = 0.02  # a smaller change of a value without the other samples counts as none; above the rounding of bf16
NUDGE = 0.01  # relative change of x; above the rounding of bf16
IGNORED = 0.01  # a smaller change of the value, per change of x, counts as none
SHRINKS = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # factors of z, tried in this order: the first changes the cell least


@dataclass(frozen=True)
class Run:
    """Trial of a solver from z0, with more evaluations and a tighter tolerance than the block's.

    Attributes:
        solver: with its settings.
        residual: relative residual of the worst sample's best iterate, after each evaluation.
        length: |f(z)| of the longest sample, at each evaluation.
        needs: evaluations until all samples converge to each of these relative residuals; None if they never do.
        own: evaluations until all samples converge by the tolerance of the block's solver; None if they never do.
    """

    solver: Solver
    residual: list[float]
    length: list[float]
    needs: dict[float, int | None]
    own: int | None


@dataclass(frozen=True)
class GradientError:
    """Relative errors |u - u*| / |u*| of an adjoint's u, for a random gradient of z*; see ``concepts``, Gradients.

    Attributes:
        estimated: from the norm q of the Jacobian, per sample: q of ``JFB``, or the series' factor to its power.
        measured: against an exact solve, of the samples whose exact solve converged.
    """

    estimated: Tensor
    measured: Tensor


@dataclass(frozen=True)
class Remedy:
    """Change of the cell with which all samples converge by the block's solver.

    Attributes:
        change: what to do.
        evaluations: of the slowest sample.
    """

    change: str
    evaluations: int


def trials(problem: Problem) -> list[tuple[Run, Solution]]:
    """Trials of the block's solver and of the library's three."""
    own = problem.plan.solver
    kinds: dict[type[Solver], Solver] = {type(s): s for s in (Picard(), Anderson(), Broyden(), own)}
    tight = min(own.rtol, TIGHT) or TIGHT
    rule: dict[str, Any] = {"rtol": tight, "atol": 0.0, "norm": own.norm}
    rule["max_iter"] = max(BUDGET, own.max_iter)
    return [_trial(problem, replace(solver, **rule)) for solver in kinds.values()]


def _trial(problem: Problem, solver: Solver) -> tuple[Run, Solution]:
    lengths: list[float] = []
    own = problem.plan.solver

    def f(z: Any) -> Any:
        value = problem.f(z)
        lengths.append(_largest(problem.norms(value)))
        return value

    solution = problem.solve(solver, f, trace=True)
    assert solution.trace_rel is not None
    needs = {tol: _first_to_meet(solution, replace(solver, rtol=tol)) for tol in TOLERANCES}
    residual = [_largest(each) for each in solution.trace_rel]
    return Run(solver, residual, lengths, needs, _first_to_meet(solution, own)), solution


def _largest(numbers: Tensor) -> float:
    """Largest of the finite numbers; samples that broke down have others."""
    finite = numbers[numbers.isfinite()]
    return float(finite.max()) if finite.numel() else math.nan


def _first_to_meet(solution: Solution, solver: Solver) -> int | None:
    """Evaluations after which the best iterates of all samples that stay finite have converged by a solver's rule."""
    healthy = solution.status != Status.NONFINITE
    assert solution.trace_rel is not None and solution.trace_abs is not None
    if not bool(healthy.any()):
        return None
    relative, absolute = solution.trace_rel[:, healthy], solution.trace_abs[:, healthy]
    size, rule = (absolute / relative).nan_to_num(nan=0.0), solver.rule()  # |f(z)|, and 0 without a residual
    start = torch.maximum(size[0], absolute[0])
    now = Evaluation(absolute, absolute / (size + rule.offset), size, absolute[0], start)
    converged = (now.converged(rule) | (absolute == 0)).all(dim=1)
    return int(converged.int().argmax()) + 1 if bool(converged.any()) else None


def quality(solution: Solution) -> tuple[int, float]:
    """Key of the best solution: the most samples converged, then the least residual."""
    return int(solution.converged.sum()), -float(solution.residual_rel.max())


def norm(problem: Problem, z: Any) -> Tensor:
    """Norm of the Jacobian in z of each sample, (B,), from below, by power iteration.

    J v is a difference quotient, because some kernels of attention have no second derivative.
    """
    leaves = pytree.tree_leaves(at := detached(z, requires_grad=True))
    outputs = problem.packing.check_value(problem.f(not_leaves(at)))
    base = problem.map(torch.detach, pytree.tree_unflatten(outputs, problem.packing.spec))
    device = problem.packing.device
    size = torch.maximum(problem.norms(z), problem.norms(base)).clamp_min(1e-30)
    step = size * residual_floor(outputs, leaves, device, float32_products_eps(device)) ** 0.5
    squares = [factor**2 for factor in problem.packing.factors or [1.0] * len(leaves)]
    v, longest = problem.map(torch.randn_like, z), torch.zeros_like(size)
    for _ in range(NORM_PRODUCTS):
        scaled = step / problem.norms(v).clamp_min(1e-30)
        with torch.no_grad():
            moved = problem.f(problem.map(torch.add, z, _times(problem, scaled, v)))
        w = _times(problem, 1 / step, problem.map(torch.sub, moved, base))
        longest = problem.norms(w)
        products = vjp(outputs, leaves, [t / s for t, s in zip(pytree.tree_leaves(w), squares, strict=True)])
        parts = zip(products, leaves, squares, strict=True)
        v = [torch.zeros_like(leaf) if p is None else p * square for p, leaf, square in parts]
        v = pytree.tree_unflatten(v, problem.packing.spec)
    return longest


def _times(problem: Problem, numbers: Tensor, tree: Any) -> Any:
    """A tree like z, each sample times its number."""
    rows = numbers if problem.packing.groups is None else problem.packing.groups.per_row(numbers)
    return problem.map(lambda leaf: leaf * per_row(rows, leaf).to(leaf.dtype), tree)


def random_state(problem: Problem, z: Any) -> Any:
    """Random tree with numbers as large as those of z."""
    return problem.map(lambda leaf: torch.randn_like(leaf) * (_size(leaf) or 1.0), z)


def first_step(problem: Problem, z: Any) -> Tensor:
    """Distance, relative, of f(z) from a random state z, (B,)."""
    start = random_state(problem, z)
    with torch.no_grad():
        return problem.distances(problem.f(start), start)


def spread(problem: Problem, solution: Solution, others: Iterable[Solution]) -> Tensor:
    """Distances, relative, of the solution from others, (answers, B); NaN if one of the two has not converged."""
    both = [(other, solution.converged & other.converged) for other in others]
    gaps = [torch.where(c, problem.distances(solution.value, other.value), torch.nan) for other, c in both]
    return torch.stack(gaps)


def _size(leaf: Tensor) -> float:
    """Root of the mean square of the numbers."""
    return float(rows_of(leaf).double().square().mean().sqrt()) if leaf.numel() else 0.0


def sizes(z: Any) -> Any:
    """Tree like z of the typical size of each tensor's numbers."""
    return pytree.tree_map(_size, z)


def dependence(problem: Problem, z: Any, settled: Tensor) -> Tensor:
    """Distance, relative, of each sample's z from the one before it, whose x is another; (B,), NaN if unknown."""
    marked = [leaf for leaf, mark in zip(pytree.tree_leaves(problem.plan.x), problem.marks, strict=True) if mark]
    if problem.packing.groups is not None or not marked or len(settled) < 2:
        return torch.full_like(settled, torch.nan, dtype=torch.float64)
    others = [(leaf != leaf.roll(1, 0)).reshape(len(leaf), -1).any(dim=1) for leaf in marked]
    known = settled & settled.roll(1) & torch.stack(others).any(dim=0)
    return torch.where(known, problem.distances(z, problem.map(lambda leaf: leaf.roll(1, 0), z)), torch.nan)


def alone(problem: Problem, z: Any, row: int) -> float | None:
    """Change of a row's f(z), relative, if the cell gets this row only; infinite if only this is not finite.

    None if the cell has groups or does not take the row, or if f(z) is not finite in the batch.
    """
    rows = torch.tensor([row], device=problem.packing.device)
    if problem.packing.groups is not None:
        return None
    part, f = problem.taken(z, rows)
    with torch.no_grad():
        whole = problem.map(lambda leaf: leaf.index_select(0, rows), problem.f(z))
        if not math.isfinite(problem.norms(whole)):
            return None
        try:
            return float(problem.distances(whole, f(part)).nan_to_num(math.inf))
        except Exception:  # such as for a cell that holds tensors, or indices, of the whole batch
            return None


def gradient_errors(
    problem: Problem, z: Any, norms: Tensor, adjoint: Adjoint, rows: Tensor | None
) -> dict[str, GradientError]:
    """Errors of the gradients by approximate adjoints at fixed points z, of these rows or of all."""
    plan, packing = problem.plan, problem.packing
    z, f = (z, problem.f) if rows is None else problem.taken(z, rows)
    norms = norms if rows is None else norms[rows]
    solved: list[Solution] = []
    # With an input b that is added to f, the gradient in b is u.
    b = problem.map(lambda leaf: torch.zeros_like(leaf).requires_grad_(), z)
    own: dict[str, Any] = {"cell": lambda z, b: problem.map(torch.add, f(z), b), "on_backward": solved.append}
    shifted = Plan(x=b, z0=z, options=plan.options, **own)
    solution = problem.solve(Picard(TIGHT, max_iter=1), f, z)
    probe = [torch.randn_like(leaf) for leaf in problem.leaves(z)]
    lengths = partial(sample_norms, groups=plan.groups, factors=packing.transposed().factors)

    def solved_by(adjoint: Adjoint) -> tuple[Tensor, ...]:
        value, _ = adjoint.differentiate(shifted, solution)
        return torch.autograd.grad(problem.leaves(value), problem.leaves(b), probe)

    exact, errors = solved_by(EXACT), {}
    size, known = lengths(exact), solved[0].converged
    for each in (JFB(), Neumann(), Phantom()):
        each = adjoint if isinstance(adjoint, type(each)) else each
        error = lengths([a - b for a, b in zip(solved_by(each), exact, strict=True)])
        errors[repr(each)] = GradientError(_estimate(each, norms)[known], (error / size)[known])
    return errors


def _estimate(adjoint: Adjoint, norms: Tensor) -> Tensor:
    """Bound on |u - u*| / |u*| with Jacobians of these norms, after Bolte, Pauwels and Vaiter, NeurIPS 2023."""
    if not isinstance(adjoint, (Neumann, Phantom)):
        return norms
    return (1 - adjoint.relaxation + adjoint.relaxation * norms) ** adjoint.steps


def find_remedy(problem: Problem) -> Remedy | None:
    """First change of the cell with which all samples converge by the block's solver; if possible by its max_iter.

    A change with which z* does not depend on x is none.
    """
    own, slow, x = problem.plan.solver, None, problem.plan.x
    for change, cell in _changed(problem):
        solution = problem.solve(replace(own, max_iter=max(BUDGET, own.max_iter)), partial(cell, x=x))
        if bool(solution.converged.all()) and _depends(problem, cell, solution.value):
            remedy = Remedy(change, int(solution.iterations.max()))
            if remedy.evaluations <= own.max_iter:
                return remedy
            slow = slow or remedy
    return slow


@torch.no_grad()
def _depends(problem: Problem, cell: Callable[[Any, Any], Any], z: Any) -> bool:
    """Return whether the cell's value at z follows a small change of x; True if x has no numbers to change.

    Near a fixed point that does not follow x, such as 0 for a cell that multiplies z by x, its value does not either.
    The change is relative to z or to the value at the start, the longer one, since z may be 0.
    """
    x = pytree.tree_map_only(Tensor, _nudged, problem.plan.x)
    if not any(isinstance(leaf, Tensor) and is_of_state(leaf) for leaf in pytree.tree_leaves(x)):
        return True
    moved = problem.norms(problem.map(torch.sub, cell(z, x), cell(z, problem.plan.x)))
    size = torch.maximum(problem.norms(z), problem.norms(cell(problem.plan.z0, problem.plan.x)))
    return bool((moved > NUDGE * IGNORED * size).any())


def _nudged(leaf: Tensor) -> Tensor:
    return leaf + NUDGE * (_size(leaf) or 1.0) * torch.randn_like(leaf) if is_of_state(leaf) else leaf


def _changed(problem: Problem) -> Iterator[tuple[str, Callable[..., Any]]]:
    norms = [_normalisation(leaf) for leaf in problem.leaves(problem.plan.z0)]
    if all(norms):
        change = f"normalise the cell's value, by {' and '.join(dict.fromkeys(norms))} last"
        yield change, lambda z, x: problem.map(_normalised, problem.cell(z, x))
    for shrink in SHRINKS:
        change = f"give it {shrink:g} z in place of z, or smaller weights, bounded by torch.nn.utils.parametrizations"
        yield change, partial(_with_shrunk, problem, shrink)


def _with_shrunk(problem: Problem, shrink: float, z: Any, x: Any) -> Any:
    return problem.cell(problem.map(lambda leaf: shrink * leaf, z), x)


def _normalisation(leaf: Tensor) -> str:
    """Module that normalises all numbers of an image (C, H, W), else the last dimension.

    Empty for complex numbers, and for one or two numbers, of which it would leave only signs.
    """
    is_image = leaf.dim() > 3
    if leaf.is_complex() or leaf.dim() < 2 or (leaf.shape[1:].numel() if is_image else leaf.shape[-1]) <= 2:
        return ""
    return f"torch.nn.GroupNorm(1, {leaf.shape[1]})" if is_image else f"torch.nn.LayerNorm({leaf.shape[-1]})"


def _normalised(leaf: Tensor) -> Tensor:
    """Value of ``_normalisation``."""
    return functional.group_norm(leaf, 1) if leaf.dim() > 3 else functional.layer_norm(leaf, leaf.shape[-1:])
