"""relu(GroupNorm(y)) in channels_last, and its backward: one program per group of a sample.

y, out, grad (B, P, C) of dtype Y (P pixels; float32, bfloat16 or float64); weight, bias (C,), mean, rstd (B, G) and
grad_affine (2, B, C) in the accumulation dtype. Groups are independent of each other, which gives B G programs. A group
is `CG` neighbouring channels of every pixel; a tile is (BR pixels, BC channels) of it. The first tile stays on chip; if
a group has more, every pass reads the others again. Sizes are constants of the compiled code.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import scalar, square_root
from .config import NORM_REGISTERS, norm_config
from .launch import Plan, Plans

MAX_SAMPLE = 2**31 - 1  # elements, whose offsets are int32


@triton.jit
def group_of_program(P: tl.constexpr, C: tl.constexpr, CG: tl.constexpr):
    """Sample, first channel, and offset of the first element of the program's group."""
    G: tl.constexpr = C // CG
    i = tl.program_id(0).to(tl.int64)
    i_b = i // G
    c_0 = (i % G) * CG
    return i_b, c_0, i_b * (P * C) + c_0


@triton.jit
def group_tile(start, P: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets from the group's first element, and mask, of the tile whose first pixel is `start`."""
    o_p = start + tl.arange(0, BR)
    o_c = tl.arange(0, BC)
    return o_p[:, None] * C + o_c[None, :], (o_p < P)[:, None] & (o_c < CG)[None, :]


@triton.jit
def loop_end(pixels, P: tl.constexpr, BR: tl.constexpr):
    """The end of the loops over further tiles. pixels = P is not a constant, else triton would unroll short loops."""
    if P <= BR:
        return BR
    else:
        return pixels


@triton.jit
def load_tile(p, offsets, mask, dtype: tl.constexpr):
    return tl.load(p + offsets, mask=mask, other=0.0).to(dtype)


@triton.jit
def load_channels(p, CG: tl.constexpr, BC: tl.constexpr):
    """A row (1, BC) of parameters."""
    o_c = tl.arange(0, BC)
    return tl.load(p + o_c, mask=o_c < CG, other=0.0)[None, :]


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # NaN stays NaN


@triton.jit
def value_of(maps, norm2, o_t, m_t, dtype: tl.constexpr):
    """v of a tile that is not on chip, see ``statistics``, 0 if masked. norm2: GN2's numbers, if v follows GN2."""
    b_v = load_tile(maps[0], o_t, m_t, dtype)
    if len(maps) > 1:
        b_v += load_tile(maps[1], o_t, m_t, dtype)
    if len(norm2) > 0:
        mean2, rstd2, b_w2, b_b2 = norm2
        b_n = (b_v - mean2) * rstd2
        b_v = tl.where(m_t, relu(load_tile(maps[2], o_t, m_t, dtype) + (b_n * b_w2 + b_b2)), 0.0)
    return b_v


@triton.jit
def statistics(b_v, m_0, maps, norm2, stop, eps, P: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BR: tl.constexpr):
    """mean and rstd = 1 / sqrt(var + eps) of v; and v - mean in the first tile. b_v: v there. Both are 0 if masked.

    maps: pointers to y; to y and x for v = y + x; or to y, x and z, for v = relu(z + GN2(y + x)). The variance is the
    mean of (v - mean)^2, from a pass of its own.
    """
    BC: tl.constexpr = b_v.shape[1]
    dtype: tl.constexpr = b_v.dtype
    b_t = b_v
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_t += value_of(maps, norm2, o_t, m_t, dtype)
    mean = tl.sum(b_t) / (P * CG)

    b_v = tl.where(m_0, b_v - mean, 0.0)
    b_t = b_v * b_v
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_d = tl.where(m_t, value_of(maps, norm2, o_t, m_t, dtype) - mean, 0.0)
        b_t += b_d * b_d
    return mean, 1.0 / square_root(tl.sum(b_t) / (P * CG) + scalar(eps, dtype)), b_v


@triton.jit
def sums(b_gn, b_gs, b_w, p_affine, o_row, plane, n: tl.constexpr, CG: tl.constexpr):
    """mean(g w) and mean(g w n) over the group. The sums of g n and of g go to two planes from p_affine."""
    o_c = tl.arange(0, b_gn.shape[1])
    b_weight = tl.sum(b_gn, axis=0)
    b_bias = tl.sum(b_gs, axis=0)
    tl.store(p_affine + o_row + o_c, b_weight, mask=o_c < CG)
    tl.store(p_affine + plane + o_row + o_c, b_bias, mask=o_c < CG)
    slope = tl.sum(b_weight[None, :] * b_w) / n
    return tl.sum(b_bias[None, :] * b_w) / n, slope


@triton.jit
def norm_backward(b_g, b_n, b_w, rstd, mean, slope):
    """The gradient of v; b_g is the gradient of the output n w + b with n = (v - mean(v)) rstd.

    (g w - mean(g w) - n mean(g w n)) rstd; mean and slope are the two means over the group.
    """
    return (b_g * b_w - mean - b_n * slope) * rstd


@triton.jit
def _norm_act_kernel(
    p_y,
    p_weight,
    p_bias,
    p_out,
    p_mean,
    p_rstd,
    eps: tl.float64,
    pixels,
    P: tl.constexpr,
    C: tl.constexpr,
    CG: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """out = relu((y - mean) rstd weight + bias), with the group's ``statistics``."""
    dtype: tl.constexpr = p_mean.dtype.element_ty
    i_b, c_0, o_group = group_of_program(P, C, CG)
    stop = loop_end(pixels, P, BR)
    p_y += o_group
    p_out += o_group
    o_0, m_0 = group_tile(0, P, C, CG, BR, BC)
    b_y = load_tile(p_y, o_0, m_0, dtype)
    mean, rstd, b_y = statistics(b_y, m_0, (p_y,), (), stop, eps, P, C, CG, BR)

    b_w = load_channels(p_weight + c_0, CG, BC)
    b_b = load_channels(p_bias + c_0, CG, BC)
    short: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + o_0, relu(b_y * rstd * b_w + b_b).to(short), mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_n = (load_tile(p_y, o_t, m_t, dtype) - mean) * rstd
        tl.store(p_out + o_t, relu(b_n * b_w + b_b).to(short), mask=m_t)
    tl.store(p_mean + tl.program_id(0), mean)
    tl.store(p_rstd + tl.program_id(0), rstd)


@triton.jit
def _normal_and_grad(p_y, p_grad, o_t, m_t, b_w, b_b, mean, rstd):
    """The normalised tile n, and the gradient of n w + b: grad if the relu is active, else 0."""
    dtype: tl.constexpr = b_w.dtype
    b_n = (load_tile(p_y, o_t, m_t, dtype) - mean) * rstd
    return b_n, tl.where(b_n * b_w + b_b <= 0, 0.0, load_tile(p_grad, o_t, m_t, dtype))


@triton.jit(do_not_specialize=["plane"])
def _norm_act_backward_kernel(
    p_grad,
    p_y,
    p_weight,
    p_bias,
    p_mean,
    p_rstd,
    p_grad_y,
    p_affine,
    plane,
    pixels,
    P: tl.constexpr,
    C: tl.constexpr,
    CG: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """grad_y = (g w - mean(g w) - n mean(g w n)) rstd, with g = grad if n w + b > 0, else 0, and n = (y - mean) rstd.

    Per sample, the gradient of weight is the sum of g n over the pixels, and of bias the sum of g.
    """
    i_b, c_0, o_group = group_of_program(P, C, CG)
    stop = loop_end(pixels, P, BR)
    p_grad += o_group
    p_y += o_group
    p_grad_y += o_group
    b_w = load_channels(p_weight + c_0, CG, BC)
    b_b = load_channels(p_bias + c_0, CG, BC)
    mean = tl.load(p_mean + tl.program_id(0))
    rstd = tl.load(p_rstd + tl.program_id(0))
    o_0, m_0 = group_tile(0, P, C, CG, BR, BC)
    b_n, b_g = _normal_and_grad(p_y, p_grad, o_0, m_0, b_w, b_b, mean, rstd)

    b_gn = b_g * b_n
    b_gs = b_g
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_nt, b_gt = _normal_and_grad(p_y, p_grad, o_t, m_t, b_w, b_b, mean, rstd)
        b_gn += b_gt * b_nt
        b_gs += b_gt
    offset, slope = sums(b_gn, b_gs, b_w, p_affine, i_b * C + c_0, plane, P * CG, CG)

    short: tl.constexpr = p_grad_y.dtype.element_ty
    tl.store(p_grad_y + o_0, norm_backward(b_g, b_n, b_w, rstd, offset, slope).to(short), mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_nt, b_gt = _normal_and_grad(p_y, p_grad, o_t, m_t, b_w, b_b, mean, rstd)
        tl.store(p_grad_y + o_t, norm_backward(b_gt, b_nt, b_w, rstd, offset, slope).to(short), mask=m_t)


def plans_of(op: str, kernel: Any, *results: str) -> Plans:
    """Plans of an op that is this kernel, for each group.

    RuntimeError: offsets in a sample would exceed int32.
    """

    def plan_of(a: Any, groups: int, accumulation: torch.dtype, *_: torch.dtype) -> Plan:
        batch, channels, *image = a.y.shape
        pixels, width = math.prod(image), channels // groups
        if pixels * channels > MAX_SAMPLE:
            raise RuntimeError(f"{op}: `y` has too large samples: {pixels * channels} elements")
        config, plan = norm_config(pixels, width, accumulation), Plan(a, *results)
        sizes = {"P": pixels, "C": channels, "CG": width, "BR": config.rows, "BC": config.columns}
        options = {"num_warps": config.num_warps, "maxnreg": NORM_REGISTERS}
        plan.add(kernel, (batch * groups,), plane=batch * channels, pixels=pixels, **sizes, **options)
        return plan

    return Plans(plan_of)


_PLANS = plans_of("norm_act", _norm_act_kernel, "p_out", "p_mean", "p_rstd")
_BACKWARD_PLANS = plans_of("norm_act_backward", _norm_act_backward_kernel, "p_grad_y", "p_affine")


def norm_act(a: Any, *results: Tensor) -> None:
    """out = relu(GroupNorm(y)), and the statistics of each group; `results`: out, mean, rstd."""
    _PLANS.run(a, a.groups, a.weight.dtype, results=results)


def norm_act_backward(a: Any, *results: Tensor) -> None:
    """The gradient of y; per sample, the gradients of weight and bias."""
    _BACKWARD_PLANS.run(a, a.groups, a.weight.dtype, results=results)
