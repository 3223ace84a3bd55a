"""The ops of the fully connected cell in plain torch: the specification of their kernels."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.constants import IDENTITY, PANEL_PADDING, RELU, TANH
from ..steps import PicardStep
from ..steps.loops import state_begin
from ..steps.reference import picard_step
from . import FcFixedPoint, FcSteps, FcVjp

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.positive, torch.relu, torch.tanh, F.gelu)


def fc_fixed_point(a: FcFixedPoint) -> tuple[Tensor, ...]:
    """Solve z = act(W z + c) by Picard steps, all `max_iter` of them."""
    state = start(a.z0)
    arguments: Any = (a.weight, a.c, *state, a.activation, 0, a.max_iter, a.max_iter, a.rule)
    fc_steps(FcSteps(*arguments))
    return state[2:6]


def start(z0: Tensor) -> tuple[Tensor, ...]:
    """Tensors `panels` to `progress` of ``fc_steps`` at k = 0."""
    dim = z0.shape[1]
    *state, _ = state_begin(z0)
    return z0.new_empty(dim, dim + PANEL_PADDING), z0.clone(), *state


def fc_steps(a: FcSteps) -> None:
    """Make the Picard steps k to until - 1."""
    weight, active = a.weight.to(a.c.dtype), (a.status == 0).sum(0, keepdim=True, dtype=torch.int32)
    for k in range(a.k, a.until):
        with torch.autocast(a.c.device.type, enabled=False):
            fz = ACTIVATIONS[a.activation](F.linear(a.z, weight) + a.c)
        monitor = (a.best, a.status, a.iterations, a.residual, a.progress, active)
        picard_step(PicardStep(a.z, fz, *monitor, k, k + 1 == a.max_iter, a.rule, 1.0))


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
