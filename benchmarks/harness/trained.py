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
from torch import nn
from torch.nn import functional as F

import deqfast

from .problems import Problem, cell_problem

BATCH, IMAGES = 128, 1500  # of the test images, and how many images are trained on
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
    if settings.model != "deq":
        raise StudyError(f"{run} is not of a DEQ")
    folder.load_weights(network)
    data = load(find_source(settings.dataset, Path(settings.data_root)), settings, torch.device("cpu"))
    chosen = torch.linspace(0, len(data.test_images) - 1, batch).long()
    network.eval()
    with torch.no_grad():
        x = network.trunk(network.stem(data.normalise(data.test_images[chosen])))
    cell: Any = network.last.cell
    return cell_problem(f"residual block, {settings.dataset}", cell, x, torch.zeros_like(x))


def digits_cell(activation: str, dim: int = 256) -> Problem:
    """Fully connected cell, trained with the implicit gradient to classify scikit-learn's 8x8 digits, in a minute.

    Its spectral radius is not bounded.
    """
    from sklearn.datasets import load_digits

    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    x, test = (images.float() / images.max())[: IMAGES + BATCH].split([IMAGES, BATCH])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        solver, cell, readout = deqfast.Broyden(1e-4, 40), deqfast.FCCell(64, dim, activation), nn.Linear(dim, 10)
        block = deqfast.DEQBlock(cell, solver, deqfast.Implicit(solver), warn=False)
        optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=3e-3)
        for _ in range(DIGITS_STEPS[activation]):
            rows = torch.randint(IMAGES, (64,))
            loss = F.cross_entropy(readout(block(x[rows])), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return cell_problem(f"fully connected {activation}, digits", cell, test, cell.initial_state(test))
