"""A solve whose loop ends on the device: a beginning, passes of two evaluations, and the results. The host never waits.

The steps take their number, and whether it is the last, from the device (`k` in ``ops.steps``). All parts together make
exactly `max_iter` evaluations if a sample needs them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops import Kernel
from ..solution import Late
from ..solvers import Auto, MixedAnderson, Solver
from ..solvers.base import State
from ..torch_internals.graphs import Parts
from .refusals import Option, Refusals, check_ops, check_served, kinds

_REPLAYS = "a graph replays the same work"
REFUSES: Refusals = {
    "drop_converged": _REPLAYS,
    "stop_fn": "it would be asked on the host",
    "lockstep": "a replay asks no other process",
    "state_group": "a replay asks no other process",
    "causal": "its sums over positions are not captured",
    MixedAnderson: "its mixing_fn is not captured",
    Auto: "its stages depend on values",
}
DEVICE = "cuda"  # the only type of device with graphs
EACH = 2  # evaluations of a pass: a sample that ends in the first one costs a surplus one, and a look is saved


def check_device_loop(way: str, solver: Solver, kernel: Kernel, asked: Iterable[Option]) -> None:
    """Raise ValueError if the solver or an option `asked` for needs the host, RuntimeError if the kernel does.

    way: what asks for a solve that the device ends.
    """
    check_served(way, REFUSES, [*asked, *kinds(solver)])
    check_ops(way, solver)
    if kernel.name == "torch":
        raise RuntimeError(f"{way} needs kernel 'cuda' or 'triton': the steps of 'torch' read their number")


class DeviceLoop:
    """The evaluations of one solve, in parts: `first` in the beginning, and then at most `most` passes.

    iteration: runs iteration k, which may be the last. counted: evaluations that the beginning has at least.
    """

    def __init__(self, iteration: Callable[[int, bool], Any], state: State, max_iter: int, counted: int = 0) -> None:
        self.state, self.max_iter = state, max_iter
        counted = max(counted, 1)
        self.first = counted + (self.max_iter - counted) % EACH
        self.most = (self.max_iter - self.first) // EACH
        self._iteration = iteration
        self._made = None if state.trace is None else torch.zeros(1, dtype=torch.int64, device=state.z.device)

    def begin(self) -> None:
        """Make the first evaluations, whose numbers the host knows."""
        for k in range(self.first):
            self._iterate(k, k + 1 == self.max_iter)
        self.state.carry()

    def body(self) -> None:
        """Make a pass."""
        for _ in range(EACH):
            self._iterate(-self.max_iter, False)
        self.state.carry()

    def _iterate(self, k: int, last: bool) -> None:
        self._iteration(k, last)
        state = self.state
        if state.trace is not None and self._made is not None:
            state.trace.index_copy_(0, self._made, state.residual[None])
            self._made += 1


def is_captured(device: torch.device) -> bool:
    """Return whether work on this device becomes a part of a CUDA graph, in which the host can read nothing."""
    return device.type == DEVICE and torch.cuda.is_current_stream_capturing()


def has_loops() -> bool:
    """Return whether this torch can capture a loop."""
    return hasattr(torch.cuda.CUDAGraph, "begin_capture_to_while_node")


def capture_loop(loop: DeviceLoop, passes: Tensor) -> None:
    """Add the passes to the graph that is being captured, in a loop that the device ends; `passes` (1,) counts them."""
    graphs: Any = torch.cuda.CUDAGraph  # some supported versions of torch lack these methods
    graph, active = graphs.get_currently_capturing_graph(), loop.state.active

    def goes_on() -> Tensor:
        return ((active > 0) & (passes < loop.most)).squeeze()

    graph.begin_capture_to_while_node(goes_on())
    try:
        loop.body()
        passes += 1
        graph.set_conditional_handle_for_current_node(goes_on())
    finally:
        graph.end_capture_to_conditional_node()


class Loop:
    """What ends a captured loop: its `active` samples, or `most` of its `passes`, which are on the device."""

    def __init__(self, loop: DeviceLoop, passes: Tensor) -> None:
        self.active, self.passes, self.most = loop.state.active, passes, loop.most


def advance_in_capture(loop: DeviceLoop) -> int | Late:
    """Make all evaluations as a part of a CUDA graph; return their number in the latest replay.

    Without loops in this torch, `max_iter` evaluations are captured, unless a captured training step is cut into parts.
    Samples that have ended stay as they are.
    """
    loop.begin()
    parts, first = Parts.on_stream(loop.state.z.device), loop.first
    if loop.most and (parts is not None or has_loops()):
        passes = torch.zeros(1, dtype=torch.int32, device=loop.state.z.device)
        if parts is not None:
            parts.cut(loop.body, Loop(loop, passes))
        else:
            capture_loop(loop, passes)
        return Late(lambda passes: first + EACH * int(passes), passes)
    for _ in range(loop.most):
        loop.body()
    return loop.max_iter
