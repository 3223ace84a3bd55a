"""The CUDA kernel of the fully connected cell, emulated: what test_fc.py does not ask of all kernels."""

from __future__ import annotations

import emulate
import pytest
import torch

from deqfast.testing.fc_states import DTYPES, EVENTS, FCCase, check_solve, unlike_alone
from deqfast.testing.states import RULES

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")

LARGE = 99 * 1024  # bytes of shared memory of a block
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Multiprocessors and shared memory: W in one block, and cut into the columns of teams of 2 to 5 blocks, for D = 33.
DEVICES = {"alone": (4, LARGE), "a team": (7, 10_000), "teams": (13, 8_200), "as many blocks as there are": (5, 7_000)}
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def machine():
    emulate.load("picard_step")
    yield
    emulate.set_device(4, LARGE)


def op(*arguments):
    emulate.load("fc_fixed_point")
    return torch.ops.deqfast_emulated.fc_fixed_point(*arguments)


class TestFixedPoint:
    @every_dtype
    @pytest.mark.parametrize(("size", "batch"), [(130, 2), (150, 9)])
    def test_sizes(self, size, batch, dtype):
        check_solve(op, FCCase(size=size, batch=batch, warm=True, max_iter=8, **DTYPES[dtype]))

    @every_dtype
    @every_device
    def test_teams(self, device, dtype):
        processors, shared = DEVICES[device]
        emulate.set_device(processors, shared * (2 if dtype == "fp64" else 1))
        check_solve(op, FCCase(size=33, batch=7, max_iter=6, **DTYPES[dtype]))

    @pytest.mark.parametrize("order", emulate.ORDERS)
    @every_device
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_what_can_befall_a_sample(self, rule, device, order):
        emulate.set_device(*DEVICES[device])
        case = FCCase(size=33, batch=8, activation="relu", max_iter=7, rows=EVENTS, **rule)
        with emulate.order(order):
            check_solve(op, case)

    @pytest.mark.parametrize("max_iter", [1, 2])
    def test_the_last_evaluation_is_judged_only(self, max_iter):
        emulate.set_device(*DEVICES["teams"])
        check_solve(op, FCCase(size=33, batch=5, max_iter=max_iter, warm=True))

    @every_device
    def test_the_bits_do_not_depend_on_the_batch(self, device):
        """Neither on the mates nor on their number, which decides how many samples a tile holds."""
        emulate.set_device(*DEVICES[device])
        case = FCCase(size=33, batch=17, max_iter=4, rows=("run", "nan"))
        assert unlike_alone(op, case, (1, 16)) == []

    @every_device
    def test_the_order_of_the_threads_changes_nothing(self, device):
        emulate.set_device(*DEVICES[device])
        case, outcomes = FCCase(size=33, batch=5, max_iter=4), []
        for order in emulate.ORDERS:
            with emulate.order(order):
                outcomes.append(op(*case.make(), *case.scalars()))
        assert all(torch.equal(a, b) for other in outcomes for a, b in zip(outcomes[0], other, strict=True))

    def test_one_launch(self):
        case = FCCase(size=33, batch=9)
        before = emulate.launches()
        op(*case.make(), *case.scalars())
        assert emulate.launches() - before == 1

    def test_what_does_not_fit_is_named(self):
        emulate.set_device(3, 7_000)
        with pytest.raises(RuntimeError, match="D = 33 is more than the GPU holds in shared memory"):
            op(*FCCase(size=33).make(), *FCCase().scalars())
