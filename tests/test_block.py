"""DEQBlock as a module in other people's models: starts, solvers, copies, warnings, AMP, compilation, DDP, FSDP2."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from functools import partial

import pytest
import torch
from correctness import GRADIENT, after_solve, amplification, assert_close, rounding
from own_sums import Linear, LoopedFCCell
from torch import nn
from torch.utils.checkpoint import checkpoint

from deqfast import (
    Anderson,
    Broyden,
    DEQBlock,
    FCCell,
    Implicit,
    Picard,
    ResidualCell,
    Reversible,
    SolveDropout,
    Unrolled,
    fixed_point,
    solve,
)

EPS = rounding(torch.float32)
ADJOINTS = ("jfb", "implicit", "neumann", "phantom", "reversible", "unrolled")
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS)


def halve(z, x):
    return 0.5 * z + x


def test_the_start_is_given_else_init_else_the_cells_own_else_zeros_like_x():
    def cell(z, x):
        return halve(z, x)

    def start(cell, x, z0=None, **options):
        return DEQBlock(cell, Picard(max_iter=1), warn=False, **options)(x, z0=z0)

    x, three = torch.ones(2, 4, 3, 3, dtype=torch.float64), partial(torch.full_like, fill_value=3.0)
    cell.initial_state = partial(torch.full_like, fill_value=2.0)
    assert torch.equal(start(cell, x, z0=4 * x, init=three), 4 * x)
    assert (start(cell, x, init=three) == 3).all()
    assert (start(cell, x) == 2).all()
    assert (start(lambda z, x: 0.5 * z + x["inputs"][0], {"inputs": [x]}) == 0).all()
    z = start(halve, x.to(memory_format=torch.channels_last))
    assert z.dtype == torch.float64 and z.is_contiguous(memory_format=torch.channels_last) and not z.any()


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom", "shine"])
def test_the_value_is_what_solve_finds_in_every_mode(adjoint):
    cell, x = LoopedFCCell(3, 5), torch.randn(4, 3)
    block = DEQBlock(cell, Anderson(rtol=1e-3), adjoint, kernel="torch")
    z, solution = block(x, return_solution=True)
    expected = solve(lambda z: cell(z, x), cell.initial_state(x), Anderson(rtol=1e-3), "torch")
    assert z.requires_grad and torch.equal(z, expected.value) and torch.equal(solution.value, z)
    assert solution.evaluations == expected.evaluations
    with torch.no_grad():
        assert torch.equal(block(x), z)
    assert torch.equal(block.eval()(x), z)


def test_the_evaluation_solver_serves_in_evaluation_mode():
    block = DEQBlock(FCCell(3, 5), Picard(max_iter=3), eval_solver=Picard(rtol=1e-6, max_iter=50), warn=False)
    x = torch.randn(2, 3)
    assert block(x, return_solution=True)[1].evaluations == 3
    _, solution = block.eval()(x, return_solution=True)
    assert solution.converged.all() and solution.evaluations > 3
    assert block.train()(x, return_solution=True)[1].evaluations == 3


@every_adjoint
def test_values(adjoint):
    """Of empty batches, without a gradient to record, in inference mode, and those that a caller works on in place."""
    block, x = DEQBlock(LoopedFCCell(3, 5), adjoint=adjoint, warn=False), torch.randn(4, 3)
    z, solution = block(torch.zeros(0, 3), return_solution=True)
    assert z.shape == (0, 5) and solution.status.shape == (0,)
    assert not DEQBlock(halve, adjoint=adjoint, warn=False)(x).requires_grad
    with torch.no_grad():
        assert not block(x).requires_grad
    with torch.inference_mode():
        inside = block(x)
    assert torch.equal(inside, block(x))
    expected = torch.autograd.grad(block(x).mul(2).square().sum(), [*block.parameters()])
    z, solution = block(x, return_solution=True)
    value = solution.value.clone()
    actual = torch.autograd.grad(z.mul_(2).square().sum(), [*block.parameters()])
    assert torch.equal(solution.value, value) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_and_state_dicts(copier):
    def model():
        block = DEQBlock(LoopedFCCell(3, 5), Broyden(1e-4), Implicit(Anderson()), eval_solver="picard", kernel="torch")
        return nn.Sequential(Linear(4, 3), block)

    first, x = model(), torch.randn(6, 4)
    first(x).sum().backward()
    twin, other = copier(first), model()
    assert torch.equal(twin(x), first(x)) and not torch.equal(other(x), first(x))
    twin[1].cell.weight.data.zero_()
    assert not torch.equal(twin(x), first(x))
    for name in ("solver", "eval_solver", "adjoint", "kernel"):
        assert getattr(twin[1], name) == getattr(first[1], name)
    assert set(first[1].state_dict()) == {f"cell.{name}" for name in FCCell(3, 5).state_dict()}
    other.load_state_dict(first.state_dict())
    assert torch.equal(other(x), first(x))


RISING = itertools.count(1)


class TestWarnings:
    """A cell that changes between calls is named, once."""

    class Cell(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.inner = layer

        def forward(self, z, x):
            return 0.1 * z + x

    @pytest.mark.parametrize(
        ("layer", "name"),
        [
            (nn.Dropout2d(0.1), "Dropout2d"),
            (nn.SyncBatchNorm(3), "SyncBatchNorm"),
            (nn.MultiheadAttention(3, 1, dropout=0.1), "MultiheadAttention"),
            (nn.utils.spectral_norm(nn.Linear(3, 3)), "Linear"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_once_in_training(self, layer, name):
        block, x = DEQBlock(self.Cell(nn.Sequential(nn.Linear(3, 3), layer))), torch.randn(4, 3)
        block.eval()(x)
        block.train()
        text = rf"deqfast: in training mode .*: it contains cell\.inner\.1 \({name}\);"
        with pytest.warns(UserWarning, match=text + ".* dropout=0 or deqfast.SolveDropout"):
            block(x)
        block(x)

    @pytest.mark.parametrize(
        "change",
        [
            lambda y: nn.functional.dropout(y, 0.1),
            lambda y: y + 1e-3 * torch.randn_like(y),
            lambda y: y * (torch.rand(len(y), 1) > 0.5),  # DropPath: samples lose the branch
            lambda y: y * next(RISING),
        ],
        ids=["dropout", "noise", "droppath", "counter"],
    )
    def test_by_two_evaluations(self, change):
        block, x = DEQBlock(lambda z, x: x + change(0.1 * z + x), "picard"), torch.randn(64, 3)
        text = r"changes between calls and lacks a fixed point: two .* differ by [\d.e-]*[1-9] of its length"
        with pytest.warns(UserWarning) as warned:
            block.train()(x), block(x)
        assert sum(bool(re.search(text, str(warning.message))) for warning in warned) == 1

    @pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom", "shine", "unrolled"])
    @pytest.mark.parametrize("computed", [False, True])
    @pytest.mark.parametrize(
        ("cell", "text"),
        [
            (lambda x, z: 0.1 * x + z, "parameters are called x and z, .*: swap or rename them"),
            (partial(lambda a, x, z: a * x + z, 0.1), "called x and z"),
            (
                lambda z, x: 0.1 * z + 1,
                "gradient leads from the cell's value to x.*: use the cell's second argument",
            ),
            (lambda z, x: 0.1 * z + x.detach(), "no gradient leads from the cell's value to x"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_of_arguments_once_in_training(self, cell, text, computed, adjoint):
        x = torch.randn(4, 3, requires_grad=True)
        x, block = x.exp() if computed else x, DEQBlock(cell, adjoint=adjoint)
        block.eval()(x)
        with pytest.warns(UserWarning, match=text):
            block.train()(x)
        block(x)

    class Injecting(nn.Module):
        """Computes what it needs of x before the solve."""

        def initial_state(self, x):
            self.injection = x.exp()
            return torch.zeros_like(x)

        def forward(self, z, x):
            return 0.1 * z + self.injection

    INNOCENT = {
        "any arguments": lambda *both: 0.1 * both[0] + both[1],
        "without a signature": torch.maximum,
        "other names": lambda y, z: 0.1 * y + z,
        "a checkpoint": lambda z, x: checkpoint(lambda z, x: 0.1 * z + x, z, x, use_reentrant=False),
        "computed before": Injecting(),
    }
    STEADY = nn.Dropout(0.0), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.BatchNorm1d(3).eval(), nn.Dropout(0.5).eval()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_not_without_reason(self, dtype, recwarn):
        residual, x = ResidualCell(8), torch.randn(4, 3, requires_grad=True)
        for convolution in (residual.conv1, residual.conv2):  # their initial weights need not contract
            convolution.weight.data.mul_(0.3)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            for cell in (FCCell(3, 8), *self.INNOCENT.values(), *map(self.Cell, self.STEADY)):
                DEQBlock(cell)(x)
            DEQBlock(halve)(x[:0])
            DEQBlock(residual)(torch.randn(2, 8, 3, 3))
        assert not [str(warning.message) for warning in recwarn]

    @pytest.mark.filterwarnings("ignore")
    def test_the_look_leaves_no_trace(self):
        """It restores random numbers, buffers, and what a cell keeps of its last evaluation."""

        class Keeping(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
                self.register_buffer("mean", torch.zeros(3))
                self.register_buffer("count", torch.zeros(()))
                self.drop, self.calls = SolveDropout(0.5), 0

            def forward(self, z, x):
                h = self.drop(0.5 * self.linear(z))
                self.mean.lerp_(h.detach().mean(0), 0.1)
                self.count = self.count + 1
                self.auxiliary, self.calls = h.square().mean(), self.calls + 1
                return torch.tanh(h * (1 + 0 * self.mean)) + x

        both, cell, x = [], Keeping(), torch.randn(4, 3)
        for warns in (True, False):
            block = DEQBlock(copy.deepcopy(cell), Picard(1e-3, 5), warn=warns)
            torch.manual_seed(1)
            value = block(x)
            (value.sum() + block.cell.auxiliary).backward()
            gradients = [parameter.grad for parameter in block.parameters()]
            both.append([value.detach(), *gradients, *block.buffers(), torch.rand(3)])
            assert block.cell.calls == 6 + 3 * warns
        assert_close(*both, EPS)

    @pytest.mark.parametrize("solve", [False, True])
    def test_how_often(self, solve):
        """Once for a block and its replicas. Never by `fixed_point`, which makes a block at each call."""
        calls, x = [], torch.randn(2, 3)

        def cell(z, x):
            calls.append(torch.is_grad_enabled())
            return 0.5 * z + x

        block = DEQBlock(cell, Picard(1e-3, 30))
        for _ in range(2):
            if solve:
                fixed_point(cell, torch.zeros(2, 3), x, solver=Picard(1e-3, 30), adjoint="jfb")
            else:
                block._replicate_for_data_parallel()(x)
        each = DEQBlock(lambda z, x: 0.5 * z + x, Picard(1e-3, 30))(x, return_solution=True)[1].evaluations + 1
        assert len(calls) == 2 * each + (0 if solve else 3) and sum(calls) == 2


@pytest.mark.parametrize("hook", ["cancel_solve", "end_solve"])
def test_a_forward_pass_that_raises_is_ended_too(hook):
    cell, log = nn.Module(), []
    cell.forward, cell.mask = lambda z, x: log.append("call") or halve(z, x), nn.Module()
    for name in {"begin_solve", "end_solve", hook}:
        setattr(cell.mask, name, lambda name=name: log.append(name))
    with pytest.raises(ValueError, match="f must return the shape"):
        DEQBlock(cell)(torch.ones(2, 3), z0=torch.zeros(2, 1))
    assert log == ["begin_solve", "call", hook]


def test_all_modules_end_their_solve_if_the_first_fails():
    cell, ended = nn.ModuleList([nn.Module(), nn.Module()]), []
    cell.forward = halve
    for number, module in enumerate(cell):
        module.end_solve = lambda number=number: ended.append(number) or [][number]
    with pytest.raises(IndexError):
        DEQBlock(cell)(torch.ones(2, 3))
    assert ended == [0, 1]


@every_adjoint
def test_bfloat16_autocast(adjoint):
    adjoint = Reversible(steps=5) if adjoint == "reversible" else adjoint  # more steps amplify the rounding of products
    block, x = DEQBlock(FCCell(6, 16), Broyden(rtol=1e-2), adjoint, warn=False), torch.randn(8, 6)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            z, solution = block(x, return_solution=True)
        gradients.append(torch.autograd.grad(z.square().sum(), [*block.parameters()]))
        assert {g.dtype for g in (z, solution.residual, *gradients[-1])} == {torch.float32}
    condition = amplification(lambda z: block.cell(z, x), z)
    assert_close(gradients[1], gradients[0], after_solve(1e-2 + rounding(torch.bfloat16, 1), condition, derivatives=1))
    assert not torch.equal(gradients[1][0], gradients[0][0])


class Swapping(nn.Module):
    """A cell of two tensors, whose value has its keys in another order than z."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.gain, self.order = nn.Parameter(torch.tensor(0.5)), order

    def forward(self, z, x):
        value = {"a": self.gain * torch.tanh(z["b"]) + x, "b": 0.3 * z["a"] - 2 * x}
        return {key: value[key] for key in self.order}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("adjoint", [*ADJOINTS, "shine", Unrolled(20, checkpoint=True)], ids=str)
def test_values_are_matched_by_their_keys(adjoint, compiled):
    """Also where the tensors have the same shape, which hides a swap."""
    x, both = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), []
    z0 = {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}
    for order in (["a", "b"], ["b", "a"]):
        block = DEQBlock(Swapping(order), Anderson(1e-5, 50), adjoint, warn=False)
        z = (torch.compile(block, backend="eager") if compiled else block)(x, z0=z0)
        assert list(z) == list(z0)
        (2 * z["a"] + z["b"]).sum().backward()
        both.append([z["a"].detach(), z["b"].detach(), block.cell.gain.grad])
    assert_close(*both, GRADIENT)
