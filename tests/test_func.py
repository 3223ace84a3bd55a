"""Blocks under torch.func and forward-mode AD, against loops, eager autograd and finite differences."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, assert_close, lost
from solutions import ADJOINTS, TIGHT, adjoints
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap

from deqfast import JFB, Anderson, DEQBlock, FCCell, Implicit, Status, Unrolled, solve
from deqfast.gradients import Adjoint

every_adjoint = adjoints("jfb", "implicit", "neumann", "phantom", "unrolled")
exact = adjoints("implicit", "unrolled")


def tight_block(adjoint, **options):
    torch.manual_seed(0)
    return DEQBlock(FCCell(3, 4), TIGHT, adjoint, **options).double()


def data(*shape):
    return torch.randn(*shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class TestFirstDerivatives:
    @every_adjoint
    def test_jacobians_and_tangents(self, adjoint):
        block, x, tangent = tight_block(adjoint), data(2), data(2).cos()
        jacobian = torch.stack(
            [torch.autograd.grad(block(y := x.clone().requires_grad_()).flatten()[i], y)[0] for i in range(8)]
        )
        jacobians = [jacrev(block)(x), jacfwd(block)(x)]
        for strategy in ("reverse-mode", "forward-mode"):
            jacobians.append(torch.autograd.functional.jacobian(block, x, vectorize=True, strategy=strategy))
        assert_close([each.flatten(0, 1) for each in jacobians], [jacobian] * 4, GRADIENT)
        with torch.no_grad():
            pushed = jvp(block, (x,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(block(forward_ad.make_dual(x, tangent)))
            expected = block(x), (jacobian * tangent).sum((1, 2)).view(2, 4)
            assert_close([*pushed, dual.primal, dual.tangent], [*expected, *expected], GRADIENT)

    @exact
    @pytest.mark.parametrize("in_parameters", [False, True])
    def test_against_finite_differences(self, adjoint, in_parameters):
        """Tangents, batches of tangents and batches of gradients."""
        block, x = tight_block(adjoint), data(2)
        names, parameters = zip(*block.named_parameters(), strict=True)

        def call(x, *parameters):
            return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

        inputs = (x, *parameters) if in_parameters else (x.requires_grad_(), *(p.detach() for p in parameters))
        batched = {"check_batched_grad": True, "check_batched_forward_grad": not in_parameters}
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, **batched, **FINITE_DIFFERENCES)


SECOND = {
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over reverse": hessian,
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("name", ["implicit", "unrolled", "jfb", "phantom"])
def test_second_derivatives_are_those_of_eager_mode_or_refused(name, second):
    block, x = tight_block(ADJOINTS[name]), data(1)

    def loss(x):
        return block(x).pow(3).sum()

    if name in ("jfb", "phantom"):
        with pytest.raises(RuntimeError, match="double backward through (JFB|Phantom) is not supported"):
            second(loss)(x)
    else:
        assert_close(second(loss)(x), torch.autograd.functional.hessian(loss, x), GRADIENT)


@pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT)], ids=str)
def test_a_broken_sample_harms_no_other(adjoint):
    """Every sample of every member is solved as if by itself."""
    block = tight_block(adjoint, warn=False)
    block.solver = Anderson(rtol=1e-6)
    x = data(2, 3)
    x[0, 1] = torch.nan

    def call(x):
        value, solution = block(x, return_solution=True)
        return value, solution.status, solution.iterations, solution.residual

    results = vmap(call)(x)
    for i, (value, *exact, residual) in enumerate(map(call, x)):
        assert all(torch.equal(a[i], b) for a, b in zip(results[1:3], exact, strict=True))
        assert_close(results[0][i], value, GRADIENT)
        assert_close(results[3][i], residual, lost(torch.float64, 1e-6))
    assert (results[1] == Status.NONFINITE).tolist() == [[False, True, False], [False] * 3]
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    gradients = vmap(jacrev(lambda p, x: functional_call(block, p, (x,)).sum(0)), (None, 0))(parameters, x)
    _, *expected = torch.autograd.functional.jacobian(
        lambda x, *p: functional_call(block, dict(zip(parameters, p, strict=True)), (x,)).sum(0),
        (x[0], *block.parameters()),
    )
    assert_close([g[0] for g in gradients.values()], expected, GRADIENT)


class TreeCell(nn.Module):
    """A tree of a state, of an x with an index that picks a row of a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("table", torch.tensor([0.1, 0.5], dtype=torch.float64))

    def forward(self, z, x):
        a = 0.5 * torch.tanh(self.linear(z["b"])) + x["x"]
        return {"b": self.table[x["kind"]][:, None] * z["a"].sin() + x["scale"], "a": a}

    def initial_state(self, x):
        return {"a": torch.zeros_like(x["x"]), "b": torch.zeros_like(x["x"])}


@every_adjoint
def test_an_ensemble_of_trees_trains(adjoint):
    """Members and samples of their own: within eager autograd in all parameters, and by vmap of grad in x."""
    cells = [TreeCell() for _ in range(2)]
    cells[1].table.mul_(0.5)
    blocks, x = [DEQBlock(cell, TIGHT, adjoint) for cell in cells], data(2, 3)
    kind, (parameters, buffers) = torch.tensor([0, 1, 1]), stack_module_state(blocks)

    def loss(call, x):
        z = call({"x": x, "kind": kind, "scale": 2.0})
        return (z["a"] * z["b"]).sum()

    def member(parameters, x, buffers):
        return loss(lambda given: functional_call(blocks[0], (parameters, buffers), (given,)), x)

    in_x = vmap(grad(member, argnums=1))({name: p.detach() for name, p in parameters.items()}, x, buffers)
    vmap(member)(parameters, x, buffers).sum().backward()
    for i, block in enumerate(blocks):
        y = x[i].clone().requires_grad_()
        expected = torch.autograd.grad(loss(block, y), [y, *block.parameters()])
        assert_close([in_x[i], *(p.grad[i] for p in parameters.values())], list(expected), GRADIENT)


class TestErrors:
    def test_an_adjoint_without_derivative(self):
        class Plain(Adjoint):
            differentiate = JFB.differentiate

        block, x = tight_block(Plain()), data(2)
        block(x).sum().backward()
        with pytest.raises(RuntimeError, match="Plain has no derivative under torch.func"):
            grad(lambda x: block(x).sum())(x)

    @every_adjoint
    @pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "eager", "dual"])
    def test_a_tensor_that_only_the_cell_holds(self, adjoint, transform):
        w, x = torch.full((3,), 0.3, dtype=torch.float64), data(2)
        weight = w.clone().requires_grad_()

        def call(w):
            return DEQBlock(lambda z, x: torch.tanh(w * z + x), TIGHT, adjoint)(x).sum()

        def dual():
            with forward_ad.dual_level():
                return call(forward_ad.make_dual(w, w))

        calls = {
            "dual": dual,
            "grad": lambda: grad(call)(w),
            "jvp": lambda: jvp(call, (w,), (w,))[1],
            "vmap": lambda: vmap(call)(torch.stack([w, w])),
            "eager": lambda: vmap(lambda x: call(weight) + x)(x),
        }
        error = pytest.raises(RuntimeError, match="the cell may hold no tensor that is transformed .* Give it to the")
        with nullcontext() if isinstance(adjoint, Unrolled) else error:
            calls[transform]()

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x: jacrev(tight_block("shine"))(x), "SHINE has no derivative under torch.func.*use Implicit"),
            (lambda x: jvp(tight_block("shine"), (x,), (x,)), "SHINE has no derivative under torch.func.*use Implicit"),
            (lambda x: linearize(tight_block(Implicit(TIGHT)), x), "deqfast: torch.func.linearize.*use torch.func.jvp"),
            (lambda x: grad(lambda z: solve(torch.cos, z).value.sum())(x), "solve does not run under torch.func"),
        ],
    )
    def test_derivatives_that_are_not_served(self, call, message):
        with pytest.raises(RuntimeError, match=message):
            call(data(2))

    @every_adjoint
    def test_fake_tensors(self, adjoint):
        with FakeTensorMode(), pytest.raises(ValueError, match="z0 must hold values.* got fake tensors"):
            DEQBlock(lambda z, x: 0.5 * z + x, TIGHT, adjoint)(torch.ones(2, 3))


TRANSFORMS = {  # of a loss of weights and x; whether it is refused
    "grad": (grad, True),
    "jacrev": (jacrev, True),
    "hessian": (hessian, True),
    "vjp": (lambda loss: lambda *given: vjp(loss, *given)[1](torch.ones(()).double()), True),
    "vmap(grad)": (lambda loss: lambda w, x: vmap(grad(loss), (None, 0))(w, x[:, None]), True),
    "jacfwd": (jacfwd, False),
    "jvp": (lambda loss: lambda *given: jvp(loss, given, given), False),
    "vmap": (lambda loss: lambda w, x: vmap(loss, (None, 0))(w, x[:, None]), False),
}


@pytest.mark.tier("full")
class TestCompiled:
    """torch.compile around transforms: right between two graphs, or refused."""

    @staticmethod
    def compiled(transform, backend="aot_eager"):
        """The transform of a loss, compiled, that as it is, and its arguments."""
        torch.manual_seed(0)
        block = DEQBlock(FCCell(3, 4), TIGHT, Implicit(TIGHT))
        model, x = nn.Sequential(nn.Linear(3, 3), block, nn.Linear(4, 1)).double(), data(5)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        f = transform(lambda weights, x: functional_call(model, weights, (x,)).square().sum())
        return torch.compile(f, backend=backend), f, (weights, x)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize(("transform", "refused"), TRANSFORMS.values(), ids=TRANSFORMS)
    def test_what_is_served_is_right(self, transform, refused, backend):
        fast, plain, given = self.compiled(transform, backend)
        if refused:
            words = r"torch.compile cannot be combined with a gradient.*compiler.disable"
            with pytest.raises(RuntimeError, match=words):
                fast(*given)
        else:
            assert_close(fast(*given), plain(*given), GRADIENT)

    def test_gradients_around_compiled_code_and_left_out_of_it(self):
        fast, plain, given = self.compiled(lambda loss: lambda *given: torch.compiler.disable(grad(loss))(*given))
        around, _, _ = self.compiled(lambda loss: loss)
        expected = plain(*given)
        assert_close((fast(*given), grad(around)(*given)), (expected, expected), GRADIENT)
        assert all(bool(g.any()) for g in expected.values())
