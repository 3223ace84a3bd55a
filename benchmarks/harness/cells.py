"""Cases of the residual cell, in the precisions that it is trained in: f by itself, and whole solves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import convert_conv2d_weight_memory_format

import deqfast
from deqfast.testing import relative_error

from .counters import memory
from .entry import GRAPHS, KERNELS, Case, Contender, check, kernel_of
from .maps import relative_residual
from .record import Row
from .solves import solve_by, solver_name
from .timing import Graph

CHECKED = 4  # samples computed in float64 on the CPU
# Convolutions in tf32 or bf16 err by their own roundings of the operands; relative to the largest entry.
CELL_ERROR = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}
REACHED = 0.1  # relative residual of a solve in bf16, whose rounding is 8e-3


@contextmanager
def precision(name: str, device: str, cache: bool = True) -> Iterator[None]:
    """fp32 with or without tf32 products, or bfloat16 autocast, without `cache` casting the weights at every use."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, enabled=name == "bf16", cache_enabled=cache):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


@dataclass(frozen=True, kw_only=True)
class CellCase(Case):
    """f(z, x) of ``ResidualCell`` on images (B, C, H, W), channels_last, beside its own plain torch."""

    section = "cells"
    providers: ClassVar[tuple[str, ...]] = KERNELS
    peers: ClassVar[tuple[str, ...]] = ("torch",)
    shape: tuple[int, int, int, int]
    precision: str

    @property
    def name(self) -> str:
        return f"f-{'x'.join(map(str, self.shape))}-{self.precision}"

    def size(self) -> Row:
        batch, *image = self.shape
        return {"batch": batch, "dim": torch.Size(image).numel(), "dtype": self.precision}

    def made(self, kernel: str, device: str) -> tuple[deqfast.ResidualCell, Tensor, Tensor]:
        """The cell, z and x, the same numbers for every provider."""
        torch.manual_seed(0)
        cell = deqfast.ResidualCell(self.shape[1]).to(device)
        convert_conv2d_weight_memory_format(cell, torch.channels_last)
        cell.kernel = kernel
        z, x = (torch.randn(self.shape).to(device, memory_format=torch.channels_last) for _ in range(2))
        return cell, z, x

    def contender(self, provider: str, device: str) -> Contender:
        cell, z, x = self.made(kernel_of(provider, device).name, device)
        double = copy.deepcopy(cell).cpu().double()
        double.kernel = "torch"

        @torch.no_grad()
        def call(cache: bool = False) -> Tensor:
            with precision(self.precision, device, cache):
                return cell(z, x)

        with torch.no_grad():
            exact = double(z[:CHECKED].cpu().double(), x[:CHECKED].cpu().double())
        error, allowed = relative_error(call()[:CHECKED].float(), exact), CELL_ERROR[self.precision]
        check("relative error", error, allowed)
        facts = {"error": error, "allowed": allowed, "peak_bytes": memory(call)[1]}
        return Contender(call, facts, another=lambda: call)


@dataclass(frozen=True, kw_only=True)
class CellSolveCase(CellCase):
    """All the iterations of `solver` on that cell, f's time told apart; torchdeq solves for the plain torch cell."""

    providers = (*KERNELS, *GRAPHS, "torchdeq")
    peers = ("torchdeq",)
    solver: Any

    @property
    def name(self) -> str:
        return f"solve-{solver_name(self.solver)}-{'x'.join(map(str, self.shape))}-{self.precision}"

    def size(self) -> Row:
        return super().size() | {"iterations": self.solver.max_iter}

    def contender(self, provider: str, device: str) -> Contender:
        graph = provider in GRAPHS
        kernel = "torch" if provider == "torchdeq" else kernel_of(provider.removesuffix("-graph"), device).name
        cell, z, x = self.made(kernel, device)
        z0, calls = torch.zeros_like(z), 0

        def f(z: Tensor) -> Tensor:  # torchdeq keeps its state in the dtype and layout that f returns
            nonlocal calls
            calls += 1
            return cell(z.contiguous(memory_format=torch.channels_last), x).float()

        if provider == "torchdeq":
            solve = partial(solve_by(provider, self.solver, device), f, z0)
        else:
            block = deqfast.DEQBlock(cell, self.solver, kernel=kernel, cuda_graph=graph)
            solve = partial(block, x, z0=z0)

        @torch.no_grad()
        def call() -> Tensor:
            with precision(self.precision, device):
                return solve()

        @torch.no_grad()
        def f_alone() -> None:  # a captured solve casts the weights at every evaluation
            with precision(self.precision, device, cache=not graph):
                for _ in range(1 if graph else evaluations):
                    cell(z, x)

        value = call()
        with torch.no_grad(), precision(self.precision, device):
            evaluations = calls or block(x, z0=z0, return_solution=True)[1].evaluations
            residual = relative_residual(f(value), value.float())
        check("relative residual", residual, REACHED)
        facts = {"evaluations": evaluations, "residual": residual, "peak_bytes": memory(call)[1]}
        return Contender(call, facts, Graph([f_alone], evaluations) if graph else f_alone)
