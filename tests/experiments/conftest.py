"""Fixtures of the studies: tiny runs inside this process, and CIFAR files with made-up pictures."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.append(str(EXPERIMENTS))

from nc_study import cli  # noqa: E402  (found through the path above)
from nc_study.cli import main  # noqa: E402  (found through the path above)
from nc_study.config import settings_from  # noqa: E402  (found through the path above)
from nc_study.data import StudyData, class_sizes  # noqa: E402  (found through the path above)
from nc_study.results import build_result  # noqa: E402  (found through the path above)
from nc_study.rundir import RunDirectory, write_arrays, write_json  # noqa: E402  (found through the path above)

TINY = [
    *("--dataset", "shapes", "--width", "1", "--n-majority", "30", "--test-images", "20", "--ratio", "10"),
    *("--epochs", "3", "--batch-size", "16", "--metrics-every", "2", "--threads", "1"),
]


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """What a run sets for the whole process is put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a tiny cifar_lt with --out tmp_path: exit status, what it printed, and its errors."""

    def run(*arguments: str, script: str = "cifar_lt") -> tuple[int, str, str]:
        capsys.readouterr()
        tiny = [word for word in TINY if script == "cifar_lt" or word not in ("--ratio", "10")]
        try:
            status = main(script, None, [*tiny, "--out", str(tmp_path), *arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


@contextmanager
def float64() -> Iterator[None]:
    """Networks and data in float64, in which no difference can pass for rounding."""
    real = cli.load
    cli.load = lambda *arguments: as_default_dtype(real(*arguments))
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        cli.load = real


def as_default_dtype(data: StudyData) -> StudyData:
    """The data whose images will be normalised to the default dtype."""
    dtype = torch.get_default_dtype()
    return replace(data, mean=data.mean.to(dtype), std=data.std.to(dtype))


def write_cifar(root: Path, dataset: Any, per_class: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Files in the format of torchvision's CIFAR class, whose checksums it then expects; {"train", "test"} labels."""
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)
    key = "labels" if dataset.__name__ == "CIFAR10" else "fine_labels"
    classes = 10 if key == "labels" else 100
    random = np.random.default_rng(0)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(name: str) -> tuple[list[str], np.ndarray]:
        labels = random.permutation(np.arange(per_class * classes) % classes)
        pixels = random.integers(256, size=(len(labels), 3072), dtype=np.uint8)
        return write(name, {"data": pixels, key: labels.tolist()}), labels

    labels = {}
    for split, attribute in (("train", "train_list"), ("test", "test_list")):
        written = [batch(name) for name, _ in getattr(dataset, attribute)]
        monkeypatch.setattr(dataset, attribute, [entry for entry, _ in written])
        labels[split] = np.concatenate([part for _, part in written])
    names = {dataset.meta["key"]: [str(label) for label in range(classes)]}
    _, md5 = write(dataset.meta["filename"], names)
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5})
    return labels


def epoch_line(epoch: int, deq: bool, classes: int, majority: int, seed: int, shift: float) -> dict[str, Any]:
    """A made-up line of an epoch; the DEQ's accuracies are higher by `shift`, its NC2 and NC3 lower by `shift` / 10."""
    random = np.random.default_rng([epoch, deq, seed])
    gain = shift if deq else 0.0
    split = majority < classes
    means = {"iterations": 11.0, "residual": 5e-4, "converged": 0.9}
    per_class = {name: [value * (1 + k / 100) for k in range(classes)] for name, value in means.items()}
    solver = {**means, "max_iter": 2, "nonfinite": 0, "stalled": 0, "skipped": 1, "per_class": per_class}
    test = {"overall": 40 + seed + epoch / 10 + gain, "majority": 80.0 + gain, "minority": 20 + seed / 10 + gain}
    return {
        "epoch": epoch,
        "train": {"lr": 0.1, "loss": 1.0, "accuracy": 50.0, "solver": solver if deq else None},
        "test": {
            **{name: value if split or name == "overall" else None for name, value in test.items()},
            "per_class": [40.0] * classes,
            "confusion": random.integers(0, 9, (classes, classes)).tolist(),
            "solver": solver if deq else None,
        },
        "nc": {"nc1": 3 / epoch, "nc2": 1.0 - gain / 10, "nc3": 0.9 - gain / 10, "nc4": 0.5}
        if epoch % 2 == 0
        else None,
        "seconds": {"train": 1.0, "test": 0.25, "metrics": 0.5},
    }


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder of a finished run with made-up numbers, without training; its path. `shift` as in epoch_line."""

    def write(name: str = "", shift: float = 1.0, features: bool = False, **given: Any) -> Path:
        given = {"preset": "quick", "dataset": "cifar10", "device": "cpu", "epochs": 4, "threads": 1, **given}
        settings = settings_from(given.pop("study", "cifar_lt"), **given)
        run = RunDirectory(tmp_path / "runs" / (name or settings.run_name))
        run.path.mkdir(parents=True)
        classes, split = settings.classes, settings.majority_classes
        for model in settings.models:
            for epoch in range(1, settings.epochs + 1):
                run.append(model, epoch_line(epoch, model == "deq", classes, split, settings.seed, shift))
        labels = np.repeat(np.arange(classes), 2)
        radius = {"labels": labels.tolist(), "values": np.linspace(0.5, 1.1, len(labels)).tolist()}
        analyses = {model: {"spectral_radius": radius if model == "deq" else None} for model in settings.models}
        if features:
            random = np.random.default_rng(0)
            one = {"features": random.normal(size=(len(labels), 4)).astype(np.float16), "labels": labels}
            write_arrays(run.features, {model: one for model in settings.models})
        kernel = {"requested": "auto", "used": "cpp", "reason": None}
        counts = tuple(class_sizes(settings))
        write_json(run.path / "settings.json", settings.identity())
        parameters = dict.fromkeys(settings.models, 123)
        write_json(run.result, build_result(settings, run, kernel, counts, parameters, analyses))
        return run.path

    return write
