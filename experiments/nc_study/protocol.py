"""The study's protocol as code: the runs, the trials before them and the claims of experiments/protocol.md.

The first half reads what was run under recipe B and before. The second half is the amendment of 2026-11-28, which
`study.py --protocol` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from runs.files import read_record
from runs.options import StudyError

from .config import Experiment, Setting, arm_options
from .paper import FIGURES, PAPER, entries

PAIR = ("explicit", "deq-implicit")
PRESET = "study"
MACHINE = ("data_root", "threads", "out", "device", "kernel", "eager")
"""Options that the protocol does not fix."""

TUNED = ("lr", "weight_decay", "scale")
GRID: dict[str, tuple[float, ...]] = dict(zip(TUNED, ((0.03, 0.1, 0.3), (5e-4, 2e-3), (1.0, 0.3)), strict=True))
TRIAL_SETTING = Setting("cifar10", 3, 10)
TUNING = Path(__file__).parents[1] / "results" / "tuning.json"

Options = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """Runs of the list: a setting's arms under some seeds, and the options that differ from the preset's."""

    setting: Setting
    seeds: range
    arms: tuple[str, ...]
    options: Options = field(default_factory=dict, hash=False)


def _cifar10(majority: int | None, ratio: int | None, seeds: range, *rest: Any) -> Block:
    return Block(Setting("cifar10", majority, ratio), seeds, *rest)


PRECISION_CHECK = _cifar10(3, 10, range(2), PAIR, {"precision": "fp32"})
PRECISION_POINTS = 2.0
"""Largest difference between the precisions, of the difference between its arms."""

SEEN, FRESH = range(3), range(3, 6)
"""Seeds seen under the first recipe, and seeds not seen."""
B_ARMS = ("explicit", "explicit-norm", "once", "deq-implicit")
PRIMARY = (
    _cifar10(3, 10, range(6), B_ARMS),
    _cifar10(3, 100, SEEN, B_ARMS),
    _cifar10(5, 100, SEEN, B_ARMS),
)
"""Runs of recipe B that decide the verdicts."""


RECIPE_B = dict(zip(TUNED, (0.03, 5e-4, 1.0), strict=True))


@dataclass(frozen=True)
class Claim:
    """Expectation on the difference between two arms in a quantity (see `NetworkResult.quantity`)."""

    name: str
    arm: str
    control: str
    quantity: str
    expected: str
    """What the arm is, compared with the control: "higher", "lower" or "alike"."""
    source: str


CLAIMS: dict[str, list[Claim]] = {}
"""Claims of recipe B, and of each part of the last amendment that has some."""
for _row in entries("claims.csv"):
    CLAIMS.setdefault(_row.pop("part"), []).append(Claim(**_row))


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


def tuning() -> Tuning:
    """The trials of the first recipe and the values chosen by them."""
    return read_record(TUNING, Tuning, "restore it from the repository")


def tuned() -> dict[str, dict[str, float]]:
    """Values that those trials chose for every arm."""
    return tuning().chosen


def has_first_recipe(experiment: Experiment, chosen: Mapping[str, Mapping[str, float]]) -> bool:
    """Return whether a run is of the list before the amendments. It ran on a CPU, with the values that the trials
    chose for its arm, in bfloat16 or, as a check, in float32."""
    run = experiment.seed in SEEN and experiment.majority is not None and experiment.device == "cpu"
    return run and experiment.arm in chosen and _is_preset_but_for(experiment, chosen[experiment.arm])


def has_recipe_b(experiment: Experiment) -> bool:
    """Return whether a run is on CIFAR-10, in bfloat16, of an arm that has recipe B."""
    return experiment.arm in B_ARMS and experiment.precision == "bf16" and _is_preset_but_for(experiment, RECIPE_B)


def counts(experiment: Experiment) -> bool:
    """Return whether a run decides the verdicts; all such runs were made on a GPU."""
    blocks = (block for block in PRIMARY if block.setting == experiment.setting and experiment.seed in block.seeds)
    return has_recipe_b(experiment) and experiment.device == "cuda" and any(blocks)


def _is_preset_but_for(experiment: Experiment, values: Mapping[str, float]) -> bool:
    """Return whether a run has these values, and otherwise the preset's, with any precision."""
    apart = experiment.departures.keys() - {*TUNED, "precision"}
    preset = experiment.preset == PRESET and experiment.dataset == "cifar10" and not apart
    return preset and all(getattr(experiment, name) == value for name, value in values.items())


# The amendment of 2026-11-28.

RATES = (0.01, 0.03, 0.1)
DECAY, OTHER_DECAY = 5e-4, 2e-3
NEW_ARMS = ("explicit", "explicit-norm", "tied-2", "tied-4", "tied-12", "untied-2", "deq-implicit", "deq-jfb")
THREE = ("explicit", "explicit-norm", "deq-implicit")
TRIED = (Setting("cifar10", 3, 10), Setting("cifar10", 3, 100))
"""Settings of the trials; each chooses the rates for its ratio."""
TRIAL = {"epochs": 10, "n_majority": 4500, "evaluate": "validation", "test_images": 5000, "metrics_every": 10}
TRIAL_SEED = 100
CHOSEN = TUNING.with_name("rates.json")
FIRST_FRESH = 10
"""No run has a seed from here on, except the trials' one."""

MECHANISM = (
    _cifar10(3, 10, range(10, 16), NEW_ARMS),
    _cifar10(3, 100, range(10, 22), NEW_ARMS),
    _cifar10(5, 100, range(10, 22), NEW_ARMS),
)
SETTINGS = tuple(Block(setting, range(10, 13), THREE) for setting in PAPER)
SHOWN = tuple(Setting("cifar10", *imbalance) for settings in FIGURES.values() for imbalance in settings)
SIZE = tuple(Block(setting, range(10, 13), THREE, {"width": 64, "tf32": True}) for setting in SHOWN)
PRINTED = tuple(
    Block(setting, range(10, 11), ("explicit",), {"preset": "paper", **bounds})
    for setting in (Setting("cifar10"), Setting("cifar10", 3, 100))
    for bounds in ({}, {"e_w": 0.01, "e_h": 0.01})
)
PRINTED_LEAST = 90.0
"""Overall accuracy in percent, balanced, below which the printed rate is not the paper's."""


@dataclass(frozen=True)
class Rate:
    """Trial of a rate, and its validation accuracy (percent, mean over classes); None if its loss was not finite."""

    arm: str
    ratio: int
    weight_decay: float
    lr: float
    overall: float | None


@dataclass(frozen=True)
class Rates:
    """Finished trials and, once all are finished, the best one of each arm, ratio and decay."""

    trials: tuple[Rate, ...]
    chosen: tuple[Rate, ...] = ()

    def of(self, arm: str, setting: Setting, weight_decay: float = DECAY) -> float | None:
        """Rate of an arm in a setting. Balanced classes have the one chosen at R = 10, R = 50 has the one at R = 100.
        None if nothing is chosen."""
        wanted = (arm, 10 if setting.ratio in (None, 10) else 100, weight_decay)
        return next((rate.lr for rate in self.chosen if (rate.arm, rate.ratio, rate.weight_decay) == wanted), None)


def rates() -> Rates:
    """The trials of rates; without a file there are none."""
    return read_record(CHOSEN, Rates, "study.py --protocol rates makes it") if CHOSEN.exists() else Rates(())


def choose_rates(finished: Sequence[Rate]) -> Rates:
    """Choose for each arm, ratio and decay the rate of the highest accuracy, of equal ones the least. Nothing is chosen
    before all trials are finished. Raises StudyError if no rate of an arm was finite."""
    kinds = dict.fromkeys((trial.arm, trial.ratio, trial.weight_decay) for trial in finished)
    chosen = []
    for kind in kinds if len(finished) == len([*trials()]) else ():
        finite = [
            trial
            for trial in finished
            if (trial.arm, trial.ratio, trial.weight_decay) == kind and trial.overall is not None
        ]
        if not finite:
            raise StudyError(f"no rate of {kind[0]} at R = {kind[1]} has a finite loss: the grid must change")
        chosen.append(max(sorted(finite, key=lambda trial: trial.lr), key=lambda trial: trial.overall or 0))
    return Rates(tuple(finished), tuple(chosen))


def trials() -> Iterator[Options]:
    """Options of every trial, in an order whose every beginning is fair to all arms."""
    for setting, decay, lr in product(TRIED, (DECAY, OTHER_DECAY), RATES):
        for arm in NEW_ARMS if decay == DECAY else PAIR:
            yield _options(setting, TRIAL_SEED, arm) | TRIAL | {"lr": lr, "weight_decay": decay}


def runs(part: str) -> Iterator[Options]:
    """Options of every run of a part in its order: seed by seed, all settings and arms of a seed together. Raises
    StudyError if the rates that the part needs are not chosen."""
    blocks = PARTS[part]
    for seed in sorted({seed for block in blocks for seed in block.seeds}):
        for block in blocks:
            for arm in block.arms if seed in block.seeds else ():
                yield _options(block.setting, seed, arm) | _rate(block, arm) | block.options


def _rate(block: Block, arm: str) -> Options:
    if block.options.get("preset"):
        return {}
    decay = block.options.get("weight_decay", DECAY)
    lr = rates().of(arm, block.setting, decay)
    if lr is None:
        raise StudyError(f"no rate of {arm} is chosen: study.py --protocol rates makes the trials")
    return {"lr": lr, "weight_decay": decay}


def _options(setting: Setting, seed: int, arm: str) -> Options:
    return {"preset": PRESET, **setting.options, "seed": seed, **arm_options(arm), "precision": "bf16"}


_OTHER = tuple(replace(block, arms=PAIR, options={"weight_decay": OTHER_DECAY}) for block in MECHANISM)
PARTS = {
    "mechanism": MECHANISM,
    "decay": tuple(replace(block, seeds=range(10, 16)) for block in _OTHER),
    "settings": SETTINGS,
    "printed": PRINTED,
    "size": SIZE,
}
"""Runs after the trials, by the name that `study.py --protocol` takes."""


def is_pilot(experiment: Experiment) -> bool:
    """Return whether a run of the amendment is a pilot, which is in no estimate and chooses no rate."""
    return experiment.device != "cuda"


def has_own_rate(experiment: Experiment, rates: Rates) -> bool:
    """Return whether a run is of the amendment: a fresh seed on a GPU, with the rate chosen for its arm."""
    apart = experiment.departures.keys() - {"lr", "weight_decay", "precision", "width", "tf32"}
    fresh = experiment.seed >= FIRST_FRESH and (experiment.preset, experiment.precision) == (PRESET, "bf16")
    real = not is_pilot(experiment) and experiment.dataset in ("cifar10", "cifar100")
    lr = rates.of(experiment.arm, experiment.setting, experiment.weight_decay)
    return fresh and real and not apart and experiment.lr == lr
