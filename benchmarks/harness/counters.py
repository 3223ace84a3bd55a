"""Exact counts for a call: operations of torch, waits of the host, allocations, and the peak memory.

They are equal in every run with the same versions, whatever else the machine does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import deqfast

# The profiler reports its steps and the missing GPU on the terminal; 99 silences it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Operations that run nothing on the device, in addition to views.
_NOTHING = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view"}
# Operations after which, on a GPU, the host waits for a value: to return it, for the size of a result, or for the
# success of a factorisation.
_WAITS = {
    "_local_scalar_dense",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_linalg_check_errors",
    "_linalg_svd",
    "_linalg_eigh",
    "linalg_eig",
    "linalg_lstsq",
    "linalg_pinv",
}
# Methods that on the CPU run no operation, and on a GPU copy to the host.
_READS = (Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__)


@dataclass(frozen=True)
class Counters:
    """operations, host_waits: counted outside f. allocations, peak_bytes: of the whole call, by torch's allocator.

    host_waits: how often the host would wait on a GPU. Copies by ``Tensor.to`` count on a GPU only.
    """

    operations: int
    host_waits: int
    allocations: int
    peak_bytes: int

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of a row; every operation counts as a launch."""
        return {"launches": self.operations, "host_waits": self.host_waits, "peak_bytes": self.peak_bytes}


def waits(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the host waits for the operation `name` of torch on a GPU."""
    if name in ("index", "index_put", "index_put_"):
        filled = name != "index" and not args[2].dim()  # with a number, the positions need not be read
        return not filled and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("copy_", "_to_copy"):
        target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or args[0].device)
        source = args[1].device if name == "copy_" else args[0].device
        return target.type != source.type and not (kwargs.get("non_blocking") or True in args[2:])
    return name in _WAITS


class _Operations(TorchDispatchMode):
    operations = host_waits = 0
    inside_f = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if not self.inside_f:
            self.operations += not func.is_view and name not in _NOTHING
            self.host_waits += waits(name, args, kwargs)
        return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    """Mode that counts reads of tensors that are already on the host, which the dispatcher does not see."""

    def __init__(self, counted: _Operations) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args[0].device.type == "cpu" and not self.counted.inside_f:
            self.counted.host_waits += 1
        return func(*args, **(kwargs or {}))


def count(call: Callable[[Callable[..., Any]], Any], f: Callable[..., Any], device: str) -> Counters:
    """Counters of `call(f)` without the operations in f. A first call, which may set things up, is not counted.

    device: the device whose memory is counted, "cpu" or "cuda".
    """
    call(f)
    mode = _Operations()

    def hidden(*args: Any, **kwargs: Any) -> Any:
        mode.inside_f = True
        try:
            return f(*args, **kwargs)
        finally:
            mode.inside_f = False

    with _Reads(mode), mode:
        call(hidden)
    return Counters(mode.operations, mode.host_waits, *memory(lambda: call(f), device))


def count_call(call: Callable[[], Any], device: str) -> Counters:
    """Counters of a call, f included."""
    return count(lambda f: call(), lambda: None, device)


@dataclass(frozen=True)
class Profile:
    """What a GPU did in a call.

    launches: kernels and copies that the host launched, a graph as one. host_waits: how often the host waited.
    kernels: name -> number and milliseconds of the kernels and copies that ran, those of graphs too.
    """

    launches: int
    host_waits: int
    kernels: dict[str, tuple[int, float]]

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of a row."""
        device_ms = sum(ms for _, ms in self.kernels.values())
        return {"launches": self.launches, "host_waits": self.host_waits, "device_ms": device_ms}


def profiled(call: Callable[[], Any]) -> Profile | None:
    """Profile of a call, without a first one, which may set things up. None if the profiler is not allowed to look."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    cpu = torch.autograd.DeviceType.CPU
    kernels: dict[str, tuple[int, float]] = {}
    names = [event.name for event in recorded.events() if event.device_type == cpu and event.name.startswith("cu")]
    launches = sum(any(word in name for word in ("Launch", "Memcpy", "Memset")) for name in names)
    waits = sum(name in ("cudaStreamSynchronize", "cudaEventSynchronize") for name in names)
    for event in recorded.events():
        if event.device_type != cpu and not event.is_user_annotation:  # which spans kernels that count themselves
            number, ms = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = number + 1, ms + 1e-3 * event.time_range.elapsed_us()
    return Profile(launches, waits, kernels) if launches else None


def evaluations(module: nn.Module, call: Callable[[], Any]) -> int:
    """How often a call evaluates the module."""
    calls: list[None] = []
    handle = module.register_forward_hook(lambda *_: calls.append(None))
    call()
    handle.remove()
    return len(calls)


def memory(call: Callable[[], Any], device: str) -> tuple[int, int]:
    """Allocations of a call, and its peak memory in bytes above the memory before; `device` as for `count`."""
    if device == "cuda":
        return _cuda_memory(call)
    deqfast.release_memory()  # else the call would find memory of an earlier one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result  # only now, so that its memory is not freed while counting
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
