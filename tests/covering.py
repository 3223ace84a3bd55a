"""A selection from many combinations of parameters, for tests of kernels that are slow to interpret or emulate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def covering(combinations: Sequence[Mapping[str, Any]], strength: int) -> set[int]:
    """Indices of combinations {parameter: value}, chosen greedily so that all groups of `strength` values occur.

    The groups are those in `combinations`: every value with strength 1, every pair of values with 2; 0 takes the first.
    """
    values = [[(name, repr(value)) for name, value in sorted(one.items())] for one in combinations]
    groups = [set(itertools.combinations(one, strength)) for one in values]
    missing: set[tuple[tuple[str, str], ...]] = set().union(*groups)
    chosen = set()
    while missing:
        best = max(range(len(groups)), key=lambda i: len(groups[i] & missing))
        chosen.add(best)
        missing -= groups[best]
    return chosen
