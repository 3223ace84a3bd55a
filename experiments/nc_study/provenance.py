"""Where a result comes from: machine, versions and commit."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import deqfast
from deqfast.testing import records

from .record import Machine


def provenance(threads: int, device: str, processes: int = 1) -> dict[str, Any]:
    """The machine, versions, commit and time (UTC, ISO 8601) of a result; `device` is "cpu" or "cuda"."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "machine": Machine(
            cpu=records.processor(), cores=os.cpu_count(), threads=threads, gpu=gpu, processes=processes
        ),
        "versions": versions(),
        "commit": records.commit(Path(__file__).parent),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "deqfast": deqfast.__version__}
    for package in ("torch", "triton", "numpy", "torchvision"):
        found[package] = None
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
