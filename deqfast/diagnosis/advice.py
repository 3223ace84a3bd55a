"""Advice from a diagnosis: one or two sentences each, which name what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from ..api.changes import HELP
from ..api.notice import REMEDIES
from ..gradients import JFB, Neumann, Phantom
from ..solution import Status
from ..solvers import Solver
from ..torch_internals import pytree
from .measure import UNCOUPLED

# Two answers with residuals of 1e-5 near one fixed point differ by less, for a condition of the system up to 2500.
SEVERAL = 0.05
COLLAPSED = 0.01  # uncertainty that a relative residual of 1e-3 leaves at a radius of 0.9
GROWN = 1.25  # |f(z)| over the second half of a trial: growth by the square root of the evaluations gives 1.4
VANISHED = 1e-3  # |f(z)| of the whole trial: then the fixed point is zero, and no relative tolerance is met
GRADIENT_OFF = 0.7  # a smaller error leaves the gradient within 45 degrees of the exact one
SIZES_APART = 100  # at a relative residual of 1e-3 the smaller tensor may be off by a tenth
FEWER = 0.5  # of the evaluations of the block's solver: a smaller gain is not worth another solver
SPARE = 1.5  # max_iter for the evaluations that were measured: other batches need more


def advise(d: Any) -> list[str]:
    """Advice that a ``Diagnosis`` gives."""
    if first := _for_a_function(d):
        return [f"{first}. Then diagnose again: the other findings depend on this."]
    return [*_convergence(d), *_answers(d), *_gradients(d)]


def _for_a_function(d: Any) -> str | None:
    """Advice if the cell is not one function of a sample's z and x, as solvers need it."""
    if d.changing or d.difference:
        why = f"contains {', '.join(d.changing)}" if d.changing else f"differs from call to call by {d.difference:.1g}"
        return f"The cell {why}: {HELP}"
    if d.alone is not None and d.alone > UNCOUPLED:
        alone = f"The cell couples samples, a value without the others differs by {d.alone:.1g}"
        return f'{alone}: pass groups= to the block, "batch" if the whole batch is one sample'
    return None


def _convergence(d: Any) -> Iterator[str]:
    failed = {status for status in d.statuses if status != Status.CONVERGED.name}
    if Status.NONFINITE.name in failed:
        yield f"f is not finite in {d.statuses[Status.NONFINITE.name]} samples: {REMEDIES[Status.NONFINITE]}."
    elif Status.STALLED.name in failed:
        tolerance = 10 ** math.ceil(math.log10(d.residual_as_it_is))  # of all samples, which may be those that diverge
        coarse = f", or set rtol={tolerance:g}" if tolerance < 1 else ""
        call = f"call the block in float32, outside of autocast and with x.float(){coarse}"
        yield f"f is rounded too coarsely for this tolerance: {call}."
    elif failed and all(run.length[-1] < VANISHED * max(run.length) for run in d.runs):
        yield f"The fixed point is zero, at which no relative tolerance is met: set atol= of {_name(d.solver)}."
    elif failed and all(run.own is None for run in d.runs):
        yield _why_none(d)
    else:
        yield from _solvers(d)


def _solvers(d: Any) -> Iterator[str]:
    """A solver that converges, if the block's does not, or one that needs far fewer evaluations."""
    able = sorted((run for run in d.runs if run.own is not None), key=lambda run: run.own)
    own = [run for run in able if type(run.solver) is type(d.solver)]
    if not able or (d.converged and (not own or able[0].own >= FEWER * own[0].own)):
        return
    best = own[0] if own and able[0].own >= FEWER * own[0].own else able[0]
    rule = {name: getattr(d.solver, name) for name in ("rtol", "atol", "norm")}
    better = spelled(replace(best.solver, **rule, max_iter=_budget(best.own)))
    yield f"Take solver={better}: all samples meet the tolerance in {best.own} evaluations."


def _why_none(d: Any) -> str:
    said, half = "No solver converges from here", [len(run.length) // 2 for run in d.runs]
    growth = [
        max(run.length[k:]) / (max(run.length[:k] or [0.0]) or math.inf) for run, k in zip(d.runs, half, strict=True)
    ]
    if max(growth) > GROWN:
        worst = d.runs[growth.index(max(growth))]
        said += f", and |f(z)| grows from {worst.length[0]:.2g} to {max(worst.length):.2g} ({_name(worst.solver)})"
    if d.remedy is None:
        return (
            f"{said}: make the cell contract, by a normalisation last, weights of a bounded norm "
            "(torch.nn.utils.parametrizations), a damped cell z + a (f(z, x) - z), or a ResidualCell, MonotoneCell "
            "or SubhomogeneousCell."
        )
    needed, solver = d.remedy.evaluations, d.solver
    if needed > solver.max_iter:
        solver = replace(solver, max_iter=_budget(needed))
    return f"{said}: {d.remedy.change}. Then {spelled(solver)} converges, in {needed} evaluations."


def _answers(d: Any) -> Iterator[str]:
    yield from _broken_values(d)
    identity = median(d.step) < COLLAPSED
    if identity:
        change = "leave the skip connection out, f(z, x) = h(z, x) instead of z + h(z, x)"
        yield f"The cell is nearly the identity, it moves a random state by {median(d.step):.1g}: {change}."
    if not bool(d.settled.any()):
        return
    if not identity and largest(d.spread) > SEVERAL:
        contract = "make the cell contract by smaller weights, regularize.jacobian_penalty or a MonotoneCell"
        several = f"There are several fixed points, {largest(d.spread):.2g} apart"
        yield f"{several}: start evaluation as training starts, or {contract}."
    if not identity and largest(d.dependence) < COLLAPSED:
        give = "give x more weight in the cell, add it before the last normalisation"
        yield f"z* is nearly the same for other x: {give}, and keep activations out of saturation."
    sizes = [size for size in pytree.tree_leaves(d.sizes) if size > 0]
    if not d.scaled and len(sizes) > 1 and max(sizes) > SIZES_APART * min(sizes):
        yield f"The tensors of z are of different size, and small ones hardly count: set scale={rounded(d.sizes)}."


def _broken_values(d: Any) -> Iterator[str]:
    """Advice on values that are not finite though the solve met none, or not only there."""
    places = {"f is not finite at a random state as large as z*": ~d.step.isfinite()}
    places["The Jacobian at z* is not finite"] = d.settled & ~(d.radius.isfinite() & d.norm.isfinite())
    for what, broken in places.items():
        if bool(broken.any()):
            limits = "keep arguments of roots, logarithms and divisions away from their limits"
            by = "torch.clamp or torch.nn.functional.softplus"
            yield f"{what} in {int(broken.sum())} of {len(broken)} samples: {limits}, such as by {by}."


def _gradients(d: Any) -> Iterator[str]:
    if not d.gradients or not isinstance(d.adjoint, (JFB, Neumann, Phantom)):
        return
    radius, error = largest(d.radius[d.settled]), median(d.gradients[repr(d.adjoint)].measured)
    off = f"{_name(d.adjoint)}'s gradient is off by {100 * error:.0f} % of the exact one's length"
    if radius >= 1:
        measured = "" if math.isnan(error) else f" {off}."
        diverges = "so the series of JFB, Neumann and Phantom diverges"
        take = f'take adjoint="implicit", or make the cell contract.{measured}'
        yield f"At z* the spectral radius reaches {radius:.2g}, {diverges}: {take}"
    elif error > GRADIENT_OFF:
        better = [key for key, gradient in d.gradients.items() if median(gradient.measured) < GRADIENT_OFF]
        also = f", or {better[0]}," if better else ""
        yield f'{off}: take adjoint="implicit"{also} if gradients must be near the exact one.'


def _budget(evaluations: int) -> int:
    return math.ceil(SPARE * evaluations / 10) * 10


def spelled(solver: Solver, shown: tuple[str, ...] = ()) -> str:
    """The solver with the settings that are not the defaults, and those named."""
    settings = {field.name: (getattr(solver, field.name), field.default) for field in fields(solver)}
    given = [f"{name}={value!r}" for name, (value, default) in settings.items() if value != default or name in shown]
    return f"{_name(solver)}({', '.join(given)})"


def _name(option: Any) -> str:
    return type(option).__name__


def median(numbers: Any) -> float:
    """Median of the numbers that were measured; NaN without any."""
    return float(numbers.nanmedian()) if numbers.numel() else math.nan


def largest(numbers: Any) -> float:
    known = numbers[~numbers.isnan()]
    return float(known.max()) if known.numel() else math.nan


def rounded(tree: Any) -> Any:
    """The tree of numbers, each to its first digit."""
    return pytree.tree_map(lambda size: float(f"{size:.1g}"), tree)
