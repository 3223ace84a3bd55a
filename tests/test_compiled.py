"""Blocks with compile=True: the ordinary solve, for every solver, state and batch."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from correctness import after_solve, amplification, assert_accurate, assert_close, lost, rounding
from solutions import assert_same_solution
from torch import nn

from deqfast import Anderson, Broyden, DEQBlock, FCCell, Implicit, Picard, ResidualCell, Status, backends
from deqfast.engine.runners.compiled import Codes

pytestmark = [pytest.mark.skipif(not backends()["cpp"], reason=str(backends()["cpp"])), pytest.mark.tier("full")]
TOL = 1e-6
SOLVER = Broyden(TOL, 40)


def halving(z, x):
    """It is what inductor computes bit by bit as eager mode does."""
    return 0.5 * z + x


class Linear(nn.Module):
    """0.5 tanh(W z) + x, under any parametrisation of W."""

    def __init__(self, parametrisation=lambda layer: layer):
        super().__init__()
        torch.manual_seed(0)
        self.linear = parametrisation(nn.Linear(3, 3))

    def forward(self, z, x):
        return 0.5 * torch.tanh(self.linear(z)) + x


@contextmanager
def at_most(codes):
    """Assert that no more are compiled."""
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    yield
    assert 0 < counted["unique_graphs"] - before <= codes


def both(cell, solver, adjoint="jfb", **options):
    """The ordinary block and the compiled one."""
    return (DEQBlock(cell, solver, adjoint, warn=False, compile=compiled, **options) for compiled in (False, True))


@pytest.mark.tier("fast")
@pytest.mark.parametrize(
    "solver",
    [
        Picard(1e-5, 40),
        pytest.param(Picard(0, 5, atol=1e-3, relaxation=0.7), marks=pytest.mark.tier("full")),
        Anderson(1e-5, 30, history_size=3),
        Anderson(1e-5, 30, history_dtype=torch.bfloat16, kind="I"),
        Broyden(1e-5, 30),
        pytest.param(Broyden(1e-5, 30, history_size=2, norm="max"), marks=pytest.mark.tier("full")),
        pytest.param(Broyden(max_iter=1), marks=pytest.mark.tier("full")),
    ],
    ids=str,
)
def test_the_bits_are_those_of_the_ordinary_solve(solver):
    ordinary, compiled = both(halving, solver)
    for batch in (5, 0, 63) if solver == Broyden(1e-5, 30) else (777,):
        x = torch.randn(batch, 3)
        x[1:2] = float("nan")  # spoils no other sample
        solutions = [block(x, z0=torch.zeros_like(x), return_solution=True)[1] for block in (compiled, ordinary)]
        assert_same_solution(*solutions)
    assert (solutions[0].status == Status.NONFINITE).sum() == 1


def test_a_block_serves_more_batch_sizes_shapes_and_settings_than_torch_compiles_a_function_for():
    block = DEQBlock(halving, "picard", warn=False, compile=True)
    with at_most(2):
        for size in (2, 4, 6, 7, 9):
            assert block(torch.randn(size, 3)).shape == (size, 3)
    with torch._dynamo.config.patch(recompile_limit=1):
        for most in (1, 2):
            block.solver = Picard(max_iter=most)
            assert block(torch.randn(2, 4), return_solution=True)[1].evaluations == most
    with torch.inference_mode():
        assert block(torch.randn(2, 5)).shape == (2, 5)


class Tree(nn.Module):
    """Cell of a state in two tensors, of two dtypes and memory orders."""

    def forward(self, z, x):
        return {"image": 0.5 * z["image"] + x, "sum": 0.25 * z["sum"] + z["image"].double().sum((1, 2, 3))[:, None]}

    def initial_state(self, x):
        return {"image": torch.zeros_like(x), "sum": x.new_zeros(len(x), 1, dtype=torch.float64)}


def gradients(block, x):
    """Gradients of the sum of sines of z* in x and in the parameters."""
    given = x.clone().requires_grad_()
    parameters = [parameter for parameter in block.cell.parameters() if parameter.requires_grad]
    values = torch.utils._pytree.tree_leaves(block(given))
    return torch.autograd.grad(sum(value.sin().sum() for value in values), [given, *parameters])


def allowed(cell, x, tol=TOL, derivatives=1):
    """Difference between two gradients, or values, of solves of `cell` to `tol` in float32, its condition computed."""
    block = DEQBlock(copy.deepcopy(cell), Broyden(tol, 40), warn=False)
    with torch.no_grad():
        z = block(x)
    floor = rounding(torch.float32)
    return after_solve(tol + floor, amplification(lambda z: block.cell(z, x), z), derivatives)


def assert_same_gradients(cell, *inputs, adjoint="implicit"):
    """Assert that the compiled block has the gradients of the ordinary one, for each input; return it."""
    ordinary, compiled = both(cell, SOLVER, adjoint)
    for x in inputs:
        assert_close(gradients(compiled, x), gradients(ordinary, x), allowed(cell, x))
    return compiled


class Product(torch.autograd.Function):
    """z W^T in float32 under autocast too, and so its gradients."""

    @staticmethod
    def forward(ctx, z, weight):
        ctx.save_for_backward(z, weight)
        with torch.autocast("cpu", enabled=False):
            return z @ weight.T

    @staticmethod
    def backward(ctx, grad):
        z, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            return grad @ weight, grad.T @ z


class Exempt(Linear):
    """Cell whose product is none of the caller's autocast."""

    def forward(self, z, x):
        return 0.5 * torch.tanh(Product.apply(z, self.linear.weight) + self.linear.bias) + x


class InPlace(Linear):
    """Cell with views and with operations in place, forward and, in torch's formula of indexing, backward."""

    def forward(self, z, x):
        y = self.linear(z.flatten(0, 1)).view(z.shape)
        y = y.relu_().clone()
        y[..., 1:] = 0.1 * z[..., :2]
        return 0.3 * y[:, :, [2, 1, 0]] + x


class Pooling(nn.Module):
    """Operations whose formulas ask for sizes."""

    def forward(self, z, x):
        small = nn.functional.avg_pool2d(torch.tanh(z), 2)
        return 0.5 * nn.functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False) + x


OLD_INDEXING = pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch does not compile the indexing")


class TestGradients:
    @pytest.mark.parametrize(
        ("cell", "shape"),
        [
            (lambda: ResidualCell(8, groups=4), (2, 8, 6, 6)),  # which has kernels of its own
            (lambda: ResidualCell(8, groups=4).requires_grad_(False), (2, 8, 6, 6)),
            (Tree, (2, 3, 4, 5)),
            pytest.param(InPlace, (2, 4, 3), marks=OLD_INDEXING),
        ],
    )
    def test_cells(self, cell, shape):
        """And their values, with their dtypes and memory orders."""
        x = torch.randn(shape)
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        block = assert_same_gradients(cell(), x)
        values = (torch.utils._pytree.tree_leaves(each(x)) for each in (block, DEQBlock(block.cell, SOLVER)))
        for a, b in zip(*values, strict=True):
            assert_close(a.double(), b.double(), allowed(block.cell, x, derivatives=0))
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())

    def test_the_inverse_of_the_history(self):
        """In float64: its pairs are differences of iterates, which lose the digits of the tolerance."""
        cell, x = Linear(nn.utils.parametrizations.orthogonal).double(), torch.randn(4, 3, dtype=torch.float64)
        block = assert_same_gradients(cell, x, adjoint="jfb")
        block.adjoint = "shine"  # whose code is another
        expected = gradients(DEQBlock(cell, SOLVER, "shine"), x)
        assert_close(gradients(block, x), expected, allowed(cell, x, lost(torch.float64, TOL)))

    @pytest.mark.tier("fast")
    @pytest.mark.parametrize(
        ("solvers", "batches"),
        [
            ([SOLVER], (63, 1, 0)),  # one sample has a code of its own
            pytest.param([Picard(TOL, 60), Anderson(TOL, 40)], (63, 0), marks=pytest.mark.tier("full")),
        ],
        ids=["broyden", "others"],
    )
    def test_solvers_and_batches(self, solvers, batches):
        """One block serves all, which compiles less than one for each."""
        ordinary, compiled = both(Linear(), SOLVER, "implicit")
        broken = torch.randn(4, 3)
        broken[1] = float("nan")  # spoils no other sample
        for solver in solvers:
            ordinary.adjoint = compiled.adjoint = Implicit(solver)
            for x in map(torch.randn, batches, [3] * len(batches)):
                assert_close(gradients(compiled, x), gradients(ordinary, x), allowed(ordinary.cell, x))
                if len(x):
                    backward = compiled.backward_solution
                    assert backward.converged.all() and backward.evaluations > 2 and backward.value.shape == x.shape
            assert all(torch.isfinite(grad).all() for grad in gradients(compiled, broken))
            assert_close(
                gradients(compiled, broken), gradients(ordinary, broken), allowed(ordinary.cell, broken[[0, 2, 3]])
            )

    def test_formulas_of_sizes_at_many_batches(self):
        assert_same_gradients(Pooling(), *(torch.randn(batch, 2, 4, 6) for batch in (3, 6, 7, 1)))

    def test_hooks_that_come_later_and_nothing_kept(self):
        cell, x = Linear(nn.utils.parametrizations.orthogonal), torch.randn(2, 3)
        block = assert_same_gradients(cell, x)
        cell.linear.register_forward_hook(lambda module, given, value: 0.2 * value)
        ordinary = DEQBlock(cell, SOLVER, "implicit")
        assert_close(gradients(block, x), gradients(ordinary, x), allowed(cell, x))
        assert block.linearised._current.product is None

    def test_numerically_and_twice(self):
        block = DEQBlock(Linear().double(), Broyden(1e-10, 60), Implicit(Broyden(1e-10, 60)), compile=True)
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(block, x)
        torch.autograd.gradgradcheck(block, x)

    @pytest.mark.parametrize(("cell", "shape"), [(Linear(), (4, 3)), (ResidualCell(8, groups=4), (2, 8, 6, 6))])
    def test_autocast(self, cell, shape):
        """It errs as the ordinary solve does; the results of two products are rounded, and their gradients."""
        x, blocks = torch.randn(shape), both(cell, Anderson(1e-3, 30), Implicit(Anderson(1e-3, 30)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain, grads = (gradients(block, x) for block in blocks)
        tight = Broyden(1e-10, 60)
        exact = gradients(DEQBlock(copy.deepcopy(cell).double(), tight, Implicit(tight)), x.double())
        units = 4 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
        for values in zip(grads, plain, exact, strict=True):
            assert_accurate(*values, units=units)

    def test_a_cell_that_turns_autocast_off(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_gradients(Exempt(), torch.randn(4, 3))

    def test_weights_that_change_before_the_backward_pass(self):
        block = DEQBlock(Linear(), Broyden(), "implicit", compile=True)
        value = block(torch.randn(2, 3))
        with torch.no_grad():
            block.cell.linear.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()

    def test_a_gradient_that_cannot_be_compiled(self):
        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx, z):
                return z.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad if float(grad.sum()) != 7 else -grad

        def cell(z, x):
            return 0.5 * Look.apply(z) + x

        x = torch.randn(2, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"gradient's solve cannot be compiled \(compile='forward'"):
            DEQBlock(cell, adjoint="implicit", compile=True)(x)
        value = DEQBlock(cell, Picard(TOL, 60), "implicit", compile="forward")(x)
        assert_close(torch.autograd.grad(value.sum(), x)[0], torch.full((2, 3), 2.0), after_solve(TOL, 2))


@pytest.mark.parametrize(
    ("parametrisation", "adjoint", "sizes", "codes"),
    [
        (lambda layer: layer, "jfb", (4, 4, 4), 1),
        (nn.utils.parametrizations.orthogonal, "jfb", (4, 4, 4), 2),
        # Cell and product, each for one batch and for any; loops: forward as many, backward one more.
        (lambda layer: layer, "implicit", (2, 4, 6, 7, 9), 7),
    ],
    ids=["plain", "orthogonal", "implicit"],
)
def test_training_and_evaluation_run_few_codes_with_the_weights_of_the_moment(parametrisation, adjoint, sizes, codes):
    cell = Linear(parametrisation)
    ordinary, compiled = both(cell, SOLVER, adjoint)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.5)
    with at_most(codes):
        for size in sizes:
            x, before = torch.randn(size, 3), next(cell.parameters()).detach().clone()
            assert_close(gradients(compiled, x), gradients(ordinary, x), allowed(cell, x))
            optimizer.zero_grad()
            compiled(x).square().sum().backward()
            optimizer.step()
            assert not torch.equal(before, next(cell.parameters()))
            with torch.no_grad():
                assert_close(compiled(x), ordinary(x), allowed(cell, x, derivatives=0))


class Masked(Linear):
    """Cell with a mask that is drawn for each solve, and a plain number that may change from solve to solve."""

    mask, temperature = None, 1.0

    def forward(self, z, x):
        y = self.temperature * super().forward(z, x)
        return y if self.mask is None else y * self.mask

    def begin_solve(self):
        self.mask = (torch.rand(3) > 0.3) / 0.7 if self.training else None


def test_what_changes_before_a_solve_reaches_the_compiled_code():
    ordinary, compiled = both(Masked(), SOLVER)
    with torch._dynamo.config.patch(recompile_limit=1):  # which more values than that outlive
        for compiled.cell.temperature in (1.0, 0.9):
            x, state = torch.randn(4, 3), torch.get_rng_state()
            value = compiled(x)
            torch.set_rng_state(state)
            expected = ordinary(x)
            condition = amplification(lambda z, x=x: ordinary.cell(z, x), expected)
            assert_close(value, expected, after_solve(TOL + rounding(torch.float32), condition))
    assert_close(compiled.eval()(x), ordinary(x), allowed(ordinary.cell, x, derivatives=0))


@pytest.mark.parametrize("freezes", [True, False])
def test_settings_of_torch(freezes):
    """Weights are not constants, and tensors are made on the device of the state."""
    ordinary, compiled = both(Linear(), Picard(TOL, 60))
    x = torch.randn(4, 3)
    with torch._inductor.config.patch(freezing=True) if freezes else torch.device("meta"), torch.no_grad():
        compiled(x)
        compiled.cell.linear.weight.mul_(0.5)
        value, expected = compiled(x), ordinary(x)
    assert_close(value, expected, allowed(ordinary.cell, x, derivatives=0))


@torch.library.custom_op("deqfast_tests::below_seven", mutates_args=())
def below_seven(z: torch.Tensor) -> torch.Tensor:
    if z.max() >= 7:
        raise RuntimeError("the state has reached seven")
    return z.clone()


@below_seven.register_fake
def _(z):
    return torch.empty_like(z)


def test_an_error_on_the_way_is_none_of_compilation():
    """The cell refuses the last of its states 0, 1, 3, 7."""
    block = DEQBlock(lambda z, x: 2 * below_seven(z) + x, Picard(TOL, 60), compile=True)
    with pytest.raises(RuntimeError, match="an evaluation failed.*below_seven") as caught:
        block(torch.ones(2, 3))
    assert "cannot be compiled" not in str(caught.value)


@pytest.mark.tier("fast")
def test_a_cell_of_a_single_buffer_run_as_written():
    buffer, x = torch.empty(2, 3), torch.randn(2, 3)
    blocks = both(lambda z, x: torch.add(0.5 * z, x, out=buffer), Anderson(TOL, 40))
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        expected, solution = (block(x, return_solution=True)[1] for block in blocks)
    assert solution.evaluations == expected.evaluations and torch.equal(solution.value, expected.value)


def test_copies_compile_for_themselves_and_other_ways_to_solve_are_left_as_they_are():
    block = DEQBlock(Linear(), SOLVER, "implicit", compile=True)
    x = torch.randn(2, 3)
    expected, tolerance = gradients(block, x), allowed(block.cell, x)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(block)))
    assert all(map(torch.equal, gradients(copied, x), expected))
    assert_close(gradients(torch.compile(block, fullgraph=True), x), expected, tolerance)
    with torch.compiler.set_stance("force_eager"):
        assert_close(gradients(block, x), expected, tolerance)
    fused = DEQBlock(FCCell(3, 8), Picard(), compile=True)
    fused(x)
    assert not fused.compiled._codes._codes  # the cell's own fixed_point has served


def in_place(z, x):
    return z.mul_(0.5) + x


def refusing(z, x):
    raise ValueError("x must have 4 features")


@pytest.mark.tier("fast")
class TestErrors:
    @pytest.mark.parametrize(
        ("cell", "error", "words"),
        [
            (in_place, ValueError, "f must not modify its argument z"),
            (lambda z, x: z[:, :2], ValueError, r"f must return the shape of its argument, \(2, 3\), got \(2, 2\)"),
            (refusing, ValueError, "x must have 4 features"),
            (lambda z, x: z if float(z.sum()) > 0 else x, RuntimeError, "compile=True: the solve cannot be compiled: "),
        ],
    )
    def test_cells_that_cannot_be_compiled(self, cell, error, words):
        with pytest.raises(error, match=words):
            DEQBlock(cell, compile=True)(torch.randn(2, 3))

    @pytest.mark.tier("full")
    @torch.no_grad()
    def test_a_cell_in_place_that_nothing_has_looked_at_works_on_a_copy(self):
        x = torch.randn(2, 3)
        value, solution = DEQBlock(in_place, SOLVER, compile=True, warn=False).eval()(x, return_solution=True)
        assert solution.converged.all()
        assert_close(value, 2 * x, after_solve(TOL))

    def test_calls(self):
        block = DEQBlock(Linear(), compile=True)
        with pytest.raises(ValueError, match="z0 must be finite"):
            block(torch.randn(2, 3), z0=torch.full((2, 3), float("inf")))
        with pytest.raises(ValueError, match="SHINE needs the history of Anderson or Broyden"):
            DEQBlock(Linear(), "picard", "shine", compile=True)(torch.randn(2, 3, requires_grad=True))
        with pytest.raises(ValueError, match=r"compile=True serves Picard, Anderson and Broyden, .+ got Mine"):
            block.solver = type("Mine", (Picard,), {})()
        block.kernel = "torch"  # after code was compiled
        with pytest.raises(RuntimeError, match="compile=True runs on kernel 'cpp'.+kernel='torch' is 'torch'"):
            block(torch.randn(2, 3))


def test_a_cell_sees_a_short_state_as_it_is_rounded():
    x = torch.randn(4, 500, dtype=torch.bfloat16)
    eager, compiled = both(lambda z, x: 0.5 * torch.cos(z) + x, Anderson(1e-5))
    if torch.__version__ < "2.14":
        with pytest.raises(RuntimeError, match="does not round rows of torch.float32 to a state of torch.bfloat16"):
            compiled(x)
        return
    solution, expected = (block(x, return_solution=True)[1] for block in (compiled, eager))
    assert solution.status.tolist() == expected.status.tolist() == [Status.STALLED] * 4
    assert_close(solution.residual, expected.residual, 0.5)


@pytest.mark.tier("fast")
def test_threads_that_begin_together_share_their_code():
    graphs, barrier = [], threading.Barrier(4)
    codes = Codes(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: (barrier.wait(), codes.call("key", torch.ones(2))), range(4)))
    assert len(graphs) == 1 and not pickle.loads(pickle.dumps(Codes(torch.tanh)))._codes


@pytest.mark.tier("fast")
def test_threads_leave_dynamos_settings_as_they_were():
    """The calls overlap where these settings are the thread's, and wait for each other where they are the process's."""
    settings, other = torch._dynamo.config, threading.Event()
    before, seen = (settings.specialize_float, settings.skip_nnmodule_hook_guards), []

    def first():
        thread = threading.Thread(target=codes.call, args=("second",))
        thread.start()
        other.wait(0.2)
        return thread

    def second():
        seen.append((settings.specialize_float, settings.skip_nnmodule_hook_guards))
        other.set()

    codes = Codes(lambda: None)
    codes._codes = {"first": first, "second": second}
    codes.call("first").join()
    assert seen == [(True, False)]
    assert (settings.specialize_float, settings.skip_nnmodule_hook_guards) == before
