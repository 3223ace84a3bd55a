"""Settings of the layer-peeled study, and the command line over them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nc_study.config import SettingsError

from .problem import FEATURES

PARTS = ("balanced", "imbalanced", "limit")


def option(text: str, default: Any, kind: Any = int, choices: Sequence[str] | None = None) -> Any:
    """Field that is also an option of the command line."""
    return field(default=default, metadata={"help": text, "type": kind, "choices": choices})


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers with commas between them."""
    return tuple(float(word) for word in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between them."""
    return tuple(int(word) for word in text.split(","))


@dataclass(frozen=True, kw_only=True)
class PeeledSettings:
    """Everything that decides the outcome."""

    part: str = option(
        "balanced: Theorem 3.1; imbalanced: Theorem 4.1; limit: Proposition 4.2", "all", str, ("all", *PARTS)
    )
    features: str = option(
        "what the bound E_H on the features is about, which the paper leaves open; final: W_EX h0 and z* (Definition "
        "2.2, Appendix B.1), which makes both models one problem; backbone: h0 (the steps of the proofs); both: one "
        "after the other",
        "both",
        str,
        ("both", *FEATURES),
    )
    seeds: tuple[int, ...] = option("seeds of the starting points; the best end is reported", (0, 1, 2), integers)

    classes: int = option("number of classes K", 10)
    samples: int = option("samples of a class, of a majority class (n, n_A)", 20)
    ratio: int = option("imbalance n_A/n_B of the imbalanced part (R)", 10)
    majority: int = option("classes with n_A samples (K_A)", 5)
    dimension: int = option("length of a feature vector (D), at least K", 16)
    e_w: tuple[float, ...] = option("bounds E_W on the classifier: a study for each", (0.01, 100.0), numbers)
    e_h: tuple[float, ...] = option(
        "bounds E_H, in ]0, 1[, on the layer's Frobenius norm and the features, one for each E_W", (0.01, 0.5), numbers
    )
    ratios: tuple[float, ...] = option("R of the limit part; infinity is added", (10.0, 100.0, 1000.0), numbers)

    steps: int = option("most L-BFGS steps of a solve", 400)
    tolerance: float = option("projected-gradient norm at which a solve ends", 1e-7, float)
    threads: int = option("CPU threads; the matrices are small", 1)
    out: Path = option("folder for layer_peeled.json, .md and the figures", Path("runs/layer_peeled"), Path)

    def __post_init__(self) -> None:
        def check(met: bool, name: str, allowed: str) -> None:
            if not met:
                value = getattr(self, name)
                shown = ",".join(f"{one:g}" for one in value) if isinstance(value, tuple) else value
                raise SettingsError(f"--{name.replace('_', '-')} {shown}: {allowed}")

        for name in ("classes", "samples", "ratio", "majority", "dimension"):
            check(getattr(self, name) >= 2, name, "at least 2")
        for name in ("steps", "threads"):
            check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("e_w", "tolerance", "e_h", "ratios", "seeds"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            least = {"seeds": -1, "ratios": 1}.get(name, 0)
            check(all(least < one < math.inf for one in values), name, f"more than {least}, and finite")
        check(max(self.seeds) < 2**63, "seeds", "below 2**63")
        check(len(set(self.seeds)) == len(self.seeds), "seeds", "each once")
        check(len(self.e_w) == len(self.e_h), "e_h", f"as many as --e-w, which has {len(self.e_w)}")
        check(max(self.e_h) < 1, "e_h", "each below 1, where the series of the linear DEQ stops to converge")
        check(len(set(zip(self.e_w, self.e_h, strict=True))) == len(self.e_w), "e_w", "each pair with --e-h once")
        check(self.dimension >= self.classes, "dimension", f"at least --classes {self.classes}")
        if self.part != "balanced":
            check(self.majority < self.classes, "majority", f"less than --classes {self.classes}")
        if "imbalanced" in self.parts:
            check(self.samples % self.ratio == 0, "ratio", f"a divisor of --samples {self.samples}, for n_B = n_A/R")

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts to run."""
        return PARTS if self.part == "all" else (self.part,)

    @property
    def bounds(self) -> tuple[dict[str, Any], ...]:
        """Readings of the constraint on the features with its bounds: a study for each."""
        readings = FEATURES if self.features == "both" else (self.features,)
        pairs = zip(self.e_w, self.e_h, strict=True)
        return tuple({"features": name, "e_w": e_w, "e_h": e_h} for e_w, e_h in pairs for name in readings)


def parse(description: str | None, argv: Sequence[str] | None = None) -> PeeledSettings:
    """Read the command line; a bad value ends the program with status 2 and a line that names it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for spec in fields(PeeledSettings):
        default = ",".join(f"{one:g}" for one in spec.default) if isinstance(spec.default, tuple) else spec.default
        text = f"{spec.metadata['help']} (default: {default})"
        kind, choices = spec.metadata["type"], spec.metadata["choices"]
        flag = "--" + spec.name.replace("_", "-")
        parser.add_argument(flag, type=kind, choices=choices, default=spec.default, help=text)
    try:
        return PeeledSettings(**vars(parser.parse_args(argv)))
    except SettingsError as error:
        parser.error(str(error))
