"""Search for the fixed points of a map from many starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._checks import check_number, described
from ..solution import Solution, Status
from ..solvers import Anderson, Solver, as_solver
from ..state.norms import lengths
from ..state.packing import Packing
from ..state.rows import per_row, rows_of
from ..torch_internals.autograd import vjp
from ..torch_internals.transforms import check_values
from .solve import solve

RTOL = {torch.float64: 1e-8, torch.float32: 1e-5}
AMPLIFICATION = 1e3  # |z - z*| / |f(z) - z| near a point with the slope 0.999


@dataclass(frozen=True)
class FixedPoints:
    """N distinct fixed points, to which the converged starts of ``find_fixed_points`` led, all without gradient.

    Attributes:
        value: (N, ...) the points, ordered by their number of starts, the largest first.
        starts: (N,) int64, the number of starts that led to each point.
        residual: (N,) the solver's residual at each point, see ``Solution``; 0 at a point 0.
        eigenvalues: (N, D) complex, of the Jacobian of f at each point, largest modulus first; None if not computed.
        slow: (M, ...) distinct results that did not converge, but move little: |f(z) - z| is at most the relative
            tolerance times the length of their start, or of f there if it is shorter. They are slow points of f, or
            fixed points near 0 that rounding hides. The other numbers do not count them.
        solution: the ``Solution`` of all starts, the unconverged ones too. Starts that led to 0 have the value 0.

    Examples:
        >>> starts = torch.linspace(-1.2, 1.2, 41, dtype=torch.float64)[:, None]
        >>> found = deqfast.find_fixed_points(lambda z: 1.5 * z - 0.5 * z**3, starts)
        >>> points = sorted(found.value.round().flatten().tolist())
        >>> points == [-1, 0, 1], int(found.stable.sum())
        (True, 2)
    """

    value: Tensor
    starts: Tensor
    residual: Tensor
    eigenvalues: Tensor | None
    slow: Tensor
    solution: Solution

    @property
    def unstable_directions(self) -> Tensor:
        """(N,) int64, how many eigenvalues are not inside the unit circle; ValueError if they were not computed."""
        if self.eigenvalues is None:
            raise ValueError("eigenvalues were not computed: call find_fixed_points with eigenvalues=True")
        return (~(self.eigenvalues.abs() < 1)).sum(dim=1)

    @property
    def stable(self) -> Tensor:
        """(N,) bool, whether no direction is unstable, so that iterates that start nearby stay near."""
        return self.unstable_directions == 0

    def __repr__(self) -> str:
        points = f"{len(self.value)} points"
        if self.eigenvalues is not None:
            stable = int(self.stable.sum())
            points = f"{stable} stable, {len(self.value) - stable} unstable"
        converged = int(self.solution.converged.sum())
        points += f", {len(self.slow)} slow" * bool(len(self.slow))
        return f"FixedPoints({points}, {converged} of {len(self.solution.status)} starts converged)"


def find_fixed_points(
    f: Callable[[Tensor], Tensor],
    starts: Tensor,
    solver: str | Solver | None = None,
    kernel: str = "auto",
    *,
    distance: float = 1e-2,
    eigenvalues: bool = True,
) -> FixedPoints:
    """Find distinct fixed points z = f(z) from many starts, stable and unstable ones, with their eigenvalues.

    Every start is one sample of a solve, and its result depends on no other start. Anderson's method finds saddles too,
    which iterates of f leave. States that a trained network visits are good starts. For the dynamics of recurrent
    networks see Sussillo and Barak, Neural Computation 2013, who minimise |f(z) - z|^2, and find slow points too.

    At a point near 0 no relative tolerance can be met. So 0 itself is a point if f(0) is exactly 0 and a start leads
    there. A start leads to 0 if it comes nearer than a share of its length, or of the length of f there if it is
    shorter. The share is the relative tolerance, at most 1e-8 in float64 and 1e-5 in float32.

    Args:
        f: map of (B, ...) to the same shape, which treats each sample by itself.
        starts: (B, ...) float64 or float32. The relative tolerance is 1e-8 in float64, and 1e-5 in float32.
        solver: as for ``solve``; with rtol=0 it decides what is near 0. None: ``Anderson(rtol, max_iter=1000)``.
        kernel: as for ``solve``.
        distance: two results are one point if they are nearer than this times the longer of the two, or than 1,000
            times their residuals |f(z) - z|.
        eigenvalues: whether to compute them: D products with the Jacobian of all points, and memory for their D x D.

    Returns:
        FixedPoints, none of them if no start converged.

    Raises:
        TypeError, ValueError: `distance` is not above 0; `starts` is not such a tensor; else as ``solve``.

    Examples:
        >>> found = deqfast.find_fixed_points(torch.cos, torch.rand(8, 1, dtype=torch.float64))
        >>> [round(z, 6) for z in found.value.flatten().tolist()], found.starts.tolist()
        ([0.739085], [8])
    """
    check_number("distance", distance, 0.0, low_open=True)
    if not (isinstance(starts, Tensor) and starts.dtype in (torch.float32, torch.float64) and starts.dim()):
        raise TypeError(f"starts must be a float32 or float64 tensor (B, ...), got {described(starts)}")
    check_values("starts", starts)
    solver = Anderson(RTOL[starts.dtype], max_iter=1000) if solver is None else as_solver(solver)
    near = _Nearness(f, starts, min(solver.rtol, RTOL[starts.dtype]))
    solution = near.at_zero(solve(f, starts, solver, kernel, stop_fn=near if near.is_fixed.any() else None))
    sizes = lengths(rows_of(solution.value))
    chosen = _distinct(solution, solution.converged, distance * sizes)
    is_slow = ~solution.converged & (solution.residual_abs <= near.bound)
    slow = _distinct(solution, is_slow, distance * torch.maximum(sizes, near.scale))
    index = torch.tensor([i for i, _ in chosen], dtype=torch.int64, device=starts.device)
    value = solution.value[index]
    counts = torch.tensor([count for _, count in chosen], dtype=torch.int64, device=starts.device)
    numbers = _eigenvalues(f, value) if eigenvalues else None
    slow_value = solution.value[[i for i, _ in slow]]
    return FixedPoints(value, counts, solution.residual[index], numbers, slow_value, solution)


class _Nearness:
    """Stop rule that ends the samples that come to 0, within `bound` (B,), if f(0) is exactly 0, `is_fixed` (B,)."""

    def __init__(self, f: Callable[[Tensor], Tensor], starts: Tensor, rtol: float) -> None:
        packing = Packing(starts)

        def rows(z: Tensor) -> Tensor:
            return rows_of(packing.check_value(f(z))[0])

        with torch.no_grad():
            self.is_fixed = ~rows(torch.zeros_like(starts)).any(dim=1)  # NaN counts as any
            # Length of each sample's start or of f there, the shorter one.
            self.scale = torch.minimum(lengths(rows_of(starts)), lengths(rows(starts.clone())))
            self.bound = rtol * self.scale

    def __call__(self, z: Tensor, value: Tensor, k: int) -> Tensor:
        return (lengths(rows_of(value)) <= self.bound) & self.is_fixed

    def at_zero(self, solution: Solution) -> Solution:
        """The solution, with 0 as the point of the samples that this rule has ended."""
        ended = solution.status == Status.STOPPED
        measures = ("residual", "residual_rel", "residual_abs")
        changes: dict[str, Any] = {name: getattr(solution, name).masked_fill(ended, 0.0) for name in measures}
        changes["value"] = solution.value.masked_fill(per_row(ended, solution.value), 0.0)
        return replace(solution, status=solution.status.masked_fill(ended, Status.CONVERGED), **changes)


def _distinct(solution: Solution, counted: Tensor, radius: Tensor) -> list[tuple[int, int]]:
    """For each point: its result of least residual, and how many results are that point; the most frequent first.

    Two of the `counted` results are one point if they are nearer than the `radius` (B,) of one of them.
    """
    index = counted.nonzero()[:, 0]
    left = index[solution.residual[index].argsort(stable=True)]
    values = rows_of(solution.value)
    radius = torch.maximum(radius, AMPLIFICATION * solution.residual_abs)
    points = []
    while len(left):
        near = lengths(values[left] - values[left[0]]) <= torch.maximum(radius[left], radius[left[0]])
        points.append((int(left[0]), int(near.sum())))
        left = left[~near]
    return sorted(points, key=lambda point: -point[1])


def _eigenvalues(f: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Eigenvalues (N, D) of the Jacobians at the points, largest modulus first; a row of a Jacobian is e_i^T J."""
    with torch.inference_mode(False), torch.enable_grad():
        z = points.clone().requires_grad_()
        value = f(z)
    zeros = rows_of(torch.zeros_like(points))
    jacobian = zeros.new_zeros(*zeros.shape, zeros.shape[1])
    for i in range(zeros.shape[1]):
        unit = zeros.index_fill(1, torch.tensor(i, device=zeros.device), 1)
        (product,) = vjp([value], [z], [unit.view_as(points)])
        jacobian[:, i] = zeros if product is None else rows_of(product)
    known = jacobian.isfinite().flatten(1).all(dim=1)
    numbers = torch.full(jacobian.shape[:2], torch.nan, dtype=jacobian.dtype.to_complex(), device=jacobian.device)
    numbers[known] = torch.linalg.eigvals(jacobian[known])
    return numbers.gather(1, numbers.abs().argsort(dim=1, descending=True))
