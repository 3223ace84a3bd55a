"""The table of what does not go together: each entry is an error that names both, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deqfast import DEQBlock
from deqfast.execution.plan import REFUSED

OPTIONS = {
    "compact": {"compact": True},
    "trace": {"trace": True},
    "trace of a Solution": {"trace": True},
    "halt": {"halt": lambda z, value, k: torch.zeros(len(z), dtype=torch.bool)},
    "scale": {"scale": 2.0},
    "check_every": {"check_every": 2},
    "cuda_graph": {"cuda_graph": True},
    "compile": {"compile": True},
    "SHINE": {"adjoint": "shine"},
    "Unrolled": {"adjoint": "unrolled"},
    "Reversible": {"adjoint": "reversible"},
}
WAYS = {
    "torch.func": lambda block, x: torch.func.vmap(block)(x[:, None]),
    "torch.export": lambda block, x: torch.export.export(Told(block), (x,)),
    "torch.compile": lambda block, x: torch.compile(Told(block), backend="eager", fullgraph=True)(x),
    "trajectory": lambda block, x: block.trajectory(x, [1]),
}


class Cell(nn.Module):
    def forward(self, z, x):
        return 0.5 * torch.tanh(z) + x


class Told(nn.Module):
    """A model that gives the Solution too."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x, return_solution=True)[0]


@pytest.mark.parametrize(("way", "option"), [(way, option) for way in REFUSED for option in REFUSED[way]])
def test_refused(way, option):
    def run():
        block, x = DEQBlock(Cell(), **OPTIONS.get(way, {}) | OPTIONS.get(option, {})), torch.ones(2, 3)
        block.train(option == "training mode")
        if option == "groups":
            return block(x, groups="batch")
        return WAYS.get(way, DEQBlock.__call__)(block, x)

    with pytest.raises(
        Exception, match=f"{way} cannot be combined with {option}: "
    ) as caught:  # dynamo's own in a trace
        run()
    assert way.startswith("torch.") or type(caught.value) is ValueError
