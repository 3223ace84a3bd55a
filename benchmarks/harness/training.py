"""Cases of one DEQ layer: its training step by deqfast and torchdeq, and of the cell once; each adjoint's gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import deqfast

from .counters import count_call, evaluations, memory
from .entry import KERNELS, Case, Contender, check, crossed, kernel_of
from .maps import autocast, relative_residual
from .peers import block_layer, explicit_layer, torchdeq_layer
from .record import Row
from .solves import solver_name

TOL = 1e-3
EXACT = 1e-10
# Relative error of the gradient (Euclidean) to that at the exact fixed point, for a solve that stops at TOL. ReLU masks
# make it large; the gradient of the other adjoint has an error of 0.8.
ALLOWED = {"fp32": 0.1, "bf16": 0.15}
PEERS = ("torchdeq", "explicit")
# kind -> cell with this many channels or features
CELLS: dict[str, Callable[[int], nn.Module]] = {
    "residual": deqfast.ResidualCell,
    "fc": lambda features: deqfast.FCCell(features, features),
    "linear": deqfast.LinearCell,
}
ADJOINTS = {
    "jfb": deqfast.JFB(),
    "phantom": deqfast.Phantom(relaxation=1.0),
    "neumann": deqfast.Neumann(),
    "shine": deqfast.SHINE(),
    "implicit": deqfast.Implicit(),
    "gmres": deqfast.Implicit(deqfast.Anderson(1e-6, 100, history_size=32)),  # in exact arithmetic
    "unrolled": deqfast.Unrolled(40),
    "checkpoint": deqfast.Unrolled(40, checkpoint=True),
    "reversible": deqfast.Reversible(12),
}

Function = Callable[[Tensor, Tensor], Tensor]  # (x, z0) -> z


@dataclass(frozen=True)
class Layer:
    """DEQ layer. cell: "residual", with `shape` (B, C, H, W), "fc" or "linear", with (B, D); adjoint: its name."""

    cell: str
    shape: tuple[int, ...]
    adjoint: str
    solver: Any
    precision: str = "fp32"

    @property
    def name(self) -> str:
        kind = solver_name(self.solver).split("-")[0]
        bf16 = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.cell}-{kind}-{self.adjoint}-{crossed(self.shape)}{bf16}"


class Setup:
    """Cell of a layer, its input and the direction of the loss, with the same numbers for every provider."""

    def __init__(self, layer: Layer, kernel: str, device: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.layer, self.device = layer, device
        cell: Any = CELLS[layer.cell](layer.shape[1])
        if layer.cell == "residual":
            cell.kernel = kernel
        order = torch.channels_last if layer.cell == "residual" else torch.contiguous_format
        x, self.direction = (
            torch.randn(layer.shape).to(device, dtype).contiguous(memory_format=order) for _ in range(2)
        )
        self.cell = cell.to(device, dtype).to(memory_format=order)
        self.x, self.z0 = x.requires_grad_(), torch.zeros_like(x)
        self.leaves = [self.x, *self.cell.parameters()]

    def step(self, function: Function) -> tuple[tuple[Tensor, ...], Tensor]:
        """Gradients of <z, direction> in x and the cell's weights, and z."""
        with autocast(self.device, self.layer.precision):
            z = function(self.x, self.z0)
        return torch.autograd.grad(z, self.leaves, self.direction.to(z.dtype)), z.detach()

    def calls(self, function: Function) -> int:
        """Calls of the cell in a forward and backward pass."""
        part = {"residual": "conv1", "fc": "injection", "linear": ""}[self.layer.cell]
        return evaluations(self.cell.get_submodule(part), lambda: self.step(function))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors flattened and concatenated, in float64."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


def distance(actual: Tensor, exact: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((actual - exact).norm() / exact.norm())


@functools.lru_cache(maxsize=2)
def exact_gradient(layer: Layer, explicit: bool = False) -> tuple[Tensor, Setup]:
    """Gradient in float64, at the fixed point to 1e-10 or of the cell applied once, with the cell and its input."""
    setup = Setup(layer, "torch", "cpu", torch.float64)
    solver = deqfast.Anderson(EXACT, 300)
    adjoint: Any = deqfast.JFB() if layer.adjoint == "jfb" else deqfast.Implicit(solver)
    equilibrium = block_layer(deqfast.DEQBlock(setup.cell, solver, adjoint, kernel="torch"))
    function = explicit_layer(setup.cell) if explicit else equilibrium
    return flat(setup.step(function)[0]), setup


def training_case(cell: str, shape: tuple[int, ...], adjoint: str, solver: Any, precision: str = "fp32") -> Case:
    """Training step of a ``Layer``.

    torchdeq and explicit call the cell of plain torch modules; deqfast's kernels have their own ops between its
    convolutions.
    """
    layer = Layer(cell, shape, adjoint, solver, precision)

    def contender(provider: str, device: str) -> Contender:
        setup = Setup(layer, "torch" if provider in PEERS else kernel_of(provider, device).name, device)
        block = None
        if provider == "explicit":
            function = explicit_layer(setup.cell)
        elif provider == "torchdeq":
            function = torchdeq_layer(setup.cell, solver, adjoint)
        else:
            block = deqfast.DEQBlock(setup.cell, solver, adjoint, kernel=provider)
            function = block_layer(block)
        facts = judged(layer, provider == "explicit", *setup.step(function))
        if block is None:
            facts["evaluations"] = setup.calls(function)
        else:  # the gradient's call included; a solve in one launch counts its own
            with autocast(device, precision):
                facts["evaluations"] = block(setup.x, z0=setup.z0, return_solution=True)[1].evaluations + 1
        step = functools.partial(setup.step, function)
        return Contender(step, facts | count_call(step, device).columns)

    return Case("training", layer.name, (*KERNELS, *PEERS), PEERS, contender)


def judged(layer: Layer, explicit: bool, gradient: Iterable[Tensor], z: Tensor) -> Row:
    """Columns residual and error; raises ``Wrong`` if the gradient's error is too large."""
    exact, setup = exact_gradient(layer, explicit)
    error = distance(flat(gradient), exact)
    check("relative error of the gradient", error, ALLOWED[layer.precision])
    facts: Row = {"error": error}
    if not explicit:
        z = z.double().cpu()
        with torch.no_grad():
            facts["residual"] = relative_residual(setup.cell(z, setup.x), z)
    return facts


def gradient(cell: str, shape: tuple[int, ...], solver: Any) -> Case:
    """Gradients of a layer, by their error relative to the exact implicit one."""
    layer = Layer(cell, shape, "implicit", solver)

    def contender(provider: str, device: str) -> Contender:
        setup = Setup(layer, "auto", device)
        block = deqfast.DEQBlock(setup.cell, solver, ADJOINTS[provider])
        function = block_layer(block)

        def step() -> Any:
            return setup.step(function)

        reached, exact = flat(step()[0]), exact_gradient(layer)[0]
        cosine = float(reached @ exact / reached.norm() / exact.norm())
        check("distance of the gradient's cosine from 1", 1 - cosine, 0.5)
        facts = {"error": distance(reached, exact), "cosine": cosine}
        facts |= {"peak_bytes": memory(step, device)[1], "evaluations": setup.calls(function)}
        if block.backward_solution is not None:
            facts["backward_evaluations"] = block.backward_solution.evaluations
        return Contender(step, facts)

    name = f"gradient-{layer.name.replace('-implicit', '')}"
    return Case("options", name, tuple(ADJOINTS), ("implicit", "jfb"), contender)
