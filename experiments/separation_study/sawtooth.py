"""Experiment 1: the sawtooth T^(k) of 2^k pieces on [0, 1], T(x) = min(2x, 2 - 2x), and Theorem 1's DEQ, its equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import deqfast
from deqfast.solvers import Solver

from .claims import FAILS, HOLDS, Claim, Comparison, compare
from .frame import DERIVED, EXACT, RECONSTRUCTION, Experiment, Picture, Rows, Section, Table, Unit
from .networks import DEQ, DOUBLE, FNN, Course, Trained, matched_width, parameters, train, trial_rows

WIDTH = 16  # of the DEQ: k + 1 units represent T^(k), so that all tasks are within it
DEPTHS = (1, 3)  # hidden layers of the FNNs
NOISE = 1e-3  # deviation of what is added to each weight of the exact DEQ where training starts there
TEST = 4096
LEARNT = 0.9  # errors above, in units of the best constant's, are no success of either network
VARIANCE = 1 / 12  # of T^(k) on [0, 1] for every k: the error of the best constant
TO_THE_LAST_BIT = deqfast.Picard(tol=1e-300, max_iter=50, stop="abs")  # k + 1 evaluations are enough
EXACT_START = "DEQ from the exact weights"


@dataclass(frozen=True)
class Sizes:
    """Which k, those of them that training also starts from the exact weights of, and the training."""

    ks: tuple[int, ...]
    exact_ks: tuple[int, ...]
    course: Course
    seeds: int


@dataclass(frozen=True)
class Result:
    """The largest error of the exact DEQ on a dyadic grid, and the trained networks, the DEQ first."""

    exact_error: float
    networks: tuple[Trained, ...]


def sawtooth(k: int, x: Tensor) -> Tensor:
    """Evaluate T^(k), in float64 without error on a dyadic grid."""
    for _ in range(k):
        x = torch.minimum(2 * x, 2 - 2 * x)
    return x


def exact_deq(k: int, width: int) -> DEQ:
    """Make Theorem 1's DEQ of T^(k), of at least k + 1 units: a unit that holds x, then
    z_t = relu(2^t x - 1 - Σ_{i<t} 2^(t-i+1) z_i); a readout 2^k x - Σ 2^(k-i+1) z_i."""
    network = DEQ(1, width)
    cell, readout = network.cell, network.readout
    with torch.no_grad():
        for one in network.parameters():
            one.zero_()
        cell.injection.weight[0] = 1
        readout.weight[0, 0] = 2.0**k
        for t in range(1, k + 1):
            cell.injection.weight[t], cell.injection.bias[t] = 2.0**t, -1
            cell.weight[t, 1:t] = -(2.0 ** (t + 1 - torch.arange(1, t, dtype=DOUBLE)))
            readout.weight[0, t] = -(2.0 ** (k + 1 - t))
    return network


def dyadic_grid(k: int) -> Tensor:
    """Return (N, 1) points j 2^-(k+2) of [0, 1]: all, kinks and between, or some 2^12 at an odd stride."""
    stride = 1 if k <= 10 else 2 ** (k - 10) + 1
    return (torch.arange(0, 2 ** (k + 2) + 1, stride, dtype=DOUBLE) * 2.0 ** -(k + 2))[:, None]


def exact_error(k: int, solver: Solver = TO_THE_LAST_BIT, kernel: str = "auto") -> float:
    """Return the largest error of Theorem 1's DEQ on the grid, by a solver that is to end where f(z) = z."""
    network, grid = exact_deq(k, k + 1), dyadic_grid(k)
    network.block = deqfast.DEQBlock(network.cell, solver, kernel=kernel, warn=False)
    with torch.no_grad():
        return float((network(grid) - sawtooth(k, grid[:, 0])).abs().max())


@dataclass(frozen=True)
class Sawtooth:
    """Uniform x and T^(k) of it."""

    k: int

    scale = VARIANCE

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, 1) and T^(k)(x) (B,)."""
        x = torch.rand(size, 1, generator=generator, dtype=DOUBLE)
        return x, sawtooth(self.k, x[:, 0])

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error in units of the best constant's, on samples of their own."""
        x, y = self.batch(torch.Generator().manual_seed(2**31), TEST)
        return {"test": float((network(x) - y).square().mean() / VARIANCE)}


def noisy_deq(k: int) -> DEQ:
    """Make the exact DEQ with noise on all weights."""
    network = exact_deq(k, WIDTH)
    with torch.no_grad():
        for one in network.parameters():
            one.add_(NOISE * torch.randn_like(one))
    return network


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Train the DEQ, then FNNs of as many parameters, and of as many FLOPs as its step took."""
    k = int(unit.task[1:])
    learn = partial(train, task=Sawtooth(k), course=sizes.course, seed=unit.seed)
    deq, network = learn("DEQ", lambda: DEQ(1, WIDTH))
    assert isinstance(network, DEQ)
    found = [deq]
    for depth in DEPTHS:
        for rule, width in (
            ("parameters", matched_width(1, depth, deq.parameters, parameters)),
            ("FLOPs", matched_width(1, depth, network.flops(), FNN.flops)),
        ):
            found.append(learn(f"FNN, {depth} hidden, equal {rule}", partial(FNN, 1, width, depth))[0])
    if k in sizes.exact_ks:
        found.append(learn(EXACT_START, partial(noisy_deq, k))[0])
    return Result(exact_error(k), tuple(found))


def units(sizes: Sizes) -> list[Unit]:
    """Return a unit for each k and seed."""
    return [Unit(f"k{k}", seed) for k in sizes.ks for seed in range(sizes.seeds)]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge Theorem 1's construction, and what training finds at equal parameters and at equal FLOPs."""
    worst = max(result.exact_error for result in results.values())
    claims = [
        Claim(
            "A DEQ of k + 1 units equals the sawtooth of 2^k pieces",
            EXACT,
            HOLDS if worst == 0 else FAILS,
            f"largest error {worst:.1e}",
            sizes.seeds,
            "a claim about existence: the construction is checked on a dyadic grid in float64, not trained",
        )
    ]
    tasks: dict[str, list[Result]] = {}
    for unit, result in results.items():
        tasks.setdefault(unit.task, []).append(result)
    compared = [_comparison(rule, tasks) for rule in ("parameters", "FLOPs")]
    if starts := [found for found in tasks.values() if found[0].networks[-1].name == EXACT_START]:
        compared.append(_stays([[result.networks[-1] for result in found] for found in starts]))
    claims += compare(compared)
    rows = [row for task, found in tasks.items() for row in _rows(task, found)]
    trials = [row for task, found in tasks.items() for row in trial_rows(task, [one.networks for one in found])]
    text = (
        "The construction needs no training; the rest is what training finds. Errors are mean squared errors on fresh "
        f"points in units of the best constant's, 1/12: a network at 1 has learnt nothing. The DEQ has {WIDTH} units. "
        "FNNs have the largest width at which their parameters, or the FLOPs of a training step, are at most the "
        "DEQ's; of its FLOPs the evaluations of both solves are a part, as counted while it was trained. Every "
        f"network was trained with each learning rate for {sizes.course.steps} steps of {sizes.course.batch} fresh "
        "samples; the rate is chosen on validation samples."
    )
    tables = [
        Table("Errors on the sawtooth", RECONSTRUCTION, rows, "Median over seeds, and their range."),
        Table("Learning rates", RECONSTRUCTION, trials, "Validation error of every trial, for each seed."),
    ]
    return Section(text, claims, tables, [_picture(tasks)])


def log_error(network: Trained, name: str = "test") -> float:
    """Return log10 of the last error, bounded to [-20, 20] so that breaking down and being exact are numbers too."""
    return math.log10(min(max(network.error(name), 1e-20), 1e20))


def best_of(group: list[list[Trained]]) -> list[Trained]:
    """Return, of networks of several kinds in each seed, the kind with the lowest mean validation error."""

    def validation(kind: int) -> float:
        found = [[trial.validation for trial in seed[kind].trials if trial.validation is not None] for seed in group]
        return sum(min(one, default=math.inf) for one in found)

    best = min(range(len(group[0])), key=validation)
    return [seed[best] for seed in group]


def _comparison(rule: str, tasks: dict[str, list[Result]]) -> Comparison:
    differences, rivals, idle = [], [], []
    for task, found in tasks.items():
        own = [result.networks[0] for result in found]
        rival = best_of([[one for one in r.networks if one.name.endswith(f"equal {rule}")] for r in found])
        differences.append([log_error(one) - log_error(other) for one, other in zip(own, rival, strict=True)])
        rivals.append(f"{rival[0].name} ({task})")
        if min(one.error("test") for one in own + rival) > LEARNT:
            idle.append(task)
    reason = f"log10 ratio, against the best in validation: {'; '.join(rivals)}"
    reason += f"; neither is better than the constant: {', '.join(idle) or 'nowhere'}"
    claim = f"Trained, the DEQ's error is below the FNN's at equal {rule}"
    return Comparison(claim, RECONSTRUCTION, differences, reason, judged=len(idle) < len(tasks))


def _stays(tasks: list[list[Trained]]) -> Comparison:
    def start(one: Trained) -> float:
        first = one.errors["test"][0]
        return math.log10(min(max(first, 1e-20), 1e20)) if first is not None else 20.0

    differences = [[log_error(one) - start(one) for one in seeds] for seeds in tasks]
    claim = f"From the exact weights with noise of {NOISE:g}, training lowers the error"
    return Comparison(claim, DERIVED, differences, "log10 ratio of the last error to the first")


def _rows(task: str, found: list[Result]) -> Rows:
    rows: Rows = [{"task": task, "network": "best constant", "parameters": 1, "FLOPs a step": "–", "error": "1"}]
    rows[0] |= {"lowest": "1", "highest": "1", "converged": "–"}
    for networks in zip(*(result.networks for result in found), strict=True):
        errors = sorted(one.error("test") for one in networks)
        rows.append(
            {
                "task": task,
                "network": networks[0].name,
                "parameters": networks[0].parameters,
                "FLOPs a step": f"{max(one.flops or 0 for one in networks):.0f}",
                "error": f"{errors[len(errors) // 2]:.2e}",
                "lowest": f"{errors[0]:.2e}",
                "highest": f"{errors[-1]:.2e}",
                "converged": f"{min(one.converged for one in networks):.0%}" if "DEQ" in networks[0].name else "–",
            }
        )
    return rows


def _picture(tasks: dict[str, list[Result]]) -> Picture:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 3.6), layout="constrained", squeeze=False)
    for axis, (task, found) in zip(axes[0], tasks.items(), strict=True):
        for networks in zip(*(result.networks for result in found), strict=True):
            curves = torch.tensor([[math.nan if v is None else v for v in one.errors["test"]] for one in networks])
            axis.plot(networks[0].steps, curves.median(0).values, marker="o", ms=3, label=networks[0].name)
        axis.axhline(1, color="grey", ls=":", label="best constant")
        axis.set(title=task, xlabel="step", yscale="log")
    axes[0, 0].set_ylabel("test error / (1/12)")
    lines = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize="small")
    caption = "Test error against training steps, median over seeds."
    return Picture("sawtooth", "Training on the sawtooth", RECONSTRUCTION, caption, figure)


SAWTOOTH = Experiment(
    name="sawtooth",
    title="Sawtooth",
    sizes={
        "quick": Sizes((1, 3, 5, 10, 15), (3,), Course(150, 128, (0.003, 0.01), 5), 1),
        "full": Sizes((1, 3, 5, 10, 15), (1, 3, 5, 10), Course(5000, 256, (0.0003, 0.001, 0.003, 0.01), 25), 5),
    },
    result=Result,
    units=units,
    measure=measure,
    section=section,
)
