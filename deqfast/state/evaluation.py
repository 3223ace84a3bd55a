"""Evaluation of f, which must not write to its argument: that is the solver's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..torch_internals import pytree


def evaluate(f: Callable[..., Any], z: Any, *more: Any) -> Any:
    """Return f(z, *more); raise ValueError if f has written to z, which is the solver's memory."""
    before = versions(z)
    value = f(z, *more)
    if versions(z) != before:
        raise writes()
    return value


def writes() -> ValueError:
    """Error for an f that has written to its argument."""
    return ValueError(
        "f must not modify its argument z, got an f that works in place on it: begin with an operation that is not "
        "in place, such as z.mul(2) for z.mul_(2), ReLU() for ReLU(inplace=True), or with z.clone()"
    )


def versions(tree: Any) -> int | list[int]:
    """Version numbers, which change if something writes to the tensors of a structure."""
    return version(tree) if isinstance(tree, Tensor) else [version(leaf) for leaf in pytree.tree_leaves(tree)]


def countable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode: torch would not count writes to it, nor record it."""
    return tensor.clone() if tensor.is_inference() else tensor


def version(tensor: Tensor) -> int:
    """Version number, which changes if something writes to the tensor."""
    return 0 if tensor.is_inference() else tensor._version  # a copy made in inference mode has no count
