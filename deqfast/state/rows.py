"""Rows of samples: which tensors of x have them, and healthy rows in place of broken ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..solution import Solution, Status
from ..torch_internals import pytree
from ..torch_internals.ranks import InStep, Ranks
from ..torch_internals.transforms import values
from ..torch_internals.weights import modules_of, undone
from .groups import Groups

Function = Callable[[Any, Any], Any]


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` (N,) in a shape that broadcasts over the rows of `like`."""
    return mask.view(-1, *([1] * (like.dim() - 1)))


def rows_of(leaf: Tensor) -> Tensor:
    """The rows of `leaf` as a matrix (N, D); of complex numbers the real and imaginary parts."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    return leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]


def all_finite(leaves: Sequence[Tensor], parts: Ranks | None = None) -> Tensor:
    """Mask (N,) of the rows whose numbers are finite in all leaves, and on all processes that have a part of them."""
    finite = torch.stack([torch.isfinite(rows_of(leaf)).all(dim=1) for leaf in leaves]).all(dim=0)
    return finite if parts is None else parts.most((~finite).int()) == 0


def known_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of the tensor are known to be finite, from their sum.

    A finite sum has finite terms only; a sum that is not finite may have overflowed. Only tensors on a CPU are read.
    """
    return tensor.device.type == "cpu" and bool(torch.isfinite(values(tensor).sum()))


def mark_samples(x: Any, rows: int, declared: Any = None) -> list[bool | None]:
    """Whether each leaf of x has one row per row of z; None: it has as many, but may be a weight.

    If `declared`, a tree like x of truth values, is given, it decides. Else a leaf may have rows of samples if it is a
    dense tensor with dimensions and not a parameter. The only such leaf of x has them; of several each may.

    Raises:
        ValueError: `declared` has not the structure of x, or declares a tensor of another number of rows.
    """
    leaves, spec = pytree.tree_flatten(x)
    if declared is None:
        able = [_may_be_per_sample(leaf) for leaf in leaves]
        mark = None if sum(able) > 1 else True
        return [mark if may and len(leaf) == rows else False for may, leaf in zip(able, leaves, strict=True)]
    marks, given = pytree.tree_flatten(declared)
    if given != spec or not all(isinstance(mark, bool) for mark in marks):
        raise ValueError(f"per_sample must hold True or False in the structure of x, {spec}, got {declared!r}")
    for leaf, mark in zip(leaves, marks, strict=True):
        if mark and not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows):
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"per_sample declares a leaf of x that must have {rows} rows, as z0 has, got {got}")
    return marks


def dropped_samples(
    x: Any, rows: int, declared: Any = None, why: str = "drop_converged drops rows"
) -> list[bool | None]:
    """As ``mark_samples``, if nothing can be tried, with the reason why; ValueError if a leaf may be a weight."""
    marks = mark_samples(x, rows, declared)
    if None in marks:
        example = pytree.tree_unflatten([mark is not False for mark in marks], pytree.tree_structure(x))
        raise ValueError(
            f"per_sample must say which tensors of x have a row per sample, because x has several and {why}: give a "
            f"tree of True and False, such as per_sample={example!r}"
        )
    return marks


def has_candidates(x: Any, declared: Any = None) -> bool:
    """Return whether several leaves of x may have rows of samples, for any number of rows."""
    return declared is None and sum(map(_may_be_per_sample, pytree.tree_leaves(x))) > 1


def _may_be_per_sample(leaf: Any) -> bool:
    is_dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() > 0
    return is_dense and not isinstance(leaf, nn.Parameter)


def take_rows(x: Any, marks: list[bool | None], rows: Tensor) -> Any:
    """x with only these rows (b,) of the marked tensors."""
    leaves, spec = pytree.tree_flatten(x)
    taken = [leaf.index_select(0, rows) if mark else leaf for leaf, mark in zip(leaves, marks, strict=True)]
    return pytree.tree_unflatten(taken, spec)


def without_broken(
    f: Function,
    x: Any,
    solution: Solution,
    groups: Groups | None = None,
    declared: Any = None,
    ranks: InStep | None = None,
) -> tuple[Any, Any, Tensor | None]:
    """(z*, x, broken), with a healthy row in place of each sample whose solve of f met a value that is not finite.

    broken: (N,) mask of these rows; None if there are no samples. ranks: see ``with_stand_ins``.
    """
    broken = solution.status == Status.NONFINITE
    if groups is not None:
        broken = groups.per_row(broken)
    if not len(broken) and ranks is None:
        return solution.value, x, None
    z, x = with_stand_ins(f, solution.value, x, broken, declared, ranks)
    return z, x, broken


def with_stand_ins(
    f: Function, z: Any, x: Any, broken: Tensor, declared: Any = None, ranks: InStep | None = None
) -> tuple[Any, Any]:
    """(z, x) with a healthy row in place of each `broken` one (N,); zeros if no row is healthy.

    Leaves of x that only may have rows of samples are tried in f, if there is a broken row; this waits for the device.
    With `ranks`, all of them call f as often, if any has a broken row.
    """
    marks: list[Any] = mark_samples(x, len(broken), declared)
    z = pytree.tree_map(lambda leaf: stand_in(leaf, broken), z)
    if None in marks or ranks is not None:
        is_broken = bool(values(broken).any())
        if not (is_broken if ranks is None else ranks.any(is_broken)):
            return z, x
        marks = settled(marks, f, z, x, broken, ranks is not None)
    leaves, spec = pytree.tree_flatten(x)
    kept = [leaf if mark is False else stand_in(leaf, broken & mark) for leaf, mark in zip(leaves, marks, strict=True)]
    return z, pytree.tree_unflatten(kept, spec)


def stand_in(leaf: Tensor, broken: Tensor) -> Tensor:
    """`leaf` with a healthy row in place of each `broken` one (N,); zeros if no row is healthy."""
    if not len(leaf):
        return leaf
    healthy = ~broken
    row = leaf.index_select(0, healthy.to(torch.int8).argmax(keepdim=True))
    return torch.where(per_row(broken, leaf), torch.where(healthy.any(), row, torch.zeros_like(row)), leaf)


@torch.no_grad()
def settled(marks: list[bool | None], f: Function, z: Any, x: Any, broken: Tensor, in_step: bool = False) -> list[Any]:
    """`marks` with a truth value, perhaps a tensor, for each None: whether the leaf has rows of samples.

    It has if f stays finite in all other rows when the leaf's `broken` rows (N,) are NaN. A weight would make more rows
    NaN. A leaf of integers has if f keeps its values there when these rows are replaced. z must be finite. `in_step`:
    call f also for leaves that another rank has to try, as their number of rows may depend on the rank.
    """
    leaves, spec = pytree.tree_flatten(x)
    modules = modules_of(f)
    answers: list[Any] = list(marks)

    def rows_with(leaf: Tensor, i: int) -> list[Tensor]:
        with undone(modules, broken.device):  # the cell may count its calls, or draw random numbers
            values = f(z, pytree.tree_unflatten([*leaves[:i], leaf, *leaves[i + 1 :]], spec))
        return [rows_of(value) for value in pytree.tree_leaves(values)]

    for i, leaf in enumerate(leaves):
        is_masked = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        if marks[i] is not None:
            for _ in range(2 - is_masked if in_step and _may_be_per_sample(leaf) else 0):
                rows_with(leaf, i)
            continue
        if is_masked:
            kept = [rows.isfinite() for rows in rows_with(leaf.masked_fill(per_row(broken, leaf), torch.nan), i)]
        else:
            pairs = zip(rows_with(stand_in(leaf, broken), i), rows_with(leaf, i), strict=True)
            kept = [torch.isclose(*pair, rtol=torch.finfo(pair[0].dtype).eps ** 0.5) for pair in pairs]
        answers[i] = torch.stack([(rows.all(dim=1) | broken).all() for rows in kept]).all()
    return answers
