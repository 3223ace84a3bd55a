"""Experiment 1: the sawtooth T^(k) of 2^k pieces on [0, 1], T(x) = min(2x, 2 - 2x), and Theorem 1's equal DEQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

import deqfast
from deqfast.solvers import Solver

from .claims import Comparison, compare, comparison, exact_claim, within
from .frame import RECONSTRUCTION, Section, Unit, experiment, notes
from .networks import DEQ, DOUBLE, Course, Trained, rivals, train
from .summary import Kinds, Value, best_of, by_task, curves, fewest, kinds, log_ratios, networks_table

WIDTH = 16  # of the DEQ: k + 1 units represent T^(k), so that it can represent all tasks
DEPTHS = (1, 3)  # hidden layers of the FNNs
NOISE = 1e-3  # deviation of the noise on each weight of the exact DEQ, if training starts there
TEST = 4096
LEARNT = 0.9  # networks with larger errors, in units of the best constant's, have not learnt the task
VARIANCE = 1 / 12  # of T^(k) on [0, 1] for every k: the error of the best constant
TO_THE_LAST_BIT = deqfast.Picard(rtol=0, atol=1e-300, max_iter=50)  # k + 1 evaluations are enough
EXACT_START = "DEQ from the exact weights"
last_error = partial(Trained.error, name="test")


@dataclass(frozen=True)
class Sizes:
    """Values of k, those for which training also starts from the exact weights, and the training."""

    ks: tuple[int, ...]
    exact_ks: tuple[int, ...]
    course: Course
    seeds: int


@dataclass(frozen=True)
class Result:
    """Largest error of the exact DEQ on a dyadic grid, and the trained networks, the DEQ first."""

    exact_error: float
    networks: tuple[Trained, ...]


def sawtooth(k: int, x: Tensor) -> Tensor:
    """Evaluate T^(k), in float64 without error on a dyadic grid."""
    for _ in range(k):
        x = torch.minimum(2 * x, 2 - 2 * x)
    return x


def exact_deq(k: int, width: int) -> DEQ:
    """Make Theorem 1's DEQ of T^(k), of at least k + 1 units. One unit holds x, the others are
    z_t = relu(2^t x - 1 - Σ_{i<t} 2^(t-i+1) z_i). The readout is 2^k x - Σ 2^(k-i+1) z_i."""
    network = DEQ(1, width)
    cell, readout = network.block.cell, network.readout
    assert isinstance(cell, deqfast.FCCell)
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
        cell.injection.weight[0] = 1
        readout.weight[0, 0] = 2.0**k
        for t in range(1, k + 1):
            cell.injection.weight[t], cell.injection.bias[t] = 2.0**t, -1
            cell.weight[t, 1:t] = -(2.0 ** (t + 1 - torch.arange(1, t, dtype=DOUBLE)))
            readout.weight[0, t] = -(2.0 ** (k + 1 - t))
    return network


def dyadic_grid(k: int) -> Tensor:
    """Return points j 2^-(k+2) of [0, 1], (N, 1): all of them, with all kinks, or about 2^12 at an odd stride."""
    stride = 1 if k <= 10 else 2 ** (k - 10) + 1
    return (torch.arange(0, 2 ** (k + 2) + 1, stride, dtype=DOUBLE) * 2.0 ** -(k + 2))[:, None]


def exact_error(k: int, solver: Solver = TO_THE_LAST_BIT) -> float:
    """Return the largest error of Theorem 1's DEQ on the grid, by a solver that should end at f(z) = z."""
    network, grid = exact_deq(k, k + 1), dyadic_grid(k)
    network.block = deqfast.DEQBlock(network.block.cell, solver, warn=False)
    with torch.no_grad():
        return float((network(grid) - sawtooth(k, grid[:, 0])).abs().max())


@dataclass(frozen=True)
class Sawtooth:
    """Task of T^(k) at uniform x."""

    k: int

    scale = VARIANCE

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, 1) and T^(k)(x) (B,)."""
        x = torch.rand(size, 1, generator=generator, dtype=DOUBLE)
        return x, sawtooth(self.k, x[:, 0])

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error in units of the best constant's, on separate samples."""
        x, y = self.batch(torch.Generator().manual_seed(2**31), TEST)
        return {"test": float((network(x) - y).square().mean() / VARIANCE)}


def noisy_deq(k: int) -> DEQ:
    """Make the exact DEQ with noise on all weights."""
    network = exact_deq(k, WIDTH)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(NOISE * torch.randn_like(weight))
    return network


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Train the DEQ, then FNNs with equal parameters and with the FLOPs of its step."""
    k = int(unit.task[1:])
    learn = partial(train, task=Sawtooth(k), course=sizes.course, seed=unit.seed)
    trained = [learn("DEQ", partial(DEQ, 1, WIDTH))[0]]
    for depth in DEPTHS:
        for rule, make in rivals(trained[0], 1, depth).items():
            trained.append(learn(f"FNN, {depth} hidden, equal {rule}", make)[0])
    if k in sizes.exact_ks:
        trained.append(learn(EXACT_START, partial(noisy_deq, k))[0])
    return Result(exact_error(k), tuple(trained))


def tasks(sizes: Sizes) -> list[str]:
    """Return a task for each k."""
    return [f"k{k}" for k in sizes.ks]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge Theorem 1's construction, and for each k what training finds at equal parameters and at equal FLOPs.

    Tasks that no network learns are a separate claim without a verdict: pooled, they would hide the others.
    """
    networks = {task: kinds(by_seed) for task, by_seed in by_task(results).items()}
    worst = max(result.exact_error for result in results.values())
    existence = exact_claim("sawtooth exact", within(worst, 0), fewest(results), worst=worst)
    trained = {task: [each for each in chain(*every) if each.name != EXACT_START] for task, every in networks.items()}
    idle = [task for task, some in trained.items() if min(map(last_error, some)) > LEARNT]
    groups = [[task] for task in networks if task not in idle] + ([idle] if idle else [])
    rules = ("parameters", "FLOPs")
    compared = [_comparison(rule, {task: networks[task] for task in group}) for group in groups for rule in rules]
    if starts := [every[-1] for every in networks.values() if every[-1][0].name == EXACT_START]:
        compared.append(_stays(starts))
    half = {task: Sawtooth(int(task[1:])).errors(lambda x: torch.full_like(x[:, 0], 0.5))["test"] for task in networks}
    shown = {"half": ", ".join(f"{error:.3f} ({task})" for task, error in half.items()), "learnt": LEARNT}
    items = notes("sawtooth", idle=", ".join(idle) or "no task", width=WIDTH, **shown)
    columns: dict[str, Value] = {"error": last_error, "share solved": lambda network: network.converged}
    table = networks_table("Errors on the sawtooth", RECONSTRUCTION, networks, columns)
    title, label = "Training on the sawtooth", "error / (1/12)"
    picture = curves("sawtooth", title, RECONSTRUCTION, networks, "test", label, level=1)
    items += [*notes("matched"), sizes.course.note]
    return Section(items, [existence, *compare(compared)], [table], [picture])


def _comparison(rule: str, tasks: dict[str, Kinds]) -> Comparison:
    differences, rivals, learnt = [], [], False
    for task, (own, *others) in tasks.items():
        rival = best_of([kind for kind in others if kind[0].name.endswith(f"equal {rule}")])
        differences.append(log_ratios(own, rival, last_error))
        rivals.append(f"{rival[0].name} ({task})")
        learnt |= min(map(last_error, (*own, *rival))) <= LEARNT
    every = [*chain(*differences)]
    return comparison(
        "sawtooth trained",
        differences,
        learnt,
        tasks=", ".join(tasks),
        rule=rule,
        rivals="; ".join(rivals),
        worse=sum(ratio > 0 for ratio in every),
        pairs=len(every),
        mean=10 ** fmean(every),
        idle="" if learnt else f"; no network learns: all errors are above {LEARNT:g}",
    )


def _stays(tasks: Kinds) -> Comparison:
    starts = [[replace(each, errors={"test": each.errors["test"][:1]}) for each in seeds] for seeds in tasks]
    differences = [log_ratios(seeds, start, last_error) for seeds, start in zip(tasks, starts, strict=True)]
    return comparison("sawtooth stays", differences, noise=NOISE)


SAWTOOTH = experiment(
    __name__,
    "Sawtooth",
    quick=Sizes((1, 3, 5, 10, 15), (3,), Course(150, 128, (0.003, 0.01), 5), 1),
    full=Sizes((1, 3, 5, 10, 15), (3, 5), Course(800, 128, (0.001, 0.003, 0.01), 8), 5),
    long=Sizes((5, 10, 15), (), Course(20_000, 128, (0.003,), 8), 5),
)
