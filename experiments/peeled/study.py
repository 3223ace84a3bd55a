"""Optima of problems (7), (9) and (10) under every bound asked for, and what there is to measure of them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict

import torch
from nc_study.config import MODELS
from nc_study.provenance import commit, machine, now, versions
from torch import Tensor
from tqdm import tqdm

import deqfast

from . import theory
from .claims import claims_of
from .problem import Optimum, Problem, Row, minimise
from .settings import PARTS, PeeledSettings

LIMIT_COLUMNS = 2  # for each class in the limit, each for half of the class
TWO_CLASSES = {"e_w": 1.0, "e_h": 0.75}  # bounds with E_H > 1/2, where (33) is known to fail
AGREEMENT = 1e-6  # relative difference of log K - loss up to which seeds found the same optimum


def run(settings: PeeledSettings, quiet: bool = False) -> Row:
    """Solve everything asked for; the result as it is written to layer_peeled.json."""
    start, code = time.perf_counter(), commit()
    torch.set_num_threads(settings.threads)
    with tqdm(total=count_solves(settings), unit="solve", disable=quiet or None) as bar:
        study = Study(settings, bar)
        parts = {name: getattr(study, name)() if name in settings.parts else None for name in PARTS}
    return {
        "kind": "layer_peeled",
        "settings": asdict(settings),
        **parts,
        "claims": claims_of(parts),
        "versions": versions(),
        "machine": asdict(machine(settings.threads, "cpu")),
        "commit": code,
        "seconds": round(time.perf_counter() - start, 1),
        "finished": now(),
    }


def count_solves(settings: PeeledSettings) -> int:
    """Count the minimisations of a run."""
    solves = 0
    for bounds in settings.bounds:
        imbalanced = 2 if bounds["features"] == "final" else 6
        each = {"balanced": 2, "imbalanced": imbalanced, "limit": 2 * len(settings.limit_ratios)}
        solves += sum(each[part] for part in settings.parts)
    return len(settings.starts) * (solves + ("balanced" in settings.parts))


class Study:
    """The three parts, each a method that returns its share of the result."""

    def __init__(self, settings: PeeledSettings, bar: tqdm) -> None:
        self.settings, self.bar = settings, bar

    def balanced(self) -> Row:
        """Solve problems (7) and (9), and the DEQ of two classes under a bound E_H above 1/2."""
        settings = self.settings
        count = (settings.samples,) * settings.classes
        found = []
        for bounds in settings.bounds:
            models = {model: self._balanced(self._problem(model, bounds, count, count)) for model in MODELS}
            found.append({**bounds, "models": models})
        two = self._problem("deq", {"features": "backbone", **TWO_CLASSES}, (LIMIT_COLUMNS,) * 2, (1, 1))
        return {"bounds": found, "two_classes": {**TWO_CLASSES, **self._balanced(two)}}

    def _balanced(self, problem: Problem) -> Row:
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

    def imbalanced(self) -> Row:
        """Solve problem (10): each model at its own optimum, and both on the same h0."""
        settings = self.settings
        few = settings.samples // settings.ratio
        count = (settings.samples,) * settings.majority + (few,) * (settings.classes - settings.majority)
        return {
            "bounds": [self._imbalanced(bounds, count) for bounds in settings.bounds],
            "majority": settings.majority,
        }

    def _imbalanced(self, bounds: Row, count: tuple[int, ...]) -> Row:
        problems = {model: self._problem(model, bounds, count, count) for model in MODELS}
        solved = {model: self._solve(problem) for model, problem in problems.items()}
        comparisons = {"own optimum": self._compare(problems, solved)}
        if bounds["features"] == "backbone":  # elsewhere h0 has no scale, so that sharing it settles nothing
            for origin, name in zip(MODELS, ("the explicit model's h0", "the DEQ's h0"), strict=True):
                h0 = solved[origin][0].point.features
                shared = {model: self._solve(problem, h0) for model, problem in problems.items()}
                comparisons[f"both on {name}"] = self._compare(problems, shared)
        condition = theory.cosine_condition(bounds["e_w"], bounds["e_h"])
        return {**bounds, "comparisons": comparisons, "cosine_condition": condition}

    def _compare(self, problems: dict[str, Problem], solved: dict[str, tuple[Optimum, Row]]) -> Row:
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

    def limit(self) -> Row:
        """Solve problem (10) for rising R, and for R without bound, where the minority has no weight in the loss."""
        settings = self.settings
        rows = ([self._limit_row(bounds, ratio) for ratio in settings.limit_ratios] for bounds in settings.bounds)
        found = [{**bounds, "rows": row} for bounds, row in zip(settings.bounds, rows, strict=True)]
        return {"bounds": found, "majority": settings.majority, "columns": LIMIT_COLUMNS}

    def _limit_row(self, bounds: Row, ratio: float) -> Row:
        settings = self.settings
        weights = (1.0,) * settings.majority + (1 / ratio,) * (settings.classes - settings.majority)
        columns = (LIMIT_COLUMNS,) * settings.classes
        models = {model: self._limit_model(self._problem(model, bounds, columns, weights)) for model in MODELS}
        share = settings.majority / sum(weights)
        return {"ratio": None if ratio == math.inf else ratio, "majority_share": share, "models": models}

    def _limit_model(self, problem: Problem) -> Row:
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
            "minority_spread": float(torch.pdist(weight[many:]).max()) / typical if len(weight) - many > 1 else 0.0,
            "minority_cosine": _mean_cosine(weight[many:], typical),
        }

    def _problem(self, model: str, bounds: Row, columns: tuple[int, ...], weights: tuple[float, ...]) -> Problem:
        shares = tuple(weight / sum(weights) for weight in weights)
        return Problem(model, samples=columns, shares=shares, dimension=self.settings.dimension, **bounds)

    def _solve(self, problem: Problem, h0: Tensor | None = None) -> tuple[Optimum, Row]:
        """Find the best end over the seeds, on the scaled features `h0` if given, and describe it."""
        frozen = problem.frozen if h0 is None else ("features",)
        ends = []
        for seed in self.settings.starts:
            start = problem.start(seed)
            start = start if h0 is None else start._replace(features=h0)
            ends.append(minimise(problem, start, self.settings.steps, self.settings.tolerance, frozen))
            self.bar.update()
        best = min(ends, key=lambda end: (end.loss, -end.below_chance))
        return best, {**describe(problem, best), "starts": _over_starts(ends)}


def _over_starts(ends: list[Optimum]) -> Row:
    best = max(end.below_chance for end in ends)
    return {
        "count": len(ends),
        "at_best": sum(best - end.below_chance <= AGREEMENT * best for end in ends),
        "spread": best - min(end.below_chance for end in ends),
    }


def describe(problem: Problem, optimum: Optimum) -> Row:
    """Measure loss, stationarity and collapse at a point."""
    h, weight = problem.outputs(optimum.point).detach(), problem.weight(optimum.point)
    # Without the cut NC1 would relate noise to noise in the directions in which class means have collapsed.
    collapse = deqfast.neural_collapse(h, problem.labels, weight, rtol=theory.SAME)
    singular = torch.linalg.svdvals(problem.means(h))
    return {
        "loss": optimum.loss,
        "below_chance": optimum.below_chance,
        "residual": optimum.residual,
        "steps": optimum.steps,
        "certified_gap": theory.certified_gap(problem, optimum),
        "nc": {name: _finite(getattr(collapse, name)) for name in ("nc1", "nc2", "nc2_centered", "nc3", "nc4")},
        "spectrum": (singular / singular[0]).tolist()[: problem.classes],
    }


def class_means(problem: Problem, optimum: Optimum) -> Tensor:
    """Return the class means of the final features, (K, D)."""
    return problem.means(problem.outputs(optimum.point).detach())


def _longest(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=1).max())


def _mean_cosine(rows: Tensor, typical: float) -> float | None:
    """Average the cosines of the angles between the rows; None for a single one, and where they have collapsed to 0."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if len(rows) < 2 or float(lengths.min()) <= theory.SAME * typical:
        return None
    table = (rows / lengths) @ (rows / lengths).T
    return float((table.sum() - len(rows)) / (len(rows) * (len(rows) - 1)))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
