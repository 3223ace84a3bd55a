"""Cases of whole solves: the same f and number of iterations, by deqfast and torchdeq."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import deqfast
from deqfast.engine.plan import Plan, run
from deqfast.engine.runners.single_launch import has_kernel
from deqfast.engine.solve import Options, Solves

from . import traffic
from .counters import count, memory, profiled
from .entry import GRAPHS, KERNELS, Case, Contender, Skipped, check, crossed, kernel_of, short
from .maps import NEVER, FullyConnected, MapCell, autocast, make_map
from .peers import Solve, torchdeq_solve
from .record import Row
from .timing import Graph

PEER = "torchdeq"
# Relative residual that a solve must reach for its time to count; at least twice the residual of 20 iterations.
APPROACHED = {deqfast.Picard: 0.05, deqfast.Anderson: 5e-3, deqfast.Broyden: 5e-3}
BF16_APPROACHED = 0.1  # the rounding of bf16 is 8e-3
FC_ITERATIONS, FC_APPROACHED = 30, 1e-4


def solver_name(solver: Any) -> str:
    """Name such as "picard", "anderson-m6", "anderson-m6-bf16" or "broyden-n20"."""
    if isinstance(solver, deqfast.Picard):
        return "picard"
    kind = "anderson-m" if isinstance(solver, deqfast.Anderson) else "broyden-n"
    history = f"-{short(solver.history_dtype)}" if solver.history_dtype else ""
    return f"{kind}{solver.history_size or solver.max_iter}{history}"


def asked(call: Any, f: Any, evaluations: int, device: str) -> Row:
    """Columns of the counters of `call(f)`; launches are per evaluation, on a CPU without those of f."""
    if device == "cpu":
        row = count(call, f, "cpu").columns
    else:
        row = {"peak_bytes": memory(lambda: call(f), "cuda")[1]}
        if seen := profiled(lambda: call(f)):
            row |= seen.columns
    if "launches" in row:
        row["launches"] /= evaluations
    return row


def solve_by(provider: str, solver: Any, device: str) -> Solve:
    """(f, z0) -> z without gradients, by a kernel of deqfast or a peer; raises ``Skipped`` if it is not available."""
    if provider == PEER:
        solve = torchdeq_solve(solver)
    elif provider in GRAPHS:
        return Replays(solver, kernel_of(provider.removesuffix("-graph"), device).name)
    else:
        kernel = kernel_of(provider, device).name

        def solve(f: Any, z0: Tensor) -> Tensor:
            return deqfast.solve(f, z0, solver, kernel).value

    return torch.no_grad()(solve)


class Replays:
    """(f, z0) -> z by replays of a captured solve of a map of ``maps``: what ``deqfast.solve`` does eagerly.

    The block of an f is made once: capturing is not part of a solve. last: the Solution of the last call.
    """

    def __init__(self, solver: Any, kernel: str) -> None:
        self.options, self.solves = Options(solver=solver, kernel=kernel), Solves()
        self.blocks: dict[Any, Any] = {}
        self.last: Any = None

    def __call__(self, f: Any, z0: Tensor) -> Tensor:
        if f not in self.blocks:
            self.blocks[f] = deqfast.DEQBlock(MapCell(f), self.options.solver, cuda_graph=True)
        block: Any = self.blocks[f]
        given: Any = {"options": self.options, "solves": self.solves, "graphs": block.graphs, "on_backward": None}
        self.last = run(Plan(cell=block.cell, x=f.c, z0=z0, **given))
        return self.last.value


def solve_case(solver: Any, shape: tuple[int, ...], kind: str = "elementwise", **given: Any) -> Case:
    """All iterations of `solver` on a map (see ``make_map``); on a CPU the time is also given without f's.

    Solves in graphs and eager ones are bare: without a block, its notices and its gradient. A residual cell belongs to
    section "cells"; torchdeq solves for the same cell in plain torch. given: the other arguments of ``Case``.
    """
    precision = "bf16" if kind == "residual" else "fp32"
    allowed = BF16_APPROACHED if precision == "bf16" else APPROACHED[type(solver)]

    def contender(provider: str, device: str) -> Contender:
        graph, kernel = provider in GRAPHS, provider.removesuffix("-graph")
        solve_map: Any = solve_by(provider, solver, device)
        f: Any = make_map(kind, shape, device, "torch" if provider == PEER else kernel)
        z0 = torch.zeros_like(f.c)

        def solve(g: Any = f) -> Tensor:
            with autocast(device, precision):
                return solve_map(g, z0)

        value = solve()
        evaluations = solve_map.last.evaluations if graph else f.calls  # a replay does not call f
        residual = f.residual(value)
        check("relative residual", residual, allowed)

        @torch.no_grad()
        def f_alone(calls: int = evaluations) -> None:
            z = z0
            with autocast(device, precision):
                for _ in range(calls):
                    z = f(z)

        facts = {
            "evaluations": evaluations,
            "residual": residual,
            "bytes": round(traffic.solve_passes(solver, evaluations, kernel) * z0.nbytes),
            **asked(solve, f, evaluations, device),
        }
        return Contender(solve, facts, Graph([f_alone]) if device == "cuda" else f_alone)

    section, form = {
        "elementwise": ("solves", "{}-{}"),
        "fc": ("solves", "{}-fc-{}"),
        "residual": ("cells", "solve-{}-{}-bf16"),
    }[kind]
    name = form.format(solver_name(solver), crossed(shape))
    return Case(section, name, (*KERNELS, *GRAPHS, PEER), (PEER,), contender, **given)


def fc_case(batch: int, dim: int, weight_dtype: torch.dtype = torch.float32) -> Case:
    """z = tanh(W z + c) by ``fc_fixed_point``, compared with loops over the same f. The time includes f."""
    solver, dtype = deqfast.Picard(NEVER, FC_ITERATIONS), short(weight_dtype)

    def contender(provider: str, device: str) -> Contender:
        f = FullyConnected(batch, dim, device, weight_dtype)
        z0 = torch.zeros_like(f.c)
        if provider in KERNELS:
            kernel = kernel_of(provider, device)
            if kernel.name != "torch" and not has_kernel(kernel, f.weight, f.c.dtype, FC_ITERATIONS):
                raise Skipped(f"{kernel.name} has no fc_fixed_point for D={dim} in {dtype}")

            @torch.no_grad()
            def solve() -> Tensor:
                return deqfast.fc_fixed_point(f.weight, f.c, z0, "tanh", solver, kernel.name)[0]
        else:
            solve = partial(solve_by(provider, solver, device), f, z0)

        residual = f.residual(solve())
        check("relative residual", residual, FC_APPROACHED)
        evaluations = f.calls if provider == PEER else FC_ITERATIONS
        facts = {"evaluations": evaluations, "residual": residual}  # f too: it is inside fc_fixed_point
        return Contender(solve, facts | asked(lambda g: solve(), f, evaluations, device))

    return Case("fc", f"fc-solve-{batch}x{dim}-{dtype}", (*KERNELS, PEER), (PEER,), contender)
