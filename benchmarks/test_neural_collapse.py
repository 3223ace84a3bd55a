"""The neural-collapse metrics beside the D x D pseudo-inverse."""

import pytest


@pytest.mark.suite("nc")
def test_neural_collapse(measured, case, provider):
    measured(case, provider)
