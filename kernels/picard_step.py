"""Picard step: z <- z + damping (f(z) - z), with the residuals, best iterate and status of every sample.

z, fz, best (B, D) of dtype T (float32 or float64); status (B,) int8; iterations (B,) int32; residual (2, B), progress
(6, B) T; active (1,) int32. Accumulation in T. Samples that are not RUNNING move no bytes.

| launches | kernels | read |
|---|---|---|
| one program per sample whose row fits a block | row | once |
| one program per longer sample | blocks | twice |
| S programs per sample, see ``common`` | sums, judge, step | twice |
| halves, see ``deqfast.ops.steps.split`` | sums, totals; verdict, step | twice |
"""

from typing import Any

import triton
import triton.language as tl

from . import common
from .common import scalar
from .config import JUDGE_CONFIG, picard_config, picard_registers, programs_per_sample, sums_registers
from .launch import Plan, Plans


@triton.constexpr_function
def number_of(name):
    """Position of the verdict among the numbers of a sample's first program, after the norms. "end": their count."""
    return common.norm_number("end") + {"verdict": 0, "end": 1}[name]


@triton.jit
def _numbers_of(p_numbers, i_b, S):
    """Pointers to the numbers of sample i_b and to the verdict on it."""
    p_sample = p_numbers + i_b * number_of("end") * S
    return p_sample, p_sample + number_of("verdict") * S


@triton.jit
def _stepped(b_z, b_fz, damping):
    """z + damping (f(z) - z), exactly f(z) if damping = 1."""
    b_w = scalar(damping, b_z.dtype)
    return tl.where(b_w == 1, b_fz, b_z + b_w * (b_fz - b_z))


@triton.jit
def _squares(p_z, p_fz, begin, end, BLK: tl.constexpr):
    """|f(z) - z|^2 and |f(z)|^2 of the columns [begin, end)."""
    dtype: tl.constexpr = p_z.dtype.element_ty
    b_gg = tl.zeros([BLK], dtype)
    b_ff = tl.zeros([BLK], dtype)
    for start in range(begin, end, BLK):
        o_d = start + tl.arange(0, BLK)
        m_d = o_d < end
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_g = b_fz - tl.load(p_z + o_d, mask=m_d, other=0.0)
        b_gg = tl.fma(b_g, b_g, b_gg)
        b_ff = tl.fma(b_fz, b_fz, b_ff)
    return tl.sum(b_gg, axis=0), tl.sum(b_ff, axis=0)


@triton.jit
def _move(p_z, p_fz, p_best, begin, end, improved, failed, advance, damping, BLK: tl.constexpr):
    """Take the step if `advance`, in the columns [begin, end); keep the best iterate, or go back to it."""
    common.carry_out(improved & (advance == 0), failed, p_z + begin, p_best + begin, end - begin, BLK)
    if advance:
        for start in range(begin, end, BLK):
            o_d = start + tl.arange(0, BLK)
            m_d = o_d < end
            b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
            if improved:
                tl.store(p_best + o_d, b_z, mask=m_d)
            b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
            tl.store(p_z + o_d, _stepped(b_z, b_fz, damping), mask=m_d)


@triton.jit(do_not_specialize=["B", "k", "hold", "last", "absolute", "maximum"])
def _picard_kernel(
    p_z,
    p_fz,
    p_best,
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    B,
    D,
    k,
    hold,
    last,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum,
    damping: tl.float64,
    ON_CHIP: tl.constexpr,
    BLK: tl.constexpr,
):
    """z <- z + damping (f(z) - z) of a sample, held ON_CHIP if D <= BLK, else block by block. hold: only judge."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    p_z += i_b * D
    p_fz += i_b * D
    p_best += i_b * D
    if ON_CHIP:
        o_d = tl.arange(0, BLK)
        m_d = o_d < D
        b_fz = tl.load(p_fz + o_d, mask=m_d, other=0.0)
        b_z = tl.load(p_z + o_d, mask=m_d, other=0.0)
        gg = tl.sum((b_fz - b_z) * (b_fz - b_z), axis=0)
        ff = tl.sum(b_fz * b_fz, axis=0)
    else:
        gg, ff = _squares(p_z, p_fz, 0, D, BLK)
    res_norm, f_norm = common.norms_of(p_z, p_fz, D, gg, ff, maximum, BLK)
    monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
    rule = (tol, absolute, stall_floor, offset)
    running, improved, failed = common.judge(monitor, i_b, B, res_norm, f_norm, k, rule, last != 0)
    if ON_CHIP:
        if improved:
            tl.store(p_best + o_d, b_z, mask=m_d)
        if failed:
            common.copy_row(p_z, p_best, D, BLK)
        if running & (hold == 0):
            tl.store(p_z + o_d, _stepped(b_z, b_fz, damping), mask=m_d)
    else:
        _move(p_z, p_fz, p_best, 0, D, improved, failed, running & (hold == 0), damping, BLK)


@triton.jit(do_not_specialize=["S", "maximum"])
def _picard_sums_kernel(p_z, p_fz, p_status, p_numbers, D, S, maximum, BLK: tl.constexpr):
    """The norms of f(z) - z and f(z) of one program's columns."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    p_z += i_b * D
    p_fz += i_b * D
    begin, end = common.columns(D, BLK)
    gg, ff = _squares(p_z, p_fz, begin, end, BLK)
    p_sample, _ = _numbers_of(p_numbers, i_b, S)
    common.store_norms(p_sample, p_z + begin, p_fz + begin, end - begin, gg, ff, maximum, BLK)


@triton.jit(do_not_specialize=["B", "S", "k", "last", "absolute", "maximum"])
def _picard_judge_kernel(
    p_status,
    p_iterations,
    p_residual,
    p_progress,
    p_active,
    p_numbers,
    B,
    S,
    k,
    last,
    tol: tl.float64,
    absolute,
    stall_floor: tl.float64,
    offset: tl.float64,
    maximum,
    BLK: tl.constexpr,
):
    """The verdict on a sample by the norms of all its columns."""
    i_b = tl.program_id(0).to(tl.int64)
    p_sample, p_verdict = _numbers_of(p_numbers, i_b, S)
    if common.has_ended(p_status, i_b):
        common.store_no_verdict(p_verdict)
        return
    res_norm, f_norm = common.norms_of_parts(p_sample, S, maximum, BLK)
    monitor = (p_status, p_iterations, p_residual, p_progress, p_active)
    rule = (tol, absolute, stall_floor, offset)
    _, improved, failed = common.judge(monitor, i_b, B, res_norm, f_norm, k, rule, last != 0)
    common.store_verdict(p_verdict, improved, failed)


@triton.jit(do_not_specialize=["S", "hold"])
def _picard_step_kernel(p_z, p_fz, p_best, p_status, p_numbers, D, S, hold, damping: tl.float64, BLK: tl.constexpr):
    """z <- z + damping (f(z) - z) in one program's columns, by the verdict. hold: take no step."""
    i_b = tl.program_id(0).to(tl.int64)
    advance = (common.has_ended(p_status, i_b) == 0) & (hold == 0)
    _, p_verdict = _numbers_of(p_numbers, i_b, S)
    improved, failed = common.unpack_verdict(tl.load(p_verdict))
    begin, end = common.columns(D, BLK)
    p_z += i_b * D
    p_fz += i_b * D
    _move(p_z, p_fz, p_best + i_b * D, begin, end, improved, failed, advance, damping, BLK)


@triton.jit(do_not_specialize=["S"])
def _picard_totals_kernel(p_status, p_numbers, p_sums, S, BLK: tl.constexpr):
    """|f(z) - z|^2 and |f(z)|^2 of a row, from the numbers of its S programs."""
    i_b = tl.program_id(0).to(tl.int64)
    if common.has_ended(p_status, i_b):
        return
    p_row, _ = _numbers_of(p_numbers, i_b, S)
    tl.store(p_sums + 2 * i_b, common.sum_number(p_row, common.norm_number("gg"), S, BLK))
    tl.store(p_sums + 2 * i_b + 1, common.sum_number(p_row, common.norm_number("ff"), S, BLK))


@triton.jit(do_not_specialize=["S"])
def _picard_verdict_kernel(p_verdict, p_status, p_numbers, S):
    """The verdict on a row, which the op was given, for the step."""
    i_b = tl.program_id(0).to(tl.int64)
    _, p_to = _numbers_of(p_numbers, i_b, S)
    common.take_verdict(p_verdict, p_status, p_to, i_b)


def _plan(a: Any, half: str, hold: bool, last: bool) -> Plan:
    (batch, size), dtype = a.z.shape, a.z.dtype
    config, programs = picard_config(size, dtype), programs_per_sample(batch, size, a.z.device)
    is_whole = programs == 1 and not half
    given: dict[str, Any] = {"B": batch, "D": size, "S": programs, "BLK": config.block, "last": int(last)}
    given |= {"hold": 1, "damping": 1.0} if hold else {"hold": 0}
    given |= {"num_warps": config.num_warps, "maxnreg": picard_registers(dtype, is_whole)}
    if is_whole:
        plan = Plan(a)
        plan.add(_picard_kernel, (batch,), ON_CHIP=size <= config.block, **given)
        return plan
    per_sample = given | {"BLK": JUDGE_CONFIG.block, "num_warps": JUDGE_CONFIG.num_warps}
    plan = Plan(a, p_numbers=(batch, number_of("end"), programs), **{"p_status": (batch,)} if half == "apply" else {})
    if half == "apply":
        plan.add(_picard_verdict_kernel, (batch,), **per_sample)
    else:
        sums = given | {"maxnreg": sums_registers(dtype)} | ({"maximum": 0} if half else {})
        plan.add(_picard_sums_kernel, (batch, programs), **sums)
        plan.add(_picard_totals_kernel if half else _picard_judge_kernel, (batch,), **per_sample)
    if half != "sums":
        plan.add(_picard_step_kernel, (batch, programs), **given)
    return plan


_PLANS = Plans(_plan)


def run(a: Any, hold: bool) -> None:
    """The step of `a`, or only the judgement if `hold`."""
    _PLANS.run(a, "", hold, a.last)


def picard_step(a: Any) -> None:
    """z <- z + damping (f(z) - z) for every running sample, in place; only the records when `last`."""
    run(a, hold=a.last)


def picard_sums(a: Any) -> None:
    """|f(z) - z|^2 and |f(z)|^2 of every running row."""
    _PLANS.run(a, "sums", False, False)


def picard_apply(a: Any) -> None:
    """The step, by the verdicts."""
    _PLANS.run(a, "apply", False, False)
