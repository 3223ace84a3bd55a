"""Times beside those of a peer, or of a copy of the same bytes, in turns: no ratio may rise beyond the baseline's.

pytest benchmarks --gate
"""

import pytest
from harness import ratios

pytestmark = pytest.mark.gate("all")
NAMES = [ratios.name_of(case, reference) for _, case, reference in ratios.RATIOS]


@pytest.mark.parametrize(("section", "case", "reference"), ratios.RATIOS, ids=[n.replace(" ", "") for n in NAMES])
def test_ratio(gate, section, case, reference):
    gate.require("ratios", ratios.depends_on())
    gate.ratio("ratios", ratios.name_of(case, reference), ratios.PROVIDER, ratios.pairs(section, case, reference))


def test_every_baseline_is_measured(gate):
    gate.require("ratios", ratios.depends_on())
    gate.close("ratios", NAMES, ratios.depends_on())
