"""Model what 1, 8 and 64 GPUs would do with MDEQ on ImageNet and on a data set of the internet's size. Not measured.

    python benchmarks/internet_scale.py

prints images per second and writes benchmarks/results/internet_scale.json, where every input is a row with its source.

A training step is taken apart into operations. Each takes the longer of its bytes at the copy rate and its
floating-point operations at a share of a matrix product's rate; launches, host waits and reading images are left out,
for deqfast and torchdeq 0.1.0 alike: the model is optimistic for both. The network's operations are counted by running
it on tensors without data; those of the solvers are deqfast's own formula and what torchdeq moves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from harness.record import RESULTS, Row, write_record
from harness.traffic import JUDGED_PASSES, multisecant_passes
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ADJOINTS, GPUS = ("implicit", "jfb"), (1, 8, 64)
SYSTEM = "H200-SXM-141GBx8 in github.com/mlcommons/inference_results_v4.1"
CONFIGURATION = "cls_mdeq_{SMALL,LARGE,XL}.yaml in github.com/locuslab/deq, MDEQ-Vision/experiments/imagenet"
RATE = "recorded on an H200 outside this repository, not by gpu.sh"


def given(value: Any, unit: str, source: str) -> Any:
    """A field with its default, and where that comes from."""
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Inputs:
    """The GPUs, their network, and what is trained."""

    copy_rate: float = given(4.3e12, "bytes/s read and written", f"a large copy, {RATE}")
    product_rate: float = given(790e12, "FLOP/s", f"a large bf16 matrix product, {RATE}")
    efficiency: float = given(0.45, "of product_rate", "ASSUMED for the convolutions of f")
    per_node: int = given(8, "GPUs", f"accelerators_per_node of {SYSTEM}")
    node_rate: float = given(450e9, "bytes/s each way", f"NVLink, 900 GB/s both ways: {SYSTEM}")
    network_rate: float = given(50e9, "bytes/s each way", f"a 400 Gbit/s InfiniBand port for each GPU: {SYSTEM}")
    batch: int = given(64, "images per GPU", f"ASSUMED: twice BATCH_SIZE_PER_GPU of {CONFIGURATION}")
    forward_evaluations: int = given(26, "evaluations", f"F_THRES of {CONFIGURATION}")
    backward_evaluations: int = given(27, "evaluations", f"B_THRES of {CONFIGURATION}")
    anderson_history: int = given(6, "pairs", "the default of both libraries")
    state_bytes: int = given(4, "bytes of an element", "the state stays in fp32 beside a bf16 f")
    optimizer_bytes: int = given(
        22, "bytes moved per parameter", "SGD: reads fp32 weight, gradient and momentum, writes two and a bf16 copy"
    )
    gradient_bytes: int = given(4, "bytes summed per parameter", "gradients in fp32")
    imagenet: int = given(1_281_167, "images", "training set of ILSVRC 2012")
    internet: int = given(5_850_000_000, "images", "LAION-5B, Schuhmann et al., NeurIPS 2022")


Operations = tuple[tuple[float, float], ...]  # (FLOPs, bytes) of each


class Network:
    """MDEQ (Bai, Koltun and Kolter, NeurIPS 2020) on tensors without data: every call of a layer makes its weights.

    Sizes and layers follow https://arxiv.org/abs/2006.08656 and the authors' configurations. Left out: weight
    normalisation (once per solve) and dropout (0 in these configurations). channels: of the four resolutions, each half
    as large as the one before, the first a quarter of the image; head: of the classifier's bottlenecks.
    """

    def __init__(
        self, name: str, channels: Sequence[int], head: Sequence[int], image: int = 224, classes: int = 1000
    ) -> None:
        self.name, self.channels, self.head, self.image, self.classes = name, channels, head, image, classes
        self.shapes = [(c, image // 4 // 2**i, image // 4 // 2**i) for i, c in enumerate(channels)]
        self.dim = sum(c * height * width for c, height, width in self.shapes)
        self.weights: list[Tensor] = []

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

    def parts(self, z: Tensor) -> list[Tensor]:
        """The resolutions of a state (B, D)."""
        parts = z.split([c * height * width for c, height, width in self.shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        """The cell on the state (B, D) in fp32, computed in the dtype of x: blocks, then sums over all resolutions."""
        levels = range(len(self.channels))
        y = [self.block(part.to(x.dtype), x if i == 0 else None) for i, part in enumerate(self.parts(z))]
        sums: list[Any] = [sum(self.transfer(y[i], i, j) for i in levels) for j in levels]  # from 0, as the authors'
        mixed = [self.norm(self.conv(F.relu(total), total.shape[1], 1), 4).flatten(1) for total in sums]
        return torch.cat(mixed, dim=1).to(z.dtype)

    def bottleneck(self, z: Tensor, planes: int) -> Tensor:
        y = self.normed(self.normed(self.normed(z, planes, 1), planes), 4 * planes, 1, relu=False)
        return F.relu(y + self.normed(z, 4 * planes, 1, relu=False), inplace=True)

    def classify(self, z: Tensor) -> Tensor:
        """Logits (B, classes) of a state (B, D)."""
        raised = [self.bottleneck(part, planes) for part, planes in zip(self.parts(z), self.head, strict=True)]
        y = raised[0]
        for part in raised[1:]:
            y = part + self.normed(y, part.shape[1], 3, 2)
        y = self.normed(y, 2048, 1).mean(dim=(2, 3))
        return F.linear(y, self.weight(self.classes, 2048), self.weight(self.classes))


NETWORKS = (
    Network("MDEQ-small", (32, 64, 128, 256), (24, 48, 96, 192)),
    Network("MDEQ-large", (80, 160, 320, 640), (32, 64, 128, 256)),
    Network("MDEQ-XL", (88, 176, 352, 704), (32, 64, 128, 256)),
)


class Traffic(TorchDispatchMode):
    """(FLOPs, bytes) of every operation that touches memory: each reads its inputs and writes its outputs once."""

    OVERWRITES = {"copy_", "fill_", "zero_"}  # their first argument is written, not read

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "detach"):
            flops = flop_registry.get(func.overloadpacket)
            read = (args[1:] if name in self.OVERWRITES else args, kwargs)
            touched = [leaf for leaf in pytree.tree_leaves((read, out)) if isinstance(leaf, Tensor)]
            moved = sum(tensor.nbytes for tensor in touched)
            self.operations.append((flops(*args, **kwargs, out_val=out) if flops else 0, moved))
        return out


def operations(call: Callable[[], Any]) -> Operations:
    with Traffic() as traffic:
        call()
    return tuple(traffic.operations)


class Counts(NamedTuple):
    """A training step's parts on `batch` images: f, its product with a vector, all that is differentiated once."""

    batch: int
    dim: int
    parameters: int
    f: Operations
    vjp: Operations
    gradient: Operations


@functools.lru_cache
def count(network: Network, batch: int) -> Counts:
    """Count a step in bf16 by running it on tensors without data."""
    images = torch.zeros(batch, 3, network.image, network.image, device="meta", dtype=torch.bfloat16)
    z, labels = torch.zeros(batch, network.dim, device="meta"), torch.zeros(batch, device="meta", dtype=torch.long)
    with torch.no_grad():
        x = network.stem(images)
        forward = operations(lambda: network.f(z, x))
    start = z.clone().requires_grad_()
    value = network.f(start, x)
    product = operations(lambda: torch.autograd.grad(value, start, z))
    network.weights.clear()

    def differentiate() -> None:
        state = network.f(start, network.stem(images))
        F.cross_entropy(network.classify(state.to(x.dtype)).float(), labels).backward()

    gradient = operations(differentiate)
    return Counts(batch, network.dim, sum(w.numel() for w in network.weights), forward, product, gradient)


def seconds_of(inputs: Inputs, counted: Operations) -> float:
    """Each operation takes the longer of its arithmetic and its bytes."""
    rate = inputs.efficiency * inputs.product_rate
    return sum(max(flops / rate, moved / inputs.copy_rate) for flops, moved in counted)


class Side(NamedTuple):
    """A library's solver. passes: over the state in step k (from 0); judged: of an evaluation that no step follows."""

    provider: str
    solver: str
    passes: Callable[[int], float]
    judged: int = 0

    def solve_passes(self, evaluations: int) -> float:
        """Those of a whole solve, after whose last evaluation there is no step; 0 of none."""
        return sum(map(self.passes, range(evaluations - 1))) + self.judged * (evaluations > 0)


M = Inputs.anderson_history
SIDES = (  # torchdeq has no other history than of the state's dtype
    (
        Side("torchdeq", f"anderson m={M}", lambda k: 31 + 7 * min(k + 1, M) if k else 20),
        Side("deqfast", f"anderson m={M} bf16", lambda k: multisecant_passes(min(k, M), 0.5), JUDGED_PASSES),
    ),
    (
        Side("torchdeq", "broyden", lambda k: 72 + 6 * (k + 1) if k else 75),
        Side("deqfast", "broyden", lambda k: multisecant_passes(k, 1), JUDGED_PASSES),
    ),
)


def all_reduce_seconds(inputs: Inputs, gpus: int, moved: float) -> float:
    """Sum of `moved` bytes over whole nodes: a ring within each, and one between them on what each GPU then holds."""
    inside = min(gpus, inputs.per_node)
    nodes = gpus // inside
    within = 2 * (inside - 1) / inside * moved / inputs.node_rate
    return within + 2 * (nodes - 1) / nodes * moved / inside / inputs.network_rate


def step(inputs: Inputs, counts: Counts, side: Side, adjoint: str, gpus: int) -> dict[str, float]:
    """Seconds of the parts of a training step on `gpus` GPUs, `counts.batch` images each."""
    forward, backward = inputs.forward_evaluations, inputs.backward_evaluations if adjoint == "implicit" else 0
    state = counts.batch * counts.dim * inputs.state_bytes
    passes = side.solve_passes(forward) + side.solve_passes(backward)
    return {
        "f": seconds_of(inputs, counts.f) * forward + seconds_of(inputs, counts.vjp) * backward,
        "solver": passes * state / inputs.copy_rate,
        "gradient": seconds_of(inputs, counts.gradient),
        "optimizer": inputs.optimizer_bytes * counts.parameters / inputs.copy_rate,
        "all_reduce": all_reduce_seconds(inputs, gpus, inputs.gradient_bytes * counts.parameters),
    }


def rows_of(inputs: Inputs, networks: Sequence[Network] = NETWORKS) -> Iterator[Row]:
    """Every size, gradient, solver and number of GPUs, torchdeq's before ours, whose `gain` is over it."""
    for network, adjoint, pair, gpus in itertools.product(networks, ADJOINTS, SIDES, GPUS):
        counts, theirs = count(network, inputs.batch), None
        for side in pair:
            seconds = sum(step(inputs, counts, side, adjoint, gpus).values())
            rate = gpus * counts.batch / seconds
            theirs = theirs or seconds
            row = {
                "section": "internet scale (model)",
                "case": f"{network.name}, {adjoint}, {side.solver}",
                "provider": side.provider,
                "size": network.name,
                "adjoint": adjoint,
                "solver": side.solver,
                "gpus": gpus,
                "batch": counts.batch,
                "dim": counts.dim,
                "parameters": counts.parameters,
                "ms": 1e3 * seconds,
                "images_per_second": rate,
                "internet_s": inputs.internet / rate,
            }
            yield row | ({"gain": theirs / seconds} if side.provider == "deqfast" else {})


def main() -> None:
    inputs, about = Inputs(), {"section": "internet scale (inputs)", "provider": "model"}
    rows: list[Row] = [about | {"case": one.name, "value": one.default, **one.metadata} for one in fields(inputs)]
    rows += rows_of(inputs)
    write_record(RESULTS / "internet_scale.json", rows, remark="a model: nothing was measured")
    for row in rows:
        if "gain" in row:
            rate = f"{row['images_per_second']:>10,.0f} images/s"
            print(f"{row['case']:<42}{row['gpus']:>3} GPUs {rate} {row['gain']:.2f}x")


if __name__ == "__main__":
    main()
