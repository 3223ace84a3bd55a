"""Launch configurations: heuristics from the shape and the dtype, one place for every kernel."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

MAX_HISTORY = 32
# Up to this padded window the second sweep solves the window system itself; above, barriers between warps would cost
# more than one more launch of a single warp.
MAX_INLINE_WINDOW = 8
# Samples per program of fc_fixed_point: the fewest that a tensor-core product takes.
FC_ROWS = 16


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


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take on `device`; the interpreter sets no limit."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fc_features(dtype: torch.dtype, shared: int) -> int:
    """The most features for which fc_fixed_point holds W of `dtype` in `shared` bytes; 0 for other dtypes.

    Tiles are powers of two: 64 KiB for 128 features in float32, which with the samples fits every supported GPU, and
    128 KiB for 256 in bfloat16.
    """
    if dtype == torch.float32:
        return 128
    return (256 if shared >= 256 * 256 * 2 else 128) if dtype == torch.bfloat16 else 0


def fc_config(features: int) -> LaunchConfig:
    """One tile holds all of W."""
    return LaunchConfig(max(16, next_power_of_2(features)), 8 if features > 64 else 4)


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
