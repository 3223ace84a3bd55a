"""Picard step: z <- z + damping (f(z) - z), with the residuals, best iterate and status of every sample.

z, fz, best (B, D) of dtype T (float32 or float64); status (B,) int8; iterations (B,) int32; residual (2, B), progress
(6, B) T; active (1,) int32. Accumulation in T. One program per sample, or S of them in three launches, which leave sums
(B, 5, S) T for each other; samples with status != 0 move no bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .common import carry_out, columns, copy_row, judge, load_numbers, norms_at, scalar, store_verdict
from .config import device_guard, picard_config, picard_registers, programs_per_sample, stages


@triton.jit(do_not_specialize=["B", "S", "k", "hold", "absolute", "maximum"])
def _picard_step_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    p_sums,
    B,
    D,
    S,
    k,
    hold,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum,
    damping: tl.float64,
    WHOLE: tl.constexpr,
    STAGE: tl.constexpr,
    BLK: tl.constexpr,
):
    """WHOLE: a row fits one block, which is held on chip: one pass over the memory.

    hold: 0, take a step; 1, only judge; 2, only judge, and no evaluation follows.
    """
    i_b = tl.program_id(0).to(tl.int64)
    status = tl.load(p_status + i_b)
    if STAGE != "all":
        p_sums += i_b * 5 * S
    if STAGE == "step":
        verdict = tl.load(p_sums + 4 * S)
        improved = verdict == 1
    elif status != 0:
        if STAGE == "judge":
            tl.store(p_sums + 4 * S, 0.0)
        return
    dtype: tl.constexpr = p_z.dtype.element_ty
    begin, end = columns(D, BLK, STAGE)
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    b_w = scalar(damping, dtype)
    if STAGE == "judge":
        b_gg, b_ff = load_numbers(p_sums, 0, 2, S, BLK)
    elif WHOLE:
        o_d = tl.arange(0, BLK)
        m_d = o_d < D
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_gg = (b_fz - b_z) * (b_fz - b_z)
        b_ff = b_fz * b_fz
    elif STAGE != "step":
        b_gg = tl.zeros([BLK], dtype)
        b_ff = tl.zeros([BLK], dtype)
        for start in range(begin, end, BLK):
            o_d = start + tl.arange(0, BLK)
            m_d = o_d < end
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
            b_gg = tl.fma(b_g, b_g, b_gg)
            b_ff = tl.fma(b_fz, b_fz, b_ff)
    if STAGE != "step":
        res_norm, f_norm = norms_at(p_z + begin, p_fz + begin, end - begin, p_sums, S, b_gg, b_ff, maximum, STAGE, BLK)
        if STAGE == "sums":
            return
        status, improved = judge(
            p_status,
            p_iterations,
            p_residual,
            p_progress,
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
            hold == 2,
        )
        verdict = status
        if STAGE == "judge":
            store_verdict(p_sums + 4 * S, status, improved)
            return
    if WHOLE:
        if improved:
            tl.store(p_best + o_d, b_z, mask=m_d)
        if status == 2:
            copy_row(p_z, p_best, D, BLK)
        if (status == 0) & (hold == 0):
            tl.store(p_z + o_d, tl.where(b_w == 1, b_fz, b_z + b_w * (b_fz - b_z)), mask=m_d)
        return
    advance = (status == 0) & (hold == 0)
    carry_out(verdict, improved & (advance == 0), p_z + begin, p_best + begin, end - begin, BLK)
    if advance:
        for start in range(begin, end, BLK):
            o_d = start + tl.arange(0, BLK)
            m_d = o_d < end
            b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
            if improved:
                tl.store(p_best + o_d, b_z, mask=m_d)
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            tl.store(p_z + o_d, tl.where(b_w == 1, b_fz, b_z + b_w * (b_fz - b_z)), mask=m_d)


def launch(a: Any, hold: int, damping: float) -> None:
    """The step of `a`, with `damping` in the place of its own; hold: see the kernel."""
    batch, size = a.z.shape
    if batch == 0:
        return
    config = picard_config(size, a.z.dtype)
    programs = programs_per_sample(batch, size, a.z.device)
    launches = stages(batch, programs, config)
    sums = shared_by = None
    if programs > 1:
        launches += [("step", (batch, programs), config)]
        sums, shared_by = torch.empty(batch, 5, programs, dtype=a.z.dtype, device=a.z.device), programs
    state = (a.z, a.fz, a.best, a.status, a.iterations, a.residual, a.progress, a.active, sums)
    rule = (a.tol, int(a.absolute), a.stall_floor, a.offset, int(a.maximum))
    numbers = (batch, size, shared_by, a.k, hold, *rule, damping)
    whole = programs == 1 and size <= config.block
    with device_guard(a.z):
        for stage, grid, launch in launches:
            options = {"BLK": launch.block, "num_warps": launch.num_warps, "enable_fp_fusion": False}
            registers = picard_registers(a.z.dtype, stage == "all")
            _picard_step_kernel[grid](*state, *numbers, WHOLE=whole, STAGE=stage, maxnreg=registers, **options)


def picard_step(a: Any) -> None:
    """z <- z + damping (f(z) - z) for every running sample, in place; only the records when `last`."""
    launch(a, 2 * a.last, a.damping)
