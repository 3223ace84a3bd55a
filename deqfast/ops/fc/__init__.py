"""Ops of the fully connected cell.

``fc_fixed_point`` is a whole solve in one launch, ``fc_steps`` a part of one, and ``fc_vjp`` its backward.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...kernels.constants import PANEL_PADDING
from ..registry import Dtype, Range, Result, Shaped, anchored, register
from ..steps import MAX_ITER, InOut, StopRule

ACTIVATIONS = ("identity", "relu", "tanh", "gelu")  # gelu with erf
STATE = anchored(torch.float32, torch.float64)
WEIGHT = Dtype({torch.float32: (torch.float32, torch.bfloat16), torch.float64: (torch.float64,)})
ACTIVATION = Range(0, len(ACTIVATIONS) - 1)


@dataclass(frozen=True)
class FcFixedPoint:
    """Solve z = act(W z + c) by z <- act(W z + c), with the stop rule of ``picard_step``.

    Return `value`, the best iterate, else z0; its `status`; `iterations`, the evaluations of f; and the relative and
    absolute `residual` of the value, infinite if f was never finite.
    """

    weight: Annotated[Tensor, Shaped("D, D", WEIGHT)]  # W; multiplied in the dtype of the state
    c: Annotated[Tensor, Shaped("B, D", STATE)]  # triton: float32
    z0: Annotated[Tensor, Shaped("B, D", STATE)]  # the start
    activation: Annotated[int, ACTIVATION]
    max_iter: Annotated[int, MAX_ITER]  # evaluations of f per sample, at most
    rule: StopRule


@dataclass(frozen=True)
class FcSteps:
    """Make the evaluations k to until - 1 of a solve by ``fc_fixed_point``, in place. It has no GPU kernels.

    The state consists of the tensors of ``picard_step``; z of a finished sample is undefined. At the end the state has
    the bits of the whole solve.
    """

    weight: Annotated[Tensor, Shaped("D, D", WEIGHT)]
    c: Annotated[Tensor, Shaped("B, D", STATE)]
    panels: Annotated[Tensor, InOut(f"D, D + {PANEL_PADDING}", STATE)]  # W in the kernel's order; written at k = 0
    z: Annotated[Tensor, InOut("B, D", STATE)]
    best: Annotated[Tensor, InOut("B, D", STATE)]
    status: Annotated[Tensor, InOut("B", torch.int8)]
    iterations: Annotated[Tensor, InOut("B", torch.int32)]
    residual: Annotated[Tensor, InOut("2, B", STATE)]
    progress: Annotated[Tensor, InOut("6, B", STATE)]
    activation: Annotated[int, ACTIVATION]
    k: Annotated[int, Range(0)]
    until: Annotated[int, Range(1)]  # at most max_iter
    max_iter: Annotated[int, MAX_ITER]  # of the whole solve
    rule: StopRule


@dataclass(frozen=True)
class FcVjp:
    """Return grad * act'(pre)."""

    pre: Annotated[Tensor, Shaped("B, D", STATE)]  # the argument of the activation
    grad: Annotated[Tensor, Shaped("B, D", STATE)]  # the gradient of its value
    activation: Annotated[int, ACTIVATION]


def _check(op: str, a: FcFixedPoint) -> None:
    """Raise ValueError for arguments that the Triton kernel does not support."""
    from ...kernels.config import fc_features, shared_memory

    limit = fc_features(a.weight.dtype, shared_memory(a.c.device))
    if a.c.dtype != torch.float32:
        raise ValueError(f"{op}: `c` must be float32, got {a.c.dtype}")
    if len(a.weight) > limit:
        raise ValueError(f"{op}: `weight` must have at most {limit} rows in {a.weight.dtype}, got {len(a.weight)}")


_RESULTS = (
    Result("value", STATE, like="c"),
    Result("status", torch.int8, shape="B"),
    Result("iterations", torch.int32, shape="B"),
    Result("residual", STATE, shape="2, B"),
)
_SIZES = {"D": Range(1)}
register("fc_fixed_point", FcFixedPoint, "c", *_RESULTS, limits=_SIZES, check=_check, triton="fc_fixed_point")
register("fc_steps", FcSteps, "c", limits=_SIZES)
register("fc_vjp", FcVjp, "pre", Result("result", STATE, like="pre"), triton="fc_fixed_point")
