"""The fused parts of ResidualCell: ``norm_act``, ``norm_act_residual`` and their backwards.

    out = relu(GN(y))                        norm_act, after the first convolution
    f = GN3(relu(z + GN2(y + x)))            norm_act_residual, after the second

GN is GroupNorm with `groups` groups, variance divided by the number of elements. A is float64 for float64 data, else
float32; sums and everything saved are in A, and the variance is taken of centred values.

===================  ===============  ================================================================================
y                    (B, C, H, W)     output of a convolution; float32, bfloat16 or float64
x, z                 (B, C, H, W)     injection and state, of one dtype: y's, or float32 beside a bfloat16 y
weight*, bias*       (C,) A           of the normalisations
mean*, rstd*         (B, groups) A    statistics of the normalisations: results, and arguments of the backwards
grad                 as the result    gradient of out (dtype of y) or of f (A)
out                  (B, C, H, W)     dtype of y: it goes into a convolution
f                    (B, C, H, W) A
norms                (2, B, groups) A |f - z|^2 and |f|^2 of every group; a sample's are their sums over the groups
grad_y               (B, C, H, W)     dtype of y
grad_sum, grad_z     (B, C, H, W)     gradients of y + x and of z, in the dtype of z
grad_affine          (2, B, C) A      gradients of weight and bias per sample, to be summed over the batch; of
                                      norm_act_residual_backward (4, B, C): weight2, bias2, weight3, bias3
===================  ===============  ================================================================================

Everything of shape (B, C, H, W) lies in one memory format, channels_last or, for the C++ kernels, also contiguous;
results come in it. Groups are independent but for the sums over samples, which are left to the caller: one program
serves one (sample, group), and nothing depends on batch mates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import register

DTYPES = (torch.float32, torch.bfloat16, torch.float64)

_SCHEMAS = {
    "norm_act": "(Tensor y, Tensor weight, Tensor bias, int groups, float eps) -> (Tensor, Tensor, Tensor)",
    "norm_act_backward": (
        "(Tensor grad, Tensor y, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, int groups) -> (Tensor, Tensor)"
    ),
    "norm_act_residual": (
        "(Tensor y, Tensor x, Tensor z, Tensor weight2, Tensor bias2, Tensor weight3, Tensor bias3, int groups, "
        "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "norm_act_residual_backward": (
        "(Tensor grad, Tensor y, Tensor x, Tensor z, Tensor weight2, Tensor bias2, Tensor weight3, Tensor mean2, "
        "Tensor rstd2, Tensor mean3, Tensor rstd3, int groups) -> (Tensor, Tensor, Tensor)"
    ),
}


def _fake_norm_act(y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (weight.new_empty(y.shape[0], groups) for _ in range(2))
    return torch.empty_like(y), mean, rstd


def _fake_norm_act_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), weight.new_empty(2, y.shape[0], y.shape[1])


def _fake_norm_act_residual(
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    bias3: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    statistics = (weight2.new_empty(z.shape[0], groups) for _ in range(4))
    return torch.empty_like(z, dtype=weight2.dtype), weight2.new_empty(2, z.shape[0], groups), *statistics


def _fake_norm_act_residual_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    mean2: Tensor,
    rstd2: Tensor,
    mean3: Tensor,
    rstd3: Tensor,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(z), weight2.new_empty(4, z.shape[0], z.shape[1])


def _check_norm(op: str, y: Tensor, groups: int, images: dict[str, Tensor], **others: Tensor) -> None:
    """The checks of csrc/common/norm.h, for the kernels that are launched from Python.

    images: what is shaped as y; others: vectors and statistics.
    """
    if y.dim() != 4 or y.dtype not in DTYPES or 0 in y.shape[1:]:
        raise ValueError(f"{op}: `y` must be (B, C, H, W) float32, bfloat16 or float64, got {tuple(y.shape)} {y.dtype}")
    batch, channels = y.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"{op}: `groups` must divide the {channels} channels, got {groups}")
    accumulation = torch.float64 if y.dtype == torch.float64 else torch.float32
    state = images["z"].dtype if "z" in images else y.dtype
    if state != y.dtype and not (y.dtype == torch.bfloat16 and state == torch.float32):
        raise ValueError(f"{op}: `z` must have the dtype of `y`, or float32 beside bfloat16, got {state}")
    dtypes = {"y": y.dtype, "x": state, "z": state, "grad": accumulation if "z" in images else y.dtype}
    for name, tensor in {"y": y, **images, **others}.items():
        shape, dtype, memory_format = tuple(y.shape), dtypes.get(name, accumulation), torch.channels_last
        if name in others:
            shape = (batch, groups) if name.startswith(("mean", "rstd")) else (channels,)
            memory_format = torch.contiguous_format
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{op}: `{name}` must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous(memory_format=memory_format):
            raise ValueError(f"{op}: `{name}` must be contiguous in the memory format {str(memory_format)[6:]}")
        if tensor.device != y.device:
            raise ValueError(f"{op}: `{name}` must be on the device of `y` ({y.device})")


def _norm_act_triton(y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, ...]:
    from ..kernels.norm_act import norm_act

    _check_norm("norm_act_triton", y, groups, {}, weight=weight, bias=bias)
    return norm_act(y, weight, bias, groups, eps)


def _norm_act_backward_triton(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, ...]:
    from ..kernels.norm_act import norm_act_backward

    _check_norm("norm_act_backward_triton", y, groups, {"grad": grad}, weight=weight, bias=bias, mean=mean,
                rstd=rstd)  # fmt: skip
    return norm_act_backward(grad, y, weight, bias, mean, rstd, groups)


def _norm_act_residual_triton(
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    bias3: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    from ..kernels.norm_act_residual import norm_act_residual

    _check_norm("norm_act_residual_triton", y, groups, {"x": x, "z": z}, weight2=weight2, bias2=bias2,
                weight3=weight3, bias3=bias3)  # fmt: skip
    return norm_act_residual(y, x, z, weight2, bias2, weight3, bias3, groups, eps)


def _norm_act_residual_backward_triton(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    z: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor,
    mean2: Tensor,
    rstd2: Tensor,
    mean3: Tensor,
    rstd3: Tensor,
    groups: int,
) -> tuple[Tensor, ...]:
    from ..kernels.norm_act_residual import norm_act_residual_backward

    _check_norm("norm_act_residual_backward_triton", y, groups, {"grad": grad, "x": x, "z": z}, weight2=weight2,
                bias2=bias2, weight3=weight3, mean2=mean2, rstd2=rstd2, mean3=mean3, rstd3=rstd3)  # fmt: skip
    return norm_act_residual_backward(grad, y, x, z, weight2, bias2, weight3, mean2, rstd2, mean3, rstd3, groups)


register("norm_act", _SCHEMAS["norm_act"], _fake_norm_act, _norm_act_triton)
register("norm_act_backward", _SCHEMAS["norm_act_backward"], _fake_norm_act_backward, _norm_act_backward_triton)
register("norm_act_residual", _SCHEMAS["norm_act_residual"], _fake_norm_act_residual, _norm_act_residual_triton)
register(
    "norm_act_residual_backward",
    _SCHEMAS["norm_act_residual_backward"],
    _fake_norm_act_residual_backward,
    _norm_act_residual_backward_triton,
)
