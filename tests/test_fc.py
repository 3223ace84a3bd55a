"""The fully connected cell in one launch: the ops, deqfast.fc_fixed_point with its gradient, and the cells."""

from __future__ import annotations

import math
import os
import signal
import threading
from dataclasses import replace

import emulate
import pytest
import torch
from correctness import assert_accurate, assert_close, lost, rounding
from correctness.fc_states import DTYPES, EVENTS, FCCase, check_solve
from correctness.states import RULES, same_bits
from op_calls import Operations, check_bits

from deqfast import Anderson, Broyden, DEQBlock, FCCell, LinearCell, Picard, Status, fc_fixed_point
from deqfast.engine.runners import single_launch
from deqfast.ops import ACTIVATIONS, Kernel
from deqfast.ops.fc import reference
from deqfast.ops.steps import StopRule

TORCH = Kernel("torch")
EPS = rounding(torch.float32)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
own_kernels = pytest.mark.parametrize("kernel", ["cpp", "triton", "cuda"], indirect=True)


@pytest.fixture
def op(implementation):
    return implementation.op("fc_fixed_point")


def skip_unserved(kernel: str, dtype: str) -> None:
    if kernel == "triton" and dtype == "fp64":
        pytest.skip("the Triton kernel has no float64")


def most_features(implementation, dtype: torch.dtype) -> float:
    """In bfloat16 the Triton kernel holds 256 columns, if a block of the GPU has the memory."""
    if implementation.name == "triton":
        from deqfast.kernels.config import fc_features, shared_memory

        return fc_features(dtype, shared_memory(torch.device(implementation.device)))
    return 150 if implementation.name == "emulated" else math.inf


def befallen(overflows: bool = True, **settings) -> FCCase:
    """A sample of every event and one more."""
    # In float32 a residual at 1e20 ends as 0, which is within an absolute tolerance, in float64 later.
    rows = tuple(event for event in EVENTS if event != "overflow" or (overflows and "absolute" not in settings))
    return FCCase(batch=len(rows) + 1, activation="relu", rows=rows, **settings)


class TestOp:
    """Against the reference in float64: value, status, iterations and residuals."""

    @every_dtype
    @pytest.mark.parametrize(
        ("size", "batch", "activation"),
        [(1, 1, "tanh"), (7, 17, "tanh"), (63, 5, "tanh"), (128, 1, "tanh"), (150, 9, "tanh"), (200, 17, "tanh")]
        + [(300, 33, "tanh"), (1, 0, "tanh"), *((17, 2, activation) for activation in ACTIVATIONS)],
    )
    def test_sizes_and_activations(self, size, batch, activation, dtype, op, implementation):
        skip_unserved(implementation.name, dtype)
        case = FCCase(size=size, batch=batch, activation=activation, warm=True, **DTYPES[dtype])
        if size > most_features(implementation, case.weight_dtype or case.dtype):
            pytest.skip("more than is emulated in time, or than the Triton kernel holds of this dtype")
        check_solve(op, case, implementation.device)

    @every_dtype
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    @pytest.mark.parametrize("max_iter", [1, 2, 30])
    def test_what_can_befall_a_sample(self, max_iter, rule, dtype, op, implementation):
        skip_unserved(implementation.name, dtype)
        case = befallen(size=9, max_iter=max_iter, **rule, **DTYPES[dtype])
        outcome = check_solve(op, case, implementation.device)
        broken = [event in ("nan", "inf", "start") for event in case.rows]
        assert [status == Status.NONFINITE for status in outcome[1].tolist()] == [*broken, False]
        assert torch.isinf(outcome[3][:, : len(broken)]).all(dim=0).tolist() == broken

    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter's numpy
    def test_a_sample_that_diverges_keeps_its_best_iterate(self, op, implementation):
        case = FCCase(size=5, batch=3, activation="identity", gain=4.0, max_iter=400, warm=True)
        outcome = check_solve(op, replace(case, max_iter=5), implementation.device)
        assert (outcome[1] == Status.MAX_ITER).all() and torch.isfinite(outcome[3]).all()
        outcome = [tensor.cpu() for tensor in op(*case.make(implementation.device), *case.scalars())]
        assert (outcome[1] == Status.NONFINITE).all() and torch.isfinite(outcome[0]).all()
        assert (outcome[2] < case.max_iter).all() and torch.isfinite(outcome[3]).all()

    def test_a_sample_stalls_where_the_loop_says_so(self, op, implementation):
        weight = torch.diag(torch.tensor([0.5, 0.995, 0.5]))
        c = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
        z0 = torch.tensor([[0.0, 199.0, 0.0], [0.0, 0.0, 0.0]])  # near to 200, and slow
        settings = 0, 40, *StopRule(1e-5, stall_floor=0.1)
        _, status, iterations, _ = op(*(tensor.to(implementation.device) for tensor in (weight, c, z0)), *settings)
        assert status.tolist() == [Status.STALLED, Status.CONVERGED]
        assert iterations.tolist() == TORCH.op("fc_fixed_point")(weight, c, z0, *settings)[2].tolist() == [6, 17]

    @pytest.mark.covering(0)
    @pytest.mark.parametrize("floor", [0.0625, 0.0])
    def test_a_sample_that_runs_away(self, floor, op, implementation):
        given = torch.eye(3), torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]), torch.zeros(2, 3)
        # From evaluation 101 on the relative residual is below tol.
        settings = 0, 150, *StopRule(1e-2, stall_floor=floor)
        value, status, iterations, residual = op(*(tensor.to(implementation.device) for tensor in given), *settings)
        assert status.tolist() == [Status.ESCAPED, Status.CONVERGED] and iterations.tolist() == [150, 1]
        assert not value.any() and residual[0].tolist() == pytest.approx([1.0, 0.0], rel=EPS)

    @every_dtype
    def test_the_bits_depend_on_nothing_but_the_sample(self, dtype, op, implementation, set_threads):
        skip_unserved(implementation.name, dtype)
        size, batch = (300, 50) if implementation.name == "cpp" else (33, 19)
        case = FCCase(size=size, batch=batch, rows=EVENTS[:3], **DTYPES[dtype])
        values = [*case.make(implementation.device), *case.scalars()]
        check_bits(op, values, implementation, set_threads, batch)


@pytest.mark.usefixtures("cpp_kernels")
class TestLaunches:
    """On the CPU, Python handles signals between launches of some blocks of samples, or in the ordinary loop."""

    @every_dtype
    @pytest.mark.parametrize(("size", "batch"), [(63, 5), (40, 37), (300, 65), (3, 0)])
    @pytest.mark.parametrize("blocks", [1, 2])
    def test_they_give_the_bits_of_one(self, size, batch, blocks, dtype, monkeypatch, set_threads):
        set_threads(1)
        case = FCCase(size=size, batch=batch, max_iter=12, rows=EVENTS[: max(batch - 1, 0)], **DTYPES[dtype])
        whole = torch.ops.deqfast.fc_fixed_point(*case.make(), *case.scalars())
        monkeypatch.setattr(single_launch, "MAX_BLOCK_PRODUCTS", blocks * 16 * 12 * (size + 32) ** 2)
        with Operations() as operations:
            parts = single_launch._in_launches(*case.make(), *case.scalars())
        assert operations.names.count("fc_fixed_point") == max(-(-batch // (16 * blocks)), 1)
        assert all(map(same_bits, parts, whole))

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("call", [fc_fixed_point, DEQBlock])
    def test_ctrl_c_ends_a_solve_that_could_be_long(self, call):
        cell = FCCell(3, 64, activation="identity")
        cell.weight.data.copy_(-torch.eye(64))
        solver = Picard(rtol=1e-12, max_iter=2**31 - 1)  # a quarter of an hour
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            if call is DEQBlock:
                DEQBlock(cell, solver, kernel="cpp")(torch.ones(1, 3))
            else:
                fc_fixed_point(cell.weight, torch.ones(1, 64), activation="identity", solver=solver, kernel="cpp")


LARGE = 99 * 1024  # bytes of shared memory of a block
# Multiprocessors and shared memory: W in one block, and cut into the columns of teams of 2 to 5 blocks, for D = 33.
DEVICES = {"single": (4, LARGE), "a team": (7, 10_000), "teams": (13, 8_200), "as many blocks as there are": (5, 7_000)}
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("implementation", ["emulated"], indirect=True)
class TestTeams:
    """The CUDA kernel on GPUs of several sizes."""

    @pytest.fixture
    def op(self, implementation):
        yield implementation.op("fc_fixed_point")
        emulate.set_device(4, LARGE)

    @pytest.mark.covering(2)
    @pytest.mark.parametrize("order", emulate.ORDERS)
    @every_device
    @every_dtype
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    @pytest.mark.parametrize("max_iter", [1, 2, 6, 7])  # the last evaluation is only judged
    def test_what_can_befall_a_sample(self, max_iter, rule, dtype, device, order, op):
        processors, shared = DEVICES[device]
        emulate.set_device(processors, shared * (2 if dtype == "fp64" else 1))
        with emulate.order(order):
            # At 1e155 a rounding of the residual is more than its bound.
            check_solve(op, befallen(dtype != "fp64", size=33, max_iter=max_iter, warm=True, **rule, **DTYPES[dtype]))

    @every_device
    def test_the_bits_depend_on_nothing_but_the_sample(self, device, op, implementation):
        """Neither on the mates nor on their number, which decides how many samples a tile holds."""
        emulate.set_device(*DEVICES[device])
        case = FCCase(size=33, batch=17, max_iter=4, rows=("run", "nan"))
        check_bits(op, [*case.make(), *case.scalars()], implementation, None, case.batch)

    def test_what_does_not_fit_is_named(self, op):
        emulate.set_device(3, 7_000)
        with pytest.raises(RuntimeError, match="D = 33 is more than the GPU holds in shared memory"):
            op(*FCCase(size=33).make(), *FCCase().scalars())


class TestVjp:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @every_activation
    @pytest.mark.parametrize("size", [8, 77, 300])
    def test_accuracy(self, size, activation, dtype, implementation):
        code, device = ACTIVATIONS.index(activation), implementation.device
        op = implementation.op("fc_vjp")
        pre = 4 * torch.randn(7, size, generator=torch.Generator().manual_seed(0), dtype=dtype)
        pre[0, :4] = torch.tensor([0.0, -0.0, 1e30, -1e30])
        grad = torch.randn(7, size, generator=torch.Generator().manual_seed(1), dtype=dtype)
        exact = TORCH.op("fc_vjp")(pre.double(), grad.double(), code)
        plain = TORCH.op("fc_vjp")(pre, grad, code)
        assert_accurate(op(pre.to(device), grad.to(device), code), plain, exact)
        leaf = pre.double().requires_grad_()
        reference.ACTIVATIONS[code](leaf).backward(grad.double())
        assert_close(exact, leaf.grad, rounding(torch.float64))
        assert op(pre[:0].to(device), grad[:0].to(device), code).shape == (0, size)


@pytest.mark.parametrize("kernel", ["triton"], indirect=True)
@pytest.mark.parametrize(("features", "dtype"), [(129, torch.float32), (257, torch.bfloat16)])
def test_the_limit_of_the_triton_kernel_is_named(features, dtype, kernel, device):
    weight, c = torch.zeros(features, features, dtype=dtype), torch.zeros(1, features)
    with pytest.raises(ValueError, match=rf"`weight` must have at most {features - 1} rows .*got {features}"):
        fc_fixed_point(weight.to(device), c.to(device), kernel=kernel)


def leaves(case: FCCase, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    weight, c, _ = case.make(device)
    return weight.requires_grad_(), c.requires_grad_()


def jfb(weight, c, z, activation):
    """The map whose gradient is taken: z fixed."""
    return reference.ACTIVATIONS[ACTIVATIONS.index(activation)](z.detach() @ weight.to(z.dtype).T + c)


class TestFunction:
    @every_activation
    @every_dtype
    def test_gradient(self, dtype, activation, kernel, device):
        skip_unserved(kernel, dtype)
        weight, c = leaves(FCCase(size=11, batch=4, activation=activation, **DTYPES[dtype]), device)
        z, solution = fc_fixed_point(weight, c, None, activation, Picard(1e-4, 50), kernel)
        assert solution.converged.all() and torch.equal(z, solution.value)
        upstream = torch.randn(4, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(z)
        actual = torch.autograd.grad(z, (weight, c), upstream)
        plain = torch.autograd.grad(jfb(weight, c, z, activation), (weight, c), upstream)
        wide = [tensor.detach().double().requires_grad_() for tensor in (weight, c)]
        exact = torch.autograd.grad(jfb(*wide, z.double(), activation), wide, upstream.double())
        for a, p, e in zip(actual, plain, exact, strict=True):
            assert a.dtype == p.dtype
            assert_accurate(a, p, e)

    @pytest.mark.parametrize("event", ["nan", "inf"])
    def test_a_broken_sample_has_no_gradient_and_spoils_none(self, event, kernel, device):
        weight, c = leaves(FCCase(size=6, batch=3, rows=("run", event)), device)
        z, solution = fc_fixed_point(weight, c, None, "relu", kernel=kernel)
        assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
        upstream = torch.ones_like(z)
        upstream[1] = torch.nan
        grad_weight, grad_c = torch.autograd.grad(z, (weight, c), upstream)
        assert (grad_c[1] == 0).all() and torch.isfinite(grad_c).all()
        kept = torch.tensor([0, 2], device=device)
        expected = torch.autograd.grad(jfb(weight, c[kept], z[kept], "relu").sum(), weight)[0]
        assert_close(grad_weight, expected, EPS)

    def test_a_second_derivative_is_an_error(self):
        weight, c = leaves(FCCase(size=5, batch=2))
        (grad,) = torch.autograd.grad(fc_fixed_point(weight, c)[0].sum(), c, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward through fc_fixed_point is not supported"):
            grad.sum().backward()

    @pytest.mark.parametrize("batch", [3, 0])
    def test_counts_and_an_empty_batch(self, batch, kernel, device):
        """Plain torch makes all evaluations for all samples."""
        weight, c = leaves(FCCase(size=5, batch=batch), device)
        z, solution = fc_fixed_point(weight, c, solver=Picard(1e-2, 30), kernel=kernel)
        last = int(solution.iterations.max()) if batch else 0
        own = last, int(solution.iterations.sum())
        assert last < 30 and z.shape == (batch, 5)
        counts = solution.evaluations, solution.sample_evaluations
        assert counts == ((30, 30 * batch) if kernel == "torch" and batch else own)
        z.sum().backward()
        assert c.grad.shape == (batch, 5) and bool((weight.grad != 0).any()) == (batch > 0)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"weight": 3.0}, TypeError, "weight must be a tensor, got float"),
            ({"c": torch.zeros(2, 4).to_sparse()}, TypeError, "c must be dense, .* got torch.sparse_coo"),
            ({"c": torch.zeros(4)}, ValueError, r"c must be \(B, D\) float32 or float64 .*got \(4,\)"),
            ({"c": torch.zeros(2, 0)}, ValueError, r"c must be .* with D > 0, got \(2, 0\)"),
            ({"c": torch.zeros(2, 4).half()}, ValueError, r"c must be .* got \(2, 4\) torch.float16"),
            ({"weight": torch.zeros(4, 3)}, ValueError, r"weight must be \(4, 4\) .* got \(4, 3\)"),
            ({"weight": torch.zeros(4, 4).double()}, ValueError, "weight must be .* got .* torch.float64"),
            ({"z0": torch.zeros(3, 4)}, ValueError, r"z0 must be \(2, 4\) torch.float32, got \(3, 4\)"),
            ({"z0": torch.full((2, 4), math.nan)}, ValueError, "z0 must be finite; it is not in 2 of 2 samples: 0, 1"),
            ({"activation": "sine"}, ValueError, "activation must be one of .*, got 'sine'"),
            ({"solver": "broyden"}, ValueError, "solver must be Picard with relaxation 1, got Broyden"),
            ({"solver": Picard(relaxation=0.5)}, ValueError, "solver must be .* relaxation 1, got .*relaxation=0.5"),
            ({"kernel": "fast"}, ValueError, "kernel must be one of .*, got 'fast'"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, error, message):
        good = {"weight": torch.zeros(4, 4), "c": torch.zeros(2, 4)}
        with pytest.raises(error, match=message):
            fc_fixed_point(**good | arguments)


class TestCells:
    """Picard on an FCCell or a LinearCell is one launch, with what the ordinary loop returns."""

    @pytest.fixture
    def launches(self, monkeypatch) -> list[str]:
        """Kernel of each launch."""
        made: list[str] = []
        launch = single_launch.launch
        monkeypatch.setattr(single_launch, "launch", lambda *args: made.append(args[5].name) or launch(*args))
        return made

    @pytest.mark.covering(1)
    @own_kernels
    @pytest.mark.parametrize("kind", ["linear", *ACTIVATIONS])
    @pytest.mark.parametrize(("dtype", "rtol"), [("fp32", 1e-4), ("fp32", 0), ("fp64", 0)])
    def test_a_single_launch_equals_the_loop(self, kind, dtype, rtol, kernel, device, launches):
        skip_unserved(kernel, dtype)
        cell = (LinearCell(9) if kind == "linear" else FCCell(4, 9, kind)).to(device, DTYPES[dtype].get("dtype"))
        x = torch.randn(5, 9 if kind == "linear" else 4).to(next(cell.parameters()))
        block = DEQBlock(cell, Picard(rtol, max_iter=50, atol=1e-4 - rtol), kernel=kernel)
        z, solution = block(x, return_solution=True)
        assert launches == [kernel] and solution.converged.all()
        assert solution.evaluations == int(solution.iterations.max())
        assert solution.sample_evaluations == int(solution.iterations.sum()) and solution.trace is None
        grads = torch.autograd.grad(z.square().sum(), list(cell.parameters()))
        handle = cell.register_forward_hook(lambda *args: None)  # whoever observes calls gets them
        looped_z, looped = block(x, return_solution=True)
        expected = torch.autograd.grad(looped_z.square().sum(), list(cell.parameters()))
        handle.remove()
        assert launches == [kernel]
        assert_close([z, *grads], [looped_z, *expected], rounding(x.dtype))
        assert torch.equal(solution.iterations, looped.iterations) and torch.equal(solution.status, looped.status)
        assert_close(solution.residual, looped.residual, lost(x.dtype, 1e-4))

    def test_states_and_kernels_that_are_not_served_take_the_loop(self, launches):
        cell, x, z0 = FCCell(4, 9), torch.randn(5, 4), torch.zeros(5, 9)
        subclass = type("Subclass", (FCCell,), {"forward": lambda self, z, x: FCCell.forward(self, z, x)})(4, 9)
        refused = [(cell, z0, Picard(), "torch"), (subclass, z0, Picard(), "auto")]
        refused += [(cell, start, Picard(), "auto") for start in (z0.double(), (z0,), z0[:4])]
        refused += [(cell, z0, solver, "auto") for solver in (Picard(relaxation=0.9), Broyden(), Anderson())]
        for each, *given in refused:
            assert each.fixed_point(x, *given) is None
        with torch.autocast("cpu", torch.float16):
            assert cell.fixed_point(x, z0, Picard(), "auto") is None
        assert launches == []
