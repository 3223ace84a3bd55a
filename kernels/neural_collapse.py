"""The two passes of neural collapse: class means, and the within-class scatter along given directions.

features (N, D) float16, bfloat16, float32 or float64; rows (M,) int64, grouped by class; offsets (K+1,) int64: class k
has rows[offsets[k] : offsets[k + 1]]. Sums of at most ``CHUNK_ROWS`` rows are in T: float64 for float64 features, else
float32. The sums of the programs are added in float64, in the order of the programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import class_sums_config, scatter_config
from .constants import CHUNK_ROWS
from .launch import launch

MAX_GRID_Y = 65535
MOST_ENTRIES = 2**31 - 1  # of the directions, whose offsets are int32
SCATTER_STAGES = 2  # tiles in shared memory; with a third, fewer programs fit a multiprocessor


@triton.jit(do_not_specialize=["count"])
def _class_sums_kernel(
    p_features,
    p_rows,
    p_offsets,
    p_classes,
    p_partials,
    count,
    stride,
    D,
    CHUNK: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """partials[c + k] = the sum of h_i - h_first(k) over the rows i of class k in chunk c; first(k) is its first row.

    From one pair (c, k) to the next, c or k grows, so that no two pairs share a slot. p_classes (chunks, 2): classes of
    the first and the last row of each chunk.
    """
    dtype: tl.constexpr = p_partials.dtype.element_ty
    i_c = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    begin = i_c * CHUNK
    end = tl.minimum(begin + CHUNK, count)
    for k in range(tl.load(p_classes + 2 * i_c), tl.load(p_classes + 2 * i_c + 1) + 1):
        first = tl.load(p_offsets + k)
        start = tl.maximum(begin, first)
        stop = tl.minimum(end, tl.load(p_offsets + k + 1))
        b_first = tl.load(p_features + tl.load(p_rows + first) * stride + o_d, mask=m_d, other=0.0).to(dtype)
        b_sum = tl.zeros([BR, BD], dtype)
        for i in range(start, stop, BR):
            o_i = i + tl.arange(0, BR)
            m_i = o_i < stop
            o_row = tl.load(p_rows + o_i, mask=m_i, other=0) * stride
            b_h = tl.load(p_features + o_row[:, None] + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0)
            b_sum += tl.where(m_i[:, None], b_h.to(dtype) - b_first[None, :], 0.0)
        tl.store(p_partials + (i_c + k) * D + o_d, tl.sum(b_sum, axis=0), mask=m_d)


@triton.jit
def _class_means_kernel(
    p_features, p_rows, p_offsets, p_partials, p_local, p_shift, stride, D, CHUNK: tl.constexpr, BD: tl.constexpr
):
    """local_k = sum_c partials[c + k] / count_k + (h_first(k) - shift), with shift the first of all rows.

    local_k = -shift for a class without rows.
    """
    i_k = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    begin = tl.load(p_offsets + i_k)
    end = tl.load(p_offsets + i_k + 1)
    b_shift = tl.load(p_features + tl.load(p_rows) * stride + o_d, mask=m_d, other=0.0).to(tl.float64)
    if i_k == 0:
        tl.store(p_shift + o_d, b_shift, mask=m_d)
    b_local = -b_shift
    if end > begin:
        b_sum = tl.zeros([BD], tl.float64)
        for i_c in range(begin // CHUNK, (end - 1) // CHUNK + 1):
            b_sum += tl.load(p_partials + (i_c + i_k) * D + o_d, mask=m_d, other=0.0).to(tl.float64)
        b_first = tl.load(p_features + tl.load(p_rows + begin) * stride + o_d, mask=m_d, other=0.0).to(tl.float64)
        b_local = b_sum / (end - begin).to(tl.float64) + (b_first + b_local)
    tl.store(p_local + i_k * D + o_d, b_local, mask=m_d)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(
    p_features,
    p_rows,
    p_labels,
    p_high,
    p_low,
    p_directions,
    p_partials,
    count,
    stride,
    D,
    R,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """partials[j] = sum_i (R_j . ((h_i - high_i) - low_i))^2 over BM rows i, of BR directions; R is a multiple of BR.

    high is the class mean in T; low, in float32, is the rounding error of high. Near its mean, h - high is exact.
    Products are in IEEE float32: tf32 loses digits, and with tf32x3 the tensor cores truncate the sum at every step.
    """
    dtype: tl.constexpr = p_partials.dtype.element_ty
    i_m = tl.program_id(0).to(tl.int64)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < count
    o_row = tl.load(p_rows + o_m, mask=m_m, other=0) * stride
    o_mean = tl.load(p_labels + o_m, mask=m_m, other=0) * D
    b_p = tl.zeros([BM, BR], dtype)
    for start in range(0, D, BK):
        o_k = start + tl.arange(0, BK)
        m_k = o_k < D
        mask = m_m[:, None] & m_k[None, :]
        b_h = tl.load(p_features + o_row[:, None] + o_k[None, :], mask=mask, other=0.0).to(dtype)
        b_h -= tl.load(p_high + o_mean[:, None] + o_k[None, :], mask=mask, other=0.0)
        if dtype == tl.float32:
            b_h -= tl.load(p_low + o_mean[:, None] + o_k[None, :], mask=mask, other=0.0)
        b_r = tl.load(p_directions + o_k[:, None] * R + o_r[None, :], mask=m_k[:, None], other=0.0)
        b_p = tl.dot(b_h, b_r, b_p, input_precision="ieee", out_dtype=dtype)
    tl.store(p_partials + i_m * R + o_r, tl.sum(b_p * b_p, axis=0))


def _accumulation(features: Tensor) -> torch.dtype:
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _tiles(size: int, width: int, what: str) -> int:
    """Number of tiles along the second axis of a grid, which CUDA limits; RuntimeError if they are too many."""
    if (tiles := triton.cdiv(size, width)) > MAX_GRID_Y:
        raise RuntimeError(f"{what} has too many columns: {size}")
    return tiles


def class_means(a: Any, local: Tensor, shift: Tensor) -> None:
    """mu_k = local_k + shift, with shift the first of `rows`."""
    count, dim, classes = len(a.rows), a.features.shape[1], len(a.offsets) - 1
    if count == 0:
        local.zero_()
        shift.zero_()
        return
    device, stride = a.features.device, a.features.stride(0)
    chunks = triton.cdiv(count, CHUNK_ROWS)
    begin = torch.arange(0, count, CHUNK_ROWS, device=device)
    ends = torch.stack([begin, (begin + (CHUNK_ROWS - 1)).clamp_max(count - 1)], dim=1)
    classes_at_ends = torch.searchsorted(a.offsets, ends, right=True) - 1
    partials = torch.empty((chunks + classes, dim), dtype=_accumulation(a.features), device=device)
    config = class_sums_config(dim, a.features.dtype)
    tiles = _tiles(dim, config.columns, "class_means: `features`")
    given = {"p_partials": partials, "stride": stride, "D": dim, "CHUNK": CHUNK_ROWS, "BD": config.columns}
    given |= {"num_warps": config.num_warps}
    chunked = {"p_classes": classes_at_ends, "count": count, "BR": config.rows}
    launch(_class_sums_kernel, (chunks, tiles), a, a.features, **chunked, **given)
    launch(_class_means_kernel, (classes, tiles), a, a.features, p_local=local, p_shift=shift, **given)


def within_class_scatter(a: Any, within: Tensor) -> None:
    """within_j = sum_i (R_j . (h_i - mu_{y_i}))^2 of each direction R_j."""
    count, (dim, size) = len(a.rows), a.directions.shape
    if count == 0 or size == 0:
        within.zero_()
        return
    dtype, stride, device = _accumulation(a.features), a.features.stride(0), a.features.device
    config = scatter_config(size, a.features.dtype, aligned=(dim | stride) % 16 == 0)
    panels = _tiles(size, config.directions, "within_class_scatter: `directions`")
    if (entries := dim * panels * config.directions) > MOST_ENTRIES:
        raise RuntimeError(f"within_class_scatter: `directions` has too many entries: {entries}")
    padded = torch.nn.functional.pad(a.directions.to(dtype), (0, panels * config.directions - size))
    high = a.means.to(dtype)
    low = (a.means - high).to(dtype)
    labels = torch.searchsorted(a.offsets, torch.arange(count, device=device), right=True) - 1
    blocks = triton.cdiv(count, config.rows)
    partials = torch.empty((blocks, padded.shape[1]), dtype=dtype, device=device)
    given = {"p_labels": labels, "p_high": high, "p_low": low, "p_directions": padded, "p_partials": partials}
    given |= {"count": count, "stride": stride, "D": dim, "R": padded.shape[1]}
    given |= {"BM": config.rows, "BK": config.columns, "BR": config.directions}
    options = {"num_warps": config.num_warps, "num_stages": SCATTER_STAGES}
    launch(_scatter_kernel, (blocks, panels), a, a.features, **given, **options)
    torch.sum(partials[:, :size], 0, dtype=torch.float64, out=within)
