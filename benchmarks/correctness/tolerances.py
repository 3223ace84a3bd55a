"""Accuracy that tests and benchmarks require. The only place with tolerances.

Errors are relative: the largest deviation over the largest exact entry. A tolerance is derived, never read off a
machine. There are three derivations:

- ``rounding``: the rounding unit of a dtype times a number of operations;
- ``after_solve``: the tolerance of a solve times the condition number of its fixed point;
- ``accuracy``: the error of plain torch in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deqfast.torch_internals.autograd import in_order_of

# A kernel may err twice as much as plain torch in its dtype, plus a few roundings, as torch may happen to be exact.
ACCURACY_FACTOR = 2.0
ACCURACY_UNITS = 8
# Number of operations whose roundings may add up between two orders of one computation, unless a test counts them.
OPERATIONS = 64
# The largest amplification of a fixed point whose Jacobian has a norm of at most 0.95: 1 / (1 - 0.95). The Jacobians of
# the tests are smaller: 0.4 to 0.6 times a matrix of norm about 1.
WELL_CONDITIONED = 20.0


def rounding(dtype: torch.dtype, operations: float = OPERATIONS) -> float:
    """Relative difference allowed between two orders of the same computation of `operations` in `dtype`."""
    return operations * torch.finfo(dtype).eps


def bounds(tol: float, absolute: bool) -> dict[str, float]:
    """Arguments of a solver that bound |f(z) - z| by `tol`, or else the relative residual."""
    return {"rtol": 0.0, "atol": tol} if absolute else {"rtol": tol}


def lost(dtype: torch.dtype, tol: float) -> float:
    """Relative rounding of differences of iterates: in a solve to `tol` they are only `tol` times as long as these."""
    return rounding(dtype) / tol


def amplification(f: Callable[[Any], Any], z: Any) -> float:
    """Condition number of the fixed point of f near z: the largest |dz| / |dr| if z + dz has the residual dr.

    It is the spectral norm of (I - J)^-1, with J the Jacobian of `f` at `z` for all samples at once. `z` is a pytree of
    real tensors.
    """
    leaves, spec = pytree.tree_flatten(z)
    sizes = [leaf.numel() for leaf in leaves]

    def flat(vector: Tensor) -> Tensor:
        parts = zip(vector.split(sizes), leaves, strict=True)
        value = f(pytree.tree_unflatten([part.view(leaf.shape).to(leaf.dtype) for part, leaf in parts], spec))
        return torch.cat([leaf.double().flatten() for leaf in in_order_of(z, value)])

    start = torch.cat([leaf.detach().double().flatten() for leaf in leaves])
    if not len(start):
        return 1.0
    jacobian = torch.autograd.functional.jacobian(flat, start)
    identity = torch.eye(len(start), dtype=torch.float64, device=start.device)
    return float(torch.linalg.matrix_norm(torch.linalg.inv(identity - jacobian), 2))


def after_solve(tol: float, condition: float = WELL_CONDITIONED, derivatives: int = 0) -> float:
    """Relative difference allowed between two solves to the relative tolerance `tol`, or between derivatives there.

    Each solve ends within tol * condition of the fixed point; `condition` is its ``amplification``. A derivative itself
    solves a system with I - J, which has the same condition.
    """
    return 2 * tol * condition ** (1 + derivatives)


# Gradients in float64 of solves to 1e-12.
GRADIENT = after_solve(1e-12, derivatives=1)
# Iterates of two algebraically equal methods in float64, with windows whose condition number is at most 1e4.
ITERATES = 1e4 * rounding(torch.float64)
# Central differences of solves to 1e-13: the difference of two errors over its width.
WIDTH = 1e-5
_OF_SOLVES = after_solve(1e-13) / (2 * WIDTH)
FINITE_DIFFERENCES = {"eps": WIDTH, "atol": _OF_SOLVES, "rtol": _OF_SOLVES, "nondet_tol": GRADIENT}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Error max |actual - exact| / max |exact|, in float64; zero if both are zero or empty."""
    a, e = actual.detach().cpu().double(), exact.detach().cpu().double()
    if not e.numel():
        return 0.0
    worst, scale = float((a - e).abs().max()), float(e.abs().max())
    return worst / scale if scale else (math.inf if worst else 0.0)


def _split_nonfinite(actual: Tensor, expected: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Finite entries, after asserting that shapes and all non-finite entries agree."""
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

    plain: the result of plain torch in the dtype of `actual`; exact: the result in float64. AssertionError if
    non-finite entries differ.
    """
    reached = relative_error(*_split_nonfinite(actual, exact, name))
    ordinary = relative_error(*_split_nonfinite(plain, exact, name))
    return reached, ACCURACY_FACTOR * ordinary + units * torch.finfo(actual.dtype).eps


def assert_accurate(
    actual: Tensor, plain: Tensor, exact: Tensor, name: str = "value", units: float = ACCURACY_UNITS
) -> None:
    """Assert that `actual` errs at most as ``accuracy`` allows."""
    reached, allowed = accuracy(actual, plain, exact, name, units)
    assert reached <= allowed, f"{name}: relative error {reached:.3g}, allowed {allowed:.3g}"
