"""CUDA graphs of forward solves: f and the steps of the solver are captured once and replayed without Python.

A graph holds the iterations between two looks at the number of running samples. The host replays it repeatedly, and
reads that number one replay late. With "whole", one graph holds all iterations. Each then runs only if a condition on
the device is met. The host waits only twice: to check that z0 is finite, and to count the evaluations. (There is no
while loop, because the number of an iteration is an argument of its kernels.)

A capture fixes the memory of parameters and inputs, the kernels, and every choice that Python makes. Inputs are
therefore copied into the graph's memory. A solve is captured again if the cell, shapes, dtypes, the memory of
parameters and buffers, training flags, solver, autocast or the precision of float32 products change. Tensors that the
cell keeps elsewhere must stay at their addresses.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...solution import Solution
from ...solvers import Auto, MixedAnderson
from ...solvers.base import State
from ...state.packing import Packing
from ...torch_internals import pytree
from ...torch_internals.weights import check_not_cached
from ..loop import iterate, watch_of, whole
from ..refusals import Refusals, check_served
from ..solve import Options, Solve, check_finite

# Each holds the memory of a solve. A training run needs two or three: full batches, the last batch, evaluation.
MAX_GRAPHS = 8
_REPLAYS = "a graph replays the same work"
REFUSES: Refusals = {
    "drop_converged": _REPLAYS,
    "trace": _REPLAYS,
    "stop_fn": _REPLAYS,
    "groups": "groups may change from call to call, and a graph replays the same work",
    "scale": "it is not captured",
    "lockstep": "a replay asks no other process",
    MixedAnderson: "its mixing_fn is not captured",
    Auto: "its stages depend on values",
    "begin_solve": "it prepares every solve in Python, and a replay would not run it",
}
DEVICE = "cuda"  # the only type of device with graphs


class Graphs:
    """Captured solves of a block.

    Args:
        cell: the block's cell.
        mode: True (a graph for the iterations between two looks) or "whole".

    Raises:
        ValueError: another mode, or a cell with ``begin_solve`` methods, whose effect a replay would not repeat.
        TypeError: the cell is not a module, so that its parameters are unknown.
        RuntimeError: the mode is "whole", and torch has no conditional nodes.
    """

    def __init__(self, cell: Callable[[Any, Any], Any], mode: bool | str):
        if mode not in (True, "whole"):
            raise ValueError(f"cuda_graph must be False, True or 'whole', got {mode!r}")
        self._begin(mode == "whole")
        if self.whole and not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
            raise RuntimeError(f"cuda_graph='whole' needs a torch with conditional nodes, got {torch.__version__}")
        _check_cell(cell)

    def _begin(self, whole: bool) -> None:
        self.whole = whole
        self._captured: OrderedDict[Any, Captured] = OrderedDict()
        self._alone = threading.RLock()  # a graph has one memory: one thread at a time

    def solve(self, cell: Any, x: Any, z0: Any, options: Options) -> Solution:
        """Solve as ``deqfast.solve`` for f = cell(., x); RuntimeError with the reason if f cannot be captured."""
        _check_cell(cell)
        check_not_cached(cell)
        solve = Solve(z0, options)
        packing = solve.packing
        if packing.device.type != DEVICE:
            raise RuntimeError(f"cuda_graph needs tensors on a {DEVICE} device, got {packing.device}")
        if not packing.batch or not _is_ready(cell):
            return solve(lambda z: cell(z, x), z0)
        with self._alone, torch.inference_mode(False), torch.no_grad(), current(packing.device):
            key = self._key(cell, x, packing, options)
            if (captured := self._captured.get(key)) is not None:
                self._captured.move_to_end(key)
                return captured.replay(x, check_finite(packing.pack(z0)))
            while len(self._captured) >= MAX_GRAPHS:
                self._captured.popitem(last=False)[1].finished.synchronize()
            captured = Captured(cell, x, solve, solve.begin(z0), self.whole)
            self._captured[key] = captured
            return captured.replay(x, captured.start)

    def _key(self, cell: nn.Module, x: Any, packing: Packing, options: Options) -> Any:
        leaves, spec = pytree.tree_flatten(x)
        inputs = tuple(_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        tensors = tuple((_layout(t), t.data_ptr()) for t in (*cell.parameters(), *cell.buffers()))
        training = tuple(module.training for module in cell.modules())
        autocast = torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE)
        precision = autocast, packing.products_eps
        solver, kernel = options.solver, options.kernel
        state = packing.batch, packing.signature()
        return cell, str(spec), inputs, state, solver, kernel, precision, training, tensors

    def __getstate__(self) -> dict[str, Any]:
        """State without the graphs, which live on one device in one process, and their lock."""
        return {"whole": self.whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["whole"])


class Captured:
    """Captured solve of cell(., x) from `start` (B, D), with its memory. It runs once without capture before."""

    def __init__(self, cell: Callable[[Any, Any], Any], x: Any, solve: Solve, state: State, whole: bool) -> None:
        leaves, spec = pytree.tree_flatten(x)
        # Memory from which f reads the leaves of x; replays read z0 from `start`.
        self.inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.start = state.z.clone()
        fixed_x = pytree.tree_unflatten(self.inputs, spec)
        self.f = lambda z: cell(z, fixed_x)
        self.solve, self.state, self.every = solve, state, watch_of(state.active).every
        self.whole = whole  # one graph for all iterations, instead of one for those between two looks
        self.finished = mark()  # event after all work in this memory, for which another stream must wait
        # Casts that autocast has kept could be those of older parameters.
        dtype, enabled = torch.get_autocast_dtype(DEVICE), torch.is_autocast_enabled(DEVICE)
        with torch.autocast(DEVICE, dtype=dtype, enabled=enabled, cache_enabled=False):
            try:
                # Whatever compiles, loads or allocates at its first use does so now, before host waits are detected.
                warm_up = functools.partial(aside, lambda: self._begin()(0, solve.max_iter))
                warm_up()
                refuse_waits(warm_up)
                self.graphs = self._capture()
            except RuntimeError as error:
                raise RuntimeError(f"cuda_graph: the solve cannot be captured: {error}") from error

    def _begin(self) -> Callable[[int, int], int | None]:
        """Queue the beginning of a solve; return the function that runs iterations."""
        self.state.restart(self.start)
        return self.solve.body(whole(self.f, self.solve.packing, self.state), self.state)

    def _capture(self) -> list[Any]:
        last, every = self.solve.max_iter, self.every
        chunks = [(first, min(first + every, last)) for first in range(0, last, every)]
        advance: Callable[[int, int], int | None]

        def chunk(first: int, until: int) -> None:
            nonlocal advance
            if first == 0:
                advance = self._begin()
            advance(first, until)

        def everything() -> None:
            chunk(*chunks[0])
            for bounds in chunks[1:]:
                if_running(self.state.active, functools.partial(chunk, *bounds))

        return capture([everything] if self.whole else [functools.partial(chunk, *bounds) for bounds in chunks])

    def replay(self, x: Any, start: Tensor) -> Solution:
        """Solve from `start` with the values of x."""
        self.finished.wait()
        for fixed, leaf in zip(self.inputs, pytree.tree_leaves(x), strict=True):
            if isinstance(fixed, Tensor):
                fixed.copy_(leaf)
        self.start.copy_(start)
        if self.whole:
            self.graphs[0].replay()
            evaluations = self._evaluations()
        else:
            watch = watch_of(self.state.active)
            evaluations = iterate(self._replay_chunk, self.solve.max_iter, watch)
        state = self.state.copy_of_results()
        self.finished = mark()
        return self.solve.end(state, evaluations, evaluations * self.solve.packing.batch)

    def _replay_chunk(self, first: int, until: int) -> None:
        self.graphs[first // self.every].replay()

    def _evaluations(self) -> int:
        """Calls of f by a graph of all iterations, which are the iterations of the slowest sample."""
        furthest = int(self.state.iterations.max())
        return min(-(-furthest // self.every) * self.every, self.solve.max_iter)


def _check_cell(cell: Any) -> None:
    if not isinstance(cell, nn.Module):
        raise TypeError(f"cuda_graph needs a cell that is an nn.Module, whose parameters are known, got {cell!r}")
    for name, module in cell.named_modules():
        if hasattr(module, "begin_solve"):
            of = f" of the cell's {name or 'own'} {type(module).__name__}"
            check_served("cuda_graph", REFUSES, ["begin_solve"], of)


def _is_ready(cell: nn.Module) -> bool:
    """Return whether no submodule will change between solves any more, by its `has_settled`."""
    checks = [getattr(module, "has_settled", None) for module in cell.modules()]
    return all(check() for check in checks if check is not None)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def aside(work: Callable[[], object]) -> None:
    """Run `work` on a stream of its own, which torch requires before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def refuse_waits(work: Callable[[], object]) -> None:
    """Run `work`; RuntimeError if the host waits for the device in it, which would break a capture.

    A broken capture cannot always be undone: torch 2.11 and 2.12 refuse every later one.
    """
    mode, thread, waits = torch.cuda.get_sync_debug_mode(), threading.get_ident(), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def note(message: Warning | str, *where: Any, **more: Any) -> None:
            if threading.get_ident() == thread and "synchronizing CUDA operation" in str(message):
                waits.append(message)
            elif "Synchronization debug mode is a prototype" not in str(message):  # torch's note on the mode itself
                show(message, *where, **more)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise RuntimeError("the cell waits for the device, for instance by .item() or a shape that depends on values")


def mark() -> Any:
    """Event after all work that the current stream has queued."""
    return torch.cuda.current_stream().record_event()


def capture(works: Sequence[Callable[[], None]]) -> list[Any]:
    """Graphs of the work that each of `works` queues; they share their temporary memory.

    After any error the thread leaves the stream of the captures. (``torch.cuda.graph`` stays on it.)
    """
    graphs = [torch.cuda.CUDAGraph() for _ in works]
    pool = torch.cuda.graph_pool_handle()

    def capture_all() -> None:
        for graph, work in zip(graphs, works, strict=True):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it reports only that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()

    aside(capture_all)
    return graphs


def if_running(active: Tensor, work: Callable[[], None]) -> None:
    """Capture `work`, to run only if samples are running at the replay."""
    graphs: Any = torch.cuda.CUDAGraph  # conditional nodes, which some supported versions of torch lack
    graph = graphs.get_currently_capturing_graph()
    graph.begin_capture_to_if_node((active > 0).squeeze())
    try:
        work()
    finally:
        graph.end_capture_to_conditional_node()
