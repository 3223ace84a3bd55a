"""The study's protocol as code: the runs, the trials before them and the claims of experiments/protocol.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from runs.files import read_record
from runs.options import StudyError

from .config import Experiment, Setting, arm_options

ARMS = ("explicit", "explicit-norm", "once", "deq-jfb", "deq-implicit")
PAIR = ("explicit", "deq-implicit")
PRESET = "study"
MACHINE = ("data_root", "threads", "out", "device", "kernel")
"""Options that the protocol does not fix."""

TUNED = ("lr", "weight_decay", "scale")
GRID: dict[str, tuple[float, ...]] = dict(zip(TUNED, ((0.03, 0.1, 0.3), (5e-4, 2e-3), (1.0, 0.3)), strict=True))
TRIAL = {"epochs": 10, "n_majority": 4500, "evaluate": "validation", "test_images": 5000, "metrics_every": 10}
TRIAL_SEED = 100
TRIAL_SETTING = Setting("cifar10", 3, 10)
TUNING = Path(__file__).parents[1] / "results" / "tuning.json"

Options = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """Runs of the list: a setting's arms under some seeds, and the options that differ from the preset's."""

    setting: Setting
    seeds: range
    arms: tuple[str, ...] = ARMS
    options: Options = field(default_factory=dict, hash=False)


def _cifar10(majority: int | None, ratio: int | None, seeds: range, *rest: Any) -> Block:
    return Block(Setting("cifar10", majority, ratio), seeds, *rest)


PRECISION_CHECK = _cifar10(3, 10, range(2), PAIR, {"precision": "fp32"})
PRECISION_POINTS = 2.0
"""Largest difference between the precisions, of the difference between its arms."""

SEEN, FRESH = range(3), range(3, 6)
"""Seeds seen under the first recipe, and seeds not seen."""
B_ARMS = tuple(arm for arm in ARMS if arm != "deq-jfb")
PRIMARY = (
    _cifar10(3, 10, range(6), B_ARMS),
    _cifar10(3, 100, SEEN, B_ARMS),
    _cifar10(5, 100, SEEN, B_ARMS),
)
"""Runs of recipe B that decide the verdicts."""


def _tuned(lr: float, weight_decay: float, scale: float = 1.0) -> Options:
    return dict(zip(TUNED, (lr, weight_decay, scale), strict=True))


RECIPE_B = _tuned(0.03, 5e-4)
LIST = (
    *(_cifar10(*setting, SEEN, B_ARMS, RECIPE_B) for setting in ((3, 100), (5, 100), (3, 10))),
    _cifar10(3, 10, FRESH, B_ARMS, RECIPE_B),
    _cifar10(5, 100, SEEN, ("deq-implicit",), _tuned(0.1, 5e-4)),
    _cifar10(3, 10, range(1), PAIR, {**_tuned(1e-4, 5e-4), "schedule": "constant", "epochs": 100}),
    *(_cifar10(majority, 100, SEEN, ("deq-jfb",), _tuned(0.1, 5e-4, 0.3)) for majority in (3, 5)),
    _cifar10(3, 10, SEEN, B_ARMS, {**RECIPE_B, "no_augmentation": True}),
    _cifar10(None, None, range(1), PAIR, RECIPE_B),
    Block(Setting("cifar100", 3, 10), range(1), PAIR, RECIPE_B),
    *(_cifar10(majority, 100, SEEN, ("explicit",), _tuned(0.1, 2e-3)) for majority in (3, 5)),
)
"""Runs of the amendments."""


@dataclass(frozen=True)
class Claim:
    """Expectation on the difference between two arms in a quantity (see `NetworkResult.quantity`)."""

    name: str
    arm: str
    control: str
    quantity: str
    expected: str
    """Direction of the arm, compared with the control: "higher" or "lower"."""
    source: str


_TABLES = "Tables 2-4"
_CONTROL = "the control: is it the equilibrium?"
CLAIMS = (
    Claim("A1", "deq-implicit", "explicit", "overall", "higher", _TABLES),
    Claim("A4", "deq-implicit", "once", "overall", "higher", _CONTROL),
    Claim("A5", "deq-implicit", "explicit-norm", "overall", "higher", _CONTROL),
    Claim("N1", "deq-implicit", "explicit", "nc2_centered", "lower", "Theorem 4.1, Figs. 3b-5"),
    Claim("N3", "deq-implicit", "once", "nc2_centered", "lower", _CONTROL),
    Claim("N4", "deq-implicit", "explicit-norm", "nc2_centered", "lower", _CONTROL),
)


@dataclass(frozen=True)
class Trial:
    """Trial of the grid, and the validation accuracy (percent, mean over classes) after its last epoch. None if its
    loss was not finite."""

    arm: str
    lr: float
    weight_decay: float
    scale: float
    overall: float | None

    @property
    def values(self) -> dict[str, float]:
        """Options of the trial."""
        return {name: getattr(self, name) for name in TUNED}


@dataclass(frozen=True)
class Tuning:
    """Finished trials and, once all are finished, the values chosen for every arm."""

    trials: tuple[Trial, ...]
    chosen: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        finite = {trial.arm for trial in self.trials if trial.overall is not None}
        if any(arm not in finite or values.keys() != {*TUNED} for arm, values in self.chosen.items()):
            raise ValueError(f"chosen must have {', '.join(TUNED)} of arms with finite trials")


def choose(trials: list[Trial]) -> Tuning:
    """Choose for every arm the values of the trial with the highest validation accuracy, or the first of several in the
    grid. Nothing is chosen before all trials are finished, or if none was finite."""
    complete = len(trials) == len(ARMS) * len(list(product(*GRID.values())))
    chosen = {}
    for arm in ARMS if complete else ():
        finite = [trial for trial in trials if trial.arm == arm and trial.overall is not None]
        if not finite:
            raise StudyError(f"no trial of {arm} has a finite loss: the grid must change")
        chosen[arm] = max(finite, key=lambda trial: trial.overall or 0).values
    return Tuning(tuple(trials), chosen)


def tuning() -> Tuning:
    """The trials and the values chosen by them; StudyError if the trials are not over."""
    found = read_record(TUNING, Tuning, "python experiments/study.py --tune makes it")
    if not found.chosen:
        raise StudyError(f"{TUNING}: not all trials are finished: python experiments/study.py --tune continues them")
    return found


def tuned() -> dict[str, dict[str, float]]:
    """Values chosen for every arm; raises StudyError if the trials are not finished."""
    return tuning().chosen


def trials() -> Iterator[Options]:
    """Options of every trial, in an order whose every beginning is fair to all arms."""
    for values in product(*GRID.values()):
        for arm in ARMS:
            yield _options(TRIAL_SETTING, TRIAL_SEED, arm) | TRIAL | dict(zip(GRID, values, strict=True))


def runs() -> Iterator[Options]:
    """Options of every run of the amended list in its order, all arms of a seed together."""
    for block in LIST:
        for seed in block.seeds:
            for arm in block.arms:
                yield _options(block.setting, seed, arm) | block.options


def _options(setting: Setting, seed: int, arm: str) -> Options:
    return {"preset": PRESET, **setting.options, "seed": seed, **arm_options(arm), "precision": "bf16"}


def of_first_list(experiment: Experiment, chosen: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether a run is of the list before the amendments. It ran on a CPU, with the values that the trials
    chose for its arm, in bfloat16 or, as a check, in float32."""
    run = experiment.seed in SEEN and experiment.majority is not None and experiment.device == "cpu"
    return run and experiment.arm in chosen and _is_preset_but_for(experiment, chosen[experiment.arm])


def of_recipe_b(experiment: Experiment) -> bool:
    """Return whether a run is on CIFAR-10, in bfloat16, of an arm that has recipe B."""
    return experiment.arm in B_ARMS and experiment.precision == "bf16" and _is_preset_but_for(experiment, RECIPE_B)


def counts(experiment: Experiment) -> bool:
    """Return whether a run decides the verdicts; all such runs were made on a GPU."""
    blocks = (block for block in PRIMARY if block.setting == experiment.setting and experiment.seed in block.seeds)
    return of_recipe_b(experiment) and experiment.device == "cuda" and any(blocks)


def _is_preset_but_for(experiment: Experiment, values: Mapping[str, float]) -> bool:
    """Return whether a run has these values, and otherwise the preset's, with any precision."""
    apart = experiment.departures.keys() - {*TUNED, "precision"}
    preset = experiment.preset == PRESET and experiment.dataset == "cifar10" and not apart
    return preset and all(getattr(experiment, name) == one for name, one in values.items())
