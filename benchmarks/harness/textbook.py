"""Cases with Anderson acceleration as textbooks write it: the same map and tolerance, time and evaluations."""

from __future__ import annotations

import torch
from torch import Tensor

import deqfast

from .entry import Case, Contender, check, crossed
from .maps import FullyConnected
from .races import SLACK

TEXTBOOK = "textbook"
MOST = 100


def anderson(f, z, history=5, tol=1e-3, max_iter=100, ridge=1e-4):
    """Anderson acceleration from z (B, D), with one residual for the whole batch."""
    points, values = [], []
    for _ in range(max_iter):
        value = f(z)
        if (value - z).norm() < tol * value.norm():
            break
        points, values = [*points[1 - history :], z], [*values[1 - history :], value]
        residuals = torch.stack(values, 1) - torch.stack(points, 1)  # (B, m, D)
        dots = residuals @ residuals.mT + ridge * torch.eye(len(points))
        weights = torch.linalg.solve(dots, torch.ones(len(z), len(points), 1))
        weights = weights / weights.sum(1, keepdim=True)
        z = (weights * torch.stack(values, 1)).sum(1)
    return value


def textbook_case(batch: int, dim: int, tol: float) -> Case:
    """A solve of tanh(W z + c) to `tol`, f included, from 0."""

    def contender(provider: str, device: str) -> Contender:
        f = FullyConnected(batch, dim, device)
        z0 = torch.zeros(batch, dim)
        solver = deqfast.Anderson(tol, MOST, history_size=5)

        @torch.no_grad()
        def solve() -> Tensor:
            if provider == TEXTBOOK:
                return anderson(f, z0, tol=tol, max_iter=MOST)
            return deqfast.solve(f, z0, solver, kernel="cpp").value

        f.calls = 0
        value = solve()
        facts = {"tol": tol, "evaluations": f.calls, "residual": f.residual(value)}
        if provider != TEXTBOOK:
            check("relative residual", facts["residual"], SLACK * tol)
        return Contender(solve, facts)

    name = f"textbook-{crossed((batch, dim))}-{tol:.0e}".replace("e-0", "e-")
    return Case(TEXTBOOK, name, ("cpp", TEXTBOOK), (TEXTBOOK,), contender, devices=("cpu",))
