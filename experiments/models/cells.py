"""Cells that always have one fixed point, and the residual cell, as the layer of a small image classifier.

residual, subhomogeneous: cells of 16 x 16 states on a strided convolution. subhomogeneous-connected, monotone: fully
connected cells on 4 x 4 means of it. All of these have about 5,000 parameters.
explicit, explicit-connected: the subhomogeneous cells with W = 0, so that f(z, x) does not depend on z.
Broyden solves the residual cell, in at most --max-iter evaluations; plain iteration solves the others.
Recipe and data are those of the model images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from runs.options import option
from torch import Tensor, nn

import deqfast

from . import images
from .frame import Example, Outcome, Run
from .images import Found, Images, conv, norm

ARMS = ("residual", "subhomogeneous", "explicit", "monotone", "subhomogeneous-connected", "explicit-connected")


@dataclass(frozen=True, kw_only=True)
class Cells(Images):
    """Options of the model; --scales and --penalty do nothing."""

    all_arms = ARMS

    features: int = option("model", "width of the fully connected cells", 16, minimum=1)
    degree: float = option("model", "degree of the subhomogeneous cells", 0.9, above=0.0)


class Classifier(nn.Module):
    """A strided convolution, a cell, and a readout of the normalised state or of its means."""

    def __init__(self, arm: str, options: Cells) -> None:
        super().__init__()
        width, features = options.width, options.features
        stem: list[nn.Module] = [conv(3, width, 3, 2), norm(width), nn.ReLU()]
        self.is_connected = arm.endswith("-connected") or arm == "monotone"
        if self.is_connected:
            stem += [nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        self.stem = nn.Sequential(*stem)
        self.cell: Any
        if arm == "residual":
            self.cell = deqfast.ResidualCell(width, groups=4)
        elif arm == "monotone":
            self.cell = deqfast.MonotoneCell(16 * width, features)
        elif self.is_connected:
            self.cell = deqfast.SubhomogeneousCell(16 * width, features, None, options.degree)
        else:
            self.cell = deqfast.SubhomogeneousCell(width, width, 3, options.degree)
        if arm.startswith("explicit"):
            self.cell.A = nn.Parameter(torch.zeros_like(self.cell.A), requires_grad=False)
        plain = deqfast.Picard(options.tol, 200)
        solver = deqfast.Broyden(options.tol, options.max_iter) if arm == "residual" else plain
        self.block = deqfast.DEQBlock(self.cell, solver, adjoint="jfb", warn=False)
        outputs = features if self.is_connected else width
        self.readout = nn.Sequential(nn.BatchNorm1d(outputs), nn.Linear(outputs, 10))

    def forward(self, batch: Tensor) -> Found:
        x = self.stem(batch)
        z, solution = self.block(x, return_solution=True)
        return Found(self.readout(z if self.is_connected else z.mean((2, 3))), solution, z, x)


def train(run: Run) -> Outcome:
    """Train an arm as in images."""
    return images.train(run, Classifier)


EXAMPLE = Example(Cells, train, images.draw, images.load)
