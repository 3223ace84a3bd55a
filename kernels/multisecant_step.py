"""Multisecant step: z <- z + alpha (beta g - DF gamma), N gamma = L^T g, over a window of n = min(k, M) pairs.

g = f(z) - z. L holds steps S (BROYDEN_GOOD, ANDERSON_I) or changes of the residual Y (BROYDEN_BAD, ANDERSON_II). DF
holds the changes of f, or beta Y + S if beta != 1. N = L^T Y. Samples that are not RUNNING move no bytes.

| kernels | if programs share a sample | in halves, see ``ops.steps.split`` | what |
|---|---|---|---|
| left | left, judge | left, totals; enter | sweep 1, over L: verdict, newest pair, L^T g, a column, for Y a row of N |
| solve | solve | solve | N gamma = t; part of sweep 2 while MP <= ``MAX_INLINE_WINDOW`` |
| right | right, row | right, row | sweep 2, over DF: best iterate, z, next step and, for S, its row of N |

z, fz, best, f_prev (B, D) T; left, df (B, M, D) H; gram (B, M + 2, M) T, see ``window``. T is float32 or float64, H is
T or bfloat16. Everything is computed in T. The window of a step is in the first n slots. scratch (B, W) T: t by slot
(M), which gamma replaces; the verdict; and if programs share a sample, their numbers, see ``number_of``.

S programs share a sample. Arguments of helpers in capitals, `first` and `dtype` are constants of the compiled code.
PAIRS is the window's size, and MP the next power of two. A pass over L sums PASS pairs, and loads ROWS of them at once.
Columns come in blocks of BLK. FOLD of them, held by one thread, are summed first. If FOLD < 0 they are not adjacent.

The transposed product alpha (beta v - L gamma), N^T gamma = DF^T v, has three kernels: dots, gamma, product.
"""

# The language of jit functions grows tuples in loops.
# mypy: disable-error-code="assignment, var-annotated"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import common, picard_step
from .common import scalar
from .config import (
    JUDGE_CONFIG,
    MAX_INLINE_WINDOW,
    MAX_REGISTERS,
    padded_window,
    programs_per_sample,
    sweep_config,
    transposed_config,
)
from .constants import ANDERSON_I
from .launch import Plan, Plans
from .window import holds_steps, in_window, load_rows, slots_by_age, small_gamma, squares_of, warp_gamma


@triton.constexpr_function
def takes_row(method):
    """Whether the first sweep finishes the row of the newest pair, which the previous step's second sweep began."""
    return method == ANDERSON_I


@triton.constexpr_function
def number_of(name, padded):
    """Position of numbers of a program's columns, after the norms. "end": how many numbers it has.

    "new": see ``_store_newest``; "g", "y", "s": dots of these vectors with rows of the history, by slot.
    """
    first = {"new": 0, "g": 8, "y": 8 + padded, "s": 8 + 2 * padded, "end": 8 + 3 * padded}
    return common.norm_number("end") + first[name]


@triton.jit
def _scratch_of(p_scratch, i_b, M, W):
    """Pointers to t or gamma of sample i_b, to the verdict on it, and to the numbers of its programs."""
    p_t = p_scratch + i_b * W
    return p_t, p_t + M, p_t + M + 1


@triton.constexpr_function
def _sums_of(block, fold):
    return block // abs(fold)


@triton.constexpr_function
def _padded(count):
    return triton.next_power_of_2(count)


@triton.jit
def _zeros(COUNT, BLK, FOLD, dtype):
    LENGTH: tl.constexpr = _sums_of(BLK, FOLD)
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([LENGTH], dtype),)
    return vectors


@triton.jit
def _folded(b_x, FOLD):
    """Sums of the FOLD columns that one thread has, so that it keeps one register per sum. FOLD < 0: not adjacent."""
    if FOLD > 0:
        return tl.sum(tl.reshape(b_x, [b_x.shape[0] // FOLD, FOLD]), axis=1)
    else:
        return tl.sum(tl.reshape(b_x, [-FOLD, b_x.shape[0] // -FOLD]), axis=0)


@triton.jit
def _with_dots(sums, rows, b_x, first, FOLD):
    """The sums, a vector per pair, plus the products of x with the rows of the pairs from `first` on."""
    result = ()
    for i in tl.static_range(len(sums)):
        if (i >= first) & (i < first + len(rows)):
            result = result + (sums[i] + _folded(rows[i - first].to(b_x.dtype) * b_x, FOLD),)
        else:
            result = result + (sums[i],)
    return result


@triton.jit
def _dots(p_x, p_rows, window, D, begin, end, PAIRS, ROWS, FOLD, BLK, dtype):
    """Sums, a vector per pair, of the products of x with the rows of a window in the columns [begin, end)."""
    sums = _zeros(PAIRS, BLK, FOLD, dtype)
    for start in tl.range(begin, end, BLK, disable_licm=True):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_x = tl.load(p_x + o_d, mask=m_d, other=0.0).to(dtype)
        for first in tl.static_range(0, PAIRS, ROWS):
            sums = _with_dots(sums, load_rows(p_rows + o_d, first, ROWS, window, 0, D, m_d), b_x, first, FOLD)
    return sums


@triton.jit
def _sum_all(vectors):
    """The sums of the vectors, padded with zeros to a power of two, by one reduction: its barriers serve all."""
    COUNT: tl.constexpr = _padded(len(vectors))
    for _ in tl.static_range(COUNT - len(vectors)):
        vectors = vectors + (tl.zeros_like(vectors[0]),)
    for half in tl.static_range(COUNT.bit_length() - 1):
        joined = ()
        for i in tl.static_range(COUNT >> (half + 1)):
            joined = joined + (tl.join(vectors[i], vectors[i + (COUNT >> (half + 1))]),)
        vectors = joined
    return tl.reshape(tl.sum(vectors[0], axis=0), [COUNT])


@triton.jit
def _entry(b_x, i):
    return tl.sum(tl.where(tl.arange(0, b_x.shape[0]) == i, b_x, 0.0), axis=0)


@triton.jit
def _sweep_left(sample, window, D, begin, end, beta, first, METHOD, PASS, ROWS, FOLD, BLK):
    """Sums over the columns [begin, end): of the newest pair, see ``_store_newest``, then L g, L y and L s by slot.

    The dots are those of PASS slots from `first` on, and 0 for the newest. y = f(z) - f_prev - s, with s the step in
    the newest slot of L. If first = 0, the newest pair is completed: beta y + s in DF, and y in L if it holds Y.
    """
    p_z, p_fz, p_f_prev, p_left, p_df = sample
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_left.dtype.element_ty
    LEFT_IS_Y: tl.constexpr = not holds_steps(METHOD)
    M, n, newest = window
    o_newest = newest.to(tl.int64) * D
    b_w = scalar(beta, dtype)
    b_v = scalar(1.0 - beta, dtype)
    new = _zeros(6, BLK, FOLD, dtype)
    b_t = _zeros(PASS, BLK, FOLD, dtype)
    b_q = _zeros(PASS, BLK, FOLD, dtype)
    b_p = _zeros(PASS if takes_row(METHOD) else 1, BLK, FOLD, dtype)
    for start in tl.range(begin, end, BLK, disable_licm=True):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_l = tl.load(p_left + o_newest + o_d, mask=m_d, other=0.0).to(dtype)
        if LEFT_IS_Y & (first > 0):
            b_y = b_l
        else:
            b_delta = b_fz - tl.load(p_f_prev + o_d, mask=m_d, other=0.0)
            b_y = b_delta - b_l
        if first == 0:
            tl.store(p_df + o_newest + o_d, (b_w * b_delta + b_v * b_l).to(short), mask=m_d)
            if LEFT_IS_Y:
                # Every warp has read s before y takes its place.
                tl.debug_barrier()
                tl.store(p_left + o_newest + o_d, b_y.to(short), mask=m_d)
                b_y = b_y.to(short).to(dtype)
                b_l = b_y
            products = (b_l * b_l, b_y * b_y, b_l * b_g, b_l * b_y, b_g * b_g, b_fz * b_fz)
            added = ()
            for i in tl.static_range(6):
                added = added + (new[i] + _folded(products[i], FOLD),)
            new = added
        for slot in tl.static_range(0, PASS, ROWS):
            rows = load_rows(p_left + o_d, first + slot, ROWS, window, 1, D, m_d)
            b_t = _with_dots(b_t, rows, b_g, slot, FOLD)
            b_q = _with_dots(b_q, rows, b_y, slot, FOLD)
            if takes_row(METHOD):
                b_p = _with_dots(b_p, rows, b_l, slot, FOLD)
    t, q = _sum_all(b_t), _sum_all(b_q)
    return _sum_all(new) if first == 0 else t, t, q, _sum_all(b_p) if takes_row(METHOD) else q


@triton.jit
def _store_newest(p_gram, p_t, window, b_new):
    """The newest pair's entries of t and N, and its squares. b_new (8,): l^2, y^2, l g, l y, g^2, f(z)^2, 0, 0.

    l is the newest row of L.
    """
    M, _, newest = window
    p_left_squares, p_change_squares = squares_of(p_gram, M)
    tl.store(p_left_squares + newest, _entry(b_new, 0))
    tl.store(p_change_squares + newest, _entry(b_new, 1))
    tl.store(p_t + newest, _entry(b_new, 2))
    tl.store(p_gram + newest * M + newest, _entry(b_new, 3))


@triton.jit
def _store_dots(p_gram, p_t, window, beta, first, t, q, p, METHOD):
    """t, the newest column of N and, for Y and ANDERSON_I, its row, for the other pairs in slots from `first` on.

    t, q and p are dots of the rows of L with g, y and s. The column gets q; so does the row if L holds Y. For
    ANDERSON_I the row gets (r - p) / beta. The previous sweep stored r there: the dot of its row of DF with s.
    """
    M, n, newest = window
    slot = first + tl.arange(0, t.shape[0])
    m = (slot < n) & (slot != newest)
    tl.store(p_t + slot, t, mask=m)
    tl.store(p_gram + slot * M + newest, q, mask=m)
    p_row = p_gram + newest * M + slot
    if takes_row(METHOD):
        r = tl.load(p_row, mask=m, other=0.0)
        tl.store(p_row, (r - p) / scalar(beta, q.dtype), mask=m)
    elif not holds_steps(METHOD):
        tl.store(p_row, q, mask=m)


@triton.jit(do_not_specialize=["B", "M", "W", "k", "n", "newest", "absolute", "maximum"])
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
    W,
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
    SHARED: tl.constexpr,
    MP: tl.constexpr,
    PAIRS: tl.constexpr,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 1 (n > 0) over one program's columns: the newest pair, and the sums of all pairs, PASS at a time.

    The sums are numbers of ``number_of`` if SHARED. Else they are those of the whole sample, which is judged here.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    n, newest, _ = common.window_at(p_iterations, i_b, 0, n, newest, newest, M)
    begin, end = common.columns(D, BLK)
    p_z += i_b * D
    p_fz += i_b * D
    sample = (p_z, p_fz, p_f_prev + i_b * D, p_left + i_b * M * D, p_df + i_b * M * D)
    window = (M, n, newest)
    p_gram += i_b * (M + 2) * M
    p_t, p_verdict, p_numbers = _scratch_of(p_scratch, i_b, M, W)
    running = n > 0
    for first in tl.static_range(0, PAIRS, PASS):
        if running:
            b_new, t, q, p = _sweep_left(sample, window, D, begin, end, beta, first, METHOD, PASS, ROWS, FOLD, BLK)
            if SHARED:
                if first == 0:
                    gg, ff = _entry(b_new, 4), _entry(b_new, 5)
                    common.store_norms(p_numbers, p_z + begin, p_fz + begin, end - begin, gg, ff, maximum, BLK)
                    common.store_number(p_numbers, number_of("new", MP) + tl.arange(0, 8), b_new)
                slot = first + tl.arange(0, t.shape[0])
                common.store_number(p_numbers, number_of("g", MP) + slot, t)
                common.store_number(p_numbers, number_of("y", MP) + slot, q)
                if takes_row(METHOD):
                    common.store_number(p_numbers, number_of("s", MP) + slot, p)
            else:
                if first == 0:
                    gg, ff = _entry(b_new, 4), _entry(b_new, 5)
                    res_norm, f_norm = common.norms_of(p_z, p_fz, D, gg, ff, maximum, BLK)
                    monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
                    rule = (tol, absolute, stall_floor, offset)
                    running, improved, failed = common.judge(monitor, i_b, B, res_norm, f_norm, k, rule, False)
                    common.store_verdict(p_verdict, improved, failed)
                    common.carry_out(improved & (running == 0), failed, p_z, p_best + i_b * D, D, BLK)
                    if running:
                        _store_newest(p_gram, p_t, window, b_new)
                if running:
                    _store_dots(p_gram, p_t, window, beta, first, t, q, p, METHOD)


@triton.jit
def _summed(p_numbers, S, METHOD, MP):
    """The sums of ``_sweep_left`` over the S programs of a sample."""
    o_i = tl.arange(0, MP)
    b_new = common.sum_numbers(p_numbers, number_of("new", MP) + tl.arange(0, 8), S)
    t = common.sum_numbers(p_numbers, number_of("g", MP) + o_i, S)
    q = common.sum_numbers(p_numbers, number_of("y", MP) + o_i, S)
    return b_new, t, q, common.sum_numbers(p_numbers, number_of("s", MP) + o_i, S) if takes_row(METHOD) else q


@triton.jit(do_not_specialize=["M", "W", "S", "n", "newest"])
def _multisecant_totals_kernel(
    p_status,
    p_gram,
    p_scratch,
    p_sums,
    M,
    W,
    S,
    n,
    newest,
    beta: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
):
    """The sums of ``deqfast.ops.steps.MultisecantSums`` of a row, from the numbers of its S programs."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    _, _, p_numbers = _scratch_of(p_scratch, i_b, M, W)
    b_new, t, q, p = _summed(p_numbers, S, METHOD, MP)
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    p_sums += i_b * (4 + (3 if holds_steps(METHOD) else 2) * n)
    tl.store(p_sums, _entry(b_new, 4))
    tl.store(p_sums + 1, _entry(b_new, 5))
    tl.store(p_sums + 2 + o_i, tl.where(o_i == newest, _entry(b_new, 2), t), mask=m_i)
    tl.store(p_sums + 2 + n + o_i, tl.where(o_i == newest, _entry(b_new, 3), q), mask=m_i)
    tl.store(p_sums + 2 + 2 * n, _entry(b_new, 0))
    tl.store(p_sums + 3 + 2 * n, _entry(b_new, 1))
    if holds_steps(METHOD):
        r = tl.load(p_gram + (i_b * (M + 2) + newest) * M + o_i, mask=m_i, other=0.0)
        if takes_row(METHOD):
            r = (r - tl.where(o_i == newest, _entry(b_new, 0), p)) / scalar(beta, q.dtype)
        tl.store(p_sums + 4 + 2 * n + o_i, r, mask=m_i)


@triton.jit(do_not_specialize=["M", "W", "n", "newest"])
def _multisecant_enter_kernel(
    p_verdict, p_sums, p_status, p_gram, p_scratch, M, W, n, newest, METHOD: tl.constexpr, MP: tl.constexpr
):
    """The verdict on a row, which the op was given; from the sums over all parts t, and the newest pair into N."""
    i_b = tl.program_id(0).to(tl.int64)
    p_t, p_to, _ = _scratch_of(p_scratch, i_b, M, W)
    if common.take_verdict(p_verdict, p_status, p_to, i_b) & (n > 0):
        o_i = tl.arange(0, MP)
        m_i = o_i < n
        p_gram += i_b * (M + 2) * M
        p_sums += i_b * (4 + (3 if holds_steps(METHOD) else 2) * n)
        q = tl.load(p_sums + 2 + n + o_i, mask=m_i, other=0.0)
        r = tl.load(p_sums + 4 + 2 * n + o_i, mask=m_i, other=0.0) if holds_steps(METHOD) else q
        p_left_squares, p_change_squares = squares_of(p_gram, M)
        tl.store(p_t + o_i, tl.load(p_sums + 2 + o_i, mask=m_i, other=0.0), mask=m_i)
        tl.store(p_gram + o_i * M + newest, q, mask=m_i)
        tl.store(p_gram + newest * M + o_i, r, mask=m_i & (o_i != newest))
        tl.store(p_left_squares + newest, tl.load(p_sums + 2 + 2 * n))
        tl.store(p_change_squares + newest, tl.load(p_sums + 3 + 2 * n))


@triton.jit(do_not_specialize=["B", "M", "W", "S", "k", "n", "newest", "absolute", "maximum"])
def _multisecant_judge_kernel(
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    p_gram,
    p_scratch,
    B,
    M,
    W,
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
    """The verdict, t = L^T g, and L^T y into N, from the numbers that the S programs of sweep 1 stored of a sample."""
    i_b = tl.program_id(0).to(tl.int64)
    p_t, p_verdict, p_numbers = _scratch_of(p_scratch, i_b, M, W)
    if common.has_ended(p_status, i_b):
        common.store_no_verdict(p_verdict)
        return
    n, newest, _ = common.window_at(p_iterations, i_b, 0, n, newest, newest, M)
    p_gram += i_b * (M + 2) * M
    res_norm, f_norm = common.norms_of_parts(p_numbers, S, maximum, BLK)
    monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
    rule = (tol, absolute, stall_floor, offset)
    running, improved, failed = common.judge(monitor, i_b, B, res_norm, f_norm, k, rule, False)
    common.store_verdict(p_verdict, improved, failed)
    if running:
        window = (M, n, newest)
        b_new, t, q, p = _summed(p_numbers, S, METHOD, MP)
        _store_newest(p_gram, p_t, window, b_new)
        _store_dots(p_gram, p_t, window, beta, 0, t, q, p, METHOD)


@triton.jit(do_not_specialize=["M", "W", "n", "newest"])
def _multisecant_solve_kernel(
    p_status,
    p_iterations,
    p_gram,
    p_scratch,
    M,
    W,
    n,
    newest,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
):
    """N gamma = t of a sample; gamma takes the place of t."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    n, newest, _ = common.window_at(p_iterations, i_b, 1, n, newest, newest, M)
    m_i = tl.arange(0, MP) < n
    p_t, _, _ = _scratch_of(p_scratch, i_b, M, W)
    p_t += slots_by_age(newest, M, MP)
    b_t = tl.load(p_t, mask=m_i, other=0.0)
    tl.store(p_t, warp_gamma(p_gram + i_b * (M + 2) * M, b_t, M, n, newest, ridge, METHOD, MP, False), mask=m_i)


@triton.jit
def _sweep_right(
    sample, window, gammas, D, begin, end, improved, alpha, beta, METHOD, SOLVE, PAIRS, PASS, ROWS, FOLD, BLK
):
    """z <- z + H(alpha (beta g - DF gamma)) in the columns [begin, end); DF^T s by slot if L holds steps.

    H(s), with s the step that z has taken, goes to L. gammas: a tuple by slot if SOLVE, else a pointer. More than ROWS
    rows are read a second time for the dots, from the cache. If PASS < PAIRS the dots take a sweep of their own, since
    a thread has no registers for their sums.
    """
    APART: tl.constexpr = PASS < PAIRS
    p_z, p_fz, p_best, p_next, p_df = sample
    M, n, _ = window
    dtype: tl.constexpr = p_z.dtype.element_ty
    short: tl.constexpr = p_df.dtype.element_ty
    b_r = _zeros(PAIRS if holds_steps(METHOD) & (not APART) else 1, BLK, FOLD, dtype)
    for start in tl.range(begin, end, BLK, disable_licm=True):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        if improved:
            tl.store(p_best + o_d, b_z, mask=m_d)
        b_x = scalar(beta, dtype) * (tl.load(p_fz + o_d, mask=m_d, other=0.0) - b_z)
        for first in tl.static_range(0, PAIRS, ROWS):
            rows = load_rows(p_df + o_d, first, ROWS, window, 0, D, m_d)
            for i in tl.static_range(ROWS):
                gamma = gammas[first + i] if SOLVE else tl.load(gammas + first + i, mask=first + i < n, other=0.0)
                b_x -= rows[i].to(dtype) * gamma
        b_next = b_z + (scalar(alpha, dtype) * b_x).to(short).to(dtype)
        b_s = (b_next - b_z).to(short)
        # Every warp has read z before it changes.
        tl.debug_barrier()
        tl.store(p_z + o_d, b_next, mask=m_d)
        tl.store(p_next + o_d, b_s, mask=m_d)
        if holds_steps(METHOD) & (not APART):
            for first in tl.static_range(0, PAIRS, ROWS):
                if PAIRS > ROWS:
                    rows = load_rows(p_df + o_d, first, ROWS, window, 0, D, m_d)
                b_r = _with_dots(b_r, rows, b_s.to(dtype), first, FOLD)
    if holds_steps(METHOD) & APART:
        # Every warp has stored its part of s.
        tl.debug_barrier()
        b_r = _dots(p_next, p_df, window, D, begin, end, PAIRS, ROWS, FOLD, BLK, dtype)
    return _sum_all(b_r) if holds_steps(METHOD) else b_r[0]


@triton.jit(do_not_specialize=["M", "W", "n", "newest", "new"])
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
    W,
    n,
    newest,
    new,
    alpha: tl.float64,
    beta: tl.float64,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    SHARED: tl.constexpr,
    SOLVE: tl.constexpr,
    MP: tl.constexpr,
    PAIRS: tl.constexpr,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BLK: tl.constexpr,
):
    """Sweep 2 over one program's columns, by the verdict: z <- z + H(alpha (beta g - DF gamma)), and the step s into L.

    If L holds steps, DF^T s goes into row `new` of N: all of it for BROYDEN_GOOD, a part of it for ANDERSON_I. If
    SHARED, it goes to the numbers "s" of ``number_of``.
    """
    i_b = tl.program_id(0).to(tl.int64)
    n, newest, new = common.window_at(p_iterations, i_b, 1, n, newest, new, M)
    begin, end = common.columns(D, BLK)
    p_z += i_b * D
    p_best += i_b * D
    p_t, p_verdict, p_numbers = _scratch_of(p_scratch, i_b, M, W)
    # The first iterate is kept by the kernel before, unless the step is cut in halves.
    has_verdict = True if p_iterations is None else n > 0
    improved, failed = common.unpack_verdict(tl.load(p_verdict, mask=has_verdict, other=0.0))
    if common.has_ended(p_status, i_b):
        if SHARED:
            common.carry_out(improved, failed, p_z + begin, p_best + begin, end - begin, BLK)
        return
    sample = (p_z, p_fz + i_b * D, p_best, p_left + (i_b * M + new) * D, p_df + i_b * M * D)
    window = (M, n, newest)
    p_gram += i_b * (M + 2) * M
    gammas = small_gamma(p_gram, p_t, M, n, newest, ridge, METHOD, MP) if SOLVE else p_t
    r = _sweep_right(
        *(sample, window, gammas, D, begin, end, improved, alpha, beta),
        *(METHOD, SOLVE, PAIRS, PASS, ROWS, FOLD, BLK),
    )
    if holds_steps(METHOD):
        o_i = tl.arange(0, MP)
        if SHARED:
            common.store_number(p_numbers, number_of("s", MP) + o_i, r)
        else:
            tl.store(p_gram + new * M + o_i, r, mask=o_i < n)


@triton.jit(do_not_specialize=["M", "W", "S", "n", "new"])
def _multisecant_row_kernel(p_status, p_iterations, p_gram, p_scratch, M, W, S, n, new, MP: tl.constexpr):
    """DF^T s of a sample into row `new` of N, from the numbers that the S programs of sweep 2 stored of it."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    n, _, new = common.window_at(p_iterations, i_b, 1, n, new, new, M)
    o_i = tl.arange(0, MP)
    _, _, p_numbers = _scratch_of(p_scratch, i_b, M, W)
    r = common.sum_numbers(p_numbers, number_of("s", MP) + o_i, S)
    tl.store(p_gram + (i_b * (M + 2) + new) * M + o_i, r, mask=o_i < n)


@triton.jit
def _window_of(p_count, p_newest, i_b, M):
    """M, n and the newest slot of a sample whose window is its own."""
    n = tl.minimum(tl.maximum(tl.load(p_count + i_b), 0), M)
    return M, n, tl.where(n > 0, tl.load(p_newest + i_b), 0) % M


@triton.jit(do_not_specialize=["M"])
def _transposed_dots_kernel(
    p_v,
    p_df,
    p_newest,
    p_count,
    p_numbers,
    D,
    M,
    MP: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    BLK: tl.constexpr,
):
    """DF^T v by slot over one program's columns; p_numbers (B, MP, S)."""
    i_b = tl.program_id(0).to(tl.int64)
    window = _window_of(p_count, p_newest, i_b, M)
    begin, end = common.columns(D, BLK)
    dtype: tl.constexpr = p_v.dtype.element_ty
    b_t = _dots(
        *(p_v + i_b * D, p_df + i_b * M * D, window, D, begin, end),
        *(PAIRS, ROWS, FOLD, BLK, dtype),
    )
    common.store_number(p_numbers + i_b * MP * tl.num_programs(1), tl.arange(0, MP), _sum_all(b_t))


@triton.jit(do_not_specialize=["M", "S"])
def _transposed_gamma_kernel(
    p_gram,
    p_newest,
    p_count,
    p_numbers,
    p_gamma,
    M,
    S,
    ridge: tl.float64,
    METHOD: tl.constexpr,
    MP: tl.constexpr,
):
    """gamma of a sample by slot, N^T gamma = DF^T v, from the numbers of its S programs; p_gamma (B, M)."""
    i_b = tl.program_id(0).to(tl.int64)
    _, n, newest = _window_of(p_count, p_newest, i_b, M)
    m_i = tl.arange(0, MP) < n
    slot = tl.where(m_i, slots_by_age(newest, M, MP), 0)
    b_t = common.sum_numbers(p_numbers + i_b * MP * S, slot, S)
    b_gamma = warp_gamma(p_gram + i_b * (M + 2) * M, b_t, M, n, newest, ridge, METHOD, MP, True)
    tl.store(p_gamma + i_b * M + slot, b_gamma, mask=m_i)


@triton.jit(do_not_specialize=["M"])
def _transposed_product_kernel(
    p_v,
    p_left,
    p_newest,
    p_count,
    p_gamma,
    p_out,
    D,
    M,
    alpha: tl.float64,
    beta: tl.float64,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLK: tl.constexpr,
):
    """alpha (beta v - L gamma) in one program's columns."""
    i_b = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = p_v.dtype.element_ty
    window = _window_of(p_count, p_newest, i_b, M)
    begin, end = common.columns(D, BLK)
    for start in tl.range(begin, end, BLK, disable_licm=True):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_x = tl.load(p_v + i_b * D + o_d, mask=m_d, other=0.0) * scalar(beta, dtype)
        for first in tl.static_range(0, PAIRS, ROWS):
            rows = load_rows(p_left + i_b * M * D + o_d, first, ROWS, window, 0, D, m_d)
            for i in tl.static_range(ROWS):
                inside = in_window(first + i, window)
                b_x -= rows[i].to(dtype) * tl.load(p_gamma + i_b * M + first + i, mask=inside, other=0.0)
        tl.store(p_out + i_b * D + o_d, b_x * scalar(alpha, dtype), mask=m_d)


def _plan_transposed(a: Any, method: int, history: int, history_dtype: torch.dtype) -> Plan:
    batch, size = a.v.shape
    padded, (sweep, parts) = padded_window(history), transposed_config(size, history, a.v.dtype, history_dtype)
    plan = Plan(a, "p_out", p_numbers=(batch, padded, parts), p_gamma=(batch, history))
    given = {"D": size, "M": history, "MP": padded, **sweep.arguments()}
    plan.add(_transposed_dots_kernel, (batch, parts), **given)
    plan.add(_transposed_gamma_kernel, (batch,), M=history, S=parts, METHOD=method, MP=padded, num_warps=1)
    plan.add(_transposed_product_kernel, (batch, parts), **given)
    return plan


# What the first sweep needs only to judge.
UNJUDGED: dict[str, Any] = {name: None for name in ("p_best", "p_residual", "p_progress", "p_active")}
UNJUDGED |= {"B": 0, "tol": 0.0, "absolute": 0, "stall_floor": 0.0, "offset": 0.0, "maximum": 0}


def _plan(a: Any, half: str, n: int, new: int, method: int, history: int, history_dtype: torch.dtype) -> Plan:
    batch, size = a.z.shape
    pairs = history if n < 0 else n
    padded, programs = padded_window(pairs), programs_per_sample(batch, size, a.z.device)
    is_shared, is_inline = bool(half) or programs > 1, padded <= MAX_INLINE_WINDOW
    width = history + 1 + number_of("end", padded) * programs * is_shared
    plan = Plan(a, p_scratch=(batch, width), **{"p_status": (batch,)} if half == "apply" else {})
    given: dict[str, Any] = {"B": batch, "D": size, "M": history, "W": width, "S": programs, "n": n, "new": new}
    given |= {"newest": (new - 1) % history, "METHOD": method, "MP": padded, "SHARED": is_shared, "SOLVE": is_inline}
    given |= {"p_iterations": None} if half else {}
    per_sample = given | {"BLK": JUDGE_CONFIG.block, "num_warps": 1, "maxnreg": MAX_REGISTERS}

    def sweep(held: float) -> dict[str, Any]:
        return given | sweep_config(size, pairs, held, a.z.dtype, history_dtype).arguments()

    if half == "apply":
        plan.add(_multisecant_enter_kernel, (batch,), **per_sample)
    elif n:
        left = sweep(3 if takes_row(method) else 2) | (UNJUDGED if half else {})
        plan.add(_multisecant_left_kernel, (batch, programs), **left)
        if is_shared:
            plan.add(_multisecant_totals_kernel if half else _multisecant_judge_kernel, (batch,), **per_sample)
    if half == "sums":
        return plan
    if n and not is_inline:
        plan.add(_multisecant_solve_kernel, (batch,), **given, num_warps=1)
    plan.add(_multisecant_right_kernel, (batch, programs), **sweep(1.5))
    if n and is_shared and holds_steps(method):
        plan.add(_multisecant_row_kernel, (batch,), **per_sample)
    return plan


_PLANS, _TRANSPOSED_PLANS = Plans(_plan), Plans(_plan_transposed)


def _run(a: Any, half: str, n: int) -> None:
    history = a.left.shape[1]
    _PLANS.run(a, half, n, a.k % history, a.method, history, a.left.dtype)


def multisecant_step(a: Any) -> None:
    """z <- z + alpha (beta g - DF gamma) for every running sample, in place; only the records when `last`."""
    n = min(a.k, a.left.shape[1]) if a.k >= 0 else -1  # only the device knows the number: kernels for all of it
    if a.last or n == 0:
        picard_step.run(a, hold=True)
    if not a.last:
        _run(a, "", n)


def multisecant_sums(a: Any) -> None:
    """The sums of every running row; completes its newest pair."""
    _run(a, "sums", min(a.k, a.left.shape[1]))


def multisecant_apply(a: Any) -> None:
    """The step, by the verdicts and the sums over all parts."""
    _run(a, "apply", min(a.k, a.left.shape[1]))


def multisecant_transposed(a: Any, out: Tensor) -> None:
    """out = alpha (beta v - L gamma) with N^T gamma = DF^T v."""
    _TRANSPOSED_PLANS.run(a, a.method, a.left.shape[1], a.left.dtype, results=[out])
