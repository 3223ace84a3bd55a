"""The subhomogeneous cell, fully connected or convolutional: plain iteration converges for any weights from any start.

On positive vectors d(y, z) = max_i |log y_i - log z_i| is a complete metric (Thompson, Proc. AMS 14, 1963). Let f keep
the order of vectors, and let f(t z) >= t^m f(z) for 0 < t <= 1, with m < 1. Such maps are subhomogeneous (Sittoni and
Tudisco, ICML 2024, arXiv 2403.00720). Because exp(-d) y <= z <= exp(d) y, d(f(y), f(z)) <= m d(y, z). Banach's theorem
then gives one fixed point, and the rate m.

Here f(z) = sigmoid(W z + c - s) with W >= 0, c >= 0 and s = 1 + m + log m. If u = W z + c, then

    d log f(t z) / d log t at t = 1  <=  u (1 - sigmoid(u - s)) = u / (1 + exp(u - s))  <=  m, reached at u = 1 + m

If s <= 0, f is concave as in Gabor, Piotrowski and Cavalcante (ICML 2024, arXiv 2402.04029), and m <= 0.28. The shift
gives z* a wider range. W of both signs would lose the guarantee: z = tanh(W z) + 1.2 with W = 10 [[1, -1], [-1, 1]] has
two attracting solutions, (2.2, 0.2) and (0.2, 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_count, check_number
from .linear import Device, check_dtype, check_features

# Sum over a row of W at the start: W z then moves the sigmoid where it is steepest.
_INITIAL_SUM = 2.0


class SubhomogeneousCell(nn.Module):
    """Cell f(z, x) = sigmoid(W max(z, 0) + c - s), fully connected or convolutional, that ``Picard`` always solves.

    W = |A| and c = softplus(U x + b) are not negative, and s = 1 + degree + log(degree). For any parameters and any x
    there is exactly one fixed point z*, with entries from sigmoid(-s) to 1. Let d(y, z) = max |log y - log z|:

        d(f(y), f(z)) <= degree d(y, z) for positive y and z
        d(f^k(z0), z*) <= degree^(k-1) log(1 + exp(s)) after k evaluations from any z0

    From zeros, evaluation k has a relative residual of at most degree^(k-2) log(1 + exp(s)): 1e-3 takes at most 74
    evaluations at degree 0.9, and 13 at 0.5. The Jacobian at z* has a spectral radius of at most `degree`, so that the
    series of ``Neumann`` and ``Implicit(Picard(...))`` converge.

    This holds for plain iteration. ``Anderson`` and ``Broyden`` usually need fewer evaluations, without the guarantee.
    Rounding limits what can be reached, and U x + b must not be NaN. Source: Sittoni and Tudisco, ICML 2024.

    Args:
        in_features: width of x, (B, in_features), or channels of x, (B, in_features, H, W).
        features: width or channels of z, (B, features) or (B, features, H, W).
        kernel_size: None: W and U are matrices. Else both are convolutions of this odd size, padded with zeros.
        degree: m, greater than 0 and less than 1. A greater one lets z* depend more on W, and takes more evaluations.
        bias: whether there is a b.
        device, dtype: of the parameters, as for torch's modules, a floating-point type; None: torch's defaults.

    Attributes:
        A: parameter (features, features), or (features, features, kernel_size, kernel_size).

    Raises:
        TypeError, ValueError: an argument is not as above, or x has the wrong shape in a call.

    Examples:
        >>> cell = deqfast.SubhomogeneousCell(in_features=3, features=8, kernel_size=3)
        >>> cell.A.data *= 100  # weights for which most cells would not converge
        >>> block, x = deqfast.DEQBlock(cell, deqfast.Picard(max_iter=74)), torch.randn(4, 3, 6, 6)
        >>> _, solution = block(x, return_solution=True)
        >>> bool(solution.converged.all())
        True
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        kernel_size: int | None = None,
        degree: float = 0.9,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_count("in_features", in_features)
        check_count("features", features)
        check_number("degree", degree, 0, low_open=True)
        if degree >= 1:
            raise ValueError(f"degree must be less than 1, got {degree}")
        check_dtype(dtype)
        self.in_features, self.degree, self.shift = in_features, degree, 1 + degree + math.log(degree)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = [features, features]
        self.padding = None
        self.injection: nn.Module
        if kernel_size is None:
            self.injection = nn.Linear(in_features, features, bias, **where)
        else:
            check_count("kernel_size", kernel_size)
            if kernel_size % 2 == 0:
                raise ValueError(f"kernel_size must be odd, got {kernel_size}")
            self.padding = kernel_size // 2
            self.injection = nn.Conv2d(in_features, features, kernel_size, padding=self.padding, bias=bias, **where)
            shape += [kernel_size, kernel_size]
        mean = _INITIAL_SUM / math.prod(shape[1:])
        self.A = nn.Parameter(torch.randn(shape, **where) * (mean * math.sqrt(math.pi / 2)))

    def initial_state(self, x: Tensor) -> Tensor:
        """Zeros (B, features) or (B, features, H, W) in the dtype of x."""
        self._check(x)
        return x.new_zeros(x.shape[0], len(self.A), *x.shape[2:])

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), like z."""
        self._check(x)
        z, weight, c = z.relu(), self.A.abs(), F.softplus(self.injection(x))
        product = F.linear(z, weight) if self.padding is None else F.conv2d(z, weight, padding=self.padding)
        return torch.sigmoid(product + c - self.shift)

    def _check(self, x: Tensor) -> None:
        check_features("x", x, self.in_features, "" if self.padding is None else ", H, W")

    def extra_repr(self) -> str:
        return f"degree={self.degree}"
