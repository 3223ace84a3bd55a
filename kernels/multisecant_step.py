"""Multisecant step: z <- z + alpha (beta g - DF gamma), N gamma = L^T g, over a window of n = min(k, M) pairs.

g = f(z) - z. L holds steps S (BROYDEN_GOOD, ANDERSON_I) or changes of the residual Y (BROYDEN_BAD, ANDERSON_II). DF
holds the changes of f, or beta Y + S if beta != 1. N = L^T Y. Samples that are not RUNNING move no bytes.

| kernels | S programs per sample, see ``common`` | what |
|---|---|---|
| left | left_sums, left_judge | sweep 1, over L: verdict, newest pair, t = L^T g, a column of N and, for Y, a row |
| solve | solve | N gamma = t; part of sweep 2 while MP <= ``MAX_INLINE_WINDOW`` |
| right | right_step, row | sweep 2, over DF: best iterate, z, next step and, for S, its row of N |

z, fz, best, f_prev (B, D) T; left, df (B, M, D) H; gram (B, M + 2, M) T, see ``window``. T is float32 or float64, H is
T or bfloat16. Everything is computed in T. scratch (B, M + 1) T: t, which gamma replaces, then the verdict.
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
    carry_out,
    columns,
    has_ended,
    judge,
    norm_number,
    norms_of,
    norms_of_parts,
    scalar,
    store_no_verdict,
    store_norms,
    store_number,
    store_verdict,
    sum_number,
    unpack_verdict,
    window_at,
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
    sweep_config,
    tile_config,
)
from .constants import ANDERSON_I
from .launch import MONITOR, Plan, Plans
from .window import gamma_of, holds_steps, load_row, slot_of, slots_by_age, small_gamma, squares_of


@triton.constexpr_function
def takes_row(method):
    """Whether the first sweep finishes the row of the newest pair, which the previous step's second sweep began."""
    return method == ANDERSON_I


@triton.constexpr_function
def number_of(name, padded, age=0):
    """Position of a number of a program's columns, after the norms. "end": how many numbers it has.

    "ss", "yy": squares of the newest pair; "g", "y", "s": dots of these vectors with rows of the history, by age.
    """
    first = {"ss": 0, "yy": 1, "g": 2, "y": 2 + padded, "s": 2 + 2 * padded, "end": 2 + 3 * padded}
    return norm_number("end") + first[name] + age


@triton.jit
def _numbers_of(p_numbers, i_b, S, MP: tl.constexpr):
    return p_numbers + i_b * number_of("end", MP) * S


@triton.jit
def _scratch_of(p_scratch, i_b, M):
    """Pointers to t or gamma of sample i_b, and to the verdict on it."""
    p_t = p_scratch + i_b * (M + 1)
    return p_t, p_t + M


@triton.jit
def _zeros(COUNT: tl.constexpr, BLK: tl.constexpr, dtype: tl.constexpr):
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([BLK], dtype),)
    return vectors


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
    """g^2, f(z)^2, s^2, y^2 (if first = 0), and L g, L y and L s of the ROWS pairs from age `first` on.

    Vectors of BLK columns, which the caller adds up. y = f(z) - f_prev - s, with s the step in the newest slot of L. If
    first = 0, the newest pair is completed: beta y + s in DF, and y in L unless L holds steps. Each row of the history
    is a vector of its own, so that a thread keeps to its columns.
    """
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    LEFT_IS_Y: tl.constexpr = not holds_steps(METHOD)
    b_w = scalar(beta, dtype)
    b_v = scalar(1.0 - beta, dtype)
    b_gg = tl.zeros([BLK], dtype)
    b_ff = tl.zeros([BLK], dtype)
    b_ss = tl.zeros([BLK], dtype)
    b_yy = tl.zeros([BLK], dtype)
    b_t = _zeros(ROWS, BLK, dtype)
    b_q = _zeros(ROWS, BLK, dtype)
    b_p = _zeros(ROWS if takes_row(METHOD) else 0, BLK, dtype)
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
            b_l = (
                b_y
                if LEFT_IS_Y & (first + i == 0)
                else load_row(p_left, newest, first + i, n, M, D, end, o_d).to(dtype)
            )
            next_t = next_t + (tl.fma(b_l, b_g, b_t[i]),)
            next_q = next_q + (tl.fma(b_l, b_y, b_q[i]),)
            if takes_row(METHOD):
                next_p = next_p + (tl.fma(b_l, b_s, b_p[i]),)
        b_t = next_t
        b_q = next_q
        b_p = next_p
    return b_gg, b_ff, b_ss, b_yy, b_t, b_q, b_p


@triton.jit
def _store_dots(p_gram, p_t, M, n, newest, beta, t, q, p, ss, yy, age: tl.constexpr, METHOD: tl.constexpr):
    """t of the pair of that age, and its entries of the newest column and row of N; the squares if age = 0.

    t, q and p are the dots of its row of L with g, y and s. The column gets q; so does the row if L holds Y. For
    ANDERSON_I the row gets (r - p) / beta. The previous sweep stored r there: the dot of its row of DF with s.
    """
    slot = slot_of(newest, age, M)
    m = age < n
    tl.store(p_t + age, t, mask=m)
    tl.store(p_gram + slot * M + newest, q, mask=m)
    p_row = p_gram + newest * M + slot
    if age == 0:
        p_left_squares, p_change_squares = squares_of(p_gram, M)
        tl.store(p_left_squares + newest, ss if holds_steps(METHOD) else q)
        tl.store(p_change_squares + newest, yy if holds_steps(METHOD) else q)
    elif not holds_steps(METHOD):
        tl.store(p_row, q, mask=m)
    elif takes_row(METHOD):
        r = tl.load(p_row, mask=m, other=0.0)
        tl.store(p_row, (r - p) / scalar(beta, q.dtype), mask=m)


@triton.jit(do_not_specialize=["B", "M", "k", "n", "newest", "absolute", "maximum"])
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
    p_scratch,
    B,
    D,
    M,
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
    BLK: tl.constexpr,
):
    """Sweep 1 (n > 0) of a sample: the verdict, the newest pair, t = L^T g, and L^T y into N. ROWS pairs at a time."""
    i_b = tl.program_id(0).to(tl.int64)
    if has_ended(p_status, i_b):
        return
    n, newest, _ = window_at(p_iterations, i_b, 0, n, newest, newest, M)
    p_z += i_b * D
    p_fz += i_b * D
    p_f_prev += i_b * D
    p_left += i_b * M * D
    p_left_new = p_left + newest.to(tl.int64) * D
    p_df_new = p_df + i_b * M * D + newest.to(tl.int64) * D
    p_gram += i_b * (M + 2) * M
    p_t, p_verdict = _scratch_of(p_scratch, i_b, M)

    running = n > 0
    for first in tl.static_range(0, MP, ROWS):
        if running:
            b_gg, b_ff, b_ss, b_yy, b_t, b_q, b_p = _sweep_left(
                *(p_z, p_fz, p_f_prev, p_left, p_left_new, p_df_new, D, M, n, newest, 0, D, beta),
                *(first, METHOD, ROWS, BLK),
            )
            if first == 0:
                gg, ff = tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0)
                res_norm, f_norm = norms_of(p_z, p_fz, D, gg, ff, maximum, BLK)
                monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
                rule = (tol, absolute, stall_floor, offset)
                running, improved, failed = judge(monitor, i_b, B, res_norm, f_norm, k, rule, False)
                store_verdict(p_verdict, improved, failed)
                carry_out(improved & (running == 0), failed, p_z, p_best + i_b * D, D, BLK)
            if running:
                ss, yy = tl.sum(b_ss, axis=0), tl.sum(b_yy, axis=0)
                for i in tl.static_range(ROWS):
                    t, q = tl.sum(b_t[i], axis=0), tl.sum(b_q[i], axis=0)
                    p = tl.sum(b_p[i], axis=0) if takes_row(METHOD) else q
                    _store_dots(p_gram, p_t, M, n, newest, beta, t, q, p, ss, yy, first + i, METHOD)


@triton.jit(do_not_specialize=["M", "S", "n", "newest", "maximum"])
def _multisecant_left_sums_kernel(
    p_z,
    p_fz,
    p_status,
    p_iterations,
    p_f_prev,
    p_left,
    p_df,
    p_numbers,
    D,
    M,
    S,
    n,
    newest,
    maximum,
    beta: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 1 (n > 0) over one program's columns: their part of the newest pair, and the numbers of ``number_of``."""
    i_b = tl.program_id(0).to(tl.int64)
    if has_ended(p_status, i_b):
        return
    n, newest, _ = window_at(p_iterations, i_b, 0, n, newest, newest, M)
    p_z += i_b * D
    p_fz += i_b * D
    p_f_prev += i_b * D
    p_left += i_b * M * D
    p_left_new = p_left + newest.to(tl.int64) * D
    p_df_new = p_df + i_b * M * D + newest.to(tl.int64) * D
    p_sample = _numbers_of(p_numbers, i_b, S, MP)
    begin, end = columns(D, BLK)
    for first in tl.static_range(0, MP, ROWS):
        b_gg, b_ff, b_ss, b_yy, b_t, b_q, b_p = _sweep_left(
            *(p_z, p_fz, p_f_prev, p_left, p_left_new, p_df_new, D, M, n, newest, begin, end, beta),
            *(first, METHOD, ROWS, BLK),
        )
        if first == 0:
            gg, ff = tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0)
            store_norms(p_sample, p_z + begin, p_fz + begin, end - begin, gg, ff, maximum, BLK)
            store_number(p_sample, number_of("ss", MP), tl.sum(b_ss, axis=0))
            store_number(p_sample, number_of("yy", MP), tl.sum(b_yy, axis=0))
        for i in tl.static_range(ROWS):
            store_number(p_sample, number_of("g", MP, first + i), tl.sum(b_t[i], axis=0))
            store_number(p_sample, number_of("y", MP, first + i), tl.sum(b_q[i], axis=0))
            if takes_row(METHOD):
                store_number(p_sample, number_of("s", MP, first + i), tl.sum(b_p[i], axis=0))


@triton.jit(do_not_specialize=["B", "M", "S", "k", "n", "newest", "absolute", "maximum"])
def _multisecant_left_judge_kernel(
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    p_gram,
    p_scratch,
    p_numbers,
    B,
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
    BLK: tl.constexpr,
):
    """The verdict, t = L^T g, and L^T y into N, from the numbers that the programs of sweep 1 stored of a sample."""
    i_b = tl.program_id(0).to(tl.int64)
    p_t, p_verdict = _scratch_of(p_scratch, i_b, M)
    if has_ended(p_status, i_b):
        store_no_verdict(p_verdict)
        return
    n, newest, _ = window_at(p_iterations, i_b, 0, n, newest, newest, M)
    p_gram += i_b * (M + 2) * M
    p_sample = _numbers_of(p_numbers, i_b, S, MP)
    res_norm, f_norm = norms_of_parts(p_sample, S, maximum, BLK)
    monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
    rule = (tol, absolute, stall_floor, offset)
    running, improved, failed = judge(monitor, i_b, B, res_norm, f_norm, k, rule, False)
    store_verdict(p_verdict, improved, failed)
    if running:
        ss = sum_number(p_sample, number_of("ss", MP), S, BLK)
        yy = sum_number(p_sample, number_of("yy", MP), S, BLK)
        for age in tl.static_range(MP):
            t = sum_number(p_sample, number_of("g", MP, age), S, BLK)
            q = sum_number(p_sample, number_of("y", MP, age), S, BLK)
            p = sum_number(p_sample, number_of("s", MP, age), S, BLK) if takes_row(METHOD) else q
            _store_dots(p_gram, p_t, M, n, newest, beta, t, q, p, ss, yy, age, METHOD)


@triton.jit(do_not_specialize=["M", "n", "newest"])
def _multisecant_solve_kernel(
    p_status,
    p_iterations,
    p_gram,
    p_scratch,
    M,
    n,
    newest,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
):
    """N gamma = t of a sample; gamma takes the place of t."""
    i_b = tl.program_id(0).to(tl.int64)
    if has_ended(p_status, i_b):
        return
    n, newest, _ = window_at(p_iterations, i_b, 1, n, newest, newest, M)
    o_i = tl.arange(0, MP)
    p_t, _ = _scratch_of(p_scratch, i_b, M)
    b_t = tl.load(p_t + o_i, mask=o_i < n, other=0.0)
    b_gamma = gamma_of(p_gram + i_b * (M + 2) * M, b_t, M, n, newest, ridge, METHOD, MP)
    tl.store(p_t + o_i, b_gamma, mask=o_i < n)


@triton.jit
def _load_mixed(p_z, p_fz, p_best, o_d, m_d, improved, beta):
    """z and beta (f(z) - z) in the columns o_d; z is kept as the best iterate if `improved`."""
    b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
    if improved:
        tl.store(p_best + o_d, b_z, mask=m_d)
    return b_z, scalar(beta, b_z.dtype) * (tl.load(p_fz + o_d, mask=m_d, other=0.0) - b_z)


@triton.jit
def _store_step(p_z, p_left_new, b_z, b_x, o_d, m_d, alpha):
    """z <- z + H(alpha x) in the columns o_d; H(s), with s the step that z has taken, goes to L and is returned."""
    dtype: tl.constexpr = b_z.dtype
    short: tl.constexpr = p_left_new.dtype.element_ty
    b_next = b_z + (scalar(alpha, dtype) * b_x).to(short).to(dtype)
    b_s = (b_next - b_z).to(short)
    # Every warp has read z before it changes.
    tl.debug_barrier()
    tl.store(p_z + o_d, b_next, mask=m_d)
    tl.store(p_left_new + o_d, b_s, mask=m_d)
    return b_s.to(dtype)


@triton.jit
def _sweep_right_rows(
    p_z,
    p_fz,
    p_best,
    p_left_new,
    p_df,
    p_gram,
    p_t,
    D,
    M,
    n,
    newest,
    begin,
    end,
    improved,
    alpha,
    beta,
    ridge,
    METHOD: tl.constexpr,
    SOLVE: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BLK: tl.constexpr,
):
    """z <- z + H(alpha (beta g - DF gamma)) in the columns [begin, end); DF^T s by age, as a tuple, if L holds steps.

    p_t holds gamma, or t if SOLVE. Each row of DF is a separate vector, so that a thread keeps to its columns. Dots
    with rows after the first ROWS read them again, from the cache.
    """
    dtype: tl.constexpr = p_z.dtype.element_ty
    if SOLVE:
        gammas = small_gamma(p_gram, p_t, M, n, newest, ridge, METHOD, MP)
    else:
        gammas = ()
        for i in tl.static_range(MP):
            gammas = gammas + (tl.load(p_t + i, mask=i < n, other=0.0),)
    b_r = _zeros(MP if holds_steps(METHOD) else 0, BLK, dtype)
    for start in range(begin, end, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_z, b_x = _load_mixed(p_z, p_fz, p_best, o_d, m_d, improved, beta)
        rows = ()
        for i in tl.static_range(MP):
            rows = rows + (load_row(p_df, newest, i, n, M, D, end, o_d).to(dtype),)
            b_x -= rows[i] * gammas[i]
        b_s = _store_step(p_z, p_left_new, b_z, b_x, o_d, m_d, alpha)
        if holds_steps(METHOD):
            next_r = ()
            for i in tl.static_range(MP):
                b_f = rows[i] if i < ROWS else load_row(p_df, newest, i, n, M, D, end, o_d).to(dtype)
                next_r = next_r + (tl.fma(b_f, b_s, b_r[i]),)
            b_r = next_r
    r = ()
    for i in tl.static_range(MP if holds_steps(METHOD) else 0):
        r = r + (tl.sum(b_r[i], axis=0),)
    return r


@triton.jit
def _sweep_right_tile(
    p_z,
    p_fz,
    p_best,
    p_left_new,
    p_df,
    p_t,
    D,
    M,
    n,
    newest,
    begin,
    end,
    improved,
    alpha,
    beta,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
    BLK: tl.constexpr,
):
    """As ``_sweep_right_rows`` without SOLVE; DF^T s is a vector (MP,). The rows of DF are one tile.

    For windows too long for a vector per row. Sums over the rows cross threads.
    """
    dtype: tl.constexpr = p_z.dtype.element_ty
    o_i = tl.arange(0, MP)
    slot = slots_by_age(newest, M, MP)
    b_gamma = tl.load(p_t + o_i, mask=o_i < n, other=0.0)
    b_r = tl.zeros([MP, BLK], dtype)
    for start in range(begin, end, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_z, b_x = _load_mixed(p_z, p_fz, p_best, o_d, m_d, improved, beta)
        p_f = p_df + slot.to(tl.int64)[:, None] * D + o_d[None, :]  # [MP, BLK]
        b_f = tl.load(p_f, mask=(o_i < n)[:, None] & m_d[None, :], other=0.0).to(dtype)
        b_x -= tl.sum(b_f * b_gamma[:, None], axis=0)
        b_s = _store_step(p_z, p_left_new, b_z, b_x, o_d, m_d, alpha)
        if holds_steps(METHOD):
            b_r = tl.fma(b_f, b_s[None, :], b_r)
    return tl.sum(b_r, axis=1)


@triton.jit(do_not_specialize=["M", "n", "newest", "new"])
def _multisecant_right_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_left,
    p_df,
    p_gram,
    p_scratch,
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
    TILE: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 2 of a sample: z <- z + H(alpha (beta g - DF gamma)), the step s into slot `new` of L.

    If L holds steps, DF^T s goes into row `new` of N: all of it for BROYDEN_GOOD, a part of it for ANDERSON_I.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if has_ended(p_status, i_b):
        return
    n, newest, new = window_at(p_iterations, i_b, 1, n, newest, new, M)
    p_t, p_verdict = _scratch_of(p_scratch, i_b, M)
    # The first iterate is kept by the kernel before.
    improved, _ = unpack_verdict(tl.load(p_verdict, mask=n > 0, other=0.0))
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    p_left_new = p_left + i_b * M * D + new.to(tl.int64) * D
    p_df += i_b * M * D
    p_gram += i_b * (M + 2) * M
    if TILE:
        b_r = _sweep_right_tile(
            *(p_z, p_fz, p_best, p_left_new, p_df, p_t, D, M, n, newest, 0, D, improved, alpha, beta),
            *(METHOD, MP, BLK),
        )
        if holds_steps(METHOD):
            tl.store(p_gram + new * M + slots_by_age(newest, M, MP), b_r, mask=tl.arange(0, MP) < n)
    else:
        r = _sweep_right_rows(
            *(p_z, p_fz, p_best, p_left_new, p_df, p_gram, p_t, D, M, n, newest, 0, D, improved, alpha, beta, ridge),
            *(METHOD, SOLVE, MP, ROWS, BLK),
        )
        if holds_steps(METHOD):
            for i in tl.static_range(MP):
                tl.store(p_gram + new * M + slot_of(newest, i, M), r[i], mask=i < n)


@triton.jit(do_not_specialize=["M", "S", "n", "newest", "new"])
def _multisecant_right_step_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_left,
    p_df,
    p_gram,
    p_scratch,
    p_numbers,
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
    BLK: tl.constexpr,
):
    """Sweep 2 over one program's columns, by the verdict: their part of DF^T s is numbers "s" of ``number_of``."""
    i_b = tl.program_id(0).to(tl.int64)
    n, newest, new = window_at(p_iterations, i_b, 1, n, newest, new, M)
    begin, end = columns(D, BLK)
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    p_t, p_verdict = _scratch_of(p_scratch, i_b, M)
    # The first iterate is kept by the kernel before.
    improved, failed = unpack_verdict(tl.load(p_verdict, mask=n > 0, other=0.0))
    if has_ended(p_status, i_b):
        carry_out(improved, failed, p_z + begin, p_best + begin, end - begin, BLK)
        return
    p_left_new = p_left + i_b * M * D + new.to(tl.int64) * D
    p_df += i_b * M * D
    p_sample = _numbers_of(p_numbers, i_b, S, MP)
    if TILE:
        b_r = _sweep_right_tile(
            *(p_z, p_fz, p_best, p_left_new, p_df, p_t, D, M, n, newest, begin, end, improved, alpha, beta),
            *(METHOD, MP, BLK),
        )
        if holds_steps(METHOD):
            store_number(p_sample, number_of("s", MP) + tl.arange(0, MP), b_r)
    else:
        p_gram += i_b * (M + 2) * M
        r = _sweep_right_rows(
            *(p_z, p_fz, p_best, p_left_new, p_df, p_gram, p_t, D, M, n, newest, begin, end, improved),
            *(alpha, beta, ridge, METHOD, SOLVE, MP, ROWS, BLK),
        )
        if holds_steps(METHOD):
            for i in tl.static_range(MP):
                store_number(p_sample, number_of("s", MP, i), r[i])


@triton.jit(do_not_specialize=["M", "S", "n", "newest", "new"])
def _multisecant_row_kernel(
    p_status, p_iterations, p_gram, p_numbers, M, S, n, newest, new, MP: tl.constexpr, BLK: tl.constexpr
):
    """DF^T s of a sample into row `new` of N, from the numbers that the programs of sweep 2 stored of it."""
    i_b = tl.program_id(0).to(tl.int64)
    if has_ended(p_status, i_b):
        return
    n, newest, new = window_at(p_iterations, i_b, 1, n, newest, new, M)
    p_row = p_gram + (i_b * (M + 2) + new) * M
    p_sample = _numbers_of(p_numbers, i_b, S, MP)
    for age in tl.static_range(MP):
        r = sum_number(p_sample, number_of("s", MP, age), S, BLK)
        tl.store(p_row + slot_of(newest, age, M), r, mask=age < n)


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
    o_row = slots_by_age(newest, M, MP).to(tl.int64)[:, None] * D
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
    b_gamma = gamma_of(
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
    with device_guard(a.v):
        _multisecant_transposed_kernel[(batch,)](
            p_v=a.v,
            p_left=a.left,
            p_df=a.df,
            p_gram=a.gram,
            p_newest=a.newest,
            p_count=a.count,
            p_out=out,
            D=size,
            M=history,
            alpha=a.alpha,
            beta=a.beta,
            ridge=a.ridge,
            METHOD=a.method,
            MP=padded,
            BLK=config.block,
            num_warps=config.num_warps,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,
        )


def _plan(a: Any, n: int, new: int, method: int, history: int, history_dtype: torch.dtype) -> Plan:
    batch, size = a.z.shape
    if batch == 0:
        return Plan(a)
    padded = padded_window(history if n < 0 else n)
    programs = programs_per_sample(batch, size, a.z.device)
    shares = {"S": programs} if programs > 1 else {}
    numbers = {"p_numbers": (batch, number_of("end", padded), programs)} if shares else {}
    plan = Plan(a, p_scratch=(batch, history + 1), **numbers)
    window = {"M": history, "n": n, "newest": (new - 1) % history, "MP": padded, "enable_fp_fusion": False}
    rows = {"METHOD": method, "ROWS": rows_at_once(padded, method, a.z.dtype, history_dtype)}
    sweep = {"D": size, "maxnreg": MAX_REGISTERS, **rows, **shares, **window}
    sums = {"BLK": JUDGE_CONFIG.block, "num_warps": JUDGE_CONFIG.num_warps, **shares, **window}
    config = sweep_config(size, padded, a.z.dtype, history_dtype)
    columns = {"BLK": config.block, "num_warps": config.num_warps}
    if n and shares:
        plan.add(_multisecant_left_sums_kernel, (batch, programs), **columns, **sweep)
        plan.add(_multisecant_left_judge_kernel, (batch,), B=batch, METHOD=method, maxnreg=MAX_REGISTERS, **sums)
    elif n:
        plan.add(_multisecant_left_kernel, (batch,), B=batch, **columns, **sweep)
    inline, tiled = padded <= MAX_INLINE_WINDOW, padded > MAX_VECTOR_WINDOW
    if n and not inline:
        warps = solve_config(padded).num_warps
        plan.add(_multisecant_solve_kernel, (batch,), METHOD=method, num_warps=warps, **window)
    if tiled:
        config = tile_config(size, padded, a.z.dtype)
        columns = {"BLK": config.block, "num_warps": config.num_warps}
    step = {"new": new, "SOLVE": inline, "TILE": tiled, **columns, **sweep}
    if shares:
        plan.add(_multisecant_right_step_kernel, (batch, programs), **step)
    else:
        plan.add(_multisecant_right_kernel, (batch,), **step)
    if n and shares and holds_steps(method):
        plan.add(_multisecant_row_kernel, (batch,), new=new, **sums)
    return plan


_PLANS = Plans(_plan, ("z", "fz", *MONITOR, "f_prev", "left", "df", "gram"))


def multisecant_step(a: Any) -> None:
    """z <- z + alpha (beta g - DF gamma) for every running sample, in place; only the records when `last`."""
    history = a.left.shape[1]
    n = min(a.k, history) if a.k >= 0 else -1  # only the device knows the number: kernels for the whole history
    if a.last or n == 0:
        picard_step.run(a, hold=True)
    if not a.last:
        _PLANS.run(a, n, a.k % history, a.method, history, a.left.dtype)
