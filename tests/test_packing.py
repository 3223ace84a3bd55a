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


def packed(order=torch.contiguous_format):
    """A packing, its rows, and a value of that layout."""
    value = values(2, 3, 4, 5).contiguous(memory_format=order)
    packing = Packing(value)
    return packing, packing.pack(value), values(2, 3, 4, 5).contiguous(memory_format=order)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_rows_of_a_value_are_a_view_where_they_can_be(order):
    packing, z, value = packed(order)
    rows = packing.packer(z)(value)
    assert rows.data_ptr() == value.data_ptr() and torch.equal(packing.unpack(rows), value)


CHANGES = torch.Tensor.double, torch.Tensor.bfloat16, lambda v: v.mT.contiguous().mT, lambda v: v[:, :1].expand(v.shape)


@pytest.mark.parametrize("change", CHANGES)
def test_another_dtype_or_order_is_copied_once(change):
    packing, z, value = packed()
    rows = packing.packer(z)(value := change(value))
    assert rows.dtype == torch.float32 and rows.is_contiguous() and rows.data_ptr() != value.data_ptr()
    assert torch.equal(rows.view(2, 3, 4, 5), value.float())


@pytest.mark.parametrize("alias", [lambda z: z, lambda z: z.view(2, 60).view(2, 3, 4, 5), lambda z: z.view_as(z)])
def test_the_rows_of_a_value_are_never_the_iterate(alias):
    packing, z, _ = packed()
    rows = packing.packer(z)(alias(packing.unpack(z)))
    assert rows.untyped_storage().data_ptr() != z.untyped_storage().data_ptr() and torch.equal(rows, z)
