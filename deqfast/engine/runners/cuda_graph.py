"""CUDA graphs of solves: z0's check, the cell, the steps of the solver and the loop around them are one launch.

The beginning, a pass of the loop and the end are captured, and joined to a graph whose loop the device ends
(csrc/cuda/while_graph.h). Without deqfast's CUDA kernels, torch's own loop in a graph serves, if this torch has one.
The host waits for nothing: numbers of a Solution, and the error for a z0 that is not finite, come when they are read,
or in a later call.

A capture fixes the memory of parameters and inputs, the kernels, and every choice that Python makes. Inputs are
therefore copied into the graph's memory. A solve is captured again if the cell, shapes, dtypes, the memory of
parameters and buffers, training flags, options, autocast or the precision of float32 products change. Tensors that the
cell keeps elsewhere must stay at their addresses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _extension
from ...solution import CODES, Arriving, Late, Solution
from ...solvers.base import State
from ...torch_internals import pytree
from ...torch_internals.graphs import aside, capture, current, mark, raw_stream, refuse_draws, refuse_waits
from ...torch_internals.weights import NOTHING, is_cached
from ..device_loop import DEVICE, EACH, DeviceLoop, Loop, capture_loop, has_loops
from ..device_loop import REFUSES as _LOOP_REFUSES
from ..refusals import Refusals, check_served
from ..solve import Solve, not_finite, solution_of

# Each holds the memory of a solve. A training run needs two or three: full batches, the last batch, evaluation.
MAX_GRAPHS = 8
REFUSES: Refusals = {
    **_LOOP_REFUSES,
    "groups of a call": "a graph replays the same rows: make deqfast.Groups once, and give it to the block",
    "begin_solve": "it prepares every solve in Python, and a replay would not run it",
}
ALIGNMENT = 256  # bytes, as of torch's own tensors


Bind = Callable[[Any, Any, Any], Callable[[Any], Any]]
"""(cell, x, z0) -> f, in the memory of a graph; it is called before the first evaluation of each solve."""


def forward(cell: Callable[[Any, Any], Any], x: Any, z0: Any) -> Callable[[Any], Any]:
    """The function f = cell(., x)."""
    return lambda z: cell(z, x)


class Graphs:
    """Captured solves of a block with this cell.

    Raises:
        ValueError: a cell with ``begin_solve`` methods, whose effect a replay would not repeat.
        TypeError: the cell is not a module, so that its parameters are unknown.
    """

    def __init__(self, cell: Callable[[Any, Any], Any]):
        _check_cell(cell)
        self._begin()

    def _begin(self) -> None:
        self._captured: list[Captured] = []  # the latest first
        self._pending: deque[Outcome] = deque()
        self._alone = threading.RLock()  # a graph has one memory: one thread at a time

    def solve(
        self, solve: Solve, cell: Any, x: Any, z0: Any, ordinary: Callable[[], Solution], bind: Bind = forward
    ) -> Solution:
        """Solve from z0 as ``deqfast.solve`` for f = bind(cell, x, z0); `ordinary` does so without a graph.

        Raises:
            RuntimeError: the solve cannot be captured, with the reason.
            ValueError: z0 of this or an earlier call is not finite, as ``deqfast.solve`` says.
        """
        if is_cached(cell):  # a graph would never see an update
            raise RuntimeError(
                "cuda_graph cannot be used under parametrize.cached() with a cell of parametrised weights"
            )
        packing = solve.packing
        if packing.device.type != DEVICE:
            raise RuntimeError(f"cuda_graph needs tensors on a {DEVICE} device, got {packing.device}")
        if not packing.batch or torch.cuda.is_current_stream_capturing():
            return ordinary()
        key = cell, solve, bind, _layout(x)
        with self._alone, torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING:
            if (solution := self.replay(key, x, z0)) is not None:
                return solution
            _check_cell(cell)
            # A cell whose end_solve reports on a backward solve would report on its capture too.
            if not is_settled(cell) or (bind is not forward and _has_any(cell, "end_solve")):
                return ordinary()
            while len(self._captured) >= MAX_GRAPHS:
                self._captured.pop().finished.synchronize()
            self._captured.insert(0, Captured(key, x, z0))
            solution = self.replay(key, x, z0)
            assert solution is not None
            return solution

    def replay_only(self, solve: Solve, cell: Any, x: Any, z0: Any) -> Solution | None:
        """``solve`` of a block that only needs the Solution; None if it is not captured, or the cell has hooks."""
        if torch.is_inference_mode_enabled() or torch.cuda.is_current_stream_capturing():
            return None
        with self._alone:
            return self.replay((cell, solve, forward, _layout(x)), x, z0, True)

    def replay(self, key: Any, x: Any, z0: Any, is_only: bool = False) -> Solution | None:
        """Solution of the captured solve with this key; None if there is none."""
        pending, all_captured = self._pending, self._captured
        while pending and pending[0].has_arrived():
            pending.popleft().check()
        for i, captured in enumerate(all_captured):
            if captured.key == key and captured.snapshot.holds():
                if is_only and captured.snapshot.has_hooks:
                    return None
                all_captured.insert(0, all_captured.pop(i))
                solution, outcome = captured.replay(x, z0)
                pending.append(outcome)
                return solution
        return None

    def __getstate__(self) -> dict[str, Any]:
        """State without the graphs, which live on one device in one process, and their lock."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()


class Captured:
    """Captured solve of a `key` (cell, solve, bind, layout of x), which runs once before it is captured.

    `finished` is the event after all work in its memory, for which another stream must wait.
    """

    def __init__(self, key: tuple[nn.Module, Solve, Bind, Any], x: Any, z0: Any) -> None:
        self.key = key
        cell, solve, bind, _ = key
        self.solve, self.snapshot = solve, Snapshot(cell)
        spec, self.device = pytree.tree_structure(x), solve.packing.device
        self.memory = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(x)]
        self.x = pytree.tree_unflatten(self.memory, spec)
        start = [leaf.detach().clone() for leaf in pytree.tree_leaves(z0)]
        self.memory += start
        self.start = start[0] if solve.packing.is_tensor else pytree.tree_unflatten(start, solve.packing.spec)
        self.has_two = isinstance(x, Tensor) and isinstance(z0, Tensor)  # as usual, for which no tree is flattened
        dtype, enabled = torch.get_autocast_dtype(DEVICE), torch.is_autocast_enabled(DEVICE)
        # Casts that autocast has kept could be those of older parameters.
        with (
            torch.no_grad(),
            current(self.device),
            torch.autocast(DEVICE, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            state = solve.start(solve.packing.pack(self.start))
            self.results = Results(state, solve)
            self.state = self.results.own(state)
            self.loop = self._loop()
            try:
                # Whatever compiles, loads or allocates at its first use does so now, before waits are detected.
                aside(self._once)
                refuse_waits(lambda: aside(self._once))
                refuse_draws(self.device, lambda: aside(self._once))
                self.launch = self._capture()
            except RuntimeError as error:
                raise RuntimeError(f"cuda_graph: the solve cannot be captured: {error}") from error
            self.finished = mark()
        self.address: int | None = None  # of the latest stream

    def _loop(self) -> DeviceLoop:
        cell, solve, bind, _ = self.key
        return solve.device_loop(bind(cell, self.x, self.start), self.state, "cuda_graph")

    def _begin(self) -> None:
        rows = self.solve.packing.pack(self.start)
        self.results.begin(rows)
        self.state.restart(rows)
        self.loop = self._loop()
        self.loop.begin()

    def _body(self) -> None:
        self.loop.body()

    def _end(self) -> None:
        self.results.end(self.state)

    def _once(self) -> None:
        self._begin()
        if self.loop.most:
            self._body()
        self._end()

    def _capture(self) -> Callable[[int], None]:
        """Return the function that launches the solve on a stream."""
        # Backward solves run in a thread of autograd, whose other work must not end a capture.
        loop, passes, mode = self.loop, self.results.passes, "thread_local" if self.key[2] is forward else "relaxed"
        if _extension.cuda_module is not None and loop.most:
            return join(capture([self._begin, self._body, self._end], mode), [Loop(loop, passes)])

        def whole_solve() -> None:
            self._begin()
            if self.loop.most:
                capture_loop(self.loop, passes)
            self._end()

        if loop.most and not has_loops():
            why = _extension.cuda_reason
            raise RuntimeError(f"a loop on the device needs deqfast's CUDA kernels or torch 2.14: {why}")
        (graph,) = capture([whole_solve], mode)
        return lambda stream: graph.replay()

    def replay(self, x: Any, z0: Any) -> tuple[Solution, Outcome]:
        """Solve from z0 with the values of x."""
        with current(self.device):
            address = raw_stream(self.device)
            if address != self.address:
                self.finished.wait()
                self.address, self.stream = address, torch.cuda.current_stream(self.device)
            leaves = [x, z0] if self.has_two else pytree.tree_leaves(x) + pytree.tree_leaves(z0)
            for memory, leaf in zip(self.memory, leaves, strict=True):
                if isinstance(memory, Tensor):
                    memory.copy_(leaf.detach())
            self.launch(address)
            outcome = Outcome(self.results, self.loop.first, self.stream)
        self.finished = outcome.event
        return outcome.solution(self.solve), outcome


class Memory:
    """Memory of all results of a graph, which one operation copies for a caller that keeps them.

    `memory` has its bytes. like: tensors without gaps that say what it has, by name.
    """

    def __init__(self, like: dict[Any, Tensor], device: torch.device) -> None:
        self._places: list[Any] = []
        end = 0
        for name, tensor in like.items():
            self._places.append((name, tensor.dtype, end // tensor.itemsize, tensor.shape, tensor.stride()))
            end += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device)

    def write(self, values: dict[Any, Tensor]) -> None:
        """Copy the values of all parts into this memory."""
        for name, dtype, first, shape, strides in self._places:
            self.memory.view(dtype).as_strided(shape, strides, first).copy_(values[name])

    def of(self, memory: Tensor) -> dict[Any, Tensor]:
        """The parts of such memory. They are not views for torch, which would refuse some writes in place."""
        storage, parts = memory.untyped_storage(), {}
        for name, dtype, *place in self._places:
            parts[name] = torch.empty(0, dtype=dtype, device=memory.device).set_(storage, *place)
        return parts


class Results(Memory):
    """Memory of the results of a solve.

    `parts` has tensors by name: those of the state, `finite` (B,), the leaves of the value, and `numbers`. These
    are the passes, the rows of z0 that are not finite, and the number of samples of each status.
    """

    def __init__(self, state: State, solve: Solve) -> None:
        self.packing, batch = solve.packing, len(state.z)
        finite, numbers = state.status.new_empty(batch, dtype=torch.bool), state.iterations.new_empty(2 + CODES)
        like = {"status": state.status, "iterations": state.iterations, "residual": state.residual, "best": state.best}
        like |= {"finite": finite, "numbers": numbers}
        if state.trace is not None:
            like["trace"] = state.trace
        if not self.packing.is_view:
            like |= {f"value {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(self.packing.unpack(state.best)))}
        super().__init__(like, state.z.device)
        self.parts = self.of(self.memory)
        self.codes = torch.arange(CODES, dtype=torch.int8, device=state.z.device)
        self.passes = self.parts["numbers"][:1]

    def own(self, state: State) -> State:
        """The state, with its results in this memory."""
        for name in ("status", "iterations", "residual", "best", "trace"):
            if name in self.parts:
                setattr(state, name, self.parts[name])
        return state

    def begin(self, rows: Tensor) -> None:
        """Note which rows of z0 are finite."""
        self.parts["numbers"].zero_()
        self.parts["finite"].copy_(torch.isfinite(rows).all(dim=1))

    def end(self, state: State) -> None:
        """Complete the results of a solve that has ended in this state."""
        numbers = self.parts["numbers"]
        numbers[1:2] = self.parts["finite"].logical_not().sum()
        numbers[2:] = (state.status == self.codes[:, None]).sum(dim=1)
        if not self.packing.is_view:
            for i, leaf in enumerate(pytree.tree_leaves(self.packing.unpack(state.best))):
                self.parts[f"value {i}"].copy_(leaf)


class Outcome(Arriving):
    """Results of a replay, and its numbers, which the device is sending to the host."""

    def __init__(self, results: Results, first: int, stream: Any) -> None:
        self.parts, self.first = results.of(results.memory.clone()), first
        self.numbers: list[int] | None = None
        super().__init__(self.parts["numbers"], stream)

    def check(self) -> list[int]:
        """Return the numbers, for which this waits; ValueError, once, if z0 was not finite."""
        if self.numbers is None:
            self.numbers = self.read().tolist()
            if self.numbers[1]:
                raise not_finite(self.parts["finite"])
        return self.numbers

    def counts(self) -> list[int]:
        return self.check()[2:]

    def evaluations(self) -> int:
        """Number of calls of f, for which this waits."""
        return self.first + EACH * self.check()[0]

    def solution(self, solve: Solve) -> Solution:
        """The Solution, whose numbers wait when they are read."""
        parts, packing = self.parts, solve.packing
        if packing.is_rows:
            value: Any = parts["best"]
        elif packing.is_view:
            value = packing.unpack(parts["best"])
        else:
            leaves = [parts[f"value {i}"] for i in range(len(packing.leaves))]
            value = leaves[0] if packing.is_tensor else pytree.tree_unflatten(leaves, packing.spec)
        ended = parts["status"], parts["iterations"], parts["residual"].unbind()
        trace = parts.get("trace")
        return solution_of(packing, solve.solver, value, *ended, Late(self.evaluations), None, trace, self)


class Snapshot:
    """What the capture of a cell relies on: its modules, their modes, and the memory of parameters and buffers."""

    def __init__(self, cell: nn.Module) -> None:
        modules: list[Any] = list(cell.modules())
        # Whether a block calls methods of the cell other than its forward.
        self.has_hooks = _has_any(cell, "fixed_point", "end_solve", "cancel_solve")
        self._modules = [(module, module.training, dict(module._modules)) for module in modules]
        tables = [table for module, *_ in self._modules for table in (module._parameters, module._buffers)]
        self._tables = [(table, len(table)) for table in tables]
        self._tensors = [(table, name, t, _place(t)) for table in tables for name, t in table.items() if t is not None]
        self._settled = [module.has_settled for module in modules if hasattr(module, "has_settled")]

    def holds(self) -> bool:
        """Return whether all of this is as it was. Each replay asks: loops, which call nothing."""
        for module, mode, children in self._modules:
            if module.training is not mode or module._modules != children:
                return False
        for table, size in self._tables:
            if len(table) != size:
                return False
        for table, name, t, place in self._tensors:
            if table.get(name) is not t or (t.data_ptr(), t.dtype, t.shape, t.stride()) != place:
                return False
        return not self._settled or all([check() for check in self._settled])


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _layout(x: Any) -> Any:
    """Key of the shapes and dtypes of x, and the values of its other leaves."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    leaves, spec = pytree.tree_flatten(x)
    return str(spec), tuple([_layout(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves])


def _check_cell(cell: Any) -> None:
    if not isinstance(cell, nn.Module):
        raise TypeError(f"cuda_graph needs a cell that is an nn.Module, whose parameters are known, got {cell!r}")
    for name, module in cell.named_modules():
        if hasattr(module, "begin_solve"):
            owner = f" of the cell's {name or 'own'} {type(module).__name__}"
            check_served("cuda_graph", REFUSES, ["begin_solve"], owner)


def _has_any(cell: nn.Module, *names: str) -> bool:
    """Return whether a module of the cell has one of these methods."""
    return any([hasattr(module, name) for module in cell.modules() for name in names])


def is_settled(cell: nn.Module) -> bool:
    """Return whether no submodule will change between solves any more, by its `has_settled`."""
    checks = [getattr(module, "has_settled", None) for module in cell.modules()]
    return all(check() for check in checks if check is not None)


def join(graphs: Sequence[Any], loops: Sequence[Loop]) -> Callable[[int], None]:
    """Function that launches on a stream, as one graph: a part, passes of the first loop, a part, and so on."""
    module: Any = _extension.cuda_module
    ends = tuple((loop.active.data_ptr(), loop.passes.data_ptr(), loop.most) for loop in loops)
    graph = module.while_graph(tuple(graph.raw_cuda_graph() for graph in graphs), ends)

    def launch(stream: int, keeps: Sequence[Any] = (graphs, loops)) -> None:  # the graphs own the memory
        module.launch_graph(graph, stream)

    return launch
