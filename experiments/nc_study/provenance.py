"""Where a result comes from: machine, versions and commit."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import deqfast
from deqfast.testing import records

from .record import Machine


def machine(threads: int, device: str, processes: int = 1) -> Machine:
    """Where a run takes place; `device` is "cpu" or "cuda"."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(cpu=records.processor(), cores=os.cpu_count(), threads=threads, gpu=gpu, processes=processes)


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "deqfast": deqfast.__version__}
    for package in ("torch", "triton", "numpy", "torchvision"):
        found[package] = None
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str | None:
    """The commit of the checkout that the study is in, if it is in one."""
    return records.commit(Path(__file__).parent)


def now() -> str:
    """Date and time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
