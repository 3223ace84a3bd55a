"""Availability of the kernels, and the choice among them."""

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import _extension
from .._checks import check_choice
from .._extension import Availability
from ..kernels.constants import MAX_GPU_HISTORY
from ..torch_internals.dynamo import constant_in_traces
from ..torch_internals.transforms import runs_only
from .memory import empty_history
from .registry import OPS
from .steps import Parts, StopRule, split
from .steps.positions import Positions

KERNELS = ("auto", "triton", "cuda", "cpp", "torch")


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _availability(kernel: str) -> Availability:
    if kernel == "torch":
        return Availability(True)
    if kernel == "cpp":
        return Availability(_extension.cpp_module is not None, _extension.cpp_reason)
    if kernel == "cuda":
        if _extension.cuda_module is None or torch.cuda.is_available():
            return Availability(_extension.cuda_module is not None, _extension.cuda_reason)
        return Availability(False, "no CUDA device was found")
    try:
        import_module("triton")
    except ImportError as error:
        return Availability(False, f"triton cannot be imported: {error}")
    if _interprets() or torch.cuda.is_available():
        return Availability(True)
    return Availability(False, "no CUDA device was found (TRITON_INTERPRET=1, set before the start, interprets)")


def backends() -> dict[str, Availability]:
    """Kernels that can run here: name -> ``Availability(available, reason)``, which is falsy if not available."""
    return {kernel: _availability(kernel) for kernel in ("torch", "cpp", "triton", "cuda")}


# Made at import, because a trace cannot run through imports.
_REFERENCES = {name: op.reference for name, op in OPS.items()}


@dataclass(frozen=True)
class Kernel:
    """The chosen implementation of every op.

    in_graph: the steps become part of an exported graph, in which all memory has values. parts: what sums over rows
    that are parts of one sample, or the positions of one causal solve.
    """

    name: str
    in_graph: bool = False
    parts: Parts | Positions | None = None

    def op(self, name: str) -> Callable[..., Any]:
        """The op `name` as this kernel runs it; it takes the arguments of its table by position."""
        if self.parts is None:
            return self._own(name)
        if name == "multisecant_transposed":
            return functools.partial(_REFERENCES[name], parts=self.parts)
        halves = getattr(split, name)
        return lambda *values: halves(OPS[name].table(*values), self._own, self.parts)

    def _own(self, name: str) -> Callable[..., Any]:
        if self.name == "torch":
            return _REFERENCES[name]
        return getattr(torch.ops.deqfast, f"{name}_triton" if self.name == "triton" else name)

    def step(self, name: str, rule: StopRule, *numbers: float) -> Callable[..., None]:
        """The step `name` with these numbers, as a function of its tensors, k and last, for all steps of a solve.

        Triton's op checks the arguments of the first step. Later steps are launched without the op if torch does not
        need to see them: the op and its checks take longer than the launches.
        """
        op, given = self.op(name), (*rule, *numbers)
        if self.name != "triton" or self.parts is not None:
            op = getattr(op, "default", op)
            return lambda *arguments: op(*arguments, *given)
        launch = OPS[name].launch

        def step(*arguments: Any) -> None:
            if arguments[-2] and runs_only(*arguments[:2]):
                launch(*arguments, rule, *numbers)
            else:
                op(*arguments, *given)

        return step

    def bind(
        self, name: str, z: Tensor, tensors: tuple[Tensor, ...], rule: StopRule, *numbers: float
    ) -> Callable[[Tensor, int, bool], int | None]:
        """``step`` with its tensors, except f(z), as a function of f(z), k and last.

        On a CPU, steps run without the op if torch does not need to see them: the dispatcher takes longer.
        """
        if self.name != "cpp" or self.parts is not None or not OPS[name].binds or not runs_only(z, z):
            step = self.step(name, rule, *numbers)
            return lambda fz, k, last: step(z, fz, *tensors, k, last)
        assert _extension.cpp_module is not None
        bind = getattr(torch.ops.deqfast, f"{name}_bind").default
        run = _extension.cpp_module.bound_step(bind(z, z, *tensors, 0, False, *rule, *numbers))
        size, dtype = z.numel(), z.dtype

        def bound(fz: Tensor, k: int, last: bool) -> int | None:
            fits = fz.dtype is dtype and fz.numel() == size and fz.is_contiguous() and fz.is_cpu
            if fits and type(fz) is Tensor and not (fz.is_neg() or fz._is_zerotensor()):  # its numbers are in memory
                return run(fz.data_ptr(), k, last)
            return self.step(name, rule, *numbers)(z, fz, *tensors, k, last)  # its errors say what is wrong

        return bound

    def history(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a solve's history. In a graph it is zeros, which stand for pairs that change nothing."""
        return (torch.zeros if self.in_graph else empty_history)(shape, dtype=dtype, device=device)

    def products(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As ``history``, for the products of pairs: in ordinary pages, of which a short solve uses few."""
        return (torch.zeros if self.in_graph else torch.empty)(shape, dtype=dtype, device=device)

    @property
    def max_history(self) -> int | None:
        return MAX_GPU_HISTORY if self.name in ("triton", "cuda") else None

    @property
    def has_broyden_step(self) -> bool:
        """Whether there is a ``broyden_step``; without it, Broyden keeps pairs.

        It derives pairs from steps that have one weight. Each position of a causal solve has its own.
        """
        return self.name in ("cpp", "torch") and not isinstance(self.parts, Positions)

    @property
    def channels_last_only(self) -> bool:
        """Whether the norm_act ops take images in this memory format only."""
        return self.name in ("triton", "cuda")


def check_kernel_name(kernel: str) -> str:
    """Return `kernel`; raise ValueError unless it is the name of a kernel."""
    check_choice("kernel", kernel, KERNELS)
    return kernel


@functools.cache
def _warn_of_fallback(reasons: str) -> None:
    warnings.warn(f"deqfast: kernel='auto' falls back to the slower torch: {reasons}", stacklevel=4)


def choose_kernel(kernel: str, device: torch.device) -> Kernel:
    """Resolve `kernel` for tensors on `device`.

    "auto" takes cuda, then triton, on CUDA tensors, and cpp on CPU tensors. If these are not available, it takes torch
    and warns once. A kernel chosen by name that cannot run raises RuntimeError.
    """
    check_kernel_name(kernel)
    if kernel == "auto":
        preferred = {"cuda": ("cuda", "triton"), "cpu": ("cpp",)}.get(device.type, ())
        name = next((name for name in preferred if _availability(name)), "torch")
        if preferred and name == "torch":
            _warn_of_fallback("; ".join(f"{missing}: {_availability(missing).reason}" for missing in preferred))
        return Kernel(name)
    available = _availability(kernel)
    if not available:
        raise RuntimeError(f"kernel={kernel!r} is not available: {available.reason}")
    serves = {"cpp": ("cpu",), "cuda": ("cuda",), "triton": ("cpu", "cuda") if _interprets() else ("cuda",)}
    if device.type not in serves.get(kernel, (device.type,)):
        raise RuntimeError(f"kernel={kernel!r} does not run on {device.type} tensors, only on {serves[kernel][0]}")
    return Kernel(kernel)


@functools.cache
def looked_up(name: str, device_type: str) -> str:
    """Name of the kernel that `name` stands for; cached, because it may import triton and query CUDA."""
    return choose_kernel(name, torch.device(device_type)).name


@constant_in_traces
def kernel_name(name: str, device_type: str) -> str:
    """Name of the kernel that `name` stands for, a constant in a trace."""
    return looked_up(name, device_type)
