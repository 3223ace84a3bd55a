"""Ops of the fully connected cell.

``fc_fixed_point`` is a whole solve in one launch, and ``fc_vjp`` its backward.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..registry import Dtype, Range, Result, Shaped, anchored, register
from ..steps import MAX_ITER, StopRule

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
register("fc_fixed_point", FcFixedPoint, "c", *_RESULTS, limits={"D": Range(1)}, check=_check, triton="fc_fixed_point")
register("fc_vjp", FcVjp, "pre", Result("result", STATE, like="pre"), triton="fc_fixed_point")
