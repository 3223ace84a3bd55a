"""Diagnosis of a block: why it converges or not, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._checks import check_count
from ..api.block import DEQBlock
from ..api.changes import changing_modules, difference
from ..regularize import spectral_radius
from ..solution import Solution, Status
from ..state.groups import Grouping
from ..torch_internals.transforms import check_plain, check_values
from . import measure
from .problem import Problem
from .result import Diagnosis


def diagnose(
    block: DEQBlock | Callable[[Any, Any], Any],
    x: Any,
    z0: Any = None,
    *,
    groups: Grouping = None,
    samples: int = 4,
    starts: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Measure why a block converges or not, and how wrong its gradient is; say what to change.

    Runs the block's solver and trials of Picard, Anderson and Broyden from z0, and the best of them from random starts.
    It measures the contraction at the fixed points, how they depend on the start and on x, errors of gradients, and
    randomness. Takes about 100 to 300 evaluations of the cell, and about 200 products with its Jacobian. If nothing
    converges, up to 500 more look for a change of the cell that helps.

    The block is measured in its present mode and restored: gradients, buffers, torch's random state and warnings. Hooks
    of the cell run in all evaluations. Options that only speed up a solve are not used.

    Args:
        block: a block or a cell, which is taken as ``DEQBlock(cell)``.
        x, z0, groups: as in a call of the block.
        samples: number of samples whose gradients are compared with an exact solve; all, if the cell couples samples.
        starts: number of random starts, at least 0.
        seed: of the random starts and directions.

    Returns:
        The findings and the advice.

    Raises:
        TypeError, ValueError: `samples`, `starts` or the size of the batch is not allowed; else as in a call.
        RuntimeError: within torch.func or forward-mode AD.

    Examples:
        >>> report = deqfast.diagnose(deqfast.DEQBlock(lambda z, x: z + x), torch.rand(4, 8))
        >>> print(report.advice[0].partition(": ")[2])
        normalise the cell's value, by torch.nn.LayerNorm(8) last. Then Broyden() converges, in 2 evaluations.
    """
    check_count("samples", samples)
    check_count("starts", starts, 0)
    block = block if isinstance(block, DEQBlock) else DEQBlock(block)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.inference_mode(False), torch.random.fork_rng(devices):
        plan = block._plan(x, block._initial_state(x) if z0 is None else z0, groups)
        check_plain("diagnose", plan.z0)
        check_values("z0", plan.z0)
        problem = Problem(plan)
        if not problem.packing.batch:
            raise ValueError("x must hold at least one sample, got an empty batch")
        gap = difference(problem.plan)
        with problem.held(seed):
            return _diagnosed(block, problem, gap, samples, starts)


def _diagnosed(block: DEQBlock, problem: Problem, gap: float | None, samples: int, starts: int) -> Diagnosis:
    plan = problem.plan
    as_it_is = problem.as_it_is()
    runs, solutions = zip(*measure.trials(problem), strict=True)
    ways: list[tuple[Solution, Callable[[Any], Solution]]] = [(as_it_is, problem.as_it_is)]
    ways += [(s, partial(problem.solve, run.solver, problem.f)) for run, s in zip(runs, solutions, strict=True)]
    best, from_start = max(ways, key=lambda way: measure.quality(way[0]))
    z, settled = best.value, best.converged
    radius, norm = spectral_radius(problem.cell, z, plan.x, groups=plan.groups), measure.norm(problem, z)
    step = measure.first_step(problem, z)
    again = [from_start(measure.random_state(problem, z)) for _ in range(starts if bool(settled.any()) else 0)]
    alone = measure.alone(problem, z, int(settled.int().argmax()))
    is_coupled = alone is not None and alone > measure.UNCOUPLED
    gradients = {}
    if bool(settled.any()):
        rows = None if alone is None or is_coupled else settled.nonzero()[:samples, 0]
        gradients = measure.gradient_errors(problem, z, norm, block.adjoint, rows)
    changing = changing_modules(plan.cell)
    fails = not bool(as_it_is.converged.all()) and all(each.own is None for each in runs)
    remedy = measure.find_remedy(problem) if fails and not (gap or changing or is_coupled) else None
    ended = as_it_is.status.tolist()
    facts: dict[str, Any] = dict(cell=getattr(plan.cell, "__name__", type(plan.cell).__name__), solver=plan.solver)
    facts |= dict(statuses={status.name: ended.count(status) for status in Status if status in ended})
    facts |= dict(evaluations_as_it_is=as_it_is.evaluations, residual_as_it_is=float(as_it_is.residual_rel.max()))
    facts |= dict(runs=list(runs), settled=settled, radius=radius, norm=norm, step=step, gradients=gradients)
    facts["spread"] = measure.spread(problem, best, [*(s for s, _ in ways if s is not best), *again])
    facts["moved"] = torch.where(settled, problem.distances(z, plan.z0), torch.nan)
    facts["dependence"] = measure.dependence(problem, z, settled)
    facts |= dict(changing=changing, difference=gap, alone=alone, remedy=remedy, sizes=measure.sizes(z))
    facts |= dict(scaled=plan.options.scale is not None, evaluations=problem.evaluations)
    return Diagnosis(adjoint=block.adjoint, **facts)
