"""One run over several processes, one per GPU: what they share out, add up and agree on. Alone, all of it is trivial.

    torchrun --nproc-per-node 2 experiments/cifar_lt.py ...

Every process works through its share of each batch; losses, counts and gradients are those of the whole batch. On GPUs
so are the statistics of batch normalisation (torch's SyncBatchNorm), hence the numbers are those of one process, to
rounding. SyncBatchNorm knows no CPU: processes on CPUs take the statistics of their own share, and the first one's
running statistics count. The first process alone prints and writes files.
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
    """The number of processes at work on a run."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Join the processes started beside this one, and leave them at the end; only the first one prints to stdout.
    Nothing happens to a process that stands alone."""
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
    dist.destroy_process_group()  # only in good order: after an error it would wait for the others


def from_first(function: Callable[..., T], *arguments: Any) -> T:
    """What `function`, called in the first process alone, returns: the same in all. A StudyError is raised there, and
    the others leave without a word."""
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
    """This process's part of start ... stop - 1: consecutive, of equal size but for one, in the order of processes."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = stop - start
    return slice(start + total * rank // size, start + total * (rank + 1) // size)


def total(part: Tensor) -> Tensor:
    """The sum of the processes' tensors, the same bits in all of them."""
    if not dist.is_initialized():
        return part
    part = part.clone()
    dist.all_reduce(part)
    return part


def gather(part: Tensor) -> Tensor:
    """The processes' tensors, put together along their first dimension in the order of processes."""
    if not dist.is_initialized():
        return part
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts).to(part.device)


def parallel(network: nn.Module) -> nn.Module:
    """The network to train with: itself, or one that averages the gradients of the processes."""
    if not dist.is_initialized():
        return network
    if next(network.parameters()).is_cuda:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return DistributedDataParallel(network)


def share_statistics(network: nn.Module) -> None:
    """Give every process the first one's running statistics, in which only processes on CPUs differ."""
    for buffer in network.buffers() if dist.is_initialized() else ():
        dist.broadcast(buffer, 0)
