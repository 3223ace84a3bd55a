"""Exact counts of what a call asks of torch: operations, waits of the host, allocations, memory at its highest.

They are the same on every run of the same versions, whatever else the machine does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# The profiler tells of each of its steps, and of the GPU that is not there, on the terminal; 99: it keeps silent.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Operations that return the same memory; nothing runs for them.
_VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice", "split", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operations, and methods of tensors that are none, which on a GPU make the host wait for a value.
_WAITS = {"_local_scalar_dense", "nonzero", "_linalg_check_errors", "linalg_solve", "equal", "masked_select"}
_WAITING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy}


@dataclass(frozen=True)
class Counters:
    """operations, host_waits: outside f; allocations, peak_bytes: of the whole call, by torch's allocator."""

    operations: int
    host_waits: int
    allocations: int
    peak_bytes: int


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = self.host_waits = 0
        self.inside_f = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside_f:
            self.operations += name not in _VIEWS and name not in _EMPTY
            self.host_waits += name in _WAITS
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self.seen = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.seen.inside_f:
            self.seen.host_waits += func in _WAITING_METHODS
        return func(*args, **(kwargs or {}))


def count(call: Callable[[Callable[..., Any]], Any], f: Callable[..., Any]) -> Counters:
    """What `call(f)` asks for, operations in f left out; a first call, which may set things up, is not counted."""
    call(f)
    mode = _Operations()

    def hidden(*args: Any, **kwargs: Any) -> Any:
        mode.inside_f = True
        try:
            return f(*args, **kwargs)
        finally:
            mode.inside_f = False

    with mode, _Methods(mode):
        call(hidden)
    return Counters(mode.operations, mode.host_waits, *memory(lambda: call(f)))


def memory(call: Callable[[], Any]) -> tuple[int, int]:
    """Allocations of a call, and how many bytes beyond those held before it needed at once."""
    if torch.cuda.is_available():
        return _cuda_memory(call)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result  # until here, so that what it holds is not given back while counting
    return sum(event.nbytes() > 0 for event in events), peak


def _cuda_memory(call: Callable[[], Any]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, allocations = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    result = call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    del result
    return after - allocations, peak - before
