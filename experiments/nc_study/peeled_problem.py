"""The layer-peeled problems (7), (9) and (10) of Sun & Shi (NeurIPS 2024), and a solver for them.

Cross-entropy of logits W h is minimised over the classifier W (K, D), the features h0 of the backbone (N, D) and the
layer between: h = W_EX h0 (explicit), or z* = W_DEQ z* + h0 (DEQ), in float64 and without bias, under

    ||W_EX||_F or ||W_DEQ||_F <= E_H,    mean_k ||w_k||^2 <= E_W,    mean_k mean_i ||h_{k,i}||^2 <= E_H.

Which features the last constraint is about, the paper leaves open (`FEATURES`):

- "final": W_EX h0 and z*. So say Definition 2.2 and Appendix B.1.
- "backbone": h0. So read the steps (21), (32), (43) and (44) of the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

import deqfast

from .config import StudyError

FEATURES = ("final", "backbone")

# On a linear map Broyden's method ends after few evaluations, also where ||W_DEQ|| is close to 1.
SOLVER = deqfast.Broyden(tol=1e-13, max_iter=200)
ADJOINT = deqfast.Implicit(deqfast.Broyden(tol=1e-11, max_iter=200))

MEMORY = 10  # objective values that a step may not exceed (Grippo, Lampariello and Lucidi, 1986)
SUFFICIENT = 1e-4
HALVINGS = 40
LONGEST_STEP = 1e8


class Point(NamedTuple):
    """The variables, each divided by the radius of its ball."""

    classifier: Tensor  # (K, D): W / sqrt(K E_W)
    layer: Tensor  # (D, D): W_EX / E_H or W_DEQ / E_H
    backbone: Tensor  # (N, D): h0_{k,i} / sqrt(K n_k E_H)


def project_ball(tensor: Tensor) -> Tensor:
    """The nearest point of the unit Frobenius ball."""
    return tensor / torch.linalg.vector_norm(tensor).clamp(min=1)


def project_sphere(tensor: Tensor) -> Tensor:
    """The tensor at norm 1."""
    return tensor / torch.linalg.vector_norm(tensor)


def excess_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy minus log K per sample, (N,): without the cancellation that a difference of the two has."""
    differences = logits - logits.gather(1, labels[:, None])
    return torch.expm1(differences).mean(1).log1p()


@dataclass(frozen=True)
class Problem:
    """One of the problems; `shares` are the weights n_k / N of the classes, `samples` the columns that stand for each.

    A column stands for n_k / samples[k] equal samples where these numbers differ.
    """

    model: str
    features: str
    samples: tuple[int, ...]
    shares: tuple[float, ...]
    dimension: int
    e_w: float
    e_h: float

    @property
    def classes(self) -> int:
        """K."""
        return len(self.samples)

    @cached_property
    def labels(self) -> Tensor:
        """(N,)."""
        return torch.arange(self.classes).repeat_interleave(torch.tensor(self.samples))

    @cached_property
    def weights(self) -> Tensor:
        """Weight of each sample in the loss, (N,)."""
        return (torch.tensor(self.shares, dtype=torch.float64) / torch.tensor(self.samples))[self.labels]

    @cached_property
    def radii(self) -> Tensor:
        """sqrt(K n_k E_H) per sample, (N, 1)."""
        return (self.classes * self.e_h * torch.tensor(self.samples, dtype=torch.float64)).sqrt()[self.labels, None]

    @cached_property
    def block(self) -> deqfast.DEQBlock:
        """The linear DEQ."""
        cell = deqfast.LinearCell(self.dimension).double()
        return deqfast.DEQBlock(cell, solver=SOLVER, adjoint=ADJOINT)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Blocks to leave at their start: with the constraint on W_EX h0 or z*, any invertible layer loses nothing."""
        return ("layer",) if self.features == "final" else ()

    def start(self, seed: int) -> Point:
        """A random point on the boundary of the constraints; an explicit layer that stays as it is is orthogonal."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (self.classes, self.dimension),
            (self.dimension, self.dimension),
            (len(self.labels), self.dimension),
        )
        draws = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        point = Point(*(project_sphere(draw) for draw in draws))
        if self.frozen and self.model == "explicit":
            return point._replace(layer=project_sphere(torch.linalg.qr(point.layer).Q))
        return point

    def project(self, point: Point) -> Point:
        """The nearest feasible point; where the constraint is on the final features, h0 only has its scale set."""
        free = project_sphere if self.features == "final" else project_ball
        return Point(project_ball(point.classifier), project_ball(point.layer), free(point.backbone))

    def weight(self, point: Point) -> Tensor:
        """W (K, D)."""
        return point.classifier * math.sqrt(self.classes * self.e_w)

    def outputs(self, point: Point) -> Tensor:
        """The final features (N, D): W_EX h0 or z*.

        A constraint on them is met by scaling them to its boundary. Nothing is lost by that: h0 is free to have any
        scale, and the gradient of a cross-entropy never vanishes, so at the optimum the constraint is active.
        """
        h0 = point.backbone * self.radii
        if self.model == "explicit":
            h = h0 @ (self.e_h * point.layer).T
        else:
            h = self._equilibrium(point.layer, h0)
        return self.radii * project_sphere(h / self.radii) if self.features == "final" else h

    def _equilibrium(self, layer: Tensor, h0: Tensor) -> Tensor:
        cell = {"cell.weight": self.e_h * layer}
        z, solution = torch.func.functional_call(self.block, cell, (h0,), {"return_solution": True})
        if not bool(solution.converged.all()):
            raise StudyError(
                f"--e-h {self.e_h}: the linear DEQ was not solved to {SOLVER.tol:.0e} in {SOLVER.max_iter} evaluations "
                f"(residual {float(solution.residual_rel.max()):.1e}); take a bound less close to 1"
            )
        return z

    def gain(self, point: Point) -> Tensor:
        """Loss minus log K, a scalar (negative: better than chance)."""
        logits = self.outputs(point) @ self.weight(point).T
        return self.weights @ excess_loss(logits, self.labels)

    def gradient(self, point: Point) -> tuple[float, Point]:
        """The objective, and its gradient in the scaled variables."""
        leaves = Point(*(part.detach().requires_grad_() for part in point))
        value = self.gain(leaves)
        return value.item(), Point(*torch.autograd.grad(value, leaves))


class Optimum(NamedTuple):
    """Where the solver ended."""

    point: Point
    gain: float  # loss - log K
    residual: float  # see `stationarity`
    steps: int


def stationarity(point: Point, gradient: Point, project: Callable[[Point], Point]) -> float:
    """Norm of a projected gradient step as long as the largest block of the gradient has norm 1: 0 at a KKT point."""
    moved = project(_add(point, gradient, -1 / _largest(gradient)))
    return max(float(torch.linalg.vector_norm(a - b)) for a, b in zip(moved, point, strict=True))


def _largest(gradient: Point) -> float:
    return max(float(torch.linalg.vector_norm(part)) for part in gradient)


def minimise(
    problem: Problem,
    start: Point,
    steps: int,
    tolerance: float,
    frozen: Sequence[str] = (),
) -> Optimum:
    """Spectral projected gradient descent (Birgin, Martinez and Raydan, 2000); the blocks `frozen` keep their value.

    The projections are exact; the step is Barzilai and Borwein's, the line search nonmonotone.
    """

    def project(point: Point) -> Point:
        return problem.project(point)._replace(**{name: getattr(start, name) for name in frozen})

    def evaluate(point: Point) -> tuple[float, Point]:
        value, gradient = problem.gradient(point)
        return value, gradient._replace(**{name: torch.zeros_like(getattr(start, name)) for name in frozen})

    point = project(start)
    value, gradient = evaluate(point)
    history, length, residual = [value], 1.0, math.inf
    for step in range(steps + 1):
        residual = stationarity(point, gradient, project)
        if residual <= tolerance or step == steps:
            break
        size = _largest(gradient)
        target = project(_add(point, gradient, -length / size))
        direction = _add(target, point, -1.0)
        found = _search(evaluate, project, point, direction, _inner(gradient, direction), max(history[-MEMORY:]))
        if found is None:  # no decrease that float64 can tell
            break
        moved, new_value, new_gradient = found
        change = _add(moved, point, -1.0)
        length = _step_length(change, _add(new_gradient, gradient, -1.0), size, short=step % 2 == 1)
        point, value, gradient = moved, new_value, new_gradient
        history.append(value)
    return Optimum(point, value, residual, step)


def _step_length(change: Point, gradient_change: Point, size: float, short: bool) -> float:
    """Barzilai and Borwein's long or short step, times the size of the gradient; the longest where it is not convex."""
    curvature = _inner(change, gradient_change)
    if curvature <= 0:
        return LONGEST_STEP
    inverse = curvature / _inner(gradient_change, gradient_change) if short else _inner(change, change) / curvature
    return min(max(inverse * size, 1 / LONGEST_STEP), LONGEST_STEP)


def _search(
    evaluate: Callable[[Point], tuple[float, Point]],
    project: Callable[[Point], Point],
    point: Point,
    direction: Point,
    slope: float,
    reference: float,
) -> tuple[Point, float, Point] | None:
    """The first point on the segment that is low enough, with value and gradient; None if there is none."""
    fraction = 1.0
    for _ in range(HALVINGS):
        moved = project(_add(point, direction, fraction))
        value, gradient = evaluate(moved)
        if value <= reference + SUFFICIENT * fraction * slope:
            return moved, value, gradient
        fraction /= 2
    return None


def _add(one: Point, other: Point, factor: float) -> Point:
    return Point(*(a + factor * b for a, b in zip(one, other, strict=True)))


def _inner(one: Point, other: Point) -> float:
    return float(sum((a * b).sum() for a, b in zip(one, other, strict=True)))
