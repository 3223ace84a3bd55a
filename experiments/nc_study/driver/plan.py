"""What a study has to do: a task per cell and seed, and how far each of them is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..cells import Cell
from ..config import Settings, StudyError, as_arguments, settings_from
from ..data import class_sizes
from ..models import choose_kernel
from ..rundir import RunDirectory, read_json

# Of one image of a training epoch, on a CPU; they only serve to foresee the time left.
COST = {"explicit": 1.0, "deq": 1.7}


@dataclass(frozen=True)
class Task:
    """One run of the study: a cell with a seed, its settings and its folder."""

    cell: Cell
    settings: Settings
    arguments: tuple[str, ...]

    @property
    def run(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory(Path(self.settings.out) / self.settings.run_name)

    @property
    def name(self) -> str:
        """The cell and the seed."""
        return f"{self.cell} seed {self.settings.seed}"

    @property
    def work(self) -> float:
        """Cost of the whole run, in images that pass through the explicit network."""
        return sum(self._epoch_cost(model) * self.settings.epochs for model in self.settings.models)

    @property
    def done(self) -> float:
        """The part of `work` that is behind it."""
        if self.run.finished:
            return self.work
        return sum(self._epoch_cost(model) * self.run.epochs(model) for model in self.settings.models)

    def _epoch_cost(self, model: str) -> float:
        return COST[model] * sum(class_sizes(self.settings))

    def state(self) -> str:
        """Where the run stands: finished, failed and why, begun and how far, or not begun."""
        if self.run.finished:
            return "finished"
        epochs = {model: self.run.epochs(model) for model in self.settings.models}
        begun = ", ".join(f"{model} {count}/{self.settings.epochs}" for model, count in epochs.items())
        if self.run.failure.exists():
            return f"failed ({read_json(self.run.failure)['error']}), to be tried again at {begun}"
        return f"begun, to be resumed at {begun}" if any(epochs.values()) else "to be run"


def plan(cells: list[Cell], seeds: list[int], given: Mapping[str, Any], jobs: int) -> list[Task]:
    """A task per cell and seed, with the settings that the cell's script will make of `given`.

    Raises SettingsError for settings that no run could have, before anything is run. Settings of the imbalance go to
    the cells that have one. Without `threads`, the runs at work at a time share the cores: `jobs` for every process
    that torchrun has started here.
    """
    at_work = jobs * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    given = {"threads": max(1, (os.cpu_count() or 1) // at_work), **given}
    tasks = []
    for seed in seeds:
        for cell in cells:
            ours = {**given, "dataset": cell.dataset, "seed": seed, "resume": True}
            if cell.majority is not None:
                ours |= {"majority": cell.majority, "ratio": cell.ratio}
            settings = settings_from(cell.study, **ours)
            kernel, _ = choose_kernel(settings.kernel, settings.device)
            tasks.append(Task(cell, replace(settings, kernel=kernel), tuple(as_arguments(ours))))
    return tasks


def pace(tasks: list[Task]) -> tuple[float, float]:
    """Seconds that the finished ones among the tasks took, and their work."""
    finished = [task for task in tasks if task.run.finished]
    models = [model for task in finished for model in read_json(task.run.result)["models"].values()]
    return sum(sum(model["seconds"].values()) for model in models), sum(task.work for task in finished)


def check_folders(tasks: list[Task]) -> dict[Task, str]:
    """The tasks whose folder holds a run of other settings, and which setting differs."""
    conflicts = {}
    for task in tasks:
        try:
            task.run.check(task.settings)
        except StudyError as error:
            conflicts[task] = str(error)
    return conflicts


def device_of(number: int) -> dict[str, str]:
    """Environment that shows a run one GPU of those that there are, the next for the next run; empty without any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = [device for device in visible if device] or [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
