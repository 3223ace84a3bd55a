"""Races of solvers to a tolerance: deqfast's and torchdeq's on a problem, their answers judged in float64."""

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

from .peers import Solve, torchdeq_solve
from .problems import Problem
from .record import Row
from .solves import solve_by

TOLERANCES = (1e-3, 1e-5)
EVALUATIONS = 60
SLACK = 1.05  # f in float32 errs by about 1e-7: a solve at the tolerance may be this far above it in float64
SMALL_RIDGE = "torchdeq anderson m=6 lam=1e-8"  # torchdeq's own is 1e-4, absolute


@dataclass(frozen=True)
class Provider:
    """Solver to compare. solve: the solve to a tolerance; peer: torchdeq's provider of the same method."""

    name: str
    peer: str
    solve: Callable[[float], Solve]


def providers(on_torch: bool = False) -> list[Provider]:
    """All solvers, torchdeq's last; with `on_torch`, before these the default solvers with kernel="torch"."""

    def raced(make: Callable[..., Any], kernel: str) -> Callable[[float], Solve]:
        return lambda tol: solve_by(kernel, make(tol, EVALUATIONS), "cpu")

    picard, anderson, broyden = (f"torchdeq {name}" for name in ("fixed_point_iter", "anderson m=6", "broyden"))
    whole = partial(deqfast.Broyden, history_size=EVALUATIONS)  # torchdeq's default
    ours: list[tuple[str, str, Callable[..., Any]]] = [
        ("picard", picard, deqfast.Picard),
        ("anderson m=6", anderson, deqfast.Anderson),
        ("anderson m=6 bf16 history", anderson, partial(deqfast.Anderson, history_dtype=torch.bfloat16)),
        ("anderson m=8", anderson, partial(deqfast.Anderson, history_size=8)),
        (f"broyden n={EVALUATIONS}", broyden, whole),
        ("broyden n=20", broyden, deqfast.Broyden),
    ]
    plain = [entry for entry in ours if on_torch and entry[0] in ("picard", "anderson m=6", "broyden n=20")]
    theirs: dict[str, Callable[..., Any]] = {picard: deqfast.Picard, anderson: deqfast.Anderson, broyden: whole}
    return [
        *(Provider(f"deqfast {name}", peer, raced(make, "cpp")) for name, peer, make in ours),
        *(Provider(f"torch {name}", peer, raced(make, "torch")) for name, peer, make in plain),
        *(Provider(name, name, raced(make, "torchdeq")) for name, make in theirs.items()),
        Provider(SMALL_RIDGE, SMALL_RIDGE, lambda tol: torchdeq_solve(deqfast.Anderson(tol, EVALUATIONS), lam=1e-8)),
    ]


@torch.no_grad()
def run(problem: Problem, provider: Provider, tol: float) -> tuple[Tensor, float, list[float]]:
    """Value of a solve, its time, and the time of each call of f (ms)."""
    solve, calls = provider.solve(tol), []

    def f(z: Tensor) -> Tensor:
        begin = time.perf_counter()
        value = problem.f(z)
        calls.append(1e3 * (time.perf_counter() - begin))
        return value

    start = time.perf_counter()
    value = solve(f, problem.z0)
    return value, 1e3 * (time.perf_counter() - start), calls


def judged(problem: Problem, provider: Provider, tol: float) -> Row:
    """One solve: evaluations, residual in float64, and whether it is within the tolerance."""
    value, _, calls = run(problem, provider, tol)
    worst = float(problem.residuals(value).max())
    about = {"section": "residual", "case": problem.name, "provider": provider.name}
    row = about | {
        "batch": len(problem.z0),
        "dim": problem.dim,
        "dtype": "float32",
        "peer": provider.peer,
        "tol": tol,
        "evaluations": len(calls),
        "most_evaluations": EVALUATIONS,
        "residual": finite(worst),
        "reached": worst <= SLACK * tol,
    }
    if not row["reached"]:
        row["skipped"] = f"residual {worst:.1e} after {len(calls)} evaluations"
    return row


def measure(problem: Problem, compared: list[Provider], tol: float, rounds: int) -> list[Row]:
    """A row per provider; rounds of those that reach the tolerance are interleaved.

    ms, ms_min: median and least time of the whole call, f included. f_ms: time within f in the fastest call. gain: the
    peer's `ms` over this one's if both reach the tolerance.
    """
    rows = {provider.name: judged(problem, provider, tol) for provider in compared}
    racing = [provider for provider in compared if rows[provider.name]["reached"]]
    times: dict[str, list[tuple[float, float]]] = {provider.name: [] for provider in racing}
    for _ in range(rounds):
        for provider in racing:
            _, spent, calls = run(problem, provider, tol)
            times[provider.name].append((spent, sum(calls)))
    for name, spent_of in times.items():
        rows[name]["ms"] = statistics.median(total for total, _ in spent_of)
        rows[name]["ms_min"], rows[name]["f_ms"] = min(spent_of)
    for provider in racing:
        row, peer = rows[provider.name], rows[provider.peer]
        if row is not peer and "ms" in peer:
            row["gain"] = peer["ms"] / row["ms"]
    return list(rows.values())


def finite(value: float) -> float | None:
    """Value, or None if JSON has no number for it."""
    return value if math.isfinite(value) else None
