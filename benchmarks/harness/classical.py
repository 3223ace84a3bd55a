"""Classical problems in float64: 23 systems of equations F(x) = 0.

They have the formulas, dimensions and starts of SciML's NonlinearProblemLibrary.jl (DiffEqProblemLibrary.jl
3a01732). They go back to Moré, Garbow and Hillstrom, ACM TOMS 7 (1981), by way of Burkardt's ``test_nonlin``. SciML
differs from ``test_nonlin`` in four of them, and SciML's form is kept, so that its published results compare:

- 6: factors j and k stand for j - 1 and k - 1, and the second equation has x2 - x2^2 for x2 - x1^2.
- 7: the start is (2 i - n) / (n + 1) instead of (2 i - 1 - n) / (n + 1).
- 10: the second sum begins at j = k instead of k + 1, so that the term j = k counts twice.
- 23: the nodes are i / n instead of (2 i - 1) / (2 n).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]  # of rows (B, n)


@dataclass(frozen=True)
class Classical:
    """F of F(x) = 0 for rows (B, n) in float64, where a solve starts (n,), and a root if one is known."""

    name: str
    map: Map
    start: Tensor
    solution: Tensor | None = None


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def constant(dim: int, value: float) -> Tensor:
    return torch.full((dim,), value, dtype=torch.float64)


def count(dim: int) -> Tensor:
    """1, 2, ..., dim."""
    return torch.arange(1, dim + 1, dtype=torch.float64)


def columns(function: Callable[..., tuple[Tensor, ...]]) -> Map:
    """The map of rows of a function that takes the unknowns one by one and returns the equations."""
    return lambda x: torch.stack(function(*x.unbind(-1)), -1)


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([1 - x[:, :1], 10 * (x[:, 1:] - x[:, :-1] ** 2)], 1)


def powell_singular(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2


def powell_badly_scaled(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return 1e4 * a * b - 1, torch.exp(-a) + torch.exp(-b) - 1.0001


def wood(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    first, second = b - a * a, d - c * c
    return (
        -200 * a * first - (1 - a),
        200 * first + 20.2 * (b - 1) + 19.8 * (d - 1),
        -180 * c * second - (1 - c),
        180 * second + 20.2 * (d - 1) + 19.8 * (b - 1),
    )


def helical_valley(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    angle = torch.where(a == 0, 0.25 * b.sign(), torch.atan(b / a) / (2 * math.pi) + 0.5 * (a < 0))
    return 10 * (c - 10 * angle), 10 * (torch.hypot(a, b) - 1), c


def watson(x: Tensor) -> Tensor:
    t, k = (count(29) / 29)[:, None], count(x.shape[1])
    powers = t ** (k - 1)  # (29, n)
    inner = x @ powers.T
    slopes = x[:, 1:] @ (k[1:] * powers[:, :-1]).T
    total = ((slopes - inner**2 - 1)[..., None] * (k - 2 * t * inner[..., None]) * powers / t).sum(1)
    a, b = x[:, 0], x[:, 1]
    return total + torch.stack([a * (3 - 2 * b + 2 * a**2), b * (1 - b) - 1], 1)


def chebyquad(x: Tensor) -> Tensor:
    means, before, now = [], torch.ones_like(x), x
    for i in range(1, x.shape[1] + 1):
        means.append(now.mean(1) + (1 / (i * i - 1) if i % 2 == 0 else 0))
        before, now = now, 2 * x * now - before
    return torch.stack(means, 1)


def brown_almost_linear(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1] + x.sum(1, keepdim=True) - (x.shape[1] + 1), x.prod(1, keepdim=True) - 1], 1)


def nodes(dim: int) -> Tensor:
    """Inside of [0, 1], as the discrete problems have them."""
    return count(dim) / (dim + 1)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right one of every unknown; 0 outside."""
    padded = torch.nn.functional.pad(x, (1, 1))
    return padded[:, :-2], padded[:, 2:]


def discrete_boundary_value(x: Tensor) -> Tensor:
    left, right = neighbours(x)
    return 2 * x - left - right + 0.5 * (x + nodes(x.shape[1]) + 1) ** 3 / (x.shape[1] + 1) ** 2


def discrete_integral(x: Tensor) -> Tensor:
    t = nodes(x.shape[1])
    kernel = torch.outer(1 - t, t).tril() + torch.outer(t, 1 - t).triu()
    return x + (x + t + 1) ** 3 @ kernel.T / (2 * (x.shape[1] + 1))


def trigonometric(x: Tensor) -> Tensor:
    k = count(x.shape[1])
    return x.shape[1] - x.cos().sum(1, keepdim=True) + k * (1 - x.cos()) - x.sin()


def variably_dimensioned(x: Tensor) -> Tensor:
    k = count(x.shape[1])
    total = (k * (x - 1)).sum(1, keepdim=True)
    return x - 1 + k * total * (1 + 2 * total**2)


def broyden_tridiagonal(x: Tensor) -> Tensor:
    left, right = neighbours(x)
    return (3 - 2 * x) * x + 1 - left - 2 * right


def broyden_banded(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)
    band = ones.triu(-5).tril(1) - torch.eye(x.shape[1], dtype=x.dtype)
    return x * (2 + 5 * x**2) + 1 - (x * (1 + x)) @ band.T


def matrix_square_root(x: Tensor) -> Tensor:
    """X X = A, A with 1e-4 on the diagonal and a 1 next to its first element."""
    side = math.isqrt(x.shape[1])
    target = 1e-4 * torch.eye(side, dtype=x.dtype)
    target[0, 1] = 1
    root = x.unflatten(1, (side, side))
    return (root @ root - target).flatten(1)


def sample_18(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    def over(value: Tensor, by: Tensor) -> Tensor:
        return torch.where(by == 0, 0, value / by)

    return over(b**2 * (1 - torch.exp(-a * a)), a), over(a * (1 - torch.exp(-b * b)), b)


def chandrasekhar(x: Tensor) -> Tensor:
    nodes = count(x.shape[1]) / x.shape[1]
    return x - 1 / (1 - 0.9 * x @ (nodes[:, None] / (nodes[:, None] + nodes)).T / (2 * x.shape[1]))


def squares(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a + b - 3, a**2 + b**2 - 9


def freudenstein_roth(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a - b**3 + 5 * b**2 - 2 * b - 13, a + b**3 + b**2 - 14 * b - 29


def boggs(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a * a - b + 1, a - torch.cos(0.5 * math.pi * b)


PARABOLA = nodes(10) * (nodes(10) - 1)
EQUATIONS = (
    Classical("Generalized Rosenbrock", rosenbrock, numbers(-1.2, *[1] * 9), constant(10, 1)),
    Classical("Powell singular", columns(powell_singular), numbers(3, -1, 0, 1), constant(4, 0)),
    Classical("Powell badly scaled", columns(powell_badly_scaled), numbers(0, 1), numbers(1.098159329e-5, 9.106146739)),
    Classical("Wood", columns(wood), numbers(-3, -1, -3, -1), constant(4, 1)),
    Classical("Helical valley", columns(helical_valley), numbers(-1, 0, 0), numbers(1, 0, 0)),
    Classical("Watson", watson, constant(2, 0)),
    Classical("Chebyquad", chebyquad, numbers(0, 2 / 3), numbers(-(3**-0.5), 3**-0.5)),
    Classical("Brown almost linear", brown_almost_linear, constant(10, 0.5), constant(10, 1)),
    Classical("Discrete boundary value", discrete_boundary_value, PARABOLA),
    Classical("Discrete integral equation", discrete_integral, PARABOLA),
    Classical("Trigonometric", trigonometric, constant(10, 0.1), constant(10, 0)),
    Classical("Variably dimensioned", variably_dimensioned, 1 - count(10) / 10, constant(10, 1)),
    Classical("Broyden tridiagonal", broyden_tridiagonal, constant(10, -1)),
    Classical("Broyden banded", broyden_banded, constant(10, -1)),
    Classical("Hammarling 2 by 2", matrix_square_root, numbers(1, 0, 0, 1), numbers(0.01, 50, 0, 0.01)),
    Classical(
        "Hammarling 3 by 3",
        matrix_square_root,
        torch.eye(3, dtype=torch.float64).flatten(),
        numbers(0.01, 50, 0, 0, 0.01, 0, 0, 0, 0.01),
    ),
    Classical("Dennis and Schnabel", columns(squares), numbers(1, 5), numbers(0, 3)),
    Classical("Sample problem 18", columns(sample_18), numbers(2, 2), numbers(0, 0)),
    Classical("Sample problem 19", lambda x: x * (x**2).sum(1, keepdim=True), numbers(3, 3), numbers(0, 0)),
    Classical("x (x - 5)^2", lambda x: x * (x - 5) ** 2, numbers(1), numbers(5)),
    Classical("Freudenstein-Roth", columns(freudenstein_roth), numbers(0.5, -2), numbers(5, 4)),
    Classical("Boggs", columns(boggs), numbers(1, 0), numbers(0, 1)),
    Classical("Chandrasekhar H-equation", chandrasekhar, constant(10, 1)),
)
