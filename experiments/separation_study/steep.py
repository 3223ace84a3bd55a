"""Experiment 2: the steep function g(x) = δ/(1 + δ - x₁) on [0, 1]^d with δ = 2^-d, Eq. (5).

It is the fixed point of u(z, x) = (x₁ z + δ)/(1 + δ), whose weights are at most 1, while its slope at x₁ = 1 is 2^d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import deqfast

from .claims import Claim, Comparison, compare, within
from .frame import DERIVED, RECONSTRUCTION, Experiment, Picture, Rows, Section, Table, Unit
from .networks import DEQ, DOUBLE, FNN, Course, Trained, matched_width, parameters, train, trial_rows

WIDTH = 16  # of the DEQ; the FNNs have as many parameters
DEPTHS = (1, 3)
BOUND = 1.0  # on the largest weight, of the networks that are trained under one: that of u
POINTS = 2048
LEARNT = 0.5  # of the zero function's loss: above it no network has learnt much
COMPARABLE = math.log10(3)  # losses within this factor count as comparable
ROUNDING = 1e-9
SAMPLINGS = ("uniform", "concentrated")
# Not Picard, which needs some 2^d evaluations at x₁ = 1; a linear map of one unknown is solved in three by these.
SOLVER = deqfast.Anderson(tol=1e-13, max_iter=50)


@dataclass(frozen=True)
class Sizes:
    """Dimensions d, and the training."""

    dimensions: tuple[int, ...]
    course: Course
    seeds: int


@dataclass(frozen=True)
class Result:
    """The largest error of u's fixed point, and the trained networks: free, then bounded, the DEQ first in either."""

    exact_error: float
    free: tuple[Trained, ...]
    bounded: tuple[Trained, ...]


def steep(x: Tensor, delta: float) -> Tensor:
    """Evaluate g, (B,), at x (B, d)."""
    return delta / (1 + delta - x[:, 0])


def towards_the_step(u: Tensor, delta: float) -> Tensor:
    """Map u uniform on [0, 1] to an x₁ with density proportional to g: log(1 + δ - x₁) is uniform."""
    return 1 - delta * torch.expm1(u * math.log1p(1 / delta))


@dataclass(frozen=True)
class Steep:
    """Task of one d: x uniform, or in half of the samples with x₁ concentrated where g is steep."""

    d: int
    concentrated: bool

    @property
    def delta(self) -> float:
        """δ = 2^-d."""
        return 2.0**-self.d

    @property
    def scale(self) -> float:
        """Mean square of g: δ/(1+δ), and under the density of g ((1+δ)² - δ²)/(2 (1+δ)² log(1+1/δ))."""
        delta, end = self.delta, 1 + self.delta
        uniform = delta / end
        dense = (end**2 - delta**2) / (2 * end**2 * math.log1p(1 / delta))
        return (uniform + dense) / 2 if self.concentrated else uniform

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, d) and g(x) (B,)."""
        x = torch.rand(size, self.d, generator=generator, dtype=DOUBLE)
        if self.concentrated:
            x[::2, 0] = towards_the_step(x[::2, 0], self.delta)
        return x, steep(x, self.delta)

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error under uniform x in units of the zero function's, and the largest error.

        Both on points spread by the density of g, which sees the step; the first weighted back to uniform x.
        """
        x = torch.rand(POINTS, self.d, generator=torch.Generator().manual_seed(2**31), dtype=DOUBLE)
        x[:, 0] = towards_the_step((torch.arange(POINTS, dtype=DOUBLE) / (POINTS - 1)), self.delta)
        target, weight = steep(x, self.delta), 1 + self.delta - x[:, 0]
        error = network(x) - target
        mse = (weight * error.square()).sum() / (weight * target.square()).sum()
        return {"mse": float(mse), "largest": float(error.abs().max())}


def exact_error(d: int) -> float:
    """Return the largest error of the fixed point of u, solved by deqfast, against g."""
    delta = 2.0**-d
    x = towards_the_step(torch.linspace(0, 1, 257, dtype=DOUBLE), delta)[:, None]
    block = deqfast.DEQBlock(lambda z, x: (x * z + delta) / (1 + delta), SOLVER, warn=False)
    with torch.no_grad():
        return float((block(x)[:, 0] - steep(x, delta)).abs().max())


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Train the DEQ and FNNs of as many parameters, without and with a bound on the largest weight."""
    dimension, sampling = unit.task.split("-")
    d = int(dimension[1:])
    learn = partial(train, task=Steep(d, sampling == "concentrated"), course=sizes.course, seed=unit.seed)
    budget = parameters(DEQ(d, WIDTH))
    makers: dict[str, Callable[[], torch.nn.Module]] = {"DEQ": lambda: DEQ(d, WIDTH)}
    for depth in DEPTHS:
        makers[f"FNN, {depth} hidden"] = partial(FNN, d, matched_width(d, depth, budget, parameters), depth)
    free, bounded = (
        tuple(learn(f"{name}, {kind}", make, bound=bound)[0] for name, make in makers.items())
        for kind, bound in (("free", None), ("bounded", BOUND))
    )
    return Result(exact_error(d), free, bounded)


def units(sizes: Sizes) -> list[Unit]:
    """Return a unit for each d, sampling and seed."""
    return [Unit(f"d{d}-{s}", seed) for d in sizes.dimensions for s in SAMPLINGS for seed in range(sizes.seeds)]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge the exact fixed point, the weights at comparable loss, and the errors under a bound on the weights."""
    worst = max(result.exact_error for result in results.values())
    text = "a claim about existence: u is solved, not trained, for each d down to δ = 2^-"
    claims = [
        Claim(
            "A DEQ with weights of at most 1 equals the steep function",
            DERIVED,
            within(worst, ROUNDING),
            f"largest error {worst:.1e}",
            sizes.seeds,
            text + str(max(sizes.dimensions)),
        )
    ]
    tasks: dict[str, list[Result]] = {}
    for unit, result in results.items():
        tasks.setdefault(unit.task, []).append(result)
    claims += compare([_weights(tasks), _bounded(tasks)])
    text = (
        f"ReLU DEQ of {WIDTH} units and FNNs of at most its parameters, float64, {sizes.course.steps} steps of "
        f"{sizes.course.batch} fresh samples with each learning rate, which is chosen on validation samples. Mean "
        "squared errors are under uniform x and in units of the zero function's, which is about δ itself: 1 has learnt "
        f"nothing. Losses are those of the sampling, in units of the zero function's under it. Concentrated: half of "
        f"the samples near the step. Bounded: no weight is ever above {BOUND:g}."
    )
    rows = [row for task, found in tasks.items() for row in _rows(task, found)]
    trials = [
        row for task, found in tasks.items() for row in trial_rows(task, [one.free + one.bounded for one in found])
    ]
    tables = [
        Table("Errors and weights on the steep function", RECONSTRUCTION, rows, "Means over seeds."),
        Table("Learning rates on the steep function", RECONSTRUCTION, trials, "Free, then bounded, as validated."),
    ]
    return Section(text, claims, tables, [_picture(tasks)])


def _log_ratios(pairs: list[tuple[Trained, Trained]], value: Callable[[Trained], float]) -> list[float]:
    def bounded(one: Trained) -> float:
        return min(max(value(one), 1e-20), 1e20)

    return [math.log10(bounded(one) / bounded(other)) for one, other in pairs]


def _pairs(found: list[Result], kind: str) -> list[tuple[Trained, Trained]]:
    """Return, of each seed, the DEQ and the FNN of the depth with the lowest mean loss."""
    networks = [getattr(result, kind) for result in found]
    best = min(range(1, len(DEPTHS) + 1), key=lambda depth: sum(one[depth].loss for one in networks))
    return [(one[0], one[best]) for one in networks]


def _weights(tasks: dict[str, list[Result]]) -> Comparison:
    differences, losses = [], []
    for found in tasks.values():
        pairs = _pairs(found, "free")
        apart = _log_ratios(pairs, lambda one: one.loss)
        if not _nothing_learnt(pairs) and abs(sum(apart) / len(apart)) <= COMPARABLE:
            differences.append(_log_ratios(pairs, lambda one: one.largest_weight))
            losses.append(sum(apart) / len(apart))
    reason = f"log10 ratio; losses are comparable in {len(losses)} of {len(tasks)} tasks, which are judged"
    claim = "At comparable loss the DEQ's largest weight is below the FNN's"
    everything = [_log_ratios(_pairs(found, "free"), lambda one: one.largest_weight) for found in tasks.values()]
    return Comparison(claim, RECONSTRUCTION, differences or everything, reason, judged=bool(differences))


def _bounded(tasks: dict[str, list[Result]]) -> Comparison:
    pairs = [_pairs(found, "bounded") for found in tasks.values()]
    binds = sum(any(one.largest_weight >= BOUND for pair in seeds for one in pair) for seeds in pairs)
    learnt = sum(not _nothing_learnt(seeds) for seeds in pairs)
    return Comparison(
        f"With weights of at most {BOUND:g} the DEQ's largest error is below the FNN's",
        RECONSTRUCTION,
        [_log_ratios(seeds, lambda one: one.error("largest")) for seeds in pairs],
        f"log10 ratio; a weight is at the bound in {binds}, and something is learnt in {learnt} of {len(tasks)} tasks",
        judged=binds > 0 and learnt > 0,
    )


def _nothing_learnt(pairs: list[tuple[Trained, Trained]]) -> bool:
    return min(one.loss for pair in pairs for one in pair) > LEARNT


def _rows(task: str, found: list[Result]) -> Rows:
    rows: Rows = []
    for kind in ("free", "bounded"):
        for networks in zip(*(getattr(one, kind) for one in found), strict=True):
            count = len(networks)
            rows.append(
                {
                    "task": task,
                    "network": networks[0].name,
                    "parameters": networks[0].parameters,
                    "loss": f"{sum(one.loss for one in networks) / count:.2e}",
                    "MSE": f"{sum(one.error('mse') for one in networks) / count:.2e}",
                    "largest error": f"{sum(one.error('largest') for one in networks) / count:.2e}",
                    "largest weight": f"{sum(one.largest_weight for one in networks) / count:.2f}",
                }
            )
    return rows


def _picture(tasks: dict[str, list[Result]]) -> Picture:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(SAMPLINGS), figsize=(8, 5.6), layout="constrained", sharex=True)
    for column, sampling in zip(axes.T, SAMPLINGS, strict=True):
        chosen = {int(task.split("-")[0][1:]): found for task, found in tasks.items() if task.endswith(sampling)}
        for index, name in enumerate(("DEQ", *(f"FNN, {depth} hidden" for depth in DEPTHS))):
            for kind, dash in (("free", "-"), ("bounded", "--")):
                networks = [[getattr(one, kind)[index] for one in found] for found in chosen.values()]
                weights = [sum(one.largest_weight for one in seeds) / len(seeds) for seeds in networks]
                errors = [sum(one.error("largest") for one in seeds) / len(seeds) for seeds in networks]
                style = {"color": f"C{index}", "linestyle": dash, "marker": "o", "ms": 3}
                column[0].plot(list(chosen), weights, label=f"{name}, {kind}", **style)
                column[1].plot(list(chosen), errors, **style)
        column[0].set(title=sampling, ylabel="largest weight", yscale="log")
        column[1].set(xlabel="d = -log2 δ", ylabel="largest error", yscale="log")
    axes[0, 0].legend(fontsize="x-small")
    caption = "Largest weight and largest error against d, means over seeds; the zero function's largest error is 1."
    return Picture("steep", "Steep functions", RECONSTRUCTION, caption, figure)


STEEP = Experiment(
    name="steep",
    title="Steep function",
    sizes={
        "quick": Sizes((6, 12, 20), Course(120, 128, (0.003, 0.01), 2), 1),
        "full": Sizes((6, 8, 10, 12, 14, 16, 18, 20), Course(5000, 256, (0.0003, 0.001, 0.003, 0.01), 10), 5),
    },
    result=Result,
    units=units,
    measure=measure,
    section=section,
)
