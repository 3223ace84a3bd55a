"""The layer-peeled study: solves (7), (9) and (10) of Sun & Shi (NeurIPS 2024), against which it holds the theorems."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone

import torch
from torch import Tensor
from tqdm import tqdm

import deqfast

from ..config import LARGEST_SEED, MODELS, SettingsError, check_field, flag_of, option
from ..results import commit, machine, versions
from ..rundir import Row
from . import theory
from .claims import balanced_claims, imbalanced_claims, limit_claims
from .problem import FEATURES, Optimum, Point, Problem, minimise

PARTS = ("balanced", "imbalanced", "limit")
LIMIT_SAMPLES = 2  # columns per class in the limit, each for half of the class
TWO_CLASSES = {"e_w": 1.0, "e_h": 0.75}  # budget with E_H > 1/2, where (33) is known to fail
AGREEMENT = 1e-6  # relative difference of log K - loss up to which seeds found the same optimum


@dataclass(frozen=True, kw_only=True)
class PeeledSettings:
    """Everything that decides the outcome."""

    part: str = option(
        "study", "balanced: Theorem 3.1; imbalanced: Theorem 4.1; limit: Proposition 4.2", "all",
        choices=("all", *PARTS),
    )  # fmt: skip
    features: str = option(
        "study",
        "what the bound E_H on the features is about, which the paper leaves open; final: W_EX h0 and z* (Definition "
        "2.2, Appendix B.1), which makes both models one problem; backbone: h0 (the steps of the proofs); both: one "
        "after the other",
        "both",
        choices=("both", *FEATURES),
    )
    seeds: str = option("study", "of the starting points, with commas; the best end is reported", "0,1,2", kind=str)

    classes: int = option("problem", "K", 10, kind=int, minimum=2)
    samples: int = option("problem", "samples of a class, of a majority class (n, n_A)", 20, kind=int, minimum=2)
    ratio: int = option("problem", "n_A/n_B of the imbalanced part (R)", 10, kind=int, minimum=2)
    majority: int = option("problem", "classes with n_A samples (K_A)", 5, kind=int, minimum=2)
    dimension: int = option("problem", "length of a feature vector (D), at least K", 16, kind=int, minimum=2)
    e_w: str = option("problem", "bounds E_W on the classifier, with commas: a study for each", "0.01,100", kind=str)
    e_h: str = option(
        "problem", "bounds E_H, in ]0, 1[, on the layer's Frobenius norm and the features, one for each E_W",
        "0.01,0.5", kind=str,
    )  # fmt: skip
    ratios: str = option("problem", "R of the limit part; infinity is added", "10,100,1000", kind=str)

    steps: int = option("machine", "most L-BFGS steps of a solve", 400, kind=int, minimum=1)
    tolerance: float = option("machine", "projected-gradient norm at which a solve ends", 1e-7, kind=float, above=0)
    threads: int = option("machine", "CPU threads; the matrices are small", 1, kind=int, minimum=1)
    out: str = option("machine", "folder for layer_peeled.json, .md and the figures", "runs/layer_peeled", kind=str)

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_field(spec, getattr(self, spec.name))
        if self.part != "balanced" and not self.majority < self.classes:
            raise SettingsError(f"--majority {self.majority}: less than --classes {self.classes}")
        if "imbalanced" in self.parts and self.samples % self.ratio:
            raise SettingsError(f"--ratio {self.ratio}: must divide --samples {self.samples}, for n_B = n_A/R")
        if self.dimension < self.classes:
            raise SettingsError(f"--dimension {self.dimension}: at least --classes {self.classes}")
        if len(self.budgets) != len(set(self.budgets)):
            raise SettingsError(f"--e-w {self.e_w}, --e-h {self.e_h}: a pair of bounds occurs twice")
        if any(ratio <= 1 for ratio in self.limit_ratios):
            raise SettingsError(f"--ratios {self.ratios}: each more than 1")
        seeds = self._numbers("seeds")
        if any(not 0 <= seed < LARGEST_SEED or seed != int(seed) for seed in seeds) or len(set(seeds)) < len(seeds):
            raise SettingsError(f"--seeds {self.seeds}: different whole numbers from 0 to below 2**63 - 1")

    def _numbers(self, name: str) -> tuple[float, ...]:
        text = getattr(self, name)
        try:
            values = tuple(float(word) for word in text.split(","))
        except ValueError:
            values = ()
        if not values or not all(math.isfinite(value) for value in values):
            raise SettingsError(f"{flag_of(name)} {text}: numbers with commas between them, such as {_default(name)}")
        return values

    @property
    def budgets(self) -> tuple[tuple[float, float], ...]:
        """Pairs (E_W, E_H)."""
        e_w, e_h = self._numbers("e_w"), self._numbers("e_h")
        if len(e_w) != len(e_h):
            raise SettingsError(f"--e-h {self.e_h}: as many as --e-w {self.e_w}")
        for value in e_w:
            if value <= 0:
                raise SettingsError(f"--e-w {self.e_w}: each more than 0")
        for value in e_h:
            if not 0 < value < 1:
                raise SettingsError(
                    f"--e-h {self.e_h}: each between 0 and 1; from ||W_DEQ||_F = 1 on the series of the linear DEQ "
                    "need not converge"
                )
        return tuple(zip(e_w, e_h, strict=True))

    @property
    def limit_ratios(self) -> tuple[float, ...]:
        """R of the limit part, rising, without the infinity."""
        return tuple(sorted(set(self._numbers("ratios"))))

    @property
    def seed_list(self) -> tuple[int, ...]:
        """Seeds."""
        return tuple(int(seed) for seed in self._numbers("seeds"))

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts to run."""
        return PARTS if self.part == "all" else (self.part,)

    @property
    def readings(self) -> tuple[str, ...]:
        """What E_H bounds, one after the other."""
        return FEATURES if self.features == "both" else (self.features,)

    @property
    def cases(self) -> tuple[Row, ...]:
        """A study for each pair of bounds and each reading of the constraint."""
        return tuple(
            {"features": features, "e_w": e_w, "e_h": e_h} for e_w, e_h in self.budgets for features in self.readings
        )


def _default(name: str) -> str:
    return next(str(spec.default) for spec in fields(PeeledSettings) if spec.name == name)


def run(settings: PeeledSettings, quiet: bool = False) -> Row:
    """Solve everything asked for; the result as it is written to layer_peeled.json."""
    start, code = time.perf_counter(), commit()
    with _threads(settings), tqdm(total=count_solves(settings), unit="solve", disable=quiet or None) as bar:
        study = Study(settings, bar)
        parts = {name: getattr(study, name)() if name in settings.parts else None for name in PARTS}
    makers = {"balanced": balanced_claims, "imbalanced": imbalanced_claims, "limit": limit_claims}
    return {
        "kind": "layer_peeled",
        "settings": asdict(settings),
        **parts,
        "claims": [row for name, part in parts.items() if part for row in makers[name](part)],
        "versions": versions(),
        "machine": machine(settings.threads, "cpu"),
        "commit": code,
        "seconds": round(time.perf_counter() - start, 1),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


@contextmanager
def _threads(settings: PeeledSettings) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def count_solves(settings: PeeledSettings) -> int:
    """Minimisations in a run."""
    per_case = {
        "balanced": lambda case: 2,
        "imbalanced": lambda case: 2 if case["features"] == "final" else 6,
        "limit": lambda case: 2 * (len(settings.limit_ratios) + 1),
    }
    solves = sum(per_case[part](case) for part in settings.parts for case in settings.cases)
    return len(settings.seed_list) * (solves + ("balanced" in settings.parts))


class Study:
    """The three parts."""

    def __init__(self, settings: PeeledSettings, bar: tqdm) -> None:
        self.settings, self.bar = settings, bar

    def balanced(self) -> Row:
        """Problems (7) and (9), and the DEQ of two classes under a bound E_H above 1/2."""
        settings = self.settings
        cases = []
        for case in settings.cases:
            count = (settings.samples,) * settings.classes
            problems = {model: self._problem(model, case, count) for model in MODELS}
            models = {}
            for model, problem in problems.items():
                optimum, record = self._solve(problem)
                models[model] = {**record, **_balanced_theory(problem, optimum)}
            cases.append({**case, "models": models})
        problem = Problem("deq", "backbone", (LIMIT_SAMPLES,) * 2, (0.5, 0.5), settings.dimension, **TWO_CLASSES)
        optimum, record = self._solve(problem)
        return {"cases": cases, "two_classes": {**TWO_CLASSES, **record, **_balanced_theory(problem, optimum)}}

    def imbalanced(self) -> Row:
        """Problem (10): each model at its own optimum, and both on the same h0."""
        settings = self.settings
        few = settings.samples // settings.ratio
        count = (settings.samples,) * settings.majority + (few,) * (settings.classes - settings.majority)
        return {"cases": [self._imbalanced_case(case, count) for case in settings.cases], "majority": settings.majority}

    def _imbalanced_case(self, case: Row, count: tuple[int, ...]) -> Row:
        problems = {model: self._problem(model, case, count) for model in MODELS}
        solved = {model: self._solve(problem) for model, problem in problems.items()}
        comparisons = {"own optimum": self._compare(problems, solved)}
        if case["features"] == "backbone":  # elsewhere h0 has no scale, so that sharing it settles nothing
            for origin, name in zip(MODELS, ("the explicit model's h0", "the DEQ's h0"), strict=True):
                h0 = solved[origin][0].point.features
                shared = {model: self._solve(problem, h0) for model, problem in problems.items()}
                comparisons[f"both on {name}"] = self._compare(problems, shared)
        condition = theory.cosine_condition(case["e_w"], case["e_h"])
        return {**case, "comparisons": comparisons, "cosine_condition": condition}

    def _compare(self, problems: dict[str, Problem], solved: dict[str, tuple[Optimum, Row]]) -> Row:
        models = {}
        for model, problem in problems.items():
            optimum, record = solved[model]
            means, weight = class_means(problem, optimum.point), problem.weight(optimum.point)
            h0 = _means(problem, problem.backbone(optimum.point))
            models[model] = {
                **record,
                "distances": theory.gram_distances(means, problem.e_h),
                "condition": theory.gram_condition(h0, problem.e_h),
                "cosines": theory.cosines(means, weight),
            }
        pairs = zip(models["deq"]["cosines"], models["explicit"]["cosines"], strict=True)
        ratios = [None if deq is None or not explicit else deq / explicit for deq, explicit in pairs]
        return {"models": models, "cosine_ratios": ratios}

    def limit(self) -> Row:
        """Problem (10) for rising R, and for R without bound, where the minority has no weight in the loss."""
        settings = self.settings
        cases = []
        for case in settings.cases:
            rows = []
            for ratio in (*settings.limit_ratios, math.inf):
                problems = {model: self._limit_problem(model, case, ratio) for model in MODELS}
                models = {model: self._limit_row(problem) for model, problem in problems.items()}
                share = sum(problems["deq"].shares[: settings.majority])
                rows.append({"ratio": None if ratio == math.inf else ratio, "majority_share": share, "models": models})
            cases.append({**case, "rows": rows})
        return {"cases": cases, "majority": settings.majority, "columns": LIMIT_SAMPLES}

    def _limit_problem(self, model: str, case: Row, ratio: float) -> Problem:
        settings = self.settings
        weights = [1.0] * settings.majority + [1 / ratio] * (settings.classes - settings.majority)
        shares = tuple(weight / sum(weights) for weight in weights)
        return Problem(model, samples=(LIMIT_SAMPLES,) * settings.classes, shares=shares,
                       dimension=settings.dimension, **case)  # fmt: skip

    def _limit_row(self, problem: Problem) -> Row:
        optimum, record = self._solve(problem)
        many = self.settings.majority
        weight, means = problem.weight(optimum.point), class_means(problem, optimum.point)
        within = problem.labels < many
        h = problem.outputs(optimum.point).detach()
        collapse = deqfast.neural_collapse(h[within], problem.labels[within], rtol=theory.SAME)
        typical = float(torch.linalg.vector_norm(weight[:many], dim=1).square().mean().sqrt())
        return {
            **record,
            "majority_nc1": _finite(collapse.nc1),
            "majority_nc2": _finite(collapse.nc2),
            "majority_nc2_centered": _finite(collapse.nc2_centered),
            "minority_weight": _longest(weight[many:]) / typical,
            "minority_feature": _longest(means[many:]) / _longest(means[:many]),
            "minority_spread": float(torch.pdist(weight[many:]).max()) / typical if len(weight) - many > 1 else 0.0,
            "minority_cosine": _mean_cosine(weight[many:], typical),
        }

    def _problem(self, model: str, case: Row, count: tuple[int, ...]) -> Problem:
        shares = tuple(n / sum(count) for n in count)
        return Problem(model, samples=count, shares=shares, dimension=self.settings.dimension, **case)

    def _solve(self, problem: Problem, h0: Tensor | None = None) -> tuple[Optimum, Row]:
        """The best end over the seeds, on the scaled features `h0` if given, and what there is to say of it."""
        frozen = problem.frozen if h0 is None else ("features",)
        ends = []
        for seed in self.settings.seed_list:
            start = problem.start(seed)
            start = start if h0 is None else start._replace(features=h0)
            ends.append(minimise(problem, start, self.settings.steps, self.settings.tolerance, frozen))
            self.bar.update()
        best = min(ends, key=lambda end: (end.loss, -end.below_chance))
        return best, {**describe(problem, best), "seeds": _over_seeds(ends)}


def _over_seeds(ends: list[Optimum]) -> Row:
    best = max(end.below_chance for end in ends)
    return {
        "losses": [end.loss for end in ends],
        "residuals": [end.residual for end in ends],
        "steps": [end.steps for end in ends],
        "spread": best - min(end.below_chance for end in ends),
        "at_best": sum(best - end.below_chance <= AGREEMENT * best for end in ends),
    }


def describe(problem: Problem, optimum: Optimum) -> Row:
    """Loss, stationarity and collapse at a point."""
    h, weight = problem.outputs(optimum.point).detach(), problem.weight(optimum.point)
    # Without the cut NC1 would relate noise to noise in the directions in which class means have collapsed.
    collapse = deqfast.neural_collapse(h, problem.labels, weight, rtol=theory.SAME)
    singular = torch.linalg.svdvals(class_means(problem, optimum.point))
    names = ("nc1", "nc2", "nc2_centered", "nc3", "nc4")
    return {
        "loss": optimum.loss,
        "below_chance": optimum.below_chance,
        "residual": optimum.residual,
        "steps": optimum.steps,
        "certified_gap": theory.certified_gap(problem, optimum),
        "nc": {name: _finite(getattr(collapse, name)) for name in names},
        "spectrum": (singular / singular[0]).tolist()[: problem.classes],
    }


def _balanced_theory(problem: Problem, optimum: Optimum) -> Row:
    weight, means = problem.weight(optimum.point), class_means(problem, optimum.point)
    gram = weight @ weight.T
    return {
        "etf_loss": theory.closed_form_loss(problem, theory.etf_stretch(problem)),
        "lower_bound": theory.closed_form_loss(problem, theory.largest_stretch(problem)),
        "paper_bound": theory.paper_bounds(problem),
        "weight_gram_error": _distance(gram, problem.e_w * theory.simplex_gram(problem.classes)),
        "duality_error": _distance(math.sqrt(problem.e_w / problem.e_h) * weight @ means.T, gram),
    }


def class_means(problem: Problem, point: Point) -> Tensor:
    """Class means of the final features, (K, D)."""
    return _means(problem, problem.outputs(point).detach())


def _means(problem: Problem, features: Tensor) -> Tensor:
    return torch.stack([features[problem.labels == k].mean(0) for k in range(problem.classes)])


def _distance(value: Tensor, target: Tensor) -> float:
    return float(torch.linalg.matrix_norm(value - target) / torch.linalg.matrix_norm(target))


def _longest(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=1).max())


def _mean_cosine(rows: Tensor, typical: float) -> float | None:
    """Mean cosine of the angles between the rows; None for a single one, and where they have collapsed to 0."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if len(rows) < 2 or float(lengths.min()) <= theory.SAME * typical:
        return None
    table = (rows / lengths) @ (rows / lengths).T
    return float((table.sum() - len(rows)) / (len(rows) * (len(rows) - 1)))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
