"""Training steps beside torchdeq, eager tensor operations, the cell applied once and the explicit network."""

import pytest


@pytest.mark.suite("training")
def test_training_step(measured, case, provider):
    measured(case, provider)
