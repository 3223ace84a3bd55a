"""The fully connected cell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_choice, check_count
from ..engine.runners.single_launch import solve_cell
from ..ops import ACTIVATIONS
from ..ops.fc import reference
from ..solution import Solution
from ..solvers import Solver
from ..torch_internals.plain import fusible, is_plain
from .linear import Device, check_dtype, check_features, recurrent_weight

_ACTIVATIONS = dict(zip(ACTIVATIONS, reference.ACTIVATIONS, strict=True))


class FCCell(nn.Module):
    """Fully connected cell f(z, x) = act(W z + U x + b).

    Args:
        in_features: width of x, (B, in_features).
        features: width of z, (B, features).
        activation: "identity", "relu", "tanh" or "gelu".
        bias: whether there is a b.
        device, dtype: of the parameters, as for torch's modules, a floating-point type; None: torch's defaults.

    Raises:
        TypeError, ValueError: an argument is not as above, or x has the wrong shape in a call.

    Examples:
        With ``Picard`` the whole solve is one launch, see ``deqfast.fc_fixed_point``:

        >>> cell = deqfast.FCCell(in_features=3, features=8, activation="tanh")
        >>> block = deqfast.DEQBlock(cell, deqfast.Picard(rtol=1e-4, max_iter=50))
        >>> block(torch.randn(4, 3)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        activation: str = "tanh",
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_count("in_features", in_features)
        check_count("features", features)
        check_dtype(dtype)
        check_choice("activation", activation, tuple(_ACTIVATIONS))
        self.weight = recurrent_weight(features, device, dtype)
        self.injection = nn.Linear(in_features, features, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def initial_state(self, x: Tensor) -> Tensor:
        """Zeros (B, features) in the dtype of x."""
        check_features("x", x, self.injection.in_features)
        return x.new_zeros(x.shape[0], self.weight.shape[0])

    @fusible
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), (B, features) for z (B, features) and x (B, in_features)."""
        check_features("x", x, self.injection.in_features)
        return _ACTIVATIONS[self.activation](F.linear(z, self.weight) + self.injection(x))

    def fixed_point(self, x: Tensor, z0: Tensor, solver: Solver, kernel: str) -> Solution | None:
        """Solve in one launch, see ``deqfast.fc_fixed_point``; None if only the ordinary loop can solve it."""
        check_features("x", x, self.injection.in_features)
        arguments = self.weight, lambda: self.injection(x), self.activation, z0, solver, kernel
        return solve_cell(*arguments) if is_plain(self) else None

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
