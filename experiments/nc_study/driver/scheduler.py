"""Runs tasks in processes of their own, several at a time, and shows how far they all are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from tqdm import tqdm

from ..config import StudyError
from ..rundir import read_json, write_json
from .plan import Task, device_of

SCRIPTS = Path(__file__).parents[2]
POLL_SECONDS = 0.5
GRACE_SECONDS = 20  # clusters kill after 30
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class _Child:
    """A task at work in the place `slot`."""

    task: Task
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    log_start: int
    started: float = field(default_factory=time.monotonic)


class Scheduler:
    """`jobs` places in which tasks are run, one after the other; where there are GPUs, place i has `first_device` + i.

    The bar is about the tasks `shown`, among which may be those of others; None: those that are run here.
    """

    def __init__(self, jobs: int, first_device: int = 0, shown: list[Task] | None = None) -> None:
        self.failed: dict[Task, str] = {}
        self._jobs = jobs
        self._first_device = first_device
        self._shown = shown
        self._children: list[_Child] = []

    def run(self, tasks: list[Task]) -> None:
        """Run the tasks that are not finished; Ctrl-C and SIGTERM stop the runs and raise KeyboardInterrupt."""
        waiting = [task for task in tasks if not task.run.finished]
        for task in waiting:
            if task.run.failure.exists():
                task.run.failure.unlink()
        progress = _Progress(tasks if self._shown is None else self._shown)
        try:
            with _terminable():
                while waiting or self._children:
                    while waiting and len(self._children) < self._jobs:
                        self._try(waiting.pop(0), progress.say)
                    time.sleep(POLL_SECONDS)
                    self._reap(progress.say)
                    progress.update()
        finally:
            self._stop()
            progress.close()

    def _try(self, task: Task, say: Callable[[str], None]) -> None:
        try:
            self._start(task)
        except OSError as error:
            self._fail(task, f"cannot be started ({error})", say)

    def _fail(self, task: Task, reason: str, say: Callable[[str], None]) -> None:
        self.failed[task] = reason
        say(f"{task.name}: FAILED, {reason}")
        with suppress(StudyError):  # a full disk, say: the reason is told at the end all the same
            record_failure(task, reason)

    def _start(self, task: Task) -> None:
        slot = min(set(range(self._jobs)) - {child.slot for child in self._children})
        task.run.path.mkdir(parents=True, exist_ok=True)
        log = open(task.run.path / "log.txt", "ab")  # noqa: SIM115  (closed when the run ends)
        command = [sys.executable, str(SCRIPTS / f"{task.cell.study}.py"), *task.arguments]
        without = {
            name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER + ("TORCHELASTIC",))
        }
        process = subprocess.Popen(
            command,
            env=without | device_of(self._first_device + slot),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches it through this process alone
            preexec_fn=_heed_interrupts,
        )
        self._children.append(_Child(task, slot, process, log, log.tell()))

    def _reap(self, say: Callable[[str], None]) -> None:
        for child in list(self._children):
            status = child.process.poll()
            if status is None:
                continue
            self._children.remove(child)
            child.log.close()
            minutes = (time.monotonic() - child.started) / 60
            if status == 0 and child.task.run.finished:
                say(f"{child.task.name}: {outcome(child.task)}  ({minutes:.1f} min)")
            else:
                self._fail(child.task, _reason(child.task, status, child.log_start), say)

    def _stop(self) -> None:
        for child in self._children:
            child.process.send_signal(signal.SIGINT)
        end = time.monotonic() + GRACE_SECONDS
        for child in self._children:
            try:
                child.process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.log.close()
        self._children.clear()


class _Progress:
    """A bar over the work of all tasks; outside a terminal, the time left behind the line of each run that ends."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._total = sum(task.work for task in tasks)
        self._began, self._before = time.monotonic(), self._done()
        shape = "{desc} {percentage:3.0f}%|{bar}| {postfix}"
        hidden = None if tasks else True
        self._bar = tqdm(total=self._total, initial=self._before, disable=hidden, bar_format=shape, desc="study")

    def update(self) -> None:
        """Show what the runs have done since."""
        self._bar.n = self._done()
        self._bar.set_postfix_str(self._summary())

    def say(self, line: str) -> None:
        """A line above the bar."""
        tqdm.write(f"{line}  [{self._summary()}]" if self._tasks and self._bar.disable else line)
        sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()

    def _done(self) -> float:
        return min(self._total, sum(task.work if task.run.failure.exists() else task.done for task in self._tasks))

    def _summary(self) -> str:
        over = sum(task.run.finished or task.run.failure.exists() for task in self._tasks)
        return f"{over} of {len(self._tasks)} runs, {self._time_left()}"

    def _time_left(self) -> str:
        done = self._done()
        if done <= self._before:
            return "time left not known yet"
        minutes = (self._total - done) / (done - self._before) * (time.monotonic() - self._began) / 60
        return f"about {minutes / 60:.1f} h left" if minutes > 90 else f"about {minutes:.0f} min left"


def record_failure(task: Task, reason: str) -> None:
    """Write down in the run's folder why it ended early."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = " ".join(["python", f"experiments/{task.cell.study}.py", *task.arguments])
    write_json(task.run.failure, {"error": reason, "command": command, "when": now})


def outcome(task: Task) -> str:
    """The overall accuracies of a finished run."""
    models = read_json(task.run.result)["models"]
    return ", ".join(
        f"{name} {model['accuracy']['overall']['mean']:.2f}±{model['accuracy']['overall']['std']:.2f} %"
        for name, model in models.items()
    )


def _heed_interrupts() -> None:
    """In a new process: not to ignore SIGINT, as it would if this one was started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reason(task: Task, status: int, log_start: int) -> str:
    """The error line that a failed run printed, else its last line since `log_start`, or the signal that ended it."""
    if status < 0:
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    text = (task.run.path / "log.txt").read_bytes()[log_start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if ": error: " in line] or lines
    return told[-1] if told else f"exit status {status}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) like
    Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
