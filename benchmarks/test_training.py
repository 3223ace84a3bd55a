"""Training steps of one DEQ layer beside torchdeq, eager tensor operations and the cell applied once."""

from harness.cases import TRAINING
from harness.suite import parametrize


@parametrize(TRAINING)
def test_training_step(measured, case, provider):
    measured(case, provider)
