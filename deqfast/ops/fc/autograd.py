"""Gradient of ``deqfast.fc_fixed_point``."""

from typing import Any

import torch
from torch import Tensor

from ...kernels.constants import NONFINITE
from ..choice import Kernel
from ..double_backward import NoDoubleBackward


class JacobianFree(torch.autograd.Function):
    """Forward: the solver's value. Backward: the gradient of act(W z + c) with z fixed; none for broken samples."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, c: Tensor, value: Tensor, status: Tensor, activation: int, kernel: Kernel
    ) -> Tensor:
        ctx.save_for_backward(weight, c, value, status)
        ctx.activation, ctx.kernel = activation, kernel
        return value.clone()  # users may work in place on it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, c, z, status = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(c.device.type, enabled=False):
            broken = (status == NONFINITE)[:, None]
            pre = torch.where(broken, 0, torch.addmm(c, z, weight.to(c.dtype).T))
            grad_c = ctx.kernel.op("fc_vjp")(pre, torch.where(broken, 0, grads[0]).contiguous(), ctx.activation)
            grad_weight = (grad_c.T @ z).to(weight.dtype) if ctx.needs_input_grad[0] else None
        pulled = [grad_weight, grad_c]
        if torch.is_grad_enabled():  # create_graph=True
            pulled = [g if g is None else NoDoubleBackward.apply(g, "fc_fixed_point", weight, c) for g in pulled]
        return (*pulled, None, None, None, None)
