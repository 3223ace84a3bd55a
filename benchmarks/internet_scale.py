"""A model, nothing is measured: MDEQ on 1, 8 and 64 GPUs, and on a data set of the internet's size.

    python benchmarks/internet_scale.py

prints images per second and writes benchmarks/results/internet_scale.json, where every input is a row with its source.

A training step is taken apart into operations. Each takes the longer of its bytes at the copy rate and its
floating-point operations at a share of a matrix product's rate; launches, host waits and reading images are left out,
for deqfast and torchdeq 0.1.0 alike: the model is optimistic for both. The network's operations are counted by running
it on tensors without data; those of the solvers are deqfast's own formula and what torchdeq moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from harness.record import RESULTS, Row, write_record
from harness.traffic import JUDGED_PASSES, multisecant_passes
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SYSTEM = "H200-SXM-141GBx8 in github.com/mlcommons/inference_results_v4.1"
CONFIGURATION = "cls_mdeq_{SMALL,LARGE,XL}.yaml in github.com/locuslab/deq, MDEQ-Vision/experiments/imagenet"
RATE = "recorded on an H200 outside this repository, not by gpu.sh"
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
    "optimizer_bytes": (
        22,
        "bytes per parameter",
        "SGD in fp32: reads weight, gradient, momentum, writes two, one bf16",
    ),
    "gradient_bytes": (4, "bytes summed per parameter", "gradients in fp32"),
    "internet": (5_850_000_000, "images", "LAION-5B, Schuhmann et al., NeurIPS 2022"),
}
GIVEN = SimpleNamespace(**{name: value for name, (value, _, _) in INPUTS.items()})


@dataclass
class Network:
    """MDEQ (Bai, Koltun and Kolter, NeurIPS 2020) on tensors without data: every call of a layer makes its weights.

    Sizes and layers follow https://arxiv.org/abs/2006.08656 and the authors' configurations. Left out: weight
    normalisation (once per solve) and dropout (0 there). channels: of the resolutions, each half as large as the one
    before, the first a quarter of the image; head: of the classifier's bottlenecks.
    """

    name: str
    channels: tuple[int, ...]
    head: tuple[int, ...]
    image: int = 224
    weights: list[Tensor] = field(default_factory=list)

    def sizes(self) -> list[int]:
        """Elements of each resolution."""
        return [channels * (self.image // 2 ** (i + 2)) ** 2 for i, channels in enumerate(self.channels)]

    def parts(self, z: Tensor) -> list[Tensor]:
        """The resolutions (B, C, H, W) of a state (B, D)."""
        parts = enumerate(zip(z.split(self.sizes(), dim=1), self.channels, strict=True))
        return [part.reshape(len(z), channels, self.image // 2 ** (i + 2), -1) for i, (part, channels) in parts]

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
        first = self.channels[0]
        return self.normed(self.normed(self.normed(images, first, 3, 2), first, 3, 2), first, 1)

    def block(self, z: Tensor, injection: Tensor | None) -> Tensor:
        """A residual block at one resolution, five times as wide within."""
        channels = z.shape[1]
        y = self.conv(F.relu(self.norm(self.conv(z, 5 * channels)), inplace=True), channels)
        y = self.norm(y if injection is None else y + injection)
        return self.norm(F.relu(y + z, inplace=True))

    def transfer(self, y: Tensor, source: int, target: int) -> Tensor:
        """Change of resolution: 1x1 convolution and repetition up, 3x3 convolutions of stride 2 down."""
        if source > target:
            up = self.norm(self.conv(y, self.channels[target], 1))
            return F.interpolate(up, scale_factor=2 ** (source - target), mode="nearest")
        for _ in range(source + 1, target):
            y = F.relu(self.norm(self.conv(y, y.shape[1], 3, 2)), inplace=True)
        return self.norm(self.conv(y, self.channels[target], 3, 2)) if source < target else y

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        """The cell on the state (B, D) in fp32, computed in the dtype of x: blocks, then sums over all resolutions."""
        levels = range(len(self.channels))
        y = [self.block(part.to(x.dtype), x if i == 0 else None) for i, part in enumerate(self.parts(z))]
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


NETWORKS = (
    Network("MDEQ-small", (32, 64, 128, 256), (24, 48, 96, 192)),
    Network("MDEQ-large", (80, 160, 320, 640), (32, 64, 128, 256)),
    Network("MDEQ-XL", (88, 176, 352, 704), (32, 64, 128, 256)),
)


class Traffic(TorchDispatchMode):
    """Totals of the operations that touch memory: each reads its inputs and writes its outputs once.

    seconds: the sum over operations of the longer of their arithmetic and their bytes.
    """

    flops = moved = seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "detach"):
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=out) if formula else 0
            read = args[1:] if name in ("copy_", "fill_", "zero_") else args  # these only write their first argument
            moved = sum(leaf.nbytes for leaf in pytree.tree_leaves((read, kwargs, out)) if isinstance(leaf, Tensor))
            self.flops, self.moved = self.flops + flops, self.moved + moved
            self.seconds += max(flops / (GIVEN.efficiency * GIVEN.product_rate), moved / GIVEN.copy_rate)
        return out


class Counted(NamedTuple):
    """Traffic of f, of its product with a vector, and of all that is differentiated once in a training step."""

    f: Traffic
    vjp: Traffic
    gradient: Traffic
    dim: int
    parameters: int


def count(network: Network, batch: int) -> Counted:
    """Count a step in bf16 by running it on tensors without data."""
    images = torch.zeros(batch, 3, network.image, network.image, device="meta", dtype=torch.bfloat16)
    z, labels = torch.zeros(batch, sum(network.sizes()), device="meta"), torch.zeros(batch, device="meta").long()
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
    return Counted(f, vjp, gradient, z.shape[1], sum(weight.numel() for weight in network.weights))


M = GIVEN.anderson_history


class Side(NamedTuple):
    """A library's solver. passes: over the state in step k (from 0); judged: of an evaluation that no step follows."""

    provider: str
    solver: str
    passes: Callable[[int], float]
    judged: int = 0

    def solve_passes(self, evaluations: int) -> float:
        return sum(map(self.passes, range(evaluations - 1))) + (self.judged if evaluations else 0)


PAIRS = (  # torchdeq's history has the dtype of the state and no other
    (
        Side("torchdeq", f"anderson m={M}", lambda k: 31 + 7 * min(k + 1, M) if k else 20),
        Side("deqfast", f"anderson m={M} bf16", lambda k: multisecant_passes(min(k, M), 0.5), JUDGED_PASSES),
    ),
    (
        Side("torchdeq", "broyden", lambda k: 72 + 6 * (k + 1) if k else 75),
        Side("deqfast", "broyden", lambda k: multisecant_passes(k, 1), JUDGED_PASSES),
    ),
)


def all_reduce_seconds(gpus: int, moved: float) -> float:
    """Sum of `moved` bytes over whole nodes: a ring within each, and one between them on what each GPU then holds."""
    inside = min(gpus, GIVEN.per_node)
    nodes = gpus // inside
    within = 2 * (inside - 1) / inside * moved / GIVEN.node_rate
    return within + 2 * (nodes - 1) / nodes * moved / inside / GIVEN.network_rate


def step_seconds(counts: Counted, side: Side, adjoint: str, gpus: int) -> float:
    """A training step on `gpus` GPUs."""
    forward, backward = GIVEN.forward_evaluations, GIVEN.backward_evaluations if adjoint == "implicit" else 0
    passes = side.solve_passes(forward) + side.solve_passes(backward)
    moved = passes * GIVEN.batch * counts.dim * GIVEN.state_bytes + GIVEN.optimizer_bytes * counts.parameters
    evaluated = forward * counts.f.seconds + backward * counts.vjp.seconds + counts.gradient.seconds
    return evaluated + moved / GIVEN.copy_rate + all_reduce_seconds(gpus, GIVEN.gradient_bytes * counts.parameters)


def rows_of(network: Network) -> Iterator[Row]:
    """Every gradient, solver and number of GPUs, torchdeq's before ours, whose `gain` is over it."""
    counts = count(network, GIVEN.batch)
    for adjoint, pair, gpus in itertools.product(("implicit", "jfb"), PAIRS, (1, 8, 64)):
        theirs, _ = durations = [step_seconds(counts, side, adjoint, gpus) for side in pair]
        for side, duration in zip(pair, durations, strict=True):
            rate = gpus * GIVEN.batch / duration
            about = {"section": "internet scale (model)", "case": f"{network.name}, {adjoint}, {side.solver}"}
            about |= {"provider": side.provider, "size": network.name, "adjoint": adjoint, "solver": side.solver}
            gain = {"gain": theirs / duration} if side.provider == "deqfast" else {}
            found = {"ms": 1e3 * duration, "images_per_second": rate, "internet_s": GIVEN.internet / rate}
            yield about | {"gpus": gpus} | found | gain


def main() -> None:
    rows: list[Row] = [
        {"section": "internet scale (inputs)", "provider": "model", "case": name, "value": value, "unit": unit}
        | {"source": source}
        for name, (value, unit, source) in INPUTS.items()
    ]
    rows += (row for network in NETWORKS for row in rows_of(network))
    write_record(RESULTS / "internet_scale.json", rows, remark="a model: nothing was measured")
    for row in (row for row in rows if "gain" in row):
        rate = f"{row['images_per_second']:>10,.0f} images/s"
        print(f"{row['case']:<42}{row['gpus']:>3} GPUs {rate} {row['gain']:.2f}x")


if __name__ == "__main__":
    main()
