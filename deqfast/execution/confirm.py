"""Confirmation of a solve by the evaluation that its gradient needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engine.solve import Options
from ..solution import Solution, Status
from ..state.floors import float32_products_eps, residual_floor
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..torch_internals import pytree


@torch.no_grad()
def confirmed(solution: Solution, options: Options, z: Any, evaluation: list[Tensor]) -> Solution:
    """Return the solution, with the status INCONSISTENT for converged samples that this evaluation at z* contradicts.

    A difference of twice the residual or the tolerance, plus the rounding of f, is allowed. Nothing waits for a GPU.
    """
    if not len(solution.status) or not solution.may_include(Status.CONVERGED):
        return solution
    leaves = pytree.tree_leaves(z)
    device = leaves[0].device
    values, states = ([t.dtype for t in tensors] for tensors in (evaluation, leaves))
    rounding = residual_floor(values, states, device, float32_products_eps(device))
    solver = options.solver
    gaps = [y - one for y, one in zip(evaluation, leaves, strict=True)]
    factors = factors_of(options.scale, pytree.tree_structure(z))
    size, gap = (sample_norms(of, options.groups, solver.norm == "max", factors) for of in (evaluation, gaps))
    allowed = solution.residual.clamp_min(solver.tol).mul_(2)
    bound = allowed + rounding * size if solver.is_absolute else (allowed + rounding) * size
    if solver.offset:
        bound += allowed * solver.offset
    met = gap <= bound
    if solution.counts is not None and bool(met.all()):
        return solution
    moved = (solution.status == Status.CONVERGED) & ~met
    return replace(solution, status=solution.status.masked_fill(moved, Status.INCONSISTENT))
