"""Single ops, windows full, beside plain torch and the bytes that they must move."""

from harness.cases import OPS
from harness.suite import parametrize


@parametrize(OPS)
def test_op(measured, case, provider):
    measured(case, provider)
