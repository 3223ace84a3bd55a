"""CONVERGED is never said of a map without a fixed point, and no answer has a longer residual than the start.

The backward solve u = J^T u + g of ``Implicit`` starts at u = g, where the residual is J^T g: so whatever it returns is
a solution at least as good as JFB's, and |u - u*| <= |(I - J^T)^-1| |r|.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deqfast
from deqfast import Anderson, Broyden, DEQBlock, Implicit, Picard, Status
from deqfast.testing import SOLVERS

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 4
WITHOUT_FIXED_POINT = {
    "a shift": lambda z: z + 0.7,
    "a bend": lambda z: z + 0.9 * z.tanh() + 1.5,
    "a block that adds its input": lambda z: z + 0.5 * torch.relu(z @ W.to(z.dtype)) + 1,
    "a block behind a norm": lambda z: z + torch.nn.functional.layer_norm(z, (16,)).abs() + 0.1,
    "a slow stretch": lambda z: z.abs() + 1 + 1e-3 * z.abs(),
    "a turn with a drift": lambda z: torch.cat([z[:, :1] + 1, -z[:, 1:]], dim=1),
}
LONG = {
    "picard": Picard(rtol=1e-2, max_iter=400),
    "anderson": Anderson(max_iter=150),
    "broyden": Broyden(max_iter=150, history_size=20),
    "steps": Broyden(max_iter=30),
    "absolute": Broyden(rtol=0, atol=1e-3, max_iter=60, history_size=20),
    "max": Anderson(max_iter=60, norm="max"),
    "loose": Anderson(rtol=1e-2, max_iter=60),
}


def residual(f, z: torch.Tensor) -> torch.Tensor:
    """|f(z) - z| of every sample, in float64."""
    return torch.linalg.vector_norm(f(z).double() - z.double(), dim=1)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("cpp", torch.float32), ("cpp", torch.float64), ("torch", torch.float32)],
    indirect=["kernel"],
    ids=str,
)
@pytest.mark.parametrize("name", WITHOUT_FIXED_POINT)
@pytest.mark.parametrize("solver", LONG.values(), ids=LONG)
def test_a_map_without_a_fixed_point(solver, name, dtype, kernel):
    f = WITHOUT_FIXED_POINT[name]
    z0 = torch.cat([torch.zeros(2, 16), torch.randn(6, 16)]).to(dtype)
    solution = deqfast.solve(f, z0, solver, kernel=kernel)
    # f(z) - z of any z is far from 0, but rounds to 0 where z is very long.
    assert not bool(solution.converged.any()), solution
    assert set(solution.status.tolist()) <= {Status.MAX_ITER, Status.ESCAPED, Status.NONFINITE}
    f0, unit = torch.linalg.vector_norm(f(z0).double(), dim=1), torch.finfo(dtype).eps
    if solver.norm == "euclidean":
        assert (residual(f, solution.value) <= residual(f, z0) + 2 * unit * f0).all()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(2, 24),
    radius=st.floats(0.1, 0.95),
    drift=st.sampled_from([0.0, 0.05, 1.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(1000, 10**6),
    name=st.sampled_from(["picard", "anderson", "broyden"]),
    maximum=st.booleans(),
)
def test_affine_maps_with_and_without_a_fixed_point(size, radius, drift, scale, seed, name, maximum):
    """z -> A z + b with A symmetric; a drift moves z along an eigenvector of A with eigenvalue 1, for ever."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]
    values = radius * (2 * torch.rand(size, generator=draw, dtype=torch.float64) - 1)
    b = torch.randn(size, generator=draw, dtype=torch.float64)
    if drift:
        values[0] = 1
        b = b - basis[:, 0] * (basis[:, 0] @ b) + drift * torch.linalg.vector_norm(b) * basis[:, 0]
    a, b = basis @ torch.diag(values) @ basis.T, scale * b
    tol = 1e-5  # the residual asked for is 1e-3 of the first one, less than any drift
    solver = SOLVERS[name](rtol=tol, max_iter=400, norm="max" if maximum else "euclidean")
    start = scale * torch.randn(3, size, generator=draw, dtype=torch.float64)
    solution = deqfast.solve(lambda z: z @ a + b, start, solver)
    if drift:
        assert not bool(solution.converged.any()), solution
    else:
        assert bool(solution.converged.all()), solution
        exact = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - a, b)
        error = torch.linalg.vector_norm(solution.value - exact, dim=1)
        # |z - z*| <= |(I - A)^-1| |g|, |g| <= tol |f(z)|; in the largest norm both sides change by sqrt(D) at most.
        size_of_f = torch.linalg.vector_norm(solution.value @ a + b, dim=1)
        assert (error <= (size**0.5 if maximum else 1) * tol * size_of_f / (1 - radius) * (1 + 1e-9)).all()


@pytest.mark.parametrize("adjoint", ["unrolled", "reversible"])
def test_iterations_without_a_solver_are_judged_alike(adjoint):
    for drift in (lambda z, x: z + x, lambda z, x: z.bfloat16() + x.bfloat16()):  # in bfloat16 256 + 1 is 256
        block = DEQBlock(drift, Picard(rtol=1e-2, max_iter=400), adjoint, warn=False)
        assert not bool(block(torch.ones(2, 3), return_solution=True)[1].converged.any())
    block = DEQBlock(lambda z, x: 0.5 * z + x, Picard(rtol=1e-2, max_iter=60), adjoint)
    assert bool(block(torch.ones(2, 3), return_solution=True)[1].converged.all())


@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_low_precision_f_hides_its_drift(name, kernel):
    # In bfloat16 256 + 1 is 256: the residual there is 0, and says nothing.
    short = {} if name == "picard" else {"history_size": 20}
    solver = SOLVERS[name](rtol=1e-3, max_iter=400, **short)
    solution = deqfast.solve(lambda z: (z + 1).bfloat16(), torch.zeros(2, 8), solver, kernel=kernel)
    assert set(solution.status.tolist()) <= {Status.MAX_ITER, Status.ESCAPED} and solution.value.abs().max() <= 2


def test_a_low_precision_backward_solve_cannot_run_away():
    x = torch.randn(5, 8, requires_grad=True)
    for solver in (None, Anderson(1e-6, 60), Picard(1e-6, 60)):
        block = DEQBlock(conserve, Broyden(1e-2, 30), Implicit(solver), warn=False)
        with torch.autocast("cpu", torch.bfloat16):
            value = block(x)
        (found,) = torch.autograd.grad(value[:, 0].sum(), x)
        assert not bool(block.backward_solution.converged.any())
        u = block.backward_solution.value
        assert torch.linalg.vector_norm(u, dim=1).max() <= 4  # u = g has length 1, and a mean of 1/8


ENGINES = {
    "drop_converged": {"drop_converged": True},
    "groups": {"groups": "batch"},
    "late": {"sync_every": 7},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_other_ways_through_the_loop(options):
    solution = deqfast.solve(lambda z, rows=None: z + 1, torch.zeros(3, 4), Picard(rtol=1e-2, max_iter=300), **options)
    assert set(solution.status.tolist()) == {Status.ESCAPED}


def test_an_exported_and_a_compiled_solve():
    x = torch.cat([torch.ones(2, 4), torch.zeros(1, 4)])

    def status(block):
        return block(x, z0=torch.zeros(3, 4), return_solution=True)[1].status

    class Status_(torch.nn.Module):
        def __init__(self, **options) -> None:
            super().__init__()
            self.block = DEQBlock(Linear(torch.eye(4)), Picard(rtol=1e-2, max_iter=300), warn=False, **options)

        def forward(self, x):
            return self.block(x, z0=torch.zeros_like(x), return_solution=True)[1].status

    expected = [Status.ESCAPED, Status.ESCAPED, Status.CONVERGED]
    assert status(DEQBlock(Linear(torch.eye(4)), Picard(1e-2, 300), warn=False, compile=True)).tolist() == expected
    with torch.no_grad():
        exported = torch.export.export(Status_(kernel="torch").eval(), (x,), strict=False).module()
    assert exported(x).tolist() == expected


@pytest.mark.parametrize("name", SOLVERS)
def test_a_start_near_the_answer_costs_nothing(name):
    solver = SOLVERS[name](rtol=1e-4, max_iter=60)
    exact = 1e4 * torch.randn(4, 8, dtype=torch.float64)
    solution = deqfast.solve(lambda z: exact + 0.9 * (z - exact).roll(1, dims=1), exact * (1 + 1e-5), solver)
    assert bool(solution.converged.all()) and solution.evaluations == 1


@pytest.mark.parametrize("name", SOLVERS)
def test_an_answer_far_longer_than_the_start(name):
    # |z*| is 50 times |f(0)|.
    solution = deqfast.solve(lambda z: 0.98 * z + 1, torch.zeros(2, 3), SOLVERS[name](rtol=1e-4, max_iter=1000))
    assert bool(solution.converged.all())
    assert (solution.value - 50).abs().max() <= 50 * 1e-4 / 0.02


@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
def test_a_sample_that_ran_away_has_a_status_of_its_own(kernel):
    solver = Picard(rtol=1e-2, max_iter=200)
    solution = deqfast.solve(lambda z: z + torch.tensor([[1.0], [0.0]]), torch.ones(2, 4), solver, kernel=kernel)
    assert solution.status.tolist() == [Status.ESCAPED, Status.CONVERGED]
    with pytest.warns(UserWarning, match="2 of 2 samples ESCAPED: the cell may lack a fixed point: normalise"):
        DEQBlock(lambda z, x: z + x, solver, kernel=kernel)(torch.ones(2, 4))


def test_stop_fn_ends_a_sample_that_only_meets_the_tolerance():
    solver = Picard(rtol=0.1, max_iter=30)
    ended = deqfast.solve(lambda z: z + 1, torch.zeros(1, 3), solver, stop_fn=lambda z, value, k: z[:, 0] > 20)
    assert ended.status.tolist() == [Status.STOPPED] and ended.evaluations == 22


# J of a given spectral radius, and two that leave I - J singular.
def jacobian(kind: str, size: int, radius: float, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    j = torch.randn(size, size, generator=draw, dtype=torch.float64)
    if kind == "non-normal":
        j = j.triu(1) + torch.diag(torch.rand(size, generator=draw, dtype=torch.float64).mul(2).sub(1))
        return j * (radius / j.diagonal().abs().max())
    j = j * (radius / torch.linalg.eigvals(j).abs().max())
    if kind == "conserved":  # J^T keeps the mean of u: u = J^T u + g has no solution but for a g without one
        mean = torch.full((size, size), 1 / size, dtype=torch.float64)
        centre = torch.eye(size, dtype=torch.float64) - mean
        return mean + centre @ j @ centre
    return j


ROUTES = {
    "eager": {},
    "torch": {"kernel": "torch", "solver": Broyden(rtol=1e-6, max_iter=30)},
    "anderson": {"solver": Anderson(rtol=1e-6, max_iter=60)},
    "picard": {"solver": Picard(rtol=1e-6, max_iter=60)},
    "short": {"solver": Broyden(rtol=1e-9, max_iter=5)},
    "func": {"func": True},
    "members": {"members": True},
}


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(["random", "non-normal", "conserved"]),
    size=st.sampled_from([4, 13, 64, 256]),
    radius=st.floats(0.5, 4.0),
    seed=st.integers(1000, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_an_implicit_gradient_solves_its_system_no_worse_than_jfb(route, kind, size, radius, seed, dtype):
    check_gradient(jacobian(kind, size, radius, seed).to(dtype), seed, kind=kind, **ROUTES[route])


@pytest.mark.parametrize("radius", [0.9, 3.0])
def test_the_same_of_a_compiled_solve(radius):
    for solver in (Broyden(rtol=1e-9, max_iter=5), Picard(rtol=1e-6, max_iter=60)):
        check_gradient(jacobian("random", 13, radius, 7), 7, solver=solver, compile=True)


def check_gradient(j, seed, kind="random", solver=None, func=False, members=False, kernel="auto", compile=False):
    """Compare |r| with |J^T g| for a linear cell at its fixed point, whose gradient in x is u."""
    size, unit = len(j), torch.finfo(j.dtype).eps
    draw = torch.Generator().manual_seed(seed + 1)
    z, g = (torch.randn(4, size, generator=draw, dtype=torch.float64) for _ in range(2))
    if kind == "conserved":  # a mean of a tenth, which no u explains
        g = g - g.mean(dim=1, keepdim=True) + 0.1
    z, g = z.to(j.dtype), g.to(j.dtype)
    x = (z - z @ j.T).requires_grad_()
    adjoint = Implicit(solver)
    block = DEQBlock(Linear(j), Broyden(rtol=1e-9, max_iter=5), adjoint, kernel=kernel, warn=False, compile=compile)
    if func:
        (u,) = torch.func.vjp(lambda x: block(x, z0=z), x)[1](g)
    elif members:
        value = block(x, z0=z)
        u = torch.autograd.grad(value, x, torch.stack([g, 2 * g]), is_grads_batched=True)[0][1] / 2
    else:
        (u,) = torch.autograd.grad(block(x, z0=z), x, g)
    j, u, g = j.double(), u.double(), g.double()
    residual = torch.linalg.vector_norm(u @ j + g - u, dim=1)
    # Rounding of J^T u + g, and of its judgement: a dot product of D terms errs by at most D eps |J| |u|.
    lengths = torch.linalg.vector_norm(u, dim=1) + torch.linalg.vector_norm(g, dim=1)
    rounding = (size + 4) * unit * (1 + torch.linalg.matrix_norm(j)) * lengths
    assert (residual <= torch.linalg.vector_norm(g @ j, dim=1) + rounding).all()
    if kind == "conserved" and not func:
        assert not bool(block.backward_solution.converged.any())


class Linear(torch.nn.Module):
    """z J^T + x."""

    def __init__(self, j: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("j", j)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return z @ self.j.T + x


def centred(v: torch.Tensor) -> torch.Tensor:
    return v - v.mean(dim=1, keepdim=True)


def conserve(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A map that keeps the mean of z; from zeros, z* = 2 (x - mean x)."""
    return z - 0.5 * centred(z) + centred(x)


def sinkhorn(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A step on the potentials (a, b) of entropic transport with costs x (B, n, n), which a constant moves freely."""
    n = x.shape[1]
    a = -torch.logsumexp(z[:, None, n:] - x, dim=2)
    return torch.cat([a, -torch.logsumexp(a[:, :, None] - x, dim=1)], dim=1)


def plan(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    return torch.exp(z[:, :n, None] + z[:, None, n:] - x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("solver", [None, Anderson(1e-6, 60), Picard(1e-6, 200)], ids=["default", "anderson", "picard"])
class TestSingularSystems:
    """I - J^T is singular: the gradient is right, or the solve has not converged, which the block warns of."""

    def gradient(self, cell, x, z0, loss, solver):
        block = DEQBlock(
            cell, Broyden(rtol=1e-7 if x.dtype == torch.float64 else 1e-5, max_iter=60), Implicit(solver), warn=False
        )
        (found,) = torch.autograd.grad(loss(block(x, z0=z0)), x)
        return found, block.backward_solution

    def right_or_not_converged(self, found, exact, solution, tolerance):
        error = (found - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert bool(((error <= tolerance) | ~solution.converged).all()), (error, solution)

    def test_a_conserved_mean_that_the_loss_reads(self, solver, dtype):
        x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
        _, solution = self.gradient(conserve, x, None, lambda z: z[:, 0].sum(), solver)
        assert not bool(solution.converged.any())  # no u explains the mean of v

    def test_a_conserved_mean_that_the_loss_does_not_read(self, solver, dtype):
        x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
        weight = centred(torch.randn(5, 7, dtype=dtype))
        found, solution = self.gradient(conserve, x, None, lambda z: (weight * z).sum(), solver)
        # |u - u*| <= |r| / 0.5, with |r| at most 1e-6 of |f| < 2 |start|.
        self.right_or_not_converged(found, 2 * weight, solution, 1e-5)
        assert bool(solution.converged.all())

    def test_the_potentials_of_sinkhorn(self, solver, dtype):
        x = torch.rand(3, 5, 5, dtype=dtype, requires_grad=True)
        weight = torch.randn(3, 5, 5, dtype=dtype)
        found, solution = self.gradient(
            sinkhorn, x, torch.zeros(3, 10, dtype=dtype), lambda z: (weight * plan(z, x)).sum(), solver
        )
        z, wide = torch.zeros(3, 10, dtype=torch.float64), x.detach().double().requires_grad_()
        for _ in range(200):  # the error shrinks by a factor below tanh(1/2)^2 a step, the costs being within [0, 1]
            z = sinkhorn(z, wide)
        (exact,) = torch.autograd.grad((weight * plan(z, wide)).sum(), wide)
        assert bool(solution.converged.all())
        # z* and u err by tol |z| / (1 - rho) each, rho = 0.22 < tanh(1/2); the gradient is of first order in both, with
        # derivatives of the plan, whose entries are at most 1, on both sides.
        tolerance = 4 * ((1e-7 if dtype == torch.float64 else 1e-5) + 2e-6) / (1 - 0.22)
        self.right_or_not_converged(found, exact, solution, tolerance)
