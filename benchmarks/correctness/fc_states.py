"""Problems for the ops of the fully connected cell, and their comparison with the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqfast.ops import ACTIVATIONS, Kernel
from deqfast.ops.steps import StopRule

from .tolerances import assert_accurate, rounding

EVENTS = ("run", "nan", "inf", "overflow", "start", "solved", "tiny")


@dataclass(frozen=True)
class FCCase:
    """A solve of z = act(W z + c); `rows` lists what happens to the first samples, see ``make``."""

    size: int = 63
    batch: int = 5
    activation: str = "tanh"
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    gain: float = 0.5  # spectral radius of W
    tol: float = 1e-3
    absolute: bool = False
    max_iter: int = 30
    stall_floor: float = 0.0
    offset: float = 0.0
    maximum: bool = False
    warm: bool = False
    rows: tuple[str, ...] = ()
    seed: int = 0

    def make(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        weight = normal(self.size, self.size) * self.gain / math.sqrt(self.size)
        c, z0 = normal(self.batch, self.size), normal(self.batch, self.size) * self.warm
        for row, event in enumerate(self.rows):
            if event in ("nan", "inf"):
                c[row, row % self.size] = float(event)
            elif event == "overflow":  # finite, but not its square
                c[row] *= 16 * torch.finfo(self.dtype).max ** 0.5
            elif event == "tiny":  # as are its squares: 0 in the dtype of the state
                c[row] *= torch.finfo(self.dtype).tiny ** 0.75
                z0[row] *= torch.finfo(self.dtype).tiny ** 0.75
            elif event == "start":
                z0[row, -1] = float("nan")
            elif event == "solved":
                c[row] = z0[row] = 0
        tensors = weight.to(self.weight_dtype or self.dtype), c.to(self.dtype), z0.to(self.dtype)
        return tensors[0].to(device), tensors[1].to(device), tensors[2].to(device)

    def scalars(self) -> tuple[Any, ...]:
        rule = StopRule(self.tol, self.absolute, self.stall_floor, self.offset, maximum=self.maximum)
        return ACTIVATIONS.index(self.activation), self.max_iter, *rule


DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {"dtype": torch.float64},
    "bf16 weight": {"weight_dtype": torch.bfloat16},
}


def check_solve(op: Callable[..., Any], case: FCCase, device: str = "cpu") -> list[Tensor]:
    """Run `op` on the case and compare with the reference; return value, status, iterations, residual."""
    tensors = case.make(device)
    outcome = [tensor.cpu() for tensor in op(*tensors, *case.scalars())]
    tensors = case.make()
    reference = Kernel("torch").op("fc_fixed_point")
    plain = reference(*tensors, *case.scalars())
    weight, c, z0 = (tensor.double() for tensor in tensors)
    exact = reference(weight, c, z0, *case.scalars())
    for actual, like in zip(outcome, plain, strict=True):
        assert actual.shape == like.shape and actual.dtype == like.dtype
    assert torch.equal(outcome[1], exact[1]), f"status {outcome[1].tolist()}, expected {exact[1].tolist()}"
    assert torch.equal(outcome[2], exact[2]), f"iterations {outcome[2].tolist()}, expected {exact[2].tolist()}"
    for values in zip(outcome[0], plain[0], exact[0], strict=True):
        assert_accurate(*values)
    scale = torch.stack([torch.ones(case.batch), exact[0].nan_to_num().norm(dim=1) + 1])
    for actual, like, true, size in zip(outcome[3], plain[3], exact[3], scale, strict=True):
        finite = torch.isfinite(true)
        assert torch.equal(actual[~finite], true[~finite].to(actual.dtype))
        error, allowed = (actual - true).abs(), 2 * (like - true).abs() + rounding(case.dtype) * size
        assert (error[finite] <= allowed[finite]).all(), f"residual: {error.tolist()}, allowed {allowed.tolist()}"
    return outcome
