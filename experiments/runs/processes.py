"""Several runs at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from .files import Unreadable, locked, reading
from .options import StudyError
from .script import end_with

GRACE_SECONDS = 20  # clusters kill after 30
POLL_SECONDS = 0.1


class Spawned(SpawnProcess):
    """Call in a fresh process with one thread. Ctrl-C is for its parent, with which it ends. The log gets what the call
    raises."""

    def __init__(self, name: str, work: Callable[[], object], log: Path) -> None:
        super().__init__(target=_work, args=(name, work, log, _progress_lock()), daemon=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Exit status; None while it works."""
        return self.exitcode


Child = subprocess.Popen[bytes] | Spawned


class Run(ABC):
    """Piece of work with a record in a file of its own, which is written last; str() is its name.

    A subclass defines `outcome`, and `measure` or a `start` of its own. `slot` numbers the jobs that run at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, path.with_suffix(".log")
        self.slot = 0

    def __str__(self) -> str:
        return self.path.stem

    @property
    def finished(self) -> bool:
        """Return whether the record was written."""
        return self.path.exists()

    def start(self) -> Child:
        """Begin or continue the run in a process of its own. Raises OSError if that fails."""
        return Spawned(str(self), self.work, self.log)

    def work(self) -> None:
        """Do the work, unless another process does it, or has done it since. Raises StudyError in the first case."""
        with locked(self.path.parent, str(self)):
            if not self.finished:
                self.measure()

    def measure(self) -> None:
        """Do the work and write the record."""
        raise NotImplementedError(f"{type(self).__name__} defines neither measure nor start")

    @abstractmethod
    def outcome(self) -> str:
        """Result of the finished run in a few words. Raises StudyError if its record cannot be read."""


R = TypeVar("R", bound=Run)
T = TypeVar("T")
M = TypeVar("M")


def run_all(runs: Sequence[R], jobs: int, first_slot: int = 0) -> dict[R, str]:
    """Do the unfinished runs, `jobs` at a time, in slots from `first_slot` on; return the reasons of failed ones.

    A run that fails stops no other. A KeyboardInterrupt stops all of them.
    """
    waiting = [run for run in runs if not run.finished]
    free, at_work = list(range(first_slot, first_slot + jobs)), dict[R, Child]()
    failed: dict[R, str] = {}
    tqdm.set_lock(_progress_lock())
    with tqdm(desc="runs", total=len(runs), initial=len(runs) - len(waiting), disable=None) as bar:

        def conclude(run: R, failure: str | None) -> None:
            try:
                outcome = f"FAILED, {failure}" if failure else run.outcome()
            except StudyError as error:  # a record that cannot be read fails only this run
                failure, outcome = str(error), f"FAILED, {error}"
            failed.update({run: failure} if failure else {})
            left = len(waiting) + len(at_work)
            _say(f"[{len(runs) - left} of {len(runs)}] {run}: {outcome}")
            bar.update()

        try:
            while waiting or at_work:
                while waiting and free:
                    run = waiting.pop(0)
                    run.slot = free[0]
                    try:
                        with _uninterrupted():  # so that no child is begun that is not known here
                            at_work[run] = run.start()
                    except OSError as error:
                        conclude(run, f"cannot be started ({error})")
                    else:
                        del free[0]
                        _say(f"process {at_work[run].pid}: {run}")
                time.sleep(POLL_SECONDS)
                for run in [run for run, child in at_work.items() if child.poll() is not None]:
                    status = at_work.pop(run).poll()
                    free.append(run.slot)
                    conclude(run, None if status == 0 and run.finished else reason(run, status or 0))
        finally:
            _stop(list(at_work.values()))
    return failed


def unreadable(runs: Iterable[R], read: Callable[[R], object]) -> dict[R, str]:
    """Return the runs with a file that cannot be read, and why; other errors are raised."""
    reasons = {}
    for run in runs:
        try:
            read(run)
        except Unreadable as error:
            reasons[run] = str(error)
    return reasons


def made(records: Mapping[R, T], make: Callable[[list[T]], M]) -> tuple[M | None, dict[R, str]]:
    """Make something of all records, or of those of which it can be made; return it, and why not of the others."""
    unfit: dict[R, str] = {}

    def alone(run: R) -> None:
        with reading(run.path):
            make([records[run]])

    while left := [record for run, record in records.items() if run not in unfit]:
        try:
            return make(left), unfit
        except Exception:
            refused = unreadable([run for run in records if run not in unfit], alone)
            if not refused or len(refused) == len(left) > 1:  # what fails for every record is not damage
                raise
            unfit |= refused
    return None, unfit


def tell_failed(script: str, failed: Mapping[R, str]) -> int:
    """Print a line for each failed run, and return the exit status of the script."""
    for run, why in failed.items():
        print(f"{script}: {run} failed: {why}", file=sys.stderr)
    return 1 if failed else 0


def reason(run: Run, status: int) -> str:
    """Error line that a failed run printed, else its last line, or the signal that ended it."""
    if status < 0:
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    text = run.log.read_text(errors="replace") if run.log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ": error: " in line] or lines
    return errors[-1] if errors else f"exit status {status}"


def _work(name: str, work: Callable[[], object], log: Path, lock: Any) -> None:
    if parent := multiprocessing.parent_process():
        end_with(parent.join)
    tqdm.set_lock(lock)
    torch.set_num_threads(1)
    try:
        work()
    except Exception as error:
        text = f"{name}: error: {error}\n" if isinstance(error, StudyError) else traceback.format_exc()
        with suppress(OSError):  # a full disk; the exit status tells enough
            log.write_text(text, errors="backslashreplace")
        sys.exit(1)


@cache
def _progress_lock() -> Any:
    """Lock with which the progress bars of all processes take turns."""
    return multiprocessing.get_context("spawn").RLock()


def _say(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay the signals that would raise until the block ends."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    held = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in held:
        signal.signal(number, lambda got, _: came.append(got))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _stop(children: Sequence[Child]) -> None:
    for child in children:
        child.terminate()
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end and any(child.poll() is None for child in children):
        time.sleep(POLL_SECONDS)
    for child in children:
        child.kill()
