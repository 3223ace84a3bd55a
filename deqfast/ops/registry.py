"""How an op is registered: one schema and one fake for the op and for its Triton form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library = torch.library.Library("deqfast", "DEF")


def register(op: str, schema: str, fake: Callable[..., Any], triton: Callable[..., Any] | None = None) -> None:
    """Define `op` and `op`_triton with `schema`, "(arguments) -> (results)".

    The kernels of `op` come with the extensions. Triton shares the CUDA dispatch key with the CUDA kernels, hence an op
    of its own, run by `triton` on CUDA tensors and, interpreted, on CPU tensors; without `triton` there is none.
    """
    for name in (op, f"{op}_triton") if triton else (op,):
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"deqfast::{name}", fake, lib=library)
    for key in ("CPU", "CUDA") if triton else ():
        library.impl(f"{op}_triton", triton, key)
