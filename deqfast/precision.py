"""The precision that f runs in, of which the dtype of its value tells only a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# What torch may round the factors of float32 products and convolutions to, by its settings `fp32_precision`.
_FACTORS = {"tf32": 2.0**-10, "bf16": torch.finfo(torch.bfloat16).eps}


def float32_products_eps(device: torch.device) -> float:
    """Rounding unit of what torch may round the factors of float32 products and convolutions to; 0: of nothing."""
    backends: Any = torch.backends
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):  # has no TF32
            return 0.0
        settings = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    else:
        settings = (backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision)
    return max(_FACTORS.get(setting, 0.0) for setting in settings)


def rounding_unit(values: Iterable[Tensor], device: torch.device, products_eps: float) -> float:
    """Rounding unit of the `values` of an f on the device, by their dtypes, the autocast state and, where they are
    float32, `products_eps`, what ``float32_products_eps`` says."""
    dtypes = {value.dtype for value in values}
    units = [torch.finfo(dtype).eps for dtype in dtypes]
    if torch.is_autocast_enabled(device.type):
        units.append(torch.finfo(torch.get_autocast_dtype(device.type)).eps)
    if torch.float32 in dtypes:
        units.append(products_eps)
    return max(units)
