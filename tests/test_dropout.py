"""SolveDropout: one mask for a solve and its gradient, another for the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from correctness import GRADIENT, after_solve, assert_close
from own_sums import Linear
from torch import nn
from torch.utils.checkpoint import checkpoint

from deqfast import Broyden, DEQBlock, Implicit, Picard, Reversible, SolveDropout, Unrolled

TIGHT = Broyden(1e-12, 60)
ADJOINTS = ["jfb", Implicit(TIGHT), "phantom", "shine", Unrolled(60)]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)


class Recording(SolveDropout):
    """Keeps the masks that it has applied."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def forward(self, z):
        self.seen.append(super().forward(torch.ones_like(z)))
        return super().forward(z)


class Cell(nn.Module):
    """z = tanh(0.4 W drop(z) + x), perhaps in a checkpoint inside of it."""

    def __init__(self, drop, reentrant=None):
        super().__init__()
        self.linear, self.drop, self.reentrant = Linear(6, 6, dtype=torch.float64), drop, reentrant

    def layer(self, z, x):
        return torch.tanh(0.4 * self.linear(self.drop(z)) + x)

    def forward(self, z, x):
        if self.reentrant is None:
            return self.layer(z, x)
        return checkpoint(self.layer, z, x, use_reentrant=self.reentrant)


def inputs(batch=4):
    return torch.randn(batch, 6, dtype=torch.float64)


@every_adjoint
def test_a_call_has_one_mask_as_a_constant_and_the_next_call_another(adjoint):
    block, x, masks = DEQBlock(Cell(Recording(0.5)), TIGHT, adjoint), inputs().requires_grad_(), []
    tensors = [x, *block.parameters()]
    for _ in range(2):
        seen = block.cell.drop.seen = []
        z = block(x)
        found = torch.autograd.grad(z.square().sum(), tensors)
        mask = seen[0]
        assert len(seen) > 5 and all(torch.equal(each, mask) for each in seen)
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        plain = DEQBlock(lambda z, x, m=mask: torch.tanh(0.4 * block.cell.linear(z * m) + x), TIGHT, adjoint)
        assert_close(z, plain(x), after_solve(1e-12))
        assert_close(found, torch.autograd.grad(plain(x).square().sum(), tensors), GRADIENT)
        masks.append(mask)
    assert not torch.equal(*masks)
    assert not block.cell.drop._local.solves


def test_outside_of_a_solve_each_call_draws_and_keeps_the_expectation():
    drop, z = SolveDropout(0.3), torch.ones(100_000, requires_grad=True)
    for call in (drop, drop, lambda z: checkpoint(drop, z, use_reentrant=False)):
        dropped = call(z)
        assert abs(dropped.mean().item() - 1) < 0.02
        assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])
        (grad,) = torch.autograd.grad(dropped.sum(), z)
        assert torch.equal(grad, dropped)
    assert not torch.equal(drop(z), drop(z))


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_identity_without_training_or_probability(p):
    drop, z = SolveDropout(p), torch.randn(8, 8, requires_grad=True)
    assert drop.eval()(z) is z
    dropped = drop.train()(z)
    (grad,) = torch.autograd.grad(dropped.sum(), z)
    assert (dropped is z) == (p == 0) and torch.isfinite(grad).all()
    assert p < 1 or not dropped.any()


def test_no_warning_of_a_changing_cell(recwarn):
    DEQBlock(Cell(SolveDropout(0.5)))(inputs())
    DEQBlock(Cell(SolveDropout(0.5)), init=nn.Dropout(0.5))(inputs())  # not part of the cell
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"cell.drop \(Dropout\); .* deqfast.SolveDropout"):
        DEQBlock(Cell(nn.Dropout(0.5)))(inputs())


@pytest.mark.parametrize("adjoint", ["jfb", Reversible(5), Unrolled(5, checkpoint=True)], ids=str)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_calls_in_a_backward_pass_are_refused_not_wrong(adjoint, reentrant):
    """By a checkpoint inside of the cell, or by an adjoint that calls the cell again."""
    if adjoint == "jfb" and reentrant is None:
        return  # it calls nothing again
    z = DEQBlock(Cell(SolveDropout(0.5), reentrant), adjoint=adjoint, warn=False)(inputs().requires_grad_())
    with pytest.raises(RuntimeError, match=r"its mask was gone.*Reversible, Unrolled\(checkpoint=True\)"):
        z.sum().backward()


@pytest.mark.parametrize("refused", ["drop_converged", "other shape", "failure"])
def test_a_solve_that_fails_leaves_nothing_behind(refused):
    drop, x = SolveDropout(0.5), inputs(8)

    def forward(z, x):
        if refused == "other shape":
            drop(z[:, :2])
        if refused == "failure":
            raise RuntimeError("does not fit")
        return x[:, :1] * drop(z) + 1

    cell = Cell(drop)
    cell.forward = forward
    block = DEQBlock(cell, Picard(max_iter=100), drop_converged=refused == "drop_converged", init=torch.ones_like)
    x[:, 0] = torch.linspace(0, 0.45, 8)
    with pytest.raises(RuntimeError, match="does not fit"):
        block(x)
    assert not drop._local.solves and not torch.equal(drop(x), drop(x))


def test_blocks_that_share_a_module_and_blocks_in_cells():
    drop, x = Recording(0.5), inputs()
    first, second = DEQBlock(Cell(drop)), DEQBlock(Cell(drop))
    second(first(x)).sum().backward()
    assert len({tuple(mask.flatten().tolist()) for mask in drop.seen}) == 2
    drop.seen, outer = [], nn.Module()
    outer.inner, outer.drop, outer.forward = first, drop, lambda z, x: 0.5 * first(drop(z)) + x
    DEQBlock(outer)(x).sum().backward()
    assert len({tuple(mask.flatten().tolist()) for mask in drop.seen}) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"p": -0.1}, ValueError, "p must be finite and at least 0 and at most 1, got -0.1"),
        ({"p": 1.5}, ValueError, "p must be finite and at least 0 and at most 1, got 1.5"),
        ({"p": "0.5"}, TypeError, "p must be a number, got '0.5'"),
        ({"dims": (-1,)}, ValueError, "dims must be at least 0, got -1"),
        ({"dims": (1.0,)}, TypeError, "dims must be an integer, got 1.0"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        SolveDropout(**arguments)


def test_threads_have_masks_of_their_own():
    block = DEQBlock(Cell(SolveDropout(0.3)), TIGHT, warn=False)

    def run(batch):  # a mask of the other batch would not fit
        for _ in range(20):
            block(inputs(batch))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, (3, 4)))
