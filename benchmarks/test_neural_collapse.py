"""The neural-collapse metrics beside the D x D pseudo-inverse."""

from harness.cases import COLLAPSE
from harness.suite import parametrize


@parametrize(COLLAPSE)
def test_neural_collapse(measured, case, provider):
    measured(case, provider)
