"""Rounding floors of f. The dtype of f's value does not fully determine its precision."""

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.constants import ROUNDINGS_OF_STALL_FLOOR
from ..torch_internals.dynamo import constant_in_traces

# Units of two kinds: the rounding of f's value, and the rounding of the factors of its products, which averages out.
# The best residuals of residual blocks and dense cells with rounded factors are 0.01 to 0.3 of the latter.
_UNITS_OF_VALUES, _UNITS_OF_FACTORS = ROUNDINGS_OF_STALL_FLOOR, 0.25
# Kept, because torch.backends takes microseconds to find them.
_backends: Any = torch.backends
PRECISIONS: dict[str, tuple[Any, ...]] = defaultdict(
    tuple, cpu=(_backends.mkldnn.matmul, _backends.mkldnn.conv), cuda=(_backends.cuda.matmul, _backends.cudnn.conv)
)
_ON_CPUS = {"bf16": torch.finfo(torch.bfloat16).eps}
_ON_GPUS = {"tf32": 2.0**-10, **_ON_CPUS}


@constant_in_traces
def float32_products_eps(device: torch.device) -> float:
    """Rounding unit of the factors of float32 products and convolutions, by torch's settings `fp32_precision`; 0: none.

    On CPUs these mean bf16 only.
    """
    factors = (
        _ON_CPUS if device.type == "cpu" else _ON_GPUS if device.type == "cuda" and _has_tf32(device.index) else {}
    )
    return max([factors.get(part.fp32_precision, 0.0) for part in PRECISIONS[device.type]], default=0.0)


@functools.cache
def _has_tf32(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def residual_floor(values: Iterable[Any], states: Iterable[Any], device: torch.device, products_eps: float) -> float:
    """Relative residual that rounding may cause, for an f of these values and arguments, of which the dtypes count.

    The autocast state of the device counts. products_eps: of ``float32_products_eps``, for float32 values.
    """
    dtypes = {value.dtype for value in values}
    units = [torch.finfo(dtype).eps for dtype in dtypes.union(state.dtype for state in states)]
    if torch.is_autocast_enabled(device.type):
        units.append(torch.finfo(torch.get_autocast_dtype(device.type)).eps)
    floor: float = _UNITS_OF_VALUES * max(units)
    return max(floor, _UNITS_OF_FACTORS * products_eps) if dtypes & {torch.float32, torch.complex64} else floor


def stall_floor(values: Iterable[Any], states: Iterable[Any], device: torch.device, products_eps: float) -> float:
    """``residual_floor`` if f is less precise than float32, else 0. Below it, a residual without gain is a stall."""
    floor = residual_floor(values, states, device, products_eps)
    return floor if floor > _UNITS_OF_VALUES * torch.finfo(torch.float32).eps else 0.0
