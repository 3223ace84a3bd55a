"""Random arguments of the norm_act ops, and the comparison of an implementation with the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqfast.ops import Kernel

TORCH = Kernel("torch")
NORM_OPS = ("norm_act", "norm_act_backward", "norm_act_residual", "norm_act_residual_backward")
NORM_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16 with fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}
# (B, C, H, W) and groups: vectors with and without remainders, single pixels, single channels, single elements.
NORM_SHAPES = [
    ((2, 32, 4, 4), 4),
    ((3, 6, 5, 3), 3),
    ((2, 24, 3, 7), 2),
    ((2, 40, 1, 1), 8),
    ((1, 1, 7, 9), 1),
    ((1, 4, 1, 1), 4),
    ((1, 48, 9, 7), 1),
]
# Neither a Triton program nor a CUDA block holds a whole group of these; and there are more columns than threads.
LARGE_SHAPES = [((1, 16, 32, 48), 2), ((1, 64, 20, 12), 1), ((1, 1040, 3, 2), 1)]
SLACK = 16  # eps, relative to the largest entry


@dataclass(frozen=True)
class NormCase:
    op: str
    shape: tuple[int, int, int, int] = (2, 16, 3, 5)
    groups: int = 4
    dtypes: str = "fp32"
    memory_format: torch.memory_format = torch.channels_last
    offset: float = 0.3
    is_relu: bool = False  # y is max(0, .), with half of its entries equal

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return TORCH.op(self.op)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Arguments by name, in the order of the op's schema."""
        generator = torch.Generator().manual_seed(1)
        y_dtype, z_dtype = NORM_DTYPES[self.dtypes]
        accumulation = torch.float64 if y_dtype == torch.float64 else torch.float32
        channels = self.shape[1]

        def image(dtype: torch.dtype, offset: float) -> Tensor:
            values = torch.randn(self.shape, generator=generator, dtype=torch.float64) + offset
            return values.to(device, dtype).contiguous(memory_format=self.memory_format)

        def vector() -> Tensor:
            return torch.randn(channels, generator=generator, dtype=torch.float64).to(device, accumulation)

        y = image(y_dtype, self.offset)
        images = {"y": y.relu_() if self.is_relu else y}
        if "residual" in self.op:
            images |= {"x": image(z_dtype, 0.0), "z": image(z_dtype, 0.0)}
            names = ["weight2", "bias2", "weight3", "bias3"]
        else:
            names = ["weight", "bias"]
        forward = images | {name: vector() for name in names}
        if not self.op.endswith("backward"):
            return forward | {"groups": self.groups, "eps": 1e-5}
        results = TORCH.op(self.op.removesuffix("_backward"))(*forward.values(), self.groups, 1e-5)
        grad = image(accumulation if "residual" in self.op else y_dtype, 0.0)
        statistics = ["mean2", "rstd2", "mean3", "rstd3"] if "residual" in self.op else ["mean", "rstd"]
        forward.pop("bias3", None)
        saved = zip(statistics, results[-len(statistics) :], strict=True)
        return {"grad": grad} | forward | dict(saved) | {"groups": self.groups}


def exactly(arguments: dict[str, Any]) -> list[Any]:
    return [value.double() if isinstance(value, Tensor) else value for value in arguments.values()]


def check_norm(op: Callable[..., Any], case: NormCase, device: str = "cpu") -> tuple[Tensor, ...]:
    """Assert that `op` errs at most twice as much as the reference in the same dtype, and by a few eps."""
    arguments = case.arguments(device)
    before = [value.clone() if isinstance(value, Tensor) else value for value in arguments.values()]
    actual = op(*arguments.values())
    plain = case.reference(*arguments.values())
    exact = case.reference(*exactly(arguments))
    for value, old in zip(arguments.values(), before, strict=True):
        assert not isinstance(value, Tensor) or torch.equal(value, old), "an argument was written"
    assert len(actual) == len(plain) == len(exact)
    for i, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert (a.shape, a.dtype) == (p.shape, p.dtype), f"result {i} of {case}"
        assert a.dim() != 4 or a.is_contiguous(memory_format=case.memory_format), f"result {i} of {case}"
        scale = float(e.abs().max()) + cancelled(arguments)
        error, allowed = (float((r.double() - e).abs().max()) for r in (a, p))
        bound = 2 * allowed + SLACK * torch.finfo(a.dtype).eps * scale
        assert error <= bound, f"result {i} of {case}: error {error:.3g}, allowed {bound:.3g}"
    return actual


def cancelled(arguments: dict[str, Any]) -> float:
    """Size of the terms that nearly cancel in the gradient of a small group: rounding is relative to these terms."""
    y, groups = arguments["y"], arguments["groups"]
    if "grad" not in arguments or y[0].numel() // groups > 8:
        return 0.0
    size = float(arguments["grad"].double().abs().max())
    for name, value in arguments.items():
        if name.startswith(("weight", "rstd")):
            size *= max(1.0, float(value.abs().max()))
    return size
