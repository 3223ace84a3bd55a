"""Problems whose solutions are known in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class FixedPoint:
    """Problem z = f(z), sample by sample, from z0 (B, D).

    solution: the fixed point in float64. amplification: bound on |z - solution| / |f(z) - z|.
    """

    f: Callable[[Tensor], Tensor]
    z0: Tensor
    solution: Tensor
    amplification: float


def _random(batch: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return weight, torch.randn(batch, dim, generator=generator, dtype=torch.float64)


def _affine(weight: Tensor, bias: Tensor, dtype: torch.dtype, device: str) -> FixedPoint:
    w, b = weight.to(device, dtype), bias.to(device, dtype)
    inverse = torch.linalg.inv(torch.eye(len(weight), dtype=torch.float64) - w.cpu().double())
    return FixedPoint(
        f=lambda z: z @ w.T + b,
        z0=torch.zeros_like(b),
        solution=b.cpu().double() @ inverse.T,
        amplification=float(torch.linalg.matrix_norm(inverse, 2)),
    )


def linear(
    batch: int = 2,
    dim: int = 12,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    rho: float = 0.5,
) -> FixedPoint:
    """Problem f(z) = W z + b with W Gaussian of spectral radius `rho`."""
    weight, bias = _random(batch, dim, seed)
    return _affine(weight * (rho / torch.linalg.eigvals(weight).abs().max()), bias, dtype, device)


def non_normal(
    batch: int = 2, dim: int = 12, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> FixedPoint:
    """Problem f(z) = W z + b with W triangular: eigenvalues 0.3, but a norm above 2, so that iterates grow at first."""
    weight, bias = _random(batch, dim, seed)
    return _affine(0.3 * torch.eye(dim) + weight.triu(1) * (1.8 / math.sqrt(dim)), bias, dtype, device)


def tanh(
    batch: int = 2, dim: int = 12, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> FixedPoint:
    """Problem f(z) = tanh(W z + b) with W Gaussian of spectral norm about 1.4: a fully connected cell."""
    weight, bias = _random(batch, dim, seed)
    w, b = (weight * (0.7 / math.sqrt(dim))).to(device, dtype), bias.to(device, dtype)
    exact_w, exact_b = w.cpu().double(), b.cpu().double()
    identity, z = torch.eye(dim, dtype=torch.float64), torch.zeros_like(exact_b)
    for _ in range(50):  # Newton's method
        value = torch.tanh(z @ exact_w.T + exact_b)
        jacobian = identity - (1 - value**2)[:, :, None] * exact_w
        z = z + torch.linalg.solve(jacobian, value - z)
    amplification = 2 * float(torch.linalg.matrix_norm(torch.linalg.inv(jacobian), 2).max())  # 2: near, not at, z
    return FixedPoint(lambda x: torch.tanh(x @ w.T + b), torch.zeros_like(b), z, amplification)


def sawtooth(
    batch: int = 2, dim: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> FixedPoint:
    """Sawtooth DEQ of Wu et al. (NeurIPS 2024), theorem 1, with z_t = relu(2 T^(t-1)(x) - 1), T the tent map.

    f(z)_t = relu(2^t x - 1 - sum_{i<t} 2^(t-i+1) z_i). The x are multiples of 1/1024, for which all of it is exact.
    Plain iteration from 0 ends after at most `dim` steps.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 1024, (batch,), generator=generator).double() / 1024
    t = torch.arange(1, dim + 1, dtype=torch.float64)
    weight = -(2.0 ** (t[:, None] - t + 1)).tril(-1)
    tent, teeth = x, []
    for _ in range(dim):
        teeth.append((2 * tent - 1).clamp_min(0))
        tent = torch.minimum(2 * tent, 2 - 2 * tent)
    w, b = weight.to(device, dtype), (x[:, None] * 2**t - 1).to(device, dtype)
    # relu's slopes lie in [0, 1], so the inverse for |W| bounds all others.
    inverse = torch.linalg.inv(torch.eye(dim, dtype=torch.float64) - weight.abs())
    amplification = float(torch.linalg.matrix_norm(inverse, 2))
    return FixedPoint(lambda z: torch.relu(z @ w.T + b), torch.zeros_like(b), torch.stack(teeth, dim=1), amplification)


# name -> problem; all take batch, dim, dtype, device and seed.
PROBLEMS: dict[str, Callable[..., FixedPoint]] = {
    "linear-0.5": linear,
    "linear-0.9": partial(linear, rho=0.9),
    "linear-0.95": partial(linear, rho=0.95),
    "non-normal": non_normal,
    "tanh": tanh,
    "sawtooth": sawtooth,
}
