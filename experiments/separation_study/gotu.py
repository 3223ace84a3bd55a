"""Experiment 3: generalisation on the unseen (GOTU), x uniform on {-1, 1}^15 with a part of the domain never seen.

The learnt functions are expanded in the Fourier-Walsh basis over all 2^15 points. The canonical hold-out is a linear
function with x_k frozen to 1. Its prediction is exact: with a plain bias b and h' = β⁻ᵖ as in the experiment on the
diagonal DEQ, gradient flow keeps h(β_k) - c b. The error on the unseen half is 4 (c_k - β_k)².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
import torch
from nc_study.networks import count_parameters
from scipy import optimize
from scipy.linalg import hadamard
from torch import Tensor, nn

import deqfast

from .claims import FAILS, HOLDS, Claim, Comparison, compare, comparison, exact_claim, within
from .diagonal import ADJOINTS, RULES, SOLVER, DiagonalCell, Rule
from .frame import DERIVED, RECONSTRUCTION, Row, Section, Table, Unit, experiment, notes
from .networks import DEQ, DOUBLE, FNN, Course, Trained, matched_width, train
from .summary import Kinds, by_task, curves, kinds, log_ratios

D = 15
WIDTH = 16  # of the DEQ; the FNN has as many parameters
DEPTH = 2
HELD = 1.5  # coefficient c_k of the frozen coordinate; the other coefficients are β(0) and stay there
DESCENT = (0.01, 1000)  # step size and steps in the canonical hold-out
USUAL = {"DEQ": 1.0, "diagonal network": 1e-4}  # β(0) of w = 0, and of the small weights of that literature
AGREES = 0.05  # relative error of gradient descent at that step size, at most

Coefficients = dict[tuple[int, ...], float]
"""Function on {-1, 1}^15 as Walsh coefficients, each with the coordinates of its product."""


@dataclass(frozen=True)
class Target:
    """Function, its minimum-degree interpolator on the seen part, and that part."""

    coefficients: Coefficients
    interpolator: Coefficients
    seen: Callable[[Tensor], Tensor]


TARGETS = {
    "f1": Target(
        {(0, 1): 1.0, (1, 2): -1.25, (0, 2): 1.5},
        {(2,): 1.0, (0,): -1.25, (1,): 1.5},
        lambda x: x[:, 0] * x[:, 1] * x[:, 2] > 0,
    ),
    "f2": Target({(0, 1): 1.0}, {(0,): 1.0, (1,): 1.0, (): -1.0}, lambda x: (x[:, 0] > 0) | (x[:, 1] > 0)),
}


@dataclass(frozen=True)
class Sizes:
    """The training, and the initial values of all β of the canonical hold-out."""

    course: Course
    initials: tuple[float, ...]
    seeds: int


@dataclass(frozen=True)
class HoldOut:
    """Error on the unseen half of the canonical hold-out: predicted, and by gradient descent."""

    rule: str
    initial: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Result:
    """Trained networks, each with its Walsh energy by degree and its distance from the minimum-degree interpolator (a
    mean square over all points); or the hold-outs."""

    networks: tuple[Trained, ...] = ()
    energies: tuple[tuple[float, ...], ...] = ()
    to_interpolator: tuple[float, ...] = ()
    holdouts: tuple[HoldOut, ...] = ()


def cube(d: int = D) -> Tensor:
    """Return all points of {-1, 1}^d, (2^d, d): coordinate i is -1 if bit i of the row's number is set."""
    bits = torch.arange(2**d)[:, None] >> torch.arange(d) & 1
    return 1 - 2 * bits.to(DOUBLE)


def walsh(values: Tensor) -> Tensor:
    """Transform values (2^d,) at the points of `cube` to Walsh coefficients (2^d,). Entry S belongs to the product of
    the coordinates whose bits are set in S."""
    d = len(values).bit_length() - 1
    high, low = (torch.from_numpy(hadamard(2**bits).astype(float)) for bits in (d - d // 2, d // 2))
    return (high @ values.view(len(high), len(low)) @ low).flatten() / len(values)


def degrees(d: int = D) -> Tensor:
    """Return the degree of each entry of `walsh`, (2^d,)."""
    return (cube(d) < 0).sum(1)


def evaluate(coefficients: Coefficients, x: Tensor) -> Tensor:
    """Evaluate a function at x (B, d)."""
    return torch.stack([value * x[:, list(places)].prod(1) for places, value in coefficients.items()]).sum(0)


def everywhere(network: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Evaluate a network at many points, a part at a time: the histories of solves take memory."""
    return torch.cat([network(part) for part in points.split(2048)])


@dataclass(frozen=True)
class Gotu:
    """Uniform samples of the seen part of a target."""

    target: Target
    points: Tensor
    seen: Tensor

    scale = 1.0

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, 15) of the seen part and f(x) (B,)."""
        rows = self.seen.nonzero()[:, 0]
        x = self.points[rows[torch.randint(len(rows), (size,), generator=generator)]]
        return x, evaluate(self.target.coefficients, x)

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error on every seen and on every unseen point, the latter the GOTU error."""
        square = (everywhere(network, self.points) - evaluate(self.target.coefficients, self.points)).square()
        return {"seen": float(square[self.seen].mean()), "unseen": float(square[~self.seen].mean())}


class DiagonalDEQ(nn.Module):
    """Diagonal linear DEQ on (x, -x), so that coefficients have both signs, and a plain bias."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.block = deqfast.DEQBlock(DiagonalCell(torch.ones(2 * inputs, dtype=DOUBLE)), SOLVER, ADJOINTS["DEQ"])
        self.bias = nn.Parameter(torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), (B,), for x (B, inputs); one solve per nonzero input, because f is linear."""
        basis = torch.eye(2 * x.shape[1], dtype=x.dtype)
        beta = self.block(basis).sum(1)
        return torch.cat([x, -x], 1) @ beta + self.bias


def predicted_error(rule: Rule, initial: float) -> float:
    """Return the error 4 (c_k - β_k)² on the unseen half of the canonical hold-out: the limit of β_k is the root of
    h(β) - h(β(0)) = c b with b = c_k - β."""

    def gap(beta: float) -> float:
        kept = rule.mirror(np.array(beta)) - rule.mirror(np.array(initial))
        return float(kept - rule.factor * (HELD - beta))

    limit = optimize.brentq(gap, 1e-6 * min(initial, HELD), 10 * max(initial, HELD), xtol=1e-14)
    return float(4 * (HELD - limit) ** 2)


def hold_out(rule: Rule, initial: float) -> HoldOut:
    """Run gradient descent on 16 points that have the moments of the seen half: columns of a Hadamard matrix, of which
    the first serves x_k, frozen to 1, and the bias. The DEQs go through deqfast, the comparator is β = u²."""
    x = torch.from_numpy(hadamard(D + 1)[:, :D].astype(float))
    target = torch.tensor([HELD, *[initial] * (D - 1)], dtype=DOUBLE)
    start, bias = torch.full((D,), initial, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE, requires_grad=True)
    cell = DiagonalCell(start)
    block = deqfast.DEQBlock(cell, SOLVER, ADJOINTS[rule.name]) if rule.name in ADJOINTS else None
    weight: Tensor = cell.weight if block else start.sqrt().requires_grad_()
    step, steps = DESCENT
    for _ in range(steps):
        output = block(x).sum(1) if block else x @ weight.square()
        gradients = torch.autograd.grad((output + bias - x @ target).square().mean() / 2, [weight, bias])
        with torch.no_grad():
            for parameter, gradient in zip((weight, bias), gradients, strict=True):
                parameter.sub_(step * gradient)
    beta = cell.beta if block else weight.detach().square()
    measured = float((bias.detach() - beta[0] + HELD).square() + (beta - target)[1:].square().sum())
    return HoldOut(rule.name, initial, predicted_error(rule, initial), measured)


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Train the networks on a target, and expand what they learnt; or descend on the canonical hold-out."""
    if unit.task == "holdout":
        rules = (RULES[0], RULES[2])
        return Result(holdouts=tuple(hold_out(rule, initial) for rule in rules for initial in sizes.initials))
    points, target = cube(), TARGETS[unit.task]
    task = Gotu(target, points, target.seen(points))
    width = matched_width(D, DEPTH, count_parameters(DEQ(D, WIDTH)), count_parameters)
    makers: dict[str, Callable[[], nn.Module]] = {
        "diagonal linear DEQ": lambda: DiagonalDEQ(D),
        "DEQ": lambda: DEQ(D, WIDTH),
        f"FNN, {DEPTH} hidden": partial(FNN, D, width, DEPTH),
    }
    learnt = [train(name, make, task, sizes.course, unit.seed) for name, make in makers.items()]
    with torch.no_grad():
        spectra = [walsh(everywhere(network, points)) for _, network in learnt]
    interpolator = walsh(evaluate(target.interpolator, points))
    energies = [torch.zeros(D + 1, dtype=DOUBLE).index_add(0, degrees(), spectrum.square()) for spectrum in spectra]
    return Result(
        networks=tuple(trained for trained, _ in learnt),
        energies=tuple(tuple(energy.tolist()) for energy in energies),
        to_interpolator=tuple(float((spectrum - interpolator).square().sum()) for spectrum in spectra),
    )


def units(sizes: Sizes) -> list[Unit]:
    """Return a unit for each target and seed, and the canonical hold-out, which is deterministic."""
    return [*(Unit(name, seed) for name in TARGETS for seed in range(sizes.seeds)), Unit("holdout", 0)]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge the error on the unseen part, what is learnt in its place, and the canonical hold-out's prediction."""
    tasks = by_task(results)
    holdouts = [holdout for result in tasks.pop("holdout", []) for holdout in result.holdouts]
    claims, tables, pictures = [], [], []
    if tasks:
        networks = {name: kinds(by_seed) for name, by_seed in tasks.items()}
        claims = compare(_comparisons(networks))
        rows = [row for name, by_seed in tasks.items() for row in _rows(name, by_seed)]
        tables.append(Table("Errors on the unseen part", RECONSTRUCTION, rows, "Means over seeds and all 2^15 points."))
        title = "Generalisation on the unseen"
        pictures.append(curves("gotu", title, RECONSTRUCTION, networks, "unseen", "error on all unseen points"))
    if holdouts:
        claims += _holdout_claims(holdouts)
        shown: list[Row] = [
            {
                "network": each.rule,
                "β(0)": f"{each.initial:g}",
                "predicted": f"{each.predicted:.4g}",
                "by descent": f"{each.measured:.4g}",
            }
            for each in holdouts
        ]
        least = f"For β(0) → 0 it tends to {4 * HELD**2:g}, the error of the minimum-degree interpolator."
        tables.append(Table("Canonical hold-out: error on the unseen half", DERIVED, shown, least))
    return Section(notes("gotu", course=sizes.course.note), claims, tables, pictures)


def _comparisons(tasks: dict[str, Kinds]) -> list[Comparison]:
    compared, names, unseen = [], ", ".join(tasks), partial(Trained.error, name="unseen")
    for index, label in ((0, "diagonal linear DEQ"), (1, "DEQ")):
        differences = [log_ratios(every[index], every[2], unseen) for every in tasks.values()]
        seen = max(network.error("seen") for every in tasks.values() for network in every[index])
        compared.append(comparison("gotu trained", differences, label=label, tasks=names, seen=seen))
    return compared


def _holdout_claims(holdouts: list[HoldOut]) -> list[Claim]:
    apart = max(abs(each.measured - each.predicted) / each.predicted for each in holdouts)
    rules = dict.fromkeys(each.rule for each in holdouts)
    deq, network = ([each for each in holdouts if each.rule == rule] for rule in rules)
    lower = [each for each, other in zip(deq, network, strict=True) if each.predicted < other.predicted]
    usual = {rule.name: predicted_error(rule, USUAL[rule.name]) for rule in RULES if rule.name in USUAL}
    starts, every = (", ".join(f"{each.initial:g}" for each in some) for some in (lower, deq))
    below = HOLDS if len(lower) == len(deq) else FAILS
    usually = HOLDS if usual["DEQ"] < usual["diagonal network"] else FAILS
    return [
        exact_claim("gotu predicted", within(apart, AGREES), 1, apart=apart),
        exact_claim("gotu same start", below, 1, starts=starts or "none", every=every),
        exact_claim("gotu usual start", usually, 1, deq=usual["DEQ"], network=usual["diagonal network"]),
    ]


def _rows(name: str, results: list[Result]) -> list[Row]:
    target, points = TARGETS[name], cube()
    seen = target.seen(points)
    share = float(seen.double().mean())
    by_interpolator = Gotu(target, points, seen).errors(lambda x: evaluate(target.interpolator, x))

    def row(network: str, errors: Sequence[float], apart: float, energy: Sequence[float]) -> Row:
        whole = share * errors[0] + (1 - share) * errors[1]
        columns = {"seen": errors[0], "unseen": errors[1], "from the target": whole, "from the interpolator": apart}
        by_degree = ", ".join(f"{e:.2g}" for e in (*energy[:3], sum(energy[3:])))
        shown = {column: f"{number:.3g}" for column, number in columns.items()}
        return {"task": name, "network": network, **shown, "energy of degree 0, 1, 2, more": by_degree}

    rows = []
    for index, networks in enumerate(kinds(results)):
        errors = [fmean(network.error(part) for network in networks) for part in ("seen", "unseen")]
        apart = fmean(result.to_interpolator[index] for result in results)
        energy = np.mean([result.energies[index] for result in results], axis=0).tolist()
        rows.append(row(networks[0].name, errors, apart, energy))
    degree = [sum(v * v for s, v in target.interpolator.items() if len(s) == n) for n in range(3)]
    return [*rows, row("minimum-degree interpolator", list(by_interpolator.values()), 0, degree)]


GOTU = experiment(
    __name__,
    "Generalisation on the unseen",
    quick=Sizes(Course(300, 128, (0.003, 0.01), 3), (0.3, 1.0), 2),
    full=Sizes(Course(800, 128, (0.001, 0.003, 0.01), 8), (0.1, 0.3, 1.0), 5),
)
