"""A clear error in the place of second derivatives that are not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoDoubleBackward(torch.autograd.Function):
    """Identity whose derivative is an error, put on gradients that are not differentiable.

    `sources` are the tensors that the gradient depends on, so that the error lies on every way back to them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, name: str, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.adjoint = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"deqfast: double backward through {ctx.adjoint} is not supported: its gradient is not differentiable. "
            "Use Implicit(), with a cell that is the same function in the backward pass, or Unrolled()"
        )

    jvp = backward
