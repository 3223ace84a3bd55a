"""A model, nothing is measured: MDEQ on 1, 8 and 64 GPUs, and on a data set of the internet's size.

    python benchmarks/internet_scale.py

prints images per second and writes benchmarks/results/internet_scale.json, where every input is a row with its source.
A training step's operations each take the longer of their bytes at the copy rate and their arithmetic at a share of a
matrix product's rate. Launches, host waits, reading images, and what surrounds the equilibrium layer (2 to 6 % of a
step) are left out: optimistic for deqfast and torchdeq 0.1.0 alike. The layer, of https://arxiv.org/abs/2006.08656, is
run on tensors without data; what solvers move is a formula.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from harness.record import RESULTS, Row, write_record
from harness.traffic import solve_passes
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import deqfast

SYSTEM = "H200-SXM-141GBx8 in github.com/mlcommons/inference_results_v4.1"
CONFIGURATION = "cls_mdeq_{SMALL,LARGE,XL}.yaml in github.com/locuslab/deq, MDEQ-Vision/experiments/imagenet"
RATE = "recorded on an H200 outside this repository, not by gpu.sh"
OPTIMIZER = "SGD in fp32: reads weight, gradient, momentum, writes two, one bf16"
INPUTS = {  # value, unit, source
    "copy_rate": (4.3e12, "bytes/s read and written", f"a large copy, {RATE}"),
    "product_rate": (790e12, "FLOP/s", f"a large bf16 matrix product, {RATE}"),
    "efficiency": (0.45, "of product_rate", "ASSUMED for the convolutions of f"),
    "per_node": (8, "GPUs", f"accelerators_per_node of {SYSTEM}"),
    "node_rate": (450e9, "bytes/s each way", f"NVLink, 900 GB/s both ways: {SYSTEM}"),
    "network_rate": (50e9, "bytes/s each way", f"a 400 Gbit/s InfiniBand port for each GPU: {SYSTEM}"),
    "batch": (64, "images per GPU", f"ASSUMED: twice BATCH_SIZE_PER_GPU of {CONFIGURATION}"),
    "forward_evaluations": (26, "evaluations", f"F_THRES of {CONFIGURATION}"),
    "backward_evaluations": (27, "evaluations", f"B_THRES of {CONFIGURATION}"),
    "anderson_history": (6, "pairs", "the default of both libraries"),
    "state_bytes": (4, "bytes of an element", "the state stays in fp32 beside a bf16 f"),
    "optimizer_bytes": (22, "bytes per parameter", OPTIMIZER),
    "gradient_bytes": (4, "bytes summed per parameter", "gradients in fp32"),
    "internet": (5_850_000_000, "images", "LAION-5B, Schuhmann et al., NeurIPS 2022"),
}
GIVEN = SimpleNamespace(**{name: value for name, (value, _, _) in INPUTS.items()})
GPUS = [1, 8, 64]
NETWORKS = {  # channels of the resolutions; parameters of the whole network, Table 2 of the paper
    "MDEQ-small": ((32, 64, 128, 256), 18e6),
    "MDEQ-large": ((80, 160, 320, 640), 63e6),
    "MDEQ-XL": ((88, 176, 352, 704), 81e6),
}


def conv(x: Tensor, outputs: int, kernel: int = 3, stride: int = 1) -> Tensor:
    weight = x.new_empty(outputs, x.shape[1], kernel, kernel).requires_grad_()
    return F.conv2d(x, weight, None, stride, kernel // 2)


def norm(x: Tensor, groups: int = 8) -> Tensor:
    weight, bias = (x.new_empty(x.shape[1]).requires_grad_() for _ in range(2))
    return F.group_norm(x, groups, weight, bias)


def block(z: Tensor, injection: Tensor | None) -> Tensor:
    """A residual block at one resolution, five times as wide within."""
    y = conv(F.relu(norm(conv(z, 5 * z.shape[1])), inplace=True), z.shape[1])
    y = norm(y if injection is None else y + injection)
    return norm(F.relu(y + z, inplace=True))


def transfer(y: Tensor, source: int, target: int, channels: int) -> Tensor:
    """Change of resolution: 1x1 convolution and repetition up, 3x3 convolutions of stride 2 down."""
    if source > target:
        return F.interpolate(norm(conv(y, channels, 1)), scale_factor=2 ** (source - target), mode="nearest")
    for _ in range(source + 1, target):
        y = F.relu(norm(conv(y, y.shape[1], 3, 2)), inplace=True)
    return norm(conv(y, channels, 3, 2)) if source < target else y


def layer(z: Tensor, x: Tensor, shapes: list[tuple[int, int, int]]) -> Tensor:
    """MDEQ's f: z (B, D) in fp32, all resolutions (C, H, W) one after another; computed in the dtype of x (B, C, H, W).

    Blocks, then sums over all resolutions. No weight normalisation, no dropout.
    """
    pieces = z.split([channels * side * side for channels, side, _ in shapes], dim=1)
    parts = [piece.reshape(len(z), *shape).to(x.dtype) for piece, shape in zip(pieces, shapes, strict=True)]
    y = [block(part, None if i else x) for i, part in enumerate(parts)]
    sums: list[Any] = [  # from 0, as the authors'
        sum(transfer(y[i], i, j, channels) for i in range(len(y))) for j, (channels, _, _) in enumerate(shapes)
    ]
    return torch.cat([norm(conv(F.relu(s), s.shape[1], 1), 4).flatten(1) for s in sums], dim=1).to(z.dtype)


class Traffic(TorchDispatchMode):
    """Totals of the operations that touch memory: each reads its inputs and writes its outputs once."""

    flops = moved = seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name and name != "_unsafe_view":
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **(kwargs or {}), out_val=out) if formula else 0
            read = args[1:] if name in ("copy_", "fill_", "zero_") else args  # these only write their first argument
            moved = sum(leaf.nbytes for leaf in pytree.tree_leaves((read, kwargs, out)) if isinstance(leaf, Tensor))
            self.flops, self.moved = self.flops + flops, self.moved + moved
            self.seconds += max(flops / (GIVEN.efficiency * GIVEN.product_rate), moved / GIVEN.copy_rate)
        return out


def count(channels: tuple[int, ...], batch: int, image: int = 224) -> tuple[Traffic, Traffic, Traffic, int]:
    """Traffic of f, of its product with a vector, of f differentiated once, weights too, in a step; size of a state."""
    shapes = [(width, image >> (2 + i), image >> (2 + i)) for i, width in enumerate(channels)]
    dim = sum(width * side * side for width, side, _ in shapes)
    x = torch.zeros(batch, *shapes[0], device="meta", dtype=torch.bfloat16, requires_grad=True)
    z = torch.zeros(batch, dim, device="meta", requires_grad=True)
    with Traffic() as f:
        value = layer(z, x, shapes)
    with Traffic() as vjp:
        torch.autograd.grad(value, z, torch.zeros_like(value))
    with Traffic() as gradient:
        layer(z, x, shapes).backward(torch.zeros_like(value))
    return f, vjp, gradient, dim


M, MOST = GIVEN.anderson_history, max(GIVEN.forward_evaluations, GIVEN.backward_evaluations)
SOLVERS: dict[str, tuple[Any, Any]] = {  # ours, on the kernel cuda; passes of step k of torchdeq, whose history is fp32
    "anderson": (
        deqfast.Anderson(max_iter=MOST, history=M, history_dtype=torch.bfloat16),
        lambda k: 27 + 7 * min(k + 1, M) if k else 20,
    ),
    "broyden": (deqfast.Broyden(max_iter=MOST, history=MOST), lambda k: 72 + 6 * (k + 1) if k else 75),
}


def passes(solver: str, evaluations: int, provider: str) -> float:
    """Passes over the state of a solve by "deqfast" or "torchdeq"."""
    ours, theirs = SOLVERS[solver]
    if provider == "deqfast":
        return solve_passes(ours, evaluations, "cuda")
    return sum(map(theirs, range(evaluations - 1)))


def all_reduce_seconds(gpus: int, moved: float) -> float:
    """Sum of `moved` bytes over whole nodes: a ring within each, and one between them on what each GPU then holds."""
    inside = min(gpus, GIVEN.per_node)
    nodes = gpus // inside
    within = 2 * (inside - 1) / inside * moved / GIVEN.node_rate
    return within + 2 * (nodes - 1) / nodes * moved / inside / GIVEN.network_rate


def rows_of(name: str) -> Iterator[Row]:
    """Every gradient, solver and library: the time of a step on one GPU, and the rates of all ``GPUS``."""
    channels, parameters = NETWORKS[name]
    f, vjp, gradient, dim = count(channels, GIVEN.batch)
    summed = [all_reduce_seconds(gpus, GIVEN.gradient_bytes * parameters) for gpus in GPUS]
    for adjoint, solver, provider in itertools.product(("implicit", "jfb"), SOLVERS, ("torchdeq", "deqfast")):
        backward = [(GIVEN.backward_evaluations, vjp)] if adjoint == "implicit" else []
        solves = [(GIVEN.forward_evaluations, f), *backward]
        read = sum(passes(solver, evaluations, provider) for evaluations, _ in solves)
        moved = read * GIVEN.batch * dim * GIVEN.state_bytes + GIVEN.optimizer_bytes * parameters
        evaluated = sum(evaluations * once.seconds for evaluations, once in solves) + gradient.seconds
        step = evaluated + moved / GIVEN.copy_rate
        rates = [gpus * GIVEN.batch / (step + summing) for gpus, summing in zip(GPUS, summed, strict=True)]
        row = {"case": f"{name}, {adjoint}, {solver}", "provider": provider, "ms": 1e3 * step, "gpus": GPUS}
        row |= {"images_per_second": rates, "internet_s": GIVEN.internet / rates[-1]}
        yield {"section": "internet scale (model)", **row}


def main() -> None:
    rows: list[Row] = [
        {"section": "internet scale (inputs)", "case": name, "provider": "model", "value": v, "unit": u, "source": s}
        for name, (v, u, s) in INPUTS.items()
    ]
    rows += (row for name in NETWORKS for row in rows_of(name))
    for row in rows[len(INPUTS) :]:
        print(f"{row['case']}, {row['provider']}: {row['images_per_second'][0]:,.0f} images/s on one GPU")
    write_record(RESULTS / "internet_scale.json", rows, remark="a model: nothing was measured")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly where `| head` has seen enough
    main()
