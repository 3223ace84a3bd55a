"""Cases of whole solves: the same f and number of iterations, by deqfast, torchdeq and eager tensor operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deqfast

from . import traffic
from .counters import count
from .entry import KERNELS, Case, Contender, Skipped, Wrong, check, kernel_of, require_fc_kernel, short
from .maps import MAPS, NEVER, FullyConnected
from .peers import Solve, eager_solve, torchdeq_solve
from .record import Row

# Relative residual that a solve must have reached for its time to count; twice and more what 20 iterations reach.
APPROACHED = {deqfast.Picard: 0.05, deqfast.Anderson: 5e-3, deqfast.Broyden: 5e-3}


def solver_name(solver: Any) -> str:
    """ "picard", "anderson-m6", "anderson-m6-bf16", "broyden-n20"."""
    if isinstance(solver, deqfast.Picard):
        return "picard"
    kind = "anderson-m" if isinstance(solver, deqfast.Anderson) else "broyden-n"
    history = f"-{short(solver.history_dtype)}" if solver.history_dtype else ""
    return f"{kind}{solver.history or solver.max_iter}{history}"


def run_by(provider: str, solver: Any) -> Any:
    """What `provider` makes of `solver`: torchdeq's history has the dtype of the state."""
    if provider == "torchdeq" and getattr(solver, "history_dtype", None) is not None:
        return replace(solver, history_dtype=None)
    return solver


def solve_by(provider: str, solver: Any, device: str) -> Solve:
    """(f, z0) -> z without gradients, by a kernel of deqfast or by a peer; ``Skipped`` where it is not there."""
    return torch.no_grad()(_solve_by(provider, solver, device))


def _solve_by(provider: str, solver: Any, device: str) -> Solve:
    if provider == "torchdeq":
        try:
            return torchdeq_solve(solver)
        except ImportError as error:
            raise Skipped(f"torchdeq cannot be imported: {error}") from None
    if provider == "eager":
        return eager_solve(solver)
    kernel = kernel_of(provider, device).name
    return lambda f, z0: deqfast.solve(f, z0, solver, kernel).value


@dataclass(frozen=True, kw_only=True)
class SolveCase(Case):
    """All the iterations of `solver` on a map of ``MAPS``; its time is told without f's."""

    section = "solves"
    providers = (*KERNELS, "torchdeq", "eager")
    peers = ("torchdeq", "eager")
    solver: Any
    batch: int
    dim: int
    map: str = "elementwise"

    @property
    def name(self) -> str:
        kind = "" if self.map == "elementwise" else f"-{self.map}"
        return f"{solver_name(self.solver)}{kind}-{self.batch}x{self.dim}"

    def size(self) -> Row:
        history = getattr(self.solver, "history_dtype", None)
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32", "iterations": self.solver.max_iter} | (
            {"history_dtype": short(history)} if history else {}
        )

    def allowed(self) -> float:
        """Relative residual up to which a time counts."""
        return APPROACHED[type(self.solver)]

    def contender(self, provider: str, device: str) -> Contender:
        solve = solve_by(provider, self.solver, device)
        f, z0 = MAPS[self.map](self.batch, self.dim, device), torch.zeros(self.batch, self.dim, device=device)
        value = solve(f, z0)
        evaluations, residual = f.calls, f.residual(value)
        check("relative residual", residual, self.allowed())
        counters = count(lambda g: solve(g, z0), f)
        facts = {
            "evaluations": evaluations,
            "residual": residual,
            "bytes": round(traffic.solve_passes(run_by(provider, self.solver), evaluations, provider) * z0.nbytes),
            "peak_bytes": counters.peak_bytes,
            "launches": counters.operations / evaluations,
            "host_waits": counters.host_waits,
        }

        @torch.no_grad()
        def f_alone() -> None:
            z = z0
            for _ in range(evaluations):
                z = f(z)

        return Contender(lambda: solve(f, z0), facts, f_alone)


@dataclass(frozen=True, kw_only=True)
class FCSolveCase(Case):
    """z = tanh(W z + c) by ``fc_fixed_point``, beside loops over the same f; f is part of the time."""

    section = "fc"
    providers = (*KERNELS, "torchdeq", "eager")
    peers = ("torchdeq", "eager")
    batch: int
    dim: int
    weight_dtype: torch.dtype = torch.float32
    iterations: int = 30
    allowed: float = 1e-4

    @property
    def name(self) -> str:
        return f"fc-solve-{self.batch}x{self.dim}-{short(self.weight_dtype)}"

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": short(self.weight_dtype), "iterations": self.iterations}

    def contender(self, provider: str, device: str) -> Contender:
        solver = deqfast.Picard(NEVER, self.iterations)
        f = FullyConnected(self.batch, self.dim, device, self.weight_dtype)
        z0 = torch.zeros_like(f.c)
        if provider in KERNELS:
            kernel = kernel_of(provider, device)
            require_fc_kernel(kernel, f.weight, f.c.dtype)

            @torch.no_grad()
            def solve() -> Tensor:
                return deqfast.fc_fixed_point(f.weight, f.c, z0, "tanh", solver, kernel.name)[0]
        else:
            solve = partial(solve_by(provider, solver, device), f, z0)

        residual = f.residual(solve())
        check("relative residual", residual, self.allowed)
        evaluations = f.calls if provider in self.peers else self.iterations
        if evaluations != self.iterations:
            raise Wrong(f"{evaluations} evaluations, not {self.iterations}; not timed")
        counters = count(lambda g: solve(), f)  # f too: fc_fixed_point holds it
        facts = {
            "evaluations": evaluations,
            "residual": residual,
            "peak_bytes": counters.peak_bytes,
            "launches": counters.operations / evaluations,
            "host_waits": counters.host_waits,
        }
        return Contender(solve, facts)
