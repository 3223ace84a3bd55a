"""Fixed-point problems with a residual in float64: a seeded synthetic suite, and the cells of trained models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .maps import relative_residuals

SUITE_BATCH = 32
SCALES = (1.0, 0.01)  # of the injection: an accelerated method should not depend on it
WELL_INSIDE = 0.3  # eigenvalue of the maps whose difficulty does not come from their eigenvalues


@dataclass(frozen=True)
class Problem:
    """z = f(z), sample by sample, from z0 (B, ...).

    exact: f in float64, with the same float32 weights.
    """

    name: str
    f: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    z0: Tensor

    @property
    def dim(self) -> int:
        """Numbers in the state of a sample."""
        return self.z0[0].numel()

    @torch.no_grad()
    def residuals(self, z: Tensor) -> Tensor:
        """|f(z) - z| / |f(z)| of every sample (B,), in float64."""
        z = z.double()
        return relative_residuals(self.exact(z), z)


def gaussian(dim: int, generator: torch.Generator, radius: float) -> Tensor:
    """Gaussian matrix, whose eigenvalues fill the disc of this radius (circular law)."""
    weight = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return weight * (radius / torch.linalg.eigvals(weight).abs().max())


def symmetric(eigenvalues: Tensor, generator: torch.Generator) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    dim = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    return basis @ (eigenvalues[:, None] * basis.T)


def even(dim: int, generator: torch.Generator, radius: float) -> Tensor:
    """Symmetric matrix with eigenvalues evenly spread over [-radius, radius]."""
    return symmetric(torch.linspace(-radius, radius, dim, dtype=torch.float64), generator)


def clustered(dim: int, generator: torch.Generator, radius: float) -> Tensor:
    """Symmetric matrix; the distances of its eigenvalues from 1 are log-uniform from 1 - radius to 1 + radius."""
    distances = torch.logspace(math.log10(1 - radius), math.log10(1 + radius), dim, dtype=torch.float64)
    return symmetric(1 - distances, generator)


def decaying(dim: int, generator: torch.Generator, radius: float, smallest: float = 1e-4) -> Tensor:
    """Symmetric matrix with eigenvalues of both signs that decay geometrically from `radius` to `smallest`."""
    sizes = radius * (smallest / radius) ** torch.linspace(0, 1, dim, dtype=torch.float64)
    return symmetric(sizes * (-1.0) ** torch.arange(dim), generator)


def triangular(dim: int, generator: torch.Generator, coupling: float) -> Tensor:
    """Triangular matrix; all eigenvalues are ``WELL_INSIDE``, but its norm exceeds 1 and iterates grow at first."""
    noise = torch.randn(dim, dim, generator=generator, dtype=torch.float64).triu(1)
    return WELL_INSIDE * torch.eye(dim, dtype=torch.float64) + noise * (coupling / math.sqrt(dim))


def chains(dim: int, generator: torch.Generator, coupling: float, length: int = 8) -> Tensor:
    """Jordan-like blocks of this length in a random orthonormal basis; all eigenvalues are ``WELL_INSIDE``."""
    links = torch.full((dim - 1,), coupling, dtype=torch.float64)
    links[length - 1 :: length] = 0
    block = WELL_INSIDE * torch.eye(dim, dtype=torch.float64) + torch.diag(links, 1)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    return basis @ block @ basis.T


def outliers(dim: int, generator: torch.Generator, bulk: float, values: tuple[float, ...]) -> Tensor:
    """A Gaussian matrix of radius `bulk` with single eigenvalues near `values` far outside of it."""
    weight = gaussian(dim, generator, bulk)
    basis = torch.linalg.qr(torch.randn(dim, len(values), generator=generator, dtype=torch.float64))[0]
    return weight + basis @ (torch.tensor(values, dtype=torch.float64)[:, None] * basis.T)


# Name -> dimension, weight from (dimension, generator), activation.
MAPS: dict[str, tuple[int, Callable[[int, torch.Generator], Tensor], Callable[[Tensor], Tensor] | None]] = {
    "gaussian 0.5": (1024, partial(gaussian, radius=0.5), None),
    "gaussian 0.7": (512, partial(gaussian, radius=0.7), None),
    "even 0.9": (512, partial(even, radius=0.9), None),
    "clustered 0.9": (256, partial(clustered, radius=0.9), None),
    "decaying 0.95": (1024, partial(decaying, radius=0.95), None),
    "decaying 0.99": (256, partial(decaying, radius=0.99), None),
    "triangular": (256, partial(triangular, coupling=1.0), None),
    "chains": (512, partial(chains, coupling=0.6), None),
    "outliers inside": (512, partial(outliers, bulk=0.5, values=(0.97, -0.95, 0.9, -0.85)), None),
    "outliers outside": (200, partial(outliers, bulk=0.5, values=(-2.5, -1.5, 0.95)), None),
    "tanh 0.8": (1024, partial(gaussian, radius=0.8), torch.tanh),
    "tanh decaying 0.99": (512, partial(decaying, radius=0.99), torch.tanh),
}


def fully_connected(
    name: str, weight: Tensor, bias: Tensor, activation: Callable[..., Tensor] | None = None
) -> Problem:
    """f(z) = act(W z + b) in float32 from 0; b (B, D)."""
    weight, bias = weight.float(), bias.float()

    def f(z: Tensor) -> Tensor:
        linear = F.linear(z, weight.to(z.dtype)) + bias.to(z.dtype)
        return activation(linear) if activation else linear

    return Problem(name, f, f, torch.zeros_like(bias))


def suite(name: str, batch: int = SUITE_BATCH) -> list[Problem]:
    """The two problems of a map of ``MAPS``, with injections of both ``SCALES``; 24 in all."""
    dim, weight_of, activation = MAPS[name]
    generator = torch.Generator().manual_seed([*MAPS].index(name))
    weight = weight_of(dim, generator)
    bias = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return [fully_connected(f"{name}, b {scale:g}", weight, scale * bias, activation) for scale in SCALES]


def cell_problem(name: str, cell: nn.Module, injection: Tensor, z0: Tensor) -> Problem:
    """Fixed-point problem of a cell (z, x) -> z with its present weights."""
    cell.requires_grad_(False)
    exact_cell, exact_injection = copy.deepcopy(cell).double(), injection.double()
    return Problem(name, lambda z: cell(z, injection), lambda z: exact_cell(z, exact_injection), z0)
