"""Every op in plain torch: the ground truth of the tests, ``kernel="torch"``, and the baseline of the benchmarks.

The functions take the arguments of the registered ops (``deqfast.ops``), update their tensors in place, and work in
the dtype of the state (float32 or float64). They hold no host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# A solve has lost all hope of gaining in low precision after this many iterations without a gain of this much.
STALL_ITERATIONS = 5
STALL_GAIN = 0.95
# Pivots of the equilibrated window matrix below this carry no information.
PIVOT_FLOOR = 1e-7

BROYDEN_GOOD, BROYDEN_BAD, ANDERSON_I, ANDERSON_II = range(4)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1)


def _judge(
    z: Tensor,
    fz: Tensor,
    g: Tensor,
    best: Tensor,
    status: Tensor,
    iterations: Tensor,
    residual: Tensor,
    gain: Tensor,
    active: Tensor,
    k: int,
    tol: float,
    absolute: bool,
    stall_floor: float,
) -> Tensor:
    """Record residuals, best iterates and status; return the mask (B,) of the samples that take another step."""
    limits = torch.finfo(z.dtype)
    running = status == 0
    res_abs = _dot(g, g).sqrt()
    f_norm = _dot(fz, fz).sqrt()
    finite = torch.isfinite(res_abs) & torch.isfinite(f_norm)
    res_rel = (res_abs / f_norm.clamp_min(limits.tiny)).clamp_max(limits.max)
    measure, best_measure = (res_abs, residual[1]) if absolute else (res_rel, residual[0])

    improved = running & finite & (measure < best_measure)
    best.copy_(torch.where(improved[:, None], z, best))
    gained = running & finite & (res_rel < STALL_GAIN * gain[0])
    gain.copy_(torch.where(gained, torch.stack([res_rel, torch.full_like(res_rel, k)]), gain))
    residual.copy_(torch.where(improved, torch.stack([res_rel, res_abs]), residual))
    converged = running & finite & (measure <= tol)
    stalled = (residual[0] < stall_floor) & (k - gain[1] >= STALL_ITERATIONS)
    stalled &= running & finite & ~converged
    broken = running & ~finite

    iterations.masked_fill_(running, k + 1)
    status.masked_fill_(converged, 1).masked_fill_(broken, 2).masked_fill_(stalled, 3)
    z.copy_(torch.where(broken[:, None], best, z))
    active.sub_((running & (status != 0)).sum())
    return running & (status == 0)


def picard_step(
    z: Tensor,
    fz: Tensor,
    best: Tensor,
    status: Tensor,
    iterations: Tensor,
    residual: Tensor,
    gain: Tensor,
    active: Tensor,
    k: int,
    last: bool,
    tol: float,
    absolute: bool,
    stall_floor: float,
    damping: float,
) -> None:
    """z <- z + damping (f(z) - z) for every running sample. See ``deqfast.ops`` for the arguments."""
    g = fz - z
    advance = _judge(z, fz, g, best, status, iterations, residual, gain, active, k, tol, absolute, stall_floor)
    if not last:
        z.copy_(torch.where(advance[:, None], fz if damping == 1.0 else z + damping * g, z))


def multisecant_step(
    z: Tensor,
    fz: Tensor,
    best: Tensor,
    status: Tensor,
    iterations: Tensor,
    residual: Tensor,
    gain: Tensor,
    active: Tensor,
    f_prev: Tensor,
    left: Tensor,
    df: Tensor,
    gram: Tensor,
    k: int,
    last: bool,
    tol: float,
    absolute: bool,
    stall_floor: float,
    method: int,
    alpha: float,
    beta: float,
    ridge: float,
) -> None:
    """z <- z + alpha (beta g - DF gamma) with N gamma = L^T g. See ``deqfast.ops`` for the arguments."""
    g = fz - z
    advance = _judge(z, fz, g, best, status, iterations, residual, gain, active, k, tol, absolute, stall_floor)
    if last:
        return
    n, slot = min(k, left.shape[1]), k % left.shape[1]
    with torch.autocast(z.device.type, enabled=False):
        step = beta * g
        if n:
            _append_pair(z, fz, f_prev, left, df, gram, k, method, beta, advance)
            t = torch.einsum("bmd,bd->bm", left[:, :n].to(z.dtype), g)
            gamma = solve_window(gram, t, k, method, ridge)
            step = step - torch.einsum("bmd,bm->bd", df[:, :n].to(z.dtype), gamma)
        # The history holds the step as it is taken, so that secant equations stay exact in a short history dtype.
        z_next = z + (alpha * step).to(left.dtype).to(z.dtype)
        _put(left, (slice(None), slot), z_next - z, advance)
        if n and method in (BROYDEN_GOOD, ANDERSON_I):
            dots = torch.einsum("bmd,bd->bm", df[:, :n].to(z.dtype), left[:, slot].to(z.dtype))
            _put(gram, (slice(None), slot, slice(n)), dots, advance)
        z.copy_(torch.where(advance[:, None], z_next, z))


def broyden_step(
    z: Tensor,
    fz: Tensor,
    best: Tensor,
    status: Tensor,
    iterations: Tensor,
    residual: Tensor,
    gain: Tensor,
    active: Tensor,
    steps: Tensor,
    gram: Tensor,
    first: Tensor,
    k: int,
    last: bool,
    tol: float,
    absolute: bool,
    stall_floor: float,
) -> None:
    """z <- z + s_k with s_k = (g + sum_i c_i s_{i+1}) / (1 - c_{k-1}). See ``deqfast.ops.steps`` for the arguments."""
    g = fz - z
    advance = _judge(z, fz, g, best, status, iterations, residual, gain, active, k, tol, absolute, stall_floor)
    if last:
        return
    step = g
    with torch.autocast(z.device.type, enabled=False):
        if k:
            known = steps[:, :k]
            newest = torch.einsum("bmd,bd->bm", known, steps[:, k - 1])
            _put(gram, (slice(None), k - 1, slice(k)), newest, advance)
            c = _step_coefficients(gram, torch.einsum("bmd,bd->bm", known, g), first, k)
            scale = 1 - c[:, -1]
            regular = torch.isfinite(c).all(dim=1) & (scale.abs() >= PIVOT_FLOOR)
            broyden = (g + torch.einsum("bmd,bm->bd", known[:, 1:], c[:, :-1])) / scale[:, None]
            step = torch.where(regular[:, None], broyden, g)
            first.masked_fill_(advance & ~regular, k)
    _put(steps, (slice(None), k), step, advance)
    z.copy_(torch.where(advance[:, None], z + step, z))


def _step_coefficients(gram: Tensor, t: Tensor, first: Tensor, k: int) -> Tensor:
    """c (B, k) with c_j = (t_j + sum_{i<j} s_j . s_{i+1} c_i) / |s_j|^2; zero before `first` and where s_j = 0."""
    c = torch.zeros_like(t)
    for j in range(k):
        square = gram[:, j, j]
        value = (t[:, j] + _dot(torch.where(c[:, :j] == 0, 0, gram[:, j, 1 : j + 1]), c[:, :j])) / square
        c[:, j] = torch.where((first <= j) & (square != 0), value, 0)
    return c


def multisecant_transposed(
    v: Tensor,
    left: Tensor,
    df: Tensor,
    gram: Tensor,
    newest: Tensor,
    count: Tensor,
    method: int,
    alpha: float,
    beta: float,
    ridge: float,
) -> Tensor:
    """alpha (beta v - L gamma) with N^T gamma = DF^T v. See ``deqfast.ops.steps`` for the arguments."""
    with torch.autocast(v.device.type, enabled=False):
        history = left.shape[1]
        ages = torch.arange(history - 1, -1, -1, device=v.device)
        slots = (newest[:, None].long() - ages) % history  # (B, M), oldest first
        inside = ages < count[:, None]

        def in_order(pairs: Tensor) -> Tensor:
            rows = pairs.gather(1, slots[:, :, None].expand(-1, -1, pairs.shape[2])).to(v.dtype)
            return torch.where(inside[:, :, None], rows, 0)

        squares = in_order(gram[:, history:].mT).mT.flip(1)
        matrix = in_order(in_order(gram[:, :history]).mT)
        t = torch.einsum("bmd,bd->bm", in_order(df), v)
        gamma = solve_window(torch.cat([matrix, squares], dim=1), t, history, method, ridge, transposed=True)
        return alpha * (beta * v - torch.einsum("bmd,bm->bd", in_order(left), gamma))


def _put(target: Tensor, where: tuple[slice | int, ...], values: Tensor, advance: Tensor) -> None:
    """target[where] = values in the rows of the samples that advance; the others keep what they have."""
    rows = advance.view(-1, *([1] * (values.dim() - 1)))
    target[where] = torch.where(rows, values.to(target.dtype), target[where])


def _append_pair(
    z: Tensor,
    fz: Tensor,
    f_prev: Tensor,
    left: Tensor,
    df: Tensor,
    gram: Tensor,
    k: int,
    method: int,
    beta: float,
    advance: Tensor,
) -> None:
    """Complete the newest pair, whose step lies in `left`, and its row and column of the window matrix."""
    history, n, newest = left.shape[1], min(k, left.shape[1]), (k - 1) % left.shape[1]
    everything = slice(None)
    delta = fz - f_prev
    s = left[:, newest].to(z.dtype)
    y = delta - s
    _put(df, (everything, newest), beta * delta + (1 - beta) * s, advance)
    if method in (ANDERSON_II, BROYDEN_BAD):
        _put(left, (everything, newest), y, advance)
        y = left[:, newest].to(z.dtype)
    window = left[:, :n].to(z.dtype)
    column = torch.einsum("bmd,bd->bm", window, y)
    row, lengths = column, (column[:, newest], column[:, newest])
    if method == ANDERSON_I:
        row = (gram[:, newest, :n] - torch.einsum("bmd,bd->bm", window, s)) / beta
    if method in (ANDERSON_I, BROYDEN_GOOD):
        lengths = _dot(s, s), _dot(y, y)
    if method != BROYDEN_GOOD:
        _put(gram, (everything, newest, slice(n)), row, advance)
    _put(gram, (everything, slice(n), newest), column, advance)
    _put(gram, (everything, slice(history, None), newest), torch.stack(lengths, dim=1), advance)


def solve_window(gram: Tensor, t: Tensor, k: int, method: int, ridge: float, transposed: bool = False) -> Tensor:
    """Solve N gamma = t in the window of iteration k; t and gamma (B, n) are in the order of the slots.

    N is equilibrated by the lengths of its pairs and eliminated without pivoting from the newest pair to the oldest:
    the first pivot under ``PIVOT_FLOOR`` drops its pair and all older ones, which is dropping the oldest pair until
    the rest is regular. Gamma is zero (a Picard step) where nothing is left or the solution overflows. `transposed`:
    `gram` holds N^T and its lengths are swapped.
    """
    history, n = gram.shape[2], min(k, gram.shape[2])
    order = [(k - 1 - age) % history for age in range(n)]  # newest first
    scale = gram[:, history:, :].rsqrt()
    scale = torch.where(torch.isfinite(scale), scale, 0)[:, :, order]
    a = gram[:, order][:, :, order] * scale[:, 0, :, None] * scale[:, 1, None, :]
    if method == BROYDEN_BAD:
        a = a.triu() if transposed else a.tril()
    elif method in (ANDERSON_I, ANDERSON_II):
        diagonal = a.diagonal(dim1=1, dim2=2)
        shift = torch.full_like(diagonal, ridge)
        diagonal += torch.where(diagonal < 0, -shift, shift)
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
        known = torch.where(kept[:, c + 1 :], a[:, c, c + 1 :], 0)  # a dropped pair may hold an overflow
        value = (b[:, c] - _dot(known, gamma[:, c + 1 :])) / a[:, c, c]
        gamma[:, c] = torch.where(kept[:, c], value, 0)
    gamma = gamma * scale[:, 1]
    gamma = torch.where(torch.isfinite(gamma).all(dim=1, keepdim=True), gamma, 0)
    return torch.empty_like(gamma).index_copy_(1, torch.tensor(order, device=t.device), gamma)


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (_identity, torch.relu, torch.tanh, F.gelu)


def fc_fixed_point(
    weight: Tensor,
    c: Tensor,
    z0: Tensor,
    activation: int,
    tol: float,
    absolute: bool,
    max_iter: int,
    stall_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve z = act(W z + c) by Picard steps, all `max_iter` of them. See ``deqfast.ops.fc``."""
    batch, weight = c.shape[0], weight.to(c.dtype)
    z, best = z0.clone(), z0.clone()
    status = torch.zeros(batch, dtype=torch.int8, device=c.device)
    iterations = torch.zeros(batch, dtype=torch.int32, device=c.device)
    residual = torch.full((2, batch), torch.inf, dtype=c.dtype, device=c.device)
    gain = residual.clone()
    active = torch.full((1,), batch, dtype=torch.int32, device=c.device)
    for k in range(max_iter):
        with torch.autocast(c.device.type, enabled=False):
            fz = ACTIVATIONS[activation](F.linear(z, weight) + c)
        monitor = (best, status, iterations, residual, gain, active)
        picard_step(z, fz, *monitor, k, k + 1 == max_iter, tol, absolute, stall_floor, 1.0)
    return best, status, iterations, residual


def fc_vjp(pre: Tensor, grad: Tensor, activation: int) -> Tensor:
    """grad * act'(pre). See ``deqfast.ops.fc``."""
    if activation == 0:
        return grad.clone()
    if activation == 1:
        return torch.where(pre <= 0, 0, grad)
    if activation == 2:
        value = torch.tanh(pre)
        return grad * (1 - value * value)
    density = torch.exp(-0.5 * pre * pre) * (0.5 / math.pi) ** 0.5
    return grad * (0.5 * (1 + torch.erf(pre * 0.5**0.5)) + pre * density)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """(B, groups) to (B, channels, 1, 1)."""
    return values.repeat_interleave(channels // values.shape[1], dim=1)[:, :, None, None]


def _group_means(a: Tensor, groups: int) -> Tensor:
    return a.unflatten(1, (groups, -1)).mean(dim=(2, 3, 4))


def _normalise(a: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(a - mean) rstd of every group, mean and rstd; in two passes, so that a large mean costs no digits."""
    mean = _group_means(a, groups)
    centred = a - _per_channel(mean, a.shape[1])
    rstd = (_group_means(centred.square(), groups) + eps).rsqrt()
    return centred * _per_channel(rstd, a.shape[1]), mean, rstd


def _renormalise(a: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (a - _per_channel(mean, a.shape[1])) * _per_channel(rstd, a.shape[1])


def _affine(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return a * weight[:, None, None] + bias[:, None, None]


def _masked(grad: Tensor, before_relu: Tensor) -> Tensor:
    return torch.where(before_relu <= 0, torch.zeros_like(grad), grad)  # NaN passes, as in torch


def _norm_backward(grad: Tensor, normal: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of what was normalised to `normal`, from that of ``_affine(normal, weight, ...)``."""
    groups, channels = rstd.shape[1], grad.shape[1]
    grad = grad * weight[:, None, None]
    mean, slope = _group_means(grad, groups), _group_means(grad * normal, groups)
    centred = grad - _per_channel(mean, channels) - normal * _per_channel(slope, channels)
    return centred * _per_channel(rstd, channels)


def _affine_grads(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """(2 n, B, C): of every (grad, normal) the gradients of weight and bias, per sample."""
    return torch.stack([sums for grad, normal in norms for sums in ((grad * normal).sum((2, 3)), grad.sum((2, 3)))])


def norm_act(y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """relu(GroupNorm(y)), mean, rstd. See ``deqfast.ops.norm_act`` for the arguments."""
    normal, mean, rstd = _normalise(y.to(_accumulation_dtype(y.dtype)), groups, eps)
    return torch.relu(_affine(normal, weight, bias)).to(y.dtype), mean, rstd


def norm_act_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """The gradient of y, and those of weight and bias per sample. Differentiable."""
    dtype = _accumulation_dtype(y.dtype)
    normal = _renormalise(y.to(dtype), mean, rstd)
    g = _masked(grad.to(dtype), _affine(normal, weight, bias))
    return _norm_backward(g, normal, weight, rstd).to(y.dtype), _affine_grads((g, normal))


def norm_act_residual(
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    bias3: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """f = GroupNorm3(relu(z + GroupNorm2(y + x))), its norms, and the statistics of both normalisations."""
    dtype = _accumulation_dtype(z.dtype)
    y, x, z = y.to(dtype), x.to(dtype), z.to(dtype)
    normal2, mean2, rstd2 = _normalise(y + x, groups, eps)
    normal3, mean3, rstd3 = _normalise(torch.relu(z + _affine(normal2, weight2, bias2)), groups, eps)
    f = _affine(normal3, weight3, bias3)
    squares = torch.stack([(f - z).square(), f.square()])
    norms = squares.unflatten(2, (groups, -1)).sum(dim=(3, 4, 5))
    return f, norms, mean2, rstd2, mean3, rstd3


def norm_act_residual_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    mean2: Tensor,
    rstd2: Tensor,
    mean3: Tensor,
    rstd3: Tensor,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of y + x, that of z, and those of the weights and biases per sample. Differentiable."""
    dtype = _accumulation_dtype(z.dtype)
    normal2 = _renormalise(y.to(dtype) + x.to(dtype), mean2, rstd2)
    before_relu = z.to(dtype) + _affine(normal2, weight2, bias2)
    normal3 = _renormalise(torch.relu(before_relu), mean3, rstd3)
    g3 = grad.to(dtype)
    g2 = _masked(_norm_backward(g3, normal3, weight3, rstd3), before_relu)
    grad_sum = _norm_backward(g2, normal2, weight2, rstd2)
    return grad_sum.to(z.dtype), g2.to(z.dtype), _affine_grads((g2, normal2), (g3, normal3))


# Elements of a block of rows: what stays in the cache of a CPU, enough work per launch on a GPU.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
_MIN_BLOCK_ROWS = 64  # matrix products of fewer rows are slow


def row_blocks(features: Tensor, rows: Tensor, labels: Tensor, width: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (features, labels) of a few of `rows` at a time, split by the shapes and the kind of device alone.

    labels are those of `rows`; `width` is that of the widest other thing computed per row. The features are a float64
    copy, free to be overwritten.
    """
    budget = _BLOCK_ELEMENTS.get(features.device.type, _BLOCK_ELEMENTS["cpu"])
    step = max(_MIN_BLOCK_ROWS, budget // max(features.shape[1], width))
    for chosen, chosen_labels in zip(rows.split(step), labels.split(step), strict=True):
        yield features.index_select(0, chosen).to(torch.float64), chosen_labels  # several times faster than [chosen]


def labels_of(offsets: Tensor, count: int) -> Tensor:
    """The class of each of `count` grouped rows."""
    return torch.searchsorted(offsets, torch.arange(count, device=offsets.device), right=True) - 1


def class_means(features: Tensor, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Class means as local (K, D) + shift (D,), float64. See ``deqfast.ops.neural_collapse`` for the arguments.

    Class sums are one-hot matrix products, not scattered additions: the same inputs give the same bits. Blocks are
    widened to float64: it costs little, and autocast and the float32 matmul settings have no say.
    """
    num_classes, dim = len(offsets) - 1, features.shape[1]
    sums = torch.zeros((num_classes, dim), dtype=torch.float64, device=features.device)
    if len(rows) == 0:
        return sums, sums.new_zeros(dim)
    first = features[rows[offsets[:-1].clamp_max(len(rows) - 1)]].to(torch.float64)
    classes = torch.arange(num_classes, device=features.device)[:, None]
    for block, labels in row_blocks(features, rows, labels_of(offsets, len(rows)), num_classes):
        sums.addmm_((labels == classes).to(torch.float64), block.sub_(first.index_select(0, labels)))
    counts = offsets.diff()[:, None]
    shift = features[rows[0]].to(torch.float64)
    return torch.where(counts > 0, sums / counts.clamp_min(1) + (first - shift), -shift), shift


def within_class_scatter(features: Tensor, rows: Tensor, offsets: Tensor, means: Tensor, directions: Tensor) -> Tensor:
    """sum_i (R_j . (h_i - mu_{y_i}))^2 of each direction R_j, float64. See ``deqfast.ops.neural_collapse``."""
    within = means.new_zeros(directions.shape[1])
    for block, labels in row_blocks(features, rows, labels_of(offsets, len(rows)), directions.shape[1]):
        within += (block.sub_(means.index_select(0, labels)) @ directions).square_().sum(0)
    return within
