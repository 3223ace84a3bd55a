"""Processes of tests: forks of one that has imported torch, which takes seconds."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

LIMIT = 480  # seconds for all processes of a test
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["deqfast", "pytest", "torch.distributed.fsdp", "torch._dynamo", "torchmetrics"])


def in_processes(work: Callable[..., None], count: int, path: Path, *arguments: Any) -> None:
    """Run work(rank, count, path, ...) in processes of a thread; a failure if they take too long after their start."""
    given = (work, count, path, *arguments)
    context, until = mp.start_processes(_run, given, nprocs=count, join=False, start_method="forkserver"), math.inf
    while not context.join(timeout=1):
        if until == math.inf and all((path / f"rank-{rank}").exists() for rank in range(count)):
            until = time.monotonic() + LIMIT
        if time.monotonic() > until:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the processes had not ended after {LIMIT} seconds")


def _run(rank: int, work: Callable[..., None], count: int, path: Path, *arguments: Any) -> None:
    torch.set_num_threads(1)
    (path / f"rank-{rank}").touch()
    work(rank, count, path, *arguments)
