"""Small problems whose counters the gate compares: the same numbers on every machine and every torch.

Solves to a tolerance are counted on problems whose residuals are never close to it. Another processor's rounding then
changes no count, as tests/benchmarks/test_gate.py checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from correctness import PROBLEMS
from torch import Tensor

import deqfast

from .collapse import clusters
from .counters import count, count_call
from .maps import NEVER

KERNEL = "cpp"
BATCH, DIM, ITERATIONS, MOST = 8, 256, 12, 60
SOLVERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "picard": (deqfast.Picard, {}),
    "anderson-m6": (deqfast.Anderson, {}),
    "anderson-m6-bf16": (deqfast.Anderson, {"history_dtype": torch.bfloat16}),
    "broyden-n12": (deqfast.Broyden, {"history_size": 12}),
}
# Problem -> tolerance of the solve. No residual of any iteration and sample is close to it, see ``CLEAR``.
SOLVED = {
    "picard": {"linear-0.5": 9.4e-4, "linear-0.9": 1.06e-3, "tanh": 8.4e-4, "non-normal": 7.1e-4, "sawtooth": 1e-3},
    "anderson-m6": {"linear-0.5": 1.41e-3, "linear-0.9": 1.49e-3, "tanh": 1.49e-3, "non-normal": 8.7e-4},
    "anderson-m6-bf16": {"linear-0.5": 1.41e-3, "linear-0.9": 1.49e-3, "tanh": 1.49e-3},
    "broyden-n12": {"linear-0.5": 7.5e-4, "linear-0.9": 7.6e-4, "tanh": 8e-4},
}
# Least ratio of all residuals to the tolerance, or its inverse. Another order of the sums changes them by up to 0.3 %.
CLEAR = 1.03


def solve_to_tolerance(solver: str, problem: str, trace: bool = False) -> deqfast.Solution:
    kind, options = SOLVERS[solver]
    given = PROBLEMS[problem](batch=4, dim=12 if problem == "sawtooth" else 64, seed=1)
    return deqfast.solve(given.f, given.z0, kind(SOLVED[solver][problem], MOST, **options), KERNEL, trace=trace)


def iterations(solver: str, problem: str) -> dict[str, int]:
    """Counts of a solve to a tolerance. Samples that did not converge may take fewer iterations, and are counted."""
    solution = solve_to_tolerance(solver, problem)
    return {
        "evaluations": solution.evaluations,
        "iterations": int(solution.iterations.sum()),
        "not_converged": int((~solution.converged).sum()),
    }


def full_solve(solver: str, trace: bool = False) -> dict[str, int]:
    """Counts of ``ITERATIONS`` iterations at any residual: operations outside f per iteration, and memory."""
    kind, options = SOLVERS[solver]
    given = PROBLEMS["linear-0.9"](batch=BATCH, dim=DIM)
    rule = kind(NEVER, ITERATIONS, **options)
    return vars(count(lambda f: deqfast.solve(f, given.z0, rule, KERNEL, trace=trace), given.f, "cpu"))


def whole(call: Callable[[], Any], *without: str) -> dict[str, int]:
    """Counters of a call, f included, except those that depend on the processor or on torch's version."""
    counters = vars(count_call(call, "cpu"))
    return {name: value for name, value in counters.items() if name not in without}


def block_step(make: Callable[[], Any], shape: tuple[int, ...], adjoint: str, *without: str) -> dict[str, int]:
    """Forward and backward of a DEQBlock; the gradients are freed immediately."""
    torch.manual_seed(0)
    block = deqfast.DEQBlock(make(), deqfast.Anderson(NEVER, 8), adjoint, kernel=KERNEL)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    leaves = [x, *block.parameters()]

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(block(x, z0=torch.zeros_like(x)).square().sum(), leaves))

    return whole(step, *without)


def fc_fixed_point() -> dict[str, int]:
    """Counters of a forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.05 * torch.randn(64, 64, generator=generator)).requires_grad_()
    c = torch.randn(BATCH, 64, generator=generator).requires_grad_()

    def step() -> Any:
        z, _ = deqfast.fc_fixed_point(weight, c, solver=deqfast.Picard(NEVER, ITERATIONS), kernel=KERNEL)
        return torch.autograd.grad(z.square().sum(), [weight, c])

    return whole(step)


def neural_collapse() -> dict[str, int]:
    features, labels, weight = clusters(200, 32, 10)
    return whole(lambda: deqfast.neural_collapse(features, labels, weight, kernel=KERNEL), "allocations")


CASES: dict[str, Callable[[], dict[str, int]]] = {
    **{f"{solver} {problem}": partial(iterations, solver, problem) for solver in SOLVED for problem in SOLVED[solver]},
    **{f"{solver} {ITERATIONS} iterations": partial(full_solve, solver) for solver in SOLVERS},
    f"anderson-m6 {ITERATIONS} iterations, trace": partial(full_solve, "anderson-m6", trace=True),
    **{
        f"block fc {adjoint}": partial(block_step, partial(deqfast.FCCell, 64, 64), (BATCH, 64), adjoint)
        for adjoint in ("jfb", "implicit")
    },
    "block residual jfb": partial(
        block_step, partial(deqfast.ResidualCell, 16, kernel=KERNEL), (4, 16, 8, 8), "jfb", "allocations", "peak_bytes"
    ),
    "fc_fixed_point": fc_fixed_point,
    "neural_collapse": neural_collapse,
}


def measure(case: str) -> dict[str, int]:
    """Counters of one of ``CASES``; raises RuntimeError without the C++ kernels, which are counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return CASES[case]()
    finally:
        torch.set_num_threads(threads)
