"""Packing of the state: one row per sample for the solvers, a tensor or a pytree of tensors for f."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import check_dense, check_number
from ..torch_internals import pytree
from .floors import float32_products_eps, stall_floor
from .groups import Groups
from .rows import rows_of

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
LARGEST_SCALE = 2.0**60  # beyond, squares of numbers divided by it are not representable in float32


@dataclass
class _Leaf:
    """Shape, dtype and memory order of one tensor of the state; its rows are flattened in memory order.

    The first `lead` dimensions are the rows: the batch, or the batch and the positions. A complex number counts as two
    real ones: the solve and the gradient use its real and imaginary parts.
    """

    shape: torch.Size
    dtype: torch.dtype
    lead: int
    order: list[int]  # the other dimensions, from the slowest to the fastest in memory
    inverse: list[int]  # permutation of all dimensions, from that order back
    in_order: bool  # nothing to permute: this is tested in every iteration
    width: int
    is_rows: bool  # (B, width) real numbers: the rows are the tensor itself

    @classmethod
    def of(cls, tensor: Tensor, lead: int = 1) -> _Leaf:
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        order = sorted(range(lead, len(shape)), key=lambda d: -strides[d])  # ties (sizes of 1) keep their order
        inverse = [*range(lead), *(lead + order.index(d) for d in range(lead, len(shape)))]
        in_order = inverse == [*range(len(shape))]
        width = math.prod(shape[lead:]) * (2 if dtype.is_complex else 1)
        is_rows = lead == 1 and len(shape) == 2 and not dtype.is_complex
        return cls(shape, dtype, lead, order, inverse, in_order, width, is_rows)

    def resized(self, *sizes: int) -> _Leaf:
        shape = torch.Size([*sizes, *self.shape[self.lead :]])
        return _Leaf(shape, self.dtype, self.lead, self.order, self.inverse, self.in_order, self.width, self.is_rows)

    def rows(self, tensor: Tensor) -> Tensor:
        """Rows (B, width) of `tensor`: a view if the memory order allows it, or the tensor itself."""
        if self.is_rows:
            return tensor
        if not self.in_order:
            tensor = tensor.permute(*range(self.lead), *self.order)
        if self.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        return tensor.reshape(math.prod(self.shape[: self.lead]), self.width)

    def cut(self, rows: Tensor) -> Tensor:
        """Contiguous rows of this leaf, given its columns of a whole state."""
        # ``contiguous`` returns a single row as it is, which may begin at an address that complex numbers do not allow.
        return rows.clone(memory_format=torch.contiguous_format) if self.dtype.is_complex else rows.contiguous()

    def restore(self, rows: Tensor) -> Tensor:
        """Tensor of the leaf's shape and memory order from its rows; a view of them if they are contiguous."""
        if self.is_rows:
            return rows.view_as(rows)
        if self.dtype.is_complex:
            rows = torch.view_as_complex(rows.contiguous().view(rows.shape[0], self.width // 2, 2))
        if self.in_order:
            return rows.reshape(self.shape)
        sizes = [self.shape[d] for d in self.order]
        return rows.reshape(*self.shape[: self.lead], *sizes).permute(self.inverse)


def is_of_state(tensor: Tensor) -> bool:
    """Return whether a state can consist of such numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def rows_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Dtype of the rows of a state of these tensors: float64 if any of them is in double precision, else float32."""
    double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if double else torch.float32


def check_scale(scale: Any) -> Any:
    """Return a copy of the tree `scale`; raise TypeError or ValueError for a leaf out of the allowed range.

    A block keeps solves with the numbers of their time, so that its tree must not change.
    """
    if scale is None:
        return None
    numbers, spec = pytree.tree_flatten(scale)
    for number in numbers:
        check_number("scale", number, 1 / LARGEST_SCALE, LARGEST_SCALE)
    return pytree.tree_unflatten(numbers, spec)


def factors_of(scale: Any, spec: pytree.TreeSpec) -> list[float] | None:
    """The powers of two nearest to the numbers of the tree `scale`, so that dividing by them rounds nothing."""
    if scale is None:
        return None
    try:
        numbers = spec.flatten_up_to(check_scale(scale))
    except ValueError as error:
        if str(error).startswith("scale must"):
            raise
        wanted = pytree.tree_unflatten([1.0] * spec.num_leaves, spec)
        raise ValueError(f"scale must hold a number for every tensor of z0, as {wanted} does, got {scale!r}") from None
    return [2.0 ** round(math.log2(number)) for number in numbers]


class Packing:
    """Map between the pytree that f takes and the rows (B, D) that the solvers work on.

    `groups`, `scale`: see ``deqfast.solve``. With `causal` each position is a row, (B * T, D).
    """

    length: int | None = None  # T, the positions of a sequence; None: each sample is a row

    def __init__(self, z0: Any, groups: Groups | Tensor | str | None = None, scale: Any = None, causal: bool = False):
        self.is_tensor = isinstance(z0, Tensor)
        leaves, self.spec = pytree.tree_flatten(z0)
        if not leaves:
            raise ValueError("z0 must hold at least one tensor, got an empty structure")
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not is_of_state(leaf):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"z0 must hold floating-point or complex tensors only, got {got}")
            check_dense("z0", leaf)
            if leaf.dim() == 0:
                raise ValueError("z0 must have the batch as its first dimension, got a tensor without dimensions")
            if leaf.shape[0] != leaves[0].shape[0] or leaf.device != leaves[0].device:
                raise ValueError(
                    "the tensors of z0 must have one batch size and one device, got "
                    + ", ".join(f"{tuple(x.shape)} on {x.device}" for x in leaves)
                )
        if causal:
            self.length = _length_of(leaves)
        self.leaves = [_Leaf.of(leaf, 1 + causal) for leaf in leaves]
        self.batch, self.device = leaves[0].shape[0] * (self.length or 1), leaves[0].device
        self.groups = groups if isinstance(groups, Groups | None) else Groups(groups, self.batch, self.device)
        if self.groups is not None:
            self.groups.check(self.batch, self.device)
            self.batch = self.groups.count
        self.products_eps = float32_products_eps(self.device)
        self.dtype = rows_dtype(leaves)
        self.factors = factors_of(scale, self.spec)
        self._note_rows()

    def signature(self) -> tuple[Any, ...]:
        """Key that two packings share if they differ only in the batch."""
        leaves = tuple((leaf.shape[1:], leaf.dtype, *leaf.order) for leaf in self.leaves)
        return "" if self.is_tensor else str(self.spec), leaves, self.device, *(self.factors or ())

    def resized(self, *sizes: int) -> Packing:
        """Packing of the same structure for another number of samples, or of sequences and positions."""
        packing = object.__new__(Packing)  # attribute by attribute: torch 2.11 does not trace copies
        packing.leaves, packing.batch = [leaf.resized(*sizes) for leaf in self.leaves], math.prod(sizes)
        packing.factors = self.factors
        packing.spec, packing.is_tensor, packing.dtype = self.spec, self.is_tensor, self.dtype
        packing.device, packing.groups, packing.products_eps = self.device, self.groups, self.products_eps
        packing._note_rows()
        return packing

    def _note_rows(self) -> None:
        """Note whether ``unpack`` gives a view (`is_view`), the rows (`is_rows`), or fewer digits (`is_narrow`).

        Every iteration tests this.
        """
        first, converts = self.leaves[0], self.factors is not None or self.groups is not None
        self.is_narrow = any(_REAL.get(leaf.dtype, leaf.dtype) != self.dtype for leaf in self.leaves)
        self.is_view = self.is_tensor and not converts and _REAL.get(first.dtype, first.dtype) == self.dtype
        self.is_rows = self.is_view and first.is_rows

    def transposed(self) -> Packing:
        """Packing of gradients of the state, whose rows are those of a state times its factors."""
        packing = self.resized(self.leaves[0].shape[0])
        packing.batch = self.batch
        packing.factors = None if self.factors is None else [1 / factor for factor in self.factors]
        return packing

    def pack(self, z: Any) -> Tensor:
        """Fresh rows (B, D) of z in the dtype of the solve."""
        if self.is_rows:
            rows: Tensor = z.clone(memory_format=torch.contiguous_format)
            return rows
        return self._gathered(self._joined([z] if self.is_tensor else self.spec.flatten_up_to(z)))

    def _gathered(self, rows: Tensor) -> Tensor:
        return rows if self.groups is None else self.groups.gather(rows)

    def _joined(self, leaves: list[Tensor]) -> Tensor:
        rows = [_as(leaf.rows(tensor), self.dtype) for leaf, tensor in zip(self.leaves, leaves, strict=True)]
        if self.factors is not None:
            rows = [columns / factor for columns, factor in zip(rows, self.factors, strict=True)]
        return rows[0].clone(memory_format=torch.contiguous_format) if len(rows) == 1 else torch.cat(rows, dim=1)

    def fill(self, whole: Any, part: Any, rows: Tensor) -> Any:
        """Structure like `whole` in the dtypes of `part`, with these rows replaced by `part`, f's output for them."""
        pairs = zip(self.spec.flatten_up_to(whole), self.check_value(part), strict=True)
        filled = [leaf.to(new.dtype, copy=True).index_copy_(0, rows, new) for leaf, new in pairs]
        return pytree.tree_unflatten(filled, self.spec)

    def check_value(self, value: Any) -> list[Tensor]:
        """Tensors of f's output; an error if it lacks the structure, shapes or device of z0."""
        first = self.leaves[0]
        alike = self.is_tensor and isinstance(value, Tensor) and value.shape == first.shape
        if alike and value.device == self.device and _fits(value, first) and value.layout is torch.strided:
            return [value]
        try:
            leaves = self.spec.flatten_up_to(value)  # finds the entries of a dict by their keys
        except ValueError:
            got = f"got {pytree.tree_structure(value)}: it returns the state and nothing else"
            raise ValueError(f"f must return the structure of its argument, {self.spec}, {got}") from None
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
        expected = [tuple(leaf.shape) for leaf in self.leaves]
        if shapes != expected:
            wanted, given = (expected[0], shapes[0]) if len(expected) == 1 else (expected, shapes)
            if not all(isinstance(x, Tensor) for x in leaves):
                what = "a tensor of shape" if len(expected) == 1 else "tensors of the shapes"
                raise ValueError(f"f must return {what} {wanted}, got {'None' if value is None else given}")
            raise ValueError(
                f"f must return the shape of its argument, {wanted}, got {given}; without z0, init and initial_state, "
                "a block's state starts at zeros like x"
            )
        for leaf, state in zip(leaves, self.leaves, strict=True):
            check_dense("the value of f", leaf)
            if leaf.device != self.device:
                raise ValueError(f"f must return tensors on the device of z0, {self.device}, got {leaf.device}")
            if not _fits(leaf, state):
                kind = "complex" if state.dtype.is_complex else "floating-point"
                raise TypeError(f"f must return {kind} tensors for {state.dtype} ones, got {leaf.dtype}")
        return leaves

    def packer(self, z: Tensor) -> Callable[[Any], Tensor]:
        """Map from f's output to its rows: a view of it if its dtype and memory order allow this, never of `z`."""
        shape, dtype, device, first, size = z.shape, z.dtype, z.device, z.data_ptr(), z.nbytes
        is_rows, rows_of_value = self.is_rows, self.rows_of_value

        def pack(value: Any) -> Tensor:
            rows: Tensor = value
            if not (
                is_rows
                and isinstance(value, Tensor)
                and value.dtype is dtype
                and value.shape == shape
                and value.is_contiguous()
                and value.device == device
            ):
                rows = rows_of_value(value)
            return rows.clone() if -size < rows.data_ptr() - first < size else rows

        return pack

    def rows_of_value(self, value: Any) -> Tensor:
        """Rows of f's output: a view of it, or the output itself, if its dtype and memory order allow this."""
        leaves = self.check_value(value)
        if len(leaves) > 1 or self.factors is not None:
            return self._gathered(self._joined(leaves))
        return self._gathered(_as(self.leaves[0].rows(leaves[0]), self.dtype).contiguous())

    def pack_numbers(self, name: str, numbers: Any) -> Tensor:
        """Rows (B, E) of a tensor with numbers for each row of the state; errors name it `name`.

        Raises:
            TypeError, ValueError: it is not such a tensor, or sparse, or on another device.
        """
        rows, got = self.leaves[0].shape[0], type(numbers).__name__
        if isinstance(numbers, Tensor):
            check_dense(name, numbers)
            fits = is_of_state(numbers) and numbers.shape[:1] == (rows,) and numbers.numel()
            if fits and numbers.device == self.device:
                return self._gathered(_as(rows_of(numbers), self.dtype))
            got = f"{numbers.dtype} {tuple(numbers.shape)} on {numbers.device}"
        raise ValueError(
            f"{name} must be a floating-point or complex tensor with numbers in each of its {rows} rows, "
            f"on {self.device}, got {got}"
        )

    def unpack(self, rows: Tensor) -> Any:
        """Argument of f: z0's structure, shapes, dtypes and memory order; a view of `rows` where possible."""
        if self.is_rows:
            return rows.view_as(rows)
        if self.groups is not None:
            rows = self.groups.scatter(rows)
        if self.is_tensor and self.factors is None:
            return _as(self.leaves[0].restore(rows), self.leaves[0].dtype)
        parts: Sequence[Tensor] = [rows]
        if len(self.leaves) > 1:
            parts = rows.split([leaf.width for leaf in self.leaves], dim=1)
            parts = [leaf.cut(part) for leaf, part in zip(self.leaves, parts, strict=True)]
        if self.factors is not None:
            parts = [part * factor for part, factor in zip(parts, self.factors, strict=True)]
        tensors = [leaf.restore(part).to(leaf.dtype) for leaf, part in zip(self.leaves, parts, strict=True)]
        return pytree.tree_unflatten(tensors, self.spec)

    def round_(self, rows: Tensor) -> None:
        """Round rows (B, D) in place to the numbers that ``unpack`` shows f: a step judges the iterate that f got."""
        if self.is_narrow:
            rows.copy_(self.pack(self.unpack(rows)))

    def stall_floor(self, value: Any) -> float:
        """Residual below which no progress means a stall, for the f that returned `value`: ``floors.stall_floor``."""
        return stall_floor(pytree.tree_leaves(value), self.leaves, self.device, self.products_eps)


def _length_of(leaves: Sequence[Tensor]) -> int:
    """The number of positions that all tensors of a state have; ValueError if they have no such number."""
    lengths = {leaf.shape[1] if leaf.dim() > 1 else 0 for leaf in leaves}
    if len(lengths) > 1 or not (length := lengths.pop()):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ValueError(
            f"causal needs the positions of a sequence as dimension 1 of each tensor of z0, at least one, got {shapes}"
        )
    return int(length)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype; ``Tensor.to`` takes a microsecond even if it already is."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _fits(value: Tensor, leaf: _Leaf) -> bool:
    """Return whether the value and the state are both complex or both real."""
    return value.is_complex() if leaf.dtype.is_complex else value.is_floating_point()
