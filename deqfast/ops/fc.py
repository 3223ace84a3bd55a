"""The fully connected cell: ``fc_fixed_point``, a whole solve in one launch, and ``fc_vjp``, its backward.

``fc_fixed_point`` solves z = act(W z + c) by z <- act(W z + c), with the judgement that ``picard_step`` passes
(``deqfast.ops.steps``), and returns (value, status, iterations, residual). ``fc_vjp`` returns grad * act'(pre).

===========  ============  ====================================================================================
weight       (D, D) H      W; H is T, or bfloat16 beside float32: its values are multiplied in T
c            (B, D) T      T is the dtype of the state, float32 or float64 (triton: float32)
z0           (B, D) T      start
activation   int           0 identity, 1 relu, 2 tanh, 3 gelu (with erf)
tol          float         bound on the relative residual |f(z)-z| / |f(z)|, or, if `absolute`, on |f(z)-z|
max_iter     int           values of f that a sample may use
stall_floor  float         relative residual below which a sample without a gain may stall; 0: never
value        (B, D) T      the iterate of least residual, else z0
status       (B,) int8     ``deqfast.Status``
iterations   (B,) int32    values of f used
residual     (2, B) T      relative and absolute residual of `value`; infinite if f was never finite
pre, grad    (B, D) T      fc_vjp: the argument of the activation, and the gradient of its value
===========  ============  ====================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import register

ACTIVATIONS = ("identity", "relu", "tanh", "gelu")

Outcome = tuple[Tensor, Tensor, Tensor, Tensor]


def _empty_outcome(weight: Tensor, c: Tensor, *rest: Any) -> Outcome:
    batch = c.shape[0]
    return (
        torch.empty_like(c),
        c.new_empty(batch, dtype=torch.int8),
        c.new_empty(batch, dtype=torch.int32),
        c.new_empty(2, batch),
    )


def _empty_gradient(pre: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(pre)


def _check_tensor(op: str, name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{op}: `{name}` must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.device != like.device:
        raise ValueError(f"{op}: `{name}` must be contiguous and on {like.device}")


def _check_activation(op: str, activation: int) -> None:
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"{op}: `activation` must be 0 to {len(ACTIVATIONS) - 1}, got {activation}")


def _check_fixed_point(op: str, weight: Tensor, c: Tensor, z0: Tensor, activation: int, max_iter: int) -> None:
    """The checks of csrc/common/fc_checks.h, and the limits of the Triton kernel."""
    from ..kernels.config import fc_features, shared_memory

    if c.dim() != 2 or not c.shape[1] or c.dtype != torch.float32:
        raise ValueError(f"{op}: `c` must be (B, D) float32 with D > 0, got {tuple(c.shape)} {c.dtype}")
    limit = fc_features(weight.dtype, shared_memory(c.device))
    if not limit:
        raise ValueError(f"{op}: `weight` must be float32 or bfloat16, got {weight.dtype}")
    _check_tensor(op, "c", c, c, tuple(c.shape), c.dtype)
    _check_tensor(op, "z0", z0, c, tuple(c.shape), c.dtype)
    _check_tensor(op, "weight", weight, c, (c.shape[1], c.shape[1]), weight.dtype)
    _check_activation(op, activation)
    if max_iter < 1:
        raise ValueError(f"{op}: `max_iter` must be at least 1, got {max_iter}")
    if c.shape[1] > limit:
        raise ValueError(f"{op}: `weight` must have at most {limit} rows in {weight.dtype}, got {c.shape[1]}")


def _fc_fixed_point_triton(weight: Tensor, c: Tensor, z0: Tensor, *rest: Any) -> Outcome:
    from ..kernels.fc_fixed_point import fc_fixed_point

    activation, _, _, max_iter, _ = rest
    _check_fixed_point("fc_fixed_point_triton", weight, c, z0, activation, max_iter)
    outcome = _empty_outcome(weight, c)
    fc_fixed_point(weight, c, z0, *outcome, *rest)
    return outcome


def _fc_vjp_triton(pre: Tensor, grad: Tensor, activation: int) -> Tensor:
    from ..kernels.fc_fixed_point import fc_vjp

    op = "fc_vjp_triton"
    if pre.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: `pre` must be float32 or float64, got {pre.dtype}")
    _check_tensor(op, "pre", pre, pre, tuple(pre.shape), pre.dtype)
    _check_tensor(op, "grad", grad, pre, tuple(pre.shape), pre.dtype)
    _check_activation(op, activation)
    result = torch.empty_like(pre)
    fc_vjp(pre, grad, result, activation)
    return result


register(
    "fc_fixed_point",
    "(Tensor weight, Tensor c, Tensor z0, int activation, float tol, bool absolute, int max_iter, float stall_floor) "
    "-> (Tensor value, Tensor status, Tensor iterations, Tensor residual)",
    _empty_outcome,
    _fc_fixed_point_triton,
)
register("fc_vjp", "(Tensor pre, Tensor grad, int activation) -> Tensor", _empty_gradient, _fc_vjp_triton)
