"""Memory for the histories of solves. On the CPU it is kept between solves, as torch's allocator does on a GPU.

The system zeroes every fresh page, which costs a short solve up to a third of its time. A block is used again when its
last tensor is gone. Blocks that stay unused for a while are given back.
"""

import math
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _extension

SMALLEST = 1 << 20  # bytes; smaller blocks come from memory that the process already has
PATIENCE = 8  # requests that a free block survives without fitting any


@dataclass
class _Block:
    memory: Tensor  # (bytes,) uint8
    tenant: weakref.ref[Tensor]  # the last tensor in this block
    idle: int = 0

    @property
    def is_free(self) -> bool:
        return self.tenant() is None


class _Blocks(threading.local):
    """Blocks of one thread."""

    def __init__(self) -> None:
        self.kept: list[_Block] = []

    def free(self, nbytes: int) -> _Block | None:
        """The smallest free block that holds `nbytes` without being twice as large."""
        fitting = [block for block in self.kept if block.is_free and nbytes <= block.memory.nbytes < 2 * nbytes]
        smallest = min(fitting, key=lambda block: block.memory.nbytes, default=None)
        for block in self.kept:
            block.idle = block.idle + 1 if block.is_free and block is not smallest else 0
        self.kept = [block for block in self.kept if block.idle < PATIENCE]
        return smallest


_blocks = _Blocks()


def release_memory() -> None:
    """Free the memory that this thread's CPU solves keep for later ones."""
    _blocks.kept = [block for block in _blocks.kept if not block.is_free]


def empty_history(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for a solve's history; on a CPU fresh memory has large pages, if the system has them.

    On the CPU the tensor owns its memory only while it lives itself: a view must not outlive it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < SMALLEST:
        return torch.empty(shape, dtype=dtype, device=device)
    block = _blocks.free(nbytes)
    memory = block.memory if block else torch.empty(nbytes, dtype=torch.uint8, device=device)
    if block is None and _extension.cpp_module is not None:
        _extension.cpp_module.advise_huge_pages(memory.data_ptr(), nbytes)
    history = memory[:nbytes].view(dtype).view(shape)
    if block:
        block.tenant = weakref.ref(history)
    else:
        _blocks.kept.append(_Block(memory, weakref.ref(history)))
    return history
