"""Cases with other libraries: whole solves, f included, in the same number of iterations. JAX's and ours compile f."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

import deqfast

from .entry import Case, Contender, Skipped, check, crossed
from .maps import FC_RADIUS, relative_residual
from .peers import silva_solve, torchdeq_solve
from .solves import APPROACHED, PEER, solver_name

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # JAX hangs if processes of inductor compile
OWN, JAX = ("packaged", "compiled", "eager"), ("jaxopt", "optimistix")
THEIRS = (PEER, "silva-networks", *JAX)
RATE = 0.9


def dense(z: Any, x: Any) -> Any:
    """W z + c, for torch and for JAX."""
    return z @ x[0].T + x[1]


def elementwise(z: Any, x: Any) -> Any:
    """As ``dense``, with a multiple of the identity."""
    return RATE * z + x[1]


def rival_case(solver: Any, batch: int, dim: int, linear: Callable[[Any, Any], Any]) -> Case:
    """All iterations of `solver` on f = tanh(linear(z)).

    For JAX's libraries the batch is one problem with one history, which is less work. jaxopt's Broyden uses a line
    search, which takes more calls of f.
    """

    def contender(provider: str, device: str) -> Contender:
        generator = torch.Generator().manual_seed(dim)
        weight = torch.randn(dim, dim, generator=generator) if linear is dense else torch.zeros(1, 1)
        x = weight.mul_(FC_RADIUS / dim**0.5), torch.randn(batch, dim, generator=generator)
        z0 = torch.zeros(batch, dim)

        def f(z: Tensor, x: Any) -> Tensor:
            return torch.tanh(linear(z, x))

        if provider == "packaged":
            solve: Callable[[], Any] = torch.no_grad()(packaged(f, solver, x, z0))
        elif provider in OWN:
            block = deqfast.DEQBlock(f, solver, kernel="cpp", compile=provider == "compiled", warn=False)
            solve = torch.no_grad()(lambda: block(x, z0))
        elif provider not in JAX:
            run = torch.no_grad()((torchdeq_solve if provider == PEER else silva_solve)(solver))
            solve = lambda: run(lambda z: f(z, x), z0)  # noqa: E731
        else:
            solve = jax_solve(provider, solver, linear, x, z0)
        value = torch.from_numpy(numpy.asarray(solve()).copy()).double()
        residual = relative_residual(torch.tanh(linear(value, [part.double() for part in x])), value)
        if provider in OWN:
            check("relative residual", residual, APPROACHED[type(solver)])
        return Contender(lambda: [solve() for _ in range(solves)], {"residual": residual})

    solves = (
        20 if batch * dim < 1 << 14 else 1
    )  # of the short ones, so that the cache is equally warm for every library
    name = f"rivals-{linear.__name__}-{solver_name(solver)}-{crossed((batch, dim))}"
    return Case("rivals", name, (*OWN, *THEIRS), THEIRS, contender, devices=("cpu",))


def packaged(f: Callable[[Any, Any], Any], solver: Any, x: Any, z0: Tensor) -> Callable[[], Any]:
    """Solve in a package of AOTInductor, with the steps of kernel "cpp" as C functions."""
    program = torch.export.export(deqfast.DEQBlock(f, solver, kernel="cpp", warn=False).eval(), (x, z0))
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/solve.pt2", inductor_configs=deqfast.package_options()
        )
        package = torch._inductor.aoti_load_package(path)
    return lambda: package(x, z0)


def jax_solve(library: str, solver: Any, linear: Callable[[Any, Any], Any], x: Any, z0: Tensor) -> Callable[[], Any]:
    """Solve under ``jax.jit``; raises ``Skipped`` if the library is missing or has no such solver."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if threads != cores:
        raise Skipped(f"JAX takes all {cores} cores it is given, torch {threads}: start with taskset")
    try:
        import jax
        import jaxopt
        import optimistix
    except ImportError as error:
        raise Skipped(f"{library} cannot be imported: {error}") from None

    def f(z: Any, x: Any) -> Any:
        return jax.numpy.tanh(linear(z, x))

    start, given = jax.numpy.asarray(z0.numpy()), [jax.numpy.asarray(part.numpy()) for part in x]
    if library == "optimistix":
        if not isinstance(solver, deqfast.Picard):
            raise Skipped("optimistix has only plain iteration for fixed points")
        plain: Any = optimistix.FixedPointIteration(rtol=0.0, atol=0.0)
        options: dict[str, Any] = {"max_steps": solver.max_iter, "throw": False}
        run = jax.jit(lambda z, x: optimistix.fixed_point(f, plain, z, x, **options).value)
    else:
        options = {"maxiter": solver.max_iter, "tol": 0.0}
        if isinstance(solver, deqfast.Picard):
            rival = jaxopt.FixedPointIteration(f, **options)
        elif isinstance(solver, deqfast.Anderson):
            rival = jaxopt.AndersonAcceleration(f, history_size=solver.history_size, ridge=solver.ridge, **options)
        else:
            rival = jaxopt.Broyden(lambda z, x: f(z, x) - z, stop_if_linesearch_fails=False, **options)
        run = jax.jit(lambda z, x: rival.run(z, x).params)
    return lambda: run(start, given).block_until_ready()
