"""The steps of the solvers, ``picard_step``, ``multisecant_step`` and ``broyden_step``, and the transposed product of a
window of pairs.

Arguments of the solver steps (T is the dtype of the state, float32 or float64; all tensors contiguous; B samples of D
elements):

==========  ============  =====================================================================================
z           (B, D) T      the iterate; replaced by the next one
fz          (B, D) T      f(z)
best        (B, D) T      the iterate of least residual; starts as a copy of the first z
status      (B,) int8     ``deqfast.Status``; 0 while running. Other rows are neither read nor written
iterations  (B,) int32    values of f used so far
residual    (2, B) T      relative and absolute residual of `best`; starts at infinity
gain        (2, B) T      relative residual at the last gain of 5 %, and its iteration; starts at infinity
active      (1,) int32    number of running samples; starts at B
f_prev      (B, D) T      f at the previous iterate (read from k = 1 on)
left, df    (B, M, D) H   history; H is T, or bfloat16 beside float32. Pair i lies in slot i mod M
gram        (B, M+2, M) T the window matrix N and, in its last two rows, the squared lengths of its pairs
k           int           evaluations of f before this one
last        bool          no evaluation follows: judge, take no step
tol         float         bound on the relative residual |f(z)-z| / |f(z)|, or, if `absolute`, on |f(z)-z|
stall_floor float         relative residual below which a sample without a gain may stall; 0: never
damping     float         picard_step: z + damping (f(z) - z)
method      int           multisecant_step: 0 Broyden good, 1 Broyden bad, 2 Anderson I, 3 Anderson II
alpha, beta float         step length; mixing: z + alpha (beta g - DF gamma), N gamma = L^T g
ridge       float         Anderson: added to the diagonal of the equilibrated N
steps       (B, M, D) T   broyden_step: all steps so far; k < M, or k <= M and `last`
gram        (B, M, M) T   broyden_step: dots of the steps; row j is written when step j is the newest
first       (B,) int32    broyden_step: the step with which the sample's history begins; starts at 0
==========  ============  =====================================================================================

``multisecant_transposed(v (B, D) T, left, df, gram, newest (B,) int32, count (B,) int32, method, alpha, beta, ridge)``
returns alpha (beta v - L gamma) with N^T gamma = DF^T v, (B, D). Where z <- z - H g is the step, that is -H^T v, for
alpha = 1 an estimate of (I - J^T)^-1 v, J the Jacobian of f. A sample's window holds `count` pairs, the last of them
number `newest`. On a GPU one block works on a sample, however long.

``broyden_step`` is Broyden's good method with full steps from its steps alone (Kelley, Iterative Methods for Linear and
Nonlinear Equations, SIAM 1995, section 7.3): c_j = (s_j . g + sum_{i<j} s_j . s_{i+1} c_i) / |s_j|^2,
s_k = (g + sum_{i<k-1} c_i s_{i+1}) / (1 - c_{k-1}). In exact arithmetic it is multisecant_step's method 0 with every
pair in the window, from half the memory. A step of length zero counts with c_j = 0. Where 1 - c_{k-1} vanishes or a c_j
is not finite, the sample takes a Picard step and its history begins anew. It has CPU kernels and a reference, none for
a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import register

# The window of the GPU kernels lives in registers and shared memory.
MAX_GPU_HISTORY = 32

_STATE = (
    "Tensor(a!) z, Tensor fz, Tensor(b!) best, Tensor(c!) status, Tensor(d!) iterations, Tensor(e!) residual, "
    "Tensor(f!) gain, Tensor(g!) active, "
)
_RULE = "int k, bool last, float tol, bool absolute, float stall_floor, "
_SCHEMAS = {
    "picard_step": f"({_STATE}{_RULE}float damping) -> ()",
    "multisecant_step": (
        f"({_STATE}Tensor f_prev, Tensor(h!) left, Tensor(i!) df, Tensor(j!) gram, {_RULE}"
        "int method, float alpha, float beta, float ridge) -> ()"
    ),
    "broyden_step": (
        f"({_STATE}Tensor(h!) steps, Tensor(i!) gram, Tensor(j!) first, int k, bool last, float tol, bool absolute, "
        "float stall_floor) -> ()"
    ),
    "multisecant_transposed": (
        "(Tensor v, Tensor left, Tensor df, Tensor gram, Tensor newest, Tensor count, int method, float alpha, "
        "float beta, float ridge) -> Tensor"
    ),
}


def _no_output(*args: Any) -> None:
    """Fake of an op that only mutates its arguments."""


def _like_first(v: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(v)


def _check_step(op: str, z: Tensor, first: str = "z", **others: Tensor) -> None:
    """The checks of csrc/common/checks.h, for the kernels that are launched from Python; `first` is the name of z."""
    batch, dim = z.shape if z.dim() == 2 else (-1, -1)
    if z.dim() != 2 or z.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: `{first}` must be (B, D) float32 or float64, got {tuple(z.shape)} {z.dtype}")
    history = others["left"].shape[1] if "left" in others and others["left"].dim() == 3 else 0
    history_dtype = others["left"].dtype if "left" in others else z.dtype
    if history_dtype != z.dtype and not (history_dtype == torch.bfloat16 and z.dtype == torch.float32):
        wanted = f"the dtype of `{first}`, or bfloat16 beside float32"
        raise ValueError(f"{op}: `left` must have {wanted}, got {history_dtype}")
    expected = {
        "status": ((batch,), torch.int8),
        "iterations": ((batch,), torch.int32),
        "residual": ((2, batch), z.dtype),
        "gain": ((2, batch), z.dtype),
        "active": ((1,), torch.int32),
        "left": ((batch, history, dim), history_dtype),
        "df": ((batch, history, dim), history_dtype),
        "gram": ((batch, history + 2, history), z.dtype),
        "newest": ((batch,), torch.int32),
        "count": ((batch,), torch.int32),
    }
    for name, tensor in {first: z, **others}.items():
        shape, dtype = expected.get(name, ((batch, dim), z.dtype))
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{op}: `{name}` must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.device != z.device:
            raise ValueError(f"{op}: `{name}` must be contiguous and on the device of `{first}` ({z.device})")
    if "left" in others and not 1 <= history <= MAX_GPU_HISTORY:
        raise ValueError(f"{op}: `left` must hold 1 to {MAX_GPU_HISTORY} pairs, got {history}")


def _picard_step_triton(z: Tensor, fz: Tensor, best: Tensor, status: Tensor, *rest: Any) -> None:
    from ..kernels.picard_step import picard_step

    iterations, residual, gain, active = rest[:4]
    _check_step("picard_step_triton", z, fz=fz, best=best, status=status, iterations=iterations, residual=residual,
                gain=gain, active=active)  # fmt: skip
    picard_step(z, fz, best, status, *rest)


def _multisecant_step_triton(z: Tensor, fz: Tensor, best: Tensor, status: Tensor, *rest: Any) -> None:
    from ..kernels.multisecant_step import multisecant_step

    iterations, residual, gain, active, f_prev, left, df, gram = rest[:8]
    _check_step("multisecant_step_triton", z, fz=fz, best=best, status=status, iterations=iterations,
                residual=residual, gain=gain, active=active, f_prev=f_prev, left=left, df=df, gram=gram)  # fmt: skip
    multisecant_step(z, fz, best, status, *rest)


def _multisecant_transposed_triton(
    v: Tensor, left: Tensor, df: Tensor, gram: Tensor, newest: Tensor, count: Tensor, *rest: Any
) -> Tensor:
    from ..kernels.multisecant_step import multisecant_transposed

    _check_step("multisecant_transposed_triton", v, "v", left=left, df=df, gram=gram, newest=newest, count=count)
    return multisecant_transposed(v, left, df, gram, newest, count, *rest)


register("picard_step", _SCHEMAS["picard_step"], _no_output, _picard_step_triton)
register("multisecant_step", _SCHEMAS["multisecant_step"], _no_output, _multisecant_step_triton)
register("broyden_step", _SCHEMAS["broyden_step"], _no_output)
register("multisecant_transposed", _SCHEMAS["multisecant_transposed"], _like_first, _multisecant_transposed_triton)
