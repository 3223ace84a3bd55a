"""Launch configurations: heuristics from the shape and the dtype, one place for every kernel."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

MAX_HISTORY = 32
# Up to this padded window the second sweep solves the window system itself; above, barriers between warps would cost
# more than one more launch of a single warp.
MAX_INLINE_WINDOW = 8


@dataclass(frozen=True)
class LaunchConfig:
    """Columns per tile (of the state, or of the window matrix), and warps per program."""

    block: int
    num_warps: int

    @property
    def max_registers(self) -> int:
        """So many that 16 warps fit an SM. Left alone, ptxas spills a few bytes in hope of more warps."""
        return min(255, 1024 // self.num_warps)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded_window(n: int) -> int:
    """Rows of the history tile for a window of n pairs; at least 4, so that growing windows share their kernels."""
    return max(4, next_power_of_2(n))


def picard_config(size: int, dtype: torch.dtype) -> LaunchConfig:
    """Four 4-byte columns, or two of 8 bytes, per thread."""
    block = min(4096 // dtype.itemsize, max(32, next_power_of_2(size)))
    return LaunchConfig(block, max(1, block * dtype.itemsize // 512))


def sweep_config(size: int, padded: int, dtype: torch.dtype) -> LaunchConfig:
    """History tiles of 2 KiB per warp, in the state's dtype: up to three accumulators stay in registers.

    Eight warps; four where rows do not all start on 16 bytes, so that single elements are read.
    """
    row = padded * dtype.itemsize
    tile = 16384 if size % 16 == 0 else 8192
    block = min(tile // row, max(32, next_power_of_2(size)))
    return LaunchConfig(block, max(1, block * row // 2048))


def solve_config(padded: int) -> LaunchConfig:
    """One warp needs no barriers; two where the window matrix would not stay in the registers of one."""
    return LaunchConfig(padded, max(1, padded // 16))


# Grouped rows whose class sums are formed by one program.
CHUNK_ROWS = 256


@dataclass(frozen=True)
class TileConfig:
    """Rows and columns of the features per tile, directions per tile (0: none), and warps per program."""

    rows: int
    columns: int
    directions: int
    num_warps: int


def class_sums_config(dim: int, dtype: torch.dtype) -> TileConfig:
    """512 bytes of each row, and eight loads of 16 bytes in flight per thread."""
    columns = min(512 // dtype.itemsize, max(16, next_power_of_2(dim)))
    return TileConfig(32, columns, 0, max(1, columns * 32 * dtype.itemsize // 4096))


def scatter_config(directions: int, dtype: torch.dtype, aligned: bool) -> TileConfig:
    """At most 64 x 128 projections per program, which stay in registers; a product takes at least 16 of everything.

    64 x 64 where rows do not all start on 16 bytes: the addresses of single elements need registers too.
    """
    width = max(16, next_power_of_2(directions))
    if dtype == torch.float64:
        return TileConfig(32, 16, min(64, width), 4)
    return TileConfig(64, 32, min(128 if aligned else 64, width), 8 if width > 32 else 4)


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
