"""Races of solvers to a tolerance: deqfast's and torchdeq's on a problem, their answers judged in float64."""

from __future__ import annotations

import math
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
from .suite import columns_of
from .timing import in_turns

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

    def raced(name: str, peer: str, make: Callable[..., Any], kernel: str) -> Provider:
        return Provider(name, peer, lambda tol: solve_by(kernel, make(tol, EVALUATIONS), "cpu"))

    def small_ridge(tol: float) -> Solve:
        return torch.no_grad()(torchdeq_solve(deqfast.Anderson(tol, EVALUATIONS), lam=1e-8))

    picard, anderson, broyden = (f"torchdeq {name}" for name in ("fixed_point_iter", "anderson m=6", "broyden"))
    whole = partial(deqfast.Broyden, history_size=EVALUATIONS)  # torchdeq's default
    ours: list[tuple[str, str, Callable[..., Any]]] = [
        ("picard", picard, deqfast.Picard),
        ("anderson m=6", anderson, deqfast.Anderson),
        ("anderson m=6 bf16 history", anderson, partial(deqfast.Anderson, history_dtype=torch.bfloat16)),
        ("anderson m=8", anderson, partial(deqfast.Anderson, history_size=8)),
        (f"broyden n={EVALUATIONS}", broyden, whole),
    ]
    plain = [ours[0], ours[1], ours[4]]  # whose peers are torchdeq's three methods
    return [
        *(raced(f"deqfast {name}", peer, make, "cpp") for name, peer, make in ours),
        *(raced(f"torch {name}", peer, make, "torch") for name, peer, make in plain if on_torch),
        *(raced(peer, peer, make, "torchdeq") for _, peer, make in plain),
        Provider(SMALL_RIDGE, SMALL_RIDGE, small_ridge),
    ]


def judged(problem: Problem, provider: Provider, tol: float) -> Row:
    """One solve: evaluations, residual in float64, and whether it is within the tolerance."""
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return problem.f(z)

    value = provider.solve(tol)(f, problem.z0)
    worst = float(problem.residuals(value).max())
    about = {"section": "residual", "case": problem.name, "provider": provider.name}
    row = about | {
        "batch": len(problem.z0),
        "dim": problem.dim,
        "dtype": "float32",
        "peer": provider.peer,
        "tol": tol,
        "evaluations": calls,
        "most_evaluations": EVALUATIONS,
        "residual": finite(worst),
        "reached": worst <= SLACK * tol,
    }
    if not row["reached"]:
        row["skipped"] = f"residual {worst:.1e} after {calls} evaluations"
    return row


def measure(problem: Problem, compared: list[Provider], tol: float, rounds: int) -> list[Row]:
    """A row per provider; those that reach the tolerance are timed, one after the other in each round.

    The times are of the whole call, f included. gain: the peer's `ms` over this one's if both reach the tolerance.
    """
    rows = {provider.name: judged(problem, provider, tol) for provider in compared}
    racing = [provider for provider in compared if rows[provider.name]["reached"]]
    solves = {provider.name: partial(provider.solve(tol), problem.f, problem.z0) for provider in racing}
    for name, seconds in in_turns(solves, rounds=rounds, seconds=math.inf).items():
        rows[name] |= columns_of(seconds)
    for provider in racing:
        row, peer = rows[provider.name], rows[provider.peer]
        if row is not peer and "ms" in peer:
            row["gain"] = peer["ms"] / row["ms"]
    return list(rows.values())


def finite(value: float) -> float | None:
    """Value, or None if JSON has no number for it."""
    return value if math.isfinite(value) else None
