"""What the benchmarks share: the solvers compared, f, torchdeq's side, and the bytes an algorithm must move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deqfast

NEVER = 1e-30  # a tolerance no solve meets, so that all make the same number of iterations
APPROACHED = 0.05  # relative residual that a solve of ``Contraction`` must have reached for its time to count


def solvers(iterations: int) -> dict[str, tuple[Any, str | None, dict[str, Any]]]:
    """Name -> (deqfast's solver, torchdeq's name and options, or None where it has no such solver)."""
    return {
        "picard": (deqfast.Picard(NEVER, iterations), "fixed_point_iter", {}),
        "anderson m=6": (deqfast.Anderson(NEVER, iterations), "anderson", {"m": 6}),
        "anderson m=6 bf16 history": (
            deqfast.Anderson(NEVER, iterations, history_dtype=torch.bfloat16), None, {}
        ),
        f"broyden n={iterations}": (deqfast.Broyden(NEVER, iterations), "broyden", {}),
    }  # fmt: skip


def peer_of(name: str) -> str:
    """The case whose torchdeq time a case is compared with."""
    return name.removesuffix(" bf16 history")


def step_passes(pairs: int, width: float) -> float:
    """Passes over the state of one multisecant step with a window of `pairs`; width: of a history element, in states.

    Both sweeps read f and z, one f at the last iterate, the other writes z; each reads a half of the history and writes
    a row of it.
    """
    return 6 + 2 * width + 2 * width * pairs


def passes_over_the_state(solver: Any) -> float:
    """Passes of the algorithm over (B, D) fp32 per iteration, averaged over a solve that fills the window."""
    if isinstance(solver, deqfast.Picard):
        return 3  # read z and f, write z
    width = 0.5 if solver.history_dtype == torch.bfloat16 else 1
    sizes = [min(k, solver.history or solver.max_iter) for k in range(solver.max_iter - 1)]
    return sum(step_passes(n, width) for n in sizes) / solver.max_iter


class Contraction:
    """f(z) = c + lambda z, whose fixed point is known; counts its calls."""

    def __init__(self, batch: int, dim: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.c = torch.randn(batch, dim, generator=generator).to(device)
        self.eigenvalues = torch.linspace(-0.9, 0.95, dim).to(device)
        self.calls = 0

    def __call__(self, z: Tensor, c: Tensor | None = None) -> Tensor:
        self.calls += 1
        return torch.addcmul(self.c if c is None else c, z, self.eigenvalues)

    def residual(self, z: Tensor) -> float:
        """Largest relative residual of the batch, in float64."""
        z = z.double()
        f = self.c.double() + z * self.eigenvalues.double()
        return float(((f - z).norm(dim=1) / f.norm(dim=1)).max())


def torchdeq_solve(
    solver: str, iterations: int, options: dict[str, Any], tol: float = NEVER
) -> Callable[[Any, Tensor], Tensor]:
    """(f, z0) -> z by torchdeq as it ships; ImportError where it is not installed."""
    from torchdeq.solver import get_solver

    run = get_solver(solver)
    return lambda f, z0: run(f, z0, max_iter=iterations, tol=tol, stop_mode="rel", **options)[0]


def least_seconds(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
