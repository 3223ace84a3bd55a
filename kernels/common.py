"""Jit helpers shared by the kernels of the solver steps.

Where several programs share a sample, a step is a sequence of launches, the STAGE of a kernel: "sums" (B, S) over each
program's columns, "judge" (B,) by the sums of all, and "step" (B, S); else one launch does "all". The sums are numbers
x programs of every sample: those of squares of f(z) - z and f(z), their norms, and what the step adds.
"""

# The language of jit functions grows tuples in loops.
# mypy: disable-error-code="assignment"
import triton
import triton.language as tl

from . import constants

# Kernels read no other globals than these.
RUNNING = tl.constexpr(constants.RUNNING)
CONVERGED = tl.constexpr(constants.CONVERGED)
NONFINITE = tl.constexpr(constants.NONFINITE)
STALLED = tl.constexpr(constants.STALLED)
MAX_ITER = tl.constexpr(constants.MAX_ITER)
ESCAPED = tl.constexpr(constants.ESCAPED)
STALL_ITERATIONS = tl.constexpr(constants.STALL_ITERATIONS)
STALL_GAIN = tl.constexpr(constants.STALL_GAIN)
GROWTH = tl.constexpr(constants.GROWTH)
REDUCTION = tl.constexpr(constants.REDUCTION)
REDUCTION_PER_TOL = tl.constexpr(constants.REDUCTION_PER_TOL)
ROUNDINGS_OF_STALL_FLOOR = tl.constexpr(constants.ROUNDINGS_OF_STALL_FLOOR)
PIVOT_FLOOR = tl.constexpr(constants.PIVOT_FLOOR)
BROYDEN_GOOD = tl.constexpr(constants.BROYDEN_GOOD)
BROYDEN_BAD = tl.constexpr(constants.BROYDEN_BAD)
ANDERSON_I = tl.constexpr(constants.ANDERSON_I)
ANDERSON_II = tl.constexpr(constants.ANDERSON_II)


@triton.jit
def scalar(value, dtype: tl.constexpr):
    """A scalar argument in `dtype`; the interpreter hands floats over as plain numbers, which have no ``to``."""
    return tl.full([], value, dtype)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def square_root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def tiny_and_max(dtype: tl.constexpr):
    """The smallest normal and the largest number of `dtype`."""
    if dtype == tl.float64:
        return scalar(2.2250738585072014e-308, dtype), scalar(1.7976931348623157e308, dtype)
    else:
        return scalar(1.1754943508222875e-38, dtype), scalar(3.4028234663852886e38, dtype)


@triton.jit
def is_sound(square):
    """Whether a sum of squares tells the length of a vector: neither has it overflown nor lost digits to underflow."""
    if square.dtype == tl.float64:
        return is_finite(square) & (square >= 2.0**-970)
    else:
        return is_finite(square) & (square >= 2.0**-103)


@triton.jit
def magnitude(x):
    """|x|, or infinity where x is NaN, which no maximum would keep."""
    return tl.where(is_finite(x), tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest):
    """What a vector is divided by before its squares are added up once more, by its largest magnitude."""
    tiny, _ = tiny_and_max(largest.dtype)
    return tl.maximum(largest, tiny)


@triton.jit
def length_of(square, scale, scaled_square):
    """The length of a vector by its sum of squares if that is sound, else by the one of the vector over `scale`."""
    _, largest = tiny_and_max(square.dtype)
    length = tl.minimum(scale * square_root(scaled_square), largest)
    length = tl.where(is_finite(scale), length, float("inf"))
    return tl.where(is_sound(square), square_root(square), length)


@triton.jit
def columns(D, BLK: tl.constexpr, STAGE: tl.constexpr):
    """The columns [begin, end) of this program: whole blocks; less or none may be left for the last ones."""
    if (STAGE == "sums") | (STAGE == "step"):
        width = tl.cdiv(tl.cdiv(D, BLK), tl.num_programs(1)) * BLK
        begin = tl.minimum(tl.program_id(1) * width, D)
        return begin, tl.minimum(begin + width, D)
    else:
        return 0, D


@triton.jit
def store_number(p_sums, i, x):
    """Leave number i of this program."""
    tl.store(p_sums + i * tl.num_programs(1) + tl.program_id(1), x)


@triton.jit
def load_numbers(p_sums, first, COUNT: tl.constexpr, S, BLK: tl.constexpr):
    """The numbers from `first` on of all S programs of a sample, a vector each, in their order."""
    o_s = tl.arange(0, BLK)
    vectors = ()
    for i in tl.static_range(COUNT):
        vectors = vectors + (tl.load(p_sums + (first + i) * S + o_s, mask=o_s < S, other=0.0),)
    return vectors


@triton.jit
def norms_of(p_z, p_fz, D, b_gg, b_ff, maximum, BLK: tl.constexpr, OF_NORMS: tl.constexpr = False):
    """Norms of f(z) - z and f(z), a row each; b_gg and b_ff are their sums of squares.

    The rows are read again for the largest magnitudes, which are the norms if `maximum`, and once more for the sums of
    squares of both over a scale, where the plain sums do not do. OF_NORMS: in the place of z and f(z) stand the norms
    of parts of f(z) - z and of f(z).
    """
    dtype: tl.constexpr = b_gg.dtype
    PART: tl.constexpr = BLK if BLK < 1024 else 1024  # few registers beside the rows that the caller may hold
    res_norm = square_root(b_gg)
    f_norm = square_root(b_ff)
    if (maximum != 0) | (is_sound(b_gg) == 0) | (is_sound(b_ff) == 0):
        b_res = tl.zeros([PART], dtype)
        b_f = tl.zeros([PART], dtype)
        for start in range(0, D, PART):
            o_d = start + tl.arange(0, PART)
            m_d = o_d < D
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
            b_g = b_z if OF_NORMS else b_fz - b_z
            b_res = tl.maximum(b_res, magnitude(b_g))
            b_f = tl.maximum(b_f, magnitude(b_fz))
        res_norm = tl.max(b_res, axis=0)
        f_norm = tl.max(b_f, axis=0)
        if maximum == 0:
            res_scale = scale_of(res_norm)
            f_scale = scale_of(f_norm)
            b_res = tl.zeros([PART], dtype)
            b_f = tl.zeros([PART], dtype)
            for start in range(0, D, PART):
                o_d = start + tl.arange(0, PART)
                m_d = o_d < D
                b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
                b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
                b_g = (b_z if OF_NORMS else b_fz - b_z) / res_scale
                b_fz = b_fz / f_scale
                b_res = tl.fma(b_g, b_g, b_res)
                b_f = tl.fma(b_fz, b_fz, b_f)
            res_norm = length_of(b_gg, res_scale, tl.sum(b_res, axis=0))
            f_norm = length_of(b_ff, f_scale, tl.sum(b_f, axis=0))
    return res_norm, f_norm


@triton.jit
def norms_at(p_z, p_fz, width, p_sums, S, b_gg, b_ff, maximum, STAGE: tl.constexpr, BLK: tl.constexpr):
    """The norms of this program's columns, of which it leaves numbers 0 to 3; in stage "judge" those of the sample."""
    gg, ff = tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0)
    if STAGE == "judge":
        return norms_of(p_sums + 2 * S, p_sums + 3 * S, S, gg, ff, maximum, BLK, OF_NORMS=True)
    else:
        res_norm, f_norm = norms_of(p_z, p_fz, width, gg, ff, maximum, BLK)
        if STAGE == "sums":
            store_number(p_sums, 0, gg)
            store_number(p_sums, 1, ff)
            store_number(p_sums, 2, res_norm)
            store_number(p_sums, 3, f_norm)
        return res_norm, f_norm


@triton.jit
def relative(res_norm, f_norm, offset):
    """|f(z) - z| / (|f(z)| + offset), the largest number instead of infinity; 0 for a residual of 0."""
    _, largest = tiny_and_max(res_norm.dtype)
    size = f_norm + scalar(offset, res_norm.dtype)
    quotient = tl.where(size > 0, res_norm / tl.where(size > 0, size, 1.0), largest)
    return tl.where(res_norm > 0, tl.minimum(quotient, largest), 0.0)


@triton.jit
def rounding_of(stall_floor, dtype: tl.constexpr):
    """Unit of f's rounding: that of `dtype`, or of a lower precision with this stall floor."""
    low = scalar(stall_floor, dtype) / ROUNDINGS_OF_STALL_FLOOR
    if dtype == tl.float64:
        return tl.maximum(low, 2.0**-52)
    else:
        return tl.maximum(low, 2.0**-23)


@triton.jit
def has_converged(res_abs, res_rel, size, first, start, tol, absolute, stall_floor, offset):
    """Whether the residual is that of a fixed point: see Evaluation.converged of the reference."""
    dtype: tl.constexpr = res_abs.dtype
    wide = scalar(tol, tl.float64)  # products are rounded once, as in the other kernels
    reduction = tl.minimum(wide * REDUCTION_PER_TOL, scalar(REDUCTION, tl.float64)).to(dtype)
    atol = tl.where(absolute != 0, wide, scalar(offset, tl.float64) * wide).to(dtype)
    near = (size <= start * GROWTH) & (res_abs <= first)
    fallen = res_abs + rounding_of(stall_floor, dtype) * size <= tl.maximum(first * reduction, atol)
    return (tl.where(absolute != 0, res_abs, res_rel) <= scalar(tol, dtype)) & (near | fallen)


@triton.jit
def is_better(res_abs, size, best_abs, best_size, stall_floor):
    """Whether an iterate is better than the best one: by |g|, with what rounding may hide of it added."""
    unit = rounding_of(stall_floor, res_abs.dtype)
    _, largest = tiny_and_max(res_abs.dtype)
    return tl.minimum(res_abs + unit * size, largest) < best_abs + unit * best_size


@triton.jit
def status_of(finite, converged, stalled, has_met, last):
    """Status of a sample after an evaluation. has_met: an iterate met the tolerance, though it has not converged."""
    ended = tl.where(last, tl.where(has_met, ESCAPED, MAX_ITER), RUNNING)
    ended = tl.where(stalled & (has_met == 0), STALLED, ended)
    return tl.where(finite, tl.where(converged, CONVERGED, ended), NONFINITE)


@triton.jit
def copy_row(p_to, p_from, D, BLK: tl.constexpr):
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        tl.store(p_to + o_d, tl.load(p_from + o_d, mask=m_d, other=0.0), mask=m_d)


@triton.jit
def judge(
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    i_b,
    B,
    res_abs,
    f_norm,
    k,
    tol,
    absolute,
    stall_floor,
    offset,
    last,
):
    """Record what the running sample i_b has reached at iteration k; return its status and whether z is its best.

    res_abs = |f(z) - z| and f_norm = |f(z)| are scalars of the state's dtype. rel = res_abs / (f_norm + offset).
    The status is RUNNING if another evaluation follows. Every warp has read the row of z on return.
    """
    dtype: tl.constexpr = res_abs.dtype
    finite = is_finite(res_abs) & is_finite(f_norm)
    res_rel = relative(res_abs, f_norm, offset)
    best_rel = tl.load(p_residual + i_b)
    best_abs = tl.load(p_residual + B + i_b)
    gain_rel = tl.load(p_progress + i_b)
    gain_k = tl.load(p_progress + B + i_b)
    first = tl.where(k == 0, res_abs, tl.load(p_progress + 2 * B + i_b))
    start = tl.where(k == 0, tl.maximum(f_norm, res_abs), tl.load(p_progress + 3 * B + i_b))
    best_size = tl.load(p_progress + 4 * B + i_b)
    least = tl.minimum(tl.where(absolute != 0, res_abs, res_rel), tl.load(p_progress + 5 * B + i_b))

    converged = has_converged(res_abs, res_rel, f_norm, first, start, tol, absolute, stall_floor, offset)
    improved = finite & (converged | is_better(res_abs, f_norm, best_abs, best_size, stall_floor))
    best_rel = tl.where(improved, res_rel, best_rel)
    best_abs = tl.where(improved, res_abs, best_abs)
    best_size = tl.where(improved, f_norm, best_size)
    gained = finite & (res_rel < gain_rel * STALL_GAIN)
    now = scalar(k, dtype)
    gain_rel = tl.where(gained, res_rel, gain_rel)
    gain_k = tl.where(gained, now, gain_k)
    stalled = (best_rel < scalar(stall_floor, dtype)) & (now - gain_k >= STALL_ITERATIONS)
    status = status_of(finite, converged, stalled, least <= scalar(tol, dtype), last)

    # Every warp has read what is overwritten from here on: status, the records, and the row of z.
    tl.debug_barrier()
    tl.store(p_status + i_b, status.to(tl.int8))
    tl.store(p_iterations + i_b, k + 1)
    tl.store(p_residual + i_b, best_rel)
    tl.store(p_residual + B + i_b, best_abs)
    tl.store(p_progress + i_b, gain_rel)
    tl.store(p_progress + B + i_b, gain_k)
    if finite:
        tl.store(p_progress + 2 * B + i_b, first)
        tl.store(p_progress + 3 * B + i_b, start)
        tl.store(p_progress + 5 * B + i_b, least)
    tl.store(p_progress + 4 * B + i_b, best_size)
    if status != 0:
        tl.atomic_add(p_active, -1, sem="relaxed")
    return status, improved


@triton.jit
def store_verdict(p_verdict, status, improved):
    """Stage "judge": what the next launch does with the iterate. 1: keep it as the best, 2: go back to that one."""
    tl.store(p_verdict, tl.where(status == 2, 2, improved.to(tl.int32)).to(p_verdict.dtype.element_ty))


@triton.jit
def carry_out(status, improved, p_z, p_best, D, BLK: tl.constexpr):
    """Keep the row of z as the best iterate, or go back to it, where no step follows that does so."""
    if improved:
        copy_row(p_best, p_z, D, BLK)
    if status == 2:
        copy_row(p_z, p_best, D, BLK)
    tl.debug_barrier()
