"""The rows of samples: which tensors of x have them, which take the place of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..grouping import Groups
from ..solution import Solution, Status


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` (N,) in a shape that broadcasts over the rows of `like`."""
    return mask.view(-1, *([1] * (like.dim() - 1)))


def mark_samples(x: Any, rows: int, declared: Any = None) -> list[bool]:
    """Whether each leaf of x has one row per row of z.

    As `declared`, a tree like x of truth values; else every dense tensor of `rows` rows that is no parameter and,
    beside others, no (rows, rows) matrix, which may as well be a weight or an adjacency.

    Raises:
        ValueError: `declared` has not the structure of x, or declares a tensor of another number of rows.
    """
    leaves, spec = pytree.tree_flatten(x)
    if declared is None:
        return [_looks_per_sample(leaf, rows, alone=len(leaves) == 1) for leaf in leaves]
    marks, given = pytree.tree_flatten(declared)
    if given != spec or not all(isinstance(mark, bool) for mark in marks):
        raise ValueError(f"per_sample must hold True or False in the structure of x, {spec}, got {declared!r}")
    for leaf, mark in zip(leaves, marks, strict=True):
        if mark and not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows):
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"per_sample declares a leaf of x that must have {rows} rows, as z0 has, got {got}")
    return marks


def _looks_per_sample(leaf: Any, rows: int, alone: bool) -> bool:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or leaf.layout != torch.strided:
        return False
    return leaf.dim() > 0 and len(leaf) == rows and (alone or leaf.shape != (rows, rows))


def take_rows(x: Any, marks: list[bool], rows: Tensor) -> Any:
    """x with these rows (b,) alone of the tensors marked."""
    leaves, spec = pytree.tree_flatten(x)
    taken = [leaf.index_select(0, rows) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return pytree.tree_unflatten(taken, spec)


def without_broken(
    x: Any, solution: Solution, groups: Groups | None = None, declared: Any = None
) -> tuple[Any, Any, Tensor]:
    """(z*, x, broken) with stand-ins in the rows of samples whose solve met a value that is not finite."""
    broken = solution.status == Status.NONFINITE
    if groups is not None:
        broken = groups.of_rows(broken)
    if not len(broken) or (broken.device.type == "cpu" and not bool(broken.any())):
        return solution.value, x, broken
    marks = mark_samples(x, len(broken), declared)
    healthy = ~broken
    donor = healthy.to(torch.int8).argmax(keepdim=True)

    def stand_in(leaf: Tensor) -> Tensor:
        row = leaf.index_select(0, donor)
        return torch.where(per_row(broken, leaf), torch.where(healthy.any(), row, torch.zeros_like(row)), leaf)

    leaves, spec = pytree.tree_flatten(x)
    replaced = [stand_in(leaf) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return pytree.tree_map(stand_in, solution.value), pytree.tree_unflatten(replaced, spec), broken
