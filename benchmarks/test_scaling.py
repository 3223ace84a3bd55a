"""How time and memory grow with batch, state size, history and iterations; with --full alone."""

from harness.scaling import SCALING
from harness.suite import parametrize


@parametrize(SCALING)
def test_scaling(measured, case, provider):
    measured(case, provider)
