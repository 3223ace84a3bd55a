"""Whole solves beside torchdeq and eager tensor operations: the same f and number of iterations, f subtracted."""

from harness.cases import FC_SOLVES, SOLVES
from harness.suite import parametrize


@parametrize(SOLVES)
def test_solve(measured, case, provider):
    measured(case, provider)


@parametrize(FC_SOLVES)
def test_fc_fixed_point(measured, case, provider):
    measured(case, provider)
