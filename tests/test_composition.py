"""Blocks in models: code around a forward pass, between forward and backward, or run again."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from correctness import GRADIENT, assert_close, lost
from own_sums import Linear
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from deqfast import Anderson, Broyden, DEQBlock, Implicit, Picard, Reversible, Unrolled

TIGHT = Broyden(rtol=1e-12, max_iter=60)


class Cell(nn.Module):
    """z = tanh(0.5 W z + x)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.linear(z) + x)


class MaskedCell(nn.Module):
    """A mask for each solve, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, z, x):
        return self.mask * (0.5 * z.tanh() + x)

    def begin_solve(self):
        self.mask = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)

    def end_solve(self):
        self.mask = torch.ones(3, dtype=torch.float64)


ATTACHED = pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT), "phantom", "shine"], ids=str)


class TestCreateGraph:
    """The first derivative is the recorded one; a second is right or an error."""

    def check(self, value, tensors):
        found = [torch.autograd.grad(value().sum(), tensors, create_graph=given)[0] for given in (False, True)]
        assert_close(found[1].detach(), found[0], GRADIENT)
        with pytest.raises(RuntimeError, match="double backward through .* is not supported"):
            found[1].sum().backward()

    @ATTACHED
    def test_a_cell_that_is_another_function_afterwards(self, adjoint):
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        self.check(lambda: DEQBlock(MaskedCell(), TIGHT, adjoint)(x), [x])

    @ATTACHED
    def test_a_functional_call_that_has_ended(self, adjoint):
        block, x = DEQBlock(Cell(), TIGHT, adjoint), torch.randn(3, 4, dtype=torch.float64)
        block.cell.linear = Linear(4, 4, bias=False, dtype=torch.float64)  # SHINE enlarges other roundings
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
        self.check(lambda: torch.func.functional_call(block, weights, (x,)), list(weights.values()))

    @pytest.mark.parametrize("leaf", [False, True])
    def test_a_tensor_in_x_that_the_cell_holds_too(self, leaf):
        """The cell may hold leaves; what was computed outside of it is refused, not lost."""
        x = torch.full((1, 1), 0.7, dtype=torch.float64, requires_grad=True)

        def derivatives(adjoint):
            h = x if leaf else x.sin()
            z = DEQBlock(lambda z, y: 0.5 * z.sin() + h * y, TIGHT, adjoint)(h)
            (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
            return first.detach(), torch.autograd.grad(first.sum(), x)[0]

        if leaf:
            assert_close(derivatives(Implicit(TIGHT)), derivatives(Unrolled(80)), GRADIENT)
        else:
            with pytest.raises(RuntimeError, match="holds a tensor computed outside of it.*in x"):
                derivatives(Implicit(TIGHT))


@pytest.mark.parametrize("around", [nullcontext, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)])
def test_a_weight_changed_in_place_before_the_backward_is_noticed(around):
    """By ``Implicit`` too, which keeps what its evaluation saves from the hooks of others."""
    block, x = DEQBlock(Cell(), TIGHT, Implicit(TIGHT)), torch.randn(3, 4, dtype=torch.float64)
    with around():
        value = block(x).sum()
    with torch.no_grad():
        block.cell.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


EVERY = ["jfb", "implicit", "neumann", "phantom", "reversible", "shine", "unrolled", Unrolled(20, checkpoint=True)]


class Descent(Cell):
    """Step down the gradient of an energy, which torch.func finds or which is written out."""

    written = False

    def forward(self, z, x):
        if self.written:
            return 0.5 * (z + x) - 0.3 * torch.tanh(self.linear(z)) @ self.linear.weight
        return z - 0.5 * torch.func.grad(lambda z: ((z - x).square() / 2 + 0.6 * self.linear(z).cosh().log()).sum())(z)


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom", "unrolled", Reversible(9)], ids=str)
def test_cells_may_use_torch_func(adjoint):
    block, x = DEQBlock(Descent(), TIGHT, adjoint, warn=False), torch.randn(3, 4, dtype=torch.float64)
    gradients = []
    for block.cell.written in (False, True):
        gradients.append(torch.autograd.grad(block(x).square().sum(), block.cell.linear.weight)[0])
    assert_close(*gradients, GRADIENT)


@pytest.mark.parametrize("adjoint", EVERY, ids=str)
def test_hooks_of_a_weight_see_its_whole_gradient_once(adjoint):
    block, x, seen = DEQBlock(Cell(), adjoint=adjoint, warn=False), torch.randn(3, 4, dtype=torch.float64), []
    weight = block.cell.linear.weight
    block(x).sum().backward()
    plain, weight.grad = weight.grad, None
    weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    block(x).sum().backward()
    assert len(seen) == 1
    assert_close(weight.grad, 2 * plain, GRADIENT)


SPARSE = {
    "dense": lambda i, w: torch.zeros(4, 4, dtype=w.dtype).index_put((i[0], i[1]), w),
    "coo": lambda i, w: torch.sparse_coo_tensor(i, w, (4, 4)),
    "csr": lambda i, w: torch.sparse_csr_tensor(torch.arange(5), i[1], w, (4, 4)),
}


# Torch says once per process that these tensors may still change.
@pytest.mark.filterwarnings("ignore:Sparse ")
@pytest.mark.parametrize("adjoint", EVERY, ids=str)
@pytest.mark.parametrize("leaf", [False, True], ids=["made", "leaf"])
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_tensors_in_x(kind, leaf, adjoint):
    """Leaves, or made of weights."""
    edges, x = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randn(4, 3, dtype=torch.float64)
    start, gradients = torch.zeros_like(x), []
    for make in (SPARSE["dense"], SPARSE[kind]):
        weights = torch.tensor([0.3, 0.2, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
        matrix = make(edges, weights)
        matrix = matrix.detach().requires_grad_() if leaf else matrix
        block = DEQBlock(lambda z, x: torch.tanh(x[0] @ z + x[1]), TIGHT, adjoint, warn=False)
        value = block((matrix, x), z0=start, groups="batch").square().sum()
        (found,) = torch.autograd.grad(value, matrix if leaf else weights)
        gradients.append(found.to_dense()[tuple(edges)] if leaf else found)
    # SHINE reads differences of iterates.
    assert_close(*gradients, lost(torch.float64, TIGHT.tol) if adjoint == "shine" else GRADIENT)
    assert gradients[0].all()


class GradientsOfSamples:
    """Gradients of a linear layer's weight of each sample, as opacus finds them: hooks keep inputs on a stack, and the
    backward pass takes them off."""

    def __init__(self, linear):
        self.inputs, self.found = [], torch.zeros(())
        linear.register_forward_hook(self.push)
        linear.register_full_backward_hook(self.pop)

    def push(self, module, arguments, output):
        if torch.is_grad_enabled():
            self.inputs.append(arguments[0].detach())

    def pop(self, module, inner, outer):
        self.found = self.found + torch.einsum("bi,bj->bij", outer[0], self.inputs.pop())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the state of a last evaluation has no gradient
@pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT), "neumann", "phantom", "shine", Unrolled(20)], ids=str)
def test_backward_hooks_of_modules_see_a_gradient_for_each_call(adjoint):
    """None of the products on the way to it."""
    block, x = DEQBlock(Cell(), TIGHT, adjoint), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight, kept = block.cell.linear.weight, GradientsOfSamples(block.cell.linear)
    for _ in range(2):  # hooks of before a first call, and of after it, are the same ones
        kept.found, weight.grad = torch.zeros(()), None
        block(x).square().sum().backward()
        assert not kept.inputs and kept.found.shape == (3, 4, 4)
        assert_close(kept.found.sum(0), weight.grad, GRADIENT)


SETTINGS = "solver", "eval_solver", "adjoint", "kernel", "scale"


class TestAssignments:
    def test_names(self):
        block = DEQBlock(Cell())
        assert block.solver == Broyden()
        block.solver, block.eval_solver, block.adjoint = "anderson", "picard", "implicit"
        assert (block.solver, block.eval_solver, block.adjoint) == (Anderson(), Picard(), Implicit())
        block.eval_solver = None
        assert block.eval().current_solver == Anderson()
        block.train()(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert block.cell.linear.weight.grad.any()

    @pytest.mark.parametrize(
        ("options", "name", "value", "message"),
        [
            *[({}, *pair, "must be") for pair in product(SETTINGS, ("newton", -3))],
            ({"drop_converged": True}, "adjoint", Reversible(3), "cannot be combined with"),  # see test_plan.py
            ({"compile": True}, "scale", 2.0, "cannot be combined with"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, options, name, value, message):
        block = DEQBlock(Cell(), **options)
        before = getattr(block, name)
        with pytest.raises((ValueError, TypeError), match=message):
            setattr(block, name, value)
        assert getattr(block, name) is before


@pytest.mark.parametrize("adjoint", [Reversible(5), Unrolled(5), Unrolled(5, checkpoint=True)], ids=str)
def test_a_mask_of_the_solve_is_that_of_the_backward_pass(adjoint):
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    DEQBlock(MaskedCell(), adjoint=adjoint, warn=False)(x).sum().backward()
    assert (x.grad != 0).tolist() == [[True, False, True]] * 2
