"""Fused ops of ResidualCell: ``norm_act``, ``norm_act_residual`` and their backwards.

    out = relu(GN(y))                        norm_act, after the first convolution
    f = GN3(relu(z + GN2(y + x)))            norm_act_residual, after the second

GN is GroupNorm with `groups` groups, variance divided by the number of elements. Sums and everything saved are in
float64 for float64 data, else in float32. The variance is the mean square of the centred values.

All tensors (B, C, H, W) and all results have one memory format: channels_last or, for the C++ kernels, also contiguous.
One program computes one (sample, group), independently of all others. The caller adds the parameters' gradients over
the samples.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from ..registry import Divisor, Dtype, Range, Result, Shaped, anchored, register

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DATA = anchored(*DTYPES)
STATE = Dtype({d: (d, torch.float32) if d == torch.bfloat16 else (d,) for d in DTYPES})
ACCUMULATION = Dtype({d: (torch.float64 if d == torch.float64 else torch.float32,) for d in DTYPES})

Image = partial(Shaped, "B, C, H, W", layout="channels_last")
CHANNELS = Shaped("C", ACCUMULATION)
STATISTICS = Shaped("B, groups", ACCUMULATION)
GROUPS = Divisor("C", "channels")


@dataclass(frozen=True)
class NormAct:
    """Return relu(GN(y)) and the statistics of the groups."""

    y: Annotated[Tensor, Image(DATA)]  # output of a convolution
    weight: Annotated[Tensor, CHANNELS]
    bias: Annotated[Tensor, CHANNELS]
    groups: Annotated[int, GROUPS]
    eps: float


@dataclass(frozen=True)
class NormActBackward:
    """Return the gradient of y, and those of weight and bias per sample, to be summed over the batch."""

    grad: Annotated[Tensor, Image(DATA)]  # gradient of `out`
    y: Annotated[Tensor, Image(DATA)]
    weight: Annotated[Tensor, CHANNELS]
    bias: Annotated[Tensor, CHANNELS]
    mean: Annotated[Tensor, STATISTICS]
    rstd: Annotated[Tensor, STATISTICS]
    groups: Annotated[int, GROUPS]


@dataclass(frozen=True)
class _Residual:
    y: Annotated[Tensor, Image(DATA)]  # output of a convolution
    x: Annotated[Tensor, Image(STATE)]  # the injection
    z: Annotated[Tensor, Image(STATE)]  # the state
    weight2: Annotated[Tensor, CHANNELS]
    bias2: Annotated[Tensor, CHANNELS]
    weight3: Annotated[Tensor, CHANNELS]


@dataclass(frozen=True)
class NormActResidual(_Residual):
    """Return f, and the statistics of both normalisations."""

    bias3: Annotated[Tensor, CHANNELS]
    groups: Annotated[int, GROUPS]
    eps: float


@dataclass(frozen=True)
class _Gradient:
    grad: Annotated[Tensor, Image(ACCUMULATION)]  # gradient of f


@dataclass(frozen=True)
class NormActResidualBackward(_Residual, _Gradient):
    """Return the gradients of y + x and of z, and per sample those of weight2, bias2, weight3 and bias3."""

    mean2: Annotated[Tensor, STATISTICS]
    rstd2: Annotated[Tensor, STATISTICS]
    mean3: Annotated[Tensor, STATISTICS]
    rstd3: Annotated[Tensor, STATISTICS]
    groups: Annotated[int, GROUPS]


def _results(*names: str, shape: str = "B, groups") -> tuple[Result, ...]:
    return tuple(Result(name, ACCUMULATION, shape=shape) for name in names)


_single: Any = {"limits": {dim: Range(1) for dim in "CHW"}, "triton": "norm_act"}
_both: Any = _single | {"triton": "norm_act_residual"}
_AFFINE, _AFFINES = _results("grad_affine", shape="2, B, C"), _results("grad_affine", shape="4, B, C")
_STATISTICS = _results("mean2", "rstd2", "mean3", "rstd3")
_GRADIENTS = Result("grad_sum", STATE, like="z"), Result("grad_z", STATE, like="z")
register("norm_act", NormAct, "y", Result("out", DATA, like="y"), *_results("mean", "rstd"), **_single)
register("norm_act_backward", NormActBackward, "y", Result("grad_y", DATA, like="y"), *_AFFINE, **_single)
register("norm_act_residual", NormActResidual, "y", Result("f", ACCUMULATION, like="z"), *_STATISTICS, **_both)
register("norm_act_residual_backward", NormActResidualBackward, "y", *_GRADIENTS, *_AFFINES, **_both)
