"""Cases with other libraries: whole solves, f included, in the same number of evaluations, on any device.

Nothing is subtracted. What differs: JAX's libraries take the batch as one problem with one residual and one history,
which is less work, and compile f with their loop. The loop by hand has no stop rule and keeps no best iterate. torchdeq
looks at the residuals in every iteration.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import deqfast

from . import by_hand
from .entry import Case, Contender, Skipped, check, crossed
from .maps import FC_RADIUS, relative_residual
from .peers import silva_solve, torchdeq_solve
from .record import Row
from .solves import APPROACHED, PEER, asked, solver_name
from .timing import Graph

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # JAX hangs if processes of inductor compile
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU's memory
BY_HAND, COMPILED_PEER = "by-hand", "torchdeq-compiled"
OWN, JAX = ("packaged", "compiled", "eager", "graph"), ("jaxopt", "optimistix")
THEIRS = (BY_HAND, PEER, COMPILED_PEER, "silva-networks", *JAX)
RATE = 0.9
NEVER = -1.0  # a tolerance that no residual meets
SHORT = 1 << 14  # elements of a state; on a CPU a time is of 20 such solves, so that the cache is equally warm


def dense(z: Any, x: Any) -> Any:
    """W z + c, for torch and for JAX."""
    return z @ x[0].T + x[1]


def elementwise(z: Any, x: Any) -> Any:
    """As ``dense``, with a multiple of the identity."""
    return RATE * z + x[1]


class Cell(nn.Module):
    """tanh(linear(z, (weight, x))), whose calls from Python are counted."""

    def __init__(self, linear: Callable[[Any, Any], Any], weight: Tensor) -> None:
        super().__init__()
        self.linear, self.weight, self.calls = linear, nn.Buffer(weight), 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return torch.tanh(self.linear(z, (self.weight, x)))


def rival_case(
    solver: Any, batch: int, dim: int, linear: Callable[[Any, Any], Any], devices: tuple[str, ...] = ("cpu", "cuda")
) -> Case:
    """All iterations of `solver` on f = tanh(linear(z)). A row has the evaluations of f, if Python can count them.

    deqfast compiles f with the solve on a CPU ("compiled", "packaged"); on a GPU "compiled" is a captured solve of a
    cell compiled by torch. jaxopt's Broyden takes whole steps, without its line search.
    """

    def contender(provider: str, device: str) -> Contender:
        generator = torch.Generator().manual_seed(dim)
        weight = torch.randn(dim, dim, generator=generator) if linear is dense else torch.zeros(1, 1)
        x = [weight.mul_(FC_RADIUS / dim**0.5).to(device), torch.randn(batch, dim, generator=generator).to(device)]
        z0, cell = torch.zeros(batch, dim, device=device), Cell(linear, x[0])
        facts: Row = {}
        if provider in JAX:
            solve, facts["evaluations"] = jax_solve(provider, solver, linear, x, z0)
        else:
            solve = torch.no_grad()(torch_solve(provider, solver, cell, x[1], z0))
        solve()  # which may compile or capture
        cell.calls = 0
        value = torch.from_numpy(numpy.asarray(solve() if provider in JAX else solve().cpu()).copy()).double()
        if cell.calls:
            facts["evaluations"] = cell.calls
        residual = relative_residual(torch.tanh(linear(value, [part.cpu().double() for part in x])), value)
        if provider in (*OWN, BY_HAND):
            check("relative residual", residual, APPROACHED[type(solver)])
        if device == "cuda" and provider not in JAX:
            facts |= asked(lambda f: solve(), None, solver.max_iter, device)
        if device == "cuda" and provider == BY_HAND:
            solve = Graph([solve], least=1)
        repeats = 20 if device == "cpu" and batch * dim < SHORT else 1
        call = solve if repeats == 1 else lambda: [solve() for _ in range(repeats)]
        return Contender(call, {**facts, "residual": residual})

    name = f"rivals-{linear.__name__}-{solver_name(solver)}-{crossed((batch, dim))}"
    return Case("rivals", name, (*OWN, *THEIRS), THEIRS, contender, devices=devices)


def torch_solve(provider: str, solver: Any, cell: Cell, x: Tensor, z0: Tensor) -> Callable[[], Any]:
    """Solve by deqfast, by torchdeq or silva-networks, or by hand."""
    if provider == "packaged":
        return packaged(cell, solver, x, z0)
    if provider in OWN:
        on_gpu = z0.is_cuda
        if provider == "compiled" and on_gpu:
            cell.compile()
        options: dict[str, Any] = {"cuda_graph": True} if on_gpu else {"compile": provider == "compiled"}
        options = {} if provider == "eager" else options
        block = deqfast.DEQBlock(cell, solver, kernel="auto" if on_gpu else "cpp", warn=False, **options)
        return lambda: block(x, z0=z0)
    if provider == BY_HAND:
        loop = by_hand.loop_of(solver)
        return lambda: loop(lambda z: cell(z, x), z0)
    run: Any = silva_solve(solver) if provider == "silva-networks" else torchdeq_solve(solver)

    def solve() -> Tensor:
        value: Tensor = run(lambda z: cell(z, x), z0)
        return value

    if provider == COMPILED_PEER:
        # Its stop rule breaks the graph in every iteration. A graph's outputs are overwritten by the next call.
        return torch.compile(solve, mode="reduce-overhead" if z0.is_cuda else None)
    return solve


def packaged(f: nn.Module, solver: Any, x: Any, z0: Tensor) -> Callable[[], Any]:
    """Solve in a package of AOTInductor, with the steps of kernel "cpp" as C functions."""
    program = torch.export.export(deqfast.DEQBlock(f, solver, kernel="cpp", warn=False).eval(), (x,), {"z0": z0})
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/solve.pt2", inductor_configs=deqfast.package_options()
        )
        package = torch._inductor.aoti_load_package(path)
    return lambda: package(x, z0=z0)


def jax_solve(
    library: str, solver: Any, linear: Callable[[Any, Any], Any], x: Any, z0: Tensor
) -> tuple[Callable[[], Any], int]:
    """Solve under ``jax.jit``, and its evaluations; ``Skipped`` if the library is missing or has no such solver."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if threads != cores and not z0.is_cuda:
        raise Skipped(f"JAX takes all {cores} cores it is given, torch {threads}: start with taskset")
    try:
        jax, _ = map(importlib.import_module, ("jax", library))
    except ImportError as error:
        raise Skipped(f"{library} cannot be imported: {error}") from None

    try:
        place = jax.devices("gpu" if z0.is_cuda else "cpu")[0]
    except RuntimeError as error:
        raise Skipped(f"JAX sees no GPU: {error}") from None
    counted: list[None] = []

    def f(z: Any, x: Any, counts: bool = False) -> Any:
        if counts:
            jax.debug.callback(lambda: counted.append(None))
        return jax.numpy.tanh(linear(z, x))

    start, *given = (jax.device_put(part.cpu().numpy(), place) for part in (z0, *x))
    with jax.default_matmul_precision("highest"):  # float32 as torch multiplies it, not TF32
        jax_loop(library, solver, partial(f, counts=True))(start, given).block_until_ready()
        jax.effects_barrier()
        run = jax_loop(library, solver, f)
        run(start, given).block_until_ready()
    return lambda: run(start, given).block_until_ready(), len(counted)


def jax_loop(library: str, solver: Any, f: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """(z0, x) -> z under ``jax.jit``; raises ``Skipped`` if the library has no such solver."""
    jax, loops = map(importlib.import_module, ("jax", library))
    if library == "optimistix":
        if not isinstance(solver, deqfast.Picard):
            raise Skipped("optimistix has only plain iteration for fixed points")
        iteration = loops.FixedPointIteration(rtol=0.0, atol=0.0)
        options: dict[str, Any] = {"max_steps": solver.max_iter, "throw": False}
        return jax.jit(lambda z, x: loops.fixed_point(f, iteration, z, x, **options).value)
    plain = isinstance(solver, deqfast.Picard)
    options = {"maxiter": solver.max_iter - (not plain), "tol": NEVER}  # the others do not count their first evaluation
    if plain:
        rival = loops.FixedPointIteration(f, **options)
    elif isinstance(solver, deqfast.Anderson):
        rival = loops.AndersonAcceleration(f, history_size=solver.history_size, ridge=solver.ridge, **options)
    else:
        rival = loops.Broyden(lambda z, x: f(z, x) - z, stepsize=1.0, **options)
    return jax.jit(lambda z, x: rival.run(z, x).params)
