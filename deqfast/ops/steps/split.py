"""Steps of rows that are not whole samples: an op sums over each row, `parts` joins the sums, and an op applies them.

The rows (B, D) are parts of samples (`state_group=`, see ``Parts``) or positions of sequences (`causal=True`, see
``Positions``), which are judged in their order. An evaluation is

1. ``<step>_sums``: sums (B, K) over the elements of each row, in the dtype of the state;
2. one reduction of them over all parts, and a second if a norm is a maximum, or if squares over- or underflow;
3. the verdict on each row from the norms, by the kernel's own ``picard_step`` on rows of two numbers; on positions by
   the reference;
4. ``<step>_apply``: the step, from the sums of the whole sample.

Between the first and the last, nothing has more than K numbers per row. The product with the transposed inverse, once
per gradient, runs in plain torch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.constants import ADVANCES, BROKEN, IMPROVED, RUNNING
from . import BroydenStep, MultisecantStep, Parts, PicardStep
from .positions import Positions
from .reference import HOLDS_STEPS, joined, joined_positions, judge

Ops = Callable[[str], Callable[..., Any]]
"""The op of this name, as the kernel runs it."""


def picard_step(a: PicardStep, op: Ops, parts: Parts | Positions) -> None:
    """z <- z + damping g."""
    _, judged = _judged(a, _squares(a, op), op, parts)
    if not a.last:
        op("picard_apply")(*judged, a.damping)


def multisecant_step(a: MultisecantStep, op: Ops, parts: Parts | Positions) -> None:
    """z <- z + alpha (beta g - DF gamma)."""
    n = min(a.k, a.left.shape[1])
    if a.last or not n:
        sums = _squares(a, op)
    else:
        sums = a.z.new_zeros(len(a.z), 4 + n * (3 if a.method in HOLDS_STEPS else 2))
        history = a.f_prev, a.left, a.df, a.gram
        op("multisecant_sums")(a.z, a.fz, a.status, *history, sums, a.k, a.method, a.beta)
    sums, judged = _judged(a, sums, op, parts)
    if not a.last:
        op("multisecant_apply")(*judged, a.left, a.df, a.gram, sums, a.k, a.method, a.alpha, a.beta, a.ridge)


def broyden_step(a: BroydenStep, op: Ops, parts: Parts | Positions) -> None:
    """z <- z + s_k, from the steps only."""
    if a.last or not a.k:
        sums = _squares(a, op)
    else:
        sums = a.z.new_zeros(len(a.z), 2 + 2 * a.k)
        op("broyden_sums")(a.z, a.fz, a.status, a.steps, sums, a.k)
    sums, judged = _judged(a, sums, op, parts)
    if not a.last:
        op("broyden_apply")(*judged, a.steps, a.gram, a.first, sums, a.k)


def _squares(a: Any, op: Ops) -> Tensor:
    sums = a.z.new_zeros(len(a.z), 2)
    op("picard_sums")(a.z, a.fz, a.status, sums)
    return sums


def _judged(a: Any, sums: Tensor, op: Ops, parts: Parts | Positions) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sums over all parts; and z, fz, best and the verdicts (B,) int8.

    Residuals, statuses and iterations are recorded. The last step of a solve carries the verdicts out.
    """
    (g_norm, f_norm), sums = (
        joined_positions(a, sums, parts) if isinstance(parts, Positions) else joined(a, sums, parts)
    )
    # By the maximum norm, a row z = (|f|, |g|) with f(z) = (|f|, 0) has the residual of the sample. What the op writes
    # tells its verdict: it has stored a best iterate that is no longer -1, and gone back to it if z is now -1.
    z = torch.stack([f_norm, g_norm], dim=1)
    best, fz = torch.full_like(z, -1), torch.stack([f_norm, torch.zeros_like(f_norm)], dim=1)
    monitor, rule = (a.status, a.iterations, a.residual, a.progress, a.active), a.rule._replace(maximum=True)
    if isinstance(parts, Positions):
        judge(replace(a, z=z, fz=fz, best=best), fz - z, (g_norm, f_norm), parts)
    else:
        op("picard_step")(z, fz, best, *monitor, a.k, a.last, *rule, 1.0)
    verdict = (best[:, 0] >= 0) * IMPROVED + (z[:, 0] == -1) * BROKEN + (a.status == RUNNING) * ADVANCES
    judged = a.z, a.fz, a.best, verdict.to(torch.int8)
    if a.last:
        op("picard_apply")(*judged, 0.0)
    return sums, judged
