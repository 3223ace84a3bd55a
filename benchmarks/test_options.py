"""Options of the library, each with and without where it should gain: evaluations, memory, errors and time."""

import pytest


@pytest.mark.suite("options")
def test_option(measured, case, provider):
    measured(case, provider)
