"""Compiled and exported models: whole graphs, the values and gradients of eager mode, one graph for all batches."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

import onnxruntime
import pytest
import torch
from correctness import GRADIENT, WELL_CONDITIONED, after_solve, amplification, assert_close, rounding
from own_sums import Linear, product
from torch import nn
from torch.utils.checkpoint import checkpoint

from deqfast import (
    Anderson,
    Broyden,
    DEQBlock,
    Groups,
    Implicit,
    Picard,
    ResidualCell,
    Reversible,
    Status,
    SubhomogeneousCell,
    Unrolled,
    fc_fixed_point,
    package_options,
)
from deqfast.torch_internals.dynamo import uncompiled
from deqfast.transforms import opaque_op


class Cell(nn.Module):
    """z = tanh(scale W z + x), with a scale that is a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, z, x):
        return torch.tanh(self.scale * self.linear(z) + x)


class Model(nn.Module):
    """A block between two layers."""

    def __init__(self, *settings, cell=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = Linear(3, 4), Linear(4, 2)
        self.block = DEQBlock(Cell() if cell is None else cell, *settings, **options)

    def forward(self, x, **more):
        return self.decoder(self.block(self.encoder(x), **more))


@pytest.fixture
def compiled():
    """torch.compile of a whole graph of any batch."""
    return lambda f, backend="aot_eager": torch.compile(f, fullgraph=True, dynamic=True, backend=backend)


def derivatives(f, x, parameters):
    """Value of f(x), gradient of x, gradients of the parameters."""
    x = x.clone().requires_grad_()
    value = f(x)
    return value.detach(), *torch.autograd.grad(value.square().sum(), [x, *parameters])


def assert_same_derivatives(f, plain, x, parameters, tolerance=0.0):
    assert_close(derivatives(f, x, parameters), derivatives(plain, x, parameters), tolerance)


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom", "shine", "unrolled"])
def test_a_model_is_a_single_graph_for_every_batch_and_number_of_evaluations(adjoint, compiled):
    model = Model("anderson", adjoint)
    fast, parameters = compiled(model), [*model.parameters()]
    for i, batch in enumerate((5, 7, 2)):
        model.block.solver = Anderson(rtol=10.0 ** -(2 + i))
        x = torch.randn(batch, 3)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert_same_derivatives(fast, model, x, parameters)
    assert not opaque_op._recorded  # no graph outlives its backward pass, or a value that nobody differentiates
    value = fast(x)
    assert len(opaque_op._recorded) == 1
    del value
    assert not opaque_op._recorded


class Deep(Cell):
    def forward(self, z, x):
        return 0.5 * torch.sin(super().forward(z, x)).exp()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom", "shine", "unrolled"])
def test_compiled_cells_that_work_in_what_they_saved(adjoint, whole, compiled):
    """A graph of theirs serves a single product."""
    model, x = Model("anderson", adjoint, cell=Deep()), torch.randn(5, 3)
    parameters = [*model.parameters()]
    plain = derivatives(model, x, parameters)
    model.block.cell.compile(backend="aot_eager", dynamic=True)
    assert all(map(torch.equal, derivatives(compiled(model) if whole else model, x, parameters), plain))


@pytest.mark.tier("full")
def test_inductor(compiled):
    """A cell that is compiled by itself is called so within the op."""
    solver = Anderson(rtol=1e-12, max_iter=60)
    model = Model(solver, Implicit(solver)).double()
    x, parameters = torch.randn(6, 3, dtype=torch.float64), [*model.parameters()]
    plain = derivatives(model, x, parameters)
    model.block.cell.compile(dynamic=True)
    assert_close(derivatives(compiled(model, "inductor"), x, parameters), plain, GRADIENT)


NOT_KEPT = "deqfast: compiled autograd does not keep .*compile the model"


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("adjoint", "whole", "error"),
    [
        ("implicit", False, NOT_KEPT),  # as of every adjoint whose graph deqfast differentiates
        *((name, False, None) for name in (Reversible(3), Unrolled(3), "jfb", "phantom")),  # whose graph is torch's own
        ("implicit", True, None),
    ],
    ids=str,
)
def test_compiled_autograd(adjoint, whole, error, compiled):
    model, x = Model("anderson", adjoint, warn=False).double(), torch.randn(5, 3, dtype=torch.float64)
    _, _, *plain = derivatives(model, x, [*model.parameters()])
    model.zero_grad()
    with (
        pytest.raises(RuntimeError, match=error) if error else nullcontext(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        (compiled(model) if whole else model)(x).square().sum().backward()
    if not error:
        assert_close([p.grad for p in model.parameters()], plain, GRADIENT)


def test_second_derivatives_of_compiled_cells_and_of_functions_compiled_in_parts(compiled):
    block = DEQBlock(Cell().double(), Anderson(1e-12, 100), Implicit(Anderson(1e-12, 100)))
    block.cell.compile(backend="aot_eager")
    assert torch.autograd.gradgradcheck(block, torch.randn(2, 4, dtype=torch.float64, requires_grad=True))
    block, x = DEQBlock(Cell(), "anderson", "implicit"), torch.randn(2, 4, requires_grad=True)

    def penalty(value, x):
        torch._dynamo.graph_break()
        return torch.autograd.grad(value, x, create_graph=True)[0].square().sum()

    broken = torch.compile(penalty, backend="aot_eager")
    assert torch.equal(*(torch.autograd.grad(f(block(x).sum(), x), x)[0] for f in (broken, penalty)))


def test_other_threads_may_compile_or_leave_compiled_code(compiled, monkeypatch):
    """torch knows only for all threads together whether one compiles, and whether they run compiled code."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        assert DEQBlock(Cell())(torch.randn(2, 4)).shape == (2, 4)
    inside, leave, graphs = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=uncompiled(lambda: (inside.set(), leave.wait(60))))
    uncompiled(lambda: (thread.start(), inside.wait(60)))()
    leave.set()
    thread.join()
    torch.compile(torch.sin, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(2))
    assert graphs


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("what", ["residual", "fc"])
def test_cells_and_the_fully_connected_solve(what, kernel, compiled):
    weight = (0.1 * torch.randn(8, 8, dtype=torch.float64)).requires_grad_()
    cell = ResidualCell(8, kernel=kernel).double()
    f, parameters, shape = {
        "fc": (lambda x: fc_fixed_point(weight, x, kernel=kernel)[0], [weight], (8,)),
        "residual": (lambda x: cell(0.5 * x, x).sin(), [*cell.parameters()], (8, 3, 5)),
    }[what]
    fast = compiled(f)
    for i, batch in enumerate((6, 7)):
        x = torch.randn(batch, *shape, dtype=torch.float64)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert_same_derivatives(fast, f, x, parameters, GRADIENT)  # products and convolutions round


class TestOfABlock:
    @pytest.mark.parametrize("groups", [None, "batch", (1, 0, 0, 2, 2), Groups(torch.tensor([1, 0, 0, 2, 2]))])
    def test_the_solution_is_returned(self, groups, compiled):
        block, x = DEQBlock(Cell(), "anderson"), torch.randn(5, 4)
        groups = torch.tensor(groups) if isinstance(groups, tuple) else groups
        call = compiled(lambda x: block(x, groups=groups, return_solution=True))
        (value, solution), (plain, expected) = call(x), block(x, groups=groups, return_solution=True)
        assert torch.equal(value, plain)
        for name in ("status", "iterations", "residual", "residual_rel", "residual_abs", "value"):
            assert torch.equal(getattr(solution, name), getattr(expected, name)), name
        assert int(solution.evaluations) == expected.evaluations and bool(solution.converged.all())

    def test_trees_autocast_and_inference(self, compiled):
        """x holds a constant and a parameter; the state is in another memory order than contiguous."""

        def tree(z, x):
            return {"a": 0.5 * torch.tanh(z["b"].mT) + x[0], "b": 0.25 * (z["a"] @ x[1]).mT if x[2] else z["b"]}

        block = DEQBlock(tree, drop_converged=True, warn=False)
        z0 = {"a": torch.zeros(2, 3, 2), "b": torch.zeros(2, 3, 2).mT}
        call, x = compiled(block), [torch.randn(2, 3, 2), nn.Parameter(torch.randn(2, 2)), True]
        for context in (torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()):
            with context:
                value, plain = call(x, z0=z0), block(x, z0=z0)
            assert_close(value, plain, WELL_CONDITIONED * rounding(torch.bfloat16, 1))
            assert all((value[k].dtype, value[k].stride()) == (plain[k].dtype, plain[k].stride()) for k in z0)

    def test_backward_solution_and_modes_are_those_of_the_live_block(self, compiled):
        model = Model("anderson", "implicit", eval_solver=Picard(max_iter=3), warn=False)
        fast, x = compiled(model), torch.randn(5, 3)
        fast(x).sum().backward()
        assert bool(model.block.backward_solution.converged.all())
        model.eval()
        assert torch.equal(fast(x), model(x))

    def test_copies_have_their_own_number_and_the_dead_none(self, compiled):
        block, x = DEQBlock(Cell()), torch.randn(2, 4)
        blocks = [block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
        numbers = {int(each._number) for each in blocks}
        assert len(numbers) == 3 and numbers <= set(opaque_op._live)
        blocks[1].cell.linear.weight.data.mul_(0.1)
        assert not torch.equal(*(torch.compile(each, backend="eager")(x) for each in blocks[:2]))
        torch.compiler.reset()
        del block, blocks
        gc.collect()
        assert not numbers & set(opaque_op._live)

    def test_two_calls_stay_two_and_hooks_keep_what_they_count(self, compiled):
        class Masked(Cell):
            solves = 0

            def begin_solve(self):
                self.scale = torch.rand(4)

            def end_solve(self):
                self.solves = self.solves + 1

        block, x = DEQBlock(Masked()), torch.randn(2, 4)
        first, second = compiled(lambda x: torch.stack([block(x), block(x)]))(x)
        assert not torch.equal(first, second) or torch.__version__ < "2.14"  # which makes one of calls alike
        solves = block.cell.solves
        compiled(block)(x)
        assert block.cell.solves == solves + 1

    def test_weights_stay_where_other_threads_read_them(self, compiled):
        block, seen = DEQBlock(Cell(), stop_fn=lambda z, v, k: seen.append(block.cell.linear.weight) or v[:, 0] > 9), []
        weight, call = block.cell.linear.weight, compiled(block)
        call(torch.randn(2, 4)).sum().backward()
        assert seen and all(read is weight for read in seen) and weight.grad.any()

    def test_weights_changed_under_the_same_autocast(self, compiled):
        block, x = DEQBlock(Cell()), torch.randn(2, 4)
        block.cell.linear = nn.Linear(4, 4, bias=False)  # autocast serves library products only
        call = compiled(block)
        with torch.autocast("cpu", torch.bfloat16):
            call(x)
            with torch.no_grad():
                block.cell.linear.weight.mul_(-1)
            value = call(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(value, block(x), WELL_CONDITIONED * rounding(torch.bfloat16, 1))

    def test_models_of_a_kind_share_their_code(self, compiled):
        x = torch.randn(2, 3)
        with torch._dynamo.config.patch(recompile_limit=2):
            for _ in range(4):
                compiled(Model())(x)

    def test_weights_given_in_the_call_and_hooks_of_the_cells_own(self, compiled):
        block, x, seen = DEQBlock(Cell()), torch.randn(2, 4), []
        fast, weight, scale = compiled(block), block.cell.linear.weight, torch.tensor(0.5, requires_grad=True)
        value = fast(x).sum()
        weight.register_hook(seen.append)
        value.backward()
        assert len(seen) == 1

        def within(x):
            return torch.func.functional_call(block, {"cell.linear.weight": scale * weight}, (x,))

        def around(x):
            return torch.func.functional_call(fast, {"_orig_mod.cell.linear.weight": scale * weight}, (x,))

        for call in (compiled(within), around):
            assert_same_derivatives(call, within, x, [scale])

    def test_two_weights_in_place_of_a_tied_weight(self, compiled):
        cell, weight = Cell(), (0.1 * torch.randn(4, 4)).requires_grad_()
        cell.second = cell.linear.weight
        cell.forward = lambda z, x: Cell.forward(cell, z, x) + 0.1 * product(z, cell.second)
        block = DEQBlock(cell)

        def call(x):
            return torch.func.functional_call(block, {"cell.second": weight}, (x,), tie_weights=False)

        assert_same_derivatives(compiled(call), call, torch.randn(2, 4), [weight])

    @pytest.mark.parametrize("kind", ["reversible", "checkpoint", "two names", "implicit inside", "neumann inside"])
    def test_derivatives_are_those_of_eager_mode(self, kind, compiled):
        """Of an adjoint without a solver, within an activation checkpoint, and of modules in the cell."""
        cell, options = Cell(), {"adjoint": Reversible(5), "warn": False} if kind == "reversible" else {}
        parameters, weight = [*cell.parameters()], cell.linear.weight
        if kind == "two names":
            cell.again = cell.linear
        if kind.endswith("inside"):
            inner, cell = DEQBlock(cell, adjoint=kind.split()[0]), nn.Module()
            cell.inner, cell.forward = inner, lambda z, x: 0.3 * inner(z + x)
        block = DEQBlock(cell, **options)
        call = (lambda x: checkpoint(block, x, use_reentrant=False)) if kind == "checkpoint" else block
        assert_same_derivatives(compiled(call), block, torch.randn(2, 4), parameters)
        assert parameters[0] is weight and all(p is weight for p in block.parameters())

    @pytest.mark.parametrize(
        "forward",
        [
            lambda cell, z, x: torch.tanh(0.3 * torch.complex(z, z).conj().imag @ cell.linear.weight + x),
            lambda cell, z, x: torch.tanh(0.5 * torch.vmap(cell.linear.weight.mv)(z) + x),
            lambda cell, z, x: x - 0.5 * torch.func.grad(lambda z: cell.linear(z).cosh().log().sum())(z),
        ],
        ids=["conjugate", "vmap", "torch.func"],
    )
    def test_operations_that_a_compiled_graph_leaves_out(self, forward, compiled):
        tol, cell, x = 1e-6, Cell(), torch.randn(2, 4)
        cell.forward = lambda z, x: forward(cell, z, x)
        block = DEQBlock(cell, Broyden(tol, 40), "implicit")
        values, expected = (derivatives(f, x, [cell.linear.weight]) for f in (compiled(block), block))
        condition = amplification(lambda z: cell(z, x), expected[0])
        assert_close(values, expected, after_solve(tol + rounding(torch.float32), condition, derivatives=1))

    def test_two_leaves_of_the_same_gradient(self, compiled):
        block = DEQBlock(lambda z, x: torch.tanh(0.5 * z + x[0] + x[1]))
        x = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
        a, b = torch.autograd.grad(compiled(block)(x, z0=torch.zeros(3, 4)).sum(), x)
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()

    def test_what_is_not_served_is_an_error(self, compiled):
        x, hidden = torch.randn(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        for f in (DEQBlock(Cell()), lambda x, z0: fc_fixed_point(0.1 * torch.eye(4), x, z0)[0]):
            with pytest.raises(ValueError, match="z0 must be finite"):
                compiled(f)(x, z0=torch.full((2, 4), torch.nan))
        for given in (x, x.detach()):
            with pytest.raises(RuntimeError, match="neither in x nor a parameter of the cell"):
                compiled(DEQBlock(lambda z, x: 0.5 * z.tanh() + hidden.exp() * x))(given)
        with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
            (first,) = torch.autograd.grad(compiled(DEQBlock(Cell()))(x).square().sum(), x, create_graph=True)
            torch.autograd.grad(first.sum(), x)


BATCH = torch.export.Dim("batch")
SLIDING = Anderson(rtol=1e-5, max_iter=9, history_size=3, kind="I")
SHORTER = replace(SLIDING, history_size=2)  # for ONNX, whose export takes seconds
WITH_PAIRS = Broyden(rtol=1e-5, max_iter=30, history_size=2, kind="bad")


class Judged(Model):
    """A model that tells how its solve went."""

    def tolerance(self, x, floor):
        """Between two of its values that are solved to its tolerance and a floor."""
        with torch.no_grad():
            z, x = self(x)[0], self.encoder(x)
        return after_solve(self.block.solver.tol + floor, amplification(lambda z: self.block.cell(z, x), z))

    def forward(self, x, **more):
        z, solution = self.block(self.encoder(x), return_solution=True, **more)
        return z, solution.status, solution.iterations, solution.residual, torch.as_tensor(solution.evaluations)


def exported(model):
    """The program of a model in evaluation mode, which takes any batch."""
    x = torch.randn(5, 3, dtype=next(model.parameters()).dtype)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: BATCH},))


def same(program, model, x):
    """Whether the program gives the bits that the model gives in eager mode, NaN being NaN."""
    pairs = zip(program.module()(x), model(x), strict=True)
    return all(torch.equal(value.nan_to_num(7), expected.nan_to_num(7)) for value, expected in pairs)


class TestExport:
    @pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of float64's largest number, for ONNX
    @pytest.mark.parametrize(
        ("solver", "dtype", "kernel", "onnx"),
        [
            (Broyden(max_iter=3), torch.float64, "torch", False),
            (Picard(max_iter=4), torch.float64, "cpp", False),
            (SLIDING, torch.float32, "cpp", False),
            (WITH_PAIRS, torch.float64, "cpp", False),
            pytest.param(Picard(max_iter=4), torch.float32, "torch", True, marks=pytest.mark.tier("full")),
            pytest.param(SHORTER, torch.float64, "torch", True, marks=pytest.mark.tier("full")),
            # Its graph has the operations of the graph of SHORTER.
            pytest.param(WITH_PAIRS, torch.float32, "torch", False, marks=pytest.mark.tier("full")),
        ],
        ids=str,
    )
    def test_the_answer_is_that_of_eager_mode(self, solver, dtype, kernel, onnx):
        """For samples that end early, run out of evaluations or break down, and for none; in ONNX to rounding."""
        model = Judged(solver, kernel=kernel, warn=False).to(dtype)
        program, tanh = exported(model), torch.ops.aten.tanh.default
        graphs = [program.graph_module, *program.graph_module.children()]
        cells = sum(node.target is tanh for graph in graphs for node in graph.graph.nodes)
        assert cells == (2 if kernel == "torch" else 1)  # torch's loop begins with the second evaluation
        x = torch.randn(7, 3, dtype=dtype)
        x[0], x[1] = 1e6, torch.nan
        assert same(program, model, x) and same(program, model, x[:1])
        assert program.module()(x[:0])[0].shape == (0, 4)
        if not onnx:
            return
        converted = torch.onnx.export(program, verbose=False, optimize=dtype == torch.float32)  # which takes seconds
        assert [node.op_type for node in converted.model.graph].count("Loop") == 1
        session = onnxruntime.InferenceSession(converted.model_proto.SerializeToString())
        for batch in (x, x[:1], x[2:5]):
            values = [torch.from_numpy(each) for each in session.run(None, {"x": batch.numpy()})]
            value, *judged = model(batch)
            if dtype == torch.float32:  # whose rounding may be an evaluation more or less
                healthy = batch[batch.isfinite().all(dim=1)]
                assert_close(values[0], value, model.tolerance(healthy, rounding(dtype)))
            else:
                assert_close(values[0], value, GRADIENT)
                assert all(map(torch.equal, values[1:3], judged[:2])) and values[-1] == judged[-1]

    @pytest.mark.parametrize("kernel", ["torch", "cpp"])
    def test_a_cell_that_no_loop_can_hold(self, kernel):
        """All evaluations are made, one after the other."""

        class Counting(Cell):
            calls = 0

            def forward(self, z, x):
                self.calls += 1
                return super().forward(z, x)

        model = Judged(Picard(max_iter=3), cell=Counting(), kernel=kernel, warn=False)
        with pytest.warns(UserWarning, match="all evaluations of the solver: torch's while_loop cannot hold the solve"):
            program = exported(model)
        assert int(program.module()(x := torch.randn(3, 3))[-1]) == 3 and same(program, model, x)

    @pytest.mark.parametrize("kernel", ["torch", "cpp"])
    def test_samples_of_several_rows_run_without_a_loop(self, kernel):
        model = Judged(Anderson(max_iter=4), warn=False, kernel=kernel).eval()
        model.forward = lambda x: Judged.forward(model, x, groups="batch")[:-1]
        program = torch.export.export(model, (torch.randn(5, 3),))
        assert same(program, model, torch.randn(5, 3))

    @pytest.mark.tier("full")
    @pytest.mark.parametrize(("solver", "kernel"), [(Picard, "torch"), (Anderson, "cpp")])
    def test_a_package_of_aot_inductor(self, solver, kernel, tmp_path):
        """Code that runs from C++ too, in one loop for every batch."""
        model = Judged(solver(1e-5, 60), kernel=kernel).eval()
        path = torch._inductor.aoti_compile_and_package(
            exported(model), package_path=str(tmp_path / "model.pt2"), inductor_configs=package_options()
        )
        package = torch._inductor.aoti_load_package(path)
        for batch in (2, 7):
            x = torch.randn(batch, 3)
            (value, status, *_), expected = package(x), model(x)
            assert torch.equal(status, expected[1]) and (status == Status.CONVERGED).all()
            assert_close(value, expected[0], model.tolerance(x, rounding(torch.float32)))

    @pytest.mark.filterwarnings("error:deqfast")
    def test_each_of_two_blocks_is_a_single_loop(self):
        """Torch takes equal calls for one, if it differentiates the exported program."""
        model, x = nn.Module().eval(), torch.randn(5, 4)
        cells = Cell(), SubhomogeneousCell(4, 4)
        model.blocks = nn.ModuleList(DEQBlock(cell, Anderson(1e-4, 12), kernel="cpp") for cell in cells).eval()
        model.forward = lambda x: torch.cat([model.blocks[0](x), model.blocks[1](x)])
        program = torch.export.export(model, (x,))
        assert sum(node.target is torch.ops.higher_order.while_loop for node in program.graph.nodes) == 2
        program = torch.compile(program.module(), backend="aot_eager_decomp_partition")
        assert_close(program(x), model(x), WELL_CONDITIONED * rounding(torch.float32))

    @pytest.mark.tier("full")
    def test_a_saved_model_runs_where_deqfast_is_not(self, tmp_path):
        model, x = Model(Picard(max_iter=3), warn=False).eval(), torch.randn(4, 3)
        program = exported(model)
        torch.export.save(program, tmp_path / "model.pt2")
        torch.save(x, tmp_path / "x.pt")
        run = (
            "import sys, torch; y = torch.export.load('model.pt2').module()(torch.load('x.pt')); "
            "torch.save(y.detach(), 'y.pt'); assert 'deqfast' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True)
        assert_close(torch.load(tmp_path / "y.pt"), model(x), rounding(torch.float32))

    @pytest.mark.parametrize("kernel", ["torch", "cpp"])
    def test_a_complex_state(self, kernel):
        class Complex(Cell):
            def forward(self, z, x):
                return torch.complex(super().forward(z.real, x), 0.5 * z.imag.sin() + x)

        model = Model(Picard(max_iter=3), cell=Complex(), kernel=kernel, warn=False)
        model.forward = lambda x: model.block(x, z0=torch.complex(x, x))
        program = torch.export.export(model.eval(), (torch.randn(5, 4),), dynamic_shapes=({0: BATCH},))
        for batch in (1, 7):
            x = torch.randn(batch, 4)
            assert torch.equal(program.module()(x), model(x))

    @pytest.mark.parametrize("kernel", ["torch", "cpp"])
    def test_a_program_has_no_gradient_through_its_solve(self, kernel):
        model = Model(Picard(max_iter=2), kernel=kernel, warn=False)
        model.forward = lambda x: model.block(x) + x
        x = torch.randn(5, 4, requires_grad=True)
        program = torch.export.export(model.eval(), (x.detach(),)).module()
        (gradient,) = torch.autograd.grad(program(x).sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))

    def test_a_strict_export_is_refused(self):
        """Its program would call this process's block by its number."""
        with pytest.raises(RuntimeError, match="with strict=False and in evaluation mode"):
            torch.export.export(DEQBlock(Cell()).eval(), (torch.randn(5, 4),), strict=True)

    def test_unrolled_and_the_solution(self):
        model, x = Judged(Picard(max_iter=3), "unrolled", warn=False), torch.tensor([[1.0] * 3, [torch.nan] * 3])
        program = exported(model)
        assert same(program, model, x) and program.module()(x)[1][1] == Status.NONFINITE

    @pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore:Converting a tensor to a Python boolean")
    def test_a_trace_of_torch_jit_is_refused(self):
        with pytest.raises(RuntimeError, match="torch.jit.trace would fix the number of evaluations"):
            torch.jit.trace(Model().eval(), (torch.randn(4, 3),))
