"""Ops of ResidualCell in plain torch: the specification of their kernels."""

import torch
from torch import Tensor

from . import NormAct, NormActBackward, NormActResidual, NormActResidualBackward


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """Repeat (B, groups) to (B, channels, 1, 1)."""
    return values.repeat_interleave(channels // values.shape[1], dim=1)[:, :, None, None]


def _group_means(a: Tensor, groups: int) -> Tensor:
    return a.unflatten(1, (groups, -1)).mean(dim=(2, 3, 4))


def _normalise(a: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (a - mean) rstd of every group, mean and rstd, in two passes, so that a large mean costs no digits."""
    mean = _group_means(a, groups)
    centred = a - _per_channel(mean, a.shape[1])
    rstd = (_group_means(centred.square(), groups) + eps).rsqrt()
    return centred * _per_channel(rstd, a.shape[1]), mean, rstd


def _renormalise(a: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (a - _per_channel(mean, a.shape[1])) * _per_channel(rstd, a.shape[1])


def _affine(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return a * weight[:, None, None] + bias[:, None, None]


def _masked(grad: Tensor, before_relu: Tensor) -> Tensor:
    return torch.where(before_relu <= 0, torch.zeros_like(grad), grad)  # NaN passes, as in torch


def _norm_backward(grad: Tensor, normal: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of the input of a normalisation to `normal`, from the gradient of ``_affine(normal, weight, ...)``."""
    groups, channels = rstd.shape[1], grad.shape[1]
    grad = grad * weight[:, None, None]
    mean, slope = _group_means(grad, groups), _group_means(grad * normal, groups)
    centred = grad - _per_channel(mean, channels) - normal * _per_channel(slope, channels)
    return centred * _per_channel(rstd, channels)


def _affine_grads(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Gradients (2 n, B, C) of weight and bias per sample, for every pair (grad, normal)."""
    return torch.stack([sums for grad, normal in norms for sums in ((grad * normal).sum((2, 3)), grad.sum((2, 3)))])


def norm_act(a: NormAct) -> tuple[Tensor, Tensor, Tensor]:
    """Return relu(GroupNorm(y)), mean and rstd."""
    normal, mean, rstd = _normalise(a.y.to(_accumulation_dtype(a.y.dtype)), a.groups, a.eps)
    return torch.relu(_affine(normal, a.weight, a.bias)).to(a.y.dtype), mean, rstd


def norm_act_backward(a: NormActBackward) -> tuple[Tensor, Tensor]:
    """Gradients of y and, per sample, of weight and bias. Differentiable."""
    dtype = _accumulation_dtype(a.y.dtype)
    normal = _renormalise(a.y.to(dtype), a.mean, a.rstd)
    g = _masked(a.grad.to(dtype), _affine(normal, a.weight, a.bias))
    return _norm_backward(g, normal, a.weight, a.rstd).to(a.y.dtype), _affine_grads((g, normal))


def norm_act_residual(a: NormActResidual) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return f = GroupNorm3(relu(z + GroupNorm2(y + x))), and the statistics of both normalisations."""
    dtype = _accumulation_dtype(a.z.dtype)
    y, x, z = a.y.to(dtype), a.x.to(dtype), a.z.to(dtype)
    normal2, mean2, rstd2 = _normalise(y + x, a.groups, a.eps)
    normal3, mean3, rstd3 = _normalise(torch.relu(z + _affine(normal2, a.weight2, a.bias2)), a.groups, a.eps)
    return _affine(normal3, a.weight3, a.bias3), mean2, rstd2, mean3, rstd3


def norm_act_residual_backward(a: NormActResidualBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y + x, of z and, per sample, of the weights and biases. Differentiable."""
    dtype = _accumulation_dtype(a.z.dtype)
    normal2 = _renormalise(a.y.to(dtype) + a.x.to(dtype), a.mean2, a.rstd2)
    before_relu = a.z.to(dtype) + _affine(normal2, a.weight2, a.bias2)
    normal3 = _renormalise(torch.relu(before_relu), a.mean3, a.rstd3)
    g3 = a.grad.to(dtype)
    g2 = _masked(_norm_backward(g3, normal3, a.weight3, a.rstd3), before_relu)
    grad_sum = _norm_backward(g2, normal2, a.weight2, a.rstd2)
    return grad_sum.to(a.z.dtype), g2.to(a.z.dtype), _affine_grads((g2, normal2), (g3, normal3))
