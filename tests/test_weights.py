"""Parametrised weights of a cell: computed once for each solve, with their graph, and held for all its evaluations."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from correctness import GRADIENT, after_solve, assert_close, rounding
from own_sums import Linear
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from deqfast import Broyden, DEQBlock, Implicit, MonotoneCell, Reversible, Unrolled
from deqfast.torch_internals import weights

TIGHT = Broyden(rtol=1e-12, max_iter=60)


class Counted(nn.Module):
    """tanh of a weight, which counts its calls."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight.tanh()


class Cell(nn.Module):
    """z = tanh(0.4 W z + x), the layer of W perhaps in a checkpoint of its own."""

    def __init__(self, parametrization=None, own_checkpoint=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear = Linear(3, 3, bias=False, dtype=torch.float64)
        self.evaluations, self.own_checkpoint = 0, own_checkpoint
        if isinstance(parametrization, nn.Module):
            parametrize.register_parametrization(self.linear, "weight", parametrization)
        elif parametrization is not None:
            parametrization(self.linear)

    def forward(self, z, x):
        self.evaluations += 1
        y = checkpoint(self.linear, z, use_reentrant=False) if self.own_checkpoint else self.linear(z)
        return torch.tanh(0.4 * y + x)


def inputs():
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)


def gradients(block, x, context=nullcontext):
    with context():
        value = block(x).square().sum()
    return torch.autograd.grad(value, [x, *block.parameters()])


ADJOINTS = ["jfb", Implicit(TIGHT), "neumann", "phantom", Reversible(25), "shine", Unrolled(60)]
KINDS = {"weight norm": weight_norm, "spectral norm": spectral_norm, "orthogonal": orthogonal, "own": Counted()}
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_adjoint
def test_computed_once_and_cached_around_it_changes_nothing(adjoint):
    """Neither in the gradient nor, ``parametrize.cached`` being what keeps it then, in the number of calls."""
    found = []
    for context in (nullcontext, parametrize.cached):
        block = DEQBlock(Cell(Counted()), TIGHT, adjoint, warn=False)
        counted = block.cell.linear.parametrizations.weight[0]
        counted.calls = 0
        found.append(gradients(block, inputs(), context))
        assert counted.calls == 1 < block.cell.evaluations
        assert block.cell.linear.weight is not block.cell.linear.weight  # free again
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(bool(grad.any()) for grad in found[0])


def offload(module):
    """Load the tensors before each call of the module, and leave them on meta between calls, as accelerate does."""
    owners = [owner for each in module.modules() for owner in (each._parameters, each._buffers)]
    lent = [(owner, name, tensor) for owner in owners for name, tensor in owner.items() if tensor is not None]

    def unload(*_):
        for owner, name, tensor in lent:
            away = tensor.to("meta")
            owner[name] = nn.Parameter(away) if isinstance(tensor, nn.Parameter) else away

    def load(*_):
        for owner, name, tensor in lent:
            owner[name] = tensor

    module.register_forward_pre_hook(load)
    module.register_forward_hook(unload)
    unload()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("adjoint", ["jfb", Unrolled(60)], ids=str)
@pytest.mark.parametrize("kind", [*KINDS.values(), MonotoneCell], ids=[*KINDS, "once per solve"])
def test_offloaded_weights_are_computed_by_each_call(kind, adjoint, training):
    """Their tensors are on meta until a hook of the cell has loaded them."""
    cell = MonotoneCell(3, 3, dtype=torch.float64) if kind is MonotoneCell else Cell(kind)
    block, x = DEQBlock(cell, TIGHT, adjoint, init=torch.zeros_like).train(training), inputs()
    with torch.no_grad():
        expected = copy.deepcopy(block)(x)
        offload(cell)
        found = block(x)
    assert_close(found, expected, after_solve(1e-12))
    assert all(tensor.is_meta for tensor in block.state_dict().values())


@every_kind
@pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Unrolled(60)], ids=str)
def test_gradients_are_those_of_the_same_weights(kind, adjoint):
    """Computed outside, and given to the cell in x."""
    block, x = DEQBlock(Cell(kind), TIGHT, adjoint), inputs()
    plain = DEQBlock(lambda z, given: torch.tanh(0.4 * z @ given[1].T + given[0]), TIGHT, adjoint)
    state = copy.deepcopy(block.state_dict())
    expected = torch.autograd.grad(
        plain((x, block.cell.linear.weight), z0=torch.zeros_like(x)).square().sum(), [x, *block.parameters()]
    )
    block.load_state_dict(state)  # the power iteration where it was
    assert_close(gradients(block, x), expected, GRADIENT)


@pytest.mark.filterwarnings("error")
@every_adjoint
def test_spectral_norm_in_training_moves_once_per_call(adjoint):
    cell, x = Cell(spectral_norm), inputs()
    block, alone = DEQBlock(cell, TIGHT, adjoint, warn=adjoint != Reversible(25)), copy.deepcopy(cell)
    value = block(x)
    weight = alone.linear.weight  # one step of the power iteration
    for a, b in zip(cell.buffers(), alone.buffers(), strict=True):
        assert_close(a, b, rounding(torch.float64))
    rate = 0.4 * float(torch.linalg.matrix_norm(weight.detach(), 2))
    left = 2 * ((1 + rate) / 2) ** 25 if isinstance(adjoint, Reversible) else after_solve(TIGHT.tol, 1 / (1 - rate))
    assert_close(torch.tanh(0.4 * value @ weight.T + x), value, left)


class TestSecondDerivatives:
    def check(self, *blocks):
        """Compare those of the last, which may call the others, with those of unrolled blocks."""
        x, found = inputs(), []
        for adjoint in (Implicit(TIGHT), Unrolled(60)):
            for block in blocks:
                block.adjoint = adjoint
            tensors = [x, *block.parameters()]
            first = torch.autograd.grad(block(x).sin().sum(), tensors, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
        assert_close(*found, GRADIENT)

    @every_kind
    def test_right(self, kind):
        self.check(DEQBlock(Cell(kind).eval(), TIGHT))


class TestRelease:
    @pytest.mark.parametrize("where", ["the cell", "its parametrization"])
    def test_after_an_error(self, where):
        cell, second = Cell(Counted()), Counted()
        parametrize.register_parametrization(cell.linear, "weight", second)

        def fail(*arguments):
            raise ArithmeticError

        hook = (cell if where == "the cell" else second).register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            DEQBlock(cell, TIGHT)(inputs())
        hook.remove()
        assert cell.linear.weight is not cell.linear.weight and not weights._thread.held

    def test_not_of_a_weight_that_an_outer_block_holds(self):
        class Outer(Cell):
            def forward(self, z, x):
                super().forward(z, x)
                return block(z) * 0.3 + 0.1 * self.linear(z) + x

        cell, inner = Outer(Counted()), Cell()
        inner.linear = cell.linear
        block = DEQBlock(inner, TIGHT)
        counted = cell.linear.parametrizations.weight[0]
        counted.calls = 0
        DEQBlock(cell, TIGHT, warn=False)(inputs()).sum().backward()
        assert counted.calls == 1 < block.cell.evaluations


@every_adjoint
@pytest.mark.parametrize("where", ["the layer", "the block", "the block, reentrant"])
def test_checkpoints_of_the_block_and_in_the_cell(adjoint, where):
    """There are as many samples as features, so that only its gradient distinguishes a weight from a state. A
    checkpoint of the block changes no bit, and solves at most one more time."""
    own, x, found = where == "the layer", inputs(), []
    plain, block = (DEQBlock(Cell(Counted(), own_checkpoint=at), TIGHT, adjoint, warn=False) for at in (False, own))
    checkpointed = partial(checkpoint, block, use_reentrant=where == "the block, reentrant")
    for call, of in ((plain, plain), (block if own else checkpointed, block)):
        call(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in of.parameters())])
        x.grad = None
    assert_close(found[1], found[0], GRADIENT if own else 0.0)
    if not own and not isinstance(adjoint, Reversible):  # each of whose steps back would be a pass of its own
        assert block.cell.evaluations <= 2 * plain.cell.evaluations


@pytest.mark.parametrize("parametrization", [None, weight_norm])
@pytest.mark.parametrize("adjoint", [*ADJOINTS, Unrolled(60, checkpoint=True)], ids=str)
def test_functional_call(adjoint, parametrization):
    """What is computed once is made of the weights given, which are the cell's in the backward pass too."""
    block, x = DEQBlock(Cell(parametrization), TIGHT, adjoint, warn=False), inputs()
    weights = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
    found = torch.autograd.grad(torch.func.functional_call(block, weights, (x,)).sum(), list(weights.values()))
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(2)
    assert_close(found, torch.autograd.grad(block(x).sum(), list(block.parameters())), GRADIENT)


@pytest.mark.parametrize("adjoint", [one for one in ADJOINTS if not isinstance(one, Reversible)], ids=str)
def test_replicas_of_data_parallel(adjoint, monkeypatch):
    """Which list no parameters: theirs are results of operations, which Reversible refuses."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(
        module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [[t.clone() for t in tensors]]
    )
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    block, x = DEQBlock(Cell(weight_norm), TIGHT, adjoint), inputs()
    (replica,) = module.replicate(block, ["cpu"])
    found = torch.autograd.grad(replica(x).square().sum(), [x, *block.parameters()])
    assert_close(found, gradients(block, x), GRADIENT)


def test_cuda_graphs_refuse_weights_cached_by_others():
    """A graph would read them in a later solve, when they no longer exist."""
    block = DEQBlock(Cell(weight_norm), cuda_graph=True)
    with parametrize.cached(), pytest.raises(RuntimeError, match="under parametrize.cached"):
        block(inputs())
