"""f = GroupNorm3(relu(z + GroupNorm2(y + x))) in channels_last, and the backward.

y (B, P, C) of dtype Y; x, z (B, P, C) of dtype Z; f, grad (B, P, C), parameters (C,), statistics (B, G) and
grad_affine (4, B, C) in the accumulation dtype. Both normalisations share their groups, so that one program serves one
group of a sample, as in ``norm_act``.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .norm_act import (
    group_of_program,
    group_tile,
    inverse_deviation,
    load_channels,
    load_tile,
    loop_end,
    norm_backward,
    plans_of,
    relu,
    store_affine,
)


@triton.jit
def _load_sum(p_y, p_x, o_t, m_t, dtype: tl.constexpr):
    return load_tile(p_y, o_t, m_t, dtype) + load_tile(p_x, o_t, m_t, dtype)


@triton.jit
def _value(maps, norm2, o_t, m_t, dtype: tl.constexpr):
    """v of a tile that is not on chip, 0 if masked: y + x, or relu(z + GN2(y + x)) if `norm2` has GN2's numbers."""
    p_y, p_x, p_z = maps
    b_v = _load_sum(p_y, p_x, o_t, m_t, dtype)
    if len(norm2) > 0:
        mean2, rstd2, b_w2, b_b2 = norm2
        b_n = (b_v - mean2) * rstd2
        b_v = tl.where(m_t, relu(load_tile(p_z, o_t, m_t, dtype) + (b_n * b_w2 + b_b2)), 0.0)
    return b_v


@triton.jit
def _statistics(b_v, m_0, maps, norm2, stop, eps, P: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BR: tl.constexpr):
    """mean and rstd of v, see ``_value``; and v - mean in the first tile. b_v: v there. Both are 0 if masked."""
    BC: tl.constexpr = b_v.shape[1]
    dtype: tl.constexpr = b_v.dtype
    b_t = b_v
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_t += _value(maps, norm2, o_t, m_t, dtype)
    mean = tl.sum(b_t) / (P * CG)

    b_v = tl.where(m_0, b_v - mean, 0.0)
    b_t = b_v * b_v
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_d = tl.where(m_t, _value(maps, norm2, o_t, m_t, dtype) - mean, 0.0)
        b_t += b_d * b_d
    return mean, inverse_deviation(tl.sum(b_t), P * CG, eps), b_v


@triton.jit
def _norm_act_residual_kernel(
    p_y,
    p_x,
    p_z,
    p_weight2,
    p_bias2,
    p_weight3,
    p_bias3,
    p_f,
    p_mean2,
    p_rstd2,
    p_mean3,
    p_rstd3,
    eps: tl.float64,
    pixels,
    P: tl.constexpr,
    C: tl.constexpr,
    CG: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """f = GN3(u), u = relu(z + GN2(y + x)), GNi(v) = (v - mean_i) rstd_i weight_i + bias_i; see ``norm_act``."""
    dtype: tl.constexpr = p_f.dtype.element_ty
    i_g = tl.program_id(0)
    i_b, c_0, o_group = group_of_program(P, C, CG)
    stop = loop_end(pixels, P, BR)
    p_f += o_group
    maps = (p_y + o_group, p_x + o_group, p_z + o_group)
    o_0, m_0 = group_tile(0, P, C, CG, BR, BC)
    b_v = _load_sum(maps[0], maps[1], o_0, m_0, dtype)
    b_z = load_tile(maps[2], o_0, m_0, dtype)
    mean2, rstd2, b_v = _statistics(b_v, m_0, maps, (), stop, eps, P, C, CG, BR)

    b_w2 = load_channels(p_weight2 + c_0, CG, BC)
    b_b2 = load_channels(p_bias2 + c_0, CG, BC)
    norm2 = (mean2, rstd2, b_w2, b_b2)
    b_v = tl.where(m_0, relu(b_z + (b_v * rstd2 * b_w2 + b_b2)), 0.0)
    mean3, rstd3, b_v = _statistics(b_v, m_0, maps, norm2, stop, eps, P, C, CG, BR)

    b_w3 = load_channels(p_weight3 + c_0, CG, BC)
    b_b3 = load_channels(p_bias3 + c_0, CG, BC)
    tl.store(p_f + o_0, b_v * rstd3 * b_w3 + b_b3, mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_n = (_value(maps, norm2, o_t, m_t, dtype) - mean3) * rstd3
        tl.store(p_f + o_t, b_n * b_w3 + b_b3, mask=m_t)
    tl.store(p_mean2 + i_g, mean2)
    tl.store(p_rstd2 + i_g, rstd2)
    tl.store(p_mean3 + i_g, mean3)
    tl.store(p_rstd3 + i_g, rstd3)


@triton.jit
def _tile(maps, norm2, norm3, o_t, m_t, dtype: tl.constexpr):
    """grad; n2 and n3, after each normalisation, 0 if masked; and whether the relu between them gave 0."""
    p_grad, p_y, p_x, p_z = maps
    mean2, rstd2, b_w2, b_b2 = norm2
    mean3, rstd3, _ = norm3
    b_n2 = tl.where(m_t, (_load_sum(p_y, p_x, o_t, m_t, dtype) - mean2) * rstd2, 0.0)
    b_u = load_tile(p_z, o_t, m_t, dtype) + (b_n2 * b_w2 + b_b2)
    b_n3 = tl.where(m_t, (relu(b_u) - mean3) * rstd3, 0.0)
    b_off = b_u <= 0
    return load_tile(p_grad, o_t, m_t, dtype), b_n2, b_n3, b_off


@triton.jit
def _sums(b_gn, b_gs, b_w, p_affine, o_row, plane, n: tl.constexpr, CG: tl.constexpr, BC: tl.constexpr):
    """Store the sums of g n and g over the pixels. Return mean(g w) and mean(g w n)."""
    b_weight = tl.sum(b_gn, axis=0)
    b_bias = tl.sum(b_gs, axis=0)
    store_affine(p_affine, o_row, b_weight, b_bias, plane, CG, BC)
    slope = tl.sum(b_weight[None, :] * b_w) / n
    return tl.sum(b_bias[None, :] * b_w) / n, slope


@triton.jit
def _through_norm3(b_g, b_n3, norm3, means3):
    _, rstd3, b_w3 = norm3
    offset3, slope3 = means3
    return norm_backward(b_g, b_n3, b_w3, rstd3, offset3, slope3)


@triton.jit(do_not_specialize=["plane"])
def _norm_act_residual_backward_kernel(
    p_grad,
    p_y,
    p_x,
    p_z,
    p_weight2,
    p_bias2,
    p_weight3,
    p_mean2,
    p_rstd2,
    p_mean3,
    p_rstd3,
    p_grad_sum,
    p_grad_z,
    p_affine,
    plane,
    pixels,
    P: tl.constexpr,
    C: tl.constexpr,
    CG: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """grad_z = N3(grad) if the relu is active, else 0; grad_sum, of y + x, = N2(grad_z).

    Ni(g) = (g w_i - mean(g w_i) - n_i mean(g w_i n_i)) rstd_i. Per sample, the gradients of weight_i and bias_i are the
    sums of g n_i and g over the pixels; g is grad for i = 3 and grad_z for i = 2.
    """
    dtype: tl.constexpr = p_grad.dtype.element_ty
    short: tl.constexpr = p_grad_z.dtype.element_ty
    i_g = tl.program_id(0)
    i_b, c_0, o_group = group_of_program(P, C, CG)
    stop = loop_end(pixels, P, BR)
    maps = (p_grad + o_group, p_y + o_group, p_x + o_group, p_z + o_group)
    p_grad_sum += o_group
    p_grad_z += o_group
    b_w2 = load_channels(p_weight2 + c_0, CG, BC)
    b_b2 = load_channels(p_bias2 + c_0, CG, BC)
    b_w3 = load_channels(p_weight3 + c_0, CG, BC)
    mean2 = tl.load(p_mean2 + i_g)
    rstd2 = tl.load(p_rstd2 + i_g)
    norm2 = (mean2, rstd2, b_w2, b_b2)
    norm3 = (tl.load(p_mean3 + i_g), tl.load(p_rstd3 + i_g), b_w3)
    o_0, m_0 = group_tile(0, P, C, CG, BR, BC)
    b_g, b_n2, b_n3, b_off = _tile(maps, norm2, norm3, o_0, m_0, dtype)

    b_gn = b_g * b_n3
    b_gs = b_g
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, _, b_n3t, _ = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gn += b_gt * b_n3t
        b_gs += b_gt
    means3 = _sums(b_gn, b_gs, b_w3, p_affine + 2 * plane, i_b * C + c_0, plane, P * CG, CG, BC)

    b_g = tl.where(b_off | (m_0 == 0), 0.0, _through_norm3(b_g, b_n3, norm3, means3))
    tl.store(p_grad_z + o_0, b_g.to(short), mask=m_0)
    b_gn = b_g * b_n2
    b_gs = b_g
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, b_n2t, b_n3t, b_offt = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gt = tl.where(b_offt | (m_t == 0), 0.0, _through_norm3(b_gt, b_n3t, norm3, means3))
        tl.store(p_grad_z + o_t, b_gt.to(short), mask=m_t)
        b_gn += b_gt * b_n2t
        b_gs += b_gt
    offset2, slope2 = _sums(b_gn, b_gs, b_w2, p_affine, i_b * C + c_0, plane, P * CG, CG, BC)

    tl.store(p_grad_sum + o_0, norm_backward(b_g, b_n2, b_w2, rstd2, offset2, slope2).to(short), mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, b_n2t, b_n3t, b_offt = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gt = tl.where(b_offt, 0.0, _through_norm3(b_gt, b_n3t, norm3, means3))
        b_gy = norm_backward(b_gt, b_n2t, b_w2, rstd2, offset2, slope2)
        tl.store(p_grad_sum + o_t, b_gy.to(short), mask=m_t)


_TENSORS = ("y", "x", "z", "weight2", "bias2", "weight3")
_STATISTICS = ("mean2", "rstd2", "mean3", "rstd3")
_PLANS = plans_of(_norm_act_residual_kernel, (*_TENSORS, "bias3"), ("p_f", *(f"p_{name}" for name in _STATISTICS)))
_BACKWARD_PLANS = plans_of(
    _norm_act_residual_backward_kernel, (*_TENSORS, "grad", *_STATISTICS), ("p_grad_sum", "p_grad_z", "p_affine")
)


def norm_act_residual(a: Any, *results: Tensor) -> None:
    """f = GroupNorm3(relu(z + GroupNorm2(y + x))), and the statistics of each group."""
    _PLANS.run(a, a.groups, a.weight2.dtype, a.z.dtype, results=results)


def norm_act_residual_backward(a: Any, *results: Tensor) -> None:
    """The gradients of y + x and of z; per sample, the gradients of weights and biases."""
    _BACKWARD_PLANS.run(a, a.groups, a.weight2.dtype, a.z.dtype, results=results)
