"""Blocks under torch.func and forward-mode AD, against loops, eager autograd and finite differences."""

from __future__ import annotations

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, assert_close, lost
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap

from deqfast import (
    JFB,
    Anderson,
    Broyden,
    DEQBlock,
    FCCell,
    Implicit,
    Neumann,
    Phantom,
    Status,
    Unrolled,
)
from deqfast.gradients import Adjoint

TIGHT = Broyden(rtol=1e-13, max_iter=60)
ADJOINTS = {
    "jfb": JFB(),
    "implicit": Implicit(TIGHT),
    "neumann": Neumann(steps=3),
    "phantom": Phantom(steps=3),
    "unrolled": Unrolled(steps=80),
}
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS)
exact = pytest.mark.parametrize("adjoint", [ADJOINTS["implicit"], ADJOINTS["unrolled"]], ids=["implicit", "unrolled"])


def block_of(adjoint, **options):
    torch.manual_seed(0)
    return DEQBlock(FCCell(3, 4), TIGHT, adjoint, **options).double()


def data(*shape):
    return torch.randn(*shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class TestFirstDerivatives:
    @every_adjoint
    def test_jacobians_and_tangents(self, adjoint):
        block, x, tangent = block_of(adjoint), data(2), data(2).cos()
        jacobian = torch.stack(
            [torch.autograd.grad(block(y := x.clone().requires_grad_()).flatten()[i], y)[0] for i in range(8)]
        )
        found = [jacrev(block)(x), jacfwd(block)(x)]
        for strategy in ("reverse-mode", "forward-mode"):
            found.append(torch.autograd.functional.jacobian(block, x, vectorize=True, strategy=strategy))
        assert_close([each.flatten(0, 1) for each in found], [jacobian] * 4, GRADIENT)
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
        block, x = block_of(adjoint), data(2)
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
class TestSecondDerivatives:
    @exact
    def test_are_those_of_eager_mode(self, adjoint, second):
        block, x = block_of(adjoint), data(1)

        def loss(x):
            return block(x).pow(3).sum()

        assert_close(second(loss)(x), torch.autograd.functional.hessian(loss, x), GRADIENT)

    @pytest.mark.parametrize("adjoint", [ADJOINTS["jfb"], ADJOINTS["phantom"]], ids=["jfb", "phantom"])
    def test_are_refused(self, adjoint, second):
        block = block_of(adjoint)
        with pytest.raises(RuntimeError, match="double backward through (JFB|Phantom) is not supported"):
            second(lambda x: block(x).sum())(data(1))


class TestMembers:
    """Every sample of every member is solved as if by itself."""

    @pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT)], ids=str)
    def test_a_broken_sample_harms_no_other(self, adjoint):
        block = block_of(adjoint, warn=False)
        block.solver = Anderson(rtol=1e-6)
        x = data(2, 3)
        x[0, 1] = torch.nan

        def call(x):
            value, solution = block(x, return_solution=True)
            return value, solution.status, solution.iterations, solution.residual

        found = vmap(call)(x)
        for i in range(2):
            assert all(torch.equal(a[i], b) for a, b in zip(found[1:3], call(x[i])[1:3], strict=True))
            assert_close(found[0][i], call(x[i])[0], GRADIENT)
            assert_close(found[3][i], call(x[i])[3], lost(torch.float64, 1e-6))
        assert (found[1] == Status.NONFINITE).tolist() == [[False, True, False], [False] * 3]
        gradients = vmap(jacrev(lambda p, x: functional_call(block, p, (x,)).sum(0)), (None, 0))
        gradients = gradients({name: p.detach() for name, p in block.named_parameters()}, x)
        _, *expected = torch.autograd.functional.jacobian(
            lambda x, *p: functional_call(block, dict(zip(gradients, p, strict=True)), (x,)).sum(0),
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

        block, x = block_of(Plain()), data(2)
        block(x).sum().backward()
        with pytest.raises(RuntimeError, match="Plain has no derivative under torch.func"):
            grad(lambda x: block(x).sum())(x)

    @every_adjoint
    @pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "eager", "dual"])
    def test_a_tensor_that_only_the_cell_holds(self, adjoint, transform):
        x = data(2)

        def call(w):
            return DEQBlock(lambda z, x: torch.tanh(w * z + x), TIGHT, adjoint)(x).sum()

        w = torch.full((3,), 0.3, dtype=torch.float64)
        weight = w.clone().requires_grad_()

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
        if isinstance(adjoint, Unrolled):
            calls[transform]()
            return
        with pytest.raises(
            RuntimeError, match="the cell may hold no tensor that is transformed .* Give it to the block"
        ):
            calls[transform]()

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x: jacrev(block_of("shine"))(x), "SHINE has no derivative under torch.func.*use Implicit"),
            (lambda x: jvp(block_of("shine"), (x,), (x,)), "SHINE has no derivative under torch.func.*use Implicit"),
            (lambda x: linearize(block_of(Implicit(TIGHT)), x), "deqfast: torch.func.linearize.*use torch.func.jvp"),
        ],
    )
    def test_derivatives_that_are_not_served(self, call, message):
        with pytest.raises(RuntimeError, match=message):
            call(data(2))

    @every_adjoint
    def test_fake_tensors(self, adjoint):
        with FakeTensorMode(), pytest.raises(ValueError, match="z0 must hold values.* got fake tensors"):
            DEQBlock(lambda z, x: 0.5 * z + x, TIGHT, adjoint)(torch.ones(2, 3))


@pytest.mark.tier("full")
class TestCompiled:
    """torch.compile around transforms: right between two graphs, or refused."""

    @staticmethod
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), DEQBlock(FCCell(3, 4), TIGHT, Implicit(TIGHT)), nn.Linear(4, 1)).double()

    @classmethod
    def compiled(cls, transform, backend="aot_eager"):
        """The transform of a loss, compiled, that as it is, and its arguments."""
        model, x = cls.model(), data(5)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        f = transform(lambda weights, x: functional_call(model, weights, (x,)).square().sum())
        return torch.compile(f, backend=backend), f, (weights, x)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize(
        "transform",
        [
            grad,
            jacrev,
            hessian,
            lambda loss: lambda *given: vjp(loss, *given)[1](torch.ones((), dtype=torch.float64)),
            lambda loss: lambda weights, x: vmap(grad(loss), (None, 0))(weights, x[:, None]),
        ],
        ids=["grad", "jacrev", "hessian", "vjp", "vmap(grad)"],
    )
    def test_gradients_are_refused(self, transform, backend):
        fast, _, given = self.compiled(transform, backend)
        with pytest.raises(RuntimeError, match=r"torch.compile cannot be combined with a gradient.*compiler.disable"):
            fast(*given)

    @pytest.mark.parametrize(
        "transform",
        [
            jacfwd,
            lambda loss: lambda *given: jvp(loss, given, given),
            lambda loss: lambda weights, x: vmap(loss, (None, 0))(weights, x[:, None]),
        ],
        ids=["jacfwd", "jvp", "vmap"],
    )
    def test_tangents_and_batches(self, transform):
        fast, plain, given = self.compiled(transform)
        assert_close(fast(*given), plain(*given), GRADIENT)

    def test_gradients_around_compiled_code_and_left_out_of_it(self):
        fast, plain, given = self.compiled(lambda loss: lambda *given: torch.compiler.disable(grad(loss))(*given))
        around, _, _ = self.compiled(lambda loss: loss)
        expected = plain(*given)
        assert_close((fast(*given), grad(around)(*given)), (expected, expected), GRADIENT)
        assert all(bool(g.any()) for g in expected.values())
