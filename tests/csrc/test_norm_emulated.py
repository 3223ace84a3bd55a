"""The CUDA kernels of the norm_act ops, emulated: what test_norm_act.py does not ask of all kernels; see emulate.py."""

from __future__ import annotations

import emulate
import pytest
import torch

from deqfast.testing.norm_states import NORM_DTYPES, NORM_OPS, NormCase, check_norm

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")
every_op = pytest.mark.parametrize("op", NORM_OPS)
every_dtype = pytest.mark.parametrize("dtypes", NORM_DTYPES)
# Groups of one, several and all packs that a thread can hold, in channels of one block's width and of less.
HELD_SHAPES = [((2, 64, 12, 12), 8), ((1, 16, 32, 32), 2), ((1, 512, 2, 2), 4), ((1, 1024, 2, 3), 1)]


def emulated(op: str):
    emulate.load(op.removesuffix("_backward"))
    return getattr(torch.ops.deqfast_emulated, op)


@every_op
@every_dtype
@pytest.mark.parametrize(("shape", "groups"), HELD_SHAPES)
def test_accuracy(shape, groups, dtypes, op):
    check_norm(emulated(op), NormCase(op, shape, groups, dtypes))


@every_op
@pytest.mark.parametrize(("shape", "groups"), [((3, 16, 3, 5), 4), ((3, 24, 40, 41), 8)])
def test_bits_depend_neither_on_the_order_of_threads_nor_on_the_batch(shape, groups, op):
    arguments = NormCase(op, shape, groups).arguments()
    results = []
    for order in emulate.ORDERS:
        with emulate.order(order):
            results.append(emulated(op)(*arguments.values()))
    alone = {
        name: value[1:2] if isinstance(value, torch.Tensor) and len(value) == 3 else value
        for name, value in arguments.items()
    }
    for i, single in enumerate(emulated(op)(*alone.values())):
        first = results[0][i]
        assert all(torch.equal(result[i], first) for result in results)
        assert torch.equal(first[1:2] if len(first) == 3 else first[:, 1:2], single)


@every_op
def test_one_launch(op):
    arguments, before = NormCase(op).arguments(), emulate.launches()
    emulated(op)(*arguments.values())
    assert emulate.launches() - before == 1


@every_op
def test_an_empty_batch_launches_nothing(op):
    arguments, before = NormCase(op, shape=(0, 16, 3, 5)).arguments(), emulate.launches()
    emulated(op)(*arguments.values())
    assert emulate.launches() == before
