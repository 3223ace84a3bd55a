"""Captured solves. Without a GPU a graph is a recording of torch operations, which a replay repeats on their memory."""

from __future__ import annotations

import copy
import os
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from own_sums import LoopedFCCell
from solutions import SOLVERS, assert_same_solution
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deqfast
from deqfast.engine.loop import LateWatch, Watch
from deqfast.engine.runners import cuda_graph

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if GPU else "cpu"
some_solvers = pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])


class Recording(TorchDispatchMode):
    """A graph: the operations of a capture, with the memory of their arguments and results."""

    capturing: list[Recording] = []

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    def replay(self):
        for func, args, kwargs, results in self.calls:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for held, new in zip(pytree.tree_leaves(results), again, strict=True):
                if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)


refuse_waits = cuda_graph.refuse_waits  # which the recordings below leave out


class Condition:
    def __init__(self, active, graph):
        self.active, self.graph = active, graph

    def __call__(self):
        if int(self.active) > 0:
            self.graph.replay()


def record(work):
    graph = Recording()
    with graph:
        Recording.capturing.append(graph)
        work()
        Recording.capturing.pop()
    return graph


def record_condition(active, work):
    with torch.utils._python_dispatch._disable_current_modes():
        body = record(work)
    Recording.capturing[-1].calls.append((Condition(active, body), (), {}, None))


class Mark:
    """An event; `waits` counts those for any."""

    waits = 0

    def wait(self):
        Mark.waits += 1

    synchronize = wait


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Recorded graphs, for machines without a GPU."""
    if GPU:
        return
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_graph, "capture", lambda works: [record(work) for work in works])
    monkeypatch.setattr(cuda_graph, "if_running", record_condition)
    monkeypatch.setattr(cuda_graph, "aside", lambda work: work())
    monkeypatch.setattr(cuda_graph, "refuse_waits", lambda work: work())
    monkeypatch.setattr(cuda_graph, "mark", Mark)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node", None, raising=False)


@pytest.fixture(params=[True, "whole"])
def mode(request):
    if GPU and request.param == "whole" and not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        pytest.skip("this torch has no conditional graph nodes")
    return request.param


def blocks(solver, mode, **options):
    """The same block, captured and not."""
    torch.manual_seed(0)
    cell = LoopedFCCell(5, 12).to(DEVICE)
    return deqfast.DEQBlock(cell, solver, cuda_graph=mode, **options), deqfast.DEQBlock(cell, solver, **options)


def inputs(batch=4, seed=0):
    return torch.randn(batch, 5, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(actual, expected):
    """Compare everything except the calls of f, which depend on how often the host looks."""
    assert_same_solution(actual, expected, but=("evaluations", "sample_evaluations"))


@some_solvers
@pytest.mark.parametrize("every", [1, 3])
def test_the_solution_equals_the_loops(name, every, mode, monkeypatch):
    for watch in (Watch, LateWatch):
        monkeypatch.setattr(watch, "every", every)
    graphed, plain = blocks(SOLVERS[name](rtol=1e-4), mode, warn=False)
    for seed, z0 in enumerate((None, None, torch.randn(4, 12, device=DEVICE))):
        x = inputs(seed=seed)
        x[1] = torch.nan if z0 is not None else x[1]
        solutions = [block(x, z0, return_solution=True)[1] for block in (graphed, plain)]
        assert_same(*solutions)
        assert (solutions[0].status[1] == deqfast.Status.NONFINITE) == (z0 is not None)
        if not GPU:
            assert solutions[0].evaluations == solutions[1].evaluations
        assert solutions[0].sample_evaluations == 4 * solutions[0].evaluations
    assert len(graphed.graphs._captured) == 1


@pytest.mark.parametrize("adjoint", ["jfb", "implicit"])
def test_gradients_are_those_of_the_loop(adjoint, mode):
    grads = []
    for block in blocks("broyden", mode, adjoint=adjoint):
        x = inputs().requires_grad_()
        block(x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in block.cell.parameters())])
        block.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


CHANGES = {
    "in place": (lambda block: block.cell.weight.data.mul_(0.5), 1),
    "a parameter": (lambda block: setattr(block.cell, "weight", nn.Parameter(0.5 * block.cell.weight.detach())), 2),
    "the mode": (lambda block: block.eval(), 2),
    "the solver": (lambda block: setattr(block, "solver", deqfast.Anderson(rtol=1e-5)), 2),
    "the cell": (lambda block: setattr(block, "cell", LoopedFCCell(5, 12).to(DEVICE)), 2),
}


@pytest.mark.parametrize(("change", "captured"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_what_a_graph_cannot_know_is_captured_again(change, captured, mode):
    graphed, plain = blocks("anderson", mode)
    before = [block(inputs(), return_solution=True) for block in (graphed, plain)]
    change(graphed)
    plain.cell, plain.solver = graphed.cell, graphed.solver
    assert torch.equal(graphed(inputs(seed=1)), plain(inputs(seed=1)))
    assert len(graphed.graphs._captured) == captured
    (value, solution), (expected, of_the_loop) = before  # which outlive the next call
    assert torch.equal(value, expected)
    assert_same(solution, of_the_loop)


def test_the_number_of_graphs_is_bounded():
    graphed, plain = blocks("picard", True)
    for batch in range(1, cuda_graph.MAX_GRAPHS + 3):
        graphed(inputs(batch=batch))
    assert len(graphed.graphs._captured) == cuda_graph.MAX_GRAPHS
    assert torch.equal(graphed(inputs(batch=1)), plain(inputs(batch=1)))


@pytest.mark.parametrize(
    ("first", "then", "captured"),
    [(nullcontext, lambda: torch.autocast(DEVICE, torch.bfloat16), 2), (torch.inference_mode, nullcontext, 1)],
    ids=["autocast", "inference mode"],
)
def test_autocast_is_part_of_the_graph_and_inference_mode_is_not(first, then, captured, mode):
    graphed, plain = blocks("anderson", mode)
    with first():
        graphed(inputs())
    with then():
        for seed in (0, 1):
            assert_same(*(block(inputs(seed=seed), return_solution=True)[1] for block in (graphed, plain)))
    assert len(graphed.graphs._captured) == captured


def test_inputs_may_be_a_pytree():
    class Cell(nn.Module):
        def forward(self, z, x):
            return 0.5 * torch.tanh(z + x["a"]) + x["scale"]

    graphed, plain = (deqfast.DEQBlock(Cell(), init=lambda x: x["a"], cuda_graph=mode) for mode in (True, False))
    for x in ({"a": inputs(), "scale": 0.1}, {"a": inputs(seed=1), "scale": 0.1}, {"a": inputs(), "scale": 0.2}):
        assert torch.equal(graphed(x), plain(x))
    assert len(graphed.graphs._captured) == 2


def test_a_cell_that_waits_for_the_host_cannot_be_captured():
    class Waiting(nn.Module):
        def forward(self, z, x):
            return 0.5 * z if float(z.sum()) > 1e9 else 0.4 * z + x

    with pytest.raises(RuntimeError, match="cuda_graph: the solve cannot be captured: .*(waits|captur)"):
        deqfast.DEQBlock(Waiting(), cuda_graph=True)(inputs())


@pytest.mark.filterwarnings("ignore:called a synchronizing")  # the other thread's
def test_waits_are_found_by_the_warnings_of_this_thread(monkeypatch):
    """Other warnings, and those of other threads, are shown as they were, and the mode is as before in the end."""
    mode, ready = ["default"], "called a synchronizing CUDA operation"
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)

    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="another thing") as shown:
        refuse_waits(lambda: (warnings.warn("another thing", stacklevel=2), pool.submit(warnings.warn, ready).result()))
    assert [str(warning.message) for warning in shown] == ["another thing", ready]
    with pytest.raises(RuntimeError, match="the cell waits for the device"):
        refuse_waits(lambda: warnings.warn(ready, stacklevel=2))
    assert mode == ["default", "warn", "default", "warn", "default"]


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("refused", [True, False], ids=["before the capture", "in the capture"])
def test_a_failed_capture_leaves_no_trace(refused, monkeypatch):
    """The ordinary loop continues from there, on the previous stream, and others can be captured."""

    class Waiting(nn.Module):
        capturing_only = False

        def forward(self, z, x):
            if torch.cuda.is_current_stream_capturing() or not self.capturing_only:
                torch.cuda.current_stream().synchronize()
            return 0.4 * z + x

    if not refused:
        monkeypatch.setattr(Waiting, "capturing_only", True)
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="cuda_graph: the solve cannot be captured: "):
        deqfast.DEQBlock(Waiting(), cuda_graph=True)(inputs())
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    deqfast.DEQBlock(Waiting())(inputs())
    graphed, plain = blocks("anderson", True)
    assert torch.equal(graphed(inputs()), plain(inputs()))


def test_an_empty_batch(mode):
    solution = blocks("anderson", mode)[0](inputs(batch=0), return_solution=True)[1]
    assert solution.evaluations == 0 and solution.value.shape == (0, 12)


def test_a_cell_settles_before_a_solve_is_captured():
    class Scaled(nn.Module):
        """Divides by the scale of the injection of its first solve."""

        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), device=DEVICE))
            self.solves, self.seen = 0, None

        def forward(self, z, x):
            self.seen = x
            return 0.5 * torch.tanh(z) + x / self.scale

        def end_solve(self):
            if not self.has_settled():
                self.scale.copy_(self.seen.std())
            self.solves += 1

        def has_settled(self):
            return self.solves > 0

    graphed, plain = (deqfast.DEQBlock(Scaled(), "anderson", cuda_graph=mode) for mode in (True, False))
    for seed in range(3):
        x = 3 * inputs(seed=seed)
        assert torch.equal(graphed(x), plain(x))
        assert len(graphed.graphs._captured) == (seed > 0)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_graph, "DEVICE", "cuda")
    with pytest.raises(RuntimeError, match="cuda_graph needs tensors on a cuda device, got cpu"):
        deqfast.DEQBlock(deqfast.LinearCell(5), cuda_graph=True)(inputs())


def test_wrong_settings():
    with pytest.raises(ValueError, match="cuda_graph must be False, True or 'whole', got 'all'"):
        deqfast.DEQBlock(deqfast.LinearCell(5), cuda_graph="all")
    with pytest.raises(TypeError, match="cuda_graph needs a cell that is an nn.Module"):
        deqfast.DEQBlock(lambda z, x: z, cuda_graph=True)


def test_whole_needs_conditional_nodes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    with pytest.raises(RuntimeError, match="needs a torch with conditional nodes"):
        deqfast.DEQBlock(deqfast.LinearCell(5), cuda_graph="whole")


def test_threads_may_share_a_block(mode, monkeypatch):
    graphed, plain = blocks("anderson", mode)
    graphed(inputs())
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda graph: (time.sleep(0.01), replay(graph)))
    given, before = [inputs(seed=seed) for seed in range(4)], Mark.waits
    with ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(graphed, given), map(plain, given)))
    assert GPU or Mark.waits - before == 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_capture_for_themselves(duplicate):
    graphed, plain = blocks("anderson", True)
    graphed(inputs())
    other = duplicate(graphed)
    assert not other.graphs._captured and len(graphed.graphs._captured) == 1
    with torch.no_grad():
        other.cell.weight.zero_()
    assert torch.equal(graphed(inputs()), plain(inputs())) and not torch.equal(other(inputs()), plain(inputs()))
