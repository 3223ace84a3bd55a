"""Launch configurations of all kernels, by shape and dtype.

They are derived, not tuned: the kernels were timed on an H100 with these values only. A thread has at most 255
registers. A multiprocessor has 65,536, enough for eight warps that use all of theirs. The widest load has 16 bytes.
``harness.aot`` compiles each kernel and checks registers, spills and the width of loads.
"""

from dataclasses import dataclass
from typing import Any

import torch

# Up to this padded window the second sweep solves the window system itself, in 8 * 8 registers of every thread. A
# matrix of 16 * 16 exceeds the 255 registers. If threads shared it, each of its columns would need barriers.
MAX_INLINE_WINDOW = 8
# Samples per program of fc_fixed_point: the fewest rows of a tensor-core product.
FC_ROWS = 16
# The share of a thread's registers that may hold sums of a sweep; more pairs take another pass.
SHARE_OF_SUMS = 0.3
# Warps of a sweep over the history, with all their registers: they fill a multiprocessor.
SWEEP_WARPS = 8
# A program of the transposed product: columns of a sample, more if MAX_PROGRAMS are too few, and warps. The registers
# suffice for two or three on a multiprocessor, which hide each other's latency.
TRANSPOSED_COLUMNS, TRANSPOSED_WARPS = 1024, 4
# Programs that share a sample have at least this many columns each. The launches that sharing adds take microseconds.
# In one microsecond, one of the A100's 108 multiprocessors reads 18 KB (2 TB/s in all): a float32 row of this length.
MIN_COLUMNS = 4096
# One warp sums their numbers, two for each of its threads.
MAX_PROGRAMS = 64
# The most registers of a thread. Without this limit, ptxas spills a few bytes to fit more warps per multiprocessor.
MAX_REGISTERS = 255


@dataclass(frozen=True)
class LaunchConfig:
    """Columns per tile (of the state, or of the window matrix), and warps per program."""

    block: int
    num_warps: int


# One warp adds up the numbers that all programs of a sample stored, without a barrier.
JUDGE_CONFIG = LaunchConfig(MAX_PROGRAMS, 1)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded_window(n: int) -> int:
    """Rows of the history tile for a window of n pairs; at least 4, so that growing windows share their kernels."""
    return max(4, next_power_of_2(n))


def picard_config(size: int, dtype: torch.dtype) -> LaunchConfig:
    """Rows of up to 32 KiB are held on chip, 64 bytes per thread; longer ones are read in blocks of 4 KiB.

    64 bytes each of z and f(z) take 32 registers. 32 KiB take 16 warps, which leave 128 registers to a thread.
    Blocks need no more than 16 bytes per thread, one load of full width.
    """
    whole = next_power_of_2(size)
    block = max(32, whole) if whole * dtype.itemsize <= 32768 else 4096 // dtype.itemsize
    bytes_per_warp = 2048 if size <= block else 512
    return LaunchConfig(block, max(1, block * dtype.itemsize // bytes_per_warp))


def sums_registers(dtype: torch.dtype) -> int:
    """Registers of a thread for the sums of a shared sample, which only wait for memory.

    Four programs of 256 threads then fit a multiprocessor; in float64, whose sums would not fit, three.
    """
    return 64 if dtype.itemsize <= 4 else 80


@dataclass(frozen=True)
class SweepConfig(LaunchConfig):
    """A sweep over rows of the history.

    pairs: slots that it is compiled for. at_once: pairs whose sums are held in registers; more take another pass.
    rows: loaded at once. fold: columns of a thread, which share a sum; negative if they are not adjacent.
    """

    pairs: int
    at_once: int
    rows: int
    fold: int
    registers: int

    def arguments(self) -> dict[str, int]:
        """Arguments of the kernels and of the compiler."""
        kernel = {"PAIRS": self.pairs, "PASS": self.at_once, "ROWS": self.rows, "FOLD": self.fold, "BLK": self.block}
        return {**kernel, "num_warps": self.num_warps, "maxnreg": self.registers}


def sweep_config(
    size: int, window: int, held: float, dtype: torch.dtype, history_dtype: torch.dtype, warps: int | None = None
) -> SweepConfig:
    """16 bytes of a row of the history per thread, if rows start on 16 bytes.

    held: numbers per pair that a thread holds, its sums. Sweep 2 has one, and gammas; its registers suffice for 1.5.
    warps: the most, SWEEP_WARPS by default; with 16 a thread has 128 registers, which suffice for 8 pairs in float32.
    Whole rounds of eight rows are compiled, or the padded window if it is shorter.
    """
    words, aligned = dtype.itemsize // 4, size % 16 == 0
    width = 16 // (history_dtype if aligned else dtype).itemsize
    pairs = min(padded_window(window), -(-max(window, 1) // 8) * 8)
    warps = min(warps or SWEEP_WARPS, 16 if pairs <= 8 and words == 1 else 8)
    block = min(32 * warps * width, max(32, next_power_of_2(size)))
    warps = max(1, block // (32 * width))
    registers = MAX_REGISTERS if warps <= 8 else 128
    at_once = pairs
    while at_once * held * words > SHARE_OF_SUMS * registers:
        at_once = next_power_of_2(at_once) // 2
    fold = max(1, block // (32 * warps))
    rows = min(at_once, 8 if registers == MAX_REGISTERS and pairs <= 24 else 4)
    return SweepConfig(block, warps, pairs, at_once, rows, fold if aligned else -fold, registers)


def transposed_config(
    size: int, history: int, dtype: torch.dtype, history_dtype: torch.dtype
) -> tuple[SweepConfig, int]:
    """The transposed product's sweeps, and programs per sample: by its length only, so that bits do not depend on B."""
    config = sweep_config(size, history, 1, dtype, history_dtype, TRANSPOSED_WARPS)
    return config, max(1, min(size // max(config.block, TRANSPOSED_COLUMNS), MAX_PROGRAMS))


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once on `device`; the interpreter runs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def programs_per_sample(batch: int, size: int, device: torch.device) -> int:
    """Two programs per multiprocessor in all. Fewer than three per sample do not pay for the extra launches.

    A multiprocessor may have room for one only. Then the programs run in two waves, and two per sample gain nothing.
    """
    programs = min(2 * multiprocessors(device) // batch, size // MIN_COLUMNS, MAX_PROGRAMS)
    return programs if programs > 2 else 1


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take on `device`; the interpreter sets no limit."""
    if device.type != "cuda":
        return 1 << 20
    properties: Any = torch.cuda.get_device_properties(device)  # some versions' stub lacks the attribute
    return properties.shared_memory_per_block_optin


def fc_features(dtype: torch.dtype, shared: int) -> int:
    """The most features for which fc_fixed_point holds W of `dtype` in `shared` bytes; 0 for other dtypes.

    Tiles are powers of two. 128 features in float32 take 64 KiB, which with the samples fits every supported GPU. 256
    in bfloat16 take 128 KiB, next to 16 KiB of samples.
    """
    if dtype == torch.float32:
        return 128
    return (256 if shared >= 256 * 256 * 2 + (1 << 14) else 128) if dtype == torch.bfloat16 else 0


def fc_config(features: int) -> LaunchConfig:
    """One tile holds all of W. 8 warps hold 16 samples of 256 features, 16 elements per thread; 4 hold 16 of 64."""
    return LaunchConfig(max(16, next_power_of_2(features)), 8 if features > 64 else 4)


def picard_registers(dtype: torch.dtype, whole: bool) -> int | None:
    """The limit of registers per thread for picard_step; None: ptxas chooses. whole: one program serves a sample.

    In float32 one program per sample spills nothing without a limit; the others get ``MAX_REGISTERS``.
    """
    return None if whole and dtype == torch.float32 else MAX_REGISTERS


@dataclass(frozen=True)
class TileConfig:
    """Rows and columns of the features per tile, directions per tile (0: none), and warps per program."""

    rows: int
    columns: int
    directions: int
    num_warps: int


def class_sums_config(dim: int, dtype: torch.dtype) -> TileConfig:
    """512 bytes of each of 32 rows: a warp reads a row at full width, and a thread has eight loads in flight."""
    columns = min(512 // dtype.itemsize, max(16, next_power_of_2(dim)))
    return TileConfig(32, columns, 0, max(1, columns * 32 * dtype.itemsize // 4096))


def scatter_config(directions: int, dtype: torch.dtype, aligned: bool) -> TileConfig:
    """Tiles of at most 64 x 128 projections per program: 32 registers per thread of 8 warps.

    tl.dot takes at least 16 of each. 64 x 64 if rows do not all start on 16 bytes: the addresses of single elements
    need registers too. In float64 a number takes two registers: rows, columns and directions are halved.
    """
    width = max(16, next_power_of_2(directions))
    if dtype == torch.float64:
        return TileConfig(32, 16, min(64, width), 4)
    return TileConfig(64, 32, min(128 if aligned else 64, width), 8 if width > 32 else 4)


NORM_REGISTERS = 128  # per thread, so that a program of 16 warps, 65,536 registers, fits a multiprocessor


def norm_config(pixels: int, group_channels: int, dtype: torch.dtype) -> TileConfig:
    """Pixels and channels of a tile: a whole group up to 32 KiB, which is then read only once, else 16 KiB.

    32 bytes per thread take 8 registers for each tile that a kernel holds; the backward holds up to six. At most 16
    warps, which doubles that. dtype: of the accumulation.
    """
    columns, rows = next_power_of_2(group_channels), next_power_of_2(pixels)
    row = columns * dtype.itemsize
    rows = rows if rows * row <= 32768 else max(1, 16384 // row)
    return TileConfig(rows, columns, 0, min(16, max(1, rows * row // 1024)))
