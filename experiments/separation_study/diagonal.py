"""Experiment 4: the implicit bias of the diagonal linear DEQ z = diag(w) z + x, f = 1ᵀz = βᵀx with β = 1/(1-w).

Gradient flow on the squared loss is β' = -c βᵖ Xᵀr with p = 4 for the implicit gradient and p = 3 for JFB's. The
comparator, the diagonal linear network β = u², has p = 1 and c = 4. With h' = β⁻ᵖ the flow keeps h(β) + c Xᵀv constant,
where v is the integral of r = Xβ - y. So the limit minimises the Bregman divergence of h from β(0) subject to Xβ = y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from runs import style
from scipy.integrate import solve_ivp
from scipy.linalg import null_space
from torch import Tensor, nn

import deqfast

from .claims import FAILS, HOLDS, OPEN, Claim, exact_claim, within
from .frame import DERIVED, Picture, Row, Section, Table, Unit, experiment, notes
from .summary import fewest

SOLVER = deqfast.Broyden(rtol=1e-13, max_iter=200)
ADJOINTS = {"DEQ": deqfast.Implicit(SOLVER), "DEQ, JFB": deqfast.JFB()}
ZERO = 1e-6  # a KKT residual or drift below this is rounding and the integrator's tolerance
FITTED = 1e-11  # loss residual, relative to y, at which the flow counts as converged
HORIZON = 40.0  # time of the descents, in the units of their steps


@dataclass(frozen=True)
class Rule:
    """Flow β' = -factor βᵖ Xᵀr."""

    name: str
    power: int
    factor: float = 1.0

    def mirror(self, beta: np.ndarray) -> np.ndarray:
        """Return h(β), whose derivative is β⁻ᵖ."""
        return np.log(beta) if self.power == 1 else -(beta ** (1 - self.power)) / (self.power - 1)


RULES = (Rule("DEQ", 4), Rule("DEQ, JFB", 3), Rule("diagonal network", 1, 4.0))


@dataclass(frozen=True)
class Sizes:
    """Problems (dimension, samples), initial values of all β, and step sizes of gradient descent."""

    problems: tuple[tuple[int, int], ...]
    initials: tuple[float, ...]
    steps: tuple[float, ...]
    seeds: int


@dataclass(frozen=True)
class Flow:
    """End of gradient flow. `kkt` is the residual for the flow's own objective, `kkt_paper` for the paper's Q,
    `kkt_minus` for Q as printed in the rebuttal. They are relative, so that 1 is the worst."""

    rule: str
    initial: float
    two_sided: bool
    misfit: float
    drift: float
    kkt: float
    kkt_paper: float
    kkt_minus: float
    participation: float

    @property
    def kind(self) -> tuple[str, float, bool]:
        """What the flows of several problems and seeds share."""
        return self.rule, self.initial, self.two_sided


@dataclass(frozen=True)
class Descent:
    """State of gradient descent through deqfast at the horizon. It has the relative distance from the flow, the drift
    of the conserved quantity, and the largest difference of the solver's z from x/(1-w)."""

    rule: str
    step: float
    steps: int
    distance: float
    drift: float
    solver_error: float


@dataclass(frozen=True)
class Result:
    """A problem's flows and descents."""

    flows: tuple[Flow, ...]
    descents: tuple[Descent, ...]


Results = Mapping[Unit, Result]


class DiagonalCell(nn.Module):
    """Cell w ⊙ z + x."""

    def __init__(self, beta: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 - 1 / beta)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """Evaluate the cell for z and x (B, D)."""
        return self.weight * z + x

    @property
    def beta(self) -> Tensor:
        """Coefficients β = 1/(1-w) of the cell's fixed point."""
        return 1 / (1 - self.weight.detach())


def flow(rule: Rule, x: np.ndarray, y: np.ndarray, initial: np.ndarray, until: float = 1e9) -> tuple[np.ndarray, float]:
    """Integrate until Xβ = y or that time. Return the end, and the largest relative drift of h(β) + c Xᵀv before it."""
    d = len(initial)

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        beta, r = state[:d], x @ state[:d] - y
        return np.concatenate([-rule.factor * beta**rule.power * (x.T @ r), r])

    def fitted(_: float, state: np.ndarray) -> float:
        return float(np.linalg.norm(x @ state[:d] - y) - FITTED * np.linalg.norm(y))

    fitted.terminal = True  # type: ignore[attr-defined]  # scipy stops the integration there
    start = np.concatenate([initial, np.zeros(len(y))])
    path = solve_ivp(slope, (0, until), start, method="LSODA", rtol=1e-12, atol=1e-14, events=fitted)
    beta, v = path.y[:d], path.y[d:]
    kept = rule.mirror(beta) + rule.factor * x.T @ v
    drift = np.abs(kept - kept[:, :1]).max() / np.abs(rule.mirror(beta)).max()
    return beta[:, -1], float(drift)


def kkt_residual(gradient: np.ndarray, x: np.ndarray) -> float:
    """Return the share of the gradient that is not in the row space of X; 0 at the optimum subject to Xβ = y."""
    return float(np.linalg.norm(null_space(x).T @ gradient) / np.linalg.norm(gradient))


def participation(values: np.ndarray) -> float:
    """Return (Σ|v|)² / (n Σv²): 1 if all have one size, 1/n if only one is not 0."""
    return float(np.abs(values).sum() ** 2 / (len(values) * np.square(values).sum()))


def _flow_result(rule: Rule, x: np.ndarray, y: np.ndarray, initial: float, two_sided: bool = False) -> Flow:
    start = np.full(x.shape[1], initial)
    limit, drift = flow(rule, x, y, start)
    paper, at_start = -(limit**-3.0), start**-3.0
    half = len(limit) // 2
    return Flow(
        rule=rule.name,
        initial=initial,
        two_sided=two_sided,
        misfit=float(np.linalg.norm(x @ limit - y) / np.linalg.norm(y)),
        drift=drift,
        kkt=kkt_residual(rule.mirror(limit) - rule.mirror(start), x),
        kkt_paper=kkt_residual(paper + at_start, x),
        kkt_minus=kkt_residual(paper - at_start, x),
        participation=participation(limit[:half] - limit[half:] if two_sided else limit),
    )


def descend(rule: Rule, x: np.ndarray, y: np.ndarray, step: float) -> Descent:
    """Run gradient descent on w through a DEQBlock from β = 1, and the flow; `step` in units of 1/(|X|² max βᵖ)."""
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    cell = DiagonalCell(torch.ones(x.shape[1], dtype=torch.float64))
    block = deqfast.DEQBlock(cell, SOLVER, ADJOINTS[rule.name])
    start, v, drift, error = rule.mirror(cell.beta.numpy()), np.zeros(len(y)), 0.0, 0.0
    limit, _ = flow(rule, x, y, np.ones(x.shape[1]))
    unit = float(np.linalg.norm(x, 2) ** -2 * max(1.0, limit.max()) ** -rule.power)
    steps = round(HORIZON / step)
    for _ in range(steps):
        z = block(inputs)
        residual = z.sum(1) - targets
        error = max(error, float((z.detach() - inputs * cell.beta).abs().max()))
        (gradient,) = torch.autograd.grad(residual.square().sum() / 2, cell.weight)
        with torch.no_grad():
            cell.weight.sub_(step * unit * gradient)
        v += step * unit * residual.detach().numpy()
        drift = max(drift, float(np.abs(rule.mirror(cell.beta.numpy()) + rule.factor * x.T @ v - start).max()))
    beta, _ = flow(rule, x, y, np.ones(x.shape[1]), HORIZON * unit)
    distance = float(np.linalg.norm(cell.beta.numpy() - beta) / np.linalg.norm(beta))
    return Descent(rule.name, step, steps, distance, drift, error)


def draw(unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """Draw X (N, D) and a positive β (D,) that fits."""
    d, n = (int(part[1:]) for part in unit.task.split("-"))
    generator = np.random.default_rng([d, n, unit.seed])
    return generator.normal(size=(n, d)) / np.sqrt(d), generator.uniform(0.5, 2, size=d)


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Measure all flows of a problem, also two-sided ones with β of both signs, and descents of the smallest
    problem."""
    x, truth = draw(unit)
    y = x @ truth
    flows = [_flow_result(rule, x, y, initial) for rule in RULES for initial in sizes.initials]
    signs = np.where(np.arange(len(truth)) % 2, -1.0, 1.0)
    both, target = np.hstack([x, -x]), x @ (signs * truth)
    flows += [_flow_result(rule, both, target, 1.0, two_sided=True) for rule in RULES]
    steps = sizes.steps if unit.task == tasks(sizes)[0] else ()
    descents = [descend(rule, x, y, step) for rule in RULES[:2] for step in steps]
    return Result(tuple(flows), tuple(descents))


def tasks(sizes: Sizes) -> list[str]:
    """Return a task for each problem."""
    return [f"d{d}-n{n}" for d, n in sizes.problems]


def section(sizes: Sizes, results: Results) -> Section:
    """Judge the claims of Section 5 and show how the bias changes with the initialisation."""
    flows = [flow for result in results.values() for flow in result.flows]
    descents = [descent for result in results.values() for descent in result.descents]
    worst = "Largest values over problems and seeds"
    same = f"{worst}, from β(0) = 1, at one time of the flow."
    tables = [Table("Limits of gradient flow", DERIVED, _flow_rows(flows), f"{worst}.")]
    if descents:
        tables.append(Table("Gradient descent through deqfast", DERIVED, _descent_rows(descents), same))
    claims = [*_limit_claims(results, flows), _denser(sizes, results, flows), *_tends(results)]
    return Section(notes("diagonal"), claims, tables, [_picture(sizes, flows)])


def _limit_claims(results: Results, flows: list[Flow]) -> list[Claim]:
    deq, jfb, network = ([flow for flow in flows if flow.rule == rule.name] for rule in RULES)
    residuals = {
        "kept": [flow.drift for flow in deq],
        "plus": [flow.kkt for flow in deq],
        "minus": [min(flow.kkt_minus for flow in deq)],
        "jfb": [flow.kkt for flow in jfb],
        "jfb too": [flow.kkt_paper for flow in jfb],
        "network": [flow.kkt for flow in network],
    }
    worst = {name: max(values) for name, values in residuals.items()}
    return [exact_claim(f"diagonal {name}", within(x, ZERO), fewest(results), worst=x) for name, x in worst.items()]


def _densities(flows: list[Flow], rule: Rule, start: float) -> list[float]:
    """Return the participation ratios of a rule's one-sided flows from an initial value."""
    return [flow.participation for flow in flows if flow.kind == (rule.name, start, False)]


def _denser(sizes: Sizes, results: Results, flows: list[Flow]) -> Claim:
    start = min(sizes.initials)
    deq, _, network = (_densities(flows, rule, start) for rule in RULES)
    share = sum(dense > other for dense, other in zip(deq, network, strict=True)) / len(deq)
    verdict = {1.0: HOLDS, 0.0: FAILS}.get(share, OPEN)
    return exact_claim("diagonal denser", verdict, fewest(results), start=start, share=share, problems=len(deq))


def _tends(results: Results) -> list[Claim]:
    """Judge the descents; no claim without one, as they belong to the first task only."""
    descended = {unit: result.descents for unit, result in results.items() if result.descents}
    pairs = [pair for descents in descended.values() for pair in pairwise(descents)]
    halving = [coarse.distance / fine.distance for coarse, fine in pairs if coarse.rule == fine.rule]
    if not halving:
        return []
    verdict = HOLDS if min(halving) > 1 else FAILS
    return [exact_claim("diagonal tends", verdict, fewest(descended), least=min(halving), most=max(halving))]


def _worst(group: Sequence[object], columns: Mapping[str, str]) -> Row:
    """Show the largest values of some attributes over a group, by column."""
    return {column: f"{max(getattr(each, name) for each in group):.1e}" for column, name in columns.items()}


def _flow_rows(flows: list[Flow]) -> list[Row]:
    rows: list[Row] = []
    columns = {"misfit": "misfit", "drift": "drift", "KKT, own": "kkt", "KKT, Q": "kkt_paper"}
    columns["KKT, Q with minus"] = "kkt_minus"
    for kind in dict.fromkeys(flow.kind for flow in flows):
        group = [flow for flow in flows if flow.kind == kind]
        row: Row = {"rule": kind[0], "β(0)": f"{kind[1]:g}", "two-sided": "yes" if kind[2] else "no"}
        mean = float(np.mean([flow.participation for flow in group]))
        rows.append({**row, **_worst(group, columns), "participation (mean)": f"{mean:.3f}"})
    return rows


def _descent_rows(descents: list[Descent]) -> list[Row]:
    rows: list[Row] = []
    columns = {"distance": "distance", "drift": "drift", "solver error": "solver_error"}
    for rule, step in dict.fromkeys((descent.rule, descent.step) for descent in descents):
        group = [descent for descent in descents if (descent.rule, descent.step) == (rule, step)]
        steps = max(descent.steps for descent in group)
        rows.append({"rule": rule, "step": f"{step:g}", "steps": steps, **_worst(group, columns)})
    return rows


def _picture(sizes: Sizes, flows: list[Flow]) -> Picture:
    figure, ((axis,),) = style.panels(height=3)
    for rule, shift in zip(RULES, (0.97, 1, 1.03), strict=True):  # so that no bar covers another
        groups = [_densities(flows, rule, start) for start in sizes.initials]
        means, deviations = list(map(np.mean, groups)), [np.std(group, ddof=len(group) > 1) for group in groups]
        shifted = [start * shift for start in sizes.initials]
        axis.errorbar(shifted, means, deviations, capsize=2, label=rule.name, **style.look(rule.name))
    axis.set(xscale="log", xlabel="β(0)", ylabel="participation ratio of the limit")
    style.decimal(axis.xaxis)
    style.legend(figure)
    caption = "Density of the limit against the initialisation: means and deviations over problems and seeds. "
    caption += "The points of one β(0) are drawn next to one another."
    return Picture("diagonal", "Bias and initialisation", DERIVED, caption, figure)


DIAGONAL = experiment(
    __name__,
    "Diagonal linear DEQ",
    quick=Sizes(((6, 3), (20, 8)), (0.3, 1.0, 3.0), (0.2, 0.1, 0.05), 2),
    full=Sizes(((6, 3), (20, 8), (40, 10), (40, 30)), (0.1, 0.3, 1.0, 3.0, 10.0), (0.2, 0.1, 0.05, 0.025), 5),
)
