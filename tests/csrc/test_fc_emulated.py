"""The CUDA kernel of the fully connected cell, emulated: what test_fc.py does not ask of all kernels."""

from __future__ import annotations

import emulate
import pytest
from op_calls import check_bits

from deqfast.testing.fc_states import DTYPES, EVENTS, FCCase, check_solve
from deqfast.testing.states import RULES

pytestmark = pytest.mark.parametrize("implementation", ["emulated"], indirect=True)

LARGE = 99 * 1024  # bytes of shared memory of a block
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Multiprocessors and shared memory: W in one block, and cut into the columns of teams of 2 to 5 blocks, for D = 33.
DEVICES = {"alone": (4, LARGE), "a team": (7, 10_000), "teams": (13, 8_200), "as many blocks as there are": (5, 7_000)}
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def op(implementation):
    yield implementation.op("fc_fixed_point")
    emulate.set_device(4, LARGE)


class TestFixedPoint:
    @every_dtype
    @pytest.mark.parametrize(("size", "batch"), [(130, 2), (150, 9)])
    def test_sizes(self, size, batch, dtype, op):
        check_solve(op, FCCase(size=size, batch=batch, warm=True, max_iter=8, **DTYPES[dtype]))

    @every_dtype
    @every_device
    @pytest.mark.parametrize("max_iter", [1, 2, 6])  # the last evaluation is only judged
    def test_teams(self, max_iter, device, dtype, op):
        processors, shared = DEVICES[device]
        emulate.set_device(processors, shared * (2 if dtype == "fp64" else 1))
        check_solve(op, FCCase(size=33, batch=7, max_iter=max_iter, warm=True, **DTYPES[dtype]))

    @pytest.mark.parametrize("order", emulate.ORDERS)
    @every_device
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_what_can_befall_a_sample(self, rule, device, order, op):
        emulate.set_device(*DEVICES[device])
        case = FCCase(size=33, batch=8, activation="relu", max_iter=7, rows=EVENTS, **rule)
        with emulate.order(order):
            check_solve(op, case)

    @every_device
    def test_the_bits_depend_on_nothing_but_the_sample(self, device, op, implementation):
        """Neither on the mates nor on their number, which decides how many samples a tile holds."""
        emulate.set_device(*DEVICES[device])
        case = FCCase(size=33, batch=17, max_iter=4, rows=("run", "nan"))
        check_bits(op, [*case.make(), *case.scalars()], implementation, None, case.batch)

    def test_what_does_not_fit_is_named(self, op):
        emulate.set_device(3, 7_000)
        with pytest.raises(RuntimeError, match="D = 33 is more than the GPU holds in shared memory"):
            op(*FCCase(size=33).make(), *FCCase().scalars())
