"""Cells of trained models as fixed-point problems: the study's residual block, and fully connected cells.

What is trained here is kept in a folder, where a second call finds it.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from nc_study.config import StudyError, as_arguments, settings_from
from nc_study.data import StudyData, find_source, load
from nc_study.models import ResNet18, build
from nc_study.rundir import RunDirectory, write_atomically
from torch import Tensor, nn
from torch.nn import functional as F

import deqfast

from .problems import Problem, of_cell

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
BATCH = 128
DIGITS_TRAINED_ON = 1500  # of 1797 images; the problem is of the others
DIGITS_STEPS = {"tanh": 1000, "relu": 300}  # of training, by activation


def study_run(cells: Path, data_root: Path | None) -> Path:
    """The folder of the study's quick run of the DEQ under `cells`, which is trained first if it is not finished.

    That takes 1850 images, of CIFAR-10 from `data_root` or drawn shapes without one, and 12 epochs.
    Raises StudyError if the training fails.
    """
    given = {"preset": "quick", "model": "deq", "device": "cpu", "dataset": "shapes", "out": str(cells)}
    if data_root is not None:
        given |= {"dataset": "cifar10", "data_root": str(data_root)}
    run = cells / settings_from("cifar_lt", **given).run_name
    if not RunDirectory(run).finished:
        # A process of its own: training asks torch for deterministic algorithms, which would be timed here.
        arguments = as_arguments(given | {"resume": True, "threads": torch.get_num_threads()})
        print("training the study's cell, once for all calls", flush=True)
        status = subprocess.run([sys.executable, str(EXPERIMENTS / "cifar_lt.py"), *arguments], check=False).returncode
        if status:
            raise StudyError(f"training the study's cell ended with status {status}")
    return run


def study_cell(run: Path, data_root: Path | None, batch: int = BATCH) -> Problem:
    """The last block of a finished run's DEQ, at `batch` test images from all parts of the test set.

    `data_root`: where the files are of a run on CIFAR. Raises StudyError if the run or its data are not there.
    """
    folder = RunDirectory(run)
    if not folder.finished:
        raise StudyError(f"{run} is not the folder of a finished run: it has no result.json")
    recorded = {name: value for name, value in vars(folder.result.settings).items() if value is not None}
    settings = settings_from(**(recorded | {"device": "cpu", "compile": False, "data_root": str(data_root or "data")}))
    network = build("deq", settings)
    if not folder.restore("deq", lambda state: network.load_state_dict(state["network"])):
        raise StudyError(f"{run} holds no checkpoint of a DEQ")
    data = load(find_source(settings.dataset, Path(settings.data_root)), settings, torch.device("cpu"))
    x = _injections(network, data, batch)
    origin = f"{settings.epochs} epochs of {settings.run_name}"
    cell: Any = network.last.cell
    return of_cell(f"residual block, {settings.dataset}", cell, x, torch.zeros_like(x), origin)


@torch.no_grad()
def _injections(network: ResNet18, data: StudyData, batch: int) -> Tensor:
    """What the last block gets for test images taken at even distances: (batch, C, 4, 4)."""
    chosen = torch.linspace(0, len(data.test_images) - 1, batch).long()
    network.eval()
    return network.trunk(network.stem(data.normalise(data.test_images[chosen])))


def digits_cell(cells: Path, activation: str, dim: int = 256, batch: int = BATCH) -> Problem:
    """A fully connected cell, trained with the implicit gradient to tell scikit-learn's 8x8 digits.

    Trained first if it is not under `cells`, in less than a minute. Nothing keeps its spectral radius small.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / images.max(), torch.from_numpy(labels)
    path = cells / f"digits-{activation}-{dim}.pt"
    if not path.exists():
        print(f"training {path.stem}, once for all calls", flush=True)
        content = io.BytesIO()
        torch.save(_trained(x[:DIGITS_TRAINED_ON], y[:DIGITS_TRAINED_ON], activation, dim).state_dict(), content)
        write_atomically(path, content.getvalue())
    cell = deqfast.FCCell(x.shape[1], dim, activation)
    cell.load_state_dict(torch.load(path, weights_only=True))
    test = x[DIGITS_TRAINED_ON : DIGITS_TRAINED_ON + batch]
    origin = f"{DIGITS_STEPS[activation]} steps on scikit-learn's digits"
    return of_cell(f"fully connected {activation}, digits", cell, test, cell.initial_state(test), origin)


def _trained(x: Tensor, y: Tensor, activation: str, dim: int, batch: int = 64) -> deqfast.FCCell:
    """A cell after some steps of Adam on the cross-entropy of a linear readout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cell, readout = deqfast.FCCell(x.shape[1], dim, activation), nn.Linear(dim, int(y.max()) + 1)
        solver = deqfast.Broyden(1e-4, 40)
        block = deqfast.DEQBlock(cell, solver, deqfast.Implicit(solver))
        optimizer = torch.optim.Adam([*block.parameters(), *readout.parameters()], lr=3e-3)
        for _ in range(DIGITS_STEPS[activation]):
            rows = torch.randint(len(x), (batch,))
            loss = F.cross_entropy(readout(block(x[rows])), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return cell
