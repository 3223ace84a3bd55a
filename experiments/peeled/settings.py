"""Settings of the layer-peeled study."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from nc_study.config import SettingsError, check_field, flag_of, option

from .problem import FEATURES

PARTS = ("balanced", "imbalanced", "limit")


@dataclass(frozen=True, kw_only=True)
class PeeledSettings:
    """Everything that decides the outcome; SettingsError for a value that makes no sense."""

    part: str = option(
        "study",
        "balanced: Theorem 3.1; imbalanced: Theorem 4.1; limit: Proposition 4.2",
        "all",
        choices=("all", *PARTS),
    )
    features: str = option(
        "study",
        "what the bound E_H on the features is about, which the paper leaves open; final: W_EX h0 and z* (Definition "
        "2.2, Appendix B.1), which makes both models one problem; backbone: h0 (the steps of the proofs); both: one "
        "after the other",
        "both",
        choices=("both", *FEATURES),
    )
    seeds: str = option("study", "of the starting points, with commas; the best end is reported", "0,1,2")

    classes: int = option("problem", "K", 10, minimum=2)
    samples: int = option("problem", "samples of a class, of a majority class (n, n_A)", 20, minimum=2)
    ratio: int = option("problem", "n_A/n_B of the imbalanced part (R)", 10, minimum=2)
    majority: int = option("problem", "classes with n_A samples (K_A)", 5, minimum=2)
    dimension: int = option("problem", "length of a feature vector (D), at least K", 16, minimum=2)
    e_w: str = option("problem", "bounds E_W on the classifier, with commas: a study for each", "0.01,100")
    e_h: str = option(
        "problem",
        "bounds E_H, in ]0, 1[, on the layer's Frobenius norm and the features, one for each E_W",
        "0.01,0.5",
        kind=str,
    )
    ratios: str = option("problem", "R of the limit part; infinity is added", "10,100,1000")

    steps: int = option("machine", "most L-BFGS steps of a solve", 400, minimum=1)
    tolerance: float = option("machine", "projected-gradient norm at which a solve ends", 1e-7, above=0)
    threads: int = option("machine", "CPU threads; the matrices are small", 1, minimum=1)
    out: str = option("machine", "folder for layer_peeled.json, .md and the figures", "runs/layer_peeled")

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_field(spec, getattr(self, spec.name))
        e_w, e_h, seeds = (self._numbers(name) for name in ("e_w", "e_h", "seeds"))
        self._check(all(0 <= seed < 2**63 and seed == int(seed) for seed in seeds), "seeds", "whole, 0 to 2**63 - 1")
        self._check(len(set(seeds)) == len(seeds), "seeds", "each once")
        self._check(min(e_w) > 0, "e_w", "each more than 0")
        self._check(min(e_h) > 0 and max(e_h) < 1, "e_h", "each between 0 and 1, where the DEQ's series converges")
        self._check(len(e_w) == len(e_h), "e_h", f"as many as --e-w {self.e_w}")
        self._check(len(set(zip(e_w, e_h, strict=True))) == len(e_w), "e_w", f"each pair with --e-h {self.e_h} once")
        self._check(min(self._numbers("ratios")) > 1, "ratios", "each more than 1")
        self._check(self.dimension >= self.classes, "dimension", f"at least --classes {self.classes}")
        if self.part != "balanced":
            self._check(self.majority < self.classes, "majority", f"less than --classes {self.classes}")
        if "imbalanced" in self.parts:
            self._check(self.samples % self.ratio == 0, "ratio", f"must divide --samples {self.samples}: n_B = n_A/R")

    def _check(self, met: bool, name: str, allowed: str) -> None:
        if not met:
            raise SettingsError(f"{flag_of(name)} {getattr(self, name)}: {allowed}")

    def _numbers(self, name: str) -> tuple[float, ...]:
        try:
            values = tuple(float(word) for word in getattr(self, name).split(","))
        except ValueError:
            values = (math.nan,)
        self._check(all(map(math.isfinite, values)), name, "finite numbers with commas between them")
        return values

    @property
    def starts(self) -> tuple[int, ...]:
        """Seeds of the starting points."""
        return tuple(map(int, self._numbers("seeds")))

    @property
    def limit_ratios(self) -> tuple[float, ...]:
        """R of the limit part, rising, infinity last."""
        return (*sorted(set(self._numbers("ratios"))), math.inf)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts to run."""
        return PARTS if self.part == "all" else (self.part,)

    @property
    def bounds(self) -> tuple[dict[str, Any], ...]:
        """Bounds with what E_H is on, each a study of its own: features, e_w and e_h."""
        readings = FEATURES if self.features == "both" else (self.features,)
        pairs = zip(self._numbers("e_w"), self._numbers("e_h"), strict=True)
        return tuple({"features": name, "e_w": e_w, "e_h": e_h} for e_w, e_h in pairs for name in readings)
