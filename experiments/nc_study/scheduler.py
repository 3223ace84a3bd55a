"""Runs of a whole study: their settings, their progress, and the processes that do them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from runs.options import StudyError, as_arguments
from runs.processes import Run
from runs.script import PARENT

from .config import Setting, Settings, settings_from
from .data import class_sizes
from .networks import choose_kernel
from .rundir import RunDirectory
from .training import is_measured, is_tested, pace

SCRIPTS = Path(__file__).parents[1]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC")
PACED = attrgetter("arm", "width", "batch_size", "classes", "precision", "solver", "tol", "max_iter")
"""Settings on which the time of a step depends."""


class Task(Run):
    """One run of the study: its settings, command line, folder and number of processes; and why its kernel is not the
    one that was asked for, or ""."""

    def __init__(
        self,
        settings: Settings,
        arguments: tuple[str, ...],
        run: RunDirectory,
        processes: int = 1,
        obstacle: str = "",
    ) -> None:
        super().__init__(run.record)
        self.obstacle = obstacle
        self.settings, self.arguments, self.run, self.processes = settings, arguments, run, processes
        self.log = run.path / "log.txt"

    def __str__(self) -> str:
        return self.run.path.name

    def outcome(self) -> str:
        """Test accuracy of the run. Raises StudyError if its result cannot be read."""
        return f"{self.run.result.network.quantity('overall'):.2f} %"

    def start(self) -> subprocess.Popen[bytes]:
        """Begin or continue the run on the GPUs of its slot. Raises OSError if its folder is not writable."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        script = str(SCRIPTS / f"{self.settings.study}.py")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, *(launcher if self.processes > 1 else ()), script, *self.arguments],
                env=environment | gpus_of(self.slot, self.processes) | {PARENT: "1"},
                stdin=_lifeline(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it only through this process
            )

    def conflict(self) -> str | None:
        """Reason why the run in the folder cannot continue with these settings; None if it can, or there is none."""
        try:
            self.run.check(self.settings)
            _ = self.run.epochs
        except StudyError as error:
            return str(error)
        return None

    def state(self) -> str:
        """Progress of the run: finished, begun with its number of epochs, or not begun."""
        if self.finished:
            return "finished"
        done, epochs = len(self.run.epochs), self.settings.epochs
        return f"begun, to be resumed at {done}/{epochs}" if done else "to be run"


def plan(wanted: Iterable[Mapping[str, Any]], given: Mapping[str, Any], processes: int = 1) -> list[Task]:
    """Make a task for each run from the options that name it and those `given` for all; equal tasks count once.

    Raises SettingsError for options that no run could have, before anything is run. Without `threads` a run has one:
    several runs at a time use the cores better than one with several threads.
    """
    tasks: dict[Path, Task] = {}
    for options in wanted:
        ours = {"threads": 1, **given, **options, "resume": True}
        complete = settings_from(Setting(options["dataset"], options.get("majority")).study, **ours)
        kernel, obstacle = choose_kernel(complete.kernel, complete.device)
        settings = replace(complete, kernel=kernel)
        run = RunDirectory(Path(settings.out) / settings.run_name)
        tasks.setdefault(run.path, Task(settings, tuple(as_arguments(ours)), run, processes, obstacle))
    return list(tasks.values())


def hours_left(tasks: Iterable[Task]) -> dict[Task, float]:
    """Estimate the hours that the missing epochs of each run take, from steps and evaluations timed now. These are of
    untrained networks, whose solves are shorter."""
    paces: dict[tuple[Any, ...], tuple[float, float]] = {}
    hours = {}
    for task in tasks:
        settings = task.settings
        kind = PACED(settings)
        left = [] if task.finished else range(len(task.run.epochs) + 1, settings.epochs + 1)
        if left:
            step, evaluation = paces.get(kind) or paces.setdefault(kind, pace(settings))
            images = sum(class_sizes(settings))
            passes = images * sum(is_measured(settings, epoch) for epoch in left)
            passes += settings.test_images * sum(is_tested(settings, epoch) for epoch in left)
            hours[task] = (len(left) * images * step + passes * evaluation) / 3600
    return hours


@cache
def _lifeline() -> int:
    """Pipe whose other end only this process holds, until it ends. A script sees that end, under torchrun too."""
    return os.pipe()[0]


def gpus_of(slot: int, processes: int) -> dict[str, str]:
    """Environment that shows a run `processes` GPUs, the next ones for the next slot; empty without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [gpu for gpu in visible if gpu] or [str(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(slot * processes + i) % len(gpus)] for i in range(processes))}
