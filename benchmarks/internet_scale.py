"""A model, nothing is measured: MDEQ on 1, 8 and 64 GPUs, and on a data set of the internet's size.

    python benchmarks/internet_scale.py

prints images per second and writes benchmarks/results/internet_scale.json, where every input is a row with its source.
A training step's operations each take the longer of their bytes at the copy rate and their arithmetic at a share of a
matrix product's rate. Launches, host waits and reading images are left out: optimistic for deqfast and torchdeq 0.1.0
alike. The network, of https://arxiv.org/abs/2006.08656, is run on tensors without data; what solvers move is a formula.
"""

from __future__ import annotations

import itertools
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


NETWORKS = {  # channels of the resolutions, and of the classifier's bottlenecks
    "MDEQ-small": ((32, 64, 128, 256), (24, 48, 96, 192)),
    "MDEQ-large": ((80, 160, 320, 640), (32, 64, 128, 256)),
    "MDEQ-XL": ((88, 176, 352, 704), (32, 64, 128, 256)),
}


class Network:
    """MDEQ, in which every call of a layer makes its weights; without weight normalisation and dropout."""

    def __init__(self, channels: tuple[int, ...], head: tuple[int, ...], image: int = 224) -> None:
        self.head, self.weights = head, list[Tensor]()
        self.shapes = [(count, image >> (2 + i), image >> (2 + i)) for i, count in enumerate(channels)]

    def parts(self, z: Tensor) -> list[Tensor]:
        """The resolutions (B, C, H, W) of a state (B, D)."""
        pieces = z.split([channels * side * side for channels, side, _ in self.shapes], dim=1)
        return [piece.reshape(len(z), *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def weight(self, *shape: int) -> Tensor:
        self.weights.append(torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True))
        return self.weights[-1]

    def conv(self, x: Tensor, outputs: int, kernel: int = 3, stride: int = 1) -> Tensor:
        return F.conv2d(x, self.weight(outputs, x.shape[1], kernel, kernel), None, stride, kernel // 2)

    def norm(self, x: Tensor, groups: int = 8) -> Tensor:
        return F.group_norm(x, groups, self.weight(x.shape[1]), self.weight(x.shape[1]))

    def normed(self, x: Tensor, outputs: int, kernel: int = 3, stride: int = 1, relu: bool = True) -> Tensor:
        """A convolution and its batch normalisation."""
        y = self.conv(x, outputs, kernel, stride)
        y = F.batch_norm(y, None, None, self.weight(outputs), self.weight(outputs), training=True)
        return F.relu(y, inplace=True) if relu else y

    def stem(self, images: Tensor) -> Tensor:
        first = self.shapes[0][0]
        return self.normed(self.normed(self.normed(images, first, 3, 2), first, 3, 2), first, 1)

    def block(self, z: Tensor, injection: Tensor | None) -> Tensor:
        """A residual block at one resolution, five times as wide within."""
        y = self.conv(F.relu(self.norm(self.conv(z, 5 * z.shape[1])), inplace=True), z.shape[1])
        y = self.norm(y if injection is None else y + injection)
        return self.norm(F.relu(y + z, inplace=True))

    def transfer(self, y: Tensor, source: int, target: int) -> Tensor:
        """Change of resolution: 1x1 convolution and repetition up, 3x3 convolutions of stride 2 down."""
        channels = self.shapes[target][0]
        if source > target:
            up = self.norm(self.conv(y, channels, 1))
            return F.interpolate(up, scale_factor=2 ** (source - target), mode="nearest")
        for _ in range(source + 1, target):
            y = F.relu(self.norm(self.conv(y, y.shape[1], 3, 2)), inplace=True)
        return self.norm(self.conv(y, channels, 3, 2)) if source < target else y

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        """The cell on the state (B, D) in fp32, computed in the dtype of x: blocks, then sums over all resolutions."""
        y = [self.block(part.to(x.dtype), None if i else x) for i, part in enumerate(self.parts(z))]
        levels = range(len(y))
        sums: list[Any] = [sum(self.transfer(y[i], i, j) for i in levels) for j in levels]  # from 0, as the authors'
        mixed = [self.norm(self.conv(F.relu(total), total.shape[1], 1), 4).flatten(1) for total in sums]
        return torch.cat(mixed, dim=1).to(z.dtype)

    def classify(self, z: Tensor) -> Tensor:
        """Logits (B, 1000) of a state (B, D)."""
        total: Any = None
        for part, planes in zip(self.parts(z), self.head, strict=True):
            y = self.normed(self.normed(self.normed(part, planes, 1), planes), 4 * planes, 1, relu=False)
            y = F.relu(y + self.normed(part, 4 * planes, 1, relu=False), inplace=True)
            total = y if total is None else y + self.normed(total, 4 * planes, 3, 2)
        pooled = self.normed(total, 2048, 1).mean(dim=(2, 3))
        return F.linear(pooled, self.weight(1000, 2048), self.weight(1000))


class Traffic(TorchDispatchMode):
    """Totals of the operations that touch memory: each reads its inputs and writes its outputs once."""

    flops = moved = seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "detach"):
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **(kwargs or {}), out_val=out) if formula else 0
            read = args[1:] if name in ("copy_", "fill_", "zero_") else args  # these only write their first argument
            moved = sum(leaf.nbytes for leaf in pytree.tree_leaves((read, kwargs, out)) if isinstance(leaf, Tensor))
            self.flops, self.moved = self.flops + flops, self.moved + moved
            self.seconds += max(flops / (GIVEN.efficiency * GIVEN.product_rate), moved / GIVEN.copy_rate)
        return out


def count(network: Network, batch: int) -> tuple[Traffic, Traffic, Traffic, int, int]:
    """Traffic of f, of its product with a vector, of all differentiated once in a step; state size; parameters."""
    channels, side, _ = network.shapes[0]
    images = torch.zeros(batch, 3, 4 * side, 4 * side, device="meta", dtype=torch.bfloat16)
    dim = sum(channels * side * side for channels, side, _ in network.shapes)
    z, labels = torch.zeros(batch, dim, device="meta"), torch.zeros(batch, device="meta").long()
    with torch.no_grad():
        x = network.stem(images)
        with Traffic() as f:
            network.f(z, x)
    start = z.clone().requires_grad_()
    value = network.f(start, x)
    with Traffic() as vjp:
        torch.autograd.grad(value, start, z)
    network.weights.clear()
    with Traffic() as gradient:
        state = network.f(start, network.stem(images))
        F.cross_entropy(network.classify(state.to(x.dtype)).float(), labels).backward()
    return f, vjp, gradient, dim, sum(weight.numel() for weight in network.weights)


M, MOST = GIVEN.anderson_history, max(GIVEN.forward_evaluations, GIVEN.backward_evaluations)
OURS: dict[str, Any] = {  # on the kernel cuda
    f"anderson m={M} bf16": deqfast.Anderson(max_iter=MOST, history=M, history_dtype=torch.bfloat16),
    "broyden": deqfast.Broyden(max_iter=MOST, history=MOST),
}
THEIRS = {  # passes over the state in step k of torchdeq, whose history has its dtype
    f"anderson m={M}": lambda k: 31 + 7 * min(k + 1, M) if k else 20,
    "broyden": lambda k: 72 + 6 * (k + 1) if k else 75,
}


def passes(solver: str, evaluations: int, ours: bool) -> float:
    """Passes over the state of a solve."""
    if ours and evaluations:
        return solve_passes(OURS[solver], evaluations, "cuda")
    return sum(map(THEIRS[solver], range(evaluations - 1))) if evaluations else 0


def all_reduce_seconds(gpus: int, moved: float) -> float:
    """Sum of `moved` bytes over whole nodes: a ring within each, and one between them on what each GPU then holds."""
    inside = min(gpus, GIVEN.per_node)
    nodes = gpus // inside
    within = 2 * (inside - 1) / inside * moved / GIVEN.node_rate
    return within + 2 * (nodes - 1) / nodes * moved / inside / GIVEN.network_rate


def rows_of(name: str) -> Iterator[Row]:
    """Every gradient, solver and number of GPUs, torchdeq's before ours, whose `gain` is over it."""
    f, vjp, gradient, dim, parameters = count(Network(*NETWORKS[name]), GIVEN.batch)
    for adjoint, pair, gpus in itertools.product(("implicit", "jfb"), zip(THEIRS, OURS, strict=True), (1, 8, 64)):
        forward, backward = GIVEN.forward_evaluations, GIVEN.backward_evaluations if adjoint == "implicit" else 0
        evaluated = forward * f.seconds + backward * vjp.seconds + gradient.seconds
        summed = all_reduce_seconds(gpus, GIVEN.gradient_bytes * parameters)
        steps: list[float] = []
        for provider, solver in zip(("torchdeq", "deqfast"), pair, strict=True):
            read = sum(passes(solver, evaluations, provider == "deqfast") for evaluations in (forward, backward))
            moved = read * GIVEN.batch * dim * GIVEN.state_bytes + GIVEN.optimizer_bytes * parameters
            steps.append(evaluated + moved / GIVEN.copy_rate + summed)
            rate = gpus * GIVEN.batch / steps[-1]
            row: Row = {
                "section": "internet scale (model)",
                "case": f"{name}, {adjoint}, {solver}",
                "provider": provider,
            }
            row |= {"size": name, "adjoint": adjoint, "solver": solver, "gpus": gpus, "ms": 1e3 * steps[-1]}
            row |= {"images_per_second": rate, "internet_s": GIVEN.internet / rate}
            yield row | ({"gain": steps[0] / steps[1]} if steps[1:] else {})


def main() -> None:
    inputs = {"section": "internet scale (inputs)", "provider": "model"}
    rows: list[Row] = [
        inputs | {"case": name, "value": value, "unit": unit, "source": source}
        for name, (value, unit, source) in INPUTS.items()
    ]
    rows += (row for name in NETWORKS for row in rows_of(name))
    write_record(RESULTS / "internet_scale.json", rows, remark="a model: nothing was measured")
    for row in (row for row in rows if "gain" in row):
        print(f"{row['case']}, {row['gpus']} GPUs: {row['images_per_second']:,.0f} images/s, {row['gain']:.2f}x")


if __name__ == "__main__":
    main()
