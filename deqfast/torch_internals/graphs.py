"""Capture of CUDA graphs, and what a graph would not repeat: waits of the host, and draws of random numbers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .dynamo import uncompiled


def current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def raw_stream(device: torch.device) -> int:
    """Address of torch's present stream of the device; ``torch.cuda.current_stream`` makes an object of it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


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


class _Generators(TorchDispatchMode):
    """Notes whether an operation takes a random generator."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or any(isinstance(v, torch.Generator) for v in (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def refuse_draws(device: torch.device, work: Callable[[], object]) -> None:
    """Run `work` uncompiled; RuntimeError if it draws random numbers, which each pass and replay would repeat."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    before, seen = generator.get_state(), _Generators()
    with seen:
        uncompiled(work)()  # dynamo runs no compiled code within a mode
    if seen.drawn or not torch.equal(generator.get_state(), before):
        raise RuntimeError("the cell draws random numbers, which a graph would repeat: hold them fixed in a solve")


def mark() -> Any:
    """Event after all work that the current stream has queued."""
    return torch.cuda.current_stream().record_event()


def capture(works: Sequence[Callable[[], None]], mode: str = "thread_local") -> list[Any]:
    """Graphs of the work that each of `works` queues; they share their temporary memory.

    mode: `capture_error_mode` of ``torch.cuda.graph``.

    After any error the thread leaves the stream of the captures. (``torch.cuda.graph`` stays on it.)
    """
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in works]
    pool = torch.cuda.graph_pool_handle()

    def capture_all() -> None:
        for graph, work in zip(graphs, works, strict=True):
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it reports only that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()

    aside(capture_all)
    return graphs
