"""The dispatcher: operations inside of an op that run as they would in Python outside, or outside of all modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["OpOverload", "as_outside", "without_modes"]

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
