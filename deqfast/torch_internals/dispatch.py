"""The dispatcher: operations inside of an op that run as they would in Python outside, or outside of all modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from .dynamo import is_tracing
from .transforms import in_torch_func

__all__ = ["OpOverload", "as_outside", "runs_only", "without_modes"]

# Excluded within an op that a compiled graph calls: autograd, lazy views such as conj(), and torch.func.
_LEFT_OUT = (
    *("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"),
    *("Conjugate", "Negative", "ZeroTensor"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchGradWrapper", "FuncTorchBatched"),
    "FuncTorchVmapMode",
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Context without torch.func's transforms and without modes such as FakeTensorMode."""
    with torch._C._DisableFuncTorch(), _disable_current_modes():
        yield


def as_outside() -> Any:
    """Context in which operations run as in Python outside of the op."""
    guards: Any = torch._C  # no public function re-enables autograd there
    excluded = guards._dispatch_tls_local_exclude_set()
    for key in _LEFT_OUT:
        excluded = excluded.remove(getattr(guards.DispatchKey, key))
    return guards._ForceDispatchKeyGuard(guards._dispatch_tls_local_include_set(), excluded)


def runs_only(a: Tensor, b: Tensor) -> bool:
    """Return whether an op on these tensors, which needs no gradient, would run its kernel and nothing else.

    Reasons for more are a trace, a transform, a mode, the profiler, a subclass of Tensor, or two devices. (A mode of
    torch functions only sees the first step of a solve.)
    """
    if is_tracing() or in_torch_func() or forward_ad._current_level >= 0:
        return False
    if is_in_torch_dispatch_mode() or profiler._is_profiler_enabled:
        return False
    return type(a) is Tensor and type(b) is Tensor and a.device == b.device
