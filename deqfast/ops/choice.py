"""Which kernels can run here, and the choice among them. The only place that names a backend."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .. import _extension, reference
from .._extension import Availability
from .steps import MAX_GPU_HISTORY

KERNELS = ("auto", "triton", "cuda", "cpp", "torch")


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

    def op(self, name: str) -> Callable[..., Any]:
        """The op `name` as this kernel runs it."""
        if self.name == "torch":
            return getattr(reference, name)
        return getattr(torch.ops.deqfast, f"{name}_triton" if self.name == "triton" else name)

    @property
    def max_history(self) -> int | None:
        return MAX_GPU_HISTORY if self.name in ("triton", "cuda") else None

    @property
    def has_broyden_step(self) -> bool:
        """Whether there is a ``broyden_step``; elsewhere Broyden keeps pairs."""
        return self.name in ("cpp", "torch")

    @property
    def channels_last_only(self) -> bool:
        """Whether the norm_act ops take images in no other memory format."""
        return self.name in ("triton", "cuda")


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
        return Kernel(name)
    if not available[kernel]:
        raise RuntimeError(f"kernel={kernel!r} is not available: {available[kernel].reason}")
    interpreted = kernel == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    serves = {"cpp": ("cpu",), "cuda": ("cuda",), "triton": ("cpu", "cuda") if interpreted else ("cuda",)}
    if device.type not in serves.get(kernel, (device.type,)):
        raise RuntimeError(f"kernel={kernel!r} does not run on {device.type} tensors, only on {serves[kernel][0]}")
    return Kernel(kernel)
