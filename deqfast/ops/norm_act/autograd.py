"""Fused parts of ResidualCell as functions of modules, with their gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from ..choice import Kernel

_TORCH = Kernel("torch")


class _Fused(torch.autograd.Function):
    """The first result of an op of this family."""

    @staticmethod
    def forward(ctx: Any, op: str, kernel: Kernel, groups: int, eps: float, *tensors: Tensor) -> Tensor:
        out, *statistics = kernel.op(op)(*tensors, groups, eps)
        ctx.save_for_backward(*tensors, *statistics)
        ctx.op, ctx.kernel, ctx.groups, ctx.eps, ctx.count = op, kernel, groups, eps, len(tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, kernel, grad = ctx.saved_tensors, ctx.kernel, grads[0]  # a checkpoint refuses a second read
        tensors, statistics = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():  # create_graph=True: in plain torch, which is differentiable again
            kernel = _TORCH
            _, *statistics = kernel.op(ctx.op)(*tensors, ctx.groups, ctx.eps)
        else:
            grad = grad.contiguous(memory_format=_format_of(tensors[0]))
        # All tensors except the last bias of norm_act_residual, on which no gradient depends.
        first, *more, affine = kernel.op(f"{ctx.op}_backward")(grad, *tensors[:6], *statistics, ctx.groups)
        maps = [first, first, *more] if more else [first]  # y and x of norm_act_residual have one gradient
        return None, None, None, None, *maps, *affine.sum(dim=1)


def _format_of(tensor: Tensor) -> torch.memory_format:
    return torch.contiguous_format if tensor.is_contiguous() else torch.channels_last


def _call(op: str, kernel: Kernel, norm: nn.GroupNorm, tensors: list[Tensor]) -> Tensor:
    """Return the first result of `op`; through the autograd function only if a gradient is needed."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Fused.apply(op, kernel, norm.num_groups, norm.eps, *tensors)
    return kernel.op(op)(*tensors, norm.num_groups, norm.eps)[0]


def _parameters(dtype: torch.dtype, *norms: nn.GroupNorm) -> list[Tensor]:
    """Weights and biases in the accumulation dtype, for data of `dtype`."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return [parameter.to(dtype) for norm in norms for parameter in (norm.weight, norm.bias)]


def norm_act(kernel: Kernel, y: Tensor, norm: nn.GroupNorm) -> Tensor:
    """relu(norm(y)) in the dtype of y, one of ``DTYPES``, as input of a convolution. y: (B, C, H, W).

    The result has the memory format of y, channels_last or contiguous; always channels_last if the kernel needs it.
    """
    y = y.contiguous(memory_format=torch.channels_last if kernel.channels_last_only else _format_of(y))
    return _call("norm_act", kernel, norm, [y, *_parameters(y.dtype, norm)])


def norm_act_residual(
    kernel: Kernel, y: Tensor, x: Tensor, z: Tensor, norm2: nn.GroupNorm, norm3: nn.GroupNorm
) -> Tensor:
    """norm3(relu(z + norm2(y + x))) in the dtype in which plain torch gives it; y, x, z: (B, C, H, W).

    The result has the memory format of z (the solvers read it in z's order), channels_last or contiguous; always
    channels_last if the kernel needs it. Tensors in another format are converted.
    """
    plain_dtype = torch.promote_types(torch.promote_types(x.dtype, z.dtype), y.dtype)
    in_autocast = z.is_cuda and torch.is_autocast_enabled("cuda")  # only on a GPU it makes group_norm float32
    state_dtype = torch.promote_types(x.dtype, z.dtype)
    if y.dtype != torch.bfloat16 or state_dtype not in (torch.bfloat16, torch.float32):
        y, state_dtype = y.to(plain_dtype), plain_dtype
    memory_format = torch.channels_last if kernel.channels_last_only else _format_of(z)
    maps = [t.contiguous(memory_format=memory_format) for t in (y, x.to(state_dtype), z.to(state_dtype))]
    f = _call("norm_act_residual", kernel, norm2, [*maps, *_parameters(y.dtype, norm2, norm3)])
    return f if in_autocast else f.to(plain_dtype)
