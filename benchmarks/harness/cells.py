"""Cases of the residual cell under bfloat16 autocast, as it is trained: whole solves, f's time told apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import convert_conv2d_weight_memory_format

import deqfast

from .counters import memory
from .entry import GRAPHS, KERNELS, Case, Contender, check, kernel_of
from .maps import relative_residual
from .record import Row
from .solves import solve_by, solver_name
from .timing import Graph

REACHED = 0.1  # relative residual of a solve in bf16, whose rounding is 8e-3


@dataclass(frozen=True, kw_only=True)
class CellSolveCase(Case):
    """All the iterations of `solver` on ``ResidualCell`` and images (B, C, H, W), channels_last.

    torchdeq solves for the same cell in plain torch.
    """

    section = "cells"
    providers = (*KERNELS, *GRAPHS, "torchdeq")
    peers = ("torchdeq",)
    shape: tuple[int, int, int, int]
    solver: Any

    @property
    def name(self) -> str:
        return f"solve-{solver_name(self.solver)}-{'x'.join(map(str, self.shape))}-bf16"

    def size(self) -> Row:
        batch, *image = self.shape
        return {"batch": batch, "dim": math.prod(image), "dtype": "bf16", "iterations": self.solver.max_iter}

    def contender(self, provider: str, device: str) -> Contender:
        graph = provider in GRAPHS
        kernel = "torch" if provider == "torchdeq" else kernel_of(provider.removesuffix("-graph"), device).name
        torch.manual_seed(0)
        cell = deqfast.ResidualCell(self.shape[1]).to(device)
        convert_conv2d_weight_memory_format(cell, torch.channels_last)
        cell.kernel = kernel
        x = torch.randn(self.shape).to(device, memory_format=torch.channels_last)
        z0, calls = torch.zeros_like(x), 0

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
            with torch.autocast(device, torch.bfloat16):
                return solve()

        @torch.no_grad()
        def f_alone() -> None:  # a captured solve casts the weights at every evaluation
            with torch.autocast(device, torch.bfloat16, cache_enabled=not graph):
                for _ in range(1 if graph else evaluations):
                    cell(x, x)

        value = call()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            evaluations = calls or block(x, z0=z0, return_solution=True)[1].evaluations
            residual = relative_residual(f(value), value.float())
        check("relative residual", residual, REACHED)
        facts = {"evaluations": evaluations, "residual": residual, "peak_bytes": memory(call)[1]}
        return Contender(call, facts, Graph([f_alone], evaluations) if graph else f_alone)
