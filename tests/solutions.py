"""The solvers and adjoints under test, what they evaluate, and what must hold for their solutions."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from correctness import FixedPoint, rounding
from torch import Tensor
from torch.utils import _pytree as pytree

from deqfast import JFB, SHINE, Implicit, Neumann, Phantom, Reversible, Unrolled
from deqfast.engine.solve import Options, Solve
from deqfast.solution import Solution
from deqfast.solvers import Anderson, Broyden, Picard, Solver

# name -> constructor, with the default arguments of `Solver` first.
SOLVERS: dict[str, Callable[..., Solver]] = {
    "picard": Picard,
    "anderson": Anderson,
    "anderson-I": partial(Anderson, kind="I"),
    "broyden": Broyden,
    "broyden-bad": partial(Broyden, kind="bad"),
}
every_solver = pytest.mark.parametrize("name", SOLVERS)
# One of each kind of step: without a window, with a least-squares window, with an unsymmetric one.
some_solvers = pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])
on_cpu = pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
in_process = pytest.mark.parametrize("kernel", ["torch", "cpp", "cuda"], indirect=True)

TIGHT = Broyden(rtol=1e-13, max_iter=60)
# name -> adjoint, with which a gradient that is exact in the limit is so to rounding.
ADJOINTS = {
    "jfb": JFB(),
    "implicit": Implicit(TIGHT),
    "neumann": Neumann(steps=3),
    "phantom": Phantom(steps=3),
    "reversible": Reversible(steps=12),
    "shine": SHINE(),
    "unrolled": Unrolled(steps=60),
    "checkpoint": Unrolled(steps=60, checkpoint=True),
}


def adjoints(*names: str) -> pytest.MarkDecorator:
    """The mark of a test of these adjoints."""
    return pytest.mark.parametrize("adjoint", [ADJOINTS[name] for name in names], ids=names)


class Recorder:
    """f that records copies of its arguments and values."""

    def __init__(self, f: Callable[[Any], Any]):
        self.f = f
        self.arguments: list[Any] = []
        self.values: list[Any] = []

    def __call__(self, z: Any) -> Any:
        self.arguments.append(pytree.tree_map(torch.clone, z))
        value = self.f(z)
        self.values.append(pytree.tree_map(torch.clone, value))
        return value

    def __len__(self) -> int:
        return len(self.arguments)


def solve_with_inverse(
    f: Callable[..., Any], z0: Any, solver: Solver, kernel: str, drop_converged: bool = False
) -> tuple[Solution, Callable[[Any], Any]]:
    """Solution, and the estimate v -> (I - J^T)^-1 v that ``SHINE`` takes from its history."""
    options = Options(solver=solver, kernel=kernel, drop_converged=drop_converged, keeps_inverse=True)
    solution = Solve(z0, options)(f, z0)
    assert solution.inverse is not None
    return solution, solution.inverse


def assert_solves(solution: Solution, problem: FixedPoint) -> None:
    """Assert that every sample converged, and is as near to the fixed point as its residual implies."""
    assert bool(solution.converged.all()), f"{solution}: residual {solution.residual.tolist()}"
    errors = (solution.value.cpu().double() - problem.solution).norm(dim=1)
    slack = rounding(solution.value.dtype) * problem.solution.norm(dim=1)
    allowed = problem.amplification * (solution.residual_abs.cpu().double() + slack)
    assert bool((errors <= allowed).all()), f"errors {errors.tolist()}, allowed {allowed.tolist()}"


def assert_same_solution(actual: Solution, expected: Solution, but: tuple[str, ...] = ()) -> None:
    """Assert that two solutions agree bit for bit in all fields except those named in `but`."""
    for name in (field.name for field in fields(Solution) if field.name not in but):
        a, e = getattr(actual, name), getattr(expected, name)
        same = torch.equal(a, e) if isinstance(a, Tensor) and isinstance(e, Tensor) else a == e
        assert same, f"{name}: {a}, expected {e}"
