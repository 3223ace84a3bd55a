"""Times beside those of a peer, or of a copy of the same bytes, in turns: no ratio may rise beyond the baseline's.

pytest benchmarks --gate
"""

import functools

import pytest
from harness import ratios

pytestmark = pytest.mark.gate("all")


@pytest.mark.parametrize("name", ratios.available(), ids=lambda name: name.replace(" ", ""))
def test_ratio(gate, name):
    pytest.importorskip("torchdeq")
    pairs = functools.cache(lambda: ratios.pairs(*ratios.NAMES[name]))  # built when first asked for, not to be skipped
    gate.ratio(name, lambda count: pairs()(count), ratios.depends_on(), ratios.margin(name))


def test_every_baseline_is_measured(gate):
    pytest.importorskip("torchdeq")
    gate.close("ratios", ratios.available(), ratios.depends_on())
