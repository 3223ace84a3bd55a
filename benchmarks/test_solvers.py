"""Whole solves beside torchdeq and eager tensor operations: the same f and number of iterations, f subtracted."""

import pytest


@pytest.mark.suite("solves")
def test_solve(measured, case, provider):
    measured(case, provider)


@pytest.mark.suite("fc")
def test_fc_fixed_point(measured, case, provider):
    measured(case, provider)


@pytest.mark.suite("cells")
def test_cell(measured, case, provider):
    measured(case, provider)
