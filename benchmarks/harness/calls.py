"""Cases of the cost of a call: a DEQ layer with a tiny cell, so that mostly the overhead around f is timed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import deqfast

from .counters import count_call, evaluations
from .entry import Case, Contender, Skipped, check, crossed
from .maps import NEVER
from .peers import BACKWARD_TOL, TORCHDEQ, block_layer, layer_by

EVALUATIONS = 6
PROVIDERS = ("DEQBlock", "get_deq", "torchdeq")


class Cell(nn.Module):
    """tanh(W z + b + x), with |W| about 1 / 2."""

    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(features, features)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(features, features) / (4 * features**0.5))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


def layer_of(provider: str, cell: Cell, solver: type[Any], adjoint: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with gradient; raises ``Skipped`` if torchdeq is missing."""
    if provider == "DEQBlock":
        backward = deqfast.Implicit(solver(BACKWARD_TOL, EVALUATIONS)) if adjoint == "implicit" else adjoint
        return block_layer(deqfast.DEQBlock(cell, solver(NEVER, EVALUATIONS), backward))
    if provider == "torchdeq" and find_spec("torchdeq") is None:
        raise Skipped("torchdeq is not installed")
    get_deq = import_module("torchdeq" if provider == "torchdeq" else "deqfast.compat.torchdeq").get_deq
    most = EVALUATIONS - (solver is deqfast.Broyden)  # torchdeq does not count its first evaluation
    return layer_by(get_deq, cell, solver(NEVER, EVALUATIONS), adjoint, TORCHDEQ[solver], most)


def call_case(shape: tuple[int, int], solver: type[Any], mode: str) -> Case:
    """A call on a state of this shape; mode: "no-grad", or the adjoint of a training step, "jfb" or "implicit"."""

    def contender(provider: str, device: str) -> Contender:
        cell = Cell(shape[1]).to(device)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator).to(device).requires_grad_(mode != "no-grad")
        z0, leaves = torch.zeros(shape, device=device), [x, *cell.parameters()]
        layer = layer_of(provider, cell, solver, "implicit" if mode == "implicit" else "jfb")

        def call() -> Any:
            if mode == "no-grad":
                with torch.no_grad():
                    return layer(x, z0)
            return torch.autograd.grad(layer(x, z0).sum(), leaves)

        with torch.no_grad():
            z = layer(x, z0)
            check("residual", float((cell(z, x) - z).norm() / z.norm()), 0.1)
        return Contender(call, {"evaluations": evaluations(cell, call), **count_call(call, device).columns})

    return Case("calls", f"{solver.__name__.lower()}-{mode}-{crossed(shape)}", PROVIDERS, ("torchdeq",), contender)
