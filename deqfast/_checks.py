"""Checks of arguments: each names the argument, what it must be and what it is."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
    """Raise unless `value` is a finite real number in [low, high] (or ]low, high])."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    bound = f"{'greater than' if low_open else 'at least'} {low:g}"
    bound += f" and at most {high:g}" if high < math.inf else ""
    if not math.isfinite(number) or number > high or number < low or (low_open and number == low):
        raise ValueError(f"{name} must be finite and {bound}, got {value!r}")


def check_count(name: str, value: Any, low: int = 1) -> None:
    """Raise unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError if `tensor` is sparse or nested."""
    if tensor.is_nested or tensor.layout != torch.strided:
        jagged = "a nested tensor, whose values() are rows for the `groups` of a solve"
        got = jagged if tensor.layout == torch.jagged else "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be dense, of layout torch.strided, got {got}")
