"""Linear cell, and the functions that it shares with the fully connected one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_count
from ..engine.runners.single_launch import solve_cell
from ..solution import Solution
from ..solvers import Solver
from ..torch_internals.plain import fusible, is_plain

Device = torch.device | str | None

# Spectral radius at initialisation: clearly contractive, far from trivial.
_INITIAL_RADIUS = 0.5


def check_features(name: str, tensor: Tensor, width: int, others: str = "") -> None:
    """Raise ValueError or TypeError unless `tensor` is a floating-point one of shape (B, width) and `others`."""
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    if tensor.dim() != 2 + others.count(",") or tensor.shape[1] != width:
        raise ValueError(f"{name} must have shape (B, {width}{others}), got {tuple(tensor.shape)}")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError unless `dtype` is None or a floating-point type."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point type or None, got {dtype!r}")


def recurrent_weight(features: int, device: Device, dtype: torch.dtype | None) -> nn.Parameter:
    """Random weight (features, features) of spectral radius about 0.5."""
    # The eigenvalues of a Gaussian matrix of variance 1/n fill the unit disc (circular law).
    weight = torch.randn(features, features, device=device, dtype=dtype)
    return nn.Parameter(weight * _INITIAL_RADIUS / math.sqrt(features))


class LinearCell(nn.Module):
    """Linear cell f(z, x) = W z + x. Source: Sun and Shi (NeurIPS 2024), section 3.

    Args:
        features: D, the width of z and x, both (B, D).
        device, dtype: of the parameters, as for torch's modules, a floating-point type; None: torch's defaults.

    Raises:
        TypeError, ValueError: `features` is not an integer of at least 1; in a call, x has another shape.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.LinearCell(5), deqfast.Broyden(rtol=1e-6))
        >>> x = torch.randn(2, 5)
        >>> exact = torch.linalg.solve(torch.eye(5) - block.cell.weight, x.T).T
        >>> torch.allclose(block(x), exact, atol=1e-4)
        True
    """

    def __init__(self, features: int, *, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        check_count("features", features)
        check_dtype(dtype)
        self.weight = recurrent_weight(features, device, dtype)

    @fusible
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), (B, features) as z and x."""
        check_features("x", x, self.weight.shape[0])
        return F.linear(z, self.weight) + x

    def fixed_point(self, x: Tensor, z0: Tensor, solver: Solver, kernel: str) -> Solution | None:
        """Solve in one launch, see ``deqfast.fc_fixed_point``; None if only the ordinary loop can solve it."""
        check_features("x", x, self.weight.shape[0])
        return solve_cell(self.weight, lambda: x, "identity", z0, solver, kernel) if is_plain(self) else None
