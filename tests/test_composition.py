"""Blocks in models: functional calls, hooks, checkpoints, sparse tensors, parametrised weights, dropout."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from correctness import GRADIENT, after_solve, assert_close, lost, rounding
from own_sums import Linear
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from deqfast import Anderson, Broyden, DEQBlock, Implicit, MonotoneCell, Picard, Reversible, SolveDropout, Unrolled
from deqfast.torch_internals import weights

TIGHT = Broyden(rtol=1e-12, max_iter=60)
ADJOINTS = ["jfb", Implicit(TIGHT), "neumann", "phantom", Reversible(25), "shine", Unrolled(60)]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)


class Cell(nn.Module):
    """z = tanh(0.4 W drop(z) + x): what computes W, and what is in a checkpoint of its own, may be given."""

    def __init__(self, parametrization=None, drop=None, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop = Linear(3, 3, bias=False, dtype=torch.float64), drop or nn.Identity()
        self.evaluations, self.checkpointed = 0, checkpointed
        if isinstance(parametrization, nn.Module):
            parametrize.register_parametrization(self.linear, "weight", parametrization)
        elif parametrization is not None:
            parametrization(self.linear)

    def layer(self, z, x):
        return torch.tanh(0.4 * self.linear(self.drop(z)) + x)

    def forward(self, z, x):
        self.evaluations += 1
        if self.checkpointed is None:
            return self.layer(z, x)
        return checkpoint(self.layer, z, x, use_reentrant=self.checkpointed == "reentrant")


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


def inputs(batch=3):
    """As many samples as features, so that only its gradient distinguishes a weight from a state."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(block, x, context=nullcontext):
    with context():
        value = block(x).square().sum()
    return torch.autograd.grad(value, [x, *block.parameters()])


class TestCreateGraph:
    """The first derivative is the recorded one; a second is right or an error."""

    @pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT), "phantom", "shine"], ids=str)
    @pytest.mark.parametrize("changes", ["a mask", "a functional call"])
    def test_a_cell_that_is_another_function_afterwards(self, adjoint, changes):
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        block, tensors = DEQBlock(MaskedCell(), TIGHT, adjoint), [x]
        if changes == "a functional call":
            block, x = DEQBlock(Cell(), TIGHT, adjoint), inputs()
            named = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
            block, tensors = partial(torch.func.functional_call, block, named), list(named.values())
        first, recorded = (
            torch.autograd.grad(block(x).sum(), tensors, create_graph=keeps)[0] for keeps in (False, True)
        )
        assert_close(recorded.detach(), first, GRADIENT)
        with pytest.raises(RuntimeError, match="double backward through .* is not supported"):
            recorded.sum().backward()

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
    block = DEQBlock(Cell(), TIGHT, Implicit(TIGHT))
    with around():
        value = block(inputs()).sum()
    with torch.no_grad():
        block.cell.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


class Descent(Cell):
    """Step down the gradient of an energy, which torch.func finds or which is written out."""

    written = False

    def forward(self, z, x):
        if self.written:
            return 0.5 * (z + x) - 0.3 * torch.tanh(self.linear(z)) @ self.linear.weight
        return z - 0.5 * torch.func.grad(lambda z: ((z - x).square() / 2 + 0.6 * self.linear(z).cosh().log()).sum())(z)


@pytest.mark.parametrize("adjoint", [*(a for a in ADJOINTS if a != "shine" and a != Reversible(25)), Reversible(9)])
def test_cells_may_use_torch_func(adjoint):
    block = DEQBlock(Descent(), TIGHT, adjoint, warn=False)
    both = []
    for block.cell.written in (False, True):
        both.append(gradients(block, inputs())[1])
    assert_close(*both, GRADIENT)


@pytest.mark.parametrize("adjoint", [*ADJOINTS, Unrolled(20, checkpoint=True)], ids=str)
def test_hooks_of_a_weight_see_its_whole_gradient_once(adjoint):
    block, seen = DEQBlock(Cell(), TIGHT, adjoint=adjoint, warn=False), []
    weight = block.cell.linear.weight
    block(inputs()).sum().backward()
    unhooked, weight.grad = weight.grad, None
    weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    block(inputs()).sum().backward()
    assert len(seen) == 1
    assert_close(weight.grad, 2 * unhooked, GRADIENT)


MATRICES = {
    "dense": lambda i, w: torch.zeros(4, 4, dtype=w.dtype).index_put((i[0], i[1]), w),
    "coo": lambda i, w: torch.sparse_coo_tensor(i, w, (4, 4)),
    "csr": lambda i, w: torch.sparse_csr_tensor(torch.arange(5), i[1], w, (4, 4)),
}


# Torch says once per process that these tensors may still change.
@pytest.mark.filterwarnings("ignore:Sparse ")
@every_adjoint
@pytest.mark.parametrize("leaf", [False, True], ids=["made", "leaf"])
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_tensors_in_x(kind, leaf, adjoint):
    edges, x = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randn(4, 3, dtype=torch.float64)
    both = []
    for make in (MATRICES["dense"], MATRICES[kind]):
        values = torch.tensor([0.3, 0.2, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
        matrix = make(edges, values)
        matrix = matrix.detach().requires_grad_() if leaf else matrix
        block = DEQBlock(lambda z, x: torch.tanh(x[0] @ z + x[1]), TIGHT, adjoint, warn=False)
        loss = block((matrix, x), z0=torch.zeros_like(x), groups="batch").square().sum()
        (gradient,) = torch.autograd.grad(loss, matrix if leaf else values)
        both.append(gradient.to_dense()[tuple(edges)] if leaf else gradient)
    # SHINE reads differences of iterates.
    assert_close(*both, lost(torch.float64, TIGHT.tol) if adjoint == "shine" else GRADIENT)
    assert both[0].all()


class GradientsOfSamples:
    """Gradients of a linear layer's weight of each sample, as opacus finds them: hooks keep inputs on a stack, and the
    backward pass takes them off."""

    def __init__(self, linear):
        self.inputs, self.value = [], torch.zeros(())
        linear.register_forward_hook(self.push)
        linear.register_full_backward_hook(self.pop)

    def push(self, module, arguments, output):
        if torch.is_grad_enabled():
            self.inputs.append(arguments[0].detach())

    def pop(self, module, inner, outer):
        self.value = self.value + torch.einsum("bi,bj->bij", outer[0], self.inputs.pop())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the state of a last evaluation has no gradient
@pytest.mark.parametrize("adjoint", [a for a in ADJOINTS if a != Reversible(25)], ids=str)
def test_backward_hooks_of_modules_see_a_gradient_for_each_call(adjoint):
    """None of the products on the way to it."""
    block, x = DEQBlock(Cell(), TIGHT, adjoint), inputs()
    weight, kept = block.cell.linear.weight, GradientsOfSamples(block.cell.linear)
    for _ in range(2):  # hooks of before a first call, and of after it, are the same ones
        kept.value, weight.grad = torch.zeros(()), None
        block(x).square().sum().backward()
        assert not kept.inputs and kept.value.shape == (3, 3, 3)
        assert_close(kept.value.sum(0), weight.grad, GRADIENT)


class TestAssignments:
    def test_names(self):
        block = DEQBlock(Cell())
        block.solver, block.eval_solver, block.adjoint = "anderson", "picard", "implicit"
        assert (block.solver, block.eval_solver, block.adjoint) == (Anderson(), Picard(), Implicit())
        block.eval_solver = None
        assert block.eval().current_solver == Anderson()
        block.train()(inputs()).sum().backward()
        assert block.cell.linear.weight.grad.any()

    @pytest.mark.parametrize(
        ("options", "name", "value", "message"),
        [
            *[({}, name, "newton", "must be") for name in ("solver", "eval_solver", "adjoint", "kernel", "scale")],
            ({"drop_converged": True}, "adjoint", Reversible(3), "cannot be combined with"),
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


class Counted(nn.Module):
    """tanh of a weight, which counts its calls."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight.tanh()


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


class TestParametrisedWeights:
    """Computed once for each solve, with their graph, and held for all its evaluations."""

    KINDS = {"weight norm": weight_norm, "spectral norm": spectral_norm, "orthogonal": orthogonal, "own": Counted()}
    every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

    @every_adjoint
    def test_computed_once_and_cached_around_it_changes_nothing(self, adjoint):
        """Neither in the gradient nor, ``parametrize.cached`` being what keeps it then, in the number of calls."""
        both = []
        for context in (nullcontext, parametrize.cached):
            block = DEQBlock(Cell(Counted()), TIGHT, adjoint, warn=False)
            counted = block.cell.linear.parametrizations.weight[0]
            counted.calls = 0
            both.append(gradients(block, inputs(), context))
            assert counted.calls == 1 < block.cell.evaluations
            assert block.cell.linear.weight is not block.cell.linear.weight  # free again
        assert all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(*both, strict=True))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("adjoint", ["jfb", Unrolled(60)], ids=str)
    @pytest.mark.parametrize("kind", [*KINDS.values(), MonotoneCell], ids=[*KINDS, "once per solve"])
    def test_offloaded_weights_are_computed_by_each_call(self, kind, adjoint, training):
        """Their tensors are on meta until a hook of the cell has loaded them."""
        cell = MonotoneCell(3, 3, dtype=torch.float64) if kind is MonotoneCell else Cell(kind)
        block, x = DEQBlock(cell, TIGHT, adjoint, init=torch.zeros_like).train(training), inputs()
        with torch.no_grad():
            expected = copy.deepcopy(block)(x)
            offload(cell)
            assert_close(block(x), expected, after_solve(1e-12))
        assert all(tensor.is_meta for tensor in block.state_dict().values())

    @every_kind
    @pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Unrolled(60)], ids=str)
    def test_gradients_are_those_of_the_same_weights_given_in_x(self, kind, adjoint):
        block, x = DEQBlock(Cell(kind), TIGHT, adjoint), inputs()
        bare = DEQBlock(lambda z, x: torch.tanh(0.4 * z @ x[1].T + x[0]), TIGHT, adjoint)
        state = copy.deepcopy(block.state_dict())
        loss = bare((x, block.cell.linear.weight), z0=torch.zeros_like(x)).square().sum()
        expected = torch.autograd.grad(loss, [x, *block.parameters()])
        block.load_state_dict(state)  # the power iteration where it was
        assert_close(gradients(block, x), expected, GRADIENT)

    @pytest.mark.filterwarnings("error")
    @every_adjoint
    def test_spectral_norm_in_training_moves_once_per_call(self, adjoint):
        cell, x = Cell(spectral_norm), inputs()
        block, separate = DEQBlock(cell, TIGHT, adjoint, warn=adjoint != Reversible(25)), copy.deepcopy(cell)
        value = block(x)
        weight = separate.linear.weight  # one step of the power iteration
        for a, b in zip(cell.buffers(), separate.buffers(), strict=True):
            assert_close(a, b, rounding(torch.float64))
        rate = 0.4 * float(torch.linalg.matrix_norm(weight.detach(), 2))
        left = 2 * ((1 + rate) / 2) ** 25 if isinstance(adjoint, Reversible) else after_solve(TIGHT.tol, 1 / (1 - rate))
        assert_close(torch.tanh(0.4 * value @ weight.T + x), value, left)

    @pytest.mark.parametrize("where", ["the cell", "its parametrization"])
    def test_released_after_an_error(self, where):
        cell, second = Cell(Counted()), Counted()
        parametrize.register_parametrization(cell.linear, "weight", second)

        def fail(*arguments):
            raise ArithmeticError

        hook = (cell if where == "the cell" else second).register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            DEQBlock(cell, TIGHT)(inputs())
        hook.remove()
        assert cell.linear.weight is not cell.linear.weight and not weights._thread.held

    def test_a_weight_that_an_outer_block_holds_is_not_released(self):
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
    def test_checkpoints_of_the_block_and_in_the_cell(self, adjoint, where):
        """A checkpoint of the block changes no bit, and solves at most one more time."""
        inner, x, both = "not reentrant" if where == "the layer" else None, inputs(), []
        free, block = (DEQBlock(Cell(Counted(), checkpointed=at), TIGHT, adjoint, warn=False) for at in (None, inner))
        outer = partial(checkpoint, block, use_reentrant=where == "the block, reentrant")
        for call, module in ((free, free), (block if inner else outer, block)):
            call(x).square().sum().backward()
            both.append([x.grad, *(p.grad for p in module.parameters())])
            x.grad = None
        assert_close(both[1], both[0], GRADIENT if inner else 0.0)
        if not inner and not isinstance(adjoint, Reversible):  # each of whose steps back would be a pass of its own
            assert block.cell.evaluations <= 2 * free.cell.evaluations

    @pytest.mark.parametrize("parametrization", [None, weight_norm])
    @pytest.mark.parametrize("adjoint", [*ADJOINTS, Unrolled(60, checkpoint=True)], ids=str)
    def test_functional_call(self, adjoint, parametrization):
        """What is computed once is made of the weights given, which are the cell's in the backward pass too."""
        block, x = DEQBlock(Cell(parametrization), TIGHT, adjoint, warn=False), inputs()
        named = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
        actual = torch.autograd.grad(torch.func.functional_call(block, named, (x,)).sum(), list(named.values()))
        with torch.no_grad():
            for p in block.parameters():
                p.mul_(2)
        assert_close(actual, torch.autograd.grad(block(x).sum(), list(block.parameters())), GRADIENT)

    def test_cuda_graphs_refuse_weights_cached_by_others(self):
        """A graph would read them in a later solve, when they no longer exist."""
        block = DEQBlock(Cell(weight_norm), cuda_graph=True)
        with parametrize.cached(), pytest.raises(RuntimeError, match="under parametrize.cached"):
            block(inputs())


class Recording(SolveDropout):
    """Keeps the masks that it has applied."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def forward(self, z):
        self.seen.append(super().forward(torch.ones_like(z)))
        return super().forward(z)

    def distinct(self):
        return len({tuple(mask.flatten().tolist()) for mask in self.seen})


class TestSolveDropout:
    """One mask for a solve and its gradient, another for the next."""

    @pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT), "phantom", "shine", Unrolled(60)], ids=str)
    def test_each_call_has_a_mask_of_its_own_as_a_constant(self, adjoint):
        block, x, masks = DEQBlock(Cell(drop=Recording(0.5)), TIGHT, adjoint), inputs(), []
        for _ in range(2):
            seen = block.cell.drop.seen = []
            z = block(x)
            gradient = torch.autograd.grad(z.square().sum(), [x, *block.parameters()])
            mask = seen[0]
            assert len(seen) > 5 and all(torch.equal(each, mask) for each in seen)
            assert set(mask.unique().tolist()) == {0.0, 2.0}
            masked = DEQBlock(lambda z, x, m=mask: torch.tanh(0.4 * block.cell.linear(z * m) + x), TIGHT, adjoint)
            assert_close(z, masked(x), after_solve(1e-12))
            expected = torch.autograd.grad(masked(x).square().sum(), [x, *block.parameters()])
            assert_close(gradient, expected, GRADIENT)
            masks.append(mask)
        assert not torch.equal(*masks) and not block.cell.drop._local.solves

    def test_outside_of_a_solve_each_call_draws_and_keeps_the_expectation(self):
        drop, z = SolveDropout(0.3), torch.ones(100_000, requires_grad=True)
        for call in (drop, lambda z: checkpoint(drop, z, use_reentrant=False)):
            dropped = call(z)
            assert abs(dropped.mean().item() - 1) < 0.02
            assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7])
            assert torch.equal(torch.autograd.grad(dropped.sum(), z)[0], dropped)
        assert not torch.equal(drop(z), drop(z))

    @pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
    def test_identity_without_training_or_probability(self, p):
        drop, z = SolveDropout(p), torch.randn(8, 8, requires_grad=True)
        assert drop.eval()(z) is z
        dropped = drop.train()(z)
        (grad,) = torch.autograd.grad(dropped.sum(), z)
        assert (dropped is z) == (p == 0) and torch.isfinite(grad).all() and (p < 1 or not dropped.any())

    def test_no_warning_of_a_changing_cell(self, recwarn):
        DEQBlock(Cell(drop=SolveDropout(0.5)))(inputs())
        DEQBlock(Cell(drop=SolveDropout(0.5)), init=nn.Dropout(0.5))(inputs())  # not part of the cell
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"cell.drop \(Dropout\); .* deqfast.SolveDropout"):
            DEQBlock(Cell(drop=nn.Dropout(0.5)))(inputs())

    @pytest.mark.parametrize(
        ("adjoint", "checkpointed"),
        [
            *[("jfb", kind) for kind in ("not reentrant", "reentrant")],
            *[(adjoint, None) for adjoint in (Reversible(5), Unrolled(5, checkpoint=True))],
        ],
        ids=str,
    )
    def test_calls_in_a_backward_pass_are_refused_not_wrong(self, adjoint, checkpointed):
        """By a checkpoint inside of the cell, or by an adjoint that calls the cell again."""
        cell = Cell(drop=SolveDropout(0.5), checkpointed=checkpointed)
        z = DEQBlock(cell, adjoint=adjoint, warn=False)(inputs())
        with pytest.raises(RuntimeError, match=r"its mask was gone.*Reversible, Unrolled\(checkpoint=True\)"):
            z.sum().backward()

    @pytest.mark.parametrize("refused", ["drop_converged", "other shape", "failure"])
    def test_a_solve_that_fails_leaves_nothing_behind(self, refused):
        drop, x = SolveDropout(0.5), inputs(8).detach()

        def forward(z, x):
            if refused == "other shape":
                drop(z[:, :2])
            if refused == "failure":
                raise RuntimeError("does not fit")
            return x[:, :1] * drop(z) + 1

        cell = Cell(drop=drop)
        cell.forward = forward
        block = DEQBlock(cell, Picard(max_iter=100), drop_converged=refused == "drop_converged", init=torch.ones_like)
        x[:, 0] = torch.linspace(0, 0.45, 8)
        with pytest.raises(RuntimeError, match="does not fit"):
            block(x)
        assert not drop._local.solves and not torch.equal(drop(x), drop(x))

    def test_blocks_that_share_a_module_and_blocks_in_cells(self):
        drop, x = Recording(0.5), inputs()
        first, second = DEQBlock(Cell(drop=drop)), DEQBlock(Cell(drop=drop))
        second(first(x)).sum().backward()
        assert drop.distinct() == 2
        drop.seen, outer = [], nn.Module()
        outer.inner, outer.drop, outer.forward = first, drop, lambda z, x: 0.5 * first(drop(z)) + x
        DEQBlock(outer)(x).sum().backward()
        assert drop.distinct() == 1

    def test_threads_have_masks_of_their_own(self):
        block = DEQBlock(Cell(drop=SolveDropout(0.3)), TIGHT, warn=False)

        def run(batch):  # a mask of the other batch would not fit
            for _ in range(20):
                block(inputs(batch))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, (3, 4)))
