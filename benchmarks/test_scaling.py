"""How time and memory grow with batch, state size, history and iterations; with --full alone."""

import pytest


@pytest.mark.suite("scaling")
def test_scaling(measured, case, provider):
    measured(case, provider)
