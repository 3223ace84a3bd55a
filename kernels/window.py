"""Jit helpers of a window of pairs: the slots of its rows, and gamma of N gamma = t.

gram (M + 2, M) of a sample holds N; then the squared lengths of the rows of L, and of the changes. Entry (i, j) of N is
the dot of row i of L with change j of the residual. A window has n <= M pairs. Vectors by age begin with the newest
pair; they have MP >= n entries, the power of two of ``config.padded_window``.

N is scaled by the lengths of its pairs and eliminated without pivoting, newest pair first. The first pivot below
``PIVOT_FLOOR`` ends that: its pair and all older ones get gamma = 0. An overflow makes all of gamma zero.
"""

# The language of jit functions grows tuples in loops.
# mypy: disable-error-code="assignment, var-annotated"
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
def load_row(p_history, newest, age, n, M, D, end, o_d):
    """The columns o_d, below `end`, of the pair of that age; zeros past the window."""
    o_row = slot_of(newest, age, M).to(tl.int64) * D
    return tl.load(p_history + o_row + o_d, mask=o_d < tl.where(age < n, end, 0), other=0.0)


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
def _with_ridge(x, ridge):
    """x moved away from zero by the ridge."""
    b_ridge = scalar(ridge, x.dtype)
    return x + tl.where(x < 0, -b_ridge, b_ridge)


@triton.jit
def small_gamma(p_gram, p_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr):
    """gamma of N gamma = t as a tuple of MP scalars, newest pair first.

    Every thread eliminates by itself and substitutes backwards, without barriers or exchange. The matrix takes MP * MP
    registers: use this for small windows. ``gamma_of`` takes fewer, and rounds differently.
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
                x = _with_ridge(x, ridge)
            a = a + (x,)
        b = b + (tl.load(p_t + i, mask=i < n, other=0.0) * left_scale[i],)

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
    for i in tl.static_range(MP):
        overflows = overflows | (is_finite(gammas[i] * right_scale[i]) == 0)
    result = ()
    for i in tl.static_range(MP):
        result = result + (tl.where(overflows, 0.0, gammas[i] * right_scale[i]),)
    return result


@triton.jit
def gamma_of(
    p_gram, b_t, M, n, newest, ridge, METHOD: tl.constexpr, MP: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """gamma (MP,) by age of N gamma = t, or of N^T gamma = t, for windows of any length.

    Gauss-Jordan: a column is eliminated above the diagonal too, so that no substitution follows.
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
    m_a = m_i[:, None] & m_i[None, :]
    o_a = slot[None, :] * M + slot[:, None] if TRANSPOSED else slot[:, None] * M + slot[None, :]  # [MP, MP]
    b_a = tl.load(p_gram + o_a, mask=m_a, other=0.0)
    b_a = b_a * b_sl[:, None] * b_sr[None, :]
    if is_triangular(METHOD):
        is_zero = o_i[:, None] > o_i[None, :] if TRANSPOSED else o_i[:, None] < o_i[None, :]
        b_a = tl.where(is_zero, 0.0, b_a)
    if is_anderson(METHOD):
        b_a = tl.where(o_i[:, None] == o_i[None, :], _with_ridge(b_a, ridge), b_a)
    b_b = b_t * b_sl

    kept = n * 0
    b_pivot = tl.full([MP], 1.0, dtype)
    for c in range(n):
        is_c = o_i == c
        b_row = tl.sum(tl.where(is_c[:, None], b_a, 0.0), axis=0)
        b_col = tl.sum(tl.where(is_c[None, :], b_a, 0.0), axis=1)
        pivot = tl.sum(tl.where(is_c, b_row, 0.0), axis=0)
        rhs = tl.sum(tl.where(is_c, b_b, 0.0), axis=0)
        regular = (kept == c) & (tl.abs(pivot) >= constant("PIVOT_FLOOR"))
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
