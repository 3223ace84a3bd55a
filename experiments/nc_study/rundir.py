"""The folder of one run: its settings, a JSON line per epoch, checkpoints that survive a kill, and the result.

- settings.json: what was asked for; a run is only continued under the same settings
- epochs.jsonl: one line per finished epoch
- moments.npz: class means and more at each measurement of neural collapse (see moments.py)
- last.ckpt: the state after the last finished epoch, replaced at once or not at all
- features.npz, result.json, figure.png: written at the end
- log.txt: what its last attempt printed when study.py ran it
"""

from __future__ import annotations

import fcntl
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deqfast.testing.records import write_bytes

from .config import Experiment, Settings, StudyError, flag_of
from .moments import Arrays, joined
from .record import FORMAT, Begun, Epoch, RunResult, from_json, read_record, to_json


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at once or not at all; StudyError if it cannot be."""
    try:
        write_bytes(path, content)
    except OSError as error:
        raise StudyError(
            f"cannot write {path}: {error.strerror or error}; what was saved before is intact, --resume goes on from it"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Arrays by name as one compressed .npz, atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # a name might be that of an argument; none is
    write_atomically(path, content.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `write_arrays` wrote; a damaged file is an error that names it."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path} cannot be read ({error})") from error


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """A checkpoint in place of the one before, atomically."""
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote; a damaged file is an error that names it."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load itself does not look at the archive's checksums
            if changed := archive.testzip():
                raise ValueError(f"checksum of {changed} is wrong")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StudyError(
            f"{path} is damaged ({reason}); no other file is: delete it, and --resume trains from the start"
        ) from error


def prepare_out(out: Path) -> None:
    """Make sure, before any work, that files can be made under `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StudyError(f"--out {out}: cannot write there ({error.strerror or error})") from error


class RunDirectory:
    """The folder of one run, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features = path / "features.npz"
        self.moments = path / "moments.npz"
        self.figure = path / "figure.png"
        self.log = path / "log.txt"
        self._result = path / "result.json"
        self._begun = path / "settings.json"
        self._log = path / "epochs.jsonl"
        self._checkpoint = path / "last.ckpt"

    @property
    def finished(self) -> bool:
        """Whether the result was written."""
        return self._result.exists()

    @property
    def result(self) -> RunResult:
        """What the run came to; StudyError if it cannot be read."""
        return read_record(RunResult, self._result)

    @property
    def begun(self) -> Experiment | None:
        """What was asked for when the run was begun, None if it was not."""
        if self.finished:
            return self.result.settings
        return read_record(Begun, self._begun).settings if self._begun.exists() else None

    def conclude(self, result: RunResult) -> None:
        """Write the result, which makes the run a finished one."""
        write_atomically(self._result, to_json(result))

    def start(self, settings: Settings) -> None:
        """Begin the run, or make sure that the one whose epochs are here may be continued under these settings."""
        if not self.finished and not self._checkpoint.exists():
            write_atomically(self._begun, to_json(Begun(FORMAT, settings.experiment)))
            return
        self.check(settings)
        if not settings.resume:
            state = "a finished run" if self.finished else "an unfinished run"
            raise StudyError(
                f"{self.path} holds {state} of this kind: --resume goes on with it (or prints its results again), "
                "another --out starts a new one"
            )

    def check(self, settings: Settings) -> None:
        """StudyError that names the option in which the run that is here, if any, differs from these settings."""
        before = self.begun
        if before is None and self._checkpoint.exists():
            raise StudyError(f"{self._begun} is missing: start again in another --out")
        for spec in fields(Experiment) if before else ():
            old, new = getattr(before, spec.name), getattr(settings.experiment, spec.name)
            if old != new:
                name = flag_of(spec.name) if spec.metadata else spec.name
                raise StudyError(
                    f"{self.path} was begun with {name} {old}, not {new}: "
                    "resume it with the same settings, or start a new run in another --out"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep a second process out for as long as this one works here; a kill releases it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StudyError(f"{self.path}: another process is working on this run") from error
        except OSError as error:
            raise StudyError(f"cannot write in {self.path}: {error.strerror}") from error
        with lock:
            yield

    def append(self, epoch: Epoch, moments: Arrays | None = None) -> None:
        """Add the line of a finished epoch, and what its measurement of neural collapse rests on, if there was one."""
        if moments:
            before = read_arrays(self.moments) if self.moments.exists() else None
            write_arrays(self.moments, joined(before, epoch.epoch, moments))
        lines = self._log.read_bytes() if self._log.exists() else b""
        write_atomically(self._log, lines + to_json(epoch))

    @property
    def epochs(self) -> list[Epoch]:
        """The finished epochs, up to the first line that is cut off or damaged."""
        found = []
        with suppress(FileNotFoundError, ValueError):
            for line in self._log.read_bytes().splitlines():
                found.append(from_json(Epoch, line))
        return found

    def cut(self, count: int) -> None:
        """Drop what was saved after the checkpoint that is gone on from, half a line included."""
        kept = self.epochs[:count]
        if [epoch.epoch for epoch in kept] != list(range(1, count + 1)):
            raise StudyError(
                f"{self._log} lacks lines of the {count} epochs that are done: start again in another --out"
            )
        if measured := [epoch.epoch for epoch in kept if epoch.nc]:
            saved = read_arrays(self.moments)
            saved = {name: one[saved["epoch"] <= count] for name, one in saved.items()}
            if saved["epoch"].tolist() != measured:
                raise StudyError(f"{self.moments} lacks measurements of these epochs: start again in another --out")
            write_arrays(self.moments, saved)
        else:
            self.moments.unlink(missing_ok=True)
        write_atomically(self._log, b"".join(map(to_json, kept)))

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint in place of the one before."""
        write_state(self._checkpoint, state)

    def restore(self) -> dict[str, Any] | None:
        """The last checkpoint, None if there is none."""
        return read_state(self._checkpoint) if self._checkpoint.exists() else None
