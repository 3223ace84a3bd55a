"""Clear error for second derivatives that do not exist."""

from typing import Any

import torch
from torch import Tensor


class NoDoubleBackward(torch.autograd.Function):
    """Identity whose derivative raises an error, applied to gradients that are not differentiable.

    `sources` are the tensors that the gradient depends on, so that every path back to them meets the error.
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
            "Use Implicit(), with a cell that does not change before the backward pass, or Unrolled()"
        )

    jvp = backward
