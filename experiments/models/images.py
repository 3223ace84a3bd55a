"""A multiscale deep equilibrium model on CIFAR-10: one state of several resolutions (MDEQ), next to residual networks.

deq and deq-regularised: MDEQ with JFB, without and with a penalty on the norm of its Jacobian. explicit-parameters: a
ResNet with the same number of parameters. explicit-compute: the MDEQ's cell, applied repeatedly from 0 and
backpropagated. It costs the same as a training step of the DEQ; a differentiated evaluation counts as three. All arms
have the recipe of the ResNet: Adam, one cycle of the rate. Without --data-root, images of ten drawn shapes.
Sources: Bai, Koltun, Kolter, NeurIPS 2020 and ICML 2021.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from nc_study.data import PAD, crop_and_flip
from nc_study.models import count_parameters
from nc_study.shapes import draw_shapes
from runs import style
from runs.options import StudyError, option
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchvision.datasets import CIFAR10

import deqfast

from .frame import Example, Options, Outcome, Record, Run, descend

ARMS: tuple[str, ...] = ("deq", "deq-regularised", "explicit-parameters", "explicit-compute")
STEPS_OF_TWIN = 6
GAIN = 2.0  # of injections and blocks at the start: first solves take 9 evaluations; with 1, more than 40
SHAPES = {"train": 10_000, "test": 2_000}


@dataclass(frozen=True, kw_only=True)
class Images(Options):
    """Options of the model."""

    all_arms = ARMS

    width: int = option("model", "channels of the finest resolution; each coarser one has twice as many", 16, minimum=4)
    scales: int = option("model", "resolutions, from 16 x 16 on", 2, minimum=1, maximum=3)
    tol: float = option("model", "relative residual of a solve", 1e-2, above=0.0)
    max_iter: int = option("model", "most evaluations of a solve", 18, minimum=1)
    penalty: float = option("training", "weight of the penalty on the Jacobian in deq-regularised", 1.0, minimum=0.0)
    epochs: int = option("training", "passes over the training images", 4, minimum=1)
    images: int | None = option("training", "training images; off: all", None, minimum=1)
    batch: int = option("training", "images of a step", 128, minimum=2)
    lr: float = option("training", "largest learning rate of Adam", 3e-3, above=0.0)


class Found(NamedTuple):
    """Logits; for a DEQ also the Solution, the state and the injection."""

    logits: Tensor
    solution: deqfast.Solution | None = None
    z: Any = ()
    x: Any = ()


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(4, channels), channels)


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Resample(nn.Module):
    """Resampling from resolution `source` to `target`: strided convolutions, or a 1 x 1 convolution and repetition."""

    def __init__(self, width: int, source: int, target: int) -> None:
        super().__init__()
        self.factor = 2 ** max(0, source - target)
        steps = [conv(width * 2**k, width * 2 ** (k + 1), 3, 2) for k in range(source, target)]
        up = conv(width * 2**source, width * 2**target, 1)
        self.layers = nn.Sequential(*(steps or [up]), norm(width * 2**target))

    def forward(self, z: Tensor) -> Tensor:
        return interpolate(self.layers(z), scale_factor=self.factor) if self.factor > 1 else self.layers(z)


class Cell(nn.Module):
    """A residual block at every resolution, each with an injection. Then every resolution sums the outputs of all."""

    def __init__(self, width: int, scales: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(scales)]
        blocks = [deqfast.ResidualCell(one, groups=4) for one in widths]
        for block in blocks:
            nn.init.constant_(block.norm2.weight, GAIN)
        self.blocks = nn.ModuleList(blocks)
        pairs = [(i, j) for i in range(scales) for j in range(scales) if i != j]
        self.sends = nn.ModuleDict({f"{i}{j}": Resample(width, i, j) for i, j in pairs})
        self.norms = nn.ModuleList(norm(one) for one in widths)

    def initial_state(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, x))

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inner = [block(*both) for block, *both in zip(self.blocks, z, x, strict=True)]
        fused = []
        for j, own in enumerate(inner):
            received = [self.sends[f"{i}{j}"](one) for i, one in enumerate(inner) if i != j]
            fused.append(self.norms[j]((own + sum(received)).relu()) if received else own)
        return tuple(fused)


class Classifier(nn.Module):
    """Injections of several resolutions, the state that they drive, and a linear readout of its means."""

    def __init__(self, arm: str, options: Images) -> None:
        super().__init__()
        width, scales = options.width, options.scales
        self.steps = STEPS_OF_TWIN if arm == "explicit-compute" else 0
        self.stem = nn.Sequential(conv(3, width, 3, 2), norm(width), nn.ReLU())
        self.coarser = nn.ModuleList(Resample(width, k, k + 1) for k in range(scales - 1))
        self.gain = nn.Parameter(torch.full((scales,), GAIN))
        self.cell = Cell(width, scales)
        solver = deqfast.Broyden(options.tol, options.max_iter)
        self.block = deqfast.DEQBlock(self.cell, solver, adjoint="jfb", warn=False)
        self.readout = nn.Linear(width * (2**scales - 1), 10)

    def forward(self, images: Tensor) -> Found:
        levels = list(accumulate(self.coarser, lambda x, layer: layer(x), initial=self.stem(images)))
        x = tuple(gain * level for gain, level in zip(self.gain, levels, strict=True))
        z, solution = self.cell.initial_state(x), None
        if not self.steps:
            z, solution = self.block(x, z, return_solution=True)
        for _ in range(self.steps):
            z = self.cell(z, x)
        return Found(self.readout(torch.cat([one.mean((2, 3)) for one in z], dim=1)), solution, z, x)


class Block(nn.Module):
    """Residual block of a ResNet."""

    def __init__(self, inputs: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        first, second = conv(inputs, channels, 3, stride), conv(channels, channels)
        self.inner = nn.Sequential(first, norm(channels), nn.ReLU(), second, norm(channels))
        self.last = norm(channels)
        same = inputs == channels and stride == 1
        self.skip: nn.Module = nn.Identity() if same else conv(inputs, channels, 1, stride)

    def forward(self, z: Tensor) -> Tensor:
        return self.last((self.inner(z) + self.skip(z)).relu())


class ResNet(nn.Module):
    """ResNet of three blocks; its width gives about the number of parameters of `twin`."""

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        target, nets = count_parameters(twin), map(self.of_width, range(2, 129))
        self.layers = min(nets, key=lambda net: abs(count_parameters(net) - target))

    @staticmethod
    def of_width(width: int) -> nn.Sequential:
        widths = [width, width, 2 * width, 4 * width]
        blocks = [Block(a, b, 1 if k == 0 else 2) for k, (a, b) in enumerate(pairwise(widths))]
        mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
        return nn.Sequential(conv(3, width, 3, 2), norm(width), nn.ReLU(), *blocks, mean)

    def forward(self, images: Tensor) -> Found:
        return Found(self.layers(images))


def load(options: Images) -> tuple[str, dict[str, tuple[Tensor, Tensor]]]:
    """Name of the data, and images (N, 3, 32, 32) with labels; "valid" is a tenth of the training images."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for split, number in SHAPES.items():
        if options.data_root is None:
            array, targets = draw_shapes(np.arange(number) % 10, 10, seed=split == "test")
        else:
            try:
                data = CIFAR10(Path(options.data_root), train=split == "train")
            except (RuntimeError, OSError) as error:
                raise StudyError(f"--data-root {options.data_root}: no CIFAR-10 (cifar-10-batches-py) there") from error
            array, targets = data.data, np.asarray(data.targets)
        pixels = torch.from_numpy(array).permute(0, 3, 1, 2).float() / 255
        found[split] = (pixels - 0.47) / 0.25, torch.from_numpy(targets)
    images, labels = found["train"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out = len(order) // 10
    if (most := len(order) - held_out) < (options.images or 0):
        raise StudyError(f"--images {options.images}: there are {most}")
    chosen = order[held_out:][: options.images]
    found |= {"train": (images[chosen], labels[chosen]), "valid": (images[order[:held_out]], labels[order[:held_out]])}
    return f"{'drawn shapes' if options.data_root is None else 'CIFAR-10'}, {len(chosen)} training images", found


def augment(images: Tensor) -> Tensor:
    """Shift by up to four pixels and mirror, an image by itself."""
    offsets = torch.randint(2 * PAD + 1, (2, len(images))).T
    return crop_and_flip(images, offsets, torch.rand(len(images)) < 0.5)


def train(run: Run, build: Callable[[str, Any], nn.Module] = Classifier) -> Outcome:
    """Train an arm, a DEQ by `build`; accuracy, evaluations and spectral radius after every epoch."""
    options: Images = run.options
    name, data = load(options)
    images, labels = data["train"]
    deq: Any = build(run.arm, options)
    model = ResNet(deq) if run.arm == "explicit-parameters" else deq
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    epoch_steps = max(1, len(images) // options.batch)
    total = options.epochs * epoch_steps
    for step in run.steps(total, model=model, optimizer=optimizer):
        began, done, part = time.monotonic(), step % epoch_steps, step / total
        if not done:
            run.rows.append({"step": step, "minutes": run.rows[-1]["minutes"] if run.rows else 0.0})
        row = run.rows[-1]  # of the epoch; in the log from its first step on, which the checkpoint keeps
        optimizer.param_groups[0]["lr"] = options.lr * min(1, part / 0.2) * (0.5 + 0.5 * math.cos(math.pi * part))
        batch = torch.randint(len(images), (options.batch,))
        logits, solution, z, x = model(augment(images[batch]))
        loss = cross_entropy(logits, labels[batch], label_smoothing=0.1)
        if solution is not None:
            before, used = row.get("evaluations, training", 0.0), float(solution.iterations.float().mean())
            row["evaluations, training"] = before + (used - before) / (done + 1)
            if run.arm == "deq-regularised":
                loss = loss + options.penalty * deqfast.regularize.jacobian_penalty(deq.cell, z, x)
        descend(loss, optimizer, clip=1.0)
        row["minutes"] += (time.monotonic() - began) / 60
        if done + 1 == epoch_steps:
            row["accuracy"] = evaluate(model.eval(), *data["valid"])["accuracy"]
            if solution is not None:
                row["spectral radius"] = radius(deq, images)
            model.train()
    last = {key: value for key, value in run.rows[-1].items() if key in ("evaluations, training", "spectral radius")}
    return Outcome(model, name, evaluate(model.eval(), *data["test"]) | last, {"log": run.rows})


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy in %; for a DEQ also the evaluations per image and the share of images whose solve converged."""
    right, used, converged = [], [], []
    for some, truth in zip(images.split(500), labels.split(500), strict=True):
        logits, solution, _, _ = model(some)
        right.append((logits.argmax(dim=1) == truth).float())
        if solution is not None:
            used.append(solution.iterations.float())
            converged.append(solution.converged.float())
    found = {"accuracy": right, "evaluations": used, "converged": converged}
    return {
        key: float(torch.cat(some).mean()) * (100 if key == "accuracy" else 1) for key, some in found.items() if some
    }


@torch.no_grad()
def radius(model: Any, images: Tensor) -> float:
    """Mean spectral radius of the cell's Jacobian at 32 fixed points."""
    _, _, z, x = model(images[:32])
    return float(deqfast.regularize.spectral_radius(model.cell, z, x, iterations=30).mean())


def draw(records: Sequence[Record]) -> Figure:
    """Accuracy against the cost of training, spectral radius and evaluations against epochs.

    A line is the mean over the seeds, its band their range. An epoch costs the median of its arm's epochs, so that a
    suspended run does not stretch the axis.
    """
    figure, (axes,) = style.panels(1, 3)
    for axis, name in zip(axes, ("accuracy", "spectral radius", "evaluations, training"), strict=True):
        for arm in dict.fromkeys(record.arm for record in records):
            logs = [record.shown["log"] for record in records if record.arm == arm]
            minutes = median(b - a for log in logs for a, b in pairwise([0.0, *(row["minutes"] for row in log)]))
            if name in logs[0][0]:
                places = [(minutes if name == "accuracy" else 1) * epoch for epoch in range(1, len(logs[0]) + 1)]
                seeds = [[row[name] for row in log] for log in logs]
                style.band(axis, places, seeds, label=arm, **style.look(arm))
        axis.set(xlabel="epoch", ylabel=name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(xlabel="minutes (epochs × median)", ylabel="validation accuracy in %")
    axes[1].axhline(1.0, color=style.GREY, ls=":")
    style.legend(figure)
    return figure


EXAMPLE = Example(Images, train, draw, load)
