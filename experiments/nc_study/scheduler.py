"""Runs of a whole study: their settings, their progress, and the processes that do them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from runs.options import StudyError, as_arguments
from runs.processes import Run
from runs.script import PARENT

from .config import Setting, Settings, settings_from
from .networks import usable_kernel
from .rundir import RunDirectory

SCRIPTS = Path(__file__).parents[1]


class Task(Run):
    """One run of the study: its settings, command line and folder."""

    def __init__(self, settings: Settings, arguments: list[str]) -> None:
        self.settings, self.arguments = settings, arguments
        self.run = RunDirectory(Path(settings.out) / settings.run_name)
        super().__init__(self.run.record)
        self.log = self.run.path / "log.txt"

    def __str__(self) -> str:
        return self.run.path.name

    def outcome(self) -> str:
        """Test accuracy of the run. Raises StudyError if its result cannot be read."""
        return f"{self.run.result.network.quantity('overall'):.2f} %"

    def start(self) -> subprocess.Popen[bytes]:
        """Begin or continue the run on the GPU of its slot. Raises OSError if its folder is not writable."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPTS / f"{self.settings.study}.py"), *self.arguments],
                env=os.environ | gpu_for(self.slot) | {PARENT: "1"},
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


def plan(wanted: Iterable[Mapping[str, Any]], given: Mapping[str, Any]) -> list[Task]:
    """Make a task for each run from the options that name it and those `given` for all; equal tasks count once.

    Raises SettingsError for options that no run could have, before anything is run. Without `threads` a run has one:
    several runs at a time use the cores better than one with several threads.
    """
    tasks: dict[Path, Task] = {}
    for named in wanted:
        options = {"threads": 1, **given, **named, "resume": True}
        settings = settings_from(Setting(named["dataset"], named.get("majority")).study, **options)
        settings = replace(settings, kernel=usable_kernel(settings.kernel, settings.device))
        task = Task(settings, as_arguments(options))
        tasks.setdefault(task.path, task)
    return list(tasks.values())


@cache
def _lifeline() -> int:
    """Pipe whose other end only this process holds, until it ends. A script sees that end."""
    return os.pipe()[0]


def gpu_for(slot: int) -> dict[str, str]:
    """Environment that shows a run one GPU, the next one for the next slot; empty without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [gpu for gpu in visible if gpu] or [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
