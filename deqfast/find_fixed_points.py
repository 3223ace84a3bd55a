"""Search for the fixed points of a map from many starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_number
from .solution import Solution
from .solve import solve
from .solvers import Anderson, Solver, as_solver
from .torch_internals.autograd import vjp


@dataclass(frozen=True)
class FixedPoints:
    """N distinct fixed points, to which the converged starts of ``find_fixed_points`` led, all without gradient.

    Attributes:
        value: (N, ...) the points, ordered by their number of starts, the largest first.
        starts: (N,) int64, the number of starts that led to each point.
        residual: (N,) the solver's residual at each point, see ``Solution``.
        eigenvalues: (N, D) complex, of the Jacobian of f at each point in its D numbers, largest modulus first; None if
            they were not computed.
        solution: the ``Solution`` of all starts, the unconverged ones too.

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
    solution: Solution

    @property
    def unstable_directions(self) -> Tensor:
        """(N,) int64, the number of eigenvalues of modulus at least 1.

        Raises:
            ValueError: eigenvalues were not asked for.
        """
        if self.eigenvalues is None:
            raise ValueError("eigenvalues were not computed: call find_fixed_points with eigenvalues=True")
        return (self.eigenvalues.abs() >= 1).sum(dim=1)

    @property
    def stable(self) -> Tensor:
        """(N,) bool, whether all eigenvalues are inside the unit circle, so that iterates that start nearby stay near.

        Raises:
            ValueError: eigenvalues were not asked for.
        """
        return self.unstable_directions == 0

    def __repr__(self) -> str:
        points = f"{len(self.value)} points"
        if self.eigenvalues is not None:
            stable = int(self.stable.sum())
            points = f"{stable} stable, {len(self.value) - stable} unstable"
        converged = int(self.solution.converged.sum())
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

    Every start is one sample of a solve. Anderson's method finds saddles too, which iterates of f leave. States that a
    trained network visits are good starts. For the dynamics of recurrent networks see Sussillo and Barak, Neural
    Computation 2013; they minimise |f(z) - z|^2 by gradient descent, which also finds slow points.

    Args:
        f: map of (B, ...) to the same shape, which treats each sample by itself.
        starts: (B, ...) float64 or float32. The relative tolerance is 1e-8 in float64, and 1e-5 in float32.
        solver: as for ``solve``. None: ``Anderson`` with these relative tolerances and 1,000 evaluations. For points
            near 0, its `atol` is the tolerance times the mean length of the starts.
        kernel: as for ``solve``.
        distance: two results are one point if they are nearer than this times the largest length of a result.
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
        raise TypeError(f"starts must be a float32 or float64 tensor (B, ...), got {_described(starts)}")
    if solver is None:
        rtol = 1e-8 if starts.dtype == torch.float64 else 1e-5
        lengths = _rows(starts).norm(dim=1)
        length = float(lengths[lengths.isfinite()].mean().nan_to_num())  # solve refuses a start that is not finite
        solver = Anderson(rtol, max_iter=1000, atol=rtol * length)
    solution = solve(f, starts, as_solver(solver), kernel)
    chosen = _distinct(solution, distance)
    index = torch.tensor([i for i, _ in chosen], dtype=torch.int64, device=starts.device)
    value = solution.value[index]
    return FixedPoints(
        value=value,
        starts=torch.tensor([count for _, count in chosen], dtype=torch.int64, device=starts.device),
        residual=solution.residual[index],
        eigenvalues=_eigenvalues(f, value) if eigenvalues else None,
        solution=solution,
    )


def _distinct(solution: Solution, distance: float) -> list[tuple[int, int]]:
    """For each point: its result of least residual, and how many results are that point; the most frequent first."""
    index = solution.converged.nonzero()[:, 0]
    left = index[solution.residual[index].argsort(stable=True)]
    values = _rows(solution.value)
    lengths = values[left].norm(dim=1)
    radius = distance * float(lengths.max()) if len(left) else 0.0
    found = []
    while len(left):
        near = (values[left] - values[left[0]]).norm(dim=1) <= radius
        found.append((int(left[0]), int(near.sum())))
        left = left[~near]
    return sorted(found, key=lambda point: -point[1])


def _eigenvalues(f: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Eigenvalues (N, D) of the Jacobians at the points, largest modulus first; a row of a Jacobian is e_i^T J."""
    with torch.inference_mode(False), torch.enable_grad():
        z = points.clone().requires_grad_()
        value = f(z)
    flat, rows = _rows(torch.zeros_like(points)), []
    for i in range(flat.shape[1]):
        unit = flat.clone()
        unit[:, i] = 1
        (product,) = vjp([value], [z], [unit.view_as(points)])
        rows.append(flat if product is None else _rows(product))
    jacobian = torch.stack(rows, dim=1) if rows else points.new_zeros(len(points), 0, 0)
    found = torch.linalg.eigvals(jacobian)
    return found.gather(1, found.abs().argsort(dim=1, descending=True))


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _rows(tensor: Tensor) -> Tensor:
    """Tensor (B, D) with the numbers of each sample in a row."""
    return tensor.reshape(len(tensor), tensor[:1].numel() if len(tensor) else tensor.shape[1:].numel())
