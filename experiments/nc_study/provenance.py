"""Where a result comes from: machine, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import deqfast

from .record import Machine


def machine(threads: int, device: str, processes: int = 1) -> Machine:
    """Where a run takes place; `device` is "cpu" or "cuda"."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return Machine(cpu=cpu, cores=os.cpu_count(), threads=threads, gpu=gpu, processes=processes)


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "deqfast": deqfast.__version__}
    for package in ("torch", "triton", "numpy", "torchvision"):
        found[package] = None
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str | None:
    """The commit of the checkout that this file is in, if it is in one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def now() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
