"""Multisecant step: z <- z + alpha (beta g - DF gamma), N gamma = L^T g, over a window of n = min(k, M) pairs.

L holds steps S (BROYDEN_GOOD, ANDERSON_I) or changes of the residual Y (BROYDEN_BAD, ANDERSON_II), DF the changes of
f, or beta Y + S where beta != 1. Three kernels, one program per sample; samples with status != 0 move no bytes:

1. sweep over L: norms and status, the newest pair, t = L^T g, and the row and column of N that it adds;
2. solve N gamma = t (part of kernel 3 while the window is at most ``MAX_INLINE_WINDOW``);
3. sweep over DF: the step, z, the next pair's step, and its row of N.

z, fz, best, f_prev (B, D) T; left, df (B, M, D) H; gram (B, M + 2, M) T; the scratch t, then gamma, (B, M) T. T is
float32 or float64, H is T or bfloat16. Everything is computed in T. Windows are walked by age, newest pair first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import ANDERSON_I, ANDERSON_II, BROYDEN_BAD, BROYDEN_GOOD, PIVOT_FLOOR, is_finite, judge, scalar
from .config import (
    MAX_HISTORY,
    MAX_INLINE_WINDOW,
    device_guard,
    padded_window,
    solve_config,
    sweep_config,
)
from .picard_step import picard_step


@triton.jit
def _slots_by_age(newest, M, MP: tl.constexpr):
    """The slots of the pairs, newest first; slots past the window are not valid."""
    slot = newest - tl.arange(0, MP)
    return tl.where(slot < 0, slot + M, slot)


@triton.jit
def _window_gamma(p_gram, p_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr):
    """gamma (MP,) of N gamma = t by age.

    N is scaled by the lengths of its pairs and eliminated without pivoting, newest pair first. The first pivot under
    ``PIVOT_FLOOR`` ends it: that pair and all older ones get gamma = 0. An overflow makes all of gamma zero.
    """
    dtype: tl.constexpr = p_gram.dtype.element_ty
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    slot = _slots_by_age(newest, M, MP)
    b_sl = tl.rsqrt(tl.load(p_gram + M * M + slot, mask=m_i, other=1.0))
    b_sl = tl.where(is_finite(b_sl), b_sl, 0.0)
    b_sr = tl.rsqrt(tl.load(p_gram + M * M + M + slot, mask=m_i, other=1.0))
    b_sr = tl.where(is_finite(b_sr), b_sr, 0.0)
    m_a = m_i[:, None] & m_i[None, :]
    b_a = tl.load(p_gram + slot[:, None] * M + slot[None, :], mask=m_a, other=0.0)  # [MP, MP]
    b_a = b_a * b_sl[:, None] * b_sr[None, :]
    if METHOD == BROYDEN_BAD:
        b_a = tl.where(o_i[:, None] >= o_i[None, :], b_a, 0.0)
    if (METHOD == ANDERSON_I) | (METHOD == ANDERSON_II):
        b_w = scalar(ridge, dtype)
        b_a = tl.where(o_i[:, None] == o_i[None, :], b_a + tl.where(b_a < 0, -b_w, b_w), b_a)
    b_b = tl.load(p_t + o_i, mask=m_i, other=0.0) * b_sl

    kept = n * 0
    for c in range(n):
        b_row = tl.sum(tl.where((o_i == c)[:, None], b_a, 0.0), axis=0)
        b_col = tl.sum(tl.where((o_i == c)[None, :], b_a, 0.0), axis=1)
        pivot = tl.sum(tl.where(o_i == c, b_row, 0.0), axis=0)
        rhs = tl.sum(tl.where(o_i == c, b_b, 0.0), axis=0)
        regular = (kept == c) & (tl.abs(pivot) >= PIVOT_FLOOR)
        kept += regular.to(tl.int32)
        m_r = regular & (o_i > c)
        b_factor = b_col / tl.where(regular, pivot, 1.0)
        b_a = tl.where(m_r[:, None], b_a - b_factor[:, None] * b_row[None, :], b_a)
        b_b = tl.where(m_r, b_b - b_factor * rhs, b_b)

    b_gamma = tl.zeros([MP], dtype)
    for i in range(n):
        c = n - 1 - i
        b_row = tl.sum(tl.where((o_i == c)[:, None], b_a, 0.0), axis=0)
        pivot = tl.sum(tl.where(o_i == c, b_row, 0.0), axis=0)
        rhs = tl.sum(tl.where(o_i == c, b_b, 0.0), axis=0)
        known = tl.sum(tl.where((o_i > c) & (o_i < kept), b_row * b_gamma, 0.0), axis=0)
        b_gamma = tl.where((o_i == c) & (c < kept), (rhs - known) / pivot, b_gamma)
    b_gamma = b_gamma * b_sr
    overflows = tl.sum(tl.where(is_finite(b_gamma), 0, 1), axis=0)
    return tl.where(overflows == 0, b_gamma, 0.0)


@triton.jit(do_not_specialize=["B", "M", "k", "n", "newest", "absolute"])
def _multisecant_left_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_residual,
    p_gain,
    p_active,
    p_f_prev,
    p_left,
    p_df,
    p_gram,
    p_t,
    B,
    D,
    M,
    k,
    n,
    newest,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    beta: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 1 (n > 0). With y = fz - f_prev - s, s the step in the newest slot, and DF_new = beta y + s:

    t = L^T g, q = L^T y (column), and for ANDERSON_I the row (DF^T s - S^T s) / beta, of which sweep 2 left DF^T s.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    LEFT_IS_Y: tl.constexpr = (METHOD == BROYDEN_BAD) | (METHOD == ANDERSON_II)
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    slot = _slots_by_age(newest, M, MP)
    o_row = slot.to(tl.int64) * D
    o_new = newest.to(tl.int64) * D
    p_z += i_b * D
    p_fz += i_b * D
    p_f_prev += i_b * D
    p_left += i_b * M * D
    p_df += i_b * M * D
    p_gram += i_b * (M + 2) * M
    b_w = scalar(beta, dtype)
    b_v = scalar(1.0 - beta, dtype)

    b_gg = tl.zeros([BLK], dtype)
    b_ff = tl.zeros([BLK], dtype)
    b_ss = tl.zeros([BLK], dtype)
    b_yy = tl.zeros([BLK], dtype)
    b_t = tl.zeros([MP, BLK], dtype)
    b_q = tl.zeros([MP, BLK], dtype)
    b_p = tl.zeros([MP, BLK], dtype)
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_gg = tl.fma(b_g, b_g, b_gg)
        b_ff = tl.fma(b_fz, b_fz, b_ff)
        b_delta = b_fz - tl.load(p_f_prev + o_d, mask=m_d, other=0.0)
        b_s = tl.load(p_left + o_new + o_d, mask=m_d, other=0.0).to(dtype)
        b_y = b_delta - b_s
        tl.store(p_df + o_new + o_d, (b_w * b_delta + b_v * b_s).to(short), mask=m_d)
        p_l = p_left + o_row[:, None] + o_d[None, :]  # [MP, BLK]
        if LEFT_IS_Y:
            # Every warp has read s before y takes its place.
            tl.debug_barrier()
            tl.store(p_left + o_new + o_d, b_y.to(short), mask=m_d)
            b_y = b_y.to(short).to(dtype)
            m_l = (m_i & (o_i > 0))[:, None] & m_d[None, :]
            b_l = tl.load(p_l, mask=m_l, other=0.0).to(dtype)
            b_l = tl.where((o_i == 0)[:, None], b_y[None, :], b_l)
        else:
            b_l = tl.load(p_l, mask=m_i[:, None] & m_d[None, :], other=0.0).to(dtype)
            b_ss = tl.fma(b_s, b_s, b_ss)
            b_yy = tl.fma(b_y, b_y, b_yy)
        b_t = tl.fma(b_l, b_g[None, :], b_t)
        b_q = tl.fma(b_l, b_y[None, :], b_q)
        if METHOD == ANDERSON_I:
            b_p = tl.fma(b_l, b_s[None, :], b_p)

    advance = judge(
        p_z, p_best + i_b * D, p_status, p_iterations, p_residual, p_gain, p_active, i_b, B, D,
        tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0), k, tol, absolute, stall_floor, BLK,
    )  # fmt: skip
    if advance:
        b_column = tl.sum(b_q, axis=1)
        tl.store(p_t + i_b * M + o_i, tl.sum(b_t, axis=1), mask=m_i)
        tl.store(p_gram + slot * M + newest, b_column, mask=m_i)
        p_row = p_gram + newest * M + slot
        m_old = m_i & (o_i > 0)
        if LEFT_IS_Y:
            tl.store(p_row, b_column, mask=m_old)
            yy = tl.sum(tl.where(o_i == 0, b_column, 0.0), axis=0)
            tl.store(p_gram + M * M + newest, yy)
            tl.store(p_gram + M * M + M + newest, yy)
        else:
            tl.store(p_gram + M * M + newest, tl.sum(b_ss, axis=0))
            tl.store(p_gram + M * M + M + newest, tl.sum(b_yy, axis=0))
        if METHOD == ANDERSON_I:
            b_row = tl.load(p_row, mask=m_old, other=0.0)
            tl.store(p_row, (b_row - tl.sum(b_p, axis=1)) / b_w, mask=m_old)


@triton.jit(do_not_specialize=["M", "n", "newest"])
def _multisecant_solve_kernel(
    p_status, p_gram, p_t, M, n, newest, ridge: tl.float64, METHOD: tl.constexpr, MP: tl.constexpr
):
    """gamma in the place of t."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    o_i = tl.arange(0, MP)
    p_t += i_b * M
    b_gamma = _window_gamma(p_gram + i_b * (M + 2) * M, p_t, M, n, newest, ridge, METHOD, MP)
    tl.store(p_t + o_i, b_gamma, mask=o_i < n)


@triton.jit(do_not_specialize=["M", "n", "newest", "new"])
def _multisecant_right_kernel(
    p_z,
    p_fz,
    p_status,
    p_left,
    p_df,
    p_gram,
    p_t,
    D,
    M,
    n,
    newest,
    new,
    alpha: tl.float64,
    beta: tl.float64,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    SOLVE: tl.constexpr,
    MP: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 2: z <- z + H(alpha (beta g - DF gamma)), the step taken into slot `new` of L, and r = DF^T s into N.

    p_t holds gamma, or t where SOLVE is set. r is the next pair's row for BROYDEN_GOOD, and part of it for ANDERSON_I.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    HAS_ROW: tl.constexpr = (METHOD == BROYDEN_GOOD) | (METHOD == ANDERSON_I)
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    slot = _slots_by_age(newest, M, MP)
    o_row = slot.to(tl.int64) * D
    o_new = new.to(tl.int64) * D
    p_z += i_b * D
    p_fz += i_b * D
    p_left += i_b * M * D
    p_df += i_b * M * D
    p_gram += i_b * (M + 2) * M
    p_t += i_b * M
    b_w = scalar(beta, dtype)
    b_alpha = scalar(alpha, dtype)
    if SOLVE:
        b_gamma = _window_gamma(p_gram, p_t, M, n, newest, ridge, METHOD, MP)
    else:
        b_gamma = tl.load(p_t + o_i, mask=m_i, other=0.0)

    b_r = tl.zeros([MP, BLK], dtype)
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_g = tl.load(p_fz + o_d, mask=m_d, other=0.0) - b_z
        m_f = m_i[:, None] & m_d[None, :]
        b_f = tl.load(p_df + o_row[:, None] + o_d[None, :], mask=m_f, other=0.0).to(dtype)  # [MP, BLK]
        b_step = b_w * b_g - tl.sum(b_f * b_gamma[:, None], axis=0)
        b_next = b_z + (b_alpha * b_step).to(short).to(dtype)
        b_s = (b_next - b_z).to(short)
        # Every warp has read z before it changes.
        tl.debug_barrier()
        tl.store(p_z + o_d, b_next, mask=m_d)
        tl.store(p_left + o_new + o_d, b_s, mask=m_d)
        if HAS_ROW:
            b_r = tl.fma(b_f, b_s.to(dtype)[None, :], b_r)
    if HAS_ROW:
        tl.store(p_gram + new * M + slot, tl.sum(b_r, axis=1), mask=m_i)


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
    """z <- z + alpha (beta g - DF gamma) for every running sample, in place; only the records when `last`."""
    (batch, size), history = z.shape, left.shape[1]
    if history > MAX_HISTORY:
        raise ValueError(f"left holds {history} pairs per sample; the Triton kernels take at most {MAX_HISTORY}")
    if batch == 0:
        return
    n, newest = min(k, history), (k - 1) % history
    if last or n == 0:
        picard_step(z, fz, best, status, iterations, residual, gain, active, k, True, tol, absolute, stall_floor, 1.0)
        if last:
            return
    padded = padded_window(n)
    config = sweep_config(size, padded, z.dtype)
    inline = padded <= MAX_INLINE_WINDOW
    t = torch.empty(batch, history, dtype=z.dtype, device=z.device)
    tiles = {"BLK": config.block, "num_warps": config.num_warps}
    with device_guard(z):
        if n:
            _multisecant_left_kernel[(batch,)](
                z, fz, best, status, iterations, residual, gain, active, f_prev, left, df, gram, t, batch, size,
                history, k, n, newest, tol, int(absolute), stall_floor, beta, METHOD=method, MP=padded,
                enable_fp_fusion=False, maxnreg=config.max_registers, **tiles,
            )  # fmt: skip
            if not inline:
                _multisecant_solve_kernel[(batch,)](
                    status, gram, t, history, n, newest, ridge, METHOD=method, MP=padded,
                    num_warps=solve_config(padded).num_warps, enable_fp_fusion=False,
                )  # fmt: skip
        _multisecant_right_kernel[(batch,)](
            z, fz, status, left, df, gram, t, size, history, n, newest, k % history, alpha, beta, ridge,
            METHOD=method, SOLVE=inline, MP=padded, enable_fp_fusion=False, **tiles,
        )  # fmt: skip
