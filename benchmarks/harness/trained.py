"""Cells of trained models as fixed-point problems: the study's residual block, and fully connected cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nc_study.config import settings_from
from nc_study.data import find_source, load
from nc_study.networks import build
from nc_study.rundir import RunDirectory
from runs.options import StudyError

import deqfast

from .digits import IMAGES, digits, learn
from .problems import Problem, of_cell

BATCH = 128
DIGITS_STEPS = {"tanh": 1000, "relu": 300}  # of training, by activation


def study_cell(run: Path, data_root: Path | None, batch: int = BATCH) -> Problem:
    """Last block of a finished run's DEQ, at `batch` test images from all parts of the test set.

    `data_root`: folder of the files of a run on CIFAR. Raises StudyError if the run or its data are missing.
    """
    folder = RunDirectory(run)
    if not folder.finished:
        raise StudyError(f"{run} is not the folder of a finished run: it has no result.json")
    recorded = {name: value for name, value in vars(folder.result.settings).items() if value is not None}
    here = {"device": "cpu", "kernel": "auto", "compile": False, "data_root": str(data_root or "data")}
    settings = settings_from(**(recorded | here))
    network = build(settings)
    if settings.model != "deq" or not (state := folder.restore()):
        raise StudyError(f"{run} holds no checkpoint of a DEQ")
    folder.take_over(state, network=network)
    data = load(find_source(settings.dataset, Path(settings.data_root)), settings, torch.device("cpu"))
    chosen = torch.linspace(0, len(data.test_images) - 1, batch).long()
    network.eval()
    with torch.no_grad():
        x = network.trunk(network.stem(data.normalise(data.test_images[chosen])))
    cell: Any = network.last.cell
    return of_cell(f"residual block, {settings.dataset}", cell, x, torch.zeros_like(x))


def digits_cell(activation: str, dim: int = 256) -> Problem:
    """Fully connected cell, trained with the implicit gradient to classify scikit-learn's 8x8 digits, in a minute.

    Its spectral radius is not bounded.
    """
    solver = deqfast.Broyden(1e-4, 40)
    options = {"features": dim, "activation": activation, "solver": solver, "adjoint": deqfast.Implicit(solver)}
    cell = learn(0, DIGITS_STEPS[activation], IMAGES, rate=3e-3, **options)[0].fc
    test = digits()[0][IMAGES : IMAGES + BATCH]
    return of_cell(f"fully connected {activation}, digits", cell, test, cell.initial_state(test))
