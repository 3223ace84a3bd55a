"""Cases of training steps: forward and backward of one DEQ layer, by deqfast, torchdeq, eager and, once, explicitly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import deqfast

from .counters import count
from .entry import KERNELS, Case, Contender, check, kernel_of, peer
from .maps import relative_residual
from .peers import eager_layer, explicit_layer, torchdeq_layer
from .record import Row
from .solves import solver_name

TOL = 1e-3
EXACT = 1e-10
# Relative error of the gradient (Euclidean) against that at the exact fixed point, for a solve that stops at TOL. ReLU
# masks make it large; the gradient of the other adjoint is 0.8 away.
ALLOWED = {"fp32": 0.1, "bf16": 0.15}

Layer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingCase(Case):
    """z = layer(x) and the gradient of <z, direction> in the cell's weights and in x.

    cell: "residual", of `shape` (B, C, H, W), or "fc", of (B, D). torchdeq, eager and explicit call the cell of plain
    torch modules; deqfast's kernels have their own for what surrounds its convolutions.
    """

    section = "training"
    providers = (*KERNELS, "torchdeq", "eager", "explicit")
    peers = ("torchdeq", "eager", "explicit")
    cell: str
    shape: tuple[int, ...]
    adjoint: str
    solver: Any
    precision: str = "fp32"

    @property
    def name(self) -> str:
        size = "x".join(map(str, self.shape))
        kind = solver_name(self.solver).split("-")[0]
        return f"{self.cell}-{kind}-{self.adjoint}-{size}" + ("" if self.precision == "fp32" else f"-{self.precision}")

    def size(self) -> Row:
        batch, *rest = self.shape
        return {"batch": batch, "dim": torch.Size(rest).numel(), "dtype": self.precision}

    def contender(self, provider: str, device: str) -> Contender:
        problem = Problem(self, "torch" if provider in self.peers else kernel_of(provider, device).name, device)
        layer = self._layer(provider, problem.cell)
        facts = problem.judge(provider, *problem.step(layer))
        if provider in self.peers:
            facts["evaluations"] = problem.calls(layer)
        else:  # with the call of the gradient; a solve in one launch counts its own
            block = deqfast.DEQBlock(problem.cell, self.solver, self.adjoint, kernel=provider)
            with problem.precision():
                facts["evaluations"] = block(problem.x, z0=problem.z0, return_solution=True)[1].evaluations + 1
        asked = count(lambda f: problem.step(layer), lambda: None)  # the cell's operations too
        facts |= {"peak_bytes": asked.peak_bytes, "launches": asked.operations, "host_waits": asked.host_waits}
        return Contender(lambda: problem.step(layer), facts)

    def _layer(self, provider: str, cell: Any) -> Layer:
        if provider == "explicit":
            return explicit_layer(cell)
        if provider == "eager":
            return eager_layer(cell, self.solver, self.adjoint)
        if provider == "torchdeq":
            return peer(torchdeq_layer, cell, self.solver, self.adjoint)
        block = deqfast.DEQBlock(cell, self.solver, self.adjoint, kernel=provider)
        return lambda x, z0: block(x, z0=z0)


class Problem:
    """The cell, its input and the direction of the loss, the same numbers for every provider."""

    def __init__(self, case: TrainingCase, kernel: str, device: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        batch, features = case.shape[:2]
        cell: Any = deqfast.ResidualCell(features) if case.cell == "residual" else deqfast.FCCell(features, features)
        if case.cell == "residual":
            cell.kernel = kernel
        order = torch.channels_last if case.cell == "residual" else torch.contiguous_format
        x, self.direction = (
            torch.randn(case.shape).to(device, dtype).contiguous(memory_format=order) for _ in range(2)
        )
        self.cell = cell.to(device, dtype).to(memory_format=order)
        self.x, self.z0 = x.requires_grad_(), torch.zeros_like(x)
        self.leaves = [self.x, *self.cell.parameters()]

    def precision(self) -> Any:
        bf16 = self.case.precision == "bf16"
        return torch.autocast(self.device, torch.bfloat16) if bf16 else nullcontext()

    def step(self, layer: Layer) -> tuple[list[Tensor], Tensor]:
        """The gradients and z."""
        with self.precision():
            z = layer(self.x, self.z0)
        return list(torch.autograd.grad(z, self.leaves, self.direction.to(z.dtype))), z.detach()

    def calls(self, layer: Layer) -> int:
        """Calls of the cell in a forward and backward pass."""
        calls: list[Any] = []
        part = self.cell.conv1 if self.case.cell == "residual" else self.cell.injection
        handle = part.register_forward_hook(lambda *call: calls.append(None))
        self.step(layer)
        handle.remove()
        return len(calls)

    def judge(self, provider: str, gradient: list[Tensor], z: Tensor) -> Row:
        """The columns residual, error and allowed; ``Wrong`` where the gradient errs by more."""
        explicit = provider == "explicit"
        exact, cell, x = exact_gradient(self.case, explicit)
        allowed = ALLOWED[self.case.precision]
        error = float((flat(gradient) - flat(exact)).norm() / flat(exact).norm())
        check("relative error of the gradient", error, allowed)
        facts: Row = {"error": error, "allowed": allowed}
        if not explicit:
            z = z.double().cpu()
            with torch.no_grad():
                facts["residual"] = relative_residual(cell(z, x), z)
        return facts


def flat(tensors: list[Tensor]) -> Tensor:
    """One after another, in float64."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


@functools.lru_cache(maxsize=2)
def exact_gradient(case: TrainingCase, explicit: bool) -> tuple[list[Tensor], nn.Module, Tensor]:
    """The gradient in float64, at the fixed point to 1e-10 or of the cell applied once, with the cell and its input."""
    problem = Problem(case, "torch", "cpu", torch.float64)
    solver = deqfast.Anderson(EXACT, 300)
    adjoint: Any = deqfast.JFB() if case.adjoint == "jfb" else deqfast.Implicit(solver)
    block = deqfast.DEQBlock(problem.cell, solver, adjoint, kernel="torch")
    layer = explicit_layer(problem.cell) if explicit else (lambda x, z0: block(x, z0=z0))
    gradient, _ = problem.step(layer)
    return gradient, problem.cell, problem.x.detach()
