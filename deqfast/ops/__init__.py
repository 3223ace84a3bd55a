"""The ops: schemas, fakes, argument checks and the choice of kernel. The only place that names a backend.

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
==========  ============  =====================================================================================
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import reference

KERNELS = ("auto", "triton", "cuda", "cpp", "torch")
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
}

_library = torch.library.Library("deqfast", "DEF")


def _no_output(*args: Any) -> None:
    """Fake of an op that only mutates its arguments."""


def _check_step(op: str, z: Tensor, **others: Tensor) -> None:
    """The checks of csrc/common/checks.h, for the kernels that are launched from Python."""
    batch, dim = z.shape if z.dim() == 2 else (-1, -1)
    if z.dim() != 2 or z.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: `z` must be (B, D) float32 or float64, got {tuple(z.shape)} {z.dtype}")
    history = others["left"].shape[1] if "left" in others and others["left"].dim() == 3 else 0
    history_dtype = others["left"].dtype if "left" in others else z.dtype
    if history_dtype != z.dtype and not (history_dtype == torch.bfloat16 and z.dtype == torch.float32):
        raise ValueError(f"{op}: `left` must have the dtype of `z`, or bfloat16 beside float32, got {history_dtype}")
    expected = {
        "status": ((batch,), torch.int8),
        "iterations": ((batch,), torch.int32),
        "residual": ((2, batch), z.dtype),
        "gain": ((2, batch), z.dtype),
        "active": ((1,), torch.int32),
        "left": ((batch, history, dim), history_dtype),
        "df": ((batch, history, dim), history_dtype),
        "gram": ((batch, history + 2, history), z.dtype),
    }
    for name, tensor in {"z": z, **others}.items():
        shape, dtype = expected.get(name, ((batch, dim), z.dtype))
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{op}: `{name}` must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.device != z.device:
            raise ValueError(f"{op}: `{name}` must be contiguous and on the device of `z` ({z.device})")
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


# Triton shares the CUDA dispatch key with the CUDA kernels, hence ops of its own; on the CPU it runs interpreted.
_TRITON = {"picard_step": _picard_step_triton, "multisecant_step": _multisecant_step_triton}

for _op, _schema in _SCHEMAS.items():
    for _name in (_op, f"{_op}_triton"):
        _library.define(_name + _schema)
        torch.library.register_fake(f"deqfast::{_name}", _no_output, lib=_library)
    for _key in ("CPU", "CUDA"):
        _library.impl(f"{_op}_triton", _TRITON[_op], _key)

from .. import _extension  # noqa: E402  (its kernels need the schemas above)
from .._extension import Availability  # noqa: E402


def _triton() -> Availability:
    try:
        import_module("triton")
    except ImportError as error:
        return Availability(False, f"triton cannot be imported: {error}")
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return Availability(True)
    return Availability(False, "no CUDA device was found (TRITON_INTERPRET=1, set before the start, interprets)")


def backends() -> dict[str, Availability]:
    """What can run here: kernel name -> ``Availability(available, reason)``, which is falsy when not available."""
    cuda = Availability(_extension.cuda_module is not None, _extension.cuda_reason)
    if cuda and not torch.cuda.is_available():
        cuda = Availability(False, "no CUDA device was found")
    return {
        "torch": Availability(True),
        "cpp": Availability(_extension.cpp_module is not None, _extension.cpp_reason),
        "triton": _triton(),
        "cuda": cuda,
    }


@dataclass(frozen=True)
class Kernel:
    """The chosen implementation of every op."""

    name: str
    picard_step: Callable[..., None]
    multisecant_step: Callable[..., None]

    @property
    def max_history(self) -> int | None:
        return MAX_GPU_HISTORY if self.name in ("triton", "cuda") else None


def empty_history(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory without values for a solve's history; on the CPU in large pages where the system gives them."""
    history = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and _extension.cpp_module is not None:
        _extension.cpp_module.advise_huge_pages(history.data_ptr(), history.nbytes)
    return history


def _kernel(name: str) -> Kernel:
    if name == "torch":
        return Kernel(name, reference.picard_step, reference.multisecant_step)
    if name == "triton":
        return Kernel(name, torch.ops.deqfast.picard_step_triton, torch.ops.deqfast.multisecant_step_triton)
    return Kernel(name, torch.ops.deqfast.picard_step, torch.ops.deqfast.multisecant_step)


def check_kernel_name(kernel: str) -> str:
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    return kernel


@functools.cache
def _warn_of_fallback(reasons: str) -> None:
    warnings.warn(f"deqfast: kernel='auto' takes the slower torch, for {reasons}", stacklevel=4)


def choose_kernel(kernel: str, device: torch.device) -> Kernel:
    """Resolve `kernel` for tensors on `device`.

    "auto" takes cuda, then triton, on CUDA tensors and cpp on CPU tensors, else torch, with one warning. A kernel asked
    for by name that cannot serve raises RuntimeError with the reason.
    """
    check_kernel_name(kernel)
    available = backends()
    if kernel == "auto":
        preferred = {"cuda": ("cuda", "triton"), "cpu": ("cpp",)}.get(device.type, ())
        name = next((name for name in preferred if available[name]), "torch")
        if preferred and name == "torch":
            _warn_of_fallback("; ".join(f"{missing}: {available[missing].reason}" for missing in preferred))
        return _kernel(name)
    if not available[kernel]:
        raise RuntimeError(f"kernel={kernel!r} is not available: {available[kernel].reason}")
    interpreted = kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    serves = {"cpp": ("cpu",), "cuda": ("cuda",), "triton": ("cpu", "cuda") if interpreted else ("cuda",)}
    if device.type not in serves.get(kernel, (device.type,)):
        raise RuntimeError(f"kernel={kernel!r} does not run on {device.type} tensors, only on {serves[kernel][0]}")
    return _kernel(kernel)
