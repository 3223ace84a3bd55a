"""One run over several processes, one per GPU: how they share work and add results. With one process all is trivial.

    torchrun --nproc-per-node 2 experiments/cifar_lt.py ...

Every process computes its share of each batch; losses, counts and gradients are those of the whole batch. On GPUs the
statistics of batch normalisation are too (torch's SyncBatchNorm), so the numbers equal those of one process, to
rounding. SyncBatchNorm does not support CPUs: there each process uses the statistics of its own share, and the first
one's running statistics count. Only the first process prints and writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from runs.options import StudyError
from runs.script import is_first, launched
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def world_size() -> int:
    """Number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Join the processes started together with this one, and leave them at the end. Only the first one prints to
    stdout. With a single process nothing happens."""
    if not launched():
        yield
        return
    if device == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise StudyError(f"--nproc-per-node: process {local + 1} has no GPU of its own, PyTorch sees {gpus}")
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    with open(os.devnull, "w") as nothing, nullcontext() if is_first() else redirect_stdout(nothing):
        yield
    dist.destroy_process_group()  # only without an error: after one it would wait for the others


def from_first(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function` in the first process only, and return its result in all of them. A StudyError is raised there,
    and the others exit silently."""
    if not dist.is_initialized():
        return function(*arguments)
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = function(*arguments)
        except StudyError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1]:
        raise outcome[1] if is_first() else SystemExit(1)
    return cast(T, outcome[0])


def share(start: int, stop: int) -> slice:
    """This process's part of start ... stop - 1: consecutive parts in the order of processes; sizes differ by one at
    most."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = stop - start
    return slice(start + total * rank // size, start + total * (rank + 1) // size)


def total(part: Tensor) -> Tensor:
    """Sum of the processes' tensors, with the same bits in all of them."""
    if not dist.is_initialized():
        return part
    part = part.clone()
    dist.all_reduce(part)
    return part


def gather(part: Tensor) -> Tensor:
    """Tensors of all processes, concatenated along the first dimension in the order of processes."""
    if not dist.is_initialized():
        return part
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts).to(part.device)


def parallel(network: nn.Module) -> nn.Module:
    """Network to train with: itself, or one that averages the gradients of the processes."""
    if not dist.is_initialized():
        return network
    if next(network.parameters()).is_cuda:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return DistributedDataParallel(network)


def share_statistics(network: nn.Module) -> None:
    """Give every process the first one's running statistics, which differ between processes on CPUs only."""
    for buffer in network.buffers() if dist.is_initialized() else ():
        dist.broadcast(buffer, 0)
