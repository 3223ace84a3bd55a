"""The layout of a state: all that a compiled solve depends on, apart from its options."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..state.floors import float32_products_eps
from ..torch_internals import pytree
from .solve import Options, Solve

MOST = 64  # solves that a block keeps; a training run has a few


def layout_of(z: Any) -> Any:
    """Key of shapes, strides, dtypes, devices and settings of torch that change rounding; None for other tensors."""
    if type(z) is Tensor:
        if z.layout is not torch.strided or z.is_nested:
            return None
        device = z.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return z.shape, z.stride(), z.dtype, device, autocast, float32_products_eps(device)
    leaves, spec = pytree.tree_flatten(z)
    if not leaves or not all(isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested for t in leaves):
        return None
    return spec, tuple([layout_of(leaf.as_subclass(Tensor)) for leaf in leaves])


class Solves:
    """Compiled solves of a block, by their options and layouts."""

    def __init__(self) -> None:
        self._kept: dict[Any, Solve] = {}
        self._lock = threading.Lock()

    def of(self, options: Options, z0: Any) -> Solve:
        """Solve from z0 with these options, which is compiled if none is kept."""
        if (layout := layout_of(z0)) is None:
            return Solve(z0, options)
        if (found := self._kept.get((options, layout))) is not None:
            return found
        solve = Solve(z0, options)
        with self._lock:
            if len(self._kept) >= MOST:
                self._kept.clear()
            return self._kept.setdefault((options, layout), solve)

    def __getstate__(self) -> dict[str, Any]:
        """State without the solves: a copy compiles its own."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Solves.__init__(self)
