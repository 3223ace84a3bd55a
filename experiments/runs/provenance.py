"""Provenance of a record: machine, versions, commit and time."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from recording import commit, processor

import deqfast

COMMIT = commit(Path(__file__).parent)
"""Commit of the code at the start of this process."""


@dataclass(frozen=True)
class Machine:
    """Machine of a run."""

    cpu: str
    cores: int | None
    threads: int
    gpu: str | None
    processes: int = 1
    bf16: str | None = None
    """How a CPU computed products of bfloat16: by its "instructions", or by "float32 kernels" (see
    `nc_study.networks.Conv2d`). None without such products, and in records older than this field, all of which had the
    instructions."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Base of the records of finished runs."""

    machine: Machine
    versions: dict[str, str | None]
    commit: str | None
    finished: str
    """Date and time in UTC, ISO 8601."""

    def __post_init__(self) -> None:
        if "torch" not in self.versions:
            raise ValueError("versions have no torch")


def provenance(threads: int, device: str, processes: int = 1, precision: str = "fp32") -> dict[str, Any]:
    """Fields of `Recorded` for this machine and time; `device` is "cpu" or "cuda"."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    products = "instructions" if multiplies_bf16() else "float32 kernels"
    machine = Machine(
        cpu=processor(),
        cores=os.cpu_count(),
        threads=threads,
        gpu=gpu,
        processes=processes,
        bf16=products if (device, precision) == ("cpu", "bf16") else None,
    )
    versions = {"python": platform.python_version(), "deqfast": deqfast.__version__}
    for package in ("torch", "triton", "numpy", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "machine": machine,
        "versions": versions,
        "commit": COMMIT,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def multiplies_bf16() -> bool:
    """Return whether the CPU has instructions for products of bfloat16. Without them bfloat16 is slower than
    float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
