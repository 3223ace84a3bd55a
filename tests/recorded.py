"""CUDA graphs without a GPU: recordings of torch operations, which a replay repeats on their memory.

They show which work a graph has, and what is baked into it. They cannot show hazards of memory that a graph uses again,
of streams, of threads (the backward pass runs in the thread of the test), or of kernels.
"""

from __future__ import annotations

import os
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deqfast.api import graphed_step
from deqfast.engine import device_loop, loop
from deqfast.engine.device_loop import has_loops
from deqfast.engine.runners import cuda_graph
from deqfast.gradients import linear
from deqfast.solution import Solution
from deqfast.state.rows import known_finite
from deqfast.torch_internals import graphs

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if GPU else "cpu"


counts_of = Solution.counts.func


class Graph:
    """A ``CUDAGraph``: the operations of a capture, with the memory of their arguments and results.

    Attributes:
        present: the one that is being captured.
        launches: replays by the host so far.
    """

    present: Graph | None = None
    launches = 0

    def __init__(self, keep_graph=True):
        self.calls = []

    def capture_begin(self, pool=None, capture_error_mode=None):
        assert Graph.present is None
        Graph.present = self

    def capture_end(self):
        Graph.present = None

    def replay(self):
        Graph.launches += 1
        self.run()

    @torch.no_grad()
    def run(self):
        for func, args, kwargs, results in self.calls:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for held, new in zip(pytree.tree_leaves(results), again, strict=True):
                if isinstance(held, torch.Tensor):
                    held, new = (t if t.layout == torch.strided else t.values() for t in (held, new))
                    if held.data_ptr() != new.data_ptr():
                        held.copy_(new)


class Recorder(TorchDispatchMode):
    """Adds each operation to the present graph. It stays while parts change, since autograd restores earlier modes.

    A device executes nothing of a capture. So memory and generator are as before in the end.
    """

    def __init__(self):
        super().__init__()
        self.before, self.state = [], torch.get_rng_state()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        graph = Graph.present
        if graph is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        name = func.overloadpacket.__name__
        if (func._schema.is_mutable and "set_" not in name) or "batch_norm" in name:  # whose schema hides statistics
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.before += [(t, t.clone()) for t in tensors]
        results = func(*args, **(kwargs or {}))
        graph.calls.append((func, args, kwargs or {}, results))
        return results

    def undo(self):
        for tensor, value in reversed(self.before):
            with torch.no_grad():
                tensor.copy_(value)
        if self.before:
            torch.set_rng_state(self.state)


def aside(work, stream=None):
    with Recorder() as recorder:
        try:
            work()
        finally:
            Graph.present = None
    recorder.undo()


class Reads(TorchDispatchMode):
    """Notes reads of the host, except by the loop of a solve, which on a GPU reads what has arrived before."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [frame for frame, _ in traceback.walk_stack(None)]
            if all(frame.f_code.co_filename != loop.__file__ for frame in frames):
                self.lines.append(graphs.line_in(frames[0]))
        return func(*args, **(kwargs or {}))


def refuse_waits(work, who="the cell"):
    graphs.unread.is_on = True
    try:
        with Reads() as reads:
            work()
    finally:
        graphs.unread.is_on = False
    if reads.lines:
        raise RuntimeError(f"{who} waits for the device, in {reads.lines[0]}")


def record(work):
    def captured():
        graph.capture_begin()
        work()

    graph = Graph()
    aside(captured)
    return graph


class Loop:
    """Passes that are repeated as a device does."""

    def __init__(self, body, active, passes, most):
        self.body, self.active, self.passes, self.most = body, active, passes, most

    def __call__(self):
        while int(self.active) > 0 and int(self.passes) < self.most:
            self.body()


def record_loop(loop, passes):
    """As torch's own loop in a graph, which counts its passes itself."""
    outer, graph = Graph.present, Graph()
    Graph.present = graph
    loop.body()
    passes.add_(1)
    Graph.present = outer
    outer.calls.append((Loop(graph.run, loop.state.active, passes, loop.most), (), {}, None))


def join(parts, loops):
    """As csrc/cuda/while_graph.h."""

    def launch(stream):
        Graph.launches += 1
        for i, graph in enumerate(parts):
            if i % 2:
                loop = loops[i // 2]
                loop.passes.zero_()
                Loop(lambda g=graph, n=loop.passes: (g.run(), n.add_(1)), loop.active, loop.passes, loop.most)()
            else:
                graph.run()

    return launch


class Mark:
    """An event; `waits` counts those for any."""

    waits, arrived = 0, True

    def wait(self):
        Mark.waits += 1

    synchronize = wait

    def query(self):
        return Mark.arrived


@pytest.fixture(autouse=True, params=["joined", "torch's loop"])
def as_graphs(request, monkeypatch):
    """Recorded graphs, for machines without a GPU, joined by deqfast or with torch's loops."""
    joins = request.param == "joined"
    if GPU:
        if not joins and not has_loops():
            pytest.skip("this torch has no loops in graphs")
        if joins:
            monkeypatch.setattr(graphed_step, "has_loops", lambda: False)
        else:
            monkeypatch.setattr(cuda_graph._extension, "cuda_module", None)
        return joins
    for module in (cuda_graph, device_loop, graphed_step):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        if module is not device_loop:
            monkeypatch.setattr(module, "aside", aside)
            monkeypatch.setattr(module, "join", join)
            monkeypatch.setattr(module, "refuse_waits", refuse_waits)
            monkeypatch.setattr(module, "mark", Mark)
            monkeypatch.setattr(module, "raw_stream", lambda device: 0)
    monkeypatch.setattr("deqfast.engine.solve.DEVICE", "cpu")
    monkeypatch.setattr(graphs, "aside", aside)
    monkeypatch.setattr(graphs, "_INSIDE", (*graphs._INSIDE, __file__))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    for module in (cuda_graph, device_loop):
        monkeypatch.setattr(module, "has_loops", lambda: True)
        monkeypatch.setattr(module, "capture_loop", record_loop)
    monkeypatch.setattr(graphed_step, "has_loops", lambda: not joins)
    monkeypatch.setattr(cuda_graph._extension, "cuda_module", object() if joins else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.present is not None)

    def is_unread():  # as on a GPU
        return Graph.present is not None or graphs.unread.is_on

    monkeypatch.setattr("deqfast.api.notice.is_late", lambda status: is_unread())
    monkeypatch.setattr(linear, "known_finite", lambda tensor: not is_unread() and known_finite(tensor))
    monkeypatch.setattr(Solution, "counts", property(lambda solution: None if is_unread() else counts_of(solution)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(record_event=Mark))
    monkeypatch.setattr(Mark, "arrived", True)
    return joins
