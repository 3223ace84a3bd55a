"""Captured solves. Without a GPU a graph is a recording, see ``recorded``."""

from __future__ import annotations

import _thread
import copy
import pickle
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from op_calls import Operations
from own_sums import LoopedFCCell
from recorded import DEVICE, GPU, Graph, Mark, as_graphs, record  # noqa: F401  # a fixture for every test
from solutions import SOLVERS, assert_same_solution, some_solvers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deqfast
from deqfast.engine import device_loop
from deqfast.engine.runners import cuda_graph
from deqfast.torch_internals import graphs
from deqfast.torch_internals.graphs import refuse_draws

refuse_waits = cuda_graph.refuse_waits  # which the recordings leave out


def looped(size=12):
    return LoopedFCCell(5, size).to(DEVICE)


def blocks(solver, **options):
    """The same block, captured and not."""
    cell = looped()
    return deqfast.DEQBlock(cell, solver, cuda_graph=True, **options), deqfast.DEQBlock(cell, solver, **options)


def inputs(batch=4, seed=0):
    return torch.randn(batch, 5, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(actual, expected):
    """Compare everything except the calls of f, which the loop makes until it sees the end."""
    counted = ("evaluations", "sample_evaluations", "trace", "trace_rel", "trace_abs", "arriving")
    assert_same_solution(actual, expected, but=counted)


def assert_same_solves(pair, *inputs, captured=1):
    """Of a captured block and one that is not, for each x; and the number of captures so far."""
    for x in inputs:
        assert_same(*(block(x, return_solution=True)[1] for block in pair))
    assert len(pair[0].graphs._captured) == captured


def states():
    """z0 of different layouts: rows, images in two memory orders, complex numbers, a tree, short numbers."""
    image = torch.randn(4, 3, 2, 2, device=DEVICE)
    yield from (image.flatten(1), image, image.contiguous(memory_format=torch.channels_last), image.bfloat16())
    yield from (torch.complex(image, image), {"b": image, "a": image[:, 0].double()})


class Map(nn.Module):
    """Contracts each tensor of z towards x, by the fourth root of its slope for one sample."""

    def forward(self, z, x):
        slopes = torch.tensor([0.5, 0.7, 0.9, 0.3], device=DEVICE)
        return pytree.tree_map(lambda z, x: (slopes.view(-1, *[1] * (z.dim() - 1)) * z + x).to(z.dtype), z, x)


@some_solvers
@pytest.mark.parametrize("max_iter", [1, 2, 5, 20])
def test_the_solution_equals_the_loops(name, max_iter):
    graphed, plain = blocks(SOLVERS[name](rtol=1e-4, max_iter=max_iter), warn=False, trace=True)
    for seed, z0 in enumerate((None, None, torch.randn(4, 12, device=DEVICE))):
        x = inputs(seed=seed)
        x[1] = torch.nan if z0 is not None else x[1]
        solutions = [block(x, z0=z0, return_solution=True)[1] for block in (graphed, plain)]
        assert_same(*solutions)
        assert (solutions[0].status[1] == deqfast.Status.NONFINITE) == (z0 is not None)
        needed, made = int(solutions[0].iterations.max()), solutions[0].evaluations
        assert made == min(max_iter, needed + (needed + max_iter) % 2) and solutions[0].sample_evaluations == 4 * made
        for kind in ("trace", "trace_rel", "trace_abs"):
            assert torch.equal(getattr(solutions[0], kind)[:needed], getattr(solutions[1], kind)[:needed])
    assert len(graphed.graphs._captured) == 1


@pytest.mark.parametrize("solver", [deqfast.Anderson(history_size=3), deqfast.Broyden(rtol=1e-2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 2.0}, {"groups": True}], ids=str)
def test_states_of_any_layout(options, solver):
    groups = {"groups": deqfast.Groups(torch.tensor([0, 1, 1, 0], device=DEVICE))} if "groups" in options else {}
    for z0 in states():
        scale = {"scale": pytree.tree_map(lambda _: 2.0, z0)} if "scale" in options else {}
        pair = [deqfast.DEQBlock(Map(), solver, cuda_graph=graph, **groups, **scale) for graph in (True, False)]
        for shift in (0.1, 0.2):
            x = pytree.tree_map(lambda leaf, shift=shift: leaf + shift, z0)
            (value, solution), (expected, plain) = (block(x, z0=z0, return_solution=True) for block in pair)
            for a, b in zip(pytree.tree_leaves(value), pytree.tree_leaves(expected), strict=True):
                assert torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
                a.mul_(torch.ones((), device=DEVICE, requires_grad=True))  # it is an ordinary tensor
            assert_same(solution.changed(value=None), plain.changed(value=None))


BACKWARD = deqfast.Implicit(deqfast.Broyden(1e-5, max_iter=30, history_size=4))


@pytest.mark.parametrize("options", [{}, {"scale": 2.0}, {"groups": True}], ids=str)
@pytest.mark.parametrize(("adjoint", "captured"), [("jfb", 1), ("implicit", 2), (BACKWARD, 2)], ids=str)
def test_gradients_are_those_of_the_loop(adjoint, captured, options):
    """The backward solve of Implicit is captured too; a broken sample is left out of it."""
    if "groups" in options:
        options = {"groups": deqfast.Groups(torch.tensor([0, 1, 1, 2], device=DEVICE))}
    pair = blocks("broyden", adjoint=adjoint, warn=False, **options)
    for seed in range(3):
        grads, ended = [], []
        for block in pair:
            x = inputs(seed=seed)
            x[3] = torch.nan if seed == 2 else x[3]
            x.requires_grad_()
            block(x).square().sum().backward()
            grads.append([x.grad, *(p.grad.clone() for p in block.cell.parameters())])
            ended.append(block.backward_solution)
            block.zero_grad()
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))
        if captured == 2:
            assert_same(*ended)
    assert len(pair[0].graphs._captured) == captured


CHANGES = {
    "in place": (lambda block: block.cell.weight.data.mul_(0.5), 1),
    "a parameter": (lambda block: setattr(block.cell, "weight", nn.Parameter(0.5 * block.cell.weight.detach())), 2),
    "the mode": (lambda block: block.eval(), 2),
    "the solver": (lambda block: setattr(block, "solver", deqfast.Anderson(rtol=1e-5)), 2),
    "the cell": (lambda block: setattr(block, "cell", looped()), 2),
}


@pytest.mark.parametrize(("change", "captured"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_what_a_graph_cannot_know_is_captured_again(change, captured):
    graphed, plain = blocks("anderson")
    before = [block(inputs(), return_solution=True) for block in (graphed, plain)]
    change(graphed)
    plain.cell, plain.solver = graphed.cell, graphed.solver
    assert torch.equal(graphed(inputs(seed=1)), plain(inputs(seed=1)))
    assert len(graphed.graphs._captured) == captured
    assert torch.equal(*(value for value, _ in before))  # which outlive the next call
    assert_same(*(solution for _, solution in before))


def test_the_number_of_graphs_is_bounded():
    pair = blocks("picard")
    assert_same_solves(pair, inputs(batch=0), captured=0)
    most = cuda_graph.MAX_GRAPHS
    assert_same_solves(pair, *(inputs(batch=batch) for batch in range(1, most + 3)), inputs(batch=1), captured=most)


@pytest.mark.parametrize(
    ("first", "then", "captured"),
    [(nullcontext, lambda: torch.autocast(DEVICE, torch.bfloat16), 2), (torch.inference_mode, nullcontext, 1)],
    ids=["autocast", "inference mode"],
)
def test_autocast_is_part_of_the_graph_and_inference_mode_is_not(first, then, captured):
    pair = blocks("anderson")
    with first():
        pair[0](inputs())
    with then():
        assert_same_solves(pair, inputs(), inputs(seed=1), captured=captured)


class OfTree(nn.Module):
    """An x of a tensor and a number."""

    def forward(self, z, x):
        return 0.5 * torch.tanh(z + x["a"]) + x["scale"]

    def initial_state(self, x):
        return torch.zeros_like(x["a"])


@pytest.mark.parametrize("compiles", [False, True])
def test_inputs_may_be_a_pytree_and_a_cell_may_be_compiled(compiles):
    cell = torch.compile(OfTree(), backend="eager") if compiles else OfTree()
    pair = [deqfast.DEQBlock(cell, "anderson", cuda_graph=mode) for mode in (True, False)]
    given = (inputs(), 0.1), (inputs(seed=1), 0.1), (inputs(), 0.2)
    assert_same_solves(pair, *({"a": a, "scale": scale} for a, scale in given), captured=2)


@pytest.mark.parametrize("numbers", [torch.zeros, torch.rand])
def test_draws_of_compiled_functions_are_seen(numbers):
    draws = torch.compile(lambda: numbers(3, device=DEVICE) + 1, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="random") if numbers is torch.rand else nullcontext():
        refuse_draws(torch.device(DEVICE, 0) if GPU else torch.device("cpu"), draws)


def test_a_cell_that_waits_for_the_host_cannot_be_captured():
    class Waiting(nn.Module):
        def forward(self, z, x):
            return 0.5 * z if float(z.sum()) > 1e9 else 0.4 * z + x

    with pytest.raises(RuntimeError, match="cuda_graph: the solve cannot be captured: .*(waits|captur)"):
        deqfast.DEQBlock(Waiting(), cuda_graph=True)(inputs())


@pytest.mark.filterwarnings("ignore:called a synchronizing")  # the other thread's
def test_waits_are_seen_by_the_warnings_of_this_thread(monkeypatch):
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

    def in_a_thread_of_autograd():  # which Python has not started
        ended = threading.Event()
        _thread.start_new_thread(lambda: (warnings.warn(ready, stacklevel=2), ended.set()), ())
        ended.wait()

    with pytest.raises(RuntimeError, match=r"the cell waits for the device.*in .*test_graphs.py:.*start_new_thread"):
        refuse_waits(in_a_thread_of_autograd)
    monkeypatch.setattr(graphs, "_INSIDE", (*graphs._INSIDE, __file__))
    with pytest.warns(UserWarning, match=ready):  # shown, as only deqfast's own lines wait
        refuse_waits(in_a_thread_of_autograd)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("capturing_only", [False, True])
def test_a_failed_capture_leaves_no_trace(capturing_only):
    """The ordinary loop continues from there, on the previous stream, and others can be captured."""

    class Waiting(nn.Module):
        def forward(self, z, x):
            if torch.cuda.is_current_stream_capturing() or not capturing_only:
                torch.cuda.current_stream().synchronize()
            return 0.4 * z + x

    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="cuda_graph: the solve cannot be captured: "):
        deqfast.DEQBlock(Waiting(), cuda_graph=True)(inputs())
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    deqfast.DEQBlock(Waiting())(inputs())
    assert_same_solves(blocks("anderson"), inputs())


def test_a_cell_settles_before_a_solve_is_captured():
    class Scaled(nn.Module):
        """Divides by a scale that its first solve changes."""

        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), device=DEVICE))

        def forward(self, z, x):
            return 0.5 * torch.tanh(z) + x / self.scale

        def end_solve(self):
            self.scale.fill_(3.0)

        def has_settled(self):
            return bool(self.scale > 1)

    pair = [deqfast.DEQBlock(Scaled(), "anderson", cuda_graph=mode) for mode in (True, False)]
    for seed in range(3):
        assert_same_solves(pair, 3 * inputs(seed=seed), captured=int(seed > 0))


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_it_needs_a_gpu_and_deqfasts_kernels_or_a_new_torch(monkeypatch):
    monkeypatch.setattr(cuda_graph._extension, "cuda_module", None)
    monkeypatch.setattr(cuda_graph, "has_loops", lambda: False)
    monkeypatch.setattr(cuda_graph._extension, "cuda_reason", "nobody built them")
    with pytest.raises(RuntimeError, match="needs deqfast's CUDA kernels or torch 2.14: nobody built them"):
        blocks("picard")[0](inputs())
    monkeypatch.setattr(cuda_graph, "DEVICE", "cuda")
    with pytest.raises(RuntimeError, match="cuda_graph needs tensors on a cuda device, got cpu"):
        deqfast.DEQBlock(deqfast.LinearCell(5), cuda_graph=True)(inputs())


class Drawing(nn.Module):
    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def forward(self, z, x):
        return 0.5 * z + x * torch.rand(x.shape, device=DEVICE, generator=self.generator)


LINEAR = deqfast.LinearCell(5)


@pytest.mark.parametrize(
    ("cell", "options", "error", "match"),
    [
        (LINEAR, {"cuda_graph": "whole"}, ValueError, "cuda_graph must be one of False, True, got"),
        (lambda z, x: z, {}, TypeError, "cuda_graph needs a cell that is an nn.Module"),
        (LINEAR, {"solver": "auto"}, ValueError, "cuda_graph cannot be combined with Auto: its stages"),
        (LINEAR, {"adjoint": deqfast.Implicit("auto")}, ValueError, "Auto of the adjoint's solver, Auto"),
        (LINEAR, {"stop_fn": max}, ValueError, "combined with stop_fn: it would be asked on the host"),
        (LINEAR, {"drop_converged": True}, ValueError, "cannot be combined with drop_converged"),
        (LINEAR, {"groups": "batch"}, ValueError, "groups of a call: a graph .* make deqfast.Groups"),
        (LINEAR, {"kernel": "torch"}, RuntimeError, "cuda_graph needs kernel 'cuda' or 'triton'"),
        (Drawing(), {}, RuntimeError, "cannot be captured: the cell draws random numbers"),
        (Drawing(torch.Generator(DEVICE)), {}, RuntimeError, "cannot be captured: the cell draws random numbers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_refused(cell, options, error, match):
    with pytest.raises(error, match=match):
        deqfast.DEQBlock(cell, **{"cuda_graph": True, "warn": False, **options})(inputs())


@pytest.mark.parametrize("adjoint", ["jfb", deqfast.Implicit(deqfast.Anderson(1e-5, max_iter=9))], ids=str)
@pytest.mark.parametrize("has_loops", [True, False])
def test_a_block_in_somebody_elses_graph(has_loops, adjoint, monkeypatch):
    """The forward and the backward solve are captured; a replay equals an ordinary step, and nothing is read."""
    if GPU and has_loops and not device_loop.has_loops():
        pytest.skip("this torch has no loops in graphs")
    monkeypatch.setattr(device_loop, "has_loops", lambda: has_loops)
    blocks = [deqfast.DEQBlock(looped(5), deqfast.Anderson(1e-4, max_iter=15), adjoint) for _ in range(2)]
    blocks[0].load_state_dict(blocks[1].state_dict())
    x, results = inputs().requires_grad_(), []

    def step(block, x):
        value, solution = block(x, return_solution=True)
        return value, solution, torch.autograd.grad(value.square().sum(), [x, *block.parameters()])

    if GPU:
        cuda_graph.aside(lambda: step(blocks[0], x))
        (graph,) = cuda_graph.capture([lambda: results.append(step(blocks[0], x))])
    else:
        graph = record(lambda: results.append(step(blocks[0], x)))
    (value, solution, grads), made = results[0], 15
    for seed in (1, 2):
        given = inputs(seed=seed).requires_grad_()
        with torch.no_grad():
            x.copy_(given)
        graph.replay()
        expected, plain, wanted = step(blocks[1], given)
        assert torch.equal(value, expected) and all(map(torch.equal, grads, wanted))
        assert torch.equal(solution.iterations, plain.iterations)
    needed = int(solution.iterations.max())
    assert solution.evaluations == (needed + (needed + made) % 2 if has_loops else made)


class Storages(TorchDispatchMode):
    """Memory of the results of all operations."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        self.made += [StorageWeakRef(t.untyped_storage()) for t in tensors]
        return results


@pytest.mark.skipif(GPU, reason="looks at the memory of recorded operations")
@pytest.mark.parametrize("adjoint", ["jfb", "implicit"])
@some_solvers
def test_a_pass_frees_nothing_that_was_allocated_before_it(name, adjoint, monkeypatch):
    """Else torch could give this memory to other work, and the next pass of the loop would read that."""
    monkeypatch.setattr(cuda_graph._extension, "cuda_module", object())
    seen = []

    def capture(works, mode):
        with Storages() as storages:
            works[0]()
            before = [memory for memory in storages.made if not memory.expired()]
            works[1]()
        seen.append((len(before), [memory.expired() for memory in before], len(storages.made)))
        return [record(work) for work in works]

    monkeypatch.setattr(cuda_graph, "capture", capture)
    for max_iter in (5, 6, 60):
        solver = SOLVERS[name](rtol=1e-30, max_iter=max_iter, **{"history_size": 4} if name != "picard" else {})
        block = deqfast.DEQBlock(looped(5), solver, adjoint, cuda_graph=True, warn=False)
        block(inputs()).sum().backward()
    assert all(count and not any(freed) for count, freed, _ in seen)
    each = len(seen) // 3
    assert seen[each] == seen[2 * each]  # ten times as many evaluations take no more memory


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5).to(DEVICE)

    def forward(self, z, x):
        return torch.tanh(0.1 * self.linear(z) + x)


@pytest.mark.skipif(GPU, reason="counts recorded operations")
@torch.no_grad()
def test_what_a_replay_costs(monkeypatch):
    """At most 8 submissions: launches, kernels, copies, events. At most 60 calls, of which two come on a GPU only."""
    monkeypatch.setattr("deqfast.api.notice.is_late", lambda status: True)
    monkeypatch.setattr(deqfast.Solution, "counts", None)
    graphed, calls = deqfast.DEQBlock(Plain(), "picard", cuda_graph=True).eval(), []
    for _ in range(2):
        graphed(inputs())
    (captured,) = graphed.graphs._captured
    launch, x, operations = captured.launch, inputs(seed=1), Operations()

    def launch_aside(stream):
        watch = sys.getprofile()
        sys.setprofile(None)
        with torch.utils._python_dispatch._disable_current_modes():
            launch(stream)
        operations.names.append("launch")
        sys.setprofile(watch)

    monkeypatch.setattr(captured, "launch", launch_aside)
    monkeypatch.setattr(Mark, "__init__", lambda event: operations.names.append("event"))
    monkeypatch.setattr(Mark, "wait", lambda event: operations.names.append("wait"))
    with operations:
        graphed(x)
    free = {"view", "detach", "unbind", "empty", "empty_like", "set_"}  # which allocate, or return a view
    submitted = [name for name in operations.names if name not in free]
    assert len(submitted) <= 8, submitted
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    graphed(x)
    sys.setprofile(None)
    assert len(calls) <= 60 - 2, calls


@pytest.mark.skipif(GPU, reason="there events arrive by themselves")
def test_a_start_that_is_not_finite_raises_when_a_number_is_read_or_in_a_later_call(monkeypatch):
    graphed, z0 = blocks("anderson", warn=False)[0], torch.zeros(4, 12)
    z0[2] = torch.inf
    monkeypatch.setattr(Mark, "arrived", False)
    solution = graphed(inputs(), z0=z0, return_solution=True)[1]
    assert solution.status.tolist()[2] == deqfast.Status.NONFINITE
    with pytest.raises(ValueError, match="z0 must be finite; it is not in 1 of 4 samples: 2"):
        _ = solution.evaluations
    graphed(inputs(), z0=z0)
    graphed(inputs())  # nothing has arrived
    monkeypatch.setattr(Mark, "arrived", True)
    with pytest.raises(ValueError, match="z0 must be finite; it is not in 1 of 4 samples: 2"):
        graphed(inputs())
    graphed(inputs())


def test_threads_may_share_a_block(monkeypatch):
    graphed, plain = blocks("anderson")
    graphed(inputs())
    run = Graph.run
    monkeypatch.setattr(Graph, "run", lambda graph: (time.sleep(0.01), run(graph)))
    if not GPU:
        monkeypatch.setattr(cuda_graph, "raw_stream", lambda device: threading.get_ident())
    given, before = [inputs(seed=seed) for seed in range(4)], Mark.waits
    with ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(graphed, given), map(plain, given)))
    assert GPU or Mark.waits > before  # one stream for the other


@pytest.mark.skipif(GPU, reason="a recording has no device")
def test_events_and_launches_are_those_of_the_device_of_the_block(monkeypatch):
    """torch asks the current device for its stream, and another one may be current."""
    present, seen = [], []

    @contextmanager
    def current(device):
        present.append(device)
        yield
        present.pop()

    def noted(function):
        return lambda *args: (seen.append((function.__name__, len(present))), function(*args))[1]

    graphed, addresses = blocks("anderson")[0], iter([0, 0, 1])
    monkeypatch.setattr(cuda_graph, "current", current)
    monkeypatch.setattr(cuda_graph, "raw_stream", lambda device: next(addresses))
    monkeypatch.setattr(cuda_graph, "mark", noted(cuda_graph.mark))
    for place, function in ((Mark, "wait"), (Graph, "run")):
        monkeypatch.setattr(place, function, noted(getattr(place, function)))
    for seed in range(3):
        graphed(inputs(seed=seed))
    assert {name for name, _ in seen} == {"Mark", "wait", "run"} and all(depth == 1 for _, depth in seen)


def test_a_device_that_is_current_needs_no_context(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: device)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    assert [graphs.current(device) in devices for device in devices] == [True, False, False]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_capture_for_themselves(duplicate):
    graphed, plain = blocks("anderson")
    graphed(inputs())
    other = duplicate(graphed)
    assert not other.graphs._captured and len(graphed.graphs._captured) == 1
    with torch.no_grad():
        other.cell.weight.zero_()
    assert torch.equal(graphed(inputs()), plain(inputs())) and not torch.equal(other(inputs()), plain(inputs()))


@pytest.mark.filterwarnings("error:.*may not alias")
def test_a_compiled_model_gets_results_in_memory_of_their_own():
    """All results of a replay are in one block of memory; those of an operator may not share any."""
    graphed, plain = blocks(SOLVERS["picard"](), warn=False)
    compiled = torch.compile(lambda x: graphed(x, return_solution=True), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        (value, solution), expected = compiled(inputs(seed=seed)), plain(inputs(seed=seed), return_solution=True)[1]
        assert torch.equal(value, expected.value) and torch.equal(solution.iterations, expected.iterations)
    assert len(graphed.graphs._captured) == 1
