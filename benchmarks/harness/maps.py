"""Maps f whose fixed points the benchmarks solve for, with their residuals in float64. Each counts its calls."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

import deqfast

NEVER = 1e-30  # a tolerance that no solve meets, so that all make the same number of iterations
FC_RADIUS = 0.9  # of W: with tanh a contraction that does not reach its fixed point to the last bit


def relative_residuals(f: Tensor, z: Tensor) -> Tensor:
    """|f - z| / |f| of every sample (B,)."""
    f, z = f.flatten(1), z.flatten(1)
    return (f - z).norm(dim=1) / f.norm(dim=1)


def relative_residual(f: Tensor, z: Tensor) -> float:
    """Largest |f - z| / |f| of the batch."""
    return float(relative_residuals(f, z).max())


def autocast(device: str, precision: str) -> Any:
    """Context of "fp32", or of "bf16", which is autocast."""
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()


class Map(ABC):
    """f, which counts its calls. c: its injection (B, ...)."""

    c: Tensor
    calls = 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.value(z)

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """f(z), without counting."""

    def residual(self, z: Tensor) -> float:
        """Largest relative residual of the batch, in float64."""
        exact, z = copy.copy(self), z.double()
        vars(exact).update({name: part.double() for name, part in vars(self).items() if isinstance(part, Tensor)})
        return relative_residual(exact.value(z), z)


class Contraction(Map):
    """f(z) = c + lambda z, whose fixed point is known."""

    def __init__(self, batch: int, dim: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.c = torch.randn(batch, dim, generator=generator).to(device)
        self.eigenvalues = torch.linspace(-0.9, 0.95, dim).to(device)

    def value(self, z: Tensor) -> Tensor:
        return torch.addcmul(self.c, z, self.eigenvalues)


class FullyConnected(Map):
    """f(z) = tanh(W z + c) with W Gaussian; W may be bfloat16 and is multiplied in float32."""

    def __init__(self, batch: int, dim: int, device: str = "cpu", weight_dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(dim)
        weight = FC_RADIUS * torch.randn(dim, dim, generator=generator) / dim**0.5
        self.weight = weight.to(device, weight_dtype)
        self.wide = self.weight.float()
        self.c = torch.randn(batch, dim, generator=generator).to(device)

    def value(self, z: Tensor) -> Tensor:
        return torch.addmm(self.c, z, self.wide.T).tanh_()


class Residual(Map):
    """``ResidualCell`` on images (B, C, H, W), channels_last, as it is trained: under bfloat16 autocast."""

    def __init__(self, shape: Sequence[int], device: str, kernel: str) -> None:
        torch.manual_seed(0)
        self.cell = deqfast.ResidualCell(shape[1], kernel=kernel).to(device)
        convert_conv2d_weight_memory_format(self.cell, torch.channels_last)
        self.c = torch.randn(*shape).to(device, memory_format=torch.channels_last)

    def value(self, z: Tensor) -> Tensor:
        """f(z) in float32, for z of any layout, because torchdeq continues with the dtype and layout of f's value."""
        return self.cell(z.contiguous(memory_format=torch.channels_last), self.c).float()

    @torch.no_grad()
    def residual(self, z: Tensor) -> float:
        """Largest relative residual of the batch, in f's own precision."""
        with autocast(z.device.type, "bf16"):
            return relative_residual(self.value(z), z.float())


def make_map(kind: str, shape: Sequence[int], device: str, kernel: str) -> Any:
    """Map of this kind; `kernel`: for a residual cell's own ops."""
    if kind == "residual":
        return Residual(shape, device, kernel)
    return {"elementwise": Contraction, "fc": FullyConnected}[kind](*shape, device)


class MapCell(nn.Module):
    """Cell of a map; x is the map's c."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        return self.f(z)
