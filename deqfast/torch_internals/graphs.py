"""Capture of CUDA graphs, and what a graph would not repeat: waits of the host, and draws of random numbers."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .dynamo import uncompiled

_INSIDE = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_INSIDE += (warnings.__file__,)
_ELSEWHERE = "a thread of autograd"
_NOTHING = nullcontext()


class _Unread(threading.local):
    """Whether this thread runs what a graph will repeat, so that deqfast's own checks must not wait for the device."""

    is_on = False


unread = _Unread()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is torch's current one; it costs next to nothing if it already is."""
    is_current = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return _NOTHING if is_current else torch.cuda.device(device)


def raw_stream(device: torch.device) -> int:
    """Address of torch's present stream of the device; ``torch.cuda.current_stream`` makes an object of it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def aside(work: Callable[[], object], stream: Any = None) -> None:
    """Run `work` on this stream, or on a new one, which torch requires before a capture."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def line_in(frame: FrameType | None) -> str:
    """Place and text of the innermost line of the frame that is neither torch's nor deqfast's."""
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return _shown(frame.f_code.co_filename, frame.f_lineno) if frame is not None else _ELSEWHERE


def line_of(error: BaseException) -> str:
    """The same for the line that has led to an error."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return next((_shown(*line) for line in reversed(lines) if not line[0].startswith(_INSIDE)), "torch")


def _shown(path: str, number: int) -> str:
    return f"{path}:{number}: {linecache.getline(path, number).strip()}"


def refuse_waits(work: Callable[[], object], who: str = "the cell") -> None:
    """Run `work`; RuntimeError with the line if the host waits for the device in it, which would break a capture.

    A broken capture cannot always be undone: torch 2.11 and 2.12 refuse every later one. Threads of autograd count if
    the line is the user's, and other threads do not. Meanwhile ``unread`` is on.
    """
    mode, thread, before = torch.cuda.get_sync_debug_mode(), threading.get_ident(), unread.is_on
    waits: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def note(message: Warning | str, *where: Any, **more: Any) -> None:
            line, is_here = line_in(sys._getframe(1)), threading.get_ident() == thread
            # A thread that Python did not start is autograd's.
            is_autograd = isinstance(threading.current_thread(), threading._DummyThread) and line != _ELSEWHERE
            if (is_here or is_autograd) and "synchronizing CUDA operation" in str(message):
                waits.append(line)
            elif "Synchronization debug mode is a prototype" not in str(message):  # torch's note on the mode itself
                show(message, *where, **more)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        unread.is_on = True
        try:
            work()
        finally:
            unread.is_on = before
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        example = "for instance by .item() or a shape that depends on values"
        raise RuntimeError(f"{who} waits for the device, {example}, in {waits[0]}")


class _Draws(TorchDispatchMode):
    """Notes the first line that draws random numbers from torch's generator, or from one that it gives to torch."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.line = generator, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = any(isinstance(v, torch.Generator) for v in (*args, *(kwargs or {}).values()))
        before = self.generator.get_state()
        result = func(*args, **(kwargs or {}))
        if not self.line and (given or not torch.equal(self.generator.get_state(), before)):
            self.line = line_in(sys._getframe(1))
        return result


def refuse_draws(
    device: torch.device,
    work: Callable[[], object],
    who: str = "the cell",
    remedy: str = "hold them fixed in a solve",
) -> None:
    """Run `work` uncompiled; RuntimeError with the line if it draws random numbers, which a graph would repeat."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    before, seen = generator.get_state(), _Draws(generator)
    with seen:
        uncompiled(work)()  # dynamo runs no compiled code within a mode
    if seen.line or not torch.equal(generator.get_state(), before):
        where = f" (in {seen.line})" if seen.line else ""
        raise RuntimeError(f"{who} draws random numbers{where}, which a graph would repeat: {remedy}")


def copy_into(memory: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy all tensors into this memory by one operation."""
    torch._foreach_copy_(memory, tensors)


def mark() -> Any:
    """Event after all work that the current stream has queued."""
    return torch.cuda.current_stream().record_event()


class Parts:
    """CUDA graphs that are captured one after another, and share their temporary memory.

    After any error the thread leaves the stream of the captures. (``torch.cuda.graph`` stays on it.) mode: the
    `capture_error_mode` of ``torch.cuda.graph``. Backward solves need "relaxed": they run in a thread of autograd.
    """

    cutting: ClassVar[Parts | None] = None  # of a capture that loops cut, for all threads; one at a time, under `alone`
    alone: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, mode: str) -> None:
        self.graphs: list[Any] = []  # in their order
        self.loops: list[Any] = []  # each as `cut` was given it
        self._mode, self._pool = mode, torch.cuda.graph_pool_handle()
        self._stream: Any = None

    @classmethod
    def on_stream(cls, device: torch.device) -> Parts | None:
        """What loops cut on the present stream of the device, if any. Other threads may capture meanwhile.

        A backward pass is on the stream of its forward pass, in a thread of autograd.
        """
        parts = cls.cutting
        return parts if parts is not None and parts._stream == torch.cuda.current_stream(device) else None

    def add(self, work: Callable[[], object]) -> None:
        """Capture the work that `work` queues, on the current stream."""
        self._stream = torch.cuda.current_stream()
        self._begin()
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # it reports only that the capture has failed
                self.graphs[-1].capture_end()
            raise
        self.graphs[-1].capture_end()

    def cut(self, body: Callable[[], object], loop: Any) -> None:
        """End the present part; capture a pass of a loop, and begin the part after it."""
        self.graphs[-1].capture_end()
        self.loops.append(loop)
        self.add(body)
        self._begin()

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode=self._mode)


def capture(works: Sequence[Callable[[], object]], mode: str = "thread_local", stream: Any = None) -> list[Any]:
    """Graphs of the work that each of `works` queues, see ``Parts`` and ``aside``."""
    parts = Parts(mode)

    def add_all() -> None:
        for work in works:
            parts.add(work)

    aside(add_all, stream)
    return parts.graphs


def capture_cut(work: Callable[[], object], stream: Any) -> Parts:
    """Graphs of the work that `work` queues on this stream; loops of solves cut it."""
    parts = Parts("relaxed")
    with Parts.alone:
        Parts.cutting = parts
        try:
            aside(lambda: parts.add(work), stream)
        finally:
            Parts.cutting = None
    return parts
