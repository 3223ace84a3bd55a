"""MODEL of a training step of an MDEQ on GPUs: its operations, their bytes and FLOPs, and how long they take.

A step is taken apart into operations; each takes the longer of its bytes at the copy rate and its floating-point
operations at a share of the rate of a matrix product. The bytes of the solver are the library's own formula and, beside
it, what torchdeq 0.1.0 moves. Left out, for both alike: launches, waits of the host, reading the images. Every input is
a field of ``Machine`` or of ``Inputs`` with its source. The rates of memory are those of a copy, which no kernel quite
reaches: the model is optimistic, for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mdeq
import torch
from harness.record import read_record
from harness.traffic import JUDGED_PASSES, multisecant_held, multisecant_passes
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ADJOINTS = ("implicit", "jfb")


def given(value: Any, unit: str, source: str) -> Any:
    """A field with its default, and where that comes from."""
    return field(default=value, metadata={"unit": unit, "source": source})


# Where the two rates of the GPU come from until gpu.sh has run on one.
ELSEWHERE = (
    "rates of an H200 recorded outside this repository by an earlier copy and matrix product (GEMM) measurement, not "
    "by gpu.sh"
)
SYSTEM = "H200-SXM-141GBx8 in github.com/mlcommons/inference_results_v4.1"
CONFIGURATION = "cls_mdeq_{SMALL,LARGE,XL}.yaml in github.com/locuslab/deq, MDEQ-Vision/experiments/imagenet"


@dataclass(frozen=True)
class Machine:
    """A GPU and its network."""

    name: str = given("H200", "", "the GPU modelled")
    # Not measured by anything in this repository: see ELSEWHERE, and ``h200``, which takes gpu.sh's where it has run.
    copy_rate: float = given(4.3e12, "bytes/s read and written", "a large copy, see `rates_from`")
    product_rate: float = given(790e12, "FLOP/s", "a large bf16 matrix product, see `rates_from`")
    rates_from: str = given(ELSEWHERE, "", "of copy_rate and product_rate")
    efficiency: float = given(0.45, "of product_rate", "ASSUMED for the convolutions of f; see the sensitivities")
    memory: float = given(141e9, "bytes", f"accelerator_memory_capacity of {SYSTEM}")
    per_node: int = given(8, "GPUs", f"accelerators_per_node of {SYSTEM}")
    node_rate: float = given(450e9, "bytes/s each way", f"NVLink, 900 GB/s both ways: {SYSTEM}")
    network_rate: float = given(50e9, "bytes/s each way", f"a 400 Gbit/s InfiniBand port for each GPU: {SYSTEM}")


def h200(path: Path) -> Machine:
    """With the rates that gpu.sh has recorded in the file `path`; with those of elsewhere where there is no such file.

    Raises ValueError where the file has no time for a rate.
    """
    if not path.is_file():
        return Machine()
    record = read_record(path)
    found = {row["case"].split()[0]: row for row in record["rows"] if row["section"] == "rates" and "ms" in row}
    if missing := {"copy", "bf16"} - found.keys():
        raise ValueError(f"{path}: section rates has no time of {', '.join(sorted(missing))}")
    copy, product = found["copy"], found["bf16"]
    return Machine(
        copy_rate=1e3 * copy["bytes"] / copy["ms"],
        product_rate=1e3 * product["flop"] / product["ms"],
        rates_from=f"rates of the {record['machine']['gpu']} measured by gpu.sh, {path.name}, commit "
        f"{record['machine']['commit'][:7]}",
    )


@dataclass(frozen=True)
class Inputs:
    """What is trained, and how."""

    batch: int = given(64, "images per GPU", f"ASSUMED: twice BATCH_SIZE_PER_GPU of {CONFIGURATION}")
    forward_evaluations: int = given(26, "evaluations", f"F_THRES of {CONFIGURATION}")
    backward_evaluations: int = given(27, "evaluations", f"B_THRES of {CONFIGURATION}")
    anderson_history: int = given(6, "pairs", "the default of both libraries")
    state_bytes: int = given(4, "bytes of an element", "the state stays in fp32 beside a bf16 f")
    parameter_bytes: int = given(14, "bytes held per parameter", "fp32 weight, gradient and momentum, bf16 copy")
    optimizer_bytes: int = given(22, "bytes moved per parameter", "SGD: reads these three, writes two and the copy")
    gradient_bytes: int = given(4, "bytes summed per parameter", "gradients in fp32")
    imagenet: int = given(1_281_167, "images", "training set of ILSVRC 2012")
    internet: int = given(5_850_000_000, "images", "LAION-5B, Schuhmann et al., NeurIPS 2022")


@dataclass(frozen=True)
class Side:
    """A library's solver: passes over the state of step k (from 0), and states held, in terms of the evaluations."""

    provider: str
    solver: str
    passes: Callable[[int], float]
    held: Callable[[int], float]

    def solve_passes(self, evaluations: int) -> float:
        """Of a whole solve; after the last evaluation there is no step, deqfast reads it to judge it."""
        return sum(self.passes(k) for k in range(evaluations - 1)) + JUDGED_PASSES * (self.provider == "deqfast")


def sides(inputs: Inputs) -> tuple[tuple[Side, Side], ...]:
    """(torchdeq, deqfast) for each solver.

    torchdeq's passes and states are those of its operations, as ``Traffic`` and torch's allocator count them; it has no
    other history than of the state's dtype.
    """
    m = inputs.anderson_history
    return (
        (
            Side("torchdeq", f"anderson m={m}", lambda k: 31 + 7 * min(k + 1, m) if k else 20, lambda n: 4 * m + 2),
            Side(
                "deqfast",
                f"anderson m={m} bf16",
                lambda k: multisecant_passes(min(k, m), 0.5),
                lambda n: multisecant_held(min(n, m), 0.5),
            ),
        ),
        (
            Side("torchdeq", "broyden", lambda k: 72 + 6 * (k + 1) if k else 75, lambda n: 10 + 2 * n),
            Side("deqfast", "broyden", lambda k: multisecant_passes(k, 1), lambda n: multisecant_held(n, 1)),
        ),
    )


_OVERWRITES = {"copy_", "fill_", "zero_"}  # their first argument is written, not read


class Traffic(TorchDispatchMode):
    """(FLOPs, bytes) of every operation that touches memory: each reads its inputs and writes its outputs once."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "detach"):
            flops = flop_registry.get(func.overloadpacket)
            read = (args[1:] if name in _OVERWRITES else args, kwargs)
            touched = [leaf for leaf in pytree.tree_leaves((read, out)) if isinstance(leaf, Tensor)]
            moved = sum(tensor.nbytes for tensor in touched)
            self.operations.append((flops(*args, **kwargs, out_val=out) if flops else 0, moved))
        return out


@dataclass(frozen=True)
class Work:
    """Operations in order, as (FLOPs, bytes)."""

    operations: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Work:
        with Traffic() as traffic:
            call()
        return cls(tuple(traffic.operations))

    @property
    def flops(self) -> float:
        return sum(flops for flops, _ in self.operations)

    def seconds(self, machine: Machine) -> float:
        return sum(max(self._parts(machine, one)) for one in self.operations)

    def compute_share(self, machine: Machine) -> float:
        """Of the time, what is spent in operations that arithmetic bounds, not memory."""
        parts = [self._parts(machine, one) for one in self.operations]
        return sum(flops for flops, moved in parts if flops > moved) / self.seconds(machine)

    @staticmethod
    def _parts(machine: Machine, operation: tuple[float, float]) -> tuple[float, float]:
        flops, moved = operation
        return flops / (machine.efficiency * machine.product_rate), moved / machine.copy_rate


@dataclass(frozen=True)
class Counts:
    """Of one training step's parts on `batch` images: f, its product with a vector, all that is differentiated once."""

    parameters: int
    dim: int
    batch: int
    f: Work
    vjp: Work
    gradient: Work
    saved_bytes: int  # what the differentiated evaluation keeps

    @property
    def transient_bytes(self) -> float:
        """What one operation of f has in its hands, at most."""
        return max(moved for _, moved in self.f.operations)


def unflat(z: Tensor, size: mdeq.Size) -> tuple[Tensor, ...]:
    """The resolutions of a state (B, D)."""
    shapes = [(c, side, side) for c, side in zip(size.channels, size.sides, strict=True)]
    parts = z.split([c * side * side for c, side, _ in shapes], dim=1)
    return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))


def flat(cell: mdeq.Cell, size: mdeq.Size, x: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """f on the state (B, D) in fp32, the form in which solvers hold it; the cell computes in `dtype`."""

    def f(z: Tensor) -> Tensor:
        out = cell([part.to(dtype) for part in unflat(z, size)], x)
        return torch.cat([part.flatten(1) for part in out], dim=1).to(z.dtype)

    return f


@functools.lru_cache
def count(size: mdeq.Size, batch: int, dtype: torch.dtype = torch.bfloat16) -> Counts:
    """Count a step by running it on tensors without data."""
    network = mdeq.Network(size).to("meta", dtype)
    images = torch.zeros(batch, 3, size.image, size.image, device="meta", dtype=dtype)
    z, labels = torch.zeros(batch, size.dim, device="meta"), torch.zeros(batch, device="meta", dtype=torch.long)
    with torch.no_grad():
        f = flat(network.cell, size, network.stem(images), dtype)
        forward = Work.of(lambda: f(z))
    start = z.clone().requires_grad_()
    value = f(start)
    product = Work.of(lambda: torch.autograd.grad(value, start, z))
    saved: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def differentiate() -> None:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            state = flat(network.cell, size, network.stem(images), dtype)(start)
            loss = F.cross_entropy(network.classify(unflat(state.to(dtype), size)).float(), labels)
        loss.backward()

    gradient = Work.of(differentiate)
    parameters = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    held = sum(storage.nbytes() for key, storage in saved.items() if key not in parameters)
    return Counts(sum(p.numel() for p in network.parameters()), size.dim, batch, forward, product, gradient, held)


def all_reduce_seconds(machine: Machine, gpus: int, moved: float) -> float:
    """Sum of `moved` bytes over all GPUs: a ring within the nodes, and one between them on what each GPU then holds.

    Raises ValueError for a number of GPUs that is neither within a node nor whole nodes.
    """
    inside = min(gpus, machine.per_node)
    if gpus < 1 or gpus % inside:
        raise ValueError(f"gpus must be 1 to {machine.per_node} or a multiple of {machine.per_node}, got {gpus}")
    nodes = gpus // inside
    within = 2 * (inside - 1) / inside * moved / machine.node_rate
    return within + 2 * (nodes - 1) / nodes * moved / inside / machine.network_rate


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of a training step, and bytes of a GPU's memory at its highest."""

    f: float
    solver: float
    gradient: float
    optimizer: float
    all_reduce: float
    memory: float
    compute_share: float

    @property
    def seconds(self) -> float:
        return self.f + self.solver + self.gradient + self.optimizer + self.all_reduce

    @property
    def bound(self) -> str:
        """What the largest part waits for."""
        arithmetic = self.compute_share * self.f
        parts = {
            "arithmetic of f": arithmetic,
            "memory traffic of f": self.f - arithmetic,
            "solver": self.solver,
            "gradient": self.gradient,
            "optimizer": self.optimizer,
            "all-reduce": self.all_reduce,
        }
        return max(parts, key=lambda name: parts[name])


def step(machine: Machine, inputs: Inputs, counts: Counts, side: Side, adjoint: str, gpus: int) -> Step:
    """MODEL of a step of `adjoint` "implicit" or "jfb" on `gpus` GPUs, `counts.batch` images each."""
    if adjoint not in ADJOINTS:
        raise ValueError(f"adjoint must be one of {', '.join(ADJOINTS)}, got {adjoint!r}")
    forward, backward = inputs.forward_evaluations, inputs.backward_evaluations if adjoint == "implicit" else 0
    state = counts.batch * counts.dim * inputs.state_bytes
    passes = side.solve_passes(forward) + side.solve_passes(backward)
    solve_bytes = state * side.held(forward)
    gradient_bytes = counts.saved_bytes + (state * side.held(backward) if backward else 0)
    f_seconds = counts.f.seconds(machine) * forward + counts.vjp.seconds(machine) * backward
    compute = counts.f.compute_share(machine) * counts.f.seconds(machine) * forward
    compute += counts.vjp.compute_share(machine) * counts.vjp.seconds(machine) * backward
    return Step(
        f=f_seconds,
        solver=passes * state / machine.copy_rate,
        gradient=counts.gradient.seconds(machine),
        optimizer=inputs.optimizer_bytes * counts.parameters / machine.copy_rate,
        all_reduce=all_reduce_seconds(machine, gpus, inputs.gradient_bytes * counts.parameters),
        memory=inputs.parameter_bytes * counts.parameters + counts.transient_bytes + max(solve_bytes, gradient_bytes),
        compute_share=compute / f_seconds,
    )
