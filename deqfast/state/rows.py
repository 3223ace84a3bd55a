"""Rows of samples: which tensors of x have them, and healthy rows in place of broken ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..solution import Solution, Status
from ..torch_internals import pytree
from ..torch_internals.transforms import values
from .groups import Groups


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` (N,) in a shape that broadcasts over the rows of `like`."""
    return mask.view(-1, *([1] * (like.dim() - 1)))


def rows_of(leaf: Tensor) -> Tensor:
    """The rows of `leaf` as a matrix (N, D); of complex numbers the real and imaginary parts."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    return leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]


def known_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of the tensor are known to be finite, from their sum.

    A finite sum has finite terms only; a sum that is not finite may have overflowed. Only tensors on a CPU are read.
    """
    return tensor.device.type == "cpu" and bool(torch.isfinite(values(tensor).sum()))


def mark_samples(x: Any, rows: int, declared: Any = None) -> list[bool | None]:
    """Whether each leaf of x has one row per row of z; None: it may have.

    If `declared`, a tree like x of truth values, is given, it decides. Else every dense tensor with `rows` rows counts,
    unless it is a parameter. A (rows, rows) matrix in an x of several leaves may have them: it may also be a weight or
    an adjacency matrix.

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


def _looks_per_sample(leaf: Any, rows: int, alone: bool) -> bool | None:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or leaf.layout != torch.strided:
        return False
    if not alone and leaf.shape == (rows, rows):
        return None
    return leaf.dim() > 0 and len(leaf) == rows


def take_rows(x: Any, marks: list[bool | None], rows: Tensor) -> Any:
    """x with only these rows (b,) of the marked tensors."""
    leaves, spec = pytree.tree_flatten(x)
    taken = [leaf.index_select(0, rows) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return pytree.tree_unflatten(taken, spec)


def without_broken(
    x: Any, solution: Solution, groups: Groups | None = None, declared: Any = None
) -> tuple[Any, Any, Tensor | None]:
    """(z*, x, broken), with a healthy row in place of each sample whose solve met a value that is not finite.

    broken: (N,) mask of these rows; None if the host knows that there are none.
    """
    if solution.counts is not None and not solution.counts[Status.NONFINITE]:
        return solution.value, x, None
    broken = solution.status == Status.NONFINITE
    if groups is not None:
        broken = groups.of_rows(broken)
    if not len(broken):
        return solution.value, x, None
    z, x = with_stand_ins(solution.value, x, broken, declared)
    return z, x, broken


def with_stand_ins(z: Any, x: Any, broken: Tensor, declared: Any = None) -> tuple[Any, Any]:
    """(z, x) with a healthy row in place of each `broken` one (N,); zeros if no row is healthy."""
    marks = mark_samples(x, len(broken), declared)
    healthy = ~broken
    donor = healthy.to(torch.int8).argmax(keepdim=True)

    def stand_in(leaf: Tensor, mark: bool | None = True) -> Tensor:
        if mark is False:
            return leaf
        row = leaf.index_select(0, donor)
        # If a leaf may be a weight, replace only rows of broken samples that are not finite: a weight breaks all
        # samples.
        gone = broken if mark else broken & ~torch.isfinite(leaf).all(dim=1)
        return torch.where(per_row(gone, leaf), torch.where(healthy.any(), row, torch.zeros_like(row)), leaf)

    leaves, spec = pytree.tree_flatten(x)
    replaced = [stand_in(leaf, mark) for leaf, mark in zip(leaves, marks, strict=True)]
    return pytree.tree_map(stand_in, z), pytree.tree_unflatten(replaced, spec)
