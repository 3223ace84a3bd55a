"""Checks of the tensors of the neural-collapse metrics. Errors name the argument, what it is and what it must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_choice, check_count, check_number

_FEATURE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABEL_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CENTRES = {"sun": "class-means", "papyan": "samples", "zhu": "samples", "kothapalli": "class-means"}  # by convention
MAX_COUNTED_CLASSES = 1 << 20  # a larger label is a mistake: its class means would not fit into memory


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless `value` is a tensor of one of `dtypes`."""
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a tensor of dtype {allowed}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}; it must be one of {allowed}")


def check_vector(name: str, value: Any, dtypes: tuple[torch.dtype, ...], points: Tensor, owner: str) -> None:
    """Raise unless `value` is a tensor (N,) of one of `dtypes` on the device of the `points` (N, D), called `owner`."""
    check_tensor(name, value, dtypes)
    if value.shape != points.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be ({len(points)},), one per row of {owner}")
    check_device(name, value, points, owner)


def check_device(name: str, value: Tensor, other: Tensor, owner: str) -> None:
    """Raise unless `value` is on the device of the tensor `other`, called `owner`."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device}; it must be on {other.device} as {owner} is")


def check_features(features: Tensor) -> None:
    """Raise unless `features` is a floating-point tensor (N, D) with D at least 1."""
    check_tensor("features", features, _FEATURE_DTYPES)
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features has shape {tuple(features.shape)}; it must be (N, D): flatten or pool the rest")


def check_label_range(labels: Tensor, num_classes: int | None) -> int:
    """Number of classes: `num_classes`, or the largest label plus one if None. ValueError for a label out of range."""
    low, high = torch.stack(labels.aminmax()).tolist()
    if num_classes is None:
        num_classes = high + 1
        if num_classes > MAX_COUNTED_CLASSES:
            raise ValueError(f"labels holds {high}, of {num_classes} classes; give num_classes if that is meant")
    for value in (low, high):
        if not 0 <= value < num_classes:
            raise ValueError(f"labels holds {value}; every label must be in [0, {max(num_classes, 1)})")
    return num_classes


def check_options(rtol: float | None, center: str | None, convention: str, **counts: int | None) -> str:
    """Return the centre of the class means, after a check of the options and `counts` of ``neural_collapse``."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    if rtol is not None:
        check_number("rtol", rtol, 0.0, 0.99)
    check_choice("convention", convention, tuple(CENTRES))
    if center is None:
        return CENTRES[convention]
    check_choice("center", center, ("class-means", "samples"))
    return center


def check_weight(weight: Tensor, num_classes: int | None, width: int | None) -> None:
    """Raise unless `weight` is a floating-point tensor (num_classes, width); None for a size not known yet."""
    check_tensor("classifier_weight", weight, _FEATURE_DTYPES)
    expected = f"({'num_classes' if num_classes is None else num_classes}, {'D' if width is None else width})"
    fits = weight.ndim == 2 and num_classes in (None, weight.shape[0]) and width in (None, weight.shape[1])
    if not fits or weight.shape[0] == 0:
        raise ValueError(f"classifier_weight has shape {tuple(weight.shape)}; it must be {expected}")


def check_bias(bias: Tensor, num_classes: int) -> None:
    """Raise unless `bias` is a floating-point tensor (num_classes,)."""
    check_tensor("classifier_bias", bias, _FEATURE_DTYPES)
    if bias.shape != (num_classes,):
        raise ValueError(f"classifier_bias has shape {tuple(bias.shape)}; it must be ({num_classes},), one per class")


def check_classifier(
    weight: Tensor | None, bias: Tensor | None, num_classes: int | None, points: Tensor, name: str
) -> None:
    """Raise unless `weight` and `bias` fit each other, `num_classes` and the `points` (N, D) of that name."""
    if weight is not None:
        check_weight(weight, num_classes, points.shape[1])
    if bias is not None:
        if weight is None:
            raise ValueError("classifier_bias is given, and classifier_weight is None; a bias needs its weight")
        check_bias(bias, len(weight))
    for part_name, part in (("classifier_weight", weight), ("classifier_bias", bias)):
        if part is not None:
            check_device(part_name, part, points, name)
