"""Experiment 2: the steep function g(x) = δ/(1 + δ - x₁) on [0, 1]^d with δ = 2^-d, Eq. (5).

It is the fixed point of u(z, x) = (x₁ z + δ)/(1 + δ), whose weights are at most 1, while its slope at x₁ = 1 is 2^d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean

import torch
from nc_study.networks import count_parameters
from runs import style
from torch import Tensor

import deqfast

from .claims import Comparison, compare, comparison, exact_claim, within
from .frame import RECONSTRUCTION, Picture, Section, Unit, experiment, notes
from .networks import DEQ, DOUBLE, FNN, Course, Trained, matched_width, train
from .summary import Kinds, Value, best_of, by_task, fewest, kinds, log_ratios, networks_table

WIDTH = 16  # of the DEQ; the FNNs have as many parameters
DEPTHS = (1, 3)
BOUND = 0.5  # on all weights of a seed's networks, in units of the smallest of their free largest weights
POINTS = 2048
LEARNT = 0.5  # of the zero function's loss: above this no network has learnt much
SEES = 0.9  # of the zero function's largest error: above this a network has missed the step, at any loss
COMPARABLE = math.log10(3)  # losses within this factor count as comparable
ROUNDING = 1e-9
SAMPLINGS = ("uniform", "concentrated")
# Picard needs about 2^d evaluations at x₁ = 1; Anderson solves a linear map of one unknown in three.
SOLVER = deqfast.Anderson(rtol=1e-13, max_iter=50)
largest_weight = attrgetter("largest_weight")
largest_error = partial(Trained.error, name="largest")


@dataclass(frozen=True)
class Sizes:
    """Dimensions d, the training, and how samples are drawn."""

    dimensions: tuple[int, ...]
    course: Course
    seeds: int
    samplings: tuple[str, ...] = SAMPLINGS


@dataclass(frozen=True)
class Result:
    """Largest error of u's fixed point, and the networks trained freely and under a bound, each with the DEQ first."""

    exact_error: float
    free: tuple[Trained, ...]
    bound: float
    bounded: tuple[Trained, ...]


def steep(x: Tensor, delta: float) -> Tensor:
    """Evaluate g, (B,), at x (B, d)."""
    return delta / (1 + delta - x[:, 0])


def towards_the_step(u: Tensor, delta: float) -> Tensor:
    """Map u uniform on [0, 1] to an x₁ with density proportional to g: log(1 + δ - x₁) is uniform."""
    return 1 - delta * torch.expm1(u * math.log1p(1 / delta))


@dataclass(frozen=True)
class Steep:
    """Task of one d: x uniform, or in half of the samples with x₁ concentrated at the steep part of g."""

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

        Both use points drawn by the density of g, which covers the step; the first is weighted back to uniform x.
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
    """Train the DEQ and FNNs with equal parameters, freely, then under one bound on the largest weight."""
    d, sampling = dimension(unit.task), unit.task.split("-")[1]
    learn = partial(train, task=Steep(d, sampling == "concentrated"), course=sizes.course, seed=unit.seed)
    budget = count_parameters(DEQ(d, WIDTH))
    makers: dict[str, Callable[[], torch.nn.Module]] = {"DEQ": partial(DEQ, d, WIDTH)}
    for depth in DEPTHS:
        makers[f"FNN, {depth} hidden"] = partial(FNN, d, matched_width(d, depth, budget, count_parameters), depth)
    free = tuple(learn(f"{name}, free", make)[0] for name, make in makers.items())
    bound = BOUND * min(map(largest_weight, free))
    bounded = tuple(learn(f"{name}, bounded", make, bound=bound)[0] for name, make in makers.items())
    return Result(exact_error(d), free, bound, bounded)


def tasks(sizes: Sizes) -> list[str]:
    """Return a task for each d and sampling."""
    return [f"d{d}-{sampling}" for d in sizes.dimensions for sampling in sizes.samplings]


def dimension(task: str) -> int:
    """Return d of a task."""
    return int(task.split("-")[0][1:])


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge the exact fixed point, the weights at comparable loss, and the errors under a bound on the weights."""
    worst = max(result.exact_error for result in results.values())
    solved = ", ".join(map(str, sorted({dimension(unit.task) for unit in results})))
    existence = exact_claim("steep exact", within(worst, ROUNDING), fewest(results), worst=worst, solved=solved)
    dimensions: dict[str, dict[str, list[Result]]] = {}
    networks: dict[str, Kinds] = {}
    for task, measured in by_task(results).items():
        dimensions.setdefault(task.split("-")[0], {})[task] = measured
        networks[task] = kinds(measured, lambda each: (*each.free, *each.bounded))
    compared = [judge(d, measured) for judge in (_weights, _bounded) for d, measured in dimensions.items()]
    columns: dict[str, Value] = {
        "loss": lambda network: network.loss,
        "MSE": partial(Trained.error, name="mse"),
        "largest error": largest_error,
        "largest weight": largest_weight,
    }
    table = networks_table("Errors and weights on the steep function", RECONSTRUCTION, networks, columns)
    items = notes("steep", width=WIDTH, course=sizes.course.note, bound=BOUND, learnt=LEARNT, sees=SEES)
    return Section(items, [existence, *compare(compared)], [table], [_picture(networks, sizes.course.steps)])


def _pairs(tasks: dict[str, list[Result]], kind: str) -> dict[str, tuple[Sequence[Trained], Sequence[Trained]]]:
    """Return of each task the DEQ, and the FNN of the depth with the lowest mean validation loss, each by seed."""
    pairs: dict[str, tuple[Sequence[Trained], Sequence[Trained]]] = {}
    for task, results in tasks.items():
        own, *others = kinds(results, attrgetter(kind))
        pairs[task] = own, best_of(others)
    return pairs


def _learnt(pair: tuple[Sequence[Trained], Sequence[Trained]]) -> bool:
    return any(each.loss <= LEARNT and largest_error(each) <= SEES for seeds in pair for each in seeds)


def _weights(d: str, tasks: dict[str, list[Result]]) -> Comparison:
    pairs = _pairs(tasks, "free")
    apart = {task: fmean(log_ratios(*pair, lambda network: network.loss)) for task, pair in pairs.items()}
    judged = [task for task, pair in pairs.items() if _learnt(pair) and abs(apart[task]) <= COMPARABLE]
    losses = ", ".join(f"{10 ** apart[task]:.2f}" for task in judged)
    basis = f"judged on {', '.join(judged)}, with losses of {losses} times the FNN's"
    basis = basis if judged else _idle(pairs, ", or losses are not comparable,")
    differences = [log_ratios(*pairs[task], largest_weight) for task in judged or pairs]
    return comparison("steep weights", differences, bool(judged), d=d, basis=basis)


def _bounded(d: str, tasks: dict[str, list[Result]]) -> Comparison:
    pairs = _pairs(tasks, "bounded")
    judged = [task for task, pair in pairs.items() if _learnt(pair)]
    shares = [_shares(tasks[task], pairs[task][1][0].name) for task in judged]
    bound = "; ".join(f"{own:.2f} of the DEQ's and {other:.2f} of the FNN's" for own, other in shares)
    basis = f"judged on {', '.join(judged)}; the bound in units of free weights: {bound}" if judged else _idle(pairs)
    differences = [log_ratios(*pairs[task], largest_error) for task in judged or pairs]
    return comparison("steep bounded", differences, bool(judged), d=d, basis=basis)


def _idle(tasks: Iterable[str], further: str = "") -> str:
    return f"not judged: the step was not learnt{further} in {', '.join(tasks)}"


def _shares(results: list[Result], rival: str) -> tuple[float, float]:
    """Return the mean of the bound in units of the free largest weight, for the DEQ and the compared FNN."""
    index = [network.name for network in results[0].bounded].index(rival)
    own, other = (fmean(each.bound / each.free[at].largest_weight for each in results) for at in (0, index))
    return own, other


def _picture(tasks: dict[str, Kinds], steps: int) -> Picture:
    """Draw two panels for each sampling: the weights of free networks with the bound, and the errors of all."""
    samplings = [sampling for sampling in SAMPLINGS if any(task.endswith(sampling) for task in tasks)]
    figure = style.page(1.1 + 3.6 * len(samplings), style.NARROW)
    axes = figure.subplots(2 * len(samplings), 1, sharex=True)
    for weights, errors, sampling in zip(axes[::2], axes[1::2], samplings, strict=True):
        chosen = {dimension(task): every for task, every in tasks.items() if task.endswith(sampling)}
        for by_dimension in zip(*chosen.values(), strict=True):
            name = by_dimension[0][0].name
            look = style.look(name) | {"label": name}
            if name.endswith("bounded"):
                look |= {"ls": "--", "mfc": "none"}
            else:
                weights.plot(list(chosen), _means(by_dimension, largest_weight), **look)
            errors.plot(list(chosen), _means(by_dimension, largest_error), **look)
        # The last networks are bounded, all of a seed by the same bound, which their largest weights meet.
        bounds = _means(by_dimension, largest_weight)
        weights.plot(list(chosen), bounds, ls=":", color=style.BLACK, label="the bound")
        weights.set(title=f"Largest weight, x {sampling}, {steps:,} steps", yscale="log")
        errors.set(title=f"Largest error, x {sampling}, {steps:,} steps", yscale="log", xticks=list(chosen))
        errors.set_ylim(top=1.1)  # the zero function's is 1
        for axis in (weights, errors):
            style.decimal(axis.yaxis, (1, 2, 3, 5))
    axes[-1].set_xlabel("d = -log2 δ")
    style.legend(figure, 2, handlelength=4)
    caption = "Largest weight and largest error against d, means over seeds; the zero function's largest error is 1."
    return Picture("steep", "Steep functions", RECONSTRUCTION, caption, figure)


def _means(by_dimension: Iterable[Sequence[Trained]], value: Callable[[Trained], float]) -> list[float]:
    return [fmean(map(value, networks)) for networks in by_dimension]


STEEP = experiment(
    __name__,
    "Steep function",
    quick=Sizes((6, 12, 20), Course(120, 128, (0.003, 0.01), 2), 1),
    full=Sizes((6, 12, 20), Course(800, 128, (0.001, 0.003, 0.01), 3), 5),
    long=Sizes((6, 8, 10, 12, 14, 16, 18, 20), Course(20_000, 128, (0.003,), 8), 5, ("concentrated",)),
)
