"""f = GroupNorm3(relu(z + GroupNorm2(y + x))) in channels_last, and the backward.

y (B, P, C) of dtype Y; x, z (B, P, C) of dtype Z; f, grad (B, P, C), parameters (C,), statistics (B, G) and
grad_affine (4, B, C) in the accumulation dtype. Both normalisations share their groups, so that one program serves one
group of a sample, as in ``norm_act``.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .common import scalar
from .norm_act import (
    group_of_program,
    group_tile,
    load_channels,
    load_tile,
    loop_end,
    norm_backward,
    plans_of,
    relu,
    statistics,
    sums,
    value_of,
)


@triton.jit
def _load_sum(p_y, p_x, o_t, m_t, dtype: tl.constexpr):
    return load_tile(p_y, o_t, m_t, dtype) + load_tile(p_x, o_t, m_t, dtype)


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
    mean2, rstd2, b_v = statistics(b_v, m_0, maps, (), stop, eps, P, C, CG, BR)

    b_w2 = load_channels(p_weight2 + c_0, CG, BC)
    b_b2 = load_channels(p_bias2 + c_0, CG, BC)
    norm2 = (mean2, rstd2, b_w2, b_b2)
    b_v = tl.where(m_0, relu(b_z + (b_v * rstd2 * b_w2 + b_b2)), 0.0)
    mean3, rstd3, b_v = statistics(b_v, m_0, maps, norm2, stop, eps, P, C, CG, BR)

    b_w3 = load_channels(p_weight3 + c_0, CG, BC)
    b_b3 = load_channels(p_bias3 + c_0, CG, BC)
    tl.store(p_f + o_0, b_v * rstd3 * b_w3 + b_b3, mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_n = (value_of(maps, norm2, o_t, m_t, dtype) - mean3) * rstd3
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
    mean3, rstd3 = norm3
    b_n2 = tl.where(m_t, (_load_sum(p_y, p_x, o_t, m_t, dtype) - mean2) * rstd2, 0.0)
    b_u = load_tile(p_z, o_t, m_t, dtype) + (b_n2 * b_w2 + b_b2)
    b_n3 = tl.where(m_t, (relu(b_u) - mean3) * rstd3, 0.0)
    b_off = b_u <= 0
    return load_tile(p_grad, o_t, m_t, dtype), b_n2, b_n3, b_off


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
    mean3 = tl.load(p_mean3 + i_g)
    rstd3 = tl.load(p_rstd3 + i_g)
    norm3 = (mean3, rstd3)
    o_0, m_0 = group_tile(0, P, C, CG, BR, BC)
    b_g, b_n2, b_n3, b_off = _tile(maps, norm2, norm3, o_0, m_0, dtype)

    b_gn = b_g * b_n3
    b_gs = b_g
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, _, b_n3t, _ = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gn += b_gt * b_n3t
        b_gs += b_gt
    offset3, slope3 = sums(b_gn, b_gs, b_w3, p_affine + 2 * scalar(plane, tl.int64), i_b * C + c_0, plane, P * CG, CG)

    b_g = tl.where(b_off | (m_0 == 0), 0.0, norm_backward(b_g, b_n3, b_w3, rstd3, offset3, slope3))
    tl.store(p_grad_z + o_0, b_g.to(short), mask=m_0)
    b_gn = b_g * b_n2
    b_gs = b_g
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, b_n2t, b_n3t, b_offt = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gt = tl.where(b_offt | (m_t == 0), 0.0, norm_backward(b_gt, b_n3t, b_w3, rstd3, offset3, slope3))
        tl.store(p_grad_z + o_t, b_gt.to(short), mask=m_t)
        b_gn += b_gt * b_n2t
        b_gs += b_gt
    offset2, slope2 = sums(b_gn, b_gs, b_w2, p_affine, i_b * C + c_0, plane, P * CG, CG)

    tl.store(p_grad_sum + o_0, norm_backward(b_g, b_n2, b_w2, rstd2, offset2, slope2).to(short), mask=m_0)
    for start in range(BR, stop, BR):
        o_t, m_t = group_tile(start, P, C, CG, BR, BC)
        b_gt, b_n2t, b_n3t, b_offt = _tile(maps, norm2, norm3, o_t, m_t, dtype)
        b_gt = tl.where(b_offt, 0.0, norm_backward(b_gt, b_n3t, b_w3, rstd3, offset3, slope3))
        b_gy = norm_backward(b_gt, b_n2t, b_w2, rstd2, offset2, slope2)
        tl.store(p_grad_sum + o_t, b_gy.to(short), mask=m_t)


_STATISTICS = ("p_mean2", "p_rstd2", "p_mean3", "p_rstd3")
_GRADIENTS = ("p_grad_sum", "p_grad_z", "p_affine")
_PLANS = plans_of("norm_act_residual", _norm_act_residual_kernel, "p_f", *_STATISTICS)
_BACKWARD_PLANS = plans_of("norm_act_residual_backward", _norm_act_residual_backward_kernel, *_GRADIENTS)


def norm_act_residual(a: Any, *results: Tensor) -> None:
    """f = GroupNorm3(relu(z + GroupNorm2(y + x))), and the statistics of each group."""
    _PLANS.run(a, a.groups, a.weight2.dtype, a.z.dtype, results=results)


def norm_act_residual_backward(a: Any, *results: Tensor) -> None:
    """The gradients of y + x and of z; per sample, the gradients of weights and biases."""
    _BACKWARD_PLANS.run(a, a.groups, a.weight2.dtype, a.y.dtype, a.z.dtype, results=results)
