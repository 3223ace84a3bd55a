"""Solvers on the classical problems: which they solve, in how many evaluations, and their false claims."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deqfast

from . import problems
from .classical import EQUATIONS, Classical, Map, fixed_points
from .peers import torchdeq_method
from .problems import Problem
from .races import EVALUATIONS, SLACK, TOLERANCES, finite
from .record import Row

ROOT = 1e-4  # largest |F_i| of a root
FALSE = 10.0  # a residual of more than this many tolerances was wrongly called converged

# Name -> a solver from (rtol, max_iter, atol=...). Each entry is a column.
SOLVERS: dict[str, Callable[..., Any]] = {
    "Picard": deqfast.Picard,
    "Picard 0.1": partial(deqfast.Picard, relaxation=0.1),
    "Anderson": deqfast.Anderson,
    "Anderson 0.1": partial(deqfast.Anderson, relaxation=0.1),
    "Anderson 0.5": partial(deqfast.Anderson, relaxation=0.5),
    "Broyden": deqfast.Broyden,
    "Broyden 0.1": partial(deqfast.Broyden, relaxation=0.1, history_size=50),
    "Auto": deqfast.Auto,
}
# Their windows hold all pairs: this takes minutes for 1,000, half an hour for 2,000.
SLOW = {"Broyden 0.1, all pairs": partial(deqfast.Broyden, relaxation=0.1)}


@dataclass(frozen=True)
class Answer:
    """Result of a solver: its value (B, n), the status and evaluations of every sample."""

    value: Tensor
    statuses: list[str]
    evaluations: list[int]


Attempt = Callable[[Map, Tensor, float, float, int], Answer]  # (f, z0, rtol, atol, most evaluations)


class Exhausted(Exception):
    """Raised when f was called the allowed number of times."""


@dataclass
class Counted:
    """f, also for arrays of numpy; it counts its calls and keeps the argument of least |f(z) - z|."""

    f: Map
    most: int
    best: Tensor
    calls: int = 0
    least: float = math.inf

    def __call__(self, z: Tensor) -> Tensor:
        if self.calls == self.most:
            raise Exhausted
        self.calls += 1
        value = self.f(z)
        if (gap := float((value - z).norm())) < self.least:
            self.least, self.best = gap, z.clone()
        return value


def by_deqfast(make: Callable[..., Any]) -> Attempt:
    def attempt(f: Map, z0: Tensor, rtol: float, atol: float, most: int) -> Answer:
        solution = deqfast.solve(f, z0, make(rtol, most, atol=atol))
        statuses = [deqfast.Status(status).name for status in solution.status.tolist()]
        return Answer(solution.value, statuses, solution.iterations.tolist())

    return attempt


def by_torchdeq(kind: Callable[..., Any]) -> Attempt:
    """Attempt by a solver of torchdeq, in which all samples of a batch make the same number of evaluations."""

    def attempt(f: Map, z0: Tensor, rtol: float, atol: float, most: int) -> Answer:
        run, max_iter = torchdeq_method(kind(rtol, most, atol=atol))
        counted, mode, tol = Counted(f, most, z0), "rel" if rtol else "abs", rtol or atol
        run.keywords.pop("LBFGS_thres", None)  # its default keeps all pairs
        try:
            value, _, info = run(counted, z0, max_iter=max_iter, tol=tol, stop_mode=mode)
            statuses = ["CONVERGED" if met else "MAX_ITER" for met in (info[f"{mode}_lowest"] < tol).tolist()]
        except (Exhausted, RuntimeError):  # raised for a singular matrix
            value, statuses = z0, ["ERROR"] * len(z0)
        return Answer(value, statuses, [counted.calls] * len(z0))

    return attempt


def by_scipy(method: str) -> Attempt:
    """Attempt by scipy.optimize.root on one sample; its best argument if it gives up."""
    from scipy.optimize import root

    def attempt(f: Map, z0: Tensor, rtol: float, atol: float, most: int) -> Answer:
        counted = Counted(f, most, z0)

        def gap(x: Any) -> Any:
            z = torch.from_numpy(x)[None]
            return (counted(z) - z)[0].numpy()

        options = {"xtol": atol, "maxfev": most} if method == "hybr" else {"fatol": atol, "maxiter": most}
        try:
            with warnings.catch_warnings():  # ill-conditioned matrices, divisions by zero
                warnings.simplefilter("ignore")
                found = root(gap, z0[0].numpy(), method=method, options=options)
            value, status = torch.from_numpy(found.x).reshape(z0.shape), "CONVERGED" if found.success else "STOPPED"
        except Exhausted:
            value, status = counted.best, "MAX_ITER"
        except (ValueError, ArithmeticError):  # numbers that are not finite, a singular Jacobian
            value, status = counted.best, "ERROR"
        return Answer(value, [status], [counted.calls])

    return attempt


def attempts(with_scipy: bool, slow: bool) -> dict[str, Attempt]:
    """Columns of a table: ``SOLVERS``, with `slow` ``SLOW``, and the installed peers."""
    found = {name: by_deqfast(make) for name, make in (SOLVERS | SLOW if slow else SOLVERS).items()}
    if importlib.util.find_spec("torchdeq"):
        found |= {f"torchdeq {kind.__name__}": by_torchdeq(kind) for kind in (deqfast.Broyden, deqfast.Anderson)}
    if with_scipy and importlib.util.find_spec("scipy"):
        found |= {f"scipy {name}": by_scipy(name) for name in ("broyden1", "anderson", "hybr")}
    return found


def solve_equations(problem: Classical, attempt: Attempt) -> Row:
    """Solve F(x) = 0 as the fixed point of z + F(z) and of z - F(z): the better result, and both false claims."""

    def outcome(sign: int) -> Row:
        answer = attempt(lambda z: z + sign * problem.map(z), problem.start[None], 0.0, 1e-8, 1000)
        residual = float(problem.map(answer.value).abs().max())
        missed, (status,), (evaluations,) = not residual <= ROOT, answer.statuses, answer.evaluations
        row = {"sign": sign, "status": status, "evaluations": evaluations, "residual": finite(residual)}
        return row | {"samples": 1, "missed": int(missed), "false": int(missed and status == "CONVERGED")}

    rows = [outcome(1), outcome(-1)]
    reached = [row for row in rows if not row["missed"]]
    best = min(reached or rows, key=lambda row: row["evaluations"] if reached else row["residual"] or math.inf)
    return best | {"false": sum(row["false"] for row in rows)}


def in_tolerances(f: Tensor, z: Tensor, rtol: float, atol: float) -> Tensor:
    """|f - z| / (atol + rtol |f|) of every sample (B,), also if squares overflow or underflow in float64."""
    gap = f - z
    scale = torch.maximum(f.abs(), gap.abs()).amax(1, keepdim=True).clamp_min(5e-324)
    gaps, sizes = ((each / scale).norm(dim=1) for each in (gap, f))
    return torch.where(gaps == 0, 0, gaps / (atol / scale[:, 0] + rtol * sizes)).nan_to_num(math.inf, math.inf)


@torch.no_grad()
def solve_fixed_point(problem: Problem, attempt: Attempt, rtol: float, atol: float, most: int) -> Row:
    """residual: the largest of a sample, in tolerances, from float64; evaluations: the median of the samples."""
    answer = attempt(problem.f, problem.z0, rtol, atol, most)
    z = answer.value.double()
    residuals = in_tolerances(problem.exact(z), z, rtol, atol).tolist()
    missed = [status for status, residual in zip(answer.statuses, residuals, strict=True) if residual > SLACK]
    claims = zip(answer.statuses, residuals, strict=True)
    return {
        "evaluations": sorted(answer.evaluations)[len(residuals) // 2],
        "residual": finite(max(residuals)),
        "missed": len(missed),
        "samples": len(residuals),
        "status": max(missed or answer.statuses, key=(missed or answer.statuses).count),
        "false": sum(status == "CONVERGED" and residual > FALSE for status, residual in claims),
    }


@dataclass(frozen=True)
class Part:
    """One table. entries: its problems by name, each with the function that makes the row of an attempt."""

    title: str
    entries: Mapping[str, Callable[[Attempt], Row]]
    with_scipy: bool = False


def parts() -> Iterator[Part]:
    """Tables, in their order."""
    systems = {f"{i} {one.name}": partial(solve_equations, one) for i, one in enumerate(EQUATIONS, 1)}
    yield Part("23 systems F(x) = 0, absolute tolerance 1e-8, 1,000 evaluations", systems, with_scipy=True)

    def fixed(make: Callable[[], Problem], rtol: float, atol: float, most: int) -> Callable[[Attempt], Row]:
        return lambda attempt: solve_fixed_point(make(), attempt, rtol, atol, most)

    small = [Problem(one.name, one.map, one.map, one.start[None]) for one in fixed_points()]
    for word, rtol, atol in (("absolute", 0.0, 1e-8), ("relative", 1e-8, 0.0)):
        entries = {one.name: fixed(partial(replace, one), rtol, atol, 2000) for one in small}
        yield Part(f"18 fixed points, {word} tolerance 1e-8, 2,000 evaluations", entries)
    suite = functools.lru_cache(1)(problems.suite)
    places = {f"{name}, b {scale:g}": (name, i) for name in problems.MAPS for i, scale in enumerate(problems.SCALES)}

    def member(name: str, i: int) -> Problem:
        return suite(name)[i]

    for tol in TOLERANCES:
        entries = {title: fixed(partial(member, *place), tol, 0.0, EVALUATIONS) for title, place in places.items()}
        yield Part(f"24 fixed points of 32 samples, relative tolerance {tol:g}, {EVALUATIONS} evaluations", entries)


def cell(row: Row) -> str:
    """Text of a cell: the evaluations, why a problem is not solved, or how many of several samples are not."""
    if not row["missed"]:
        return str(row["evaluations"])
    text = row["status"] if row["samples"] == 1 else f"{row['evaluations']} ({row['missed']} missed)"
    return f"{text}, false" if row["false"] else text


def table(title: str, rows: list[Row]) -> str:
    """Markdown table of problems and solvers, then the numbers of solved ones and of false claims."""
    names, cases = (list(dict.fromkeys(row[key] for row in rows)) for key in ("provider", "case"))
    found = {(row["case"], row["provider"]): row for row in rows}
    of = [[row for row in rows if row["provider"] == name] for name in names]
    solved = [str(sum(row["samples"] - row["missed"] for row in mine)) for mine in of]
    false = [str(sum(row["false"] for row in mine)) for mine in of]
    lines = [[case, *(cell(found[case, name]) for name in names)] for case in cases]
    lines += [["falsely CONVERGED", *false], [f"solved, of {sum(row['samples'] for row in of[0])}", *solved]]
    head = [["problem", *names], ["---", *["---:"] * len(names)]]
    return "\n".join([f"### {title}", "", *("| " + " | ".join(line) + " |" for line in head + lines), ""])
