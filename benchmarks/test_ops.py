"""The machine's rates, and single ops, windows full, beside plain torch and the bytes that they must move."""

import pytest


@pytest.mark.suite("rates")
def test_rate(measured, case, provider):
    measured(case, provider)


@pytest.mark.suite("ops")
def test_op(measured, case, provider):
    measured(case, provider)
