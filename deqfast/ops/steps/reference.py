"""Steps in plain torch: the specification of their kernels. They wait for the device only if k is negative.

A step has two halves: what it sums over the elements of a sample, and how it judges and applies the sums. The halves
are ops of their own too, for rows that are not whole samples, see ``deqfast.ops.steps.split``.

In a loop of a graph, k is a tensor () int64 of at least 1 instead of a number. All slots of the history are then in the
window. Slots without a pair must be zeros: such pairs change nothing.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.constants import (
    ADVANCES,
    ANDERSON_I,
    ANDERSON_II,
    BROKEN,
    BROYDEN_BAD,
    BROYDEN_GOOD,
    CONVERGED,
    ESCAPED,
    GROWTH,
    IMPROVED,
    MAX_ITER,
    NONFINITE,
    PIVOT_FLOOR,
    REDUCTION,
    REDUCTION_PER_TOL,
    ROUNDINGS_OF_STALL_FLOOR,
    RUNNING,
    STALL_GAIN,
    STALL_ITERATIONS,
    STALLED,
)
from . import (
    PROGRESS,
    BroydenApply,
    BroydenStep,
    BroydenSums,
    MultisecantApply,
    MultisecantStep,
    MultisecantSums,
    MultisecantTransposed,
    Parts,
    PicardApply,
    PicardStep,
    PicardSums,
    StopRule,
)
from .positions import Positions

Step = PicardStep | MultisecantStep | BroydenStep
AnyStep = TypeVar("AnyStep", PicardStep, MultisecantStep, BroydenStep)
Index = int | Tensor  # a number, or a tensor () int64
HOLDS_STEPS = BROYDEN_GOOD, ANDERSON_I  # methods whose L holds steps
GAIN_ITERATION, FIRST, START, LEAST = map(PROGRESS.index, ("gain_iteration", "first", "start", "least"))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1)


def _is_sound(square: Tensor) -> Tensor:
    """Return whether a sum of squares gives the length of a vector.

    It must not have overflowed, and underflow of its terms must cost less than its rounding.
    """
    limits = torch.finfo(square.dtype)
    # Not >=: ONNX rounds the limit of float64 to 0.
    return (square > limits.tiny / limits.eps) & (square <= limits.max)


def _largest(v: Tensor) -> Tensor:
    """Largest magnitudes (B,) of rows (B, D)."""
    return torch.linalg.vector_norm(v, math.inf, dim=1) if v.shape[1] else v.new_zeros(len(v))


def _norm(v: Tensor, maximum: bool) -> Tensor:
    """Largest magnitudes (B,) of rows (B, D), or Euclidean norms at any scale; not finite if an element is not."""
    largest = _largest(v)
    if maximum:
        return largest
    square, scale = _dot(v, v), torch.where(largest == 0, 1, largest)
    scaled = v / scale[:, None]
    return _length(square, scale, _dot(scaled, scaled))


def _length(square: Tensor, scale: Tensor, scaled_square: Tensor) -> Tensor:
    """Length whose square this is, unless it has over- or underflowed: then from the square in units of `scale`."""
    largest = torch.finfo(square.dtype).max
    length = torch.where(torch.isfinite(scale), (scale * scaled_square.sqrt()).clamp_max(largest), scale)
    return torch.where(_is_sound(square), square.sqrt(), length)


Norms = tuple[Tensor, Tensor]
"""Norms (B,) of g and of f(z)."""


def _norms(a: Step, g: Tensor) -> Norms:
    return _norm(g, a.rule.maximum), _norm(a.fz, a.rule.maximum)


def _squares(*vectors: Tensor) -> Tensor:
    return torch.stack([_dot(v, v) for v in vectors], dim=1)


def joined(a: Step, sums: Tensor, parts: Parts) -> tuple[Norms, Tensor]:
    """Norms, and `sums` (B, 2 + K) over the parts of each sample: the squares of g and f(z), and products.

    One sum over the parts suffices for Euclidean norms whose squares are sound; the largest magnitude needs another.
    """
    maximum = a.rule.maximum
    if sums.shape[1] > 2 or not maximum:
        sums = parts.sum(sums)
    squares = sums[:, :2]
    if not maximum and bool((_is_sound(squares) | (a.status != RUNNING)[:, None]).all()):
        return _pair(squares.sqrt()), sums
    vectors = a.fz - a.z, a.fz
    largest = parts.most(torch.stack([_largest(v) for v in vectors], dim=1))
    if maximum:
        return _pair(largest), sums
    scale = torch.where(largest == 0, 1, largest)
    scaled = [v / factor[:, None] for v, factor in zip(vectors, scale.unbind(1), strict=True)]
    return _pair(_length(squares, scale, parts.sum(_squares(*scaled)))), sums


def joined_positions(a: Step, sums: Tensor, positions: Positions) -> tuple[Norms, Tensor]:
    """Likewise over each position and the earlier ones; the products are L^T g, then those of the newest pair."""
    running, own = a.status == RUNNING, torch.stack(_norms(a, a.fz - a.z), dim=1)
    norms, n = _pair(positions.norms(own, running, a.rule.maximum)), sums.shape[1] - 2
    if n and isinstance(a, MultisecantStep):
        n = _pairs(a.k, a.left.shape[1])
        products = positions.products([sums[:, 2 : 2 + n], sums[:, 2 + n :]], running, a.k)
        sums = torch.cat([sums[:, :2], *products], dim=1)
    return norms, sums


def _pair(columns: Tensor) -> Norms:
    first, second = columns.unbind(1)
    return first, second


def rounding_of(dtype: torch.dtype, stall_floor: float) -> float:
    """Rounding unit of f: the unit of the state's dtype, or of the lower precision that this stall floor implies."""
    return max(torch.finfo(dtype).eps, stall_floor / ROUNDINGS_OF_STALL_FLOOR)


@dataclass(frozen=True)
class Evaluation:
    """Numbers (B,) by which samples are judged after an evaluation of f at z, with g = f(z) - z."""

    res_abs: Tensor  # |g|; finite if f(z) is
    res_rel: Tensor  # |g| / (|f(z)| + offset)
    size: Tensor  # |f(z)|
    first: Tensor  # |g| of the first evaluation
    start: Tensor  # max(|f(z0)|, |f(z0) - z0|): within a factor of 2 of max(|f(z0)|, |z0|), without the norm of z0

    def converged(self, rule: StopRule) -> Tensor:
        """Mask (B,) of the samples that have converged.

        A residual that meets the tolerance must also belong to a fixed point. If iterates run away, |g| / |f(z)|
        vanishes and g rounds to 0. So a sample whose |f(z)| has outgrown the start must have lost most of its residual,
        including what rounding may hide. No sample converges with a longer residual than its first one.
        """
        left = self.first * min(REDUCTION, REDUCTION_PER_TOL * rule.tol)
        left = left.clamp_min(rule.tol if rule.absolute else rule.offset * rule.tol)
        near = (self.size <= GROWTH * self.start) & (self.res_abs <= self.first)
        fallen = self.res_abs + rounding_of(self.size.dtype, rule.stall_floor) * self.size <= left
        return (self.measure(rule.absolute) <= rule.tol) & (near | fallen)

    def measure(self, absolute: bool) -> Tensor:
        """Residual (B,) that the tolerance bounds."""
        return self.res_abs if absolute else self.res_rel


def evaluated(z: Tensor, fz: Tensor, rule: StopRule, begun: Tensor | None, norms: Norms | None = None) -> Evaluation:
    """Evaluation of f at rows (B, D); `begun` (2, B) are `first` and `start`, None in the first evaluation."""
    res_abs, size = norms or (_norm(fz - z, rule.maximum), _norm(fz, rule.maximum))
    relative = (res_abs / (size + rule.offset)).clamp_max(torch.finfo(fz.dtype).max)
    first, start = (res_abs, torch.maximum(size, res_abs)) if begun is None else begun
    return Evaluation(res_abs, torch.where(res_abs == 0, 0, relative), size, first, start)


def begun(progress: Tensor, k: Index) -> Tensor | None:
    """Numbers of the first evaluation in `progress`; None in that evaluation."""
    return None if isinstance(k, int) and k == 0 else progress[FIRST : START + 1]


def _numbered(a: AnyStep) -> AnyStep:
    """`a` with the number of its evaluation, which all running samples share: they have the most evaluations."""
    if not isinstance(a.k, int) or a.k >= 0:
        return a
    k = max(a.iterations.tolist(), default=0)
    return replace(a, k=k, last=k + 1 >= -a.k)


def judge(a: Step, g: Tensor, norms: Norms, positions: Positions | None = None) -> Tensor:
    """Record residuals, best iterates and status; return the mask (B,) of the samples that take another step.

    A position neither converges nor stalls before the earlier ones have ended: its residual would not belong to the
    value. One that stalls keeps its present iterate.
    """
    running = a.status == RUNNING
    now = evaluated(a.z, a.fz, a.rule, begun(a.progress, a.k), norms)
    finite = torch.isfinite(now.res_abs)
    converged = running & finite & now.converged(a.rule)
    judged = running & finite
    if positions is not None:
        in_turn = positions.in_turn(converged | ~running)
        judged &= in_turn | ~converged  # one that waits for its turn has not run away
        converged &= in_turn

    gain, gain_iteration, first, start, best_size, least = (a.progress[i] for i in range(len(PROGRESS)))
    rounding = rounding_of(g.dtype, a.rule.stall_floor)
    length = (now.res_abs + rounding * now.size).clamp_max(torch.finfo(g.dtype).max)
    better = length < a.residual[1] + rounding * best_size
    improved = converged | (running & finite & better)
    a.best.copy_(torch.where(improved[:, None], a.z, a.best))
    a.residual.copy_(torch.where(improved, torch.stack([now.res_rel, now.res_abs]), a.residual))
    gained = running & finite & (now.res_rel < STALL_GAIN * gain)
    progress = [
        torch.where(gained, now.res_rel, gain),
        torch.where(gained, torch.zeros_like(gain) + a.k, gain_iteration),
        torch.where(running & finite, now.first, first),
        torch.where(running & finite, now.start, start),
        torch.where(improved, now.size, best_size),
        torch.where(judged, torch.minimum(now.measure(a.rule.absolute), least), least),
    ]
    a.progress.copy_(torch.stack(progress))
    stalled = (
        (a.residual[0] < a.rule.stall_floor)
        & (a.k - a.progress[GAIN_ITERATION] >= STALL_ITERATIONS)
        & (a.progress[LEAST] > a.rule.tol)
    )
    stalled &= running & finite & ~converged
    if positions is not None:
        stalled &= positions.in_turn(stalled | converged | ~running)
        # Later positions are judged with the present iterate, which the value must then have.
        a.best.copy_(torch.where(stalled[:, None], a.z, a.best))
        a.residual.copy_(torch.where(stalled, torch.stack([now.res_rel, now.res_abs]), a.residual))
    broken = running & ~finite

    a.iterations.copy_(torch.where(running, a.k + 1, a.iterations))
    a.status.masked_fill_(converged, CONVERGED).masked_fill_(broken, NONFINITE).masked_fill_(stalled, STALLED)
    if a.last:
        end(a.status, a.progress, a.rule.tol)
    a.z.copy_(torch.where(broken[:, None], a.best, a.z))
    a.active.sub_((running & (a.status != RUNNING)).sum())
    return running & (a.status == RUNNING)


def end(status: Tensor, progress: Tensor, tol: float) -> None:
    """Set the status of samples that still run at the end: ESCAPED if an iterate met the tolerance, else MAX_ITER."""
    running = status == RUNNING
    escaped = progress[LEAST] <= tol
    status.masked_fill_(running & escaped, ESCAPED).masked_fill_(running & ~escaped, MAX_ITER)


def picard_step(a: PicardStep) -> None:
    """z <- z + damping (f(z) - z) for every running sample."""
    a = _numbered(a)
    g = a.fz - a.z
    advance = judge(a, g, _norms(a, g))
    if not a.last:
        a.z.copy_(torch.where(advance[:, None], a.fz if a.damping == 1.0 else a.z + a.damping * g, a.z))


def picard_sums(a: PicardSums) -> None:
    """Squares of g and f(z)."""
    _store_sums(a, a.fz - a.z, [])


def _store_sums(a: PicardSums | MultisecantSums | BroydenSums, g: Tensor, products: list[Tensor]) -> None:
    """Store the squares of g and f(z), and the products, of the running rows."""
    a.sums.copy_(torch.where((a.status == RUNNING)[:, None], torch.cat([_squares(g, a.fz), *products], dim=1), a.sums))


def picard_apply(a: PicardApply) -> None:
    """z <- z + damping (f(z) - z) for the rows that take the step."""
    advance = _carried_out(a)
    a.z.copy_(torch.where(advance[:, None], a.fz if a.damping == 1.0 else a.z + a.damping * (a.fz - a.z), a.z))


def _carried_out(a: PicardApply | MultisecantApply | BroydenApply) -> Tensor:
    """Keep or restore the best iterates; return the mask (B,) of the rows that take the step."""
    improved, broken, advance = ((a.verdict & bit) != 0 for bit in (IMPROVED, BROKEN, ADVANCES))
    a.best.copy_(torch.where(improved[:, None], a.z, a.best))
    a.z.copy_(torch.where(broken[:, None], a.best, a.z))
    return advance


def multisecant_step(a: MultisecantStep) -> None:
    """z <- z + alpha (beta g - DF gamma) with N gamma = L^T g."""
    a = _numbered(a)
    g = a.fz - a.z
    n = 0 if a.last else _pairs(a.k, a.left.shape[1])
    with torch.autocast(a.z.device.type, enabled=False):
        pair = _newest_pair(a) if n else None
        products = [] if pair is None else _products(a, pair, g, n)
    advance = judge(a, g, _norms(a, g))
    if a.last:
        return
    with torch.autocast(a.z.device.type, enabled=False):
        if pair is not None:
            _keep_pair(a, advance, pair)
        _take_step(a, g, advance, n, products)


def multisecant_sums(a: MultisecantSums) -> None:
    """Complete the newest pair; squares and products of the rows."""
    with torch.autocast(a.z.device.type, enabled=False):
        g, pair = a.fz - a.z, _newest_pair(a)
        _store_sums(a, g, _products(a, pair, g, _pairs(a.k, a.left.shape[1])))
        _keep_pair(a, a.status == RUNNING, pair)


def multisecant_apply(a: MultisecantApply) -> None:
    """z <- z + alpha (beta g - DF gamma) for the rows that take the step, from the sums of all parts."""
    advance, n = _carried_out(a), _pairs(a.k, a.left.shape[1])
    sizes = [n, n, 2, n] if a.method in HOLDS_STEPS else [n, n, 2]
    with torch.autocast(a.z.device.type, enabled=False):
        _take_step(a, a.fz - a.z, advance, n, [*a.sums[:, 2:].split(sizes, dim=1)] if n else [])


def _take_step(
    a: MultisecantStep | MultisecantApply, g: Tensor, advance: Tensor, n: int, products: list[Tensor]
) -> None:
    """Take the step of the rows that advance, with the n pairs of the window and the sums of ``_products``."""
    step, slot = a.beta * g, a.k % a.left.shape[1]
    if n:
        t, *pair_products = products
        _enter_pair(a, advance, *pair_products)
        gamma = solve_window(a.gram, t, a.k, a.method, a.ridge)
        step = step - torch.einsum("bmd,bm->bd", a.df[:, :n].to(a.z.dtype), gamma)
    # The history keeps the step as it is taken, so that secant equations stay exact in a short history dtype.
    z_next = a.z + (a.alpha * step).to(a.left.dtype).to(a.z.dtype)
    _put(a.left, slot, z_next - a.z, advance)
    if n and a.method in HOLDS_STEPS:
        dots = torch.einsum("bmd,bd->bm", a.df[:, :n].to(a.z.dtype), _at(a.left, slot).to(a.z.dtype))
        _put(a.gram[:, :, :n], slot, dots, advance)
    a.z.copy_(torch.where(advance[:, None], z_next, a.z))


def broyden_step(a: BroydenStep) -> None:
    """z <- z + s_k with s_k = (g + sum_i c_i s_{i+1}) / (1 - c_{k-1})."""
    a = _numbered(a)
    g = a.fz - a.z
    n = 0 if a.last else _pairs(a.k, a.steps.shape[1])
    products = _dots_of_steps(a, g, n) if n else []
    advance = judge(a, g, _norms(a, g))
    if not a.last:
        _take_broyden_step(a, g, advance, n, products)


def broyden_sums(a: BroydenSums) -> None:
    """Squares, and dots of the newest step and of g with the steps."""
    g = a.fz - a.z
    _store_sums(a, g, _dots_of_steps(a, g, a.k))


def broyden_apply(a: BroydenApply) -> None:
    """z <- z + s_k for the rows that take the step, from the sums of all parts."""
    advance = _carried_out(a)
    _take_broyden_step(a, a.fz - a.z, advance, a.k, [*a.sums[:, 2:].split(a.k, dim=1)] if a.k else [])


def _dots_of_steps(a: BroydenStep | BroydenSums, g: Tensor, n: int) -> list[Tensor]:
    """Dots (B, n) of the first n steps with the newest one and with g."""
    with torch.autocast(a.z.device.type, enabled=False):
        return [torch.einsum("bmd,bd->bm", a.steps[:, :n], v) for v in (_at(a.steps, a.k - 1), g)]


def _take_broyden_step(
    a: BroydenStep | BroydenApply, g: Tensor, advance: Tensor, n: int, products: list[Tensor]
) -> None:
    """Take the step of the rows that advance, with n steps and the sums of ``_dots_of_steps``."""
    step, known = g, a.steps[:, :n]
    with torch.autocast(a.z.device.type, enabled=False):
        if n:
            newest, t = products
            _put(a.gram[:, :, :n], a.k - 1, newest, advance)
            c = _step_coefficients(a.gram, t, a.first, n)
            scale = 1 - _at(c, a.k - 1)
            square = _at(newest, a.k - 1)
            regular = torch.isfinite(c).all(dim=1) & (scale.abs() >= PIVOT_FLOOR) & ((square == 0) | _is_sound(square))
            broyden = (g + torch.einsum("bmd,bm->bd", known[:, 1:], c[:, :-1])) / scale[:, None]
            step = torch.where(regular[:, None], broyden, g)
            a.first.copy_(torch.where(advance & ~regular, a.k, a.first))
    _put(a.steps, a.k % a.steps.shape[1], step, advance)  # in a graph, the step after the last evaluation is taken too
    a.z.copy_(torch.where(advance[:, None], a.z + step, a.z))


def _step_coefficients(gram: Tensor, t: Tensor, first: Tensor, k: int) -> Tensor:
    """c (B, k) with c_j = (t_j + sum_{i<j} s_j . s_{i+1} c_i) / |s_j|^2; zero before `first` and if s_j = 0."""
    c = torch.zeros_like(t)
    for j in range(k):
        square = gram[:, j, j]
        value = (t[:, j] + _dot(torch.where(c[:, :j] == 0, 0, gram[:, j, 1 : j + 1]), c[:, :j])) / square
        c[:, j] = torch.where((first <= j) & (square != 0), value, 0)
    return c


def multisecant_transposed(a: MultisecantTransposed, parts: Parts | None = None) -> Tensor:
    """alpha (beta v - L gamma) with N^T gamma = DF^T v."""
    with torch.autocast(a.v.device.type, enabled=False):
        history = a.left.shape[1]
        ages = torch.arange(history - 1, -1, -1, device=a.v.device)
        slots = (a.newest[:, None].long() - ages) % history  # (B, M), oldest first
        inside = ages < a.count[:, None]

        def in_order(pairs: Tensor) -> Tensor:
            rows = pairs.gather(1, slots[:, :, None].expand(-1, -1, pairs.shape[2])).to(a.v.dtype)
            return torch.where(inside[:, :, None], rows, 0)

        squares = in_order(a.gram[:, history:].mT).mT.flip(1)
        matrix = in_order(in_order(a.gram[:, :history]).mT)
        t = torch.einsum("bmd,bd->bm", in_order(a.df), a.v)
        t = t if parts is None else parts.sum(t)
        gamma = solve_window(torch.cat([matrix, squares], dim=1), t, history, a.method, a.ridge, transposed=True)
        return a.alpha * (a.beta * a.v - torch.einsum("bmd,bm->bd", in_order(a.left), gamma))


def _pairs(k: Index, history: int) -> int:
    """Number of slots of the window in iteration k."""
    return min(k, history) if isinstance(k, int) else history


def _at(pairs: Tensor, slot: Index) -> Tensor:
    """Return pairs[:, slot]."""
    return pairs[:, slot] if isinstance(slot, int) else pairs.index_select(1, slot).squeeze(1)


def _put(target: Tensor, slot: Index, values: Tensor, advance: Tensor) -> None:
    """Set target[:, slot] = values in the rows of the samples that advance; the others stay."""
    rows = advance.view(-1, *([1] * (values.dim() - 1)))
    values = torch.where(rows, values.to(target.dtype), _at(target, slot))
    if isinstance(slot, int):
        target[:, slot] = values
    else:
        target.index_copy_(1, slot, values[:, None])


@dataclass(frozen=True)
class _Pair:
    """Pair that the present value of f completes: its step s, and the changes of f and of g, (B, D)."""

    s: Tensor
    df: Tensor
    dg: Tensor


def _newest_pair(a: MultisecantStep | MultisecantSums) -> _Pair:
    """The newest pair, whose step is in `left`."""
    s, df = _at(a.left, (a.k - 1) % a.left.shape[1]).to(a.z.dtype), a.fz - a.f_prev
    dg = df - s
    # As the history will keep it.
    return _Pair(s, df, dg.to(a.left.dtype).to(a.z.dtype) if a.method in (ANDERSON_II, BROYDEN_BAD) else dg)


def _products(a: MultisecantStep | MultisecantSums, pair: _Pair, g: Tensor, n: int) -> list[Tensor]:
    """Products with the newest pair, (B, .): L^T g, its column of N, squared lengths, and its row of N if that differs.

    They are sums over the elements. `gram` has DF^T s, which the previous step has summed over this part only.
    """
    newest, window = (a.k - 1) % a.left.shape[1], a.left[:, :n].to(a.z.dtype)
    t, column = (torch.einsum("bmd,bd->bm", window, v) for v in (g, pair.dg))
    if a.method in (ANDERSON_II, BROYDEN_BAD):  # the window still has s in the place of dg
        everywhere = torch.ones_like(a.status, dtype=torch.bool)
        for products, v in ((t, g), (column, pair.dg)):
            _put(products[:, :, None], newest, _dot(pair.dg, v)[:, None], everywhere)
        return [t, column, _at(column, newest)[:, None].expand(-1, 2)]
    row = _at(a.gram[:, :, :n], newest)
    if a.method == ANDERSON_I:
        row = (row - torch.einsum("bmd,bd->bm", window, pair.s)) / a.beta
    return [t, column, torch.stack([_dot(pair.s, pair.s), _dot(pair.dg, pair.dg)], dim=1), row]


def _keep_pair(a: MultisecantStep | MultisecantSums, rows: Tensor, pair: _Pair) -> None:
    """Complete the newest pair in the history of these rows (B,)."""
    newest = (a.k - 1) % a.left.shape[1]
    _put(a.df, newest, a.beta * pair.df + (1 - a.beta) * pair.s, rows)
    if a.method in (ANDERSON_II, BROYDEN_BAD):
        _put(a.left, newest, pair.dg, rows)


def _enter_pair(
    a: MultisecantStep | MultisecantApply, advance: Tensor, column: Tensor, lengths: Tensor, row: Any = None
) -> None:
    """Enter the newest pair in the window matrix: its row, its column, and its squared lengths."""
    history = a.left.shape[1]
    n, newest = column.shape[1], (a.k - 1) % history
    _put(a.gram[:, :, :n], newest, column if row is None else row, advance)
    _put(a.gram[:, :n].mT, newest, column, advance)
    _put(a.gram[:, history:].mT, newest, lengths, advance)


def solve_window(gram: Tensor, t: Tensor, k: Index, method: int, ridge: float, transposed: bool = False) -> Tensor:
    """Solve N gamma = t in the window of iteration k; t and gamma (B, n) are in the order of the slots.

    N is equilibrated by the lengths of its pairs, and eliminated without pivoting from the newest pair to the oldest.
    The first pivot below ``PIVOT_FLOOR`` drops its pair and all older ones; this equals dropping the oldest pairs until
    the rest is regular. Gamma is zero (a Picard step) if no pair is left or the solution overflows. `transposed`:
    `gram` is N^T, and its two rows of lengths are swapped.
    """
    history, n = gram.shape[2], _pairs(k, gram.shape[2])
    order = (k - 1 - torch.arange(n, device=t.device)) % history  # newest first
    squares = gram[:, history:, order]
    scale = torch.where(_is_sound(squares), squares.rsqrt(), 0)
    a = gram[:, order][:, :, order] * scale[:, 0, :, None] * scale[:, 1, None, :]
    if method == BROYDEN_BAD:
        a = a.triu() if transposed else a.tril()
    elif method in (ANDERSON_I, ANDERSON_II):
        diagonal = a.diagonal(dim1=1, dim2=2)
        shift = torch.full_like(diagonal, ridge)
        a = a + torch.diag_embed(torch.where(diagonal < 0, -shift, shift))  # ONNX has no write to a diagonal
    b = t[:, order] * scale[:, 0]
    kept = torch.ones_like(b, dtype=torch.bool)
    for c in range(n):
        pivot = a[:, c, c]
        kept[:, c] = (pivot.abs() >= PIVOT_FLOOR) & (kept[:, c - 1] if c else True)
        factor = a[:, c + 1 :, c] / torch.where(kept[:, c], pivot, 1)[:, None]
        a[:, c + 1 :] -= factor[:, :, None] * a[:, c, None]
        b[:, c + 1 :] -= factor * b[:, c, None]
    gamma = torch.zeros_like(b)
    for c in reversed(range(n)):
        known = torch.where(kept[:, c + 1 :], a[:, c, c + 1 :], 0)  # a dropped pair may contain an overflow
        value = (b[:, c] - _dot(known, gamma[:, c + 1 :])) / a[:, c, c]
        gamma[:, c] = torch.where(kept[:, c], value, 0)
    gamma = gamma * scale[:, 1]
    gamma = torch.where(torch.isfinite(gamma).all(dim=1, keepdim=True), gamma, 0)
    return gamma[:, order]  # the permutation from ages to slots is its own inverse
