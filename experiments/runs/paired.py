"""Statistics of paired differences over seeds: estimates, sign flips, equality within a band, Holm's adjustment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

ALPHA = 0.05
POWER = 0.8
SAME = 1e-12  # sums that differ by rounding, in units of the sum of sizes, count as equal


@dataclass(frozen=True)
class Estimate:
    """The mean of differences, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval."""
        half = float(stats.t.ppf(1 - ALPHA / 2, self.freedom)) * self.error
        return self.mean - half, self.mean + half

    @property
    def p_different(self) -> float:
        """The two-sided test that the mean is 0."""
        return float(2 * stats.t.sf(abs(self._statistic(0)), self.freedom))

    def p_equal(self, band: float) -> float:
        """Two one-sided tests that the mean is outside (-band, band)."""
        above, below = self._statistic(-band), -self._statistic(band)
        return float(stats.t.sf(min(above, below), self.freedom))

    def detectable(self, alpha: float) -> float:
        """The difference from 0 that a two-sided test at `alpha` finds with a power of 80 %, given this error."""
        bound = stats.t.ppf(1 - alpha / 2, self.freedom)
        shifted = optimize.brentq(lambda shift: stats.nct.sf(bound, self.freedom, shift) - POWER, 0, 10 * bound)
        return float(shifted) * self.error

    def _statistic(self, value: float) -> float:
        apart = self.mean - value
        return apart / self.error if self.error else math.copysign(math.inf, apart) if apart else 0.0


def estimate(settings: Sequence[Sequence[float]], common: bool = False) -> Estimate:
    """The mean over settings of their mean differences, each of two or more seeds. Settings count alike. Each has a
    variance of its own (Welch and Satterthwaite), or all have a `common` one."""
    degrees = [len(seeds) - 1 for seeds in settings]
    variances = [statistics.variance(seeds) for seeds in settings]
    if common:
        variances = [float(np.average(variances, weights=degrees))] * len(settings)
    shares = [variance / len(seeds) for variance, seeds in zip(variances, settings, strict=True)]
    total = sum(shares)
    squares = sum(share**2 / degree for share, degree in zip(shares, degrees, strict=True))
    freedom = total**2 / squares if squares and not common else sum(degrees)
    return Estimate(statistics.fmean(map(statistics.fmean, settings)), math.sqrt(total) / len(settings), freedom)


def sign_flip(settings: Sequence[Sequence[float]]) -> float:
    """The exact two-sided p-value of no difference: how often the mean over settings is as far from 0 if every seed's
    difference may have either sign."""
    shares = np.array([value / (len(seeds) * len(settings)) for seeds in settings for value in seeds])
    bound = abs(shares.sum()) - SAME * np.abs(shares).sum()
    # All sums are those of one half plus those of the other: 2^15 of each for 30 pairs, not 2^30.
    first, second = (_signed_sums(half) for half in np.array_split(shares, 2))
    second.sort()
    above = len(second) - np.searchsorted(second, bound - first, "left")
    below = np.searchsorted(second, -bound - first, "right")
    return float((above + below).clip(max=len(second)).sum()) / 2.0 ** len(shares)


def _signed_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjustment of p-values, in their order."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = adjusted[index] = max(largest, min(1.0, (len(values) - rank) * values[index]))
    return adjusted
