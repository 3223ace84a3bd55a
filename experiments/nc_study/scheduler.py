"""The runs of a whole study: which there are, how far they are, and several of them at work at a time, each in a
process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any

import torch

from .config import Setting, Settings, StudyError, as_arguments, settings_from
from .data import class_sizes
from .models import choose_kernel
from .rundir import RunDirectory
from .training import is_measured, is_tested, pace

SCRIPTS = Path(__file__).parents[1]
GRACE_SECONDS = 20  # clusters kill after 30
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC")


@dataclass(frozen=True)
class Task:
    """One run of the study: its settings, its command line, and its folder."""

    settings: Settings
    arguments: tuple[str, ...]
    run: RunDirectory

    def __str__(self) -> str:
        return self.run.path.name

    def conflict(self) -> str | None:
        """Why the folder's run, if there is one, cannot be gone on with under these settings."""
        try:
            self.run.check(self.settings)
        except StudyError as error:
            return str(error)
        return None

    def state(self) -> str:
        """Where the run stands: finished, begun and how far, or not begun."""
        if self.run.finished:
            return "finished"
        done, epochs = len(self.run.epochs), self.settings.epochs
        return f"begun, to be resumed at {done}/{epochs}" if done else "to be run"


def plan(wanted: Iterable[Mapping[str, Any]], given: Mapping[str, Any]) -> list[Task]:
    """A task for each run, of the options that name it and those `given` for all; of equal ones the first.

    Raises SettingsError for options that no run could have, before anything is run. Without `threads` a run has one:
    several runs at a time use the cores better than one with several threads.
    """
    tasks: dict[Path, Task] = {}
    for one in wanted:
        ours = {"threads": 1, **given, **one, "resume": True}
        complete = settings_from(Setting(one["dataset"], one.get("majority")).study, **ours)
        settings = replace(complete, kernel=choose_kernel(complete.kernel, complete.device)[0])
        run = RunDirectory(Path(settings.out) / settings.run_name)
        tasks.setdefault(run.path, Task(settings, tuple(as_arguments(ours)), run))
    return list(tasks.values())


def hours_left(tasks: Iterable[Task]) -> dict[Task, float]:
    """Hours that the epochs of each run left to do take, from steps and evaluations timed here and now: those of
    untrained networks, whose solves are shorter."""
    paces: dict[tuple[Any, ...], tuple[float, float]] = {}
    hours = {}
    for task in tasks:
        one = task.settings
        kind = (one.arm, one.width, one.batch_size, one.classes, one.precision, one.solver, one.tol, one.max_iter)
        left = [] if task.run.finished else range(len(task.run.epochs) + 1, one.epochs + 1)
        if left:
            step, evaluation = paces.get(kind) or paces.setdefault(kind, pace(one))
            images = sum(class_sizes(one))
            passes = images * sum(is_measured(one, epoch) for epoch in left)
            passes += one.test_images * sum(is_tested(one, epoch) for epoch in left)
            hours[task] = (len(left) * images * step + passes * evaluation) / 3600
    return hours


def gpus_of(slot: int, processes: int) -> dict[str, str]:
    """Environment that shows a run `processes` of the GPUs there are, the next ones for the next slot; empty without
    any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [gpu for gpu in visible if gpu] or [str(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(slot * processes + i) % len(gpus)] for i in range(processes))}


def run_all(tasks: list[Task], jobs: int, processes: int, first_slot: int) -> dict[Task, str]:
    """Run what is not finished, `jobs` at a time, each over `processes` processes; why some failed.

    The GPUs of the job in slot i are those of `first_slot` + i. A KeyboardInterrupt stops all of them.
    """
    waiting = [task for task in tasks if not task.run.finished]
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(first_slot, first_slot + jobs):
        slots.put(slot)
    children: list[subprocess.Popen[bytes]] = []
    starting, stopping = Lock(), Event()
    failed: dict[Task, str] = {}

    def run(task: Task) -> str | None:
        """Why the run failed, None if it did not."""
        slot = slots.get()
        try:
            with starting:  # so that no child is begun that `_stop` does not know
                if stopping.is_set():
                    return "stopped"
                child = _start(task, processes, slot)
                children.append(child)
            print(f"process {child.pid}: {task}", flush=True)
            status = child.wait()
        except OSError as error:
            return f"cannot be started ({error})"
        finally:
            slots.put(slot)
        return None if status == 0 and task.run.finished else reason(task, status)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, task): task for task in waiting}
        try:
            for done, future in enumerate(as_completed(futures), len(tasks) - len(waiting) + 1):
                print(f"[{done} of {len(tasks)}] {_conclude(futures[future], future.result(), failed)}", flush=True)
        finally:
            for future in futures:
                future.cancel()
            with starting:
                stopping.set()
                _stop(children)
    return failed


def _start(task: Task, processes: int, slot: int) -> subprocess.Popen[bytes]:
    """Begin a run, or go on with it; OSError if its folder cannot be written to."""
    task.run.path.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    with open(task.run.log, "wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if processes > 1 else ()),
                str(SCRIPTS / f"{task.settings.study}.py"),
                *task.arguments,
            ],
            env=environment | gpus_of(slot, processes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches it through this process alone
        )


def _conclude(task: Task, failure: str | None, failed: dict[Task, str]) -> str:
    """Say in a line what a run came to; why it failed goes into `failed`."""
    if failure is None:
        try:
            return f"{task}: {task.run.result.network.quantity('overall'):.2f} %"
        except StudyError as error:  # a result that cannot be read is this run's failure, not the study's
            failure = str(error)
    failed[task] = failure
    return f"{task}: FAILED, {failure}"


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    end = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def reason(task: Task, status: int) -> str:
    """The error line that a failed run printed, else its last line, or the signal that ended it."""
    if status < 0:
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    text = task.run.log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if ": error: " in line] or lines
    return told[-1] if told else f"exit status {status}"
