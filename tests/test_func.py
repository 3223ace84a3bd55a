"""Blocks under torch.func and forward-mode AD, against loops, eager autograd and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from deqfast import (
    JFB,
    SHINE,
    Anderson,
    Broyden,
    DEQBlock,
    FCCell,
    Implicit,
    Phantom,
    ResidualCell,
    Status,
    Unrolled,
    fc_fixed_point,
    solve,
)
from deqfast.testing import FINITE_DIFFERENCES, GRADIENT, assert_close

TIGHT = Broyden(tol=1e-13, max_iter=60)
ADJOINTS = {
    "jfb": JFB(),
    "implicit": Implicit(TIGHT),
    "phantom": Phantom(steps=3),
    "unrolled": Unrolled(steps=80),
}
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS)
exact = pytest.mark.parametrize("adjoint", [ADJOINTS["implicit"], ADJOINTS["unrolled"]], ids=["implicit", "unrolled"])


def block_of(adjoint, seed=0, **options):
    torch.manual_seed(seed)
    return DEQBlock(FCCell(3, 4), TIGHT, adjoint, **options).double()


def data(*shape):
    return torch.randn(*shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(block):
    def loss(parameters, x):
        return functional_call(block, parameters, (x[None],)).square().sum()

    return loss


def eager_gradients(block, x):
    return dict(zip(dict(block.named_parameters()), torch.autograd.grad(block(x).square().sum(), block.parameters()), strict=True))


class TestReverse:
    @every_adjoint
    def test_gradients_of_each_sample(self, adjoint):
        block, x = block_of(adjoint), data(5)
        parameters = {name: p.detach() for name, p in block.named_parameters()}
        found = vmap(grad(loss_of(block)), (None, 0))(parameters, x)
        for i in range(5):
            assert_close({name: g[i] for name, g in found.items()}, eager_gradients(block, x[i : i + 1]), GRADIENT)

    @every_adjoint
    def test_an_ensemble_trains(self, adjoint):
        """Members of their own, samples of their own: a vmap of vmaps, within eager autograd."""
        blocks, x = [block_of(adjoint, seed) for seed in range(3)], data(3, 2)
        parameters, buffers = stack_module_state(blocks)

        def member(parameters, buffers, x):
            return functional_call(blocks[0], (parameters, buffers), (x,))

        z = vmap(member)(parameters, buffers, x)
        z.square().sum().backward()
        for i, block in enumerate(blocks):
            assert_close(z[i], block(x[i]), GRADIENT)
            found = {name: p.grad[i] for name, p in parameters.items()}
            assert_close(found, eager_gradients(block, x[i]), GRADIENT)

    @every_adjoint
    def test_jacobians(self, adjoint):
        block, x = block_of(adjoint), data(2)
        expected = torch.stack([torch.autograd.grad(block(y := x.clone().requires_grad_()).flatten()[i], y)[0] for i in range(8)])
        assert_close(jacrev(block)(x).flatten(0, 1), expected, GRADIENT)
        assert_close(jacfwd(block)(x).flatten(0, 1), expected, GRADIENT)
        for strategy in ("reverse-mode", "forward-mode"):
            found = torch.autograd.functional.jacobian(block, x, vectorize=True, strategy=strategy)
            assert_close(found.flatten(0, 1), expected, GRADIENT)
