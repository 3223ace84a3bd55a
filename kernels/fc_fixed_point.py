"""The fully connected cell: z = act(W z + c) solved in one launch, and its backward.

fc_fixed_point: a program owns ``FC_ROWS`` samples for the whole solve. It reads W once, keeps it in shared memory, and
z and c in registers, and leaves when its last sample is done. Two arithmetics of W z, both accumulated in float32:

- W float32, D <= 128: IEEE float32 products, without tensor cores.
- W bfloat16, D <= 256: z is split into three bfloat16 parts, which hold its 24 bits. Three tensor-core products of
  these are exact except for the accumulation.

c, z0, value (B, D) float32; W (D, D) float32 or bfloat16; status (B,) int8; iterations (B,) int32; residual (2, B).
fc_vjp: grad * act'(pre), element by element, float32 or float64.
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import common, constants
from .common import constant, scalar
from .config import FC_ROWS, MAX_REGISTERS, fc_config, picard_config
from .launch import launch

RELU = tl.constexpr(constants.RELU)
TANH = tl.constexpr(constants.TANH)
GELU = tl.constexpr(constants.GELU)
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_OF_TWO_PI_INVERSE = tl.constexpr(0.3989422804014327)
# Status within a solve: the row still runs, and one of its iterates has met the tolerance.
HAS_MET = tl.constexpr(constants.RUNNING - 1)


@triton.jit
def _tanh(x):
    """tanh(x) in float32: Cephes' polynomial near zero, else sign(x) (1 - 2 / (e^(2 |x|) + 1))."""
    size = tl.abs(x)
    square = x * x
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near_zero = p * square * x + x
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.where(size > 10.0, 10.0, size)) + 1.0)  # NaN stays NaN
    return tl.where(size < 0.625, near_zero, tl.where(x < 0, -far, far))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """act(x): relu, tanh, gelu x Phi(x) with Phi the normal distribution, or x."""
    if ACTIVATION == RELU:
        return tl.where(x <= 0, 0.0, x)
    elif ACTIVATION == TANH:
        return _tanh(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))
    else:
        return x


@triton.jit
def _dot(b_z, b_wt, b_sum, INTERPRETED: tl.constexpr):
    """b_sum + z W^T. In the interpreter's dot, a BLAS's, the bits of a row can depend on its place in the tile."""
    if INTERPRETED:
        return b_sum + tl.sum(b_z.to(tl.float32)[:, :, None] * b_wt.to(tl.float32)[None, :, :], axis=1)
    else:
        return tl.dot(b_z, b_wt, b_sum, input_precision="ieee")


@triton.jit
def _multiply(b_z, b_w, INTERPRETED: tl.constexpr):
    """z W^T in float32. b_w (D, D) holds W by rows in float32, by columns in bfloat16."""
    b_sum = tl.zeros(b_z.shape, tl.float32)
    if b_w.dtype == tl.float32:
        return _dot(b_z, tl.trans(b_w), b_sum, INTERPRETED)
    else:
        b_high = b_z.to(tl.bfloat16)
        b_rest = b_z - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        b_sum = _dot(b_low, b_w, b_sum, INTERPRETED)
        b_sum = _dot(b_middle, b_w, b_sum, INTERPRETED)
        return _dot(b_high, b_w, b_sum, INTERPRETED)


@triton.jit
def _length_of(square, b_v):
    """Euclidean norms of rows by their sums of squares; if a sum is not sound, by the squares of the scaled row.

    The scale brings float32 numbers whose squares underflow or overflow to numbers whose squares do not.
    """
    _, largest = common.tiny_and_max(square.dtype)
    scale = tl.where(common.is_finite(square), 2.0**90, 2.0**-90)
    scaled = tl.sum((b_v * scale[:, None]) * (b_v * scale[:, None]), axis=1)
    length = tl.where(common.is_finite(scaled), tl.minimum(common.square_root(scaled) / scale, largest), float("inf"))
    return tl.where(common.is_sound(square), common.square_root(square), length)


@triton.jit
def _norm(b_v, MAXIMUM: tl.constexpr):
    """Norms of rows, as ``common.norms_of``, but without a branch: some versions of triton spill next to one."""
    if MAXIMUM:
        return tl.max(common.magnitude(b_v), axis=1)
    else:
        return _length_of(tl.sum(b_v * b_v, axis=1), b_v)


@triton.jit
def _relative_of_best(b_abs, b_size, offset):
    """|f(z) - z| / (|f(z)| + offset) of the best iterates; infinite if no value was finite."""
    return tl.where(common.is_finite(b_abs), common.relative(b_abs, b_size, offset), float("inf"))


@triton.jit(do_not_specialize=["B", "absolute", "max_iter"])
def _fc_fixed_point_kernel(
    p_w,
    p_c,
    p_z0,
    p_value,
    p_status,
    p_iterations,
    p_residual,
    B,
    D,
    tol: tl.float64,
    absolute,
    max_iter,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    DP: tl.constexpr,
):
    """z <- act(W z + c) of ROWS samples until each has ended; value is each sample's best iterate."""
    o_b = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    m_b = o_b < B
    m_d = o_d < D
    m = m_b[:, None] & m_d[None, :]
    o = o_b[:, None] * D + o_d[None, :]
    # A bfloat16 W is transposed while it is read. If it is transposed later, some versions of triton keep two copies.
    BY_ROWS: tl.constexpr = p_w.dtype.element_ty == tl.float32
    o_w = o_d[:, None] * D + o_d[None, :] if BY_ROWS else o_d[None, :] * D + o_d[:, None]
    b_w = tl.load(p_w + o_w, mask=m_d[:, None] & m_d[None, :], other=0.0)  # [DP, DP]
    b_c = tl.load(p_c + o, mask=m, other=0.0)  # [ROWS, DP]
    b_z = tl.load(p_z0 + o, mask=m, other=0.0)
    tl.store(p_value + o, b_z, mask=m)
    tl.debug_barrier()  # other threads may store the better iterates
    floor = scalar(stall_floor, tl.float32)

    b_abs = tl.full([ROWS], float("inf"), tl.float32)
    b_size = tl.full([ROWS], float("inf"), tl.float32)  # of f at the best iterate
    b_first = tl.full([ROWS], float("inf"), tl.float32)
    b_start = tl.full([ROWS], float("inf"), tl.float32)
    b_gain_rel = tl.full([ROWS], float("inf"), tl.float32)
    b_gain_k = tl.full([ROWS], float("inf"), tl.float32)
    b_iterations = tl.zeros([ROWS], tl.int32)
    b_status = tl.where(m_b, constant("RUNNING"), constant("CONVERGED"))
    k = max_iter * 0
    while (k < max_iter) & (tl.min(b_status, axis=0) <= constant("RUNNING")):
        b_f = _activate(_multiply(b_z, b_w, INTERPRETED) + b_c, ACTIVATION)
        running = b_status <= constant("RUNNING")
        res_abs = _norm(b_f - b_z, maximum)
        f_norm = _norm(b_f, maximum)
        # The judgement of every row, as in common.judge.
        finite = common.is_finite(res_abs) & common.is_finite(f_norm)
        sound = running & finite
        res_rel = common.relative(res_abs, f_norm, offset)
        b_first = tl.where(k == 0, res_abs, b_first)
        b_start = tl.where(k == 0, tl.maximum(f_norm, res_abs), b_start)
        converged = common.has_converged(res_abs, res_rel, f_norm, b_first, b_start, tol, absolute, stall_floor, offset)
        improved = sound & (converged | common.is_better(res_abs, f_norm, b_abs, b_size, stall_floor))
        tl.store(p_value + o, b_z, mask=m & improved[:, None])
        b_abs = tl.where(improved, res_abs, b_abs)
        b_size = tl.where(improved, f_norm, b_size)
        now = k.to(tl.float32)
        gained = sound & (res_rel < b_gain_rel * constant("STALL_GAIN"))
        b_gain_rel = tl.where(gained, res_rel, b_gain_rel)
        b_gain_k = tl.where(gained, now, b_gain_k)
        stalled = (_relative_of_best(b_abs, b_size, offset) < floor) & (now - b_gain_k >= constant("STALL_ITERATIONS"))
        has_met = (b_status == HAS_MET) | (tl.where(absolute != 0, res_abs, res_rel) <= scalar(tol, tl.float32))
        verdict = common.status_of(finite, converged, stalled, has_met, k + 1 == max_iter)
        verdict = tl.where((verdict == constant("RUNNING")) & has_met, HAS_MET, verdict)
        k += 1
        b_iterations = tl.where(running, k, b_iterations)
        b_status = tl.where(running, verdict, b_status)
        b_z = tl.where((b_status <= constant("RUNNING"))[:, None], b_f, b_z)

    tl.store(p_status + o_b, b_status.to(tl.int8), mask=m_b)
    tl.store(p_iterations + o_b, b_iterations, mask=m_b)
    tl.store(p_residual + o_b, _relative_of_best(b_abs, b_size, offset), mask=m_b)
    tl.store(p_residual + B + o_b, b_abs, mask=m_b)


@triton.jit
def _fc_vjp_kernel(p_pre, p_grad, p_result, N, ACTIVATION: tl.constexpr, BLK: tl.constexpr):
    """result = grad * act'(pre), with tanh' = 4 e / (1 + e)^2, e = exp(-2 |pre|), and gelu'(x) = Phi(x) + x phi(x)."""
    o = tl.program_id(0).to(tl.int64) * BLK + tl.arange(0, BLK)
    m = o < N
    b_x = tl.load(p_pre + o, mask=m, other=0.0)
    b_grad = tl.load(p_grad + o, mask=m, other=0.0)
    if ACTIVATION == RELU:
        b_grad = tl.where(b_x <= 0, 0.0, b_grad)
    elif ACTIVATION == TANH:
        b_e = tl.exp(-2.0 * tl.abs(b_x))
        b_grad = b_grad * (4.0 * b_e / ((1.0 + b_e) * (1.0 + b_e)))
    elif ACTIVATION == GELU:
        b_density = tl.exp(-0.5 * b_x * b_x) * ROOT_OF_TWO_PI_INVERSE
        b_grad = b_grad * (0.5 * (1.0 + tl.erf(b_x * ROOT_HALF)) + b_x * b_density)
    tl.store(p_result + o, b_grad, mask=m)


def fc_fixed_point(a: Any, value: Tensor, status: Tensor, iterations: Tensor, residual: Tensor) -> None:
    """Solve z = act(W z + c) from z0 by z <- act(W z + c)."""
    batch, features = a.c.shape
    if batch == 0:
        return
    missing = -features % 16
    if missing and features > 16:  # reading single elements of a larger W spills registers
        wide = value.new_empty(batch, features + missing)
        weight = F.pad(a.weight, (0, missing, 0, missing))
        padded = replace(a, weight=weight, c=F.pad(a.c, (0, missing)), z0=F.pad(a.z0, (0, missing)))
        fc_fixed_point(padded, wide, status, iterations, residual)
        value.copy_(wide[:, :features])
        return
    config = fc_config(features)
    results = {"p_value": value, "p_status": status, "p_iterations": iterations, "p_residual": residual}
    sizes = {"B": batch, "D": features, "ROWS": FC_ROWS, "DP": config.block, "num_warps": config.num_warps}
    choices = {"ACTIVATION": a.activation, "INTERPRETED": not isinstance(_fc_fixed_point_kernel, triton.JITFunction)}
    grid = (triton.cdiv(batch, FC_ROWS),)
    launch(_fc_fixed_point_kernel, grid, a, a.c, p_w=a.weight, **results, **sizes, **choices, maxnreg=MAX_REGISTERS)


def fc_vjp(a: Any, result: Tensor) -> None:
    """result = grad * act'(pre)."""
    if size := a.pre.numel():
        config = picard_config(size, a.pre.dtype)
        given = {"N": size, "ACTIVATION": a.activation, "BLK": config.block, "num_warps": config.num_warps}
        launch(_fc_vjp_kernel, (triton.cdiv(size, config.block),), a, a.pre, p_result=result, **given)
