"""Single ops, windows full, beside plain torch and the bytes that they must move."""

import pytest


@pytest.mark.suite("ops")
def test_op(measured, case, provider):
    measured(case, provider)
