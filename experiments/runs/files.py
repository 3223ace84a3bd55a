"""Files of runs: written atomically, read with errors that name the file."""

from __future__ import annotations

import fcntl
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from deqfast.testing.records import write_bytes

from .options import StudyError

T = TypeVar("T")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file atomically. Raises StudyError if that fails."""
    try:
        write_bytes(path, content)
    except OSError as error:
        raise StudyError(
            f"cannot write {path}: {error.strerror or error}; what was saved before is intact, and can be resumed"
        ) from error


def to_json(record: Any) -> bytes:
    """Record as one line of JSON. Raises ValueError if it could not be read back: JSON has no NaN."""
    line = msgspec.json.encode(record)
    msgspec.json.decode(line, type=type(record))
    return line + b"\n"


def read_record(path: Path, kind: type[T], remedy: str, version: int = 1) -> T:
    """Read a record of this kind, written by `to_json`. A record without a `format` has version 1.

    Raises StudyError if it is damaged, with a remedy, or if another version of this project wrote it.
    """
    try:
        content = path.read_bytes()
        if (written := msgspec.json.decode(content, type=dict[str, Any]).get("format", 1)) != version:
            age = "an older" if written < version else "a newer"
            raise StudyError(f"{path} was written by {age} version of this project: start again in another --out")
        return msgspec.json.decode(content, type=kind)
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}): {remedy}") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as one compressed .npz, atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no name is an argument's
    write_atomically(path, content.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote. Raises StudyError that names a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path} cannot be read ({error})") from error


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace a checkpoint, atomically."""
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def read_state(path: Path) -> dict[str, Any] | None:
    """Read what `write_state` wrote; None without such a file. Raises StudyError that names a damaged one."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load itself does not look at the archive's checksums
            if changed := archive.testzip():
                raise ValueError(f"checksum of {changed} is wrong")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except OSError as error:
        raise StudyError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StudyError(
            f"{path} is damaged ({reason}); no other file is: delete it, and --resume trains from the start"
        ) from error


def prepare_out(out: Path) -> None:
    """Check before any work that files can be written under `out`. Raises StudyError if not."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StudyError(f"--out {out}: cannot write there ({error.strerror or error})") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and refuse a second process while this one works there. A kill releases the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115  # `with lock` below closes it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StudyError(f"{folder}: another process is working on this run") from error
    except OSError as error:
        raise StudyError(f"cannot write in {folder}: {error.strerror}") from error
    with lock:
        yield


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: bool = True) -> None:
    """Raise StudyError if the run at `path` was begun with other settings, or if it is not to be resumed.

    Settings are by the name that the error shows.
    """
    for name, value in now.items():
        if before.get(name) != value:
            raise StudyError(
                f"{path} was begun with {name} {before.get(name)}, not {value}: "
                "resume it with the same settings, or start a new run in another --out"
            )
    if not resume:
        raise StudyError(
            f"{path} holds a run of these settings: --resume continues it (or shows its results again), "
            "another --out starts a new one"
        )
