"""Solves on several processes: cells whose weights are sharded, errors of one of them, and no hang."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
import torch.distributed as dist
from correctness import assert_close
from forked import in_processes
from interpreter import INTERPRETED
from test_docs import ROOT, python_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deqfast import (
    SHINE,
    Anderson,
    Auto,
    Broyden,
    DEQBlock,
    FCCell,
    Neumann,
    Picard,
    Reversible,
    Unrolled,
    fixed_point,
    root,
    solve,
)
from deqfast.engine.solve import Options, Solve
from deqfast.gradients import Adjoint
from deqfast.ops import Kernel
from deqfast.solution import Solution, Status
from deqfast.solvers import Solver

GROUP_LIMIT = 120  # seconds for a collective
D = 8
PAGE = ROOT / "docs" / "pages" / "processes.md"


def join(rank: int, count: int, path: Path) -> None:
    limit = timedelta(seconds=GROUP_LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=count, timeout=limit)


def run_in_a_group(rank: int, count: int, path: Path, works: list[tuple[Any, ...]]) -> None:
    """One function with its arguments after the other: starting the processes takes longer than most of them."""
    join(rank, count, path)
    for work, *arguments in works:
        work(rank, count, path, *arguments)
    dist.destroy_process_group()


class Cell(nn.Module):
    """tanh(W z) + x, or with a table in x; NaN for a large x."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        for layer in (self.up, self.down):
            nn.init.orthogonal_(layer.weight)
        self.gain, self.calls, self.at_call = gain, 0, lambda number: None

    def initial_state(self, x: Any) -> Tensor:
        return torch.zeros_like(x[0] if isinstance(x, tuple) else x)

    def forward(self, z: Tensor, x: Any) -> Tensor:
        self.calls += 1
        self.at_call(self.calls)
        x, table = x if isinstance(x, tuple) else (x, torch.zeros(()))
        x = torch.where(x.detach().abs().amax(dim=1, keepdim=True) > 40, torch.nan, x)
        return torch.tanh(self.gain * self.down(self.up(z))) + x + table.mean()


class Model(nn.Module):
    """Layers around a block; it returns the Solution too."""

    def __init__(self, block: DEQBlock) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, D), block, nn.Linear(D, 1)

    def forward(self, x: Tensor, *more: Tensor) -> tuple[Tensor, Solution]:
        z, solution = self.block((self.first(x), *more) if more else self.first(x), return_solution=True)
        return self.last(z), solution


@dataclass
class Case:
    """A block that processes train together: the samples of each of them, and the numbers of steps."""

    adjoint: str | Adjoint = "jfb"
    solver: Solver = Anderson(1e-9, 60)
    shares: tuple[int, ...] = (5, 3)
    drop_converged: bool = False
    dtype: torch.dtype = torch.float64
    steps: int = 3
    gain: float = 1.0
    broken: int | None = None  # a sample for which the cell is not finite
    table: bool = False
    normed: bool = False  # a weight is computed from parameters

    def model(self) -> Model:
        torch.default_generator.manual_seed(0)  # the same in all processes
        cell, options = Cell(self.gain), {"drop_converged": self.drop_converged, "warn": False}
        if self.normed:
            nn.utils.parametrizations.weight_norm(cell.up)
        return Model(DEQBlock(cell, self.solver, self.adjoint, **options)).to(self.dtype)

    def data(self) -> Tensor:
        x = torch.randn(sum(self.shares), 4, dtype=self.dtype, generator=torch.Generator().manual_seed(1))
        x *= torch.linspace(0.1, 6, len(x), dtype=self.dtype)[:, None]  # which differ in difficulty
        if self.broken is not None:
            x[self.broken] = 100
        return x

    def train(self, model: Model, x: Tensor, loss_of: Callable[[Tensor], Tensor]) -> list[Any]:
        """Loss, statuses, iterations, calls of the cell and gradients of each step."""
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.002), []
        table = [torch.ones(self.shares[0], 2, dtype=self.dtype)] * self.table  # as many rows as a rank has samples
        for _ in range(self.steps):
            model.block.cell.calls = 0
            y, solution = model(x, *table)
            loss = loss_of(y[solution.residual_abs.isfinite()])
            loss.backward()
            grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
            seen.append((loss.detach(), solution.status, solution.iterations, model.block.cell.calls, grads))
            optimizer.step()
            optimizer.zero_grad()
        return seen


@pytest.fixture
def alone():
    """Process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("adjoint", ["jfb", Unrolled(5), Reversible(5)], ids=repr)
@pytest.mark.parametrize("solver", [Anderson(1e-6, 40), Auto(1e-6), Picard(1e-6, 40)], ids=repr)
def test_a_group_of_a_single_process_changes_no_bit(alone, solver, adjoint):
    cell, x = FCCell(4, D), torch.randn(3, 4)
    grouped, usual = (
        DEQBlock(cell, solver, adjoint, warn=False, **more)(x, return_solution=True)
        for more in ({"lockstep": alone}, {})
    )
    if not isinstance(solver, Picard):  # which FCCell solves in one launch
        assert torch.equal(grouped[0], usual[0]) and grouped[1].evaluations == usual[1].evaluations
    assert_close(grouped[0], usual[0], 1e-5)


def test_an_empty_batch_is_evaluated_as_often_as_others(alone):
    calls = []
    block = DEQBlock(lambda z, x: calls.append(z) or x, lockstep=alone)
    assert block(torch.ones(0, D)).shape == (0, D) and len(calls) == 2  # of the solve and the gradient


def test_copies_share_the_group_and_a_group_is_torchs(alone):
    block = DEQBlock(Cell(), lockstep=alone)
    assert copy.deepcopy(block).lockstep.groups == (alone,) and solve(torch.cos, torch.ones(1, 2), lockstep=alone)
    with pytest.raises(TypeError, match="lockstep must be a process group, such as .*, got 2"):
        solve(torch.cos, torch.ones(1, 2), lockstep=2)


@pytest.mark.parametrize("name", ["lockstep", "state_group"])
def test_fixed_points_and_roots_of_a_group(alone, monkeypatch, name):
    monkeypatch.setattr(dist, "all_reduce", reductions := Reductions())
    z, a = torch.ones(3, D), torch.linspace(1, 9, 3 * D).view(3, D)
    for find, f in ((fixed_point, lambda z, a: (z + a / z) / 2), (root, lambda z, a: 0.1 * (a - z * z))):
        value, solution = find(f, z, a, return_solution=True, **{name: alone}, **{"sign": 1} if find is root else {})
        assert_close(value, a.sqrt(), 1e-2)
        assert reductions.count >= solution.evaluations
        reductions.count = 0
    if name == "state_group":
        with pytest.raises(ValueError, match="sign must be 1 or -1 with state_group: .*, got None"):
            root(f, z, a, state_group=alone)


CASES = {
    "jfb": Case(steps=20),
    "implicit": Case("implicit", Broyden(1e-9, 60), steps=20),
    "float32": Case("implicit", Anderson(1e-5, 40), dtype=torch.float32, steps=1),
    "neumann": Case(Neumann(3), drop_converged=True),
    "phantom": Case("phantom", Picard(1e-9, 60), normed=True),
    "shine": Case(SHINE()),
    "unrolled": Case(Unrolled(20)),
    "checkpoint": Case(Unrolled(20, checkpoint=True)),
    "auto": Case("implicit", Auto(1e-8, 150), gain=20.0, steps=1),  # one rank needs a second stage
    "empty": Case("implicit", shares=(8, 0)),
    "empty-unrolled": Case(Unrolled(20), shares=(0, 8)),
    "empty-auto": Case("jfb", Auto(1e-8, 150), shares=(8, 0), gain=20.0, steps=1),
    "broken": Case("implicit", broken=6),
    "broken-table": Case("jfb", broken=6, table=True),
    "broken-unrolled": Case(Unrolled(20), broken=6, table=True),
    "hsdp": Case(shares=(4, 1, 2, 1), steps=20),
    "tensor": Case("implicit", steps=1),
}


def train_together(rank: int, count: int, path: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("outer", "inner"))
    for name in names:
        case = CASES[name]
        model, parts = case.model(), len(case.shares)
        part, factor = rank * parts // count, parts / (sum(case.shares) - (case.broken is not None))
        if parts < count:  # within a pair of ranks, and FSDP2 over the pairs
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model.block.cell, mesh["inner"], plan)
        shard_weights(model, mesh if parts == 4 else mesh["outer"])
        x = case.data().split(case.shares)[part]  # FSDP divides gradients by the number of processes
        seen = case.train(model, x, lambda y, factor=factor: y.square().sum() * factor)
        torch.save(seen, f"{path}/{name}-{part}.pt")


def shard_weights(model: Model, mesh: DeviceMesh) -> Model:
    """The usual recipe: the repeated part is a unit, then the whole is."""
    fully_shard(model.block.cell, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ON_FOUR = ["hsdp", "tensor"]


def assert_trained_as_a_single_process(path: Path, names: list[str]) -> None:
    for case, name in ((CASES[name], name) for name in names):
        expected = case.train(case.model(), case.data(), lambda y: y.square().mean())
        tolerance = 1e-4 if case.dtype == torch.float32 else 1e-6
        parts = [torch.load(f"{path}/{name}-{part}.pt") for part in range(len(case.shares))]
        for (loss, status, iterations, _, grads), *step in zip(expected, *parts, strict=True):
            losses, statuses, numbers, calls, gradients = zip(*step, strict=True)
            assert len(set(calls)) == 1
            assert_close(sum(losses) / len(parts), loss, tolerance)
            if case.steps < 20:  # small differences of weights may move an iteration
                assert torch.equal(torch.cat(statuses), status) and torch.equal(torch.cat(numbers), iterations)
            for each in gradients:
                assert_close(each, grads, tolerance)


def fail(message: str) -> None:
    raise ValueError(message)


def fail_on_a_rank(rank: int, count: int, path: Path) -> None:
    mesh, own, others = init_device_mesh("cpu", (count,)), "raised here", "rank 1 has raised an error"
    expected = pytest.raises(ValueError, match=own) if rank else pytest.raises(RuntimeError, match=others)
    for at in (1, 4, 20):  # the first, another and the last evaluation
        model = Case(solver=Picard(1e-30, 20)).model()
        cell = model.block.cell
        if rank:
            cell.at_call = lambda number, at=at: number < at or fail(own)
        with expected:
            shard_weights(model, mesh)(torch.ones(3, 4, dtype=torch.float64))
        assert cell.calls == at
    for adjoint in ("jfb", Unrolled(5)):
        start = torch.full((2, D), torch.nan if rank else 0.0)
        block = DEQBlock(Cell(), Picard(1e-30, 20), adjoint, lockstep=dist.group.WORLD)
        error = (ValueError, "z0 must be finite") if rank else (RuntimeError, others)
        with pytest.raises(error[0], match=error[1]):
            block(torch.ones(2, D), z0=start)
    products = []

    def f(z: Tensor) -> Tensor:  # a function whose collectives are its own affair
        products.append(z)
        dist.all_reduce(part := z @ torch.ones(D, D) / D**2)
        return 0.4 * part + torch.arange(1, 3)[:, None] * (1 - rank)

    ended = solve(f, torch.zeros(2, D), Picard(1e-5, 40), lockstep=dist.group.WORLD)
    assert len(products) == ended.evaluations and ended.converged.all()
    interrupt_all(rank, path)


def interrupt_all(rank: int, path: Path) -> None:
    """Ctrl-C reaches one process while it waits for another, which is in its cell, and then the other."""
    block = DEQBlock(Cell(), Picard(1e-30, 20), lockstep=dist.group.WORLD, warn=False)
    interrupted = path / "interrupted"

    def interrupt_waiting() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.touch()

    def at_call(number: int) -> None:
        if number == 5 and rank:
            threading.Timer(1, interrupt_waiting).start()
        elif number == 5:
            while not interrupted.exists():
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)

    block.cell.at_call = at_call
    with pytest.raises(KeyboardInterrupt):
        block(torch.ones(2, D))
    assert block.cell.calls == 5


def run_page(rank: int, count: int, path: Path) -> None:
    for number, block in enumerate(python_of(PAGE)):
        place = f'init_method="file://{path}/{number}-{count}", rank={rank}, world_size={count}'
        names = {"__name__": "__main__"}
        exec(block.text.replace('init_process_group("gloo"', f'init_process_group("gloo", {place}'), names)
    torch.save([weight.grad for weight in names["block"].parameters()], f"{path}/grads-{count}.pt")  # the last recipe's


@pytest.mark.tier("full")
def test_the_recipes_of_the_page_run(tmp_path):
    for count in (1, 2):
        in_processes(run_page, count, tmp_path)
    assert_close(torch.load(tmp_path / "grads-2.pt"), torch.load(tmp_path / "grads-1.pt"), 1e-5)


# --- samples that are spread over processes

POSITIONS, WIDTH = 8, 16


class Gathered(torch.autograd.Function):
    """All shards of a tensor, in `dim`; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int) -> Tensor:
        ctx.dim, shards = dim, [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard.contiguous())
        return torch.cat(shards, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grad := grad.contiguous().clone())
        return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


class Mixing(nn.Module):
    """A cell that mixes positions and features, z (B, POSITIONS, WIDTH); with `dim`, for shards of this dimension."""

    def __init__(self, gain: float, dim: int | None) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        square = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64))[0]
        mixed = torch.softmax(torch.randn(POSITIONS, POSITIONS, generator=g, dtype=torch.float64), -1)
        self.square, self.mixed, self.dim = nn.Parameter(gain * square), nn.Parameter(mixed), dim

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        whole = z if self.dim is None else Gathered.apply(z, self.dim)
        value = torch.tanh(torch.einsum("st,btd->bsd", self.mixed, whole) @ self.square + 0.3 * whole.roll(1, 2))
        return (value if self.dim is None else shard(value, self.dim)) + x


def shard(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


SPREAD = {
    "picard": (1, 0.5, Picard(1e-5, 80), "jfb"),
    "anderson": (1, 0.9, Anderson(1e-5, 40), "implicit"),
    "anderson-I": (2, 0.9, Anderson(1e-5, 40, kind="I", relaxation=0.7), Neumann(4)),
    "broyden": (2, 0.9, Broyden(1e-3, 60), SHINE()),  # a small tolerance would magnify the rounding of its history
    "broyden-8": (1, 1.2, Broyden(1e-5, 60, history_size=8), "implicit"),
    "broyden-bad": (2, 0.9, Broyden(1e-5, 60, kind="bad"), "phantom"),
    "short": (1, 0.9, Anderson(1e-3, 40, history_size=4, norm="max"), SHINE()),
    "auto": (2, 3.0, Auto(1e-5, 120), "jfb"),
    "broken": (1, 0.9, Anderson(1e-5, 40), "jfb"),
}


class Halves:
    """Stands for two processes: rows i and B + i are parts of sample i."""

    def sum(self, numbers: Tensor) -> Tensor:
        return torch.cat([numbers.unflatten(0, (2, -1)).sum(dim=0)] * 2)

    def most(self, numbers: Tensor) -> Tensor:
        numbers = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf) if numbers.is_floating_point() else numbers
        return torch.cat([numbers.unflatten(0, (2, -1)).amax(dim=0)] * 2)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of CUDA on the CPU."""
    if emulate.COMPILER is None:
        pytest.skip("no g++ was found")
    own = Kernel._own
    monkeypatch.setattr(Kernel, "_own", lambda self, op: emulate.op(op) if self.name == "cuda" else own(self, op))


IN_HALVES = {
    "picard": Picard(1e-6, 40, relaxation=0.9),
    "anderson": Anderson(1e-8, 40),
    "anderson-max": Anderson(1e-8, 40, history_size=3, norm="max"),
    "anderson-I": Anderson(1e-8, 40, kind="I", relaxation=0.8),
    "broyden": Broyden(1e-8, 40),
    "broyden-window": Broyden(1e-8, 40, history_size=4),
    "broyden-bad": Broyden(1e-8, 40, kind="bad", history_size=4),
    "auto": Auto(1e-8, 80),
}


@pytest.mark.parametrize(("size", "width"), [(1.0, 1), (1.0, 63), (1.0, 777), (1e-200, 6), (1e200, 6)])
@pytest.mark.parametrize("name", IN_HALVES)
def test_rows_that_are_parts_are_solved_jointly(emulated, name, size, width):
    """Also if squares over- or underflow; on one kernel, halves of a sample are judged and stepped as wholes."""
    is_emulated = (name, size) == ("anderson-I", 1e-200)  # which takes long; test_steps.py has the other methods
    assert_solved_jointly(IN_HALVES[name], size, width, ["torch", "cpp", *["cuda"] * is_emulated])


@pytest.mark.tier("full")
@pytest.mark.skipif(not INTERPRETED, reason="the state is on the CPU")
@pytest.mark.parametrize(("name", "size", "width"), [("anderson-I", 1.0, 63), ("picard", 1e200, 6)])
def test_rows_that_are_parts_are_solved_jointly_by_triton(name, size, width):
    """In few evaluations, as the interpreter is slow; the window of Anderson slides in them."""
    assert_solved_jointly(replace(IN_HALVES[name], max_iter=9), size, width, ["triton"])


def assert_solved_jointly(solver: Solver, size: float, width: int, kernels: list[str]) -> None:
    x, normal = torch.randn(5, 2 * width).double(), nn.functional.normalize(torch.randn(2 * width).double(), dim=0)
    x[1], x[3] = 0, x[3] * 1e3  # a sample that is at its fixed point, and a larger one

    def f(z: Tensor) -> Tensor:
        z = z / size
        mixed = 0.9 * (z.roll(1, 1) - 2 * (z.roll(1, 1) @ normal)[:, None] * normal)
        return torch.where(x[:, :1] == x[4, 0], torch.nan, torch.tanh(mixed) + 0.1 * z + x) * size

    def in_halves(z0: Tensor) -> Solution:
        solve = Solve(z0, replace(whole, state_group=Halves()))
        solve.kernel = Kernel(kernel, parts=Halves())
        return solve(lambda z: torch.cat(f(torch.cat(z.chunk(2), dim=1)).chunk(2, dim=1)), z0)

    whole = Options(solver=solver, kernel="torch", trace=True)
    expected, z0 = Solve(x, whole)(f, torch.zeros_like(x)), torch.zeros(10, width).double()
    assert expected.status.tolist()[4] == Status.NONFINITE
    for kernel in kernels:
        solution = in_halves(z0)
        for half in (slice(0, 5), slice(5, 10)):
            assert torch.equal(solution.status[half], expected.status), kernel
            assert torch.equal(solution.iterations[half], expected.iterations), kernel
        # Pairs in place of steps round otherwise.
        tolerance = 1e-12 if Kernel(kernel).has_broyden_step else 1e-10
        assert_close(torch.cat(solution.value.chunk(2), dim=1), expected.value, tolerance, kernel)
        assert_close(solution.trace[:, :5], expected.trace, 1e-6, kernel)
        with pytest.raises(ValueError, match="z0 must be finite; it is not in 2 of 10 samples: 0, 5"):
            in_halves(z0.index_fill(0, torch.tensor([5]), torch.nan))


@pytest.mark.parametrize("kernel", ["torch", "cpp", "cuda", *["triton"] * INTERPRETED])
def test_no_rows_are_stepped(emulated, kernel):
    for solver in IN_HALVES.values():
        state = solver.init(torch.zeros(0, 6), Kernel(kernel, parts=Halves()))
        for k in range(3):
            solver.advance(state, torch.zeros(0, 6), k, k == 2)
        assert not len(state.status)


class Reductions:
    """Count of the reductions of this process."""

    def __init__(self) -> None:
        self.count, self.all_reduce = 0, dist.all_reduce

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.count += 1
        return self.all_reduce(*given, **more)


def solved(block: DEQBlock, x: Tensor, gathered: Callable[[Tensor], Tensor]) -> tuple[list[Any], list[Any]]:
    """Statuses and iterations of both solves; value and gradients of the whole samples."""
    x = x.clone().requires_grad_()
    z, forward = block(x, return_solution=True)
    z.nan_to_num().square().sum().backward()
    solves = [solution for solution in (forward, block.backward_solution) if solution is not None]
    exact = [numbers for solution in solves for numbers in (solution.status, solution.iterations)]
    return exact, [gathered(z.detach()), gathered(x.grad), *(p.grad for p in block.parameters())]


def spread(rank: int, count: int, path: Path, names: list[str]) -> None:
    dist.all_reduce = reductions = Reductions()
    for name in names:
        dim, gain, solver, adjoint = SPREAD[name]
        x = torch.randn(6, POSITIONS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        x *= torch.linspace(0.1, 4, 6, dtype=torch.float64)[:, None, None]
        if name == "broken":
            x[2, 0, 0] = torch.nan
        whole = DEQBlock(Mixing(gain, None), solver, adjoint, kernel="torch", warn=False)
        parts = DEQBlock(Mixing(gain, dim), solver, adjoint, state_group=dist.group.WORLD, warn=False)
        with torch.no_grad():
            before = reductions.count
            evaluations = parts(shard(x, dim), return_solution=True)[1].evaluations
            made = reductions.count - before
        assert name in ("auto", "broken") or made == evaluations * (1 + (solver.norm == "max")) - (solver.norm == "max")
        exact, (value, *grads) = solved(whole, x, lambda t: t)
        exact_parts, (joined, *joined_grads) = solved(parts, shard(x, dim), lambda t, dim=dim: Gathered.apply(t, dim))
        for weight in joined_grads[1:]:
            dist.all_reduce(weight)
        assert all(map(torch.equal, exact_parts, exact)), name
        assert_close(joined, value, 1e-14, name)
        assert_close(joined_grads, grads, 1e-12, name)
    dist.all_reduce = reductions.all_reduce


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("count", "trained", "others"),
    [
        (2, [name for name in CASES if name not in ON_FOUR], [(spread, [*SPREAD]), (fail_on_a_rank,)]),
        (4, ON_FOUR, [(spread, ["anderson", "broyden-8"])]),
    ],
)
def test_processes_train_as_a_single_process_share_samples_and_end_together(tmp_path, count, trained, others):
    """The usual recipe; samples that are spread have a single status; an error or an interrupt of one ends all."""
    in_processes(run_in_a_group, count, tmp_path, [(train_together, trained), *others])
    assert_trained_as_a_single_process(tmp_path, trained)
