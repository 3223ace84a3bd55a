"""Helpers of experiments and benchmarks for writing records: atomic files, the name of the CPU, the commit."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
STALE_SECONDS = 3600.0  # no write takes that long


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically: a kill or a full disk leaves the old one. OSError if that fails.

    Several processes may write the same file: the last one counts. A kill leaves a temporary file next to it, which a
    write an hour later removes.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_mtime  # of the folder's clock, as the times below
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    for entry in os.scandir(path.parent):
        if entry.name.startswith(f"{path.name}.") and entry.name.endswith(".tmp"):
            with suppress(OSError):  # another process has removed or renamed it
                if entry.stat().st_mtime < written - STALE_SECONDS:
                    os.unlink(entry)


def processor() -> str:
    """Name of the CPU: from Linux, for the first one, else from Python, which is less precise."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def tool(*command: str) -> str:
    """Output of a command; "" if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit(folder: Path) -> str | None:
    """Return the commit of the checkout that contains `folder`, or what the variable DEQFAST_COMMIT says of a copy of
    one; None without either, and without git."""
    return os.environ.get("DEQFAST_COMMIT") or tool("git", "-C", str(folder), "rev-parse", "HEAD") or None
