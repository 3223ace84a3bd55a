"""Helpers of the studies' tests: a tiny run, made-up epochs and results."""

import errno
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nc_study.config import Settings, parse, settings_from
from nc_study.data import Source, StudyData, class_sizes, load
from nc_study.record import Epoch, KernelChoice, RunResult, Seconds, SolverSummary, SpectralRadius
from nc_study.results import network_result, run_result
from torch.utils._pytree import tree_flatten

import deqfast

HERE = Path(__file__).parent
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CPU = torch.device("cpu")
TINY = [
    *("--dataset", "shapes", "--width", "1", "--n-majority", "30", "--test-images", "20", "--ratio", "10"),
    *("--epochs", "3", "--batch-size", "16", "--metrics-every", "2", "--threads", "1", "--precision", "fp32"),
]
STUDY = ["--figure", "2", *[word for word in TINY if word not in ("--ratio", "10")], "--arms", "explicit"]
"""Arguments with which study.py's run of seed 0 is the explicit run that cifar_lt.py makes of TINY."""


def folder_of(*arguments: str, model: str = "explicit", **given: Any) -> str:
    """Name of the folder of cifar_lt.py's run with TINY and further arguments, of which some options differ."""
    return replace(parse("cifar_lt", None, [*TINY, *arguments]), model=model, **given).run_name


def ring_of_six() -> dict[str, np.ndarray]:
    """The arrays of a citation graph as in cora.npz: six nodes in a ring, two of each split."""
    nodes = np.arange(6)
    ring = np.stack([nodes, (nodes + 1) % 6], axis=1)
    arrays = {"x_data": np.ones(6), "x_indices": nodes % 3, "x_indptr": np.arange(7), "x_shape": np.array([6, 3])}
    arrays |= {f"{split}_mask_{k}": nodes % 3 == i for i, split in enumerate(("train", "val", "test")) for k in (0, 1)}
    return arrays | {"y": nodes % 2, "edges": np.concatenate([ring, ring[:, ::-1]])}


KILLED = f"""
import os, runpy, signal
from nc_study.training import Trainer
step, left = Trainer.train_step, [int(os.environ["KILL"])]

def train_step(self, *arguments):
    left[0] -= 1
    if left[0] == 0 and os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)

Trainer.train_step = train_step
runpy.run_path({str(EXPERIMENTS / "cifar_lt.py")!r}, run_name="__main__")
"""
"""Script like cifar_lt.py; its process, or the second of two, is killed at step number KILL of the environment."""


def environment() -> dict[str, str]:
    """Environment of a user on a machine without GPU and network, with the studies and these helpers importable."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9") | {"OMP_NUM_THREADS": "1"}
    folders = EXPERIMENTS, EXPERIMENTS.with_name("benchmarks"), HERE, Path(deqfast.__file__).parents[1]
    return given | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def python(*arguments: str, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in that `environment`; `given`: cwd, more of the environment."""
    more = environment() | given.pop("environment", {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=more, capture_output=True, text=True, timeout=300, **given)


def run_script(name: str, *arguments: str) -> Any:
    """Run a script of experiments/ in this process, as from a command line; return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXPERIMENTS / name), run_name="__main__")
    return stop.value.code


def shapes_data(settings: Settings) -> StudyData:
    """The drawn images of these settings, normalised to the default dtype."""
    data, dtype = load(Source("shapes", ""), settings, CPU), torch.get_default_dtype()
    return replace(data, mean=data.mean.to(dtype), std=data.std.to(dtype))


@contextmanager
def float64() -> Iterator[None]:
    """Networks and data in float64, so that no difference can be mistaken for rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_same(ours: Any, theirs: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Nested dicts, lists and tensors agree: in every bit, or within rtol and atol."""
    (left, shape), (right, other_shape) = tree_flatten(ours), tree_flatten(theirs)
    assert shape == other_shape
    for a, b in zip(left, right, strict=True):
        if isinstance(a, (float, torch.Tensor)):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert a == b


def full_disk(monkeypatch: pytest.MonkeyPatch, writes: int = 0) -> None:
    """After this number of further synced files the disk is full."""
    sync, left = os.fsync, [writes]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


SOLVER = SolverSummary(11.0, 5e-4, 0.9, max_iter=2, nonfinite=0, stalled=0, skipped=1)


def made_up_epoch(number: int, settings: Settings, shift: float = 1.0) -> Epoch:
    """A made-up epoch; a DEQ's accuracies are higher by `shift`, its NC2 and NC3 lower by `shift` / 10."""
    deq, split = settings.model == "deq", settings.majority is not None
    gain = shift if deq else 0.0
    collapse = {"nc1": 3 / number, "nc2": 1.0 - gain / 10, "nc3": 0.9 - gain / 10, "nc4": 0.5}
    collapse |= {"nc2_centered": 1.0 - gain / 10, "nc3_centered": 0.8}
    accuracies = {
        "overall": 40 + settings.seed + number / 10 + gain,
        "majority": 80.0 + gain if split else None,
        "minority": 20 + settings.seed / 10 + gain if split else None,
    }
    return Epoch(
        **{"epoch": number, "lr": 0.1, "loss": 1.0, "train_accuracy": 50.0, **accuracies},
        train_solver=SOLVER if deq else None,
        nc=collapse if number % 2 == 0 else None,
        seconds=Seconds(train=1.0, test=0.25, metrics=0.5),
    )


def made_up_result(settings: Settings, shift: float = 1.0, **given: Any) -> RunResult:
    """The result of made-up epochs; `given` replaces fields of it."""
    epochs = [made_up_epoch(number, settings, shift) for number in range(1, settings.epochs + 1)]
    network = network_result(123, epochs, SpectralRadius((0, 1), (0.5, 0.75)) if settings.model == "deq" else None)
    kernel = KernelChoice("triton", "cpp", "no GPU")
    here = run_result(replace(settings, device="cpu"), kernel, tuple(class_sizes(settings)), network)
    return replace(here, **{"settings": settings.experiment, **given})


MADE_UP = {"preset": "quick", "dataset": "cifar10", "device": "cpu", "epochs": 4, "threads": 1, "precision": "fp32"}
MADE_UP |= {"model": "deq", "adjoint": "jfb"}


def made_up_settings(study: str = "cifar_lt", **given: Any) -> Settings:
    """Settings of a short run; its number of epochs must be even. `device` may be "cuda" without a GPU."""
    settings = settings_from(study, **{**MADE_UP, **given, "device": "cpu"})
    return replace(settings, device=given.get("device", "cpu"))
