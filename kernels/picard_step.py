"""Picard step: z <- z + damping (f(z) - z), with the residuals, best iterate and status of every sample.

z, fz, best (B, D) of dtype T (float32 or float64); status (B,) int8; iterations (B,) int32; residual, gain (2, B) T;
active (1,) int32. Accumulation in T. One program per sample; samples with status != 0 move no bytes.
"""

from typing import Any

import triton
import triton.language as tl

from .common import carry_out, copy_row, judge, norms_of, scalar
from .config import device_guard, picard_config


@triton.jit(do_not_specialize=["B", "k", "last", "absolute", "maximum"])
def _picard_step_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_residual,
    p_gain,
    p_active,
    B,
    D,
    k,
    last,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum,
    damping: tl.float64,
    WHOLE: tl.constexpr,
    BLK: tl.constexpr,
):
    """WHOLE: a row fits one block, which is held on chip: one pass over the memory."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_status + i_b) != 0:
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    b_w = scalar(damping, dtype)
    if WHOLE:
        o_d = tl.arange(0, BLK)
        m_d = o_d < D
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_gg = (b_fz - b_z) * (b_fz - b_z)
        b_ff = b_fz * b_fz
    else:
        b_gg = tl.zeros([BLK], dtype)
        b_ff = tl.zeros([BLK], dtype)
        for start in range(0, D, BLK):
            o_d = start + tl.arange(0, BLK)
            m_d = o_d < D
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
            b_gg = tl.fma(b_g, b_g, b_gg)
            b_ff = tl.fma(b_fz, b_fz, b_ff)
    res_norm, f_norm = norms_of(p_z, p_fz, D, tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0), maximum, BLK)
    status, improved = judge(
        p_status,
        p_iterations,
        p_residual,
        p_gain,
        p_active,
        i_b,
        B,
        res_norm,
        f_norm,
        k,
        tol,
        absolute,
        stall_floor,
        offset,
    )
    if WHOLE:
        if improved:
            tl.store(p_best + o_d, b_z, mask=m_d)
        if status == 2:
            copy_row(p_z, p_best, D, BLK)
        if (status == 0) & (last == 0):
            tl.store(p_z + o_d, tl.where(b_w == 1, b_fz, b_z + b_w * (b_fz - b_z)), mask=m_d)
        return
    advance = (status == 0) & (last == 0)
    carry_out(status, improved & (advance == 0), p_z, p_best, D, BLK)
    if advance:
        for start in range(0, D, BLK):
            o_d = start + tl.arange(0, BLK)
            m_d = o_d < D
            b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
            if improved:
                tl.store(p_best + o_d, b_z, mask=m_d)
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            tl.store(p_z + o_d, tl.where(b_w == 1, b_fz, b_z + b_w * (b_fz - b_z)), mask=m_d)


def launch(a: Any, last: bool, damping: float) -> None:
    """The step of `a`, with `last` and `damping` in the place of its own."""
    batch, size = a.z.shape
    if batch == 0:
        return
    config = picard_config(size, a.z.dtype)
    state = (a.z, a.fz, a.best, a.status, a.iterations, a.residual, a.gain, a.active)
    rule = (a.tol, int(a.absolute), a.stall_floor, a.offset, int(a.maximum))
    numbers = (batch, size, a.k, int(last), *rule, damping)
    options = {"BLK": config.block, "num_warps": config.num_warps, "enable_fp_fusion": False}
    with device_guard(a.z):
        _picard_step_kernel[(batch,)](*state, *numbers, WHOLE=size <= config.block, **options)


def picard_step(a: Any) -> None:
    """z <- z + damping (f(z) - z) for every running sample, in place; only the records when `last`."""
    launch(a, a.last, a.damping)
