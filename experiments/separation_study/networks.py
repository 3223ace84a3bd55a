"""Networks that are compared, the matching of their sizes, and their training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from nc_study.networks import count_parameters
from torch import Tensor, nn

import deqfast

CLIP = 1.0  # bound on the norm of a gradient, of all networks
SOLVER = deqfast.Broyden(rtol=1e-8, max_iter=100, history_size=30)
ADJOINT = deqfast.Implicit(deqfast.Broyden(rtol=1e-6, max_iter=50))
DOUBLE = torch.float64


class DEQ(nn.Module):
    """ReLU DEQ z = relu(W z + U x + b) with a linear readout; it counts the evaluations of its solves."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.block = deqfast.DEQBlock(deqfast.FCCell(inputs, width, activation="relu"), SOLVER, ADJOINT, warn=False)
        self.readout = nn.Linear(width, 1)
        self.inputs, self.width = inputs, width
        self.evaluations: list[float] = []
        self.converged = 1.0
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), (B,), for x (B, inputs)."""
        z, solution = self.block(x, return_solution=True)
        self.converged = float(solution.converged.double().mean())
        if torch.is_grad_enabled():
            self.evaluations.append(float(solution.iterations.double().mean()))
            if self.block.backward_solution is not None:  # of the previous step
                self.evaluations[-1] += float(self.block.backward_solution.iterations.double().mean())
        return self.readout(z)[:, 0]

    def flops(self) -> float:
        """Count a step: W z in every evaluation of both solves and in the differentiated one with its gradient of W,
        U x and the readout with their gradients; not the solvers' own products."""
        mean = sum(self.evaluations) / max(1, len(self.evaluations))
        return 2 * self.width**2 * (mean + 2) + 4 * self.inputs * self.width + 6 * self.width


class FNN(nn.Sequential):
    """ReLU network of `depth` hidden layers of one width."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        sizes = [inputs, *[width] * depth, 1]
        layers: list[nn.Module] = []
        for i, o in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(i, o), nn.ReLU()]
        super().__init__(*layers[:-1])
        self.sizes = sizes
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), (B,), for x (B, inputs)."""
        return super().forward(x)[:, 0]

    def flops(self) -> float:
        """Count a step: the products forward, and for the gradients of weights and of inputs, those of the network
        included, which are not computed."""
        return 6.0 * sum(i * o for i, o in zip(self.sizes, self.sizes[1:], strict=False))


def matched_width(inputs: int, depth: int, budget: float, cost: Callable[[FNN], float]) -> int:
    """Return the largest width, at least 1, at which an FNN's cost is at most the budget."""
    width = 1
    while cost(FNN(inputs, width + 1, depth)) <= budget:
        width += 1
    return width


def rivals(deq: Trained, inputs: int, depth: int) -> dict[str, Callable[[], FNN]]:
    """Make FNNs with as many parameters as a trained DEQ, and with the FLOPs of its step, by what is equal."""
    budgets = {"parameters": (deq.parameters, count_parameters), "FLOPs": (deq.flops or 0, FNN.flops)}
    widths = {rule: matched_width(inputs, depth, *budget) for rule, budget in budgets.items()}
    return {rule: partial(FNN, inputs, width, depth) for rule, width in widths.items()}


@dataclass(frozen=True)
class Course:
    """Training of every network of an experiment: Adam with a cosine on the mean squared error, on fresh samples in
    every step, once with each learning rate. Errors are measured `marks` times."""

    steps: int
    batch: int
    rates: tuple[float, ...]
    marks: int

    @property
    def note(self) -> str:
        """Note of a report."""
        text = f"Each network is trained by Adam for {self.steps} steps of {self.batch} fresh samples, "
        if len(self.rates) == 1:
            return f"{text}with a rate of {self.rates[0]:g}, which was not chosen for any of them."
        return f"{text}once with each learning rate. The rate is chosen on validation samples."


@dataclass(frozen=True)
class Trial:
    """Learning rate and its validation error; None if the training broke down."""

    rate: float
    validation: float | None


@dataclass(frozen=True)
class Trained:
    """Network after the trial with the lowest validation error. Errors are relative, by name, after each of `steps`.
    None: not finite; for FLOPs: not counted. `converged` is the share of solved samples in the last measurement."""

    name: str
    parameters: int
    flops: float | None
    trials: tuple[Trial, ...]
    steps: tuple[int, ...]
    errors: dict[str, tuple[float | None, ...]]
    largest_weight: float
    converged: float

    @property
    def loss(self) -> float:
        """Validation error, in units of the target's mean square under the sampling; infinite if training broke
        down."""
        return min((trial.validation for trial in self.trials if trial.validation is not None), default=math.inf)

    def error(self, name: str) -> float:
        """Return the last error of a name; infinite if it is not finite."""
        value = self.errors[name][-1]
        return math.inf if value is None else value


class Task(Protocol):
    """Task that a network learns."""

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, inputs) and f(x) (B,)."""

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the errors by name."""

    @property
    def scale(self) -> float:
        """Mean square of the target, the unit of the loss."""


def train(
    name: str,
    make: Callable[[], nn.Module],
    task: Task,
    course: Course,
    seed: int,
    bound: float | None = None,
    held_out: Task | None = None,
) -> tuple[Trained, nn.Module]:
    """Train the network once with each rate and return the best. It is chosen on separate samples, drawn like the
    training's or by a task of their own. With a bound, no weight is ever larger. Networks of a seed see the same
    samples.
    """
    validation = (held_out or task).batch(_generator(seed, 1), 2048)
    trials, best, lowest = [], None, math.inf
    for rate in course.rates:
        torch.manual_seed(seed)
        network = make()
        marks, errors = zip(*_trial(network, task, course, rate, seed, bound), strict=True)
        with torch.no_grad():
            error = float((network(validation[0]) - validation[1]).square().mean() / task.scale)
        trials.append(Trial(rate, finite(error)))
        if best is None or error < lowest:
            lowest = error if math.isfinite(error) else math.inf
            best = network, marks, errors
    assert best is not None
    network, marks, errors = best
    return Trained(
        name=name,
        parameters=count_parameters(network),
        flops=network.flops() if isinstance(network, (DEQ, FNN)) else None,
        trials=tuple(trials),
        steps=tuple(marks),
        errors={key: tuple(finite(mark[key]) for mark in errors) for key in errors[0]},
        largest_weight=max(float(weight.detach().abs().max()) for weight in network.parameters()),
        converged=getattr(network, "converged", 1.0),
    ), network


def _trial(
    network: nn.Module, task: Task, course: Course, rate: float, seed: int, bound: float | None
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train; return the step number and the errors before the first step and at every mark."""
    optimiser = torch.optim.Adam(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, course.steps)
    generator, every = _generator(seed, 0), max(1, course.steps // course.marks)
    for step in range(course.steps + 1):
        if step % every == 0 or step == course.steps:
            with torch.no_grad():
                yield step, task.errors(network)
        if step == course.steps:
            return
        x, y = task.batch(generator, course.batch)
        optimiser.zero_grad()
        loss = (network(x) - y).square().mean() / task.scale
        loss.backward()
        if not math.isfinite(float(nn.utils.clip_grad_norm_(network.parameters(), CLIP))):
            optimiser.zero_grad()  # a step without a gradient is skipped
        optimiser.step()
        schedule.step()
        if bound is not None:
            with torch.no_grad():
                for weight in network.parameters():
                    weight.clamp_(-bound, bound)


def _generator(seed: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed(2 * seed + purpose)


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, for which JSON has no number."""
    return value if math.isfinite(value) else None
