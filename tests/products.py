"""Products of matrices whose last bits change from call to call, as MKL's may with the place of the operands in memory.

Imported by conftest.py for tests/perturbed.py. Torch's own operations keep their bits.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor

# Without products of batches: torch's own loops compute the small ones of the tests.
OPS = [f"{name}{form}" for name in ("mm", "addmm", "addmv") for form in ("", ".out")]
OPS += ["addmm_", "addmv_", "dot", "vdot", "convolution", "convolution_backward"]
NOISE = random.Random(0)
LIBRARY = torch.library.Library("aten", "IMPL")


def change(product: Any) -> None:
    """Multiply by a factor of about one. Half precision stays: products that are added up in float32 seldom differ
    there. So do sums of short binary fractions, which are exact in any order."""
    if not isinstance(product, Tensor) or product.dtype not in (torch.float32, torch.float64, torch.complex128):
        return
    fractions = torch.view_as_real(product) if product.is_complex() else product
    if not torch.equal(fractions, (fractions * 1024).round() / 1024):
        product.mul_(1 + NOISE.uniform(-4, 4) * torch.finfo(product.dtype).eps)


def replace(op: str) -> None:
    kernel = torch.library.get_kernel(op, "CPU")

    @torch._disable_dynamo
    def changed(keys: Any, *arguments: Any, **named: Any) -> Any:
        result = kernel.call_boxed(keys, *arguments, **named)
        for product in result if isinstance(result, (tuple, list)) else [result]:
            change(product)
        return result

    LIBRARY.impl(op, changed, "CPU", with_keyset=True)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Warning only once for all operators,  other operators may also be overridden")
    for op in OPS:
        replace(f"aten::{op}")
