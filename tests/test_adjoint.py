"""Gradients through a solve: three ways in float64, for broken samples, for scaled losses, and twice."""

from __future__ import annotations

import gc
import math
import re
import weakref

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, assert_close, rounding
from own_sums import Linear, product
from solutions import SOLVERS, TIGHT, adjoints, every_solver, on_cpu
from torch import nn

from deqfast import (
    JFB,
    SHINE,
    Anderson,
    Auto,
    Broyden,
    DEQBlock,
    FCCell,
    Implicit,
    Neumann,
    Phantom,
    Picard,
    Reversible,
    Status,
    Unrolled,
)
from deqfast.gradients import as_adjoint

every_adjoint = adjoints("jfb", "implicit", "neumann", "phantom", "reversible", "unrolled", "checkpoint")


class Toy:
    """z = tanh(W z + U x + b) with its tensors as attributes, |W| = 0.6; x (B, n), z (B, m)."""

    def __init__(self, batch: int = 3, dtype: torch.dtype = torch.float64, n: int = 3, m: int = 4):
        generator = torch.Generator().manual_seed(0)
        shapes = {"w": (m, m), "u": (m, n), "b": (m,), "x": (batch, n), "cotangent": (batch, m)}
        tensors = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        tensors["w"] *= 0.6 / torch.linalg.matrix_norm(tensors["w"], 2)
        self.cotangent = tensors.pop("cotangent").to(dtype)
        self.w, self.u, self.b, self.x = (t.to(dtype).requires_grad_() for t in tensors.values())
        self.z0 = torch.zeros(batch, m, dtype=dtype)

    @property
    def inputs(self):
        return self.x, self.w, self.u, self.b

    def cell(self, z, x):
        return torch.tanh(product(z, self.w) + product(x, self.u) + self.b)

    def block(self, adjoint, solver=None, **options):
        options = {"warn": False, **options}  # a few steps of an adjoint do not converge to TIGHT
        return DEQBlock(self.cell, solver or TIGHT, adjoint, **options)

    def gradients(self, adjoint, solver=None, **options):
        z = self.block(adjoint, solver, **options)(self.x, z0=self.z0)
        return torch.autograd.grad(z, self.inputs, self.cotangent)


@every_solver
@on_cpu
def test_implicit_equals_unrolled(name, kernel):
    toy = Toy()
    solver = SOLVERS[name](TIGHT.rtol, 120)
    implicit = toy.gradients(Implicit(solver), solver, kernel=kernel)
    assert_close(implicit, toy.gradients(Unrolled(steps=120)), GRADIENT)


class TestDefinitions:
    @pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (5, 0.5), (3, 0.2)])
    def test_jfb_phantom_and_neumann_are_derivatives_of_damped_steps_from_the_solution(self, steps, damping):
        toy = Toy()
        z = solution = toy.block("jfb")(toy.x, z0=toy.z0).detach()
        for _ in range(steps):
            z = (1 - damping) * z + damping * toy.cell(z, toy.x)
        expected = torch.autograd.grad(z, toy.inputs, toy.cotangent)
        for adjoint in (Phantom(steps, damping), Neumann(steps, damping), *[JFB()] * (steps == 1)):
            tolerance = GRADIENT if isinstance(adjoint, Neumann) else rounding(torch.float64)
            assert_close(toy.gradients(adjoint), expected, tolerance)
            assert torch.equal(toy.block(adjoint)(toy.x, z0=toy.z0), solution)

    @pytest.mark.parametrize(("steps", "damping"), [(1, 0.5), (9, 0.8), (None, 0.3)])
    def test_reversible_is_the_derivative_of_its_iteration(self, steps, damping):
        toy, solver = Toy(), Picard(max_iter=21)
        y = z = toy.z0
        for _ in range(steps or 10):
            y = (1 - damping) * y + damping * toy.cell(z, toy.x)
            z = (1 - damping) * z + damping * toy.cell(y, toy.x)
        value, solution = toy.block(Reversible(steps, damping), solver)(toy.x, z0=toy.z0, return_solution=True)
        assert_close(value.detach(), z.detach(), rounding(torch.float64))
        absolute = (toy.cell(y, toy.x) - y).norm(dim=1).detach()
        assert_close(solution.residual_abs, absolute, GRADIENT)
        assert solution.evaluations == 2 * (steps or 10)
        expected = torch.autograd.grad(z, toy.inputs, toy.cotangent)
        assert_close(toy.gradients(Reversible(steps, damping), solver), expected, GRADIENT)

    def test_steps_of_reversible_that_are_not_given_can_be_reversed(self):
        """Each of two half-steps multiplies rounding by up to 1 / (1 - r); it may grow from 2^-52 to 1e-3."""
        toy = Toy()
        for damping, steps in ((0.5, 21), (0.9, 6), (0.01, 100)):
            z, solution = toy.block(Reversible(None, damping), Auto(), warn=False)(
                toy.x, z0=toy.z0, return_solution=True
            )
            z.sum().backward()
            assert solution.evaluations == 2 * steps

    def test_reversible_judges_the_way_back_sample_by_sample(self):
        """One sample of a thousand goes astray, by a hundredth of its length: their mean does not show it."""
        toy, off = Toy(batch=1000), torch.zeros(1000, 1, dtype=torch.float64)
        z = DEQBlock(lambda z, x: toy.cell(z, x) + off, adjoint=Reversible(steps=2), warn=False)(toy.x, z0=toy.z0)
        off[7] = 0.003
        with pytest.raises(RuntimeError, match="reversed steps .+ end 0.0.+ off z0: take fewer steps than 2"):
            z.sum().backward()

    def test_reversible_refuses_what_it_would_lose_and_needs_neither_x_nor_z0(self):
        toy = Toy()
        held = toy.w * 1.0
        with pytest.raises(RuntimeError, match="Reversible would lose the gradient"):
            DEQBlock(lambda z, x: torch.tanh(z @ held.T + x @ toy.u.T), adjoint=Reversible(9))(toy.x, z0=toy.z0)
        x, z0 = toy.x * 1.0, toy.z0.clone()
        z, kept = toy.block(Reversible(9), warn=False)(x, z0=z0), weakref.ref(x)
        del x
        z0.fill_(7.0)
        z.sum().backward()
        gc.collect()
        assert kept() is None

    @pytest.mark.parametrize(
        ("adjoint", "least", "most"), [(Unrolled(40), 80, 200), (Unrolled(40, True), 1, 50), (Reversible(20), 0, 8)]
    )
    def test_states_that_are_kept_for_the_backward_pass(self, adjoint, least, most):
        toy, kept = Toy(batch=1000), {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            z = DEQBlock(lambda z, x: toy.cell(z.sin().cos(), x), adjoint=adjoint)(toy.x, z0=toy.z0)
        assert z.requires_grad and least <= sum(len(tensor) == 1000 for tensor in kept.values()) <= most

    @pytest.mark.parametrize("steps", [1, 4, None])
    def test_unrolled_is_a_loop(self, steps):
        toy = Toy()
        z0 = torch.randn_like(toy.z0).requires_grad_()
        solver = Picard(rtol=1e-2, max_iter=7)
        value, solution = DEQBlock(toy.cell, solver, Unrolled(steps), warn=False)(toy.x, z0=z0, return_solution=True)
        z = z0
        for _ in range(steps or 7):
            before, z = z, toy.cell(z, toy.x)
        assert torch.equal(value, z) and torch.equal(solution.value, z) and not solution.value.requires_grad
        inputs = (z0, *toy.inputs)
        expected = torch.autograd.grad(z, inputs, toy.cotangent, create_graph=True)
        actual = torch.autograd.grad(value, inputs, toy.cotangent, create_graph=True)
        assert_close(actual, expected, rounding(torch.float64))
        seconds = [torch.autograd.grad(sum(g.exp().sum() for g in first), inputs) for first in (actual, expected)]
        assert_close(*seconds, GRADIENT)
        checkpointed = DEQBlock(toy.cell, solver, Unrolled(steps, checkpoint=True), warn=False)(toy.x, z0=z0)
        assert all(map(torch.equal, torch.autograd.grad(checkpointed, inputs, toy.cotangent), actual))
        absolute = (z - before).norm(dim=1).detach()
        assert_close(solution.residual_abs, absolute, rounding(torch.float64))
        assert_close(solution.residual_rel, absolute / z.norm(dim=1).detach(), rounding(torch.float64))
        assert torch.equal(solution.residual, solution.residual_rel)
        assert solution.evaluations == (steps or 7) and solution.iterations.tolist() == [steps or 7] * 3
        assert torch.equal(solution.converged, solution.residual <= 1e-2)
        _, absolute = toy.block(Unrolled(3), Picard(rtol=0, atol=1e-3))(toy.x, z0=toy.z0, return_solution=True)
        assert torch.equal(absolute.residual, absolute.residual_abs)


class TestCalls:
    @pytest.mark.parametrize(
        ("adjoint", "extra"), [(JFB(), 1), (Implicit(), 1), (Phantom(steps=4), 4)], ids=["jfb", "implicit", "phantom"]
    )
    def test_calls_of_the_cell(self, adjoint, extra):
        toy, calls = Toy(), []
        block = DEQBlock(lambda z, x: (calls.append(1), toy.cell(z, x))[1], "broyden", adjoint, warn=False)
        _, solution = block(toy.x, z0=toy.z0, return_solution=True)
        assert len(calls) == solution.evaluations + extra
        with torch.no_grad():
            _, solution = block(toy.x, z0=toy.z0, return_solution=True)
        assert len(calls) == 2 * solution.evaluations + extra

    def probed(self, toy):
        """The toy's cell, and a log of (cotangent, autocast enabled) of every product with its Jacobian."""
        log = []

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, grad):
                log.append((grad.clone(), torch.is_autocast_enabled("cpu")))
                return grad

        return lambda z, x: Probe.apply(toy.cell(z, x)), log

    def test_implicit_starts_at_the_gradient_and_ends_at_its_solution(self):
        toy = Toy()
        cell, log = self.probed(toy)
        block = DEQBlock(cell, TIGHT, Implicit(TIGHT))
        z = block(toy.x, z0=toy.z0)
        assert block.backward_solution is None
        z.backward(toy.cotangent)
        solution = block.backward_solution
        assert len(log) == solution.evaluations + 1
        size = torch.ldexp(torch.ones(3), toy.cotangent.abs().amax(dim=1).frexp().exponent)[:, None]
        assert torch.equal(log[0][0] * size, toy.cotangent) and torch.equal(log[-1][0], solution.value)
        assert all((cotangent != 0).any() for cotangent, _ in log)
        # u = J^T u + g, with J the Jacobian at the solution
        jacobian = (1 - z.detach() ** 2)[:, :, None] * toy.w.detach()
        expected = torch.linalg.solve((torch.eye(4) - jacobian).mT, toy.cotangent[:, :, None])[:, :, 0]
        assert_close(solution.value, expected, GRADIENT)

    def test_the_backward_solve_runs_under_the_autocast_state_of_the_forward(self):
        toy = Toy(dtype=torch.float32)
        for enabled in (True, False):
            cell, log = self.probed(toy)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                z = DEQBlock(cell, "broyden", "implicit")(toy.x, z0=toy.z0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled):
                z.sum().backward()
            assert {state for _, state in log[:-1]} == {enabled}

    def test_the_default_backward_solver_is_the_forwards_made_tight(self):
        toy = Toy()
        solver = Anderson(rtol=0, atol=1e-1, max_iter=30, history_size=3)
        block = toy.block(Implicit(), solver)
        block(toy.x, z0=toy.z0).backward(100 * toy.cotangent)
        backward = block.backward_solution
        assert backward.converged.all() and (backward.residual <= 1e-6).all()
        assert torch.equal(backward.residual, backward.residual_rel)
        assert_close(backward.residual_abs, backward.residual_rel * backward.value.norm(dim=1), 1e-5)


class TestBadSamples:
    """A sample whose solve broke down has no gradient, and leaves no trace in any other."""

    @every_adjoint
    @pytest.mark.parametrize("rows", [[0], [2], [4], [0, 1, 3], [0, 1, 2, 3, 4]])
    def test_rows_of_nan(self, adjoint, rows):
        """The first of them breaks down by its x, the others by their starts."""
        toy, rest, healthy = Toy(batch=5), Toy(batch=5), [i for i in range(5) if i not in rows]
        smooth = toy.cell
        toy.cell = lambda z, x: smooth(torch.where(z > 100, math.nan, z), x)
        with torch.no_grad():
            toy.x[rows[0], 1], toy.z0[rows[1:]] = math.nan, 1000
        toy.z0.requires_grad_()
        z, solution = toy.block(adjoint)(toy.x, z0=toy.z0, return_solution=True)
        assert (solution.status == Status.NONFINITE).nonzero().flatten().tolist() == rows
        assert torch.isfinite(z).all() and torch.equal(z[rows], toy.z0[rows])
        assert torch.equal(z, solution.value) and (solution.residual[rows] == math.inf).all()
        x_grad, *weight_grads, z0_grad = torch.autograd.grad(
            z, (*toy.inputs, toy.z0), toy.cotangent, materialize_grads=True
        )
        assert (x_grad[rows] == 0).all() and (z0_grad[rows] == 0).all()
        rest.x, rest.z0 = rest.x.detach()[healthy].requires_grad_(), rest.z0[healthy]
        rest.cotangent = rest.cotangent[healthy]
        assert_close([x_grad[healthy], *weight_grads], list(rest.gradients(adjoint)), GRADIENT)


class TestIncomingGradients:
    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    @every_adjoint
    def test_what_is_not_finite_is_passed_on(self, adjoint, bad):
        toy = Toy()
        toy.cotangent[1, 2] = bad
        x_grad, *weight_grads = toy.gradients(adjoint)
        assert not any(torch.isfinite(g).all() for g in weight_grads)
        assert not torch.isfinite(x_grad[1]).all() and torch.isfinite(x_grad[[0, 2]]).all()
        healthy = Toy()
        assert_close(x_grad[[0, 2]], healthy.gradients(adjoint)[0][[0, 2]], GRADIENT)

    @pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e20, 1e36])
    def test_the_scale_of_the_loss_changes_nothing(self, scale):
        cell, x = FCCell(3, 4), torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        block = DEQBlock(cell, Broyden(rtol=1e-6, max_iter=60), Implicit())
        exact, scaled = (
            torch.autograd.grad(block(x), x, torch.full((6, 4), size))[0].double() / size for size in (1.0, scale)
        )
        assert_close(scaled, exact, rounding(torch.float32))
        assert block.backward_solution.converged.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backward_solve_in_low_precision_ends_at_its_floor(dtype):
    """In float32 it would run to max_iter, because products of 16 bits are not exact enough; so would a tangent."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 12
    x = torch.ones(8, 32, dtype=dtype, requires_grad=True)
    block = DEQBlock(
        lambda z, x: torch.tanh(z @ weight.to(dtype) + x), adjoint=Implicit(Broyden(rtol=1e-6, max_iter=60))
    )
    block(x).sum().backward()
    solution = block.backward_solution
    assert solution.value.dtype == dtype and solution.evaluations < 60
    assert set(solution.status.tolist()) <= {Status.CONVERGED, Status.STALLED}
    assert torch.func.jvp(block, (x.detach(),), (torch.ones_like(x),))[1].dtype == dtype


# Routes to a second derivative in x. autograd.functional treats an absent one as zero.
ROUTES = {
    "grad": lambda f, x: torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x),
    "backward": lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0].sum().backward(inputs=[x]),
    "hessian": torch.autograd.functional.hessian,
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
}


class TestSecondDerivatives:
    @pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
    @pytest.mark.parametrize("adjoint", [JFB(), Neumann(), Phantom(), Reversible(5), SHINE()], ids=str)
    def test_they_are_refused_in_words_on_every_route(self, adjoint, route):
        block = DEQBlock(lambda z, x: 0.5 * z.sin() + x * x, Broyden(rtol=1e-12, max_iter=50), adjoint, warn=False)
        x = torch.full((1, 1), 0.7, dtype=torch.float64, requires_grad=True)
        name = type(adjoint).__name__
        with pytest.raises(RuntimeError, match=rf"double backward through {name} is not supported.*Unrolled\(\)"):
            route(lambda x: block(x).square().sum(), x)

    @pytest.mark.parametrize("held", ["by the cell", "by both"])
    def test_implicit_is_differentiable_any_number_of_times(self, held):
        # Few numbers, since finite differences are taken for all pairs.
        toy, solver = Toy(batch=2, n=1, m=2), TIGHT

        def layer(x, w, u, b):
            def cell(z, given):
                injection = given[0] @ u.T if held == "by the cell" else given[0] @ given[1].T
                return torch.tanh(z @ w.T + injection + (x if held == "by both" else given[0])[:, :1] + b)

            shared = () if held == "by the cell" else (u.sin() if held == "by both" else u,)
            return DEQBlock(cell, solver, Implicit(solver))((x.sin(), *shared), z0=toy.z0)

        def force(x, w, u, b):
            return torch.autograd.grad(layer(x, w, u, b).square().sum(), (x, w), create_graph=True)

        assert torch.autograd.gradcheck(layer, toy.inputs, **FINITE_DIFFERENCES)
        assert torch.autograd.gradgradcheck(layer, toy.inputs, **FINITE_DIFFERENCES)
        assert torch.autograd.gradgradcheck(force, toy.inputs, **FINITE_DIFFERENCES)


@every_adjoint
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_low_precision_state_and_a_constant_state(adjoint, low):
    """The gradient equals the one of the same numbers in float64, to rounding."""
    toy, both = Toy(), []
    for dtype in (low, torch.float64):
        w = toy.w.detach().to(low).to(dtype).requires_grad_()
        x = (toy.x.detach().to(low) @ toy.u.detach().to(low).T).to(dtype)
        solver, z0 = Broyden(rtol=2 * torch.finfo(low).eps), toy.z0.to(low).to(dtype)

        def cell(z, x, w=w):
            return torch.tanh(z[0] @ w.T + x), torch.ones_like(z[1]), 0.5 * z[2] + z[0]

        z = DEQBlock(cell, solver, adjoint, warn=False)(x, z0=(z0, z0, z0))
        (z[0] + z[1]).sum().backward()
        assert z[0].dtype == w.grad.dtype == dtype
        both.append(w.grad)
    assert_close(*both, 16 * torch.finfo(low).eps)


@every_adjoint
@pytest.mark.parametrize("retained", [[], [True], [True, False]], ids=["no pass", "a retained one", "two"])
def test_backward_passes_are_alike_and_the_graph_is_freed_with_the_output(adjoint, retained):
    """Freed without the garbage collector and without a backward pass: no reference cycle holds an evaluation."""
    toy, held = Toy(), []

    def cell(z, x):
        value = toy.cell(z, x)
        if value.requires_grad:
            held.append(weakref.ref(value.untyped_storage()))
        return value

    gc.disable()
    try:
        z = DEQBlock(cell, adjoint=adjoint, warn=False)(toy.x, z0=toy.z0)
        passes = [torch.autograd.grad(z, toy.inputs, toy.cotangent, retain_graph=keep) for keep in retained]
        assert all(all(map(torch.equal, each, passes[0])) for each in passes)
        del z
        assert held and all(reference() is None for reference in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("adjoint", ["jfb", "phantom", "implicit", "neumann"])
def test_an_in_place_residual_frees_its_graph(adjoint):
    """The input then depends on the value. Those that keep the evaluation free it in the backward pass, as torch does
    what it saves."""
    cell, held = torch.nn.Linear(3, 3), []
    torch.nn.init.orthogonal_(cell.weight, gain=0.3)

    def call(z, x):
        value = cell(z) + x
        held.append(weakref.ref(value.untyped_storage()))
        return value

    x = torch.randn(4, 3, requires_grad=True) * 1
    x += DEQBlock(call, adjoint=adjoint, warn=False)(x)
    if adjoint not in ("jfb", "phantom"):
        x.sum().backward()
    del x
    gc.collect()
    assert held and all(reference() is None for reference in held)


@pytest.mark.parametrize("adjoint", ["implicit", "neumann", Reversible(5)], ids=str)
def test_a_second_backward_pass_needs_a_graph_that_was_kept(adjoint):
    toy = Toy()
    z = toy.block(adjoint)(toy.x, z0=toy.z0)
    z.sum().backward()
    with pytest.raises(RuntimeError, match="second time|retain_graph=True"):
        z.sum().backward()


def test_reversible_notices_a_cell_that_reads_its_value():
    toy, held = Toy(), [0.0]
    z = DEQBlock(lambda z, x: toy.cell(z + held[0], x), adjoint=Reversible(2), warn=False)(toy.x, z0=toy.z0)
    held[0] = z
    with pytest.raises(RuntimeError, match="the cell has changed and reads the block's own value now"):
        z.sum().backward()


def test_names_stand_for_default_adjoints():
    for kind in (JFB, Implicit, Neumann, Phantom, Reversible, SHINE, Unrolled):
        assert as_adjoint(kind.__name__.lower()) == kind()
    assert Implicit("anderson") == Implicit(Anderson())


class Scaled(nn.Module):
    """z = k tanh(N(W z)) + the sum of x, with a buffer k."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("k", torch.tensor(0.3))

    def forward(self, z, x):
        return self.k * torch.tanh(self.norm(self.linear(z))) + sum(x)


CHANGES = {
    "linear.weight of the cell": lambda cell, x, z0: cell.linear.weight.mul_(0.5),
    "k of the cell": lambda cell, x, z0: cell.k.mul_(0.5),
    "norm.running_mean of the cell": lambda cell, x, z0: cell.norm.running_mean.add_(1),
    "tensor 1 of x": lambda cell, x, z0: x[1].zero_(),
    "z0": lambda cell, x, z0: z0.zero_(),
    "a weight (4, 4) of the cell": lambda cell, x, z0: cell.linear.weight.mul_(0.5),
}


@pytest.mark.parametrize("adjoint", [Unrolled(5, checkpoint=True), Reversible(5)], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_a_backward_pass_that_calls_the_cell_notices_what_has_been_written_to(name, adjoint):
    """The backward pass would compute the gradient of another function. A lambda hides the tensors of a module."""
    module, x, z0 = Scaled().eval(), [torch.randn(3, 4), torch.randn(3, 4)], torch.randn(3, 4)
    cell = (lambda z, x: module(z, x)) if name.startswith("a weight") else module
    value = DEQBlock(cell, adjoint=adjoint, warn=False)(x, z0=z0)
    with torch.no_grad():
        CHANGES[name](module, x, z0)
    if isinstance(adjoint, Reversible) and name == "z0":
        return value.sum().backward()  # it keeps a copy
    named = "" if isinstance(adjoint, Reversible) and "weight" in name else f"{name} has been "  # torch's own error
    with pytest.raises(RuntimeError, match=re.escape(f"{named}modified by an inplace operation")):
        value.sum().backward()
