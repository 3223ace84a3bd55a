"""Cases of whole solves: the same f and number of iterations, by deqfast, torchdeq and eager tensor operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import deqfast

from . import traffic
from .counters import count, launched, memory
from .entry import GRAPHS, KERNELS, Case, Contender, Skipped, Wrong, check, kernel_of, require_fc_kernel, short
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


def asked(provider: str, call: Any, f: Any, evaluations: int, f_alone: Any = None) -> Row:
    """The columns on what `call(f)` asks of the device: launches per evaluation without those of `f_alone`."""
    if provider in GRAPHS:  # a replay passes by the dispatcher, and f cannot be told apart in it
        peak, (launches, waits) = memory(lambda: call(f))[1], launched(lambda: call(f))
        return {"peak_bytes": peak, "launches": launches / evaluations, "host_waits": waits}
    counters = count(call, f)
    facts = {"peak_bytes": counters.peak_bytes, "host_waits": counters.host_waits}
    if not f.c.is_cuda:
        return facts | {"launches": counters.operations / evaluations}
    launches, waits = launched(lambda: call(f))
    launches -= launched(f_alone)[0] if f_alone is not None else 0
    return facts | {"launches": launches / evaluations, "host_waits": waits}


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
    if provider in GRAPHS:
        return graph_solve(solver, kernel_of(provider.removesuffix("-graph"), device).name)
    kernel = kernel_of(provider, device).name
    return lambda f, z0: deqfast.solve(f, z0, solver, kernel).value


def graph_solve(solver: Any, kernel: str) -> Solve:
    """By replays of captured CUDA graphs; f is a module, whose calls are counted as the Solution tells them."""
    blocks: dict[int, deqfast.DEQBlock] = {}  # of an f: capturing is not part of a solve

    def solve(f: Any, z0: Tensor) -> Tensor:
        block = blocks.setdefault(id(f), deqfast.DEQBlock(MapCell(f), solver, kernel=kernel, cuda_graph=True))
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

        algorithm = run_by(provider, self.solver), evaluations, provider.removesuffix("-graph")
        facts = {
            "evaluations": evaluations,
            "residual": residual,
            "bytes": round(traffic.solve_passes(*algorithm) * z0.nbytes),
            **asked(provider, lambda g: solve(g, z0), f, evaluations, f_alone),
        }
        graph = provider in GRAPHS
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
        facts = {"evaluations": evaluations, "residual": residual}  # f too: fc_fixed_point holds it
        return Contender(solve, facts | asked(provider, lambda g: solve(), f, evaluations))
