"""Jit helpers of a window of pairs: the slots of its rows, and gamma of N gamma = t.

gram (M + 2, M) of a sample holds N; then the squared lengths of the rows of L, and of the changes. Entry (i, j) of N is
the dot of row i of L with change j of the residual. A window has n <= M pairs. Vectors by age begin with the newest
pair; they have MP >= n entries, the power of two of ``config.padded_window``.

N is scaled by the lengths of its pairs and eliminated without pivoting, newest pair first. The first pivot below
``PIVOT_FLOOR`` ends that: its pair and all older ones get gamma = 0. An overflow makes all of gamma zero.
"""

# The language of jit functions grows tuples in loops.
# mypy: disable-error-code="assignment, misc, var-annotated"
import triton
import triton.language as tl

from .common import constant, is_finite, is_sound, scalar
from .constants import ANDERSON_I, ANDERSON_II, BROYDEN_BAD, BROYDEN_GOOD


@triton.constexpr_function
def holds_steps(method):
    """Whether L holds steps S, else changes of the residual Y. If so, N gets a row as soon as its step is taken."""
    return method in (BROYDEN_GOOD, ANDERSON_I)


@triton.constexpr_function
def is_anderson(method):
    """Whether the ridge is added to the diagonal of the scaled N."""
    return method in (ANDERSON_I, ANDERSON_II)


@triton.constexpr_function
def is_triangular(method):
    """Whether N holds entries of older pairs with newer ones only, so that a pair's gamma depends on newer pairs."""
    return method == BROYDEN_BAD


@triton.jit
def slot_of(newest, age, M):
    """The slot of the pair of that age; the newest pair has age 0."""
    return tl.where(newest >= age, newest - age, newest - age + M)


@triton.jit
def slots_by_age(newest, M, MP: tl.constexpr):
    """The slots of the pairs, newest first; slots past the window are not valid. Fewer registers than ``slot_of``."""
    slot = newest - tl.arange(0, MP)
    return tl.where(slot < 0, slot + M, slot)


@triton.jit
def in_window(slot, window, youngest=0):
    """Whether a slot has a pair of an age from `youngest` to n - 1. window: M, n and the slot of the newest pair."""
    M, n, newest = window
    age = tl.where(newest >= slot, newest - slot, newest - slot + M)
    return (slot < M) & (age >= youngest) & (age < n)


@triton.jit
def load_rows(p_rows, first: tl.constexpr, ROWS: tl.constexpr, window, youngest, D, m_d):
    """A tuple of the rows in ROWS slots from `first` on; zeros in slots that are not ``in_window``.

    p_rows: pointers to the columns of slot 0; m_d: their mask.
    """
    rows = ()
    for slot in tl.static_range(first, first + ROWS):
        m = m_d & in_window(slot, window, youngest)
        rows = rows + (tl.load(p_rows + tl.full([], slot, tl.int64) * D, mask=m, other=0.0),)
    return rows


@triton.jit
def squares_of(p_gram, M):
    """Pointers to the squared lengths of the rows of L and of the changes."""
    return p_gram + M * M, p_gram + M * M + M


@triton.jit
def _inverse_length(p_square, mask):
    """1 / length, or 0 if the square is not sound; 1 outside of the mask."""
    square = tl.load(p_square, mask=mask, other=1.0)
    return tl.where(is_sound(square), tl.rsqrt(square), 0.0)


@triton.jit
def _shift(x, ridge):
    """What moves x away from zero by the ridge."""
    b_ridge = scalar(ridge, x.dtype)
    return tl.where(x < 0, -b_ridge, b_ridge)


@triton.jit
def small_gamma(p_gram, p_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr):
    """gamma of N gamma = t by slot, a tuple of MP scalars; p_t points to t by slot.

    Every thread eliminates by itself and substitutes backwards, without barriers or exchange. The matrix takes MP * MP
    registers: use this for small windows. ``warp_gamma`` takes fewer, and rounds differently.
    """
    dtype: tl.constexpr = p_gram.dtype.element_ty
    p_left_squares, p_change_squares = squares_of(p_gram, M)
    slots = ()
    left_scale = ()
    right_scale = ()
    for i in tl.static_range(MP):
        slot = slot_of(newest, i, M)
        slots = slots + (slot,)
        left_scale = left_scale + (_inverse_length(p_left_squares + slot, i < n),)
        right_scale = right_scale + (_inverse_length(p_change_squares + slot, i < n),)
    a = ()  # row i from its entry i * MP on, newest pair first
    b = ()
    for i in tl.static_range(MP):
        for j in tl.static_range(MP):
            if is_triangular(METHOD) & (j > i):
                x = scalar(0.0, dtype)
            else:
                x = tl.load(p_gram + slots[i] * M + slots[j], mask=(i < n) & (j < n), other=0.0)
                x = x * left_scale[i] * right_scale[j]
            if is_anderson(METHOD) & (i == j):
                x = x + _shift(x, ridge)
            a = a + (x,)
        b = b + (tl.load(p_t + slots[i], mask=i < n, other=0.0) * left_scale[i],)

    kept = n * 0
    for c in tl.static_range(MP):
        pivot = a[c * MP + c]
        regular = (kept == c) & (c < n) & (tl.abs(pivot) >= constant("PIVOT_FLOOR"))
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

    gammas = ()  # for the pairs older than c
    for c in tl.static_range(MP - 1, -1, -1):
        rhs = b[c]
        for i in tl.static_range(c + 1, MP):
            rhs = rhs - tl.where(i < kept, a[c * MP + i] * gammas[i - c - 1], 0.0)
        gammas = (tl.where(c < kept, rhs / tl.where(c < kept, a[c * MP + c], 1.0), 0.0),) + gammas
    overflows = kept < 0
    scaled = ()
    for i in tl.static_range(MP):
        scaled = scaled + (gammas[i] * right_scale[i],)
        overflows = overflows | (is_finite(scaled[i]) == 0)
    result = ()
    for slot in tl.static_range(MP):
        gamma = scalar(0.0, dtype)
        for i in tl.static_range(MP):
            gamma = tl.where((slots[i] == slot) & (i < n) & (overflows == 0), scaled[i], gamma)
        result = result + (gamma,)
    return result


@triton.jit
def _lane(b_x, i):
    """Entry i of a vector with one entry per lane, for all lanes: one exchange."""
    return tl.gather(b_x, tl.full([b_x.shape[0]], i, tl.int32), axis=0)


@triton.jit
def _is_regular(b_pivot):
    return tl.max((tl.abs(b_pivot) >= constant("PIVOT_FLOOR")).to(tl.int32), axis=0) > 0


@triton.jit
def warp_gamma(p_gram, b_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """gamma (MP,) by age of N gamma = t, or of N^T gamma = t, for windows of any length in a program of one warp.

    Lane i has the row of the pair of age i, an entry per register. Gauss-Jordan: a column is eliminated above the
    diagonal too, so that no substitution follows. Then the rows move left, so that the next column is the first.
    """
    dtype: tl.constexpr = p_gram.dtype.element_ty
    o_i = tl.arange(0, MP)
    m_i = o_i < n
    slot = slots_by_age(newest, M, MP)
    p_row_squares, p_column_squares = squares_of(p_gram, M)
    if TRANSPOSED:
        p_row_squares, p_column_squares = p_column_squares, p_row_squares
    b_sl = _inverse_length(p_row_squares + slot, m_i)
    b_sr = _inverse_length(p_column_squares + slot, m_i)
    row = ()
    b_shift = tl.zeros([MP], dtype)  # what the ridge adds to the diagonal
    for j in tl.static_range(MP):
        other = slot_of(newest, j, M)
        m_a = m_i & (j < n)
        if is_triangular(METHOD):
            m_a = m_a & (o_i <= j if TRANSPOSED else o_i >= j)
        b_a = tl.load(p_gram + (other * M + slot if TRANSPOSED else slot * M + other), mask=m_a, other=0.0)
        row = row + (b_a * b_sl * _lane(b_sr, j),)
        if is_anderson(METHOD):
            b_shift = tl.where(o_i == j, _shift(row[j], ridge), b_shift)
    b_b = b_t * b_sl
    kept = n * 0
    b_pivots = tl.full([MP], 1.0, dtype)
    b_pivot = _lane(row[0] + b_shift, kept)
    regular = _is_regular(b_pivot) & (n > 0)
    while regular:
        is_other = o_i != kept
        b_pivots = tl.where(is_other, b_pivots, b_pivot)
        b_factor = tl.where(is_other, row[0] / b_pivot, 0.0)
        b_b = b_b - b_factor * _lane(b_b, kept)
        moved = ()
        for j in tl.static_range(1, MP):
            moved = moved + (row[j] - b_factor * _lane(row[j], kept),)
        row = moved + (tl.zeros([MP], dtype),)
        kept += 1
        b_pivot = _lane(row[0] + b_shift, tl.minimum(kept, MP - 1))
        regular = _is_regular(b_pivot) & (kept < n)
    b_gamma = tl.where(o_i < kept, b_b / b_pivots, 0.0) * b_sr
    overflows = tl.sum(tl.where(is_finite(b_gamma), 0, 1), axis=0)
    return tl.where(overflows == 0, b_gamma, 0.0)
