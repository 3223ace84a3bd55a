"""Calls that ``torch.compile`` is kept out of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_lock, _inside, _stance = threading.Lock(), 0, ExitStack()


def uncompiled(f: Callable[..., Result]) -> Callable[..., Result]:
    """`f` without compiled code in it. While a thread is inside, the others' compiled code runs as written too."""

    def plain(*arguments: Any) -> Result:
        with _force_eager():
            return f(*arguments)

    def run(*arguments: Any) -> Result:
        return untraced(plain if _is_loaded() else f, *arguments)

    return run


def untraced(f: Callable[..., Result], *arguments: Any) -> Result:
    """``f(*arguments)``, of which dynamo takes no part where it compiles the caller in parts."""
    return torch.compiler.disable(f)(*arguments) if _is_loaded() else f(*arguments)


def _is_loaded() -> bool:
    return "torch._dynamo" in sys.modules  # else nothing is compiled, and the import would take seconds


@contextmanager
def _force_eager() -> Iterator[None]:
    """Hold the stance "force_eager", which is the process's: the first thread sets it, the last one ends it."""
    global _inside
    with _lock:
        if not _inside:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _stance.close()
