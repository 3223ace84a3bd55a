"""The monotone operator cell, whose fixed point always exists and is unique."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_choice, check_count, check_number
from ..engine.runners.single_launch import solve_cell
from ..solution import Solution
from ..solvers import Solver
from ..torch_internals.dynamo import outside_exports
from ..torch_internals.plain import fusible, is_plain
from ..torch_internals.weights import OncePerSolve
from .linear import Device, check_dtype, check_features, recurrent_weight

SPLITTINGS = ("peaceman-rachford", "forward-backward")
# Proximal operators of alpha times one function, the same for every alpha. tanh, for example, is not one.
PROXIMAL = ("relu", "identity")


class MonotoneCell(nn.Module):
    """Monotone operator cell: z = act(W z + U x + b) with exactly one solution, whatever the parameters are.

    W = (1 - m) I - A^T A + B - B^T makes M = I - W strongly monotone, <z, M z> >= m |z|^2. Let c = U x + b, let L be
    the spectral norm of M, and let u = z - alpha (M z - c). The map f is one step of a splitting:

        forward-backward:   f(z) = act(u); a step multiplies distances by at most sqrt(1 - (m / L)^2)
        Peaceman-Rachford:  f(z) = V (2 act(u) - u + alpha c) with V = (I + alpha M)^-1; a step multiplies distances
                            between the V^-1 z by at most sqrt((L - m) / (L + m))

    Peaceman-Rachford takes two products with a matrix and far fewer evaluations. Its state is the output of V, because
    the fixed point of u is not z*. Forward-backward takes one product, and with ``Picard`` one launch per solve, as
    ``FCCell``. Its residual is about alpha times the residual of the equation: use a smaller rtol. The matrices are
    computed once per solve. Source: Winston and Kolter, NeurIPS 2020, section 3.

    Args:
        in_features: width of x, (B, in_features).
        features: D, the width of z, (B, features).
        splitting: "peaceman-rachford" or "forward-backward".
        activation: "relu" or "identity".
        margin: m, greater than 0.
        alpha: step, greater than 0. Forward-backward contracts below 2 m / L^2, Peaceman-Rachford for any. None: each
            solve computes m / L^2 or 1 / L from A and B, with an upper bound of L.
        bias: whether there is a b.
        device, dtype: of the parameters, as for torch's modules, a floating-point type; None: torch's defaults.

    Attributes:
        A, B: parameters (D, D), to be changed in place.
        weight: W.

    Raises:
        TypeError, ValueError: an argument is not as above, or x has the wrong shape in a call.

    Examples:
        >>> cell = deqfast.MonotoneCell(in_features=3, features=8)
        >>> block = deqfast.DEQBlock(cell, deqfast.Anderson(rtol=1e-5, max_iter=50), adjoint="implicit")
        >>> x = torch.randn(4, 3)
        >>> z = block(x)
        >>> torch.allclose(z, torch.relu(z @ cell.weight.T + cell.injection(x)), atol=1e-3)
        True
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        splitting: str = "peaceman-rachford",
        activation: str = "relu",
        margin: float = 1.0,
        alpha: float | None = None,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_count("in_features", in_features)
        check_count("features", features)
        check_choice("splitting", splitting, SPLITTINGS)
        check_choice("activation", activation, PROXIMAL)
        check_number("margin", margin, 0, low_open=True)
        if alpha is not None:
            check_number("alpha", alpha, 0, low_open=True)
        check_dtype(dtype)
        self.splitting, self.activation = splitting, activation
        a, b = recurrent_weight(features, device, dtype), recurrent_weight(features, device, dtype)
        self.matrices = _Matrices(a, b, splitting == "peaceman-rachford", margin, alpha)
        self.injection = nn.Linear(in_features, features, bias=bias, device=device, dtype=dtype)

    @property
    def A(self) -> nn.Parameter:
        """Parameter (D, D) of the symmetric part of W."""
        return self.matrices.A

    @property
    def B(self) -> nn.Parameter:
        """Parameter (D, D) of the antisymmetric part of W."""
        return self.matrices.B

    @property
    def weight(self) -> Tensor:
        """W (D, D), computed at every call."""
        with torch.autocast(self.A.device.type, enabled=False):  # as for the matrices of a solve
            operator = self.matrices.operator(self.A, self.B)
        return torch.eye(len(operator), dtype=operator.dtype, device=operator.device) - operator

    def initial_state(self, x: Tensor) -> Tensor:
        """Zeros (B, features) in the dtype of x."""
        check_features("x", x, self.injection.in_features)
        return x.new_zeros(x.shape[0], len(self.A))

    @fusible
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), (B, features) for z (B, features) and x (B, in_features)."""
        check_features("x", x, self.injection.in_features)
        explicit, resolvent, alpha = self.matrices()
        offset = alpha * self.injection(x)
        u = F.linear(z, explicit) + offset
        value = torch.relu(u) if self.activation == "relu" else u
        return value if resolvent is None else F.linear(2 * value - u + offset, resolvent)

    def fixed_point(self, x: Tensor, z0: Tensor, solver: Solver, kernel: str) -> Solution | None:
        """Solve in one launch, see ``deqfast.fc_fixed_point``; None if only the ordinary loop can solve it."""
        check_features("x", x, self.injection.in_features)
        if self.splitting != "forward-backward" or not is_plain(self):
            return None
        explicit, _, alpha = self.matrices()
        return solve_cell(explicit, lambda: alpha * self.injection(x), self.activation, z0, solver, kernel)

    def extra_repr(self) -> str:
        return f"splitting={self.splitting!r}, activation={self.activation!r}"


class _Matrices(OncePerSolve):
    """Parameters A and B, and the matrices of a solve: I - alpha M, V for Peaceman-Rachford else None, and alpha."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, has_resolvent: bool, margin: float, alpha: float | None):
        super().__init__()
        self.A, self.B = a, b
        self.has_resolvent, self.margin, self.alpha = has_resolvent, margin, alpha

    def compute(self) -> tuple[Tensor, Tensor | None, Tensor]:
        a, b = self.A, self.B
        with outside_exports(torch.autocast(a.device.type, enabled=False)):
            wide = torch.promote_types(a.dtype, torch.float32)  # LAPACK inverts no narrower dtype
            operator = self.operator(a.to(wide), b.to(wide))
            eye = torch.eye(len(a), dtype=wide, device=a.device)
            # z* does not depend on alpha, and needs no gradient through it.
            bound = norm_bound(operator.detach())
            best = 1 / bound if self.has_resolvent else self.margin / bound.square()
            alpha = best if self.alpha is None else torch.full_like(best, self.alpha)
            # Checks would wait for the device. They are not needed: I + alpha M cannot be singular.
            resolvent = torch.linalg.inv_ex(eye + alpha * operator).inverse.to(a.dtype) if self.has_resolvent else None
            # With dimensions, so that under autocast its products have the dtype of A.
            return (eye - alpha * operator).to(a.dtype), resolvent, alpha.expand(1, len(a)).to(a.dtype)

    def operator(self, a: Tensor, b: Tensor) -> Tensor:
        """M = m I + A^T A - B + B^T."""
        return self.margin * torch.eye(len(a), dtype=a.dtype, device=a.device) + a.T @ a - b + b.T

    def extra_repr(self) -> str:
        return f"margin={self.margin}, alpha={self.alpha}"


def norm_bound(matrix: Tensor) -> Tensor:
    """Upper bound of the spectral norm of M (D, D), at most D^(1/64) times it: the Frobenius |(M^T M)^16|^(1/32)."""
    largest = matrix.abs().max()
    matrix = matrix / largest  # else squares would leave the dtype's range; so would the squares of `power` below
    power, bound = matrix.T @ matrix, torch.ones_like(largest)
    for exponent in (1, 1 / 2, 1 / 4, 1 / 8):
        size = torch.linalg.vector_norm(power)
        power = torch.linalg.matrix_power(power / size, 2)
        bound = bound * size**exponent
    return largest * (bound * torch.linalg.vector_norm(power) ** (1 / 16)).sqrt()
