"""Cases of whole solves: the same f and number of iterations, by deqfast, torchdeq and eager tensor operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import deqfast
from deqfast.fc import has_kernel

from . import traffic
from .counters import count, launched, memory
from .entry import GRAPHS, KERNELS, Case, Contender, Skipped, check, kernel_of, peer, short
from .maps import MAPS, NEVER, FullyConnected
from .peers import Solve, eager_solve, torchdeq_solve
from .record import Row
from .timing import Graph

# Relative residual that a solve must have reached for its time to count; twice and more what 20 iterations reach.
APPROACHED = {deqfast.Picard: 0.05, deqfast.Anderson: 5e-3, deqfast.Broyden: 5e-3}


def solver_name(solver: Any) -> str:
    """ "picard", "anderson-m6", "anderson-m6-bf16", "broyden-n20"."""
    if isinstance(solver, deqfast.Picard):
        return "picard"
    kind = "anderson-m" if isinstance(solver, deqfast.Anderson) else "broyden-n"
    history = f"-{short(solver.history_dtype)}" if solver.history_dtype else ""
    return f"{kind}{solver.history or solver.max_iter}{history}"


def asked(call: Any, f: Any, evaluations: int, f_alone: Any = None) -> Row:
    """The columns on what `call(f)` asks of the device; launches per evaluation, without those of `f_alone`."""
    if not f.c.is_cuda:
        counters = count(call, f)
        launches, waits, peak = counters.operations, counters.host_waits, counters.peak_bytes
    else:
        peak = memory(lambda: call(f))[1]
        if (whole := launched(lambda: call(f))) is None:
            return {"peak_bytes": peak}
        own = launched(f_alone) if f_alone else None
        launches, waits = whole[0] - (own[0] if own else 0), whole[1]
    return {"launches": launches / evaluations, "host_waits": waits, "peak_bytes": peak}


def run_by(provider: str, solver: Any) -> Any:
    """What `provider` makes of `solver`: torchdeq's history has the dtype of the state."""
    if provider == "torchdeq" and getattr(solver, "history_dtype", None) is not None:
        return replace(solver, history_dtype=None)
    return solver


def solve_by(provider: str, solver: Any, device: str) -> Solve:
    """(f, z0) -> z without gradients, by a kernel of deqfast or by a peer; ``Skipped`` where it is not there."""
    if provider == "torchdeq":
        solve = peer(torchdeq_solve, solver)
    elif provider == "eager":
        solve = eager_solve(solver)
    elif provider in GRAPHS:
        solve = graph_solve(solver, kernel_of(provider.removesuffix("-graph"), device).name)
    else:
        solve = partial(solution_of, solver, kernel_of(provider, device).name)
    return torch.no_grad()(solve)


def solution_of(solver: Any, kernel: str, f: Any, z0: Tensor) -> Tensor:
    """The value of ``deqfast.solve``."""
    return deqfast.solve(f, z0, solver, kernel).value


def graph_solve(solver: Any, kernel: str) -> Solve:
    """A solve by replays of captured CUDA graphs of a map of ``MAPS``, whose calls are those that the Solution tells.

    The block of an f is made once: capturing is not part of a solve.
    """
    blocks: dict[Any, deqfast.DEQBlock] = {}

    def solve(f: Any, z0: Tensor) -> Tensor:
        block = blocks.setdefault(f, deqfast.DEQBlock(MapCell(f), solver, kernel=kernel, cuda_graph=True))
        calls = f.calls
        value, solution = block(f.c, z0=z0, return_solution=True)
        f.calls = calls + solution.evaluations
        return value

    return solve


class MapCell(nn.Module):
    """A map of ``MAPS`` as a cell."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        return self.f(z)


@dataclass(frozen=True, kw_only=True)
class SolveCase(Case):
    """All the iterations of `solver` on a map of ``MAPS``; its time is told without f's."""

    section = "solves"
    providers = (*KERNELS, *GRAPHS, "torchdeq", "eager")
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

        @torch.no_grad()
        def f_alone() -> None:
            z = z0
            for _ in range(evaluations):
                z = f(z)

        graph = provider in GRAPHS
        algorithm = run_by(provider, self.solver), evaluations, provider.removesuffix("-graph")
        facts = {
            "evaluations": evaluations,
            "residual": residual,
            "bytes": round(traffic.solve_passes(*algorithm) * z0.nbytes),
            # In a replayed graph f cannot be told apart.
            **asked(lambda g: solve(g, z0), f, evaluations, None if graph else f_alone),
        }
        return Contender(lambda: solve(f, z0), facts, Graph([lambda: f(z0)], evaluations) if graph else f_alone)


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
            if kernel.name != "torch" and not has_kernel(kernel, f.weight, f.c.dtype):
                raise Skipped(f"{kernel.name} has no fc_fixed_point for D={self.dim} in {short(self.weight_dtype)}")

            @torch.no_grad()
            def solve() -> Tensor:
                return deqfast.fc_fixed_point(f.weight, f.c, z0, "tanh", solver, kernel.name)[0]
        else:
            solve = partial(solve_by(provider, solver, device), f, z0)

        residual = f.residual(solve())
        check("relative residual", residual, self.allowed)
        evaluations = f.calls if provider in self.peers else self.iterations
        facts = {"evaluations": evaluations, "residual": residual}  # f too: fc_fixed_point holds it
        return Contender(solve, facts | asked(lambda g: solve(), f, evaluations))
