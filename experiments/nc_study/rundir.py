"""Folder of one run: its settings, a JSON line per epoch, checkpoints that survive a kill, and the result.

- settings.json: the settings; a run only continues with the same ones
- epochs.jsonl: one line per finished epoch
- moments.npz: class means and more at each measurement of neural collapse (see moments.py)
- last.ckpt: the state after the last finished epoch, replaced atomically
- weights.ckpt: the final weights, the parameters in bfloat16, so that a later question needs no new run
- features.npz, result.json, figure.png: written at the end
- log.txt: what its last attempt printed when study.py ran it
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from runs.files import (
    check_same,
    read_record,
    reading,
    remove,
    to_json,
    write_arrays,
    write_atomically,
)
from runs.options import StudyError, by_flag
from runs.states import read_state, take_over, write_state
from torch import nn

from . import moments
from .config import Experiment, Settings
from .record import FORMAT, Begun, Epoch, RunResult

T = TypeVar("T", RunResult, Begun)
REMEDY = "start again in another --out"


@dataclass(frozen=True)
class Progress:
    """Entry that a checkpoint must have."""

    epoch: Annotated[int, msgspec.Meta(ge=1)]


class RunDirectory:
    """Folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features = path / "features.npz"
        self.moments = path / "moments.npz"
        self.weights = path / "weights.ckpt"
        self.figure = path / "figure.png"
        self.record = path / "result.json"
        self._begun = path / "settings.json"
        self._log = path / "epochs.jsonl"
        self._checkpoint = path / "last.ckpt"

    @property
    def finished(self) -> bool:
        """Return whether the result was written."""
        return self.record.exists()

    @property
    def result(self) -> RunResult:
        """Result of the run. Raises StudyError if it cannot be read."""
        return _read(self.record, RunResult)

    @property
    def begun(self) -> Experiment | None:
        """Settings with which the run was begun; None if it was not."""
        if self.finished:
            return self.result.settings
        return _read(self._begun, Begun).settings if self._begun.exists() else None

    def conclude(self, result: RunResult) -> None:
        """Write the result, which finishes the run."""
        write_atomically(self.record, to_json(result))

    def start(self, settings: Settings) -> None:
        """Begin the run. If there are epochs of one here, check that it may continue with these settings."""
        if not self.finished and not self._checkpoint.exists():
            write_atomically(self._begun, to_json(Begun(FORMAT, settings.experiment)))
            return
        self.check(settings)

    def check(self, settings: Settings) -> None:
        """Raise StudyError if the run here, if any, has other settings, or is not to be resumed."""
        if before := self.begun:
            check_same(self.path, by_flag(before), by_flag(settings.experiment), settings.resume)
        elif self._checkpoint.exists():
            raise StudyError(f"{self._begun} is missing: start again in another --out")

    def append(self, epoch: Epoch, measured: moments.Arrays | None = None) -> None:
        """Append the line of a finished epoch and, if neural collapse was measured, its moments."""
        if measured:
            before = moments.read(self.moments) if self.moments.exists() else None
            with reading(self.moments, REMEDY):
                both = moments.joined(before, epoch.epoch, measured)
            write_arrays(self.moments, both)
        lines = self._log.read_bytes() if self._log.exists() else b""
        write_atomically(self._log, lines + to_json(epoch))

    @property
    def epochs(self) -> list[Epoch]:
        """Finished epochs, up to the first incomplete or damaged line. Raises Unreadable if it is not a file."""
        epochs: list[Epoch] = []
        if not self._log.exists():
            return epochs
        with reading(self._log, REMEDY):
            lines = self._log.read_bytes().splitlines()
        with suppress(ValueError, RecursionError):
            for line in lines:
                epochs.append(msgspec.json.decode(line, type=Epoch))
        return epochs

    def cut(self, count: int) -> None:
        """Drop what was saved after the checkpoint, also an incomplete line: `count` epochs stay."""
        kept = self.epochs[:count]
        if len(kept) != count or [epoch.epoch for epoch in kept] != list(range(1, count + 1)):
            raise StudyError(f"{self._log} lacks lines of the {count} finished epochs: start again in another --out")
        if measured := [epoch.epoch for epoch in kept if epoch.nc]:
            saved = moments.read(self.moments)
            saved = {name: array[saved["epoch"] <= count] for name, array in saved.items()}
            if saved["epoch"].tolist() != measured:
                raise StudyError(f"{self.moments} lacks measurements of these epochs: start again in another --out")
            write_arrays(self.moments, saved)
        else:
            remove(self.moments)
        write_atomically(self._log, b"".join(map(to_json, kept)))

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint."""
        write_state(self._checkpoint, state)

    def restore(self) -> dict[str, Any] | None:
        """Read the last checkpoint; None without one. Raises Unreadable if it is damaged."""
        return read_state(self._checkpoint, Progress)

    def load_weights(self, network: nn.Module) -> None:
        """Load the weights of the last checkpoint, else the final ones, whose parameters are in bf16. Raises StudyError
        without either, Unreadable if they do not fit."""
        if state := self.restore():
            self.take_over(state, network=network)
        elif state := read_state(self.weights, dict):
            take_over(self.weights, {"network": state}, {"network": network})
        else:
            raise StudyError(f"{self.path} has neither {self._checkpoint.name} nor {self.weights.name}")

    def take_over(self, state: dict[str, Any], **kept: Any) -> None:
        """Load the states of these objects from a checkpoint. Raises Unreadable if one does not fit."""
        take_over(self._checkpoint, state, kept)


def _read(path: Path, kind: type[T]) -> T:
    return read_record(path, kind, REMEDY, FORMAT)
