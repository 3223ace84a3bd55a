"""What the tests and the benchmarks share: how accurate a result must be, and the problems that are solved.

The only place with tolerances. Errors are relative: the largest deviation over the largest exact entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..solution import Solution
from ..solvers import Anderson, Broyden, Picard, Solver

# A kernel may err twice as much as plain torch in its dtype, and by a few roundings where torch happens to be exact.
ACCURACY_FACTOR = 2.0
ACCURACY_UNITS = 8
# Two computations of one thing in different order: roundings that may add up.
ROUNDING_UNITS = 64
# Iterates of two algebraically equal methods in float64, where rounding is amplified from step to step.
ITERATES = 1e-10
# Gradients in float64: of solves converged to 1e-12, and against central differences.
GRADIENT = 1e-9
FINITE_DIFFERENCES = {"eps": 1e-5, "atol": 1e-7, "rtol": 1e-6}
# Anderson beside torchdeq's, whose absolute ridge of 1e-4 is the difference.
NEGLIGIBLE_RIDGE = 1e-6


def rounding(dtype: torch.dtype) -> float:
    """Relative difference allowed between two orders of the same computation in `dtype`."""
    return ROUNDING_UNITS * torch.finfo(dtype).eps


def solved(tol: float) -> float:
    """Relative difference allowed between two solves of one well-conditioned problem to the tolerance `tol`."""
    return 10 * tol


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """max |actual - exact| / max |exact|, in float64; zero if both are zero or empty."""
    a, e = actual.detach().cpu().double(), exact.detach().cpu().double()
    if not e.numel():
        return 0.0
    worst, scale = float((a - e).abs().max()), float(e.abs().max())
    return worst / scale if scale else (math.inf if worst else 0.0)


def _split_nonfinite(actual: Tensor, expected: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The finite entries, after asserting that shapes and all entries that are not finite agree."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    finite = torch.isfinite(e)
    assert torch.equal(torch.isfinite(a), finite), f"{name}: other entries are not finite than expected"
    torch.testing.assert_close(a[~finite], e[~finite], rtol=0, atol=0, equal_nan=True)
    return a[finite], e[finite]


def assert_close(actual: Any, expected: Any, tolerance: float, name: str = "value") -> None:
    """Assert a relative error of at most `tolerance` for tensors, or leaf by leaf for pytrees of them."""
    leaves, spec = pytree.tree_flatten(expected)
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    assert spec == actual_spec, f"{name}: structure {actual_spec}, expected {spec}"
    for i, (a, e) in enumerate(zip(actual_leaves, leaves, strict=True)):
        label = name if len(leaves) == 1 else f"{name}[{i}]"
        error = relative_error(*_split_nonfinite(a, e, label))
        assert error <= tolerance, f"{label}: relative error {error:.3g}, allowed {tolerance:.3g}"


def accuracy(
    actual: Tensor, plain: Tensor, exact: Tensor, name: str = "value", units: float = ACCURACY_UNITS
) -> tuple[float, float]:
    """Relative error of `actual`, and what the accuracy policy allows: see ``ACCURACY_FACTOR``.

    plain: the same from plain torch in the dtype of `actual`; exact: from float64. AssertionError where entries that
    are not finite differ.
    """
    reached = relative_error(*_split_nonfinite(actual, exact, name))
    ordinary = relative_error(*_split_nonfinite(plain, exact, name))
    return reached, ACCURACY_FACTOR * ordinary + units * torch.finfo(actual.dtype).eps


def assert_accurate(actual: Tensor, plain: Tensor, exact: Tensor, name: str = "value") -> None:
    """Assert that `actual` errs at most as ``accuracy`` allows."""
    reached, allowed = accuracy(actual, plain, exact, name)
    assert reached <= allowed, f"{name}: relative error {reached:.3g}, allowed {allowed:.3g}"


class Recorder:
    """An f that keeps copies of what it was called with and of what it returned."""

    def __init__(self, f: Callable[[Any], Any]):
        self.f = f
        self.arguments: list[Any] = []
        self.values: list[Any] = []

    def __call__(self, z: Any) -> Any:
        self.arguments.append(pytree.tree_map(torch.clone, z))
        value = self.f(z)
        self.values.append(pytree.tree_map(torch.clone, value))
        return value

    def __len__(self) -> int:
        return len(self.arguments)


# name -> constructor, with the default arguments of `Solver` first.
SOLVERS: dict[str, Callable[..., Solver]] = {
    "picard": Picard,
    "anderson": Anderson,
    "anderson-I": partial(Anderson, kind="I"),
    "broyden": Broyden,
    "broyden-bad": partial(Broyden, kind="bad"),
}


@dataclass(frozen=True)
class FixedPoint:
    """The problem z = f(z), sample by sample, from z0 (B, D).

    solution: the fixed point in float64. amplification: bound on |z - solution| / |f(z) - z|.
    """

    f: Callable[[Tensor], Tensor]
    z0: Tensor
    solution: Tensor
    amplification: float


def assert_solves(solution: Solution, problem: FixedPoint) -> None:
    """Assert that every sample converged, and is as near to the fixed point as its residual says."""
    assert bool(solution.converged.all()), f"{solution}: residual {solution.residual.tolist()}"
    errors = (solution.value.cpu().double() - problem.solution).norm(dim=1)
    slack = rounding(solution.value.dtype) * problem.solution.norm(dim=1)
    allowed = problem.amplification * (solution.residual_abs.cpu().double() + slack)
    assert bool((errors <= allowed).all()), f"errors {errors.tolist()}, allowed {allowed.tolist()}"


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
    """f(z) = W z + b with W Gaussian of spectral radius `rho`."""
    weight, bias = _random(batch, dim, seed)
    return _affine(weight * (rho / torch.linalg.eigvals(weight).abs().max()), bias, dtype, device)


def non_normal(
    batch: int = 2, dim: int = 12, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> FixedPoint:
    """f(z) = W z + b with W triangular: all eigenvalues are 0.3, but the norm is above 2 and iterates grow at first."""
    weight, bias = _random(batch, dim, seed)
    return _affine(0.3 * torch.eye(dim) + weight.triu(1) * (1.8 / math.sqrt(dim)), bias, dtype, device)


def tanh(
    batch: int = 2, dim: int = 12, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> FixedPoint:
    """f(z) = tanh(W z + b) with W Gaussian of spectral norm about 1.4: a fully connected cell."""
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
    """The sawtooth DEQ of Wu et al. (NeurIPS 2024), theorem 1, with z_t = relu(2 T^(t-1)(x) - 1), T the tent map.

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
