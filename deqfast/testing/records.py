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


def cpu_fields() -> dict[str, str]:
    """What Linux tells of the first processor, by its own names; nothing on other systems."""
    if not CPUINFO.exists():
        return {}
    lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def processor() -> str:
    """The name of the CPU."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, None where it is in none or there is no git."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
