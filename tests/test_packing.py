"""Packing: rows of memory for the solvers, the caller's structure and layout for f."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deqfast.state.packing import Packing


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.permutations(range(5)),
    margins=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    batch_first=st.booleans(),
)
def test_any_layout_survives(shape, order, margins, batch_first):
    """A tensor whose dimensions lie in memory in any order, dense or cut out of a larger one."""
    sizes = [3, *shape]
    order = [d for d in order if d < len(sizes)]
    if batch_first:
        order = [0, *(d for d in order if d)]
    buffer = torch.randn([sizes[d] + margins[d] for d in order])
    z0 = buffer[tuple(slice(sizes[d]) for d in order)].permute([order.index(d) for d in range(len(sizes))])
    packing = Packing(z0)
    rows = packing.pack(z0)
    assert rows.shape == (3, z0[0].numel()) and rows.is_contiguous() and rows.data_ptr() != z0.data_ptr()
    back = packing.unpack(rows)
    assert torch.equal(back, z0) and back.data_ptr() == rows.data_ptr()
    # Within a sample, memory is in the order of z0: strides fall where those of z0 do.
    for a, b in itertools.combinations([d for d in range(1, len(sizes)) if sizes[d] > 1], 2):
        assert (z0.stride(a) > z0.stride(b)) == (back.stride(a) > back.stride(b))


def test_the_rows_of_a_value_are_a_view_where_they_can_be():
    packing = Packing(values(2, 3, 4))
    z = packing.pack(values(2, 3, 4))
    value = values(2, 3, 4)
    assert packing.packer(z)(value).data_ptr() == value.data_ptr()
    last = Packing(values(2, 3, 4, 5).to(memory_format=torch.channels_last))
    value = values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows = last.packer(z)(value)
    assert rows.data_ptr() == value.data_ptr() and torch.equal(last.unpack(rows), value)


@pytest.mark.parametrize(
    "change",
    [lambda v: v.double(), lambda v: v.mT.contiguous().mT, lambda v: v[:, :1].expand(2, 3, 4), lambda v: v.bfloat16()],
)
def test_another_dtype_or_order_is_copied_once(change):
    packing = Packing(values(2, 3, 4))
    z = packing.pack(values(2, 3, 4))
    value = change(values(2, 3, 4))
    rows = packing.packer(z)(value)
    assert rows.dtype == torch.float32 and rows.is_contiguous() and rows.data_ptr() != value.data_ptr()
    assert torch.equal(rows.view(2, 3, 4), value.float())


@pytest.mark.parametrize("alias", [lambda z: z, lambda z: z.view(2, 12).view(2, 3, 4), lambda z: z.view_as(z)])
def test_the_rows_of_a_value_are_never_the_iterate(alias):
    packing = Packing(values(2, 3, 4))
    z = packing.pack(values(2, 3, 4))
    rows = packing.packer(z)(alias(packing.unpack(z)))
    assert rows.untyped_storage().data_ptr() != z.untyped_storage().data_ptr() and torch.equal(rows, z)
