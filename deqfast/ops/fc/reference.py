"""The ops of the fully connected cell in plain torch: the specification of their kernels."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.constants import IDENTITY, RELU, TANH
from ..steps import PicardStep
from ..steps.loops import state_begin
from ..steps.reference import picard_step
from . import FcFixedPoint, FcVjp

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.positive, torch.relu, torch.tanh, F.gelu)


def fc_fixed_point(a: FcFixedPoint) -> tuple[Tensor, ...]:
    """Solve z = act(W z + c) by Picard steps, all `max_iter` of them."""
    z, weight = a.z0.clone(), a.weight.to(a.c.dtype)
    best, status, iterations, residual, progress, active = state_begin(z)
    monitor = best, status, iterations, residual, progress, active
    for k in range(a.max_iter):
        with torch.autocast(a.c.device.type, enabled=False):
            fz = ACTIVATIONS[a.activation](F.linear(z, weight) + a.c)
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
