"""What benchmarks and studies share to write a record: whole files, the name of the CPU, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at once or not at all: a kill or a full disk leaves the old one. OSError where it cannot be."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def processor() -> str:
    """The name of the CPU: what Linux tells of the first one, or the little that Python knows."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def tool(*command: str) -> str:
    """What a command prints; "" where it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, None where it is in none or there is no git."""
    return tool("git", "-C", str(folder), "rev-parse", "HEAD") or None
