"""Tables of arguments, one per op. The op's schema, its fake and the checks of its Triton kernel follow from its table.

The table is a dataclass whose fields are the arguments in their order. A tensor is annotated with ``Shaped``. A
number is annotated with ``Range`` or ``Divisor`` if not all of its values are allowed. A NamedTuple is a record of
numbers; each of them is an argument ``float`` of the op.

The reference, in the module `reference` next to the table, and the launcher of the Triton kernel take one such object.
The op takes the arguments by position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

library = torch.library.Library("deqfast", "DEF")
OPS: dict[str, Op] = {}
# Number of layouts of a call's tensors that an op remembers: a training run has a few.
MAX_LAYOUTS = 1024


@dataclass(frozen=True, eq=False)
class Dtype:
    """Dtype of several arguments of an op; `allowed` gives the choice for each dtype of the op's `anchor`."""

    allowed: Mapping[torch.dtype, tuple[torch.dtype, ...]]


def anchored(*dtypes: torch.dtype) -> Dtype:
    """Dtype of the anchor itself, which is one of `dtypes`."""
    return Dtype({dtype: (dtype,) for dtype in dtypes})


@dataclass(frozen=True)
class Shaped:
    """Annotation of a tensor: its dimensions, as "B, M + 2, M", its dtype, whether the op writes to it, and its layout.

    layout: "contiguous", "channels_last", or "rows", with contiguous rows at any distance.
    """

    shape: str
    dtype: Dtype | torch.dtype
    mutated: bool = False
    layout: str = "contiguous"

    @cached_property
    def dims(self) -> list[tuple[str, int]]:
        """Name and summand of every dimension: ("M", 2) for "M + 2", and no name for a number."""
        parts = [re.fullmatch(r"([A-Za-z]*)(?: \+ )?(\d*)", part) for part in self.shape.split(", ")]
        return [(part[1], int(part[2] or 0)) for part in parts if part]

    def sizes(self, known: Mapping[str, int]) -> list[int]:
        return [known[name] + plus for name, plus in self.dims]

    def text(self, known: Mapping[str, int]) -> str:
        """Return the shape, with numbers in place of the known names."""
        named = zip(self.shape.split(", "), self.dims, strict=True)
        return f"({', '.join(str(known[name] + plus) if name in known else part for part, (name, plus) in named)})"


@dataclass(frozen=True)
class Range:
    """Integers from `least` to `most` (None: without bound)."""

    least: int
    most: int | None = None

    def __contains__(self, value: int) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)

    def wrong(self, value: int, sizes: Mapping[str, int]) -> str | None:
        """Return what `value` must do, in words, or None if it does."""
        return None if value in self else f"be {self}"

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Divisor:
    """Integers that divide the size of the dimension `dim`, whose entries are called `content`."""

    dim: str
    content: str

    def wrong(self, value: int, sizes: Mapping[str, int]) -> str | None:
        """Return what `value` must do, in words, or None if it does."""
        return None if value > 0 and sizes[self.dim] % value == 0 else f"divide the {sizes[self.dim]} {self.content}"


@dataclass(frozen=True)
class Result:
    """Tensor that an op returns: with the shape and memory format of the argument `like`, or with given dimensions."""

    name: str
    dtype: Dtype | torch.dtype
    like: str = ""
    shape: str = ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    *most, last = map(_name, dtypes)
    return f"{', '.join(most)} or {last}" if most else last


def check_devices(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors share the device of the first one.

    torch gives a call with any tensor on meta to the op's fake, which would otherwise return without a result.
    """
    (first, device), *others = [(name, tensor.device) for name, tensor in tensors.items()]
    for name, other in others:
        if other != device:
            raise ValueError(f"{op}: `{name}` must be on the device of `{first}` ({device}), got {other}")


@dataclass(frozen=True, eq=False)
class Op:
    """Op whose table is `arguments`. The tensor `anchor` determines the dtypes and the device of the others.

    limits: allowed sizes of its dimensions. check: raises ValueError if the Triton kernel does not support the tensors,
    without reading their values. triton: the module of ``deqfast.kernels`` that launches it; None: it has no Triton
    kernel. binds: the CPU has a `name`_bind with the same arguments, whose result is the address of a step with these
    tensors and numbers.
    """

    name: str
    arguments: type
    anchor: str
    results: tuple[Result, ...] = ()
    limits: Mapping[str, Range] = field(default_factory=dict)
    check: Callable[[str, Any], None] | None = None
    triton: str | None = None
    binds: bool = False
    # Sizes of the dimensions of valid calls, by the layouts of their tensors.
    _checked: dict[Any, dict[str, int]] = field(default_factory=dict, init=False)

    @cached_property
    def _fields(self) -> dict[str, tuple[type, Any]]:
        """Type and annotation of every argument."""
        hints = get_type_hints(self.arguments, include_extras=True)
        return {name: (*get_args(hint), hint, None)[:2] for name, hint in hints.items()}

    @cached_property
    def _tensors(self) -> dict[str, Shaped]:
        """Tensors among the arguments, the anchor first."""
        shaped = {name: note for name, (kind, note) in self._fields.items() if kind is Tensor}
        return {self.anchor: shaped.pop(self.anchor), **shaped}

    @cached_property
    def _limited(self) -> dict[str, Range | Divisor]:
        """Numbers whose values are restricted."""
        return {name: note for name, (kind, note) in self._fields.items() if kind is not Tensor and note is not None}

    @cached_property
    def _named(self) -> list[str]:
        """Names of the integer arguments that occur in shapes."""
        shapes = [*self._tensors.values(), *(Shaped(result.shape, result.dtype) for result in self.results)]
        dims = {dim for shaped in shapes for dim, _ in shaped.dims}
        return [name for name, (kind, _) in self._fields.items() if kind is int and name in dims]

    def _counts(self, a: Any) -> dict[str, int]:
        """Integer arguments that occur in shapes."""
        return {"": 0} | {name: getattr(a, name) for name in self._named}

    @property
    def schema(self) -> str:
        """Arguments and results as a schema of torch.library."""
        parts, writes = [], iter("abcdefghijklmnopqrstuvwxyz")
        for name, (kind, note) in self._fields.items():
            if name in self._records:
                parts += [f"float {number}" for number in self._records[name][2]]
            else:
                written = kind is Tensor and note.mutated
                parts.append(f"{kind.__name__}{f'({next(writes)}!)' if written else ''} {name}")
        return f"({', '.join(parts)}) -> ({', '.join(f'Tensor {result.name}' for result in self.results)})"

    @cached_property
    def _records(self) -> dict[str, tuple[slice, type, dict[str, type]]]:
        """Records: the positions of their numbers among the op's arguments, their type, and the numbers' types."""
        records, at = {}, 0
        for name, (kind, _) in self._fields.items():
            numbers = get_type_hints(kind) if issubclass(kind, tuple) else {}
            if numbers:
                records[name] = slice(at, at + len(numbers)), kind, numbers
            at += len(numbers) or 1
        return records

    def table(self, *values: Any) -> Any:
        """Table of a call; the call gives every number of a record as an argument of its own."""
        bound = list(values)
        for at, kind, numbers in reversed(self._records.values()):  # the last first: the others' positions stay
            bound[at] = [kind(*(to(number) for to, number in zip(numbers.values(), bound[at], strict=True)))]
        return self.arguments(*bound)

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """Reference of the op in plain torch."""
        function = getattr(import_module(f"{self.arguments.__module__}.reference"), self.name)
        _ = self._records  # now, because a trace cannot enter the lock of a cached property
        return lambda *values, **more: function(self.table(*values), **more)

    @cached_property
    def _launch(self) -> Callable[..., None]:
        return getattr(import_module(f"deqfast.kernels.{self.triton}"), self.name)

    def run_triton(self, *values: Any) -> Any:
        """Run the Triton kernel of the op; raise ValueError for arguments that it does not support."""
        a = self.table(*values)
        results = self._allocate(a, self._sizes(f"{self.name}_triton", a))
        self._launch(a, *results)
        return self._returned(results)

    def launch(self, *values: Any) -> None:
        """Launch the Triton kernel of an op without results, for fields of its table that are known to be valid."""
        self._launch(self.arguments(*values))

    def fake(self, *values: Any) -> Any:
        """Results without values, for tracing."""
        a = self.table(*values)
        sizes = self._counts(a)
        check_devices(self.name, {name: getattr(a, name) for name in self._tensors})
        for name, shaped in self._tensors.items():
            tensor = getattr(a, name)
            if tensor.dim() != len(shaped.dims):
                raise ValueError(f"{self.name}: `{name}` must have shape ({shaped.shape}), got {tuple(tensor.shape)}")
            for (dim, plus), size in zip(shaped.dims, tensor.shape, strict=True):
                sizes.setdefault(dim, size - plus)
        return self._returned(self._allocate(a, sizes))

    @staticmethod
    def _returned(results: list[Tensor]) -> Any:
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def _allocate(self, a: Any, sizes: Mapping[str, int]) -> list[Tensor]:
        anchor, allocated = getattr(a, self.anchor), []
        for result in self.results:
            dtype = result.dtype
            if isinstance(dtype, Dtype):
                given = (name for name, shaped in self._tensors.items() if shaped.dtype is dtype)
                name = next(given, None)
                dtype = getattr(a, name).dtype if name else dtype.allowed[anchor.dtype][0]
            if result.like:
                allocated.append(torch.empty_like(getattr(a, result.like), dtype=dtype))
            else:
                shape = Shaped(result.shape, dtype).sizes(sizes)
                allocated.append(anchor.new_empty(shape, dtype=dtype))
        return allocated

    def _sizes(self, op: str, a: Any) -> dict[str, int]:
        """Sizes of the dimensions. Checks the arguments for the Triton kernel, as C++ does for the other kernels.

        Tensors are checked once per set of layouts, because a check takes longer than a kernel.
        """
        tensors = [getattr(a, name) for name in self._tensors]
        layout = (*self._counts(a).values(), *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        sizes = self._checked.get(layout)
        if sizes is not None:
            self._check_numbers(op, a, sizes)
            return sizes
        if len(self._checked) >= MAX_LAYOUTS:
            self._checked.clear()
        return self._checked.setdefault(layout, self._check(op, a))

    def _check(self, op: str, a: Any) -> dict[str, int]:
        sizes = self._counts(a)
        dtypes: dict[Dtype, torch.dtype] = {}
        first, *others = self._tensors
        self._check_tensor(op, a, first, sizes, dtypes)
        self._check_numbers(op, a, sizes)
        for name in others:
            self._check_tensor(op, a, name, sizes, dtypes)
        if self.check is not None:
            self.check(op, a)
        return sizes

    def _check_numbers(self, op: str, a: Any, sizes: Mapping[str, int]) -> None:
        for name, limit in self._limited.items():
            wrong = limit.wrong(getattr(a, name), sizes)
            if wrong:
                raise ValueError(f"{op}: `{name}` must {wrong}, got {getattr(a, name)}")

    def _check_tensor(
        self, op: str, a: Any, name: str, sizes: dict[str, int], dtypes: dict[Dtype, torch.dtype]
    ) -> None:
        tensor, anchor, shaped = getattr(a, name), getattr(a, self.anchor), self._tensors[name]
        wrong = self._wrong_shape(tensor, shaped, sizes)
        wrong = wrong or self._wrong_dtype(tensor, shaped.dtype, anchor, dtypes)
        wrong = wrong or self._wrong_memory(tensor, shaped.layout)
        if wrong:
            raise ValueError(f"{op}: `{name}` must {wrong}")
        check_devices(op, {self.anchor: anchor, name: tensor})

    def _wrong_shape(self, tensor: Tensor, shaped: Shaped, sizes: dict[str, int]) -> str | None:
        known, right = sizes.copy(), tensor.dim() == len(shaped.dims)
        for (dim, plus), size in zip(shaped.dims, tensor.shape, strict=False):
            right = right and known.setdefault(dim, size - plus) + plus == size
            right = right and (dim not in self.limits or known[dim] in self.limits[dim])
        if right:
            sizes.update(known)
            return None
        limits = [f", {dim} {self.limits[dim]}" for dim, _ in shaped.dims if dim not in sizes and dim in self.limits]
        return f"have shape {shaped.text(sizes)}{''.join(limits)}, got {tuple(tensor.shape)}"

    def _wrong_dtype(
        self, tensor: Tensor, dtype: Dtype | torch.dtype, anchor: Tensor, known: dict[Dtype, torch.dtype]
    ) -> str | None:
        condition = ""
        if isinstance(dtype, torch.dtype):
            allowed: tuple[torch.dtype, ...] = (dtype,)
        elif tensor is anchor:
            allowed = tuple(dtype.allowed)
        elif dtype in known:
            allowed = (known[dtype],)
        else:
            allowed, condition = dtype.allowed[anchor.dtype], f" with {_name(anchor.dtype)} `{self.anchor}`"
        if tensor.dtype not in allowed:
            return f"have dtype {_either(allowed)}{condition}, got {_name(tensor.dtype)}"
        if isinstance(dtype, Dtype):
            known[dtype] = tensor.dtype
        return None

    @staticmethod
    def _wrong_memory(tensor: Tensor, layout: str) -> str | None:
        if layout == "rows":
            right, wanted = tensor.shape[1] == 1 or tensor.stride(1) == 1, "have rows without gaps"
        elif layout == "channels_last":
            right = tensor.is_contiguous(memory_format=torch.channels_last)
            wanted = "be contiguous in the memory format channels_last"
        else:
            right, wanted = tensor.is_contiguous(), "be contiguous"
        # torch does not copy an empty tensor into another layout.
        return None if right or not tensor.numel() else f"{wanted}, got strides {tensor.stride()}"


def register(name: str, arguments: type, anchor: str, *results: Result, **more: Any) -> None:
    """Define the ``Op`` of this name and, if it has a Triton kernel, `name`_triton with the same schema and fake.

    The extensions register the kernels of the first op. Triton shares the CUDA dispatch key with the CUDA kernels. Its
    op is therefore separate, and runs on CUDA tensors and, interpreted, on CPU tensors.
    """
    op = OPS[name] = Op(name, arguments, anchor, results, **more)
    for each in (name, f"{name}_triton") if op.triton else (name,):
        library.define(each + op.schema)
        torch.library.register_fake(f"deqfast::{each}", op.fake, lib=library)
    if op.binds:
        library.define(f"{name}_bind{op.schema.replace('()', 'int')}")
    for key in ("CPU", "CUDA") if op.triton else ():
        library.impl(f"{name}_triton", op.run_triton, key)
