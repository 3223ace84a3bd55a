"""Jit helpers shared by the kernels of the solver steps.

One program computes a sample. If the batch is too small to fill the GPU, S programs share the columns of a sample, and
a step is three launches. *sums* (B, S) store numbers of their columns, *judge* (B,) adds these up and decides, *step*
(B, S) moves the iterate. `p_numbers` points to the numbers of a sample, (COUNT, S) in the dtype of the state.

The verdict on a sample determines what the last launch does with its iterate: keep it as the best one, go back to the
best one, or neither.
"""

import triton
import triton.language as tl

from . import constants

CONSTANTS = {name: value for name, value in vars(constants).items() if name.isupper()}


@triton.constexpr_function
def constant(name):
    """The number of that name in ``constants``.

    Triton compares each global constant of a kernel at every launch. With this function it compares one table only.
    """
    return CONSTANTS[name]


@triton.constexpr_function
def norm_number(name):
    """Position of a norm of a program's columns among its numbers; "end": how many there are.

    "gg", "ff": sums of squares of g = f(z) - z and of f(z); "g", "f": their norms.
    """
    return {"gg": 0, "ff": 1, "g": 2, "f": 3, "end": 4}[name]


@triton.constexpr_function
def progress_row(name):
    """The row of `progress`, see ``deqfast.ops.steps.PROGRESS``."""
    return {"gain": 0, "gain_iteration": 1, "first": 2, "start": 3, "best_size": 4, "least": 5}[name]


@triton.jit
def scalar(value, dtype: tl.constexpr):
    """A scalar argument in `dtype`. The interpreter passes floats as plain numbers, which have no ``to``."""
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
    """Whether a sum of squares gives a vector's length: without overflow, and without digits lost to underflow."""
    if square.dtype == tl.float64:
        return is_finite(square) & (square >= 2.0**-970)
    else:
        return is_finite(square) & (square >= 2.0**-103)


@triton.jit
def magnitude(x):
    """|x|, or infinity if x is NaN: a maximum would drop the NaN."""
    return tl.where(is_finite(x), tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest):
    """The divisor of a vector before its squares are added up again, from its largest magnitude."""
    tiny, _ = tiny_and_max(largest.dtype)
    return tl.maximum(largest, tiny)


@triton.jit
def length_of(square, scale, scaled_square):
    """sqrt(square) if it is sound, else scale sqrt(scaled_square), from the squares of the vector over `scale`."""
    _, largest = tiny_and_max(square.dtype)
    length = tl.minimum(scale * square_root(scaled_square), largest)
    length = tl.where(is_finite(scale), length, float("inf"))
    return tl.where(is_sound(square), square_root(square), length)


@triton.jit
def columns(D, BLK: tl.constexpr):
    """The columns [begin, end) of this program, in whole blocks. The last programs may have fewer columns, or none."""
    width = tl.cdiv(tl.cdiv(D, BLK), tl.num_programs(1)) * BLK
    begin = tl.minimum(tl.program_id(1) * width, D)
    return begin, tl.minimum(begin + width, D)


@triton.jit
def store_number(p_numbers, i, x):
    """Store number i of this program's columns."""
    tl.store(p_numbers + i * tl.num_programs(1) + tl.program_id(1), x)


@triton.jit
def sum_number(p_numbers, i, S, BLK: tl.constexpr):
    """The sum of number i over all S <= BLK programs of a sample."""
    o_s = tl.arange(0, BLK)
    return tl.sum(tl.load(p_numbers + i * S + o_s, mask=o_s < S, other=0.0), axis=0)


@triton.jit
def sum_numbers(p_numbers, o_i, S):
    """The sums of the numbers o_i, a vector, over all S programs of a sample. The loads of 32 or 16 are concurrent."""
    dtype: tl.constexpr = p_numbers.dtype.element_ty
    AT_ONCE: tl.constexpr = 16 if dtype == tl.float64 else 32
    b_sums = tl.zeros([o_i.shape[0]], dtype)
    for start in range(0, S, AT_ONCE):
        o_s = start + tl.arange(0, AT_ONCE)
        p = p_numbers + o_i[:, None] * S + o_s[None, :]
        b_sums += tl.sum(tl.load(p, mask=(o_s < S)[None, :], other=0.0), axis=1)
    return b_sums


@triton.jit
def norms_of(p_z, p_fz, D, gg, ff, maximum, BLK: tl.constexpr, ARE_NORMS: tl.constexpr = False):
    """Norms of f(z) - z and f(z), rows of D elements; gg and ff are their sums of squares.

    The rows are read a second time for the largest magnitudes, if these are the norms (`maximum`) or a sum is not
    sound. If a sum is not sound, a third pass sums the squares of both over a scale. ARE_NORMS: p_z and p_fz
    point to norms of parts of f(z) - z and of f(z).
    """
    dtype: tl.constexpr = gg.dtype
    PART: tl.constexpr = BLK if BLK < 1024 else 1024  # the caller may hold rows: use few more registers
    res_norm = square_root(gg)
    f_norm = square_root(ff)
    if (maximum != 0) | (is_sound(gg) == 0) | (is_sound(ff) == 0):
        b_res = tl.zeros([PART], dtype)
        b_f = tl.zeros([PART], dtype)
        for start in range(0, D, PART):
            o_d = start + tl.arange(0, PART)
            m_d = o_d < D
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
            b_g = b_z if ARE_NORMS else b_fz - b_z
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
                b_g = (b_z if ARE_NORMS else b_fz - b_z) / res_scale
                b_fz = b_fz / f_scale
                b_res = tl.fma(b_g, b_g, b_res)
                b_f = tl.fma(b_fz, b_fz, b_f)
            res_norm = length_of(gg, res_scale, tl.sum(b_res, axis=0))
            f_norm = length_of(ff, f_scale, tl.sum(b_f, axis=0))
    return res_norm, f_norm


@triton.jit
def store_norms(p_numbers, p_z, p_fz, width, gg, ff, maximum, BLK: tl.constexpr):
    """Store the squares and the norms of this program's columns."""
    res_norm, f_norm = norms_of(p_z, p_fz, width, gg, ff, maximum, BLK)
    store_number(p_numbers, norm_number("gg"), gg)
    store_number(p_numbers, norm_number("ff"), ff)
    store_number(p_numbers, norm_number("g"), res_norm)
    store_number(p_numbers, norm_number("f"), f_norm)


@triton.jit
def norms_of_parts(p_numbers, S, maximum, BLK: tl.constexpr):
    """Norms of f(z) - z and f(z) of a sample, from the norms that all S programs stored of their columns."""
    gg = sum_number(p_numbers, norm_number("gg"), S, BLK)
    ff = sum_number(p_numbers, norm_number("ff"), S, BLK)
    p_res = p_numbers + norm_number("g") * S
    return norms_of(p_res, p_numbers + norm_number("f") * S, S, gg, ff, maximum, BLK, ARE_NORMS=True)


@triton.jit
def relative(res_norm, f_norm, offset):
    """|f(z) - z| / (|f(z)| + offset), the largest number instead of infinity; 0 for a residual of 0."""
    _, largest = tiny_and_max(res_norm.dtype)
    size = f_norm + scalar(offset, res_norm.dtype)
    quotient = tl.where(size > 0, res_norm / tl.where(size > 0, size, 1.0), largest)
    return tl.where(res_norm > 0, tl.minimum(quotient, largest), 0.0)


@triton.jit
def rounding_of(stall_floor, dtype: tl.constexpr):
    """Unit of f's rounding: eps of `dtype`, or of the lower precision with this stall floor."""
    low = scalar(stall_floor, dtype) / constant("ROUNDINGS_OF_STALL_FLOOR")
    if dtype == tl.float64:
        return tl.maximum(low, 2.0**-52)
    else:
        return tl.maximum(low, 2.0**-23)


@triton.jit
def has_converged(res_abs, res_rel, size, first, start, tol, absolute, stall_floor, offset):
    """Whether z is a fixed point: the residual meets tol, and z is near the start or the residual has fallen.

    near: |f(z)| <= GROWTH start and |g| <= first. fallen: |g| plus the rounding of f is below first times the
    reduction, or below tol in absolute terms. Evaluation.converged of the reference has the reasons.
    """
    dtype: tl.constexpr = res_abs.dtype
    wide = scalar(tol, tl.float64)  # products are rounded once, as in the other kernels
    reduction = tl.minimum(wide * constant("REDUCTION_PER_TOL"), scalar(constant("REDUCTION"), tl.float64)).to(dtype)
    atol = tl.where(absolute != 0, wide, scalar(offset, tl.float64) * wide).to(dtype)
    near = (size <= start * constant("GROWTH")) & (res_abs <= first)
    fallen = res_abs + rounding_of(stall_floor, dtype) * size <= tl.maximum(first * reduction, atol)
    return (tl.where(absolute != 0, res_abs, res_rel) <= scalar(tol, dtype)) & (near | fallen)


@triton.jit
def is_better(res_abs, size, best_abs, best_size, stall_floor):
    """Whether |g| + unit |f(z)| is less than for the best iterate, with unit of ``rounding_of``."""
    unit = rounding_of(stall_floor, res_abs.dtype)
    _, largest = tiny_and_max(res_abs.dtype)
    return tl.minimum(res_abs + unit * size, largest) < best_abs + unit * best_size


@triton.jit
def status_of(finite, converged, stalled, has_met, last):
    """Status of a sample after an evaluation. has_met: an iterate met the tolerance without having converged."""
    ended = tl.where(last, tl.where(has_met, constant("ESCAPED"), constant("MAX_ITER")), constant("RUNNING"))
    ended = tl.where(stalled & (has_met == 0), constant("STALLED"), ended)
    return tl.where(finite, tl.where(converged, constant("CONVERGED"), ended), constant("NONFINITE"))


@triton.jit
def copy_row(p_to, p_from, D, BLK: tl.constexpr):
    for start in range(0, D, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < D
        tl.store(p_to + o_d, tl.load(p_from + o_d, mask=m_d, other=0.0), mask=m_d)


@triton.jit
def has_ended(p_status, i_b):
    return tl.load(p_status + i_b) != constant("RUNNING")


@triton.jit
def judge(monitor, i_b, B, res_abs, f_norm, k, rule, last):
    """Record the result of the running sample i_b at iteration k. Every warp has read the row of z on return.

    monitor: pointers to status, iterations, residual, progress and active. res_abs = |f(z) - z| and f_norm = |f(z)|:
    scalars of the state's dtype. rule: tol, absolute, stall_floor and offset. last: no evaluation follows. k < 0: the
    sample's own number of evaluations, of at most -k.
    Returns whether the sample still runs, whether z is the best iterate so far, and whether z has to go back to it.
    """
    p_status, p_iterations, p_residual, p_progress, p_active = monitor
    tol, absolute, stall_floor, offset = rule
    B = scalar(B, tl.int64)  # rows of progress begin at up to 5 B
    dtype: tl.constexpr = res_abs.dtype
    own = tl.load(p_iterations + i_b)
    last = tl.where(k < 0, own + 1 >= -k, last)
    k = tl.where(k < 0, own, k)
    finite = is_finite(res_abs) & is_finite(f_norm)
    res_rel = relative(res_abs, f_norm, offset)
    p_best_rel = p_residual + i_b
    p_best_abs = p_residual + B + i_b
    p_gain_rel = p_progress + progress_row("gain") * B + i_b
    p_gain_k = p_progress + progress_row("gain_iteration") * B + i_b
    p_first = p_progress + progress_row("first") * B + i_b
    p_start = p_progress + progress_row("start") * B + i_b
    p_best_size = p_progress + progress_row("best_size") * B + i_b
    p_least = p_progress + progress_row("least") * B + i_b
    best_rel = tl.load(p_best_rel)
    best_abs = tl.load(p_best_abs)
    gain_rel = tl.load(p_gain_rel)
    gain_k = tl.load(p_gain_k)
    first = tl.where(k == 0, res_abs, tl.load(p_first))
    start = tl.where(k == 0, tl.maximum(f_norm, res_abs), tl.load(p_start))
    best_size = tl.load(p_best_size)
    least = tl.minimum(tl.where(absolute != 0, res_abs, res_rel), tl.load(p_least))

    converged = has_converged(res_abs, res_rel, f_norm, first, start, tol, absolute, stall_floor, offset)
    improved = finite & (converged | is_better(res_abs, f_norm, best_abs, best_size, stall_floor))
    best_rel = tl.where(improved, res_rel, best_rel)
    best_abs = tl.where(improved, res_abs, best_abs)
    best_size = tl.where(improved, f_norm, best_size)
    gained = finite & (res_rel < gain_rel * constant("STALL_GAIN"))
    now = scalar(k, dtype)
    gain_rel = tl.where(gained, res_rel, gain_rel)
    gain_k = tl.where(gained, now, gain_k)
    stalled = (best_rel < scalar(stall_floor, dtype)) & (now - gain_k >= constant("STALL_ITERATIONS"))
    status = status_of(finite, converged, stalled, least <= scalar(tol, dtype), last)

    # Every warp has read what is overwritten from here on: status, the records, and the row of z.
    tl.debug_barrier()
    tl.store(p_status + i_b, status.to(tl.int8))
    tl.store(p_iterations + i_b, k + 1)
    tl.store(p_best_rel, best_rel)
    tl.store(p_best_abs, best_abs)
    tl.store(p_gain_rel, gain_rel)
    tl.store(p_gain_k, gain_k)
    if finite:
        tl.store(p_first, first)
        tl.store(p_start, start)
        tl.store(p_least, least)
    tl.store(p_best_size, best_size)
    if status != constant("RUNNING"):
        tl.atomic_add(p_active, -1, sem="relaxed")
    return status == constant("RUNNING"), improved, status == constant("NONFINITE")


@triton.jit
def window_at(p_iterations, i_b, counted, n, newest, new, M):
    """Pairs in the window of sample i_b, and the slots of its newest pair and of the next one: as given, unless n < 0.

    Then they follow from the sample's number of evaluations, which includes this one if it is `counted`. The halves of
    a step have no such numbers (None).
    """
    if p_iterations is None:
        return n, newest, new
    else:
        k = tl.maximum(tl.load(p_iterations + i_b) - counted, 1)
        own = n < 0
        return tl.where(own, tl.minimum(k, M), n), tl.where(own, (k - 1) % M, newest), tl.where(own, k % M, new)


@triton.jit
def store_verdict(p_verdict, improved, failed):
    """1: keep z as the best iterate; 2: go back to that one; 0: neither."""
    tl.store(p_verdict, tl.where(failed, 2, improved.to(tl.int32)).to(p_verdict.dtype.element_ty))


@triton.jit
def store_no_verdict(p_verdict):
    """The verdict on a sample that ended earlier."""
    tl.store(p_verdict, 0.0)


@triton.jit
def take_verdict(p_bits, p_status, p_verdict, i_b):
    """Store the verdict on row i_b, and 0 or 1 for a status; return whether the row takes the step."""
    bits = tl.load(p_bits + i_b).to(tl.int32)
    advance = (bits & constant("ADVANCES")) != 0
    store_verdict(p_verdict, (bits & constant("IMPROVED")) != 0, (bits & constant("BROKEN")) != 0)
    tl.store(p_status + i_b, tl.where(advance, 0.0, 1.0).to(p_status.dtype.element_ty))
    return advance


@triton.jit
def unpack_verdict(verdict):
    """Whether z is the best iterate so far, and whether z has to go back to that one."""
    return verdict == 1, verdict == 2


@triton.jit
def carry_out(improved, failed, p_z, p_best, D, BLK: tl.constexpr):
    """Keep the row of z as the best iterate, or go back to it, if a step does not do so later."""
    if improved:
        copy_row(p_best, p_z, D, BLK)
    if failed:
        copy_row(p_z, p_best, D, BLK)
    tl.debug_barrier()
