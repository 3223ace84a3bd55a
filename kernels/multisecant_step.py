"""Multisecant step: z <- z + alpha (beta g - DF gamma), N gamma = L^T g, over a window of n = min(k, M) pairs.

L holds steps S (BROYDEN_GOOD, ANDERSON_I) or changes of the residual Y (BROYDEN_BAD, ANDERSON_II), DF the changes of
f, or beta Y + S where beta != 1. Three kernels, one program per sample; samples with status != 0 move no bytes:

1. sweep over L: norms and status, the newest pair, t = L^T g, and the row and column of N that it adds; and whether
   the iterate is the best so far, which is left behind t;
2. solve N gamma = t (part of kernel 3 while the window is at most ``MAX_INLINE_WINDOW``);
3. sweep over DF: the best iterate, the step, z, the next pair's step, and its row of N.

Where the batch does not fill the GPU, S programs share a sample in each sweep, see ``common``. What follows the dots of
sweep 1 is then a launch of its own, and so is the sum of the parts of the row.

z, fz, best, f_prev (B, D) T; left, df (B, M, D) H; gram (B, M + 2, M) T; the scratch t, then gamma, (B, M + 1) T. T is
float32 or float64, H is T or bfloat16. Everything is computed in T. Windows are walked by age, newest pair first.
"""

# The language of jit functions grows tuples in loops.
# mypy: disable-error-code="assignment, var-annotated"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import picard_step
from .common import (
    ANDERSON_I,
    ANDERSON_II,
    BROYDEN_BAD,
    BROYDEN_GOOD,
    PIVOT_FLOOR,
    carry_out,
    columns,
    is_finite,
    is_sound,
    judge,
    load_numbers,
    norms_at,
    scalar,
    store_number,
    store_verdict,
)
from .config import (
    JUDGE_CONFIG,
    MAX_INLINE_WINDOW,
    MAX_REGISTERS,
    MAX_VECTOR_WINDOW,
    device_guard,
    padded_window,
    programs_per_sample,
    rows_at_once,
    solve_config,
    stages,
    sweep_config,
    tile_config,
)


@triton.jit
def _slots_by_age(newest, M, MP: tl.constexpr):
    """The slots of the pairs, newest first; slots past the window are not valid. Fewer registers than ``_slot``."""
    slot = newest - tl.arange(0, MP)
    return tl.where(slot < 0, slot + M, slot)


@triton.jit
def _row(p_history, newest, age, n, M, D, end, o_d):
    """The columns o_d, below `end`, of the pair of that age; zeros past the window."""
    o_row = _slot(newest, age, M).to(tl.int64) * D
    return tl.load(p_history + o_row + o_d, mask=o_d < tl.where(age < n, end, 0), other=0.0)


@triton.jit
def _inverse_length(square):
    return tl.where(is_sound(square), tl.rsqrt(square), 0.0)


@triton.jit
def _zeros(COUNT: tl.constexpr, BLK: tl.constexpr, dtype: tl.constexpr):
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([BLK], dtype),)
    return vectors


@triton.jit
def _slot(newest, age, M):
    """The slot of the pair that is `age` younger ones old."""
    return tl.where(newest >= age, newest - age, newest - age + M)


@triton.jit
def _small_window_gamma(p_gram, p_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr):
    """As ``_window_gamma``, as a tuple of MP scalars that every thread works out for itself: no barrier, no exchange.

    For small windows: the matrix takes MP * MP registers.
    """
    dtype: tl.constexpr = p_gram.dtype.element_ty
    b_ridge = scalar(ridge, dtype)
    slots = ()
    left_scale = ()
    right_scale = ()
    for i in tl.static_range(MP):
        slot = _slot(newest, i, M)
        slots = slots + (slot,)
        left_scale = left_scale + (_inverse_length(tl.load(p_gram + M * M + slot, mask=i < n, other=1.0)),)
        right_scale = right_scale + (_inverse_length(tl.load(p_gram + M * M + M + slot, mask=i < n, other=1.0)),)
    a = ()  # row i from its entry i * MP on, newest pair first
    b = ()
    for i in tl.static_range(MP):
        for j in tl.static_range(MP):
            if (METHOD == BROYDEN_BAD) & (j > i):
                x = scalar(0.0, dtype)
            else:
                x = tl.load(p_gram + slots[i] * M + slots[j], mask=(i < n) & (j < n), other=0.0)
                x = x * left_scale[i] * right_scale[j]
            if ((METHOD == ANDERSON_I) | (METHOD == ANDERSON_II)) & (i == j):
                x = x + tl.where(x < 0, -b_ridge, b_ridge)
            a = a + (x,)
        b = b + (tl.load(p_t + i, mask=i < n, other=0.0) * left_scale[i],)

    kept = n * 0
    for c in tl.static_range(MP):
        pivot = a[c * MP + c]
        regular = (kept == c) & (c < n) & (tl.abs(pivot) >= PIVOT_FLOOR)
        kept += regular.to(tl.int32)
        divisor = tl.where(regular, pivot, 1.0)
        next_a = ()
        next_b = ()
        for i in tl.static_range(MP):
            factor = a[i * MP + c] / divisor
            for j in tl.static_range(MP):
                x = a[i * MP + j]
                if (i > c) & (j > c):
                    x = tl.where(regular, x - factor * a[c * MP + j], x)
                next_a = next_a + (x,)
            x = b[i]
            if i > c:
                x = tl.where(regular, x - factor * b[c], x)
            next_b = next_b + (x,)
        a = next_a
        b = next_b

    gammas = ()  # of the pairs older than c
    for c in tl.static_range(MP - 1, -1, -1):
        rhs = b[c]
        for i in tl.static_range(c + 1, MP):
            rhs = rhs - tl.where(i < kept, a[c * MP + i] * gammas[i - c - 1], 0.0)
        gammas = (tl.where(c < kept, rhs / tl.where(c < kept, a[c * MP + c], 1.0), 0.0),) + gammas
    overflows = kept < 0
    for i in tl.static_range(MP):
        overflows = overflows | (is_finite(gammas[i] * right_scale[i]) == 0)
    result = ()
    for i in tl.static_range(MP):
        result = result + (tl.where(overflows, 0.0, gammas[i] * right_scale[i]),)
    return result


@triton.jit
def _small_gammas(p_gram, p_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr, SOLVE: tl.constexpr):
    """gamma as a tuple of MP scalars: solved for here, or read."""
    if SOLVE:
        return _small_window_gamma(p_gram, p_t, M, n, newest, ridge, METHOD, MP)
    else:
        gammas = ()
        for i in tl.static_range(MP):
            gammas = gammas + (tl.load(p_t + i, mask=i < n, other=0.0),)
        return gammas


@triton.jit
def _window_gamma(
    p_gram, b_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """gamma (MP,) of N gamma = t by age, or of N^T gamma = t.

    N is scaled by the lengths of its pairs and eliminated without pivoting, newest pair first. The first pivot under
    ``PIVOT_FLOOR`` ends it: that pair and all older ones get gamma = 0. An overflow makes all of gamma zero.
    """
    dtype: tl.constexpr = p_gram.dtype.element_ty
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    slot = _slots_by_age(newest, M, MP)
    p_rows = p_gram + M * M + slot + (M if TRANSPOSED else 0)
    p_cols = p_gram + M * M + slot + (0 if TRANSPOSED else M)
    b_sl = _inverse_length(tl.load(p_rows, mask=m_i, other=1.0))
    b_sr = _inverse_length(tl.load(p_cols, mask=m_i, other=1.0))
    m_a = m_i[:, None] & m_i[None, :]
    o_a = slot[None, :] * M + slot[:, None] if TRANSPOSED else slot[:, None] * M + slot[None, :]  # [MP, MP]
    b_a = tl.load(p_gram + o_a, mask=m_a, other=0.0)
    b_a = b_a * b_sl[:, None] * b_sr[None, :]
    if METHOD == BROYDEN_BAD:
        is_zero = o_i[:, None] > o_i[None, :] if TRANSPOSED else o_i[:, None] < o_i[None, :]
        b_a = tl.where(is_zero, 0.0, b_a)
    if (METHOD == ANDERSON_I) | (METHOD == ANDERSON_II):
        b_w = scalar(ridge, dtype)
        b_a = tl.where(o_i[:, None] == o_i[None, :], b_a + tl.where(b_a < 0, -b_w, b_w), b_a)
    b_b = b_t * b_sl

    # Gauss-Jordan: a column is eliminated above the diagonal too, which takes no substitution afterwards.
    kept = n * 0
    b_pivot = tl.full([MP], 1.0, dtype)
    for c in range(n):
        is_c = o_i == c
        b_row = tl.sum(tl.where(is_c[:, None], b_a, 0.0), axis=0)
        b_col = tl.sum(tl.where(is_c[None, :], b_a, 0.0), axis=1)
        pivot = tl.sum(tl.where(is_c, b_row, 0.0), axis=0)
        rhs = tl.sum(tl.where(is_c, b_b, 0.0), axis=0)
        regular = (kept == c) & (tl.abs(pivot) >= PIVOT_FLOOR)
        kept += regular.to(tl.int32)
        b_pivot = tl.where(regular & is_c, pivot, b_pivot)
        m_r = regular & (o_i != c)
        b_factor = b_col / tl.where(regular, pivot, 1.0)
        b_a = tl.where(m_r[:, None], b_a - b_factor[:, None] * b_row[None, :], b_a)
        b_b = tl.where(m_r, b_b - b_factor * rhs, b_b)
    b_gamma = tl.where(o_i < kept, b_b / b_pivot, 0.0)
    b_gamma = b_gamma * b_sr
    overflows = tl.sum(tl.where(is_finite(b_gamma), 0, 1), axis=0)
    return tl.where(overflows == 0, b_gamma, 0.0)


@triton.jit
def _sweep_left(
    p_z,
    p_fz,
    p_f_prev,
    p_left,
    p_left_new,
    p_df_new,
    D,
    M,
    n,
    newest,
    begin,
    end,
    beta,
    first: tl.constexpr,
    METHOD: tl.constexpr,
    ROWS: tl.constexpr,
    BLK: tl.constexpr,
):
    """g^2, f(z)^2, s^2, y^2 (on the first sweep), and L g, L y and L s of the ROWS pairs from age `first` on.

    A vector of BLK columns each, to be added up. The first sweep completes the newest pair.
    """
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    LEFT_IS_Y: tl.constexpr = (METHOD == BROYDEN_BAD) | (METHOD == ANDERSON_II)
    b_w = scalar(beta, dtype)
    b_v = scalar(1.0 - beta, dtype)
    b_gg = tl.zeros([BLK], dtype)
    b_ff = tl.zeros([BLK], dtype)
    b_ss = tl.zeros([BLK], dtype)
    b_yy = tl.zeros([BLK], dtype)
    b_t = _zeros(ROWS, BLK, dtype)
    b_q = _zeros(ROWS, BLK, dtype)
    b_p = _zeros(ROWS if METHOD == ANDERSON_I else 0, BLK, dtype)
    for start in range(begin, end, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_s = tl.load(p_left_new + o_d, mask=m_d, other=0.0).to(dtype)
        if LEFT_IS_Y & (first > 0):
            b_y = b_s
        else:
            b_delta = b_fz - tl.load(p_f_prev + o_d, mask=m_d, other=0.0)
            b_y = b_delta - b_s
        if first == 0:
            b_gg = tl.fma(b_g, b_g, b_gg)
            b_ff = tl.fma(b_fz, b_fz, b_ff)
            tl.store(p_df_new + o_d, (b_w * b_delta + b_v * b_s).to(short), mask=m_d)
            if LEFT_IS_Y:
                # Every warp has read s before y takes its place.
                tl.debug_barrier()
                tl.store(p_left_new + o_d, b_y.to(short), mask=m_d)
                b_y = b_y.to(short).to(dtype)
            else:
                b_ss = tl.fma(b_s, b_s, b_ss)
                b_yy = tl.fma(b_y, b_y, b_yy)
        next_t = ()
        next_q = ()
        next_p = ()
        for i in tl.static_range(ROWS):
            b_l = b_y if LEFT_IS_Y & (first + i == 0) else _row(p_left, newest, first + i, n, M, D, end, o_d).to(dtype)
            next_t = next_t + (tl.fma(b_l, b_g, b_t[i]),)
            next_q = next_q + (tl.fma(b_l, b_y, b_q[i]),)
            if METHOD == ANDERSON_I:
                next_p = next_p + (tl.fma(b_l, b_s, b_p[i]),)
        b_t = next_t
        b_q = next_q
        b_p = next_p
    return b_gg, b_ff, b_ss, b_yy, b_t, b_q, b_p


@triton.jit(do_not_specialize=["B", "M", "S", "k", "n", "newest", "absolute", "maximum"])
def _multisecant_left_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    p_f_prev,
    p_left,
    p_df,
    p_gram,
    p_t,
    p_sums,
    B,
    D,
    M,
    S,
    k,
    n,
    newest,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum,
    beta: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGE: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 1 (n > 0). With y = fz - f_prev - s, s the step in the newest slot, and DF_new = beta y + s:

    t = L^T g, q = L^T y (column), and for ANDERSON_I the row (DF^T s - S^T s) / beta, of which sweep 2 left DF^T s.
    The history is read ROWS pairs at a time, each into a vector of its own, so that a thread keeps to its columns.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        if STAGE == "judge":
            tl.store(p_t + i_b * (M + 1) + M, 0.0)
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    LEFT_IS_Y: tl.constexpr = (METHOD == BROYDEN_BAD) | (METHOD == ANDERSON_II)
    begin, end = columns(D, BLK, STAGE)
    p_z += i_b * D
    p_fz += i_b * D
    p_f_prev += i_b * D
    p_left += i_b * M * D
    p_df_new = p_df + i_b * M * D + newest.to(tl.int64) * D
    p_left_new = p_left + newest.to(tl.int64) * D
    p_gram += i_b * (M + 2) * M
    p_t += i_b * (M + 1)
    if STAGE != "all":
        p_sums += i_b * (6 + 3 * MP) * S
    b_w = scalar(beta, dtype)

    advance = n > 0
    for first in tl.static_range(0, MP, ROWS):
        if advance:
            if STAGE == "judge":
                b_gg, b_ff = load_numbers(p_sums, 0, 2, S, BLK)
                b_ss, b_yy = load_numbers(p_sums, 4, 2, S, BLK)
                b_t = load_numbers(p_sums, 6 + first, ROWS, S, BLK)
                b_q = load_numbers(p_sums, 6 + MP + first, ROWS, S, BLK)
                b_p = load_numbers(p_sums, 6 + 2 * MP + first, ROWS if METHOD == ANDERSON_I else 0, S, BLK)
            else:
                b_gg, b_ff, b_ss, b_yy, b_t, b_q, b_p = _sweep_left(
                    *(p_z, p_fz, p_f_prev, p_left, p_left_new, p_df_new, D, M, n, newest, begin, end, beta),
                    *(first, METHOD, ROWS, BLK),
                )
            if first == 0:
                res_norm, f_norm = norms_at(
                    p_z + begin, p_fz + begin, end - begin, p_sums, S, b_gg, b_ff, maximum, STAGE, BLK
                )
                if STAGE == "sums":
                    store_number(p_sums, 4, tl.sum(b_ss, axis=0))
                    store_number(p_sums, 5, tl.sum(b_yy, axis=0))
                else:
                    status, improved = judge(
                        p_status,
                        p_iterations,
                        p_residual,
                        p_progress,
                        p_active,
                        i_b,
                        B,
                        res_norm,
                        f_norm,
                        k,
                        tol,
                        absolute,
                        stall_floor,
                        offset,
                        False,
                    )
                    advance = status == 0
                if STAGE == "judge":
                    store_verdict(p_t + M, status, improved)
                elif STAGE == "all":
                    tl.store(p_t + M, improved.to(dtype))
                    carry_out(status, improved & (status != 0), p_z, p_best + i_b * D, D, BLK)
            if STAGE == "sums":
                for i in tl.static_range(ROWS):
                    store_number(p_sums, 6 + first + i, tl.sum(b_t[i], axis=0))
                    store_number(p_sums, 6 + MP + first + i, tl.sum(b_q[i], axis=0))
                    if METHOD == ANDERSON_I:
                        store_number(p_sums, 6 + 2 * MP + first + i, tl.sum(b_p[i], axis=0))
            elif advance:
                for i in tl.static_range(ROWS):
                    slot = _slot(newest, first + i, M)
                    m_i = first + i < n
                    q = tl.sum(b_q[i], axis=0)
                    tl.store(p_t + first + i, tl.sum(b_t[i], axis=0), mask=m_i)
                    tl.store(p_gram + slot * M + newest, q, mask=m_i)
                    p_row = p_gram + newest * M + slot
                    if first + i == 0:
                        ss = q
                        yy = q
                        if not LEFT_IS_Y:
                            ss = tl.sum(b_ss, axis=0)
                            yy = tl.sum(b_yy, axis=0)
                        tl.store(p_gram + M * M + newest, ss)
                        tl.store(p_gram + M * M + M + newest, yy)
                    elif LEFT_IS_Y:
                        tl.store(p_row, q, mask=m_i)
                    elif METHOD == ANDERSON_I:
                        row = tl.load(p_row, mask=m_i, other=0.0)
                        tl.store(p_row, (row - tl.sum(b_p[i], axis=0)) / b_w, mask=m_i)


@triton.jit(do_not_specialize=["M", "n", "newest"])
def _multisecant_solve_kernel(
    p_status, p_gram, p_t, M, n, newest, ridge: tl.float64, METHOD: tl.constexpr, MP: tl.constexpr
):
    """gamma in the place of t."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    o_i = tl.arange(0, MP)
    p_t += i_b * (M + 1)
    b_t = tl.load(p_t + o_i, mask=o_i < n, other=0.0)
    b_gamma = _window_gamma(p_gram + i_b * (M + 2) * M, b_t, M, n, newest, ridge, METHOD, MP)
    tl.store(p_t + o_i, b_gamma, mask=o_i < n)


@triton.jit(do_not_specialize=["M", "S", "n", "newest", "new"])
def _multisecant_right_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_left,
    p_df,
    p_gram,
    p_t,
    p_sums,
    D,
    M,
    S,
    n,
    newest,
    new,
    alpha: tl.float64,
    beta: tl.float64,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    SOLVE: tl.constexpr,
    TILE: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGE: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 2: z <- z + H(alpha (beta g - DF gamma)), the step taken into slot `new` of L, and r = DF^T s into N.

    p_t holds gamma, or t where SOLVE is set. r is the next pair's row for BROYDEN_GOOD, and part of it for ANDERSON_I.
    Every row of the history is a vector of its own, so that a thread keeps to its columns; the dots with rows beyond
    the first ROWS read them again, from the cache. TILE: the rows are one tile, whose sums cross threads instead.
    """
    i_b = tl.program_id(0).to(tl.int64)
    begin, end = columns(D, BLK, STAGE)
    if tl.load(p_status + i_b) != 0:
        if STAGE == "step":
            verdict = tl.load(p_t + i_b * (M + 1) + M, mask=n > 0, other=0.0)
            carry_out(verdict, verdict == 1, p_z + i_b * D + begin, p_best + i_b * D + begin, end - begin, BLK)
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    HAS_ROW: tl.constexpr = (METHOD == BROYDEN_GOOD) | (METHOD == ANDERSON_I)
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    p_left_new = p_left + i_b * M * D + new.to(tl.int64) * D
    p_df += i_b * M * D
    p_gram += i_b * (M + 2) * M
    p_t += i_b * (M + 1)
    improved = tl.load(p_t + M, mask=n > 0, other=0.0) != 0  # the first iterate is kept by the kernel before
    b_w = scalar(beta, dtype)
    b_alpha = scalar(alpha, dtype)
    o_i = tl.arange(0, MP)
    slot = _slots_by_age(newest, M, MP)
    if TILE:
        b_gamma = tl.load(p_t + o_i, mask=o_i < n, other=0.0)
        b_r = tl.zeros([MP, BLK], dtype)
    else:
        gammas = _small_gammas(p_gram, p_t, M, n, newest, ridge, METHOD, MP, SOLVE)
        b_r = _zeros(MP if HAS_ROW else 0, BLK, dtype)

    for start in range(begin, end, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        if improved:
            tl.store(p_best + o_d, b_z, mask=m_d)
        b_x = b_w * (tl.load(p_fz + o_d, mask=m_d, other=0.0) - b_z)
        if TILE:
            p_f = p_df + slot.to(tl.int64)[:, None] * D + o_d[None, :]  # [MP, BLK]
            b_f = tl.load(p_f, mask=(o_i < n)[:, None] & m_d[None, :], other=0.0).to(dtype)
            b_x -= tl.sum(b_f * b_gamma[:, None], axis=0)
        else:
            rows = ()
            for i in tl.static_range(MP):
                rows = rows + (_row(p_df, newest, i, n, M, D, end, o_d).to(dtype),)
                b_x -= rows[i] * gammas[i]
        b_next = b_z + (b_alpha * b_x).to(short).to(dtype)
        b_s = (b_next - b_z).to(short)
        # Every warp has read z before it changes.
        tl.debug_barrier()
        tl.store(p_z + o_d, b_next, mask=m_d)
        tl.store(p_left_new + o_d, b_s, mask=m_d)
        if HAS_ROW & TILE:
            b_r = tl.fma(b_f, b_s.to(dtype)[None, :], b_r)
        elif HAS_ROW:
            next_r = ()
            for i in tl.static_range(MP):
                b_f = rows[i] if i < ROWS else _row(p_df, newest, i, n, M, D, end, o_d).to(dtype)
                next_r = next_r + (tl.fma(b_f, b_s.to(dtype), b_r[i]),)
            b_r = next_r
    p_row = p_gram + new * M
    if STAGE == "step":
        p_row = p_sums + i_b * (6 + 3 * MP) * S + tl.program_id(1)
    if HAS_ROW & TILE:
        tl.store(p_row + (slot if STAGE == "all" else o_i * S), tl.sum(b_r, axis=1), mask=o_i < n)
    elif HAS_ROW:
        for i in tl.static_range(MP):
            o_r = _slot(newest, i, M) if STAGE == "all" else i * S
            tl.store(p_row + o_r, tl.sum(b_r[i], axis=0), mask=i < n)


@triton.jit(do_not_specialize=["M", "S", "n", "newest", "new"])
def _multisecant_row_kernel(p_status, p_gram, p_sums, M, S, n, newest, new, MP: tl.constexpr, BLK: tl.constexpr):
    """After a sweep 2 whose S programs per sample have left their parts of r: r into N."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    p_row = p_gram + (i_b * (M + 2) + new) * M
    parts = load_numbers(p_sums + i_b * (6 + 3 * MP) * S, 0, MP, S, BLK)
    for i in tl.static_range(MP):
        tl.store(p_row + _slot(newest, i, M), tl.sum(parts[i], axis=0), mask=i < n)


@triton.jit(do_not_specialize=["M"])
def _multisecant_transposed_kernel(
    p_v,
    p_left,
    p_df,
    p_gram,
    p_newest,
    p_count,
    p_out,
    D,
    M,
    alpha: tl.float64,
    beta: tl.float64,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
    BLK: tl.constexpr,
):
    """alpha (beta v - L gamma) with N^T gamma = DF^T v: two sweeps and the solve, one program per sample."""
    i_b = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = p_v.dtype.element_ty
    n = tl.minimum(tl.maximum(tl.load(p_count + i_b), 0), M)
    newest = tl.where(n > 0, tl.load(p_newest + i_b), 0) % M
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    o_row = _slots_by_age(newest, M, MP).to(tl.int64)[:, None] * D
    p_v += i_b * D
    p_out += i_b * D
    p_left += i_b * M * D
    p_df += i_b * M * D

    b_t = tl.zeros([MP, BLK], dtype)
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        b_v = tl.load(p_v + o_d, mask=m_d, other=0.0)
        b_f = tl.load(p_df + o_row + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0).to(dtype)
        b_t = tl.fma(b_f, b_v[None, :], b_t)
    b_gamma = _window_gamma(
        p_gram + i_b * (M + 2) * M, tl.sum(b_t, axis=1), M, n, newest, ridge, METHOD, MP, TRANSPOSED=True
    )
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        b_x = tl.load(p_v + o_d, mask=m_d, other=0.0) * scalar(beta, dtype)
        b_l = tl.load(p_left + o_row + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0).to(dtype)
        b_x -= tl.sum(b_l * b_gamma[:, None], axis=0)
        tl.store(p_out + o_d, b_x * scalar(alpha, dtype), mask=m_d)


def multisecant_transposed(a: Any, out: Tensor) -> None:
    """out = alpha (beta v - L gamma) with N^T gamma = DF^T v."""
    (batch, size), history = a.v.shape, a.left.shape[1]
    if batch == 0:
        return
    padded = padded_window(history)
    config = tile_config(size, padded, a.v.dtype)
    tensors = (a.v, a.left, a.df, a.gram, a.newest, a.count, out)
    numbers = (size, history, a.alpha, a.beta, a.ridge)
    options = {"num_warps": config.num_warps, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": False}
    with device_guard(a.v):
        _multisecant_transposed_kernel[(batch,)](
            *tensors, *numbers, METHOD=a.method, MP=padded, BLK=config.block, **options
        )


def multisecant_step(a: Any) -> None:
    """z <- z + alpha (beta g - DF gamma) for every running sample, in place; only the records when `last`."""
    (batch, size), history = a.z.shape, a.left.shape[1]
    n, newest = min(a.k, history), (a.k - 1) % history
    if a.last or n == 0:
        picard_step.launch(a, hold=2 if a.last else 1, damping=1.0)
    if a.last or batch == 0:
        return
    padded = padded_window(n)
    left_config = sweep_config(size, padded, a.z.dtype, a.left.dtype)
    right_config = left_config if padded <= MAX_VECTOR_WINDOW else tile_config(size, padded, a.z.dtype)
    inline = padded <= MAX_INLINE_WINDOW
    programs = programs_per_sample(batch, size, a.z.device)
    grid = (batch,) if programs == 1 else (batch, programs)
    t = torch.empty(batch, history + 1, dtype=a.z.dtype, device=a.z.device)
    shared_by = None if programs == 1 else programs
    sums = None if programs == 1 else t.new_empty(batch, 6 + 3 * padded, programs)
    rows = rows_at_once(padded, a.method, a.z.dtype, a.left.dtype)
    fixed = {"METHOD": a.method, "MP": padded, "enable_fp_fusion": False}
    sweep = fixed | {"ROWS": rows, "maxnreg": MAX_REGISTERS}
    monitor = (a.status, a.iterations, a.residual, a.progress, a.active)
    rule = (a.tol, int(a.absolute), a.stall_floor, a.offset, int(a.maximum))
    with device_guard(a.z):
        if n:
            for stage, left_grid, config in stages(batch, programs, left_config):
                _multisecant_left_kernel[left_grid](
                    *(a.z, a.fz, a.best, *monitor, a.f_prev, a.left, a.df, a.gram, t, sums),
                    *(batch, size, history, shared_by, a.k, n, newest, *rule, a.beta),
                    STAGE=stage,
                    BLK=config.block,
                    num_warps=config.num_warps,
                    **sweep,
                )
            if not inline:
                _multisecant_solve_kernel[(batch,)](
                    *(a.status, a.gram, t, history, n, newest, a.ridge),
                    num_warps=solve_config(padded).num_warps,
                    **fixed,
                )
        _multisecant_right_kernel[grid](
            *(a.z, a.fz, a.best, a.status, a.left, a.df, a.gram, t, sums),
            *(size, history, shared_by, n, newest, a.k % history, a.alpha, a.beta, a.ridge),
            SOLVE=inline,
            TILE=padded > MAX_VECTOR_WINDOW,
            STAGE="all" if programs == 1 else "step",
            BLK=right_config.block,
            num_warps=right_config.num_warps,
            **sweep,
        )
        if n and programs > 1 and a.method in (BROYDEN_GOOD.value, ANDERSON_I.value):
            _multisecant_row_kernel[(batch,)](
                *(a.status, a.gram, sums, history, programs, n, newest, a.k % history),
                MP=padded,
                BLK=JUDGE_CONFIG.block,
                num_warps=JUDGE_CONFIG.num_warps,
                enable_fp_fusion=False,
            )
