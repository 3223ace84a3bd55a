"""Layer-peeled problems (7), (9) and (10) of Sun & Shi (NeurIPS 2024), and a solver for them.

Cross-entropy of logits W h is minimised over the classifier W (K, D), the features h0 of the backbone (N, D) and the
layer between (`LAYERS`), in float64 and without bias, under

    ||W_EX||_F or ||W_DEQ||_F <= E_H,    mean_k ||w_k||^2 <= E_W,    mean_k mean_i ||h_{k,i}||^2 <= E_H.

The paper leaves open which features the last constraint is about (`FEATURES`):

- "final": W_EX h0 and z*, by Definition 2.2 and Appendix B.1.
- "backbone": h0, by the steps (21), (32), (43) and (44) of the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from runs.options import StudyError
from torch import Tensor

import deqfast

Part = dict[str, Any]
"""Result of the study, or a part of it."""

FEATURES = ("final", "backbone")
LAYERS = {
    "explicit": "W_EX h0",
    "skip": "h0 + W_EX h0",
    "deq": "z* = W_DEQ z* + h0, the sum of W_DEQ^i h0 from i = 0",
    "series": "the sum from i = 1, as (27) prints it",
}

# Forward, plain iteration is one launch, even if it takes long with ||W_DEQ|| close to 1. Backward, evaluations cost
# more, and Broyden's method needs few of them on a linear map.
SOLVER = deqfast.Picard(rtol=1e-13, max_iter=10_000)
ADJOINT = deqfast.Implicit(deqfast.Broyden(rtol=1e-11, max_iter=200))

ROUND = 200  # steps before L-BFGS restarts, with the loss in units of the present gradient
HISTORY = 30


class Point(NamedTuple):
    """Variables, each divided by the radius of its ball."""

    classifier: Tensor  # (K, D): W / sqrt(K E_W)
    layer: Tensor  # (D, D): W_EX or W_DEQ / its largest norm
    features: Tensor  # (N, D): the constrained features, h0_{k,i} or final, / sqrt(K n_k E_H)


def project_ball(tensor: Tensor) -> Tensor:
    """Return the nearest point of the unit Frobenius ball."""
    return tensor / torch.linalg.vector_norm(tensor).clamp(min=1)


def cross_entropy(logits: Tensor, labels: Tensor, from_chance: bool) -> Tensor:
    """Return the cross-entropy of each sample, (N,), with `from_chance` minus log K.

    Either is accurate relative to itself: the first also if it is far below 1, the second if it is close to 0. A
    difference would lose most of its digits there.
    """
    differences = logits - logits.gather(1, labels[:, None])
    if from_chance:
        return torch.expm1(differences).mean(1).log1p()
    return differences.exp().scatter(1, labels[:, None], 0.0).sum(1).log1p()


@dataclass(frozen=True)
class Problem:
    """Problem with weights n_k / N (`shares`) of the classes, each represented by a number (`samples`) of columns.

    If n_k and samples[k] differ, a column represents n_k / samples[k] equal samples. `e_layer` bounds the layer's norm;
    None: `e_h` does.
    """

    model: str
    features: str
    samples: tuple[int, ...]
    shares: tuple[float, ...]
    dimension: int
    e_w: float
    e_h: float
    e_layer: float | None = None

    @property
    def radius(self) -> float:
        """Largest Frobenius norm of the layer."""
        return self.e_h if self.e_layer is None else self.e_layer

    @property
    def classes(self) -> int:
        """Number of classes K."""
        return len(self.samples)

    @cached_property
    def labels(self) -> Tensor:
        """Class of each column, (N,)."""
        return torch.arange(self.classes).repeat_interleave(torch.tensor(self.samples))

    @cached_property
    def weights(self) -> Tensor:
        """Weight of each column in the loss, (N,)."""
        return (torch.tensor(self.shares, dtype=torch.float64) / torch.tensor(self.samples))[self.labels]

    @cached_property
    def radii(self) -> Tensor:
        """Radius sqrt(K n_k E_H) of each column, (N, 1)."""
        return (self.classes * self.e_h * torch.tensor(self.samples, dtype=torch.float64)).sqrt()[self.labels, None]

    @cached_property
    def block(self) -> deqfast.DEQBlock:
        """The linear DEQ."""
        return deqfast.DEQBlock(deqfast.LinearCell(self.dimension).double(), solver=SOLVER, adjoint=ADJOINT)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Blocks to leave at their start. With bounded final features no invertible layer loses anything: h0 is free,
        and the layer reaches every feature matrix."""
        return ("layer",) if self.features == "final" else ()

    def start(self, seed: int) -> Point:
        """Draw a point on the boundary of the constraints; a frozen explicit layer is orthogonal."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (self.classes, self.dimension), (self.dimension,) * 2, (len(self.labels), self.dimension)
        point = Point(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))
        if self.frozen and self.model == "explicit":
            point = point._replace(layer=torch.linalg.qr(point.layer).Q)
        return Point(*(part / torch.linalg.vector_norm(part) for part in point))

    def weight(self, point: Point) -> Tensor:
        """Return W (K, D)."""
        return point.classifier * math.sqrt(self.classes * self.e_w)

    def backbone(self, point: Point) -> Tensor:
        """Return h0 (N, D); if final features are bounded, the h0 that the layer maps to them."""
        features, layer = point.features * self.radii, self.radius * point.layer
        if self.features == "backbone":
            return features
        if self.model == "explicit":
            return torch.linalg.solve(layer, features.T).T
        return features - features @ layer.T

    def outputs(self, point: Point) -> Tensor:
        """Return the final features (N, D); StudyError if the DEQ does not converge."""
        h0, layer = self.backbone(point), self.radius * point.layer
        if self.model in ("explicit", "skip"):
            return h0 @ layer.T + (h0 if self.model == "skip" else 0)
        z, solution = torch.func.functional_call(self.block, {"cell.weight": layer}, (h0,), {"return_solution": True})
        if not bool(solution.converged.all()):
            raise StudyError(
                f"--e-h {self.e_h}: the linear DEQ was not solved to {SOLVER.tol:.0e} in {SOLVER.max_iter} evaluations "
                f"(residual {float(solution.residual_rel.max()):.1e}); take a bound less close to 1"
            )
        return z - h0 if self.model == "series" else z

    def loss(self, point: Point, from_chance: bool = False) -> Tensor:
        """Return the objective, a scalar, with `from_chance` minus log K."""
        logits = self.outputs(point) @ self.weight(point).T
        return self.weights @ cross_entropy(logits, self.labels, from_chance)

    def gradient(self, point: Point) -> Point:
        """Return the gradient of the objective in the scaled variables."""
        leaves = Point(*(part.detach().requires_grad_() for part in point))
        return Point(*torch.autograd.grad(self.loss(leaves, from_chance=True), leaves))

    def means(self, features: Tensor) -> Tensor:
        """Return the class means (K, D) of features (N, D)."""
        return torch.stack([features[self.labels == k].mean(0) for k in range(self.classes)])


class Optimum(NamedTuple):
    """End of a solve."""

    point: Point
    loss: float
    below_chance: float  # log K - loss
    residual: float  # of the KKT conditions, see `stationarity`


def minimise(problem: Problem, start: Point, steps: int, tolerance: float, frozen: Sequence[str] = ()) -> Optimum:
    """Minimise by L-BFGS over the directions of the blocks; the blocks `frozen` keep their value.

    Each block stays on the boundary of its ball. For W and the features an optimum is on the boundary: the gradient of
    a cross-entropy never vanishes. If an optimum is inside, the residual shows it, because it is the ball's residual.
    """
    free = [name for name in Point._fields if name not in frozen]
    point, taken, last = start, 0, math.inf
    while True:
        loss, excess = (float(problem.loss(point, from_chance)) for from_chance in (False, True))
        gradient = problem.gradient(point)
        size = max(float(torch.linalg.vector_norm(getattr(gradient, name))) for name in free)
        residual = stationarity(point, gradient, free, size)
        from_chance = -excess < loss  # the smaller of the two has the more digits
        value = excess if from_chance else loss
        if residual <= tolerance or taken >= steps or not value < last:
            return Optimum(point, loss, -excess, residual)
        last = value if taken else math.inf
        point, more = _round(problem, point, free, size, from_chance, min(ROUND, steps - taken))
        taken += more


def stationarity(point: Point, gradient: Point, free: Sequence[str], size: float) -> float:
    """Return the norm of a projected gradient step that is 1 long for a gradient of norm `size`; 0 at a KKT point."""
    blocks = [(getattr(point, name), getattr(gradient, name)) for name in free]
    return max(float(torch.linalg.vector_norm(project_ball(block - slope / size) - block)) for block, slope in blocks)


def _round(
    problem: Problem, point: Point, free: Sequence[str], size: float, from_chance: bool, steps: int
) -> tuple[Point, int]:
    """Take at most `steps` steps of L-BFGS on the loss in units of `size`; return the end, and the steps taken."""
    leaves = {name: getattr(point, name).clone().requires_grad_() for name in free}
    optimiser = torch.optim.LBFGS(
        list(leaves.values()),
        max_iter=steps,
        history_size=HISTORY,
        tolerance_grad=1e-12,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def current() -> Point:
        return point._replace(**{name: leaf / torch.linalg.vector_norm(leaf) for name, leaf in leaves.items()})

    def closure() -> float:
        optimiser.zero_grad()
        value = problem.loss(current(), from_chance) / size
        value.backward()
        return value.item()

    optimiser.step(closure)
    taken = optimiser.state[next(iter(leaves.values()))]["n_iter"]
    return Point(*(part.detach() for part in current())), taken
