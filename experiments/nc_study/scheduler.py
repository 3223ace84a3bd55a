"""The runs of a whole study: which there are, how far they are, and several of them at work at a time, each in a
process of its own."""

from __future__ import annotations

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
from .data import class_sizes
from .models import choose_kernel
from .record import Failure
from .rundir import RunDirectory

SCRIPTS = Path(__file__).parents[1]
POLL_SECONDS = 0.5
GRACE_SECONDS = 20  # clusters kill after 30
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Of one image of a training epoch, on a CPU; they only serve to foresee the time left.
COST = {"explicit": 1.0, "deq": 1.7}


@dataclass(frozen=True)
class Task:
    """One run of the study: a setting with a seed, all its settings, and its command line."""

    setting: Setting
    settings: Settings
    arguments: tuple[str, ...]

    @property
    def run(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory(Path(self.settings.out) / self.settings.run_name)

    @property
    def name(self) -> str:
        """The setting and the seed."""
        return f"{self.setting} seed {self.settings.seed}"

    @property
    def script(self) -> str:
        """The file name of the script that runs it."""
        return f"{self.setting.study}.py"

    @property
    def work(self) -> float:
        """Cost of the whole run, in images that pass through the explicit network."""
        return sum(self._epoch_cost(model) * self.settings.epochs for model in self.settings.models)

    @property
    def done(self) -> float:
        """The part of `work` that is behind it."""
        if self.run.finished:
            return self.work
        return sum(self._epoch_cost(model) * self.run.count_epochs(model) for model in self.settings.models)

    def _epoch_cost(self, model: str) -> float:
        return COST[model] * sum(class_sizes(self.settings))

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
        epochs = {model: self.run.count_epochs(model) for model in self.settings.models}
        begun = ", ".join(f"{model} {count}/{self.settings.epochs}" for model, count in epochs.items())
        if failure := self.run.failure:
            return f"failed ({failure.error}), to be tried again at {begun}"
        return f"begun, to be resumed at {begun}" if any(epochs.values()) else "to be run"

    def outcome(self) -> str:
        """The overall accuracies of a finished run."""
        networks = self.run.result.networks.items()
        return ", ".join(f"{name} {network.accuracy.overall} %" for name, network in networks)


def plan(settings: list[Setting], seeds: list[int], given: Mapping[str, Any], jobs: int) -> list[Task]:
    """A task per setting and seed, with what the setting's script will make of the options `given`.

    Raises SettingsError for options that no run could have, before anything is run. Those of the imbalance go to the
    settings that have one. Without `threads`, the runs at work at a time share the cores: `jobs` for every process that
    a launcher has started here.
    """
    at_work = jobs * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    given = {"threads": max(1, (os.cpu_count() or 1) // at_work), **given}
    tasks = []
    for seed in seeds:
        for setting in settings:
            ours = {**given, "dataset": setting.dataset, "seed": seed, "resume": True}
            if setting.majority is not None:
                ours |= {"majority": setting.majority, "ratio": setting.ratio}
            complete = settings_from(setting.study, **ours)
            kernel, _ = choose_kernel(complete.kernel, complete.device)
            tasks.append(Task(setting, replace(complete, kernel=kernel), tuple(as_arguments(ours))))
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

    def __init__(self, jobs: int, processes: int = 1, first_slot: int = 0) -> None:
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
        progress = Progress(tasks)
        for task in waiting:
            with suppress(OSError):
                task.run.fail(None)
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(self._run, task): task for task in waiting}
            try:
                while futures:
                    for future in wait(futures, POLL_SECONDS, FIRST_COMPLETED).done:
                        progress.say(self._end(futures.pop(future), future.result()))
                    progress.update()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                progress.close()

    def _run(self, task: Task) -> str | None:
        """In a thread: do one task; why it failed, None if it did not."""
        slot = self._slots.get()
        try:
            task.run.path.mkdir(parents=True, exist_ok=True)
            with open(task.run.path / "log.txt", "ab") as log:
                before = log.tell()
                child = self._start(task, slot, log)
                status = child.wait() if child else 0
        except OSError as error:
            return f"cannot be started ({error})"
        finally:
            self._slots.put(slot)
        if child is None or (status == 0 and task.run.finished):
            return None
        return reason(task, status, before)

    def _start(self, task: Task, slot: int, log: Any) -> subprocess.Popen[bytes] | None:
        """None if the study is being stopped."""
        start = [sys.executable]
        if self._processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._processes)]
        launcher = (*LAUNCHER, "TORCHELASTIC")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
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
            return f"{task.name}: {task.outcome()}"
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


class Progress:
    """A bar over the work of all tasks; outside a terminal, the time left behind the line of each run that ends."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._total = sum(task.work for task in tasks)
        self._began, self._before = time.monotonic(), self._done()
        shape = "{desc} {percentage:3.0f}%|{bar}| {postfix}"
        self._bar = tqdm(total=self._total, initial=self._before, disable=None, bar_format=shape, desc="study")

    def update(self) -> None:
        """Show what the runs have done since."""
        if not self._bar.disable:
            self._bar.n = self._done()
            self._bar.set_postfix_str(self._summary())

    def say(self, line: str) -> None:
        """A line above the bar."""
        tqdm.write(f"{line}  [{self._summary()}]" if self._bar.disable else line)
        sys.stdout.flush()

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.close()

    def _done(self) -> float:
        return sum(task.work if task.run.failed else min(task.work, task.done) for task in self._tasks)

    def _summary(self) -> str:
        over = sum(task.run.finished or task.run.failed for task in self._tasks)
        done = self._done()
        if done <= self._before:
            return f"{over} of {len(self._tasks)} runs, time left not known yet"
        seconds = (self._total - done) / (done - self._before) * (time.monotonic() - self._began)
        return f"{over} of {len(self._tasks)} runs, about {tqdm.format_interval(seconds)} left"
