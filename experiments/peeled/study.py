"""Optima of problems (7), (9) and (10) under every given bound, and their measurements."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass

import torch
from nc_study.config import BOTH
from runs.options import Checked, SettingsError, flag_of, option
from runs.provenance import provenance
from torch import Tensor
from tqdm import tqdm

import deqfast

from . import theory
from .problem import FEATURES, LAYERS, Optimum, Part, Problem, minimise

LIMIT_COLUMNS = 2  # for each class in the limit, each representing half of the class
TWO_CLASSES = {"e_w": 1.0, "e_h": 0.75}  # bounds with E_H > 1/2, where (33) is known to fail
AGREEMENT = 1e-6  # relative difference of log K - loss up to which seeds found the same optimum


@dataclass(frozen=True, kw_only=True)
class PeeledSettings(Checked):
    """Options that decide the outcome."""

    seeds: str = option(
        "study", "seeds of the starting points, with commas; the best result is reported", "0,1,2", metavar="N,N"
    )

    classes: int = option("problem", "K", 10, minimum=2)
    samples: int = option("problem", "samples of a class, of a majority class (n, n_A)", 20, minimum=2)
    ratio: int = option("problem", "n_A/n_B of the imbalanced part (R)", 10, minimum=2)
    majority: int = option("problem", "classes with n_A samples (K_A)", 5, minimum=2)
    dimension: int = option("problem", "length of a feature vector (D), at least K", 16, minimum=2)
    e_w: str = option(
        "problem", "bounds E_W on the classifier, with commas: one study for each", "0.01,100", metavar="E,E"
    )
    e_h: str = option(
        "problem", "bounds E_H on the layer and the features, one for each E_W", "0.01,0.5", metavar="E,E"
    )
    ratios: str = option("problem", "R of the limit part; infinity is added", "10,100,1000", metavar="R,R")

    steps: int = option("machine", "most L-BFGS steps of a solve", 400, minimum=1)
    tolerance: float = option("machine", "projected-gradient norm at which a solve ends", 1e-7, above=0)
    threads: int = option("machine", "CPU threads; the matrices are small", 1, minimum=1)
    out: str = option("machine", "folder for layer_peeled.json and .md", "runs/layer_peeled", metavar="DIR")
    report: bool = option("machine", "only write .md again, from the .json in --out", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        seeds, e_w, e_h = (self.numbers(name) for name in ("seeds", "e_w", "e_h"))
        self._check(all(0 <= seed < 2**63 and seed == int(seed) for seed in seeds), "seeds", "whole, 0 to 2**63 - 1")
        self._check(min(e_w) > 0, "e_w", "each more than 0")
        self._check(min(e_h) > 0 and max(e_h) < 1, "e_h", "each between 0 and 1, where the DEQ's series converges")
        cores = os.cpu_count() or 1
        self._check(self.threads <= cores, "threads", f"at most {cores}, the cores of this machine")
        self._check(len(e_w) == len(e_h), "e_h", f"as many as --e-w {self.e_w}")
        self._check(min(self.numbers("ratios")) > 1, "ratios", "each more than 1")
        self._check(self.dimension >= self.classes, "dimension", f"at least --classes {self.classes}")
        self._check(self.majority < self.classes, "majority", f"less than --classes {self.classes}")
        self._check(self.samples % self.ratio == 0, "ratio", f"must divide --samples {self.samples}: n_B = n_A/R")

    def _check(self, met: bool, name: str, allowed: str) -> None:
        if not met:
            raise SettingsError(f"{flag_of(name)} {getattr(self, name)}: {allowed}")

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the numbers of an option that names several."""
        try:
            values = tuple(float(word) for word in getattr(self, name).split(","))
        except ValueError:
            values = (math.nan,)
        apart = len(set(values)) == len(values) or name in ("e_w", "e_h")
        self._check(all(map(math.isfinite, values)) and apart, name, "finite numbers, each once, with commas between")
        return values

    @property
    def bounds(self) -> list[Part]:
        """Bounds, and the features that E_H bounds; each is a separate study: features, e_w and e_h."""
        return [{"features": name, "e_w": e_w, "e_h": e_h} for e_w, e_h in self.pairs for name in FEATURES]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(E_W, E_H) of each study."""
        return list(zip(self.numbers("e_w"), self.numbers("e_h"), strict=True))


def run(settings: PeeledSettings) -> Part:
    """Solve everything; return the result that is written to layer_peeled.json."""
    start = time.perf_counter()
    torch.set_num_threads(settings.threads)
    with tqdm(desc="solves", unit="solve", disable=None) as bar:
        study = Study(settings, bar)
        parts = {"balanced": study.balanced(), "imbalanced": study.imbalanced(), "limit": study.limit()}
    return {
        "kind": "layer_peeled",
        "settings": {name: value for name, value in asdict(settings).items() if name not in ("out", "report")},
        **parts,
        "claims": theory.claims_of(parts),
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(settings.threads, "cpu"),
    }


class Study:
    """Three parts, each a method that returns its share of the result."""

    def __init__(self, settings: PeeledSettings, bar: tqdm) -> None:
        self.settings, self.bar = settings, bar

    def balanced(self) -> Part:
        """Solve problems (7) and (9), and the DEQ of two classes under a bound E_H above 1/2."""
        settings = self.settings
        count = (settings.samples,) * settings.classes
        studies = []
        for bounds in settings.bounds:
            models = {model: self._balanced(self._problem(model, bounds, count, count)) for model in BOTH}
            studies.append({**bounds, "models": models})
        two = self._problem("deq", {"features": "backbone", **TWO_CLASSES}, (LIMIT_COLUMNS,) * 2, (1, 1))
        return {"bounds": studies, "two_classes": {**TWO_CLASSES, **self._balanced(two)}, "layers": self._layers()}

    def _layers(self) -> list[Part]:
        """Solve the balanced problem with the bound before the layer, for every layer whose norm is at most E_H, or at
        most its square, as in (21)."""
        settings, rows = self.settings, []
        for e_w, e_h in settings.pairs:
            for bound, e_layer in (("norm", e_h), ("square", math.sqrt(e_h))):
                for layer in LAYERS:
                    bounds = {"features": "backbone", "e_w": e_w, "e_h": e_h, "e_layer": e_layer}
                    count = (LIMIT_COLUMNS,) * settings.classes
                    problem = self._problem(layer, bounds, count, count)
                    most = math.log(problem.classes) - theory.closed_form_loss(problem, theory.largest_stretch(problem))
                    record = self._solve(problem)[1]
                    rows.append({**bounds, "bound": bound, "layer": layer, "most": most, **record})
        return rows

    def _balanced(self, problem: Problem) -> Part:
        optimum, record = self._solve(problem)
        weight, means = problem.weight(optimum.point), class_means(problem, optimum)
        gram = weight @ weight.T
        return {
            **record,
            "etf_loss": theory.closed_form_loss(problem, theory.etf_stretch(problem)),
            "lower_bound": theory.closed_form_loss(problem, theory.largest_stretch(problem)),
            "paper_bound": theory.paper_bounds(problem),
            "weight_gram_error": theory.relative_distance(gram, problem.e_w * theory.simplex_gram(problem.classes)),
            "duality_error": theory.relative_distance(math.sqrt(problem.e_w / problem.e_h) * weight @ means.T, gram),
        }

    def imbalanced(self) -> Part:
        """Solve problem (10): each model at its own optimum, and both on the same h0."""
        settings = self.settings
        few = settings.samples // settings.ratio
        count = (settings.samples,) * settings.majority + (few,) * (settings.classes - settings.majority)
        return {"bounds": [self._imbalanced(bounds, count) for bounds in settings.bounds]}

    def _imbalanced(self, bounds: Part, count: tuple[int, ...]) -> Part:
        problems = {model: self._problem(model, bounds, count, count) for model in BOTH}
        solved = {model: self._solve(problem) for model, problem in problems.items()}
        comparisons = {"own optimum": self._compare(problems, solved)}
        if bounds["features"] == "backbone":  # with "final", h0 has no scale, so that sharing it settles nothing
            for origin, name in zip(BOTH, ("the explicit model's h0", "the DEQ's h0"), strict=True):
                h0 = solved[origin][0].point.features
                shared = {model: self._solve(problem, h0) for model, problem in problems.items()}
                comparisons[f"both on {name}"] = self._compare(problems, shared)
        condition = theory.cosine_condition(bounds["e_w"], bounds["e_h"])
        return {**bounds, "comparisons": comparisons, "cosine_condition": condition}

    def _compare(self, problems: dict[str, Problem], solved: dict[str, tuple[Optimum, Part]]) -> Part:
        models = {}
        for model, problem in problems.items():
            optimum, record = solved[model]
            means, h0 = class_means(problem, optimum), problem.means(problem.backbone(optimum.point))
            models[model] = {
                **record,
                "distances": theory.gram_distances(means, problem.e_h),
                "condition": theory.gram_condition(h0, problem.e_h),
                "cosines": theory.cosines(means, problem.weight(optimum.point)),
            }
        pairs = zip(models["deq"]["cosines"], models["explicit"]["cosines"], strict=True)
        ratios = [None if deq is None or not explicit else deq / explicit for deq, explicit in pairs]
        return {"models": models, "cosine_ratios": ratios}

    def limit(self) -> Part:
        """Solve problem (10) for rising R, and for R without bound, which gives the minority no weight in the loss."""
        ratios = (*sorted(self.settings.numbers("ratios")), math.inf)
        rows = ({**bounds, "rows": [self._limit(bounds, ratio) for ratio in ratios]} for bounds in self.settings.bounds)
        return {"bounds": list(rows)}

    def _limit(self, bounds: Part, ratio: float) -> Part:
        settings = self.settings
        weights = (1.0,) * settings.majority + (1 / ratio,) * (settings.classes - settings.majority)
        columns = (LIMIT_COLUMNS,) * settings.classes
        models = {model: self._limit_model(self._problem(model, bounds, columns, weights)) for model in BOTH}
        return {"ratio": None if ratio == math.inf else ratio, "models": models}

    def _limit_model(self, problem: Problem) -> Part:
        optimum, record = self._solve(problem)
        many = self.settings.majority
        weight, means = problem.weight(optimum.point), class_means(problem, optimum)
        within = problem.labels < many
        h = problem.outputs(optimum.point).detach()
        collapse = deqfast.neural_collapse(h[within], problem.labels[within], rtol=theory.SAME)
        typical = float(torch.linalg.vector_norm(weight[:many], dim=1).square().mean().sqrt())
        return {
            **record,
            **{f"majority_{name}": _finite(getattr(collapse, name)) for name in ("nc1", "nc2", "nc2_centered")},
            "minority_weight": _longest(weight[many:]) / typical,
            "minority_feature": _longest(means[many:]) / _longest(means[:many]),
            "minority_spread": float(torch.cdist(weight[many:], weight[many:]).max()) / typical,
        }

    def _problem(self, model: str, bounds: Part, columns: tuple[int, ...], weights: tuple[float, ...]) -> Problem:
        shares = tuple(weight / sum(weights) for weight in weights)
        return Problem(model, samples=columns, shares=shares, dimension=self.settings.dimension, **bounds)

    def _solve(self, problem: Problem, h0: Tensor | None = None) -> tuple[Optimum, Part]:
        """Find the best end over the seeds, on the scaled features `h0` if given, and describe it."""
        frozen = problem.frozen if h0 is None else ("features",)
        ends = []
        for seed in map(int, self.settings.numbers("seeds")):
            start = problem.start(seed)
            start = start if h0 is None else start._replace(features=h0)
            ends.append(minimise(problem, start, self.settings.steps, self.settings.tolerance, frozen))
            self.bar.update()
        best = min(ends, key=lambda end: (end.loss, -end.below_chance))
        deepest = max(end.below_chance for end in ends)
        agree = sum(deepest - end.below_chance <= AGREEMENT * deepest for end in ends)
        return best, {**describe(problem, best), "starts": {"count": len(ends), "at_best": agree}}


def describe(problem: Problem, optimum: Optimum) -> Part:
    """Measure loss, stationarity and collapse at a point."""
    h, weight = problem.outputs(optimum.point).detach(), problem.weight(optimum.point)
    # Without the cut NC1 would relate noise to noise in the directions in which class means have collapsed.
    collapse = deqfast.neural_collapse(h, problem.labels, weight, rtol=theory.SAME)
    singular = torch.linalg.svdvals(problem.means(h))
    return {
        "loss": optimum.loss,
        "below_chance": optimum.below_chance,
        "residual": optimum.residual,
        "nc": {name: _finite(getattr(collapse, name)) for name in ("nc1", "nc2", "nc3")},
        "spectrum": (singular / singular[0]).tolist()[: problem.classes],
    }


def class_means(problem: Problem, optimum: Optimum) -> Tensor:
    """Return the class means of the final features, (K, D)."""
    return problem.means(problem.outputs(optimum.point).detach())


def _longest(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=1).max())


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
