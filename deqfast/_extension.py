"""Find the shared objects, of the CPU's the one for its instructions; where one is absent, keep the reason."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ._checkout import CHECKOUT


@dataclass(frozen=True)
class Availability:
    """Whether a kernel can be used here; falsy when not, and then `reason` says why in plain words."""

    available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return self.reason or ("available" if self.available else "not available")


def _load(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(f"deqfast.{name}"), ""
    except ModuleNotFoundError:
        how = "install deqfast where a compiler is, without DEQFAST_BUILD=none"
        if CHECKOUT is not None:  # which hides an installed deqfast from a Python that is started there
            how += f", with pip install -e {CHECKOUT}"
        return None, f"deqfast.{name} was not built in {Path(__file__).parent}: {how}"
    except ImportError as error:  # for instance a CUDA object with a torch without CUDA
        return None, f"deqfast.{name} does not load: {error}"


def _load_cpp() -> tuple[ModuleType | None, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in ("x86_64", "AMD64") and not capability.startswith("AVX"):
        return None, f"deqfast._C_cpu needs a processor with AVX2, and torch finds {capability!r} here"
    if capability.startswith("AVX512"):
        module, _ = _load("_C_cpu_avx512")
        if module is not None:
            return module, ""
    return _load("_C_cpu")


# Importing a module registers its kernels, which needs the schemas: `deqfast.ops` imports this module after them.
cpp_module, cpp_reason = _load_cpp()
if (file := getattr(cpp_module, "__file__", None)) and hasattr(os, "RTLD_NOLOAD"):
    # Code of inductor finds its C functions from now on.
    ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
# An object that tells that it was built without its sibling has none; an earlier build may have left one.
_without_cuda = cpp_module.build_info().get("without_cuda") if cpp_module is not None else ""
if _without_cuda:
    cuda_module, cuda_reason = None, f"deqfast was built without CUDA kernels: {_without_cuda}"
else:
    cuda_module, cuda_reason = _load("_C_cuda")
