"""CONVERGED is never the status of a map without a fixed point, and no answer has a longer residual than the start.

The backward solve u = J^T u + g of ``Implicit`` starts at u = g, with the residual J^T g. Whatever it returns is
therefore a solution at least as good as JFB's, and |u - u*| <= |(I - J^T)^-1| |r|.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import examples
from solutions import SOLVERS

import deqfast
from deqfast import Anderson, Auto, Broyden, DEQBlock, Implicit, Picard, Status

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 4
WITHOUT_FIXED_POINT = {
    "a shift": lambda z: z + 0.7,
    "a bend": lambda z: z + 0.9 * z.tanh() + 1.5,
    "a block that adds its input": lambda z: z + 0.5 * torch.relu(z @ W.to(z.dtype)) + 1,
    "a block after a norm": lambda z: z + torch.nn.functional.layer_norm(z, (16,)).abs() + 0.1,
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
    "auto": Auto(max_iter=150),
    "auto absolute": Auto(rtol=0, atol=1e-3, max_iter=150),
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
    if kernel == "torch" and not isinstance(solver, Picard):  # long runs take a second a map
        # With 90 evaluations Auto begins a second stage.
        solver = replace(solver, max_iter=min(solver.max_iter, 90 if isinstance(solver, Auto) else 60))
    solution = deqfast.solve(f, z0, solver, kernel=kernel)
    # f(z) - z of any z is far from 0, but rounds to 0 where z is very long.
    assert not bool(solution.converged.any()), solution
    assert set(solution.status.tolist()) <= {Status.MAX_ITER, Status.ESCAPED, Status.NONFINITE}
    f0, unit = torch.linalg.vector_norm(f(z0).double(), dim=1), torch.finfo(dtype).eps
    if solver.norm == "euclidean":
        assert (residual(f, solution.value) <= residual(f, z0) + 2 * unit * f0).all()


@examples
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
    size, max_iter = (4, 300) if kernel == "torch" else (20, 400)
    solver = SOLVERS[name](rtol=1e-3, max_iter=max_iter, **{} if name == "picard" else {"history_size": size})
    solution = deqfast.solve(lambda z: (z + 1).bfloat16(), torch.zeros(2, 8), solver, kernel=kernel)
    assert set(solution.status.tolist()) <= {Status.MAX_ITER, Status.ESCAPED} and solution.value.abs().max() <= 2


def wide_and_narrow(z):
    """A contraction of a float64 and a float32 tensor."""
    a = 0.3 * torch.tanh(z["a"] @ W) + 0.1 * z["b"] + 1
    return {"a": a, "b": 0.1 * z["b"] - 0.2 * a.float()}


@pytest.mark.parametrize("options", [{}, {"drop_converged": True}, {"groups": "batch"}], ids=str)
@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden, Auto])
@pytest.mark.parametrize("kind", ["bf16", "bf16 of fp32", "fp16 of fp32", "tree"])
@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
def test_a_residual_is_of_the_value_in_its_own_dtype(kernel, kind, solver, options):
    """The rows of a solve have more digits than such a state: f has to see what the step judges."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind[:4])
    value = torch.float32 if "of" in kind else low
    b = torch.linspace(0, 1, 5 * 16).view(5, 16)

    def f(z, rows=None):
        if low is None:
            return wide_and_narrow(z)
        return (0.5 * torch.tanh(z.float() @ W.float()) + (b if rows is None else b[rows])).to(value)

    def flat(z):
        return torch.cat([t.double() for t in z.values()], 1) if isinstance(z, dict) else z.double()

    z0 = torch.zeros(5, 16, dtype=low) if low else {"a": torch.zeros(5, 16).double(), "b": torch.zeros(5, 16)}
    tol = 1e-3 if low else 1e-9
    solution = deqfast.solve(f, z0, solver(tol, 80), kernel=kernel, **options)
    z, fz = flat(solution.value), flat(f(solution.value))
    if "groups" in options:
        z, fz = z.view(1, -1), fz.view(1, -1)
    exact = torch.linalg.vector_norm(fz - z, dim=1) / torch.linalg.vector_norm(fz, dim=1)
    unit = 16 * torch.finfo(torch.float32 if low else torch.float64).eps  # sums of 16 products, in the batch's order
    assert (solution.residual.double() - exact).abs().max() <= unit
    assert (exact[solution.converged] <= tol + unit).all()


def test_a_low_precision_backward_solve_cannot_run_away():
    x = torch.randn(5, 8, requires_grad=True)
    for solver in (None, Anderson(1e-6, 60), Picard(1e-6, 60)):
        block = DEQBlock(conserve, Broyden(1e-2, 30), Implicit(solver), warn=False)
        with torch.autocast("cpu", torch.bfloat16):
            value = block(x)
        torch.autograd.grad(value[:, 0].sum(), x)
        assert not bool(block.backward_solution.converged.any())
        u = block.backward_solution.value
        assert torch.linalg.vector_norm(u, dim=1).max() <= 4  # u = g has length 1, and a mean of 1/8


@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
def test_a_warning_of_samples_that_ran_away(kernel):
    with pytest.warns(UserWarning, match="2 of 2 samples ended with ESCAPED: the cell may lack a fixed point"):
        DEQBlock(lambda z, x: z + x, Picard(rtol=1e-2, max_iter=200), kernel=kernel)(torch.ones(2, 4))


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
    if kind == "conserved":  # J^T keeps the mean of u: u = J^T u + g has a solution only for a g of mean zero
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
@settings(examples, max_examples=25)
@given(
    kind=st.sampled_from(["random", "non-normal", "conserved"]),
    size=st.sampled_from([4, 13, 64, 256]),
    radius=st.floats(0.5, 4.0),
    seed=st.integers(1000, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_an_implicit_gradient_solves_its_system_no_worse_than_jfb(route, kind, size, radius, seed, dtype):
    check_gradient(jacobian(kind, size, radius, seed).to(dtype), seed, kind=kind, **ROUTES[route])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("solver", [None, Anderson(1e-6, 60), Picard(1e-6, 200)], ids=["default", "anderson", "picard"])
def test_a_singular_system_that_has_a_solution(solver, dtype):
    """I - J^T is singular, and the loss does not read the mean that J^T keeps: the gradient is right."""
    x, weight = torch.randn(5, 7, dtype=dtype, requires_grad=True), centred(torch.randn(5, 7, dtype=dtype))
    block = DEQBlock(conserve, Broyden(1e-7 if dtype == torch.float64 else 1e-5, 60), Implicit(solver))
    (gradient,) = torch.autograd.grad((weight * block(x)).sum(), x)
    error = (gradient - 2 * weight).norm(dim=1) / (2 * weight).norm(dim=1)
    # |u - u*| <= |r| / 0.5, with |r| at most 1e-6 of |f| < 2 |start|.
    assert bool((error <= 1e-5).all() and block.backward_solution.converged.all())
