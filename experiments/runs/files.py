"""Files of runs: written atomically, read with errors that name the file."""

from __future__ import annotations

import fcntl
import io
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from recording import write_bytes

from .options import StudyError

LARGEST = 2**30  # bytes of a file's arrays
LONGEST = 300  # characters of a reason

T = TypeVar("T")


class Unreadable(StudyError):
    """File that is missing, damaged, hostile, or of another version of this project."""


@contextmanager
def reading(path: Path, remedy: str = "") -> Iterator[None]:
    """Read, parse and check a file. Whatever that raises becomes an Unreadable in one line: the file, what is wrong,
    and the remedy."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would block
            raise ValueError("a folder or a device, not a file")
        yield
    except StudyError:
        raise
    except Exception as error:  # parsers of damaged files raise anything
        raise Unreadable(f"{path} cannot be read ({reason(error)}){remedy and f': {remedy}'}") from error


def reason(error: Exception) -> str:
    """Return what went wrong, in a short line."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    return f"{'without ' * isinstance(error, KeyError)}{text.splitlines()[0]}"[:LONGEST]


def as_text(name: object) -> str:
    """Return a path or a name as text for records and reports: bytes that are not UTF-8 become escapes."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace the file atomically. Raises StudyError if that fails."""
    try:
        write_bytes(path, as_text(content).encode() if isinstance(content, str) else content)
    except OSError as error:
        raise StudyError(
            f"cannot write {path}: {error.strerror or error}; what was saved before is intact, and can be resumed"
        ) from error


def remove(path: Path) -> None:
    """Remove the file if there is one. Raises StudyError if that fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StudyError(f"cannot remove {path}: {error.strerror or error}") from error


def to_json(record: Any, indented: bool = False) -> bytes:
    """Record as JSON, in one line unless it is indented. Raises ValueError if it could not be read back: JSON has no
    NaN."""
    line = msgspec.json.encode(record)
    msgspec.json.decode(line, type=type(record))
    return (msgspec.json.format(line) if indented else line) + b"\n"


def read_record(path: Path, kind: type[T], remedy: str, version: int = 1) -> T:
    """Read a record of this kind, written by `to_json`. A record without a `format` has version 1.

    Raises Unreadable if it is damaged, with a remedy, or if another version of this project wrote it.
    """
    with reading(path, remedy):
        content = path.read_bytes()
        written = msgspec.json.decode(content, type=dict[str, Any]).get("format", 1)
        if type(written) is not int:
            raise ValueError(f"its format is {written!r}, not a whole number")
        if written != version:
            age = "an older" if written < version else "a newer"
            raise Unreadable(f"{path} was written by {age} version of this project: start again in another --out")
        record = msgspec.json.decode(content, type=kind)
    return record


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as one compressed .npz, atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no name is an argument's
    write_atomically(path, content.getvalue())


def read_arrays(path: Path, names: Collection[str] = (), remedy: str = "") -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote, or only arrays of these names. Raises Unreadable if it is damaged."""
    with reading(path, remedy):
        with zipfile.ZipFile(path) as archive:
            if (size := sum(member.file_size for member in archive.infolist())) > LARGEST:
                raise ValueError(f"{size} bytes of arrays, at most {LARGEST}")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names or stored.files}
        if strange := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{strange[0]} is not an array")
    return arrays


def prepare_out(out: Path) -> None:
    """Check before any work that files can be written under `out`. Raises StudyError if not."""
    if out.exists() and not out.is_dir():
        raise StudyError(f"--out {out}: must be a folder, and is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise StudyError(f"--out {out}: cannot write there ({error.strerror or error})") from error


@contextmanager
def locked(folder: Path, name: str = "") -> Iterator[None]:
    """Make the folder, and refuse a second process while this one works there, or on the run of that name in it. A
    kill releases the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / f".{name}{'.' * bool(name)}lock", "w")  # noqa: SIM115  # `with lock` below closes it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StudyError(f"{folder / name}: another process is working on this run") from error
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
