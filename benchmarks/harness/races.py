"""Solvers raced to a tolerance: deqfast's and torchdeq's on a problem, their answers judged in float64."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deqfast

from .maps import NEVER
from .peers import torchdeq_method
from .problems import Problem
from .record import Row

TOLERANCES = (1e-3, 1e-5)
EVALUATIONS = 60
SLACK = 1.05  # f in float32 errs by some 1e-7: what stops at the tolerance may be this far above it in float64
SMALL_RIDGE = "torchdeq anderson m=6 lam=1e-8"  # torchdeq's own is 1e-4, absolute
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """A solver to compare. solve: (f, z0, tol) -> value, and the evaluations of each sample if it knows them.

    peer: torchdeq's name for the same method; its own is its peer.
    """

    name: str
    peer: str
    solve: Callable[[Map, Tensor, float], tuple[Tensor, Tensor | None]]


def _deqfast(
    make: Callable[..., Any], f: Map, z0: Tensor, tol: float, kernel: str = "cpp"
) -> tuple[Tensor, Tensor | None]:
    solution = deqfast.solve(f, z0, make(tol, EVALUATIONS), kernel=kernel)
    return solution.value, solution.iterations


def _torchdeq(make: Callable[..., Any], f: Map, z0: Tensor, tol: float, **options: float) -> tuple[Tensor, None]:
    """options: of torchdeq's function, which is as it ships without any."""
    solver = make(tol, EVALUATIONS)
    run, max_iter = torchdeq_method(solver)
    return run(f, z0, max_iter=max_iter, tol=tol, stop_mode=solver.stop, **options)[0], None


def providers(on_torch: bool = False) -> list[Provider]:
    """All solvers, torchdeq's last; `on_torch`: and before them the default ones with kernel="torch"."""
    picard, anderson, broyden = (f"torchdeq {name}" for name in ("fixed_point_iter", "anderson m=6", "broyden"))
    whole = partial(deqfast.Broyden, history=EVALUATIONS)  # which is torchdeq's default
    ours: list[tuple[str, str, Callable[..., Any]]] = [
        ("picard", picard, deqfast.Picard),
        ("anderson m=6", anderson, deqfast.Anderson),
        ("anderson m=6 bf16 history", anderson, partial(deqfast.Anderson, history_dtype=torch.bfloat16)),
        ("anderson m=8", anderson, partial(deqfast.Anderson, history=8)),
        (f"broyden n={EVALUATIONS}", broyden, whole),
        ("broyden n=20", broyden, deqfast.Broyden),
    ]
    plain = [one for one in ours if on_torch and one[0] in ("picard", "anderson m=6", "broyden n=20")]
    theirs: dict[str, Callable[..., Any]] = {picard: deqfast.Picard, anderson: deqfast.Anderson, broyden: whole}
    return [
        *(Provider(f"deqfast {name}", peer, partial(_deqfast, make)) for name, peer, make in ours),
        *(Provider(f"torch {name}", peer, partial(_deqfast, make, kernel="torch")) for name, peer, make in plain),
        *(Provider(name, name, partial(_torchdeq, make)) for name, make in theirs.items()),
        Provider(SMALL_RIDGE, SMALL_RIDGE, partial(_torchdeq, deqfast.Anderson, lam=1e-8)),
    ]


class Watched:
    """An f that notes when it was called and when its value was there (seconds)."""

    def __init__(self, f: Map) -> None:
        self.f = f
        self.calls: list[tuple[float, float]] = []

    def __call__(self, z: Tensor) -> Tensor:
        start = time.perf_counter()
        value = self.f(z)
        self.calls.append((start, time.perf_counter()))
        return value


@torch.no_grad()
def judged(problem: Problem, provider: Provider, tol: float) -> Row:
    """One solve: evaluations, residual in float64, and whether it is within the tolerance."""
    f = Watched(problem.f)
    value, of_samples = provider.solve(f, problem.z0, tol)
    residuals = problem.residuals(value)
    worst = float(residuals.max())
    row = named(problem, provider, "residual") | {
        "peer": provider.peer,
        "tol": tol,
        "evaluations": len(f.calls),
        "most_evaluations": EVALUATIONS,
        "residual": finite(worst),
        "reached": worst <= SLACK * tol,
        "samples_missed": int((~(residuals <= SLACK * tol)).sum()),
    }
    if of_samples is not None:
        row["mean_evaluations"] = float(of_samples.double().mean())
    if not row["reached"]:
        row["skipped"] = f"residual {worst:.1e} after {len(f.calls)} evaluations"
    return row


@torch.no_grad()
def measure(problem: Problem, compared: list[Provider], tol: float, rounds: int) -> list[Row]:
    """A row per provider; those that reach the tolerance are timed in turns.

    ms, ms_min: median and least of the whole call, f included; f_ms: within f in the fastest; gain: the peer's `ms`
    over this one's where both reach the tolerance; mean_evaluations: of a sample until it was done; samples_missed: how
    many are above the tolerance.
    """
    rows = {provider.name: judged(problem, provider, tol) for provider in compared}
    racing = [provider for provider in compared if rows[provider.name]["reached"]]
    times: dict[str, list[tuple[float, float]]] = {provider.name: [] for provider in racing}
    for _ in range(rounds):
        for provider in racing:
            f, start = Watched(problem.f), time.perf_counter()
            provider.solve(f, problem.z0, tol)
            spent = time.perf_counter() - start
            times[provider.name].append((1e3 * spent, 1e3 * sum(end - begin for begin, end in f.calls)))
    for name, spent_of in times.items():
        rows[name]["ms"] = statistics.median(total for total, _ in spent_of)
        rows[name]["ms_min"], rows[name]["f_ms"] = min(spent_of)
    for provider in racing:
        row, peer = rows[provider.name], rows[provider.peer]
        if row is not peer and "ms" in peer:
            row["gain"] = peer["ms"] / row["ms"]
    return list(rows.values())


@torch.no_grad()
def courses(problem: Problem, compared: list[Provider], rounds: int) -> list[Row]:
    """A row per provider of a solve that nothing stops early.

    It has the best residual so far of the worst sample after every evaluation, and the median time (ms) at which f's
    value was there. The residuals are those of f's arguments.
    """
    moments: dict[str, list[list[float]]] = {provider.name: [] for provider in compared}
    for _ in range(rounds):
        for provider in compared:
            f, start = Watched(problem.f), time.perf_counter()
            provider.solve(f, problem.z0, NEVER)
            moments[provider.name].append([1e3 * (end - start) for _, end in f.calls])
    rows: list[Row] = []
    for provider in compared:
        ms = [statistics.median(of_call) for of_call in zip(*moments[provider.name], strict=True)]
        residuals = [finite(residual) for residual in residuals_on_the_way(problem, provider)]
        row = named(problem, provider, "residual course") | {"evaluations": len(residuals)}
        rows.append(row | {"course": {"ms": ms, "residual": residuals}})
    return rows


def residuals_on_the_way(problem: Problem, provider: Provider) -> list[float]:
    """The best residual so far, of the worst sample, after every evaluation of a solve that nothing stops early."""
    seen: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        seen.append(problem.residuals(z.view_as(problem.z0)))
        return problem.f(z)

    provider.solve(f, problem.z0, NEVER)
    return torch.stack(seen).nan_to_num(math.inf).cummin(0).values.max(dim=1).values.tolist()


def named(problem: Problem, provider: Provider, section: str) -> Row:
    """The columns that say what a row is of."""
    size = {"batch": len(problem.z0), "dim": problem.dim, "dtype": "float32"}
    return {"section": section, "case": problem.name, "provider": provider.name, **size}


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
