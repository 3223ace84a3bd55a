"""Times beside those of a peer, or of a copy of the same bytes, in turns: no ratio may rise beyond the baseline's.

pytest benchmarks --gate
"""

import pytest
from harness import ratios

pytestmark = pytest.mark.gate("all")
NAMES = {ratios.name_of(case, reference): (case, reference) for case, reference in ratios.RATIOS}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(" ", ""))
def test_ratio(gate, name):
    case, reference = NAMES[name]
    if why := ratios.unavailable(reference):
        pytest.skip(why)
    gate.ratio(name, lambda count: ratios.pairs(case, reference)(count), ratios.depends_on(), ratios.margin(reference))


def test_every_baseline_is_measured(gate):
    available = [name for name, (_, reference) in NAMES.items() if not ratios.unavailable(reference)]
    gate.close("ratios", available, ratios.depends_on())
