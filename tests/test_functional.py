"""Fixed points and roots as functions: gradients in arguments and modules, torch.func, compilation, and the sign."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import pytest
import torch
from correctness import GRADIENT, assert_close
from own_sums import Linear
from torch import nn

from deqfast import JFB, Auto, Broyden, DEQBlock, Implicit, LinearCell, Picard, Status, Unrolled, fixed_point, root

TIGHT = Broyden(rtol=1e-12, max_iter=60)
EXACT = Implicit(TIGHT)  # the default solves to 1e-6


def test_a_module_and_options():
    cell, x = LinearCell(4).double(), torch.randn(3, 4, dtype=torch.float64)
    value, solution = fixed_point(cell, torch.zeros_like(x), x, adjoint=JFB(), return_solution=True, groups="batch")
    assert solution.status.tolist() == [Status.CONVERGED] and torch.equal(value, solution.value)
    value.sum().backward()
    assert cell.weight.grad.any()


def test_options_are_those_of_a_block():
    """All but those that serve many calls, with the same defaults."""

    def options(f):
        return {name: p.default for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}

    own = {"solver", "adjoint", "return_solution", "sign"}
    for f, missing in ((fixed_point, set()), (root, {"causal"})):  # root's steps are those of whole samples
        left_out = {"init", "eval_solver", "cuda_graph", "compile", *missing}
        expected = {name: value for name, value in options(DEQBlock.__init__).items() if name not in left_out}
        assert {name: value for name, value in options(f).items() if name not in own} == expected


def test_per_sample_gradients_and_a_checkpoint_under_torch_func():
    x, w = torch.randn(5, 1, 3, dtype=torch.float64), 0.3 * torch.randn(3, 3, dtype=torch.float64)

    def f(z, w, x):
        return torch.tanh(z @ w + x)

    def loss(w, x, adjoint=EXACT):
        return fixed_point(f, torch.zeros_like(x), w, x, solver=TIGHT, adjoint=adjoint, warn=False).square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    assert_close(each, torch.stack([torch.func.grad(loss)(w, sample) for sample in x]), GRADIENT)
    unrolled = (torch.func.grad(loss)(w, x[0], Unrolled(9, checkpoint)) for checkpoint in (True, False))
    assert_close(*unrolled, GRADIENT)


@pytest.mark.usefixtures("cpp_kernels")
def test_in_compiled_and_exported_models():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(4, 4)

        def forward(self, x):
            c, z0 = self.linear(x), torch.zeros_like(x)
            return fixed_point(lambda z, c: torch.tanh(0.5 * z + c), z0, c, solver="picard", kernel="cpp").sin()

    layer, x = Layer().double(), torch.randn(3, 4, dtype=torch.float64)
    fast = torch.compile(layer, backend="eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            gradients = [torch.autograd.grad(f(x).sum(), layer.linear.weight)[0] for f in (layer, fast)]
        assert torch.equal(*gradients)
    assert_close(torch.export.export(layer, (x,)).module()(x), layer(x), GRADIENT)


def cubic(z, a):
    return z**3 + z - a


A, START = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)


@pytest.mark.parametrize("sign", [None, 1, -1])
@pytest.mark.parametrize("direction", [1, -1])
def test_roots_and_their_slopes(sign, direction):
    a, options = A.clone().requires_grad_(), {"adjoint": EXACT, "sign": sign, "return_solution": True}
    z, solution = root(lambda z, a: direction * cubic(z, a), START, a, **options)
    assert solution.converged.all() and (cubic(z, a).abs() <= 1e-6).all()
    (slope,) = torch.autograd.grad(z.sum(), a)
    assert_close(slope, 1 / (3 * z.detach() ** 2 + 1), GRADIENT)


def test_roots_under_transforms_and_their_second_derivatives():
    def find(a):
        return root(cubic, START[:1], a[None, None], adjoint=EXACT).sum()

    a = A.flatten()
    z = torch.vmap(find)(a)
    assert_close(torch.vmap(torch.func.grad(find))(a), 1 / (3 * z**2 + 1), GRADIENT)
    a.requires_grad_()
    (slope,) = torch.autograd.grad(root(cubic, START, a[:, None], adjoint=EXACT).sum(), a, create_graph=True)
    assert_close(torch.autograd.grad(slope.sum(), a)[0], -6 * z / (3 * z**2 + 1) ** 3, GRADIENT)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("width", [1, 3])
def test_the_value_of_g_is_matched_by_its_keys(kind, width):
    """Also when z = g(z) has a solution that g(z) = 0 has not."""
    a = torch.full((2, 1), 1.0, dtype=torch.float64, requires_grad=True)
    z0 = {"a": torch.zeros(2, width, dtype=torch.float64), "b": torch.zeros(2, 1, dtype=torch.float64)}
    z = root(lambda z, a: kind(b=0.5 * z["b"] + a, a=0.5 * z["a"] + 3 * a), z0, a, adjoint=EXACT)
    assert_close(z["b"], torch.full((2, 1), -2.0, dtype=torch.float64), 1e-6)
    assert_close(z["a"], torch.full((2, width), -6.0, dtype=torch.float64), 1e-6)
    assert_close(torch.autograd.grad(z["b"].sum(), a)[0], torch.full_like(a, -2.0), GRADIENT)


@pytest.mark.parametrize("unknowns", [1000, 3000])
def test_a_factor_of_g_changes_no_evaluation(unknowns):
    """Of a map that is diagonally dominant, with slopes of 8 to 12."""
    p = torch.randn(1, unknowns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options, evaluations = {"return_solution": True, "kernel": "torch"}, []
    for c in (1e-3, 0.03, 1.0, 30.0, 1e3):

        def g(z, c=c):
            neighbours = nn.functional.pad(z[:, 1:], (0, 1)) + nn.functional.pad(z[:, :-1], (1, 0))
            return c * (10 * z - neighbours + 0.1 * z**2 - p)

        z, solution = root(g, torch.zeros_like(p), **options)
        assert solution.converged.all() and g(z).norm() <= 1e-6
        assert_close(solution.residual_abs, g(z).norm(dim=1), 0.01)
        _, solution = root(g, torch.zeros_like(p), solver=Auto(rtol=0, atol=1e-6 * c), **options)
        evaluations.append(solution.evaluations)
    assert max(evaluations) <= 1.25 * min(evaluations), evaluations


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_each_row_has_a_step_of_its_own_sign_and_size(turn, scale):
    factors = torch.tensor([[1.0], [turn * scale], [1.0]], dtype=torch.float64)
    solver = Picard(rtol=0, atol=1e-6, max_iter=200, relaxation=0.2)  # with one size for all it diverges
    z = root(lambda z, a, b: b * cubic(z, a), START, A, factors, solver=solver)
    assert (factors * cubic(z, A)).abs().max() <= 1e-6
