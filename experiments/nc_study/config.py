"""Settings of a study: one frozen dataclass, the presets that fill it in, and the command line over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from runs.options import Checked, Parser, SettingsError, add_options, option
from runs.provenance import multiplies_bf16
from runs.steps import DEVICES, chosen_device, eager_option

from .shapes import DRAWING

CLASSES = {"cifar10": 10, "cifar100": 100, "shapes": 10, "shapes100": 100}
MODELS = ("explicit", "explicit-norm", "tied", "untied", "deq")
ONCE = "once"
"""Model of old records: the cell evaluated once from 0. Its convolutions got no gradient, so no run may have it now."""
BOTH = ("explicit", "deq")
ADJOINTS = ("jfb", "implicit", "phantom", "unrolled")
CELLS = {"tied": (1, 2, 4, 12), "untied": (2,)}
ARMS = (
    *MODELS[:2],
    ONCE,
    *(f"{model}-{cells}" for model, numbers in CELLS.items() for cells in numbers),
    *(f"deq-{adjoint}" for adjoint in ADJOINTS),
)
RUNNABLE = tuple(arm for arm in ARMS if arm != ONCE)
NOT_RUNNABLE = f"--model {ONCE}: only old records have it, its block got no gradient; take --model tied --cells 1"
IMBALANCE = ("majority", "ratio")
LARGEST_SEED = 2**63 - 1

_FULL = {"width": 64, "n_majority": {10: 5000, 100: 500}, "test_images": 10_000, "epochs": 100, "batch_size": 128}
_QUICK = {"width": 16, "n_majority": {10: 500, 100: 100}, "test_images": 1_000, "epochs": 8, "batch_size": 32}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {**_FULL, "lr": 1e-4, "schedule": "constant", "metrics_every": 5, "precision": "fp32"},
    "tuned": {**_FULL, "lr": 0.1, "schedule": "cosine", "metrics_every": 5, "precision": "auto"},
    "quick": {**_QUICK, "lr": 0.01, "schedule": "cosine", "metrics_every": 4, "precision": "auto"},
    "study": {
        **{**_FULL, "width": 16, "epochs": 30},
        **{"lr": 0.1, "schedule": "cosine", "metrics_every": 5, "precision": "auto"},
    },
}


@dataclass(frozen=True)
class Setting:
    """Entry of the paper's tables: a data set with an imbalance; both numbers are None for balanced classes."""

    dataset: str
    majority: int | None = None
    """Tenths of the classes that keep all their images, the paper's K_A of ten classes."""
    ratio: int | None = None
    """Images of a majority class for one image of a minority class, the paper's R."""

    @property
    def study(self) -> str:
        """The script that runs it."""
        return "cifar_balanced" if self.majority is None else "cifar_lt"

    @property
    def classes(self) -> int:
        """Number of classes; `auto` chooses a data set with ten."""
        return CLASSES.get(self.dataset, 10)

    @property
    def majority_classes(self) -> int:
        """Number of the first classes that form the majority; all of them if they are balanced."""
        return self.classes if self.majority is None else self.majority * self.classes // 10

    @property
    def imbalance(self) -> str:
        """Name of the imbalance, without the data set."""
        return "balanced" if self.majority is None else f"({self.majority},{10 - self.majority}) R = {self.ratio}"

    @property
    def slug(self) -> str:
        """That name in a form for file names."""
        return "balanced" if self.majority is None else f"k{self.majority}-r{self.ratio}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of a run that select this setting."""
        imbalance = {} if self.majority is None else {"majority": self.majority, "ratio": self.ratio}
        return {"dataset": self.dataset, **imbalance}

    def __str__(self) -> str:
        return f"{self.dataset}, {self.imbalance}"


@dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the outcome of one run. Its record names all of it. The preset fills in fields without a
    default."""

    study: str
    drawing: int | None = None
    """Version of the code that draws the images, if they are drawn."""

    model: str = option(
        "study",
        "explicit; explicit-norm: it ends in the DEQ's normalisation; tied: the DEQ's cell evaluated --cells times "
        "from z = x; untied: --cells cells of their own weights; deq; both: explicit and deq, one run each",
        "both",
        choices=("both", *MODELS, ONCE),
    )
    cells: int = option("network", "evaluations of tied (1, 2, 4, 12), cells of untied (2)", 2, minimum=1)
    majority: int | None = option("study", "tenths of the classes that keep all their images (K_A)", 3, minimum=1)
    ratio: int | None = option("study", "images of a majority class for one of a minority class (R)", 10, minimum=1)
    imbalance: str = option(
        "study",
        "step: the first K_A tenths of the classes have n_A images, the rest n_A / R; exp: class k of K has "
        "n_A R^(-(k - 1) / (K - 1)), as LDAM-DRW's long tail",
        "step",
        choices=("step", "exp"),
    )
    preset: str = option(
        "study", "source of other values; auto: paper with a GPU, else quick", "auto", choices=("auto", *PRESETS)
    )
    seed: int = option("study", "seed of weights, batches and augmentation", 0, minimum=0, maximum=LARGEST_SEED)

    dataset: str = option(
        "data",
        "auto: CIFAR-10 from --data-root, else downloaded, else shapes (images drawn by this script)",
        "auto",
        choices=("auto", *CLASSES),
    )
    n_majority: int = option(
        "data", "images of a majority class (n_A); the default is smaller for 100 classes", minimum=1
    )
    test_images: int = option("data", "test images, the same number of every class", minimum=1)
    evaluate: str = option(
        "data",
        "source of --test-images; validation: training images that are not trained on",
        "test",
        choices=("test", "validation"),
    )

    no_augmentation: bool = option("data", "train on the original images, without crops and flips", False)

    width: int = option("network", "channels of the first stage", minimum=1)
    scale: float = option(
        "network", "initial gain of the last block's convolutions, whose output is added to its input", 1.0, above=0
    )
    solver: str = option("network", "fixed-point solver", "broyden", choices=("broyden", "anderson", "picard"))
    tol: float = option("network", "relative residual at which a sample has converged", 1e-3, above=0, below=1)
    max_iter: int = option("network", "most evaluations of the last block per solve", 20, minimum=1)
    adjoint: str = option("network", "gradient of the fixed point", "implicit", choices=ADJOINTS)
    kernel: str = option(
        "network",
        "implementation of the solver's steps; auto: the fastest here; falls back to an available one",
        "auto",
        choices=("auto", "triton", "cuda", "cpp", "torch"),
    )

    epochs: int = option("training", "passes over the training images", minimum=1)
    batch_size: int = option("training", "images per step", minimum=1)
    lr: float = option("training", "learning rate of SGD", above=0)
    loss: str = option(
        "training",
        "cross-entropy, or logit-adjusted: the logarithm of each class's share of the images is added to its logit in "
        "training (Menon et al., ICLR 2021)",
        "cross-entropy",
        choices=("cross-entropy", "logit-adjusted"),
    )
    schedule: str = option("training", "schedule of the rate; cosine warms up first", choices=("constant", "cosine"))
    momentum: float = option("training", "momentum of SGD", 0.9, minimum=0, below=1)
    weight_decay: float = option("training", "weight decay of SGD", 5e-4, minimum=0)
    e_w: float | None = option("training", "bound on the classifier's mean squared row norm", None, above=0)
    e_h: float | None = option("training", "bound on the norm of the last block's convolutions", None, above=0)
    metrics_every: int = option("training", "epochs between measurements of neural collapse", minimum=1)

    device: str = option(
        "machine",
        "where to train; several GPUs: torchrun --nproc-per-node N in place of python",
        "auto",
        choices=DEVICES,
    )
    precision: str = option(
        "machine",
        "fp32, or bf16 autocast before the last block; auto: bf16 with a GPU, or a CPU with instructions for it",
        choices=("auto", "fp32", "bf16"),
    )
    tf32: bool = option("machine", "on a GPU, round operands of the last block's convolutions to TF32", False)
    compile: bool = option("machine", "torch.compile everything except the fixed point; takes minutes at first", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_images < self.classes:
            raise SettingsError(f"--test-images {self.test_images}: at least one of each of {self.classes} classes")
        if self.cells not in CELLS.get(self.model, (self.cells,)):
            allowed = " or ".join(map(str, CELLS[self.model]))
            raise SettingsError(f"--cells {self.cells}: --model {self.model} takes {allowed}")
        if self.study != "cifar_lt":
            if self.imbalance != "step":
                raise SettingsError(f"--imbalance {self.imbalance}: balanced classes have none")
            return
        if self.majority is None or self.ratio is None or self.majority > 9:
            raise SettingsError(f"--majority {self.majority}: 1 to 9 tenths of the classes; all: cifar_balanced.py")
        if self.n_majority < self.ratio:
            raise SettingsError(f"--ratio {self.ratio} leaves minority classes empty at --n-majority {self.n_majority}")

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.setting.classes

    @property
    def models(self) -> tuple[str, ...]:
        """The networks to train, in order, in a run each."""
        return BOTH if self.model == "both" else (self.model,)

    @property
    def arm(self) -> str:
        """Name of what is compared: the network and, for a DEQ, its gradient."""
        part = self.adjoint if self.model == "deq" else self.cells if self.model in CELLS else None
        return self.model if part is None else f"{self.model}-{part}"

    @property
    def departures(self) -> dict[str, Any]:
        """Options whose values differ from the preset's. Left out are options that `run_name` writes itself, and device
        and kernel, which belong to the machine."""
        usual = {spec.name: spec.default for spec in fields(Experiment) if spec.metadata}
        usual |= preset_values(self.preset, self.classes) | {"precision": "fp32"}
        named = {*IMBALANCE, "model", "cells", "adjoint", "preset", "seed", "dataset", "device", "kernel"}
        return {name: getattr(self, name) for name in usual if name not in named and getattr(self, name) != usual[name]}

    @property
    def run_name(self) -> str:
        """Name of the run's folder: no two experiments of one machine share it."""
        apart = (f"-{name.replace('_', '')}{value}" for name, value in self.departures.items())
        return f"{self.dataset}-{self.setting.slug}-{self.preset}-{self.arm}-seed{self.seed}{''.join(apart)}"

    @property
    def setting(self) -> Setting:
        """The data set and its imbalance."""
        return Setting(self.dataset, self.majority, self.ratio)


@dataclass(frozen=True, kw_only=True)
class Settings(Experiment):
    """Experiment with the options that may change on resuming: folders and threads."""

    data_root: str = option("data", "folder of the CIFAR files, also for downloads", "data", metavar="DIR")
    eager: bool = eager_option()
    threads: int = option("machine", "CPU threads; 0: PyTorch's default", 0, minimum=0)
    out: str = option("machine", "parent of the runs' folders", "runs", metavar="DIR")
    resume: bool = option("machine", "continue the run of these settings where it stopped", False)

    @property
    def experiment(self) -> Experiment:
        """Part that decides the outcome."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(Experiment)}
        values["drawing"] = DRAWING if self.dataset.startswith("shapes") else None
        return Experiment(**values)


def arm_options(arm: str) -> dict[str, Any]:
    """Options that select an arm (see `Experiment.arm`)."""
    model, _, part = arm.rpartition("-")
    if model == "deq":
        return {"model": model, "adjoint": part}
    return {"model": model, "cells": int(part)} if model in CELLS else {"model": arm}


def settings_from(study: str, **given: Any) -> Settings:
    """Complete settings: the given values, then the preset's, then the defaults. No device, preset or precision is
    `auto` any more."""
    device, preset = chosen_device(given.get("device", "auto")), given.get("preset", "auto")
    if preset == "auto":
        preset = "paper" if device == "cuda" else "quick"
    classes = CLASSES.get(given.get("dataset", "auto"), 10)
    values = {**preset_values(preset, classes), **given, "study": study, "device": device, "preset": preset}
    if study == "cifar_balanced":
        values |= dict.fromkeys(IMBALANCE)
    if values.get("precision", "auto") == "auto":
        values["precision"] = "bf16" if device == "cuda" or multiplies_bf16() else "fp32"
    values["threads"] = values.get("threads") or torch.get_num_threads()
    if values["threads"] > (cores := os.cpu_count() or 1):
        raise SettingsError(f"--threads {values['threads']}: at most {cores}, the cores of this machine")
    return Settings(**values)


def preset_values(preset: str, classes: int) -> dict[str, Any]:
    """Values that a preset fills in for a data set of 10 or 100 classes."""
    filled = PRESETS.get(preset, {})
    return {name: value[classes] if isinstance(value, dict) else value for name, value in filled.items()}


def shown_presets() -> dict[str, dict[str, Any]]:
    """Values of every preset for ten classes, which --help shows."""
    return {preset: preset_values(preset, 10) for preset in PRESETS}


def parse(study: str, description: str | None, argv: Sequence[str] | None = None) -> Settings:
    """Settings from the command line; a bad one ends the program with status 2 and a line that names it."""
    script = f"{study}.py"
    examples = (
        f"{script}    # works on any machine, without GPU and network",
        f"{script} --model deq --adjoint implicit --seed 1",
        f"{script} --preset quick --out runs/first --resume",
    )
    parser = Parser(description, examples)
    without = (*IMBALANCE, "imbalance") if study == "cifar_balanced" else ()
    add_options(parser, Settings, without, shown_presets())
    given = vars(parser.parse(argv))
    if "adjoint" in given and given.get("model", "both") not in ("both", "deq"):
        parser.error(f"--adjoint {given['adjoint']}: --model {given['model']} has no equilibrium")
    if "cells" in given and given.get("model", "both") not in CELLS:
        parser.error(f"--cells {given['cells']}: only for --model {' and '.join(CELLS)}")
    if given.get("model") == ONCE:
        parser.error(NOT_RUNNABLE)
    try:
        return settings_from(study, **given)
    except SettingsError as error:
        parser.error(str(error))
