"""The maps f whose fixed points the benchmarks solve for, with their residuals in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = 1e-30  # a tolerance no solve meets, so that all make the same number of iterations
FC_RADIUS = 0.9  # of W: through tanh a contraction, but none that reaches its fixed point to the last bit


def relative_residual(f: Tensor, z: Tensor) -> float:
    """Largest |f - z| / |f| of the batch."""
    f, z = f.flatten(1), z.flatten(1)
    return float(((f - z).norm(dim=1) / f.norm(dim=1)).max())


class Contraction:
    """f(z) = c + lambda z, whose fixed point is known; counts its calls."""

    def __init__(self, batch: int, dim: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.c = torch.randn(batch, dim, generator=generator).to(device)
        self.eigenvalues = torch.linspace(-0.9, 0.95, dim).to(device)
        self.calls = 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.addcmul(self.c, z, self.eigenvalues)

    def residual(self, z: Tensor) -> float:
        """Largest relative residual of the batch, in float64."""
        z = z.double()
        return relative_residual(self.c.double() + z * self.eigenvalues.double(), z)


class FullyConnected:
    """f(z) = tanh(W z + c) with W Gaussian; counts its calls. W may be bfloat16 and is multiplied in float32."""

    def __init__(self, batch: int, dim: int, device: str = "cpu", weight_dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(dim)
        weight = FC_RADIUS * torch.randn(dim, dim, generator=generator) / dim**0.5
        self.weight = weight.to(device, weight_dtype)
        self.wide = self.weight.float()
        self.c = torch.randn(batch, dim, generator=generator).to(device)
        self.calls = 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.addmm(self.c, z, self.wide.T).tanh_()

    def residual(self, z: Tensor) -> float:
        """Largest relative residual of the batch, in float64."""
        z = z.double()
        return relative_residual(torch.tanh(F.linear(z, self.wide.double()) + self.c.double()), z)


MAPS = {"elementwise": Contraction, "fc": FullyConnected}
