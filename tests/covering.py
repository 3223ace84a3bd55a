"""A selection from many combinations of parameters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def covering(combinations: Sequence[Mapping[str, Any]], strength: int) -> set[int]:
    """Indices of combinations {parameter: value}, chosen greedily so that all groups of `strength` values occur.

    The groups are those in `combinations`: every value with strength 1, every pair of values with 2; 0 takes the first.
    Ties are broken by the new groups of one value more, then by the groups that occurred least.
    """
    values = [[(name, repr(value)) for name, value in sorted(case.items())] for case in combinations]
    groups, larger = ([{(), *itertools.combinations(case, n)} for case in values] for n in (strength, strength + 1))
    missing, unseen = set().union(*groups), set().union(*larger)
    used: Counter[tuple[tuple[str, str], ...]] = Counter()
    chosen = set()

    def gain(i: int) -> tuple[int, int, int]:
        return len(groups[i] & missing), len(larger[i] & unseen), -sum(used[group] for group in groups[i])

    while missing:
        best = max(range(len(groups)), key=gain)
        chosen.add(best)
        missing -= groups[best]
        unseen -= larger[best]
        used.update(groups[best])
    return chosen
