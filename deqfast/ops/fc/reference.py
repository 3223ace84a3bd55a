"""The ops of the fully connected cell in plain torch: the specification of their kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.constants import IDENTITY, RELU, TANH
from ..steps import PROGRESS, PicardStep
from ..steps.reference import picard_step
from . import FcFixedPoint, FcVjp


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (_identity, torch.relu, torch.tanh, F.gelu)


def fc_fixed_point(a: FcFixedPoint) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve z = act(W z + c) by Picard steps, all `max_iter` of them."""
    batch, weight = a.c.shape[0], a.weight.to(a.c.dtype)
    z, best = a.z0.clone(), a.z0.clone()
    status = torch.zeros(batch, dtype=torch.int8, device=a.c.device)
    iterations = torch.zeros(batch, dtype=torch.int32, device=a.c.device)
    residual = torch.full((2, batch), torch.inf, dtype=a.c.dtype, device=a.c.device)
    progress = residual.new_full((len(PROGRESS), batch), torch.inf)
    active = torch.full((1,), batch, dtype=torch.int32, device=a.c.device)
    for k in range(a.max_iter):
        with torch.autocast(a.c.device.type, enabled=False):
            fz = ACTIVATIONS[a.activation](F.linear(z, weight) + a.c)
        monitor = (best, status, iterations, residual, progress, active)
        picard_step(PicardStep(z, fz, *monitor, k, k + 1 == a.max_iter, a.rule, 1.0))
    return best, status, iterations, residual


def fc_vjp(a: FcVjp) -> Tensor:
    """grad * act'(pre)."""
    if a.activation == IDENTITY:
        return a.grad.clone()
    if a.activation == RELU:
        return torch.where(a.pre <= 0, 0, a.grad)
    if a.activation == TANH:
        value = torch.tanh(a.pre)
        return a.grad * (1 - value * value)
    density = torch.exp(-0.5 * a.pre * a.pre) * (0.5 / math.pi) ** 0.5
    return a.grad * (0.5 * (1 + torch.erf(a.pre * 0.5**0.5)) + a.pre * density)
