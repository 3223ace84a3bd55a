"""What the tests of the amendment of 2026-11-28 can see, by simulation from the deviations of recorded differences.

`report.py --power results/protocol/h100` prints it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from runs.options import StudyError
from tabulate import tabulate

from ..protocol import CLAIMS, MECHANISM, PRIMARY
from .runs import Group, collect
from .verdicts import ALPHA, BANDS, POWER, estimate, sign_flip

DRAWS = 400
CONTROLS = ("explicit", "explicit-norm")
"""Controls whose pairs with the implicit gradient are recorded; the largest deviation stands for all arms."""


def deviations(group: Group, quantity: str) -> list[float]:
    """Deviation over seeds of the paired differences in each setting of the mechanism: the larger one of the controls,
    and in the two settings with three seeds the common one."""
    variances = {}
    for block in PRIMARY:
        pairs = [group.differences(block.setting, "deq-implicit", control, quantity) for control in CONTROLS]
        if min(map(len, pairs)) < 2:
            raise StudyError(f"--power: {block.setting} needs two seeds of deq-implicit, {' and '.join(CONTROLS)}")
        variances[block.setting] = max(statistics.variance(pair.values()) for pair in pairs)
    common = statistics.fmean(value for setting, value in variances.items() if setting.ratio == 100)
    return [(common if block.setting.ratio == 100 else variances[block.setting]) ** 0.5 for block in MECHANISM]


def drawn(spread: Sequence[float], effect: float) -> Iterator[list[list[float]]]:
    """Draw normal differences with these deviations and a mean of `effect`, as many pairs as will be run."""
    draw = np.random.default_rng(0)
    for _ in range(DRAWS):
        sizes = zip(spread, MECHANISM, strict=True)
        yield [draw.normal(effect, deviation, len(block.seeds)).tolist() for deviation, block in sizes]


def power(spread: Sequence[float], effect: float, alpha: float) -> float:
    """Share of draws in which the test of signs sees the effect."""
    return statistics.fmean(sign_flip(differences) <= alpha for differences in drawn(spread, effect))


def detectable(spread: Sequence[float], alpha: float) -> float:
    """Least effect, to 3 % of itself, that is seen with a power of 80 %."""
    low, high = 0.0, 4 * max(spread)
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(spread, middle, alpha) >= POWER else (middle, high)
    return high


def show(roots: Sequence[Path]) -> int:
    """Print a table, a row for each quantity of a claim, from the records of recipe B; 0."""
    group = next(iter(collect(roots).groups), None)
    if group is None:
        raise StudyError(f"--power: no finished run under {', '.join(map(str, roots))}")
    rows, claims = [], CLAIMS["mechanism"]
    first = ALPHA / len(claims)
    for quantity in dict.fromkeys(claim.quantity for claim in claims):
        spread = deviations(group, quantity)
        equal = [estimate(differences, common=True).p_equal(BANDS[quantity]) for differences in drawn(spread, 0.0)]
        rows.append(
            {
                "quantity": quantity,
                "deviation over seeds": ", ".join(f"{deviation:.3f}" for deviation in spread),
                "band": f"{BANDS[quantity]:.3g}",
                "seen at 5 %": f"{detectable(spread, ALPHA):.3f}",
                "seen at Holm's first level": f"{detectable(spread, first):.3f}",
                "equality shown if equal, at 5 %": f"{statistics.fmean(p <= ALPHA for p in equal):.2f}",
                "at Holm's first level": f"{statistics.fmean(p <= first for p in equal):.2f}",
            }
        )
    print(tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True))
    return 0
