"""One run over several processes, one per GPU: what they share out, add up and agree on. Alone, all of it is trivial.

    torchrun --nproc-per-node 2 experiments/cifar_lt.py ...

Every process works through its share of each batch; sums, statistics and gradients are those of the whole batch, so
that the numbers are those of one process, to rounding. The first process alone prints and writes files.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from inspect import signature
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import StudyError

T = TypeVar("T")

_store: dist.Store | None = None  # what the processes can reach even when one of them has left
_TOLD = "an error was told"


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started several processes."""
    return dist.is_available() and int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def joined() -> bool:
    """Whether this process works together with others."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """The number of processes at work on a run."""
    return dist.get_world_size() if joined() else 1


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return not joined() or dist.get_rank() == 0


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Join the processes started beside this one, for one run or several, and leave them at the end; only the first one
    prints to stdout. Nothing happens to a process that stands alone or has joined already."""
    if joined() or not launched():
        yield
        return
    _join(device)
    with ExitStack() as stack:
        if not is_first():
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            yield
        except Exception as error:
            if not isinstance(error, StudyError) and _told():
                raise SystemExit(1) from error  # the connection broke: the process that left has said why
            raise  # without leaving in good order, which would wait for the others
    dist.destroy_process_group()


def _join(device: str) -> None:
    global _store
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise StudyError(f"--nproc-per-node: process {local + 1} has no GPU of its own, PyTorch sees {gpus}")
        torch.cuda.set_device(local)
    _store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=_store, rank=rank, world_size=size)


def _told() -> bool:
    return _store is not None and _store.add(_TOLD, 0) > 0


def may_tell() -> bool:
    """Whether this process is the one that tells the user why the run ends: the first to ask."""
    return _store is None or _store.add(_TOLD, 1) == 1


@contextmanager
def one_voice() -> Iterator[None]:
    """Before the processes have joined: what all of them would print, only the first one prints."""
    with ExitStack() as stack:
        if launched() and int(os.environ["RANK"]) > 0:
            nothing = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nothing))
            stack.enter_context(redirect_stderr(nothing))
        yield


def command_line() -> str:
    """The command that started this run."""
    start = ["python"]
    if launched():
        start = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])]
    return shlex.join([*start, *sys.argv])


def from_first(function: Callable[[], T]) -> T:
    """What `function`, called in the first process alone, returns or raises there (a StudyError): the same in all."""
    if not joined():
        return function()
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = function()
        except StudyError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])


def share(start: int, stop: int) -> slice:
    """This process's part of start ... stop - 1: consecutive, of equal size but for one, in the order of processes."""
    return _share(start, stop, dist.get_rank() if joined() else 0)


def _share(start: int, stop: int, rank: int) -> slice:
    total, size = stop - start, world_size()
    return slice(start + total * rank // size, start + total * (rank + 1) // size)


def total(part: Tensor) -> Tensor:
    """The sum of the processes' tensors, the same bits in all of them."""
    if not joined():
        return part
    part = part.clone()
    dist.all_reduce(part)
    return part


def gather(part: Tensor, count: int) -> Tensor:
    """The tensor of `count` rows whose `share` each process holds."""
    if not joined():
        return part
    parts = [_share(0, count, rank) for rank in range(world_size())]
    sizes = [one.stop - one.start for one in parts]
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return torch.cat([rows[:size] for rows, size in zip(received, sizes, strict=True)])


def parallel(network: nn.Module) -> nn.Module:
    """The network to train with: itself, or, with statistics over the whole batch, one that averages gradients."""
    if not joined():
        return network
    on_gpu = next(network.parameters()).is_cuda
    # The processes' running statistics are equal: none need be sent. Older versions know but the other name for it.
    names = signature(DistributedDataParallel).parameters
    sends: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
    return DistributedDataParallel(_with_shared_statistics(network, on_gpu), **sends)


def _with_shared_statistics(network: nn.Module, on_gpu: bool) -> nn.Module:
    if on_gpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(network)  # refuses tensors that are not on a GPU
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d:
                module.add_module(name, SharedBatchNorm2d.of(child))
    return network


class _Total(torch.autograd.Function):
    """The sum over the processes. Its gradient is summed likewise: every process's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return total(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return total(grads[0])


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the batch of all processes, of which each holds a part, perhaps an empty one."""

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> SharedBatchNorm2d:
        """The same with the parameters and statistics of `norm`, not copies of them."""
        assert norm.affine and norm.momentum is not None
        shared = cls(norm.num_features, norm.eps, norm.momentum)
        shared._parameters, shared._buffers = norm._parameters, norm._buffers
        return shared

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W)."""
        if not self.training:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        wide = x.to(dtype)
        count = torch.full((1,), x.numel() / x.shape[1], dtype=dtype)
        sums = _Total.apply(torch.cat([wide.sum((0, 2, 3)), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean[:, None, None]
        var = _Total.apply(centred.square().sum((0, 2, 3))) / count
        self._follow(mean.detach(), var.detach() * count / (count - 1))
        scale = self.weight * (var + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, cast(float, self.momentum))
        self.running_var.lerp_(var, cast(float, self.momentum))
        self.num_batches_tracked.add_(1)
