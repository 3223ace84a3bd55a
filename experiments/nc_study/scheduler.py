"""The runs of a whole study: which there are, how far they are, and several of them at work at a time, each in a
process of its own."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from tqdm import tqdm

from . import provenance
from .config import Setting, Settings, StudyError, as_arguments, settings_from
from .models import choose_kernel
from .record import Failure
from .rundir import RunDirectory

SCRIPTS = Path(__file__).parents[1]
POLL_SECONDS = 0.5
GRACE_SECONDS = 20  # clusters kill after 30
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC")


@dataclass(frozen=True)
class Task:
    """One run of the study: its settings, its command line, and its folder."""

    settings: Settings
    arguments: tuple[str, ...]
    run: RunDirectory

    @property
    def name(self) -> str:
        """The setting and the seed."""
        return f"{self.settings.setting} seed {self.settings.seed}"

    @property
    def script(self) -> str:
        """The file name of the script that runs it."""
        return f"{self.settings.study}.py"

    @property
    def epochs(self) -> int:
        """The epochs of all its networks."""
        return self.settings.epochs * len(self.settings.models)

    @property
    def done(self) -> int:
        """How many of them are behind it."""
        return self.epochs if self.run.finished else sum(map(self.run.count_epochs, self.settings.models))

    def conflict(self) -> str | None:
        """Why the folder's run, if there is one, cannot be gone on with under these settings."""
        try:
            self.run.check(self.settings)
        except StudyError as error:
            return str(error)
        return None

    def state(self) -> str:
        """Where the run stands: finished, failed and why, begun and how far, or not begun."""
        if self.run.finished:
            return "finished"
        epochs = self.settings.epochs
        begun = ", ".join(f"{model} {self.run.count_epochs(model)}/{epochs}" for model in self.settings.models)
        if failure := self.run.failure:
            return f"failed ({failure.error}), to be tried again at {begun}"
        return f"begun, to be resumed at {begun}" if self.done else "to be run"

    def outcome(self) -> str:
        """The overall accuracies of a finished run."""
        networks = self.run.result.networks.items()
        return ", ".join(f"{name} {network.accuracy.overall} %" for name, network in networks)


def plan(chosen: list[Setting], seeds: list[int], given: Mapping[str, Any], jobs: int) -> list[Task]:
    """A task per setting and seed, with what the setting's script will make of the options `given`.

    Raises SettingsError for options that no run could have, before anything is run. Those of the imbalance go to the
    settings that have one. Without `threads`, the runs at work at a time share the cores: `jobs` for every process that
    a launcher has started here.
    """
    at_work = jobs * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    given = {"threads": max(1, (os.cpu_count() or 1) // at_work), **given}
    tasks = []
    for seed in seeds:
        for setting in chosen:
            ours = {**given, "dataset": setting.dataset, "seed": seed, "resume": True}
            if setting.majority is not None:
                ours |= {"majority": setting.majority, "ratio": setting.ratio}
            complete = settings_from(setting.study, **ours)
            kernel, _ = choose_kernel(complete.kernel, complete.device)
            settings = replace(complete, kernel=kernel)
            run = RunDirectory(Path(settings.out) / settings.run_name)
            tasks.append(Task(settings, tuple(as_arguments(ours)), run))
    return tasks


def gpus_of(slot: int, processes: int) -> dict[str, str]:
    """Environment that shows a run `processes` of the GPUs there are, the next ones for the next slot; empty without
    any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [gpu for gpu in visible if gpu] or [str(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(slot * processes + i) % len(gpus)] for i in range(processes))}


class Scheduler:
    """`jobs` runs at a time, each over `processes` processes; the GPUs of slot i are those of `first_slot` + i."""

    def __init__(self, jobs: int, processes: int, first_slot: int) -> None:
        self.failed: dict[Task, str] = {}
        self._jobs = jobs
        self._processes = processes
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(jobs):
            self._slots.put(first_slot + slot)
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = Lock()
        self._stopped = False

    def run(self, tasks: list[Task]) -> None:
        """Run the tasks that are not finished, and collect why some `failed`. KeyboardInterrupt stops all of them."""
        waiting = [task for task in tasks if not task.run.finished]
        for task in waiting:
            with suppress(OSError):
                task.run.fail(None)
        terminal = sys.stderr.isatty()
        total, before = sum(task.epochs for task in tasks), sum(task.done for task in tasks)
        shape = "{desc} {percentage:3.0f}%|{bar:20}| {remaining} left{postfix}"
        shown = {"desc": "study", "bar_format": shape, "file": sys.stderr if terminal else io.StringIO()}
        with tqdm(total=total, initial=before, **shown) as bar, ThreadPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(self._run, task): task for task in waiting}
            try:
                while futures:
                    ended = wait(futures, POLL_SECONDS, FIRST_COMPLETED).done
                    lines = [self._end(futures.pop(future), future.result()) for future in ended]
                    bar.n = sum(task.epochs if task in self.failed else task.done for task in tasks)
                    bar.set_postfix_str(f"{len(tasks) - len(futures)} of {len(tasks)} runs", refresh=terminal)
                    for line in lines:
                        bar.write(line if terminal else f"{line}  [{bar}]")
                    sys.stdout.flush()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()

    def _run(self, task: Task) -> str | None:
        """In a thread: do one task; why it failed, None if it did not."""
        slot = self._slots.get()
        try:
            task.run.path.mkdir(parents=True, exist_ok=True)
            with open(task.run.path / "log.txt", "ab") as log:
                before = log.tell()
                child = self._start(task, slot, log)
                status = child.wait() if child else 0
            if child is None or (status == 0 and task.run.finished):
                return None
            return reason(task, status, before)
        except OSError as error:
            return f"cannot be started ({error})"
        finally:
            self._slots.put(slot)

    def _start(self, task: Task, slot: int, log: Any) -> subprocess.Popen[bytes] | None:
        """None if the study is being stopped."""
        start = [sys.executable]
        if self._processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._processes)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        with self._lock:
            if self._stopped:
                return None
            child = subprocess.Popen(
                [*start, str(SCRIPTS / task.script), *task.arguments],
                env=environment | gpus_of(slot, self._processes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it through this process alone
            )
            self._children.append(child)
            return child

    def _end(self, task: Task, failure: str | None) -> str:
        if failure is None:
            try:
                return f"{task.name}: {task.outcome()}"
            except StudyError as error:  # a result that cannot be read is this run's failure, not the study's
                failure = str(error)
        self.failed[task] = failure
        command = " ".join(["python", f"experiments/{task.script}", *task.arguments])
        with suppress(StudyError):  # a full disk, say: the reason is told at the end all the same
            task.run.fail(Failure(failure, command, provenance.now()))
        return f"{task.name}: FAILED, {failure}"

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
        for child in self._children:
            child.terminate()  # nothing happens to those that have ended
        end = time.monotonic() + GRACE_SECONDS
        for child in self._children:
            try:
                child.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


def reason(task: Task, status: int, log_start: int) -> str:
    """The error line that a failed run printed, else its last line since `log_start`, or the signal that ended it."""
    if status < 0:
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    text = (task.run.path / "log.txt").read_bytes()[log_start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if ": error: " in line] or lines
    return told[-1] if told else f"exit status {status}"
