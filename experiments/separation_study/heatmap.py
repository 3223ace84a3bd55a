"""Experiment 5: density of the features that diagonal DEQ, DEQ and FNN learn on the second GOTU task, d = 20."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from runs import style
from torch import Tensor, nn

from .claims import compare, comparison
from .diagonal import participation
from .frame import RECONSTRUCTION, Picture, Row, Section, Table, Unit, experiment, notes
from .gotu import TARGETS, DiagonalDEQ, evaluate
from .networks import DEQ, DOUBLE, FNN, Course, Trained, train
from .summary import kinds, spread

D = 20  # inputs, and features of every network
DEPTH = 3
SHARE = 0.1  # of the largest feature: those above it are counted
POINTS = 2048
TARGET = TARGETS["f2"]


@dataclass(frozen=True)
class Sizes:
    """Training."""

    course: Course
    seeds: int


@dataclass(frozen=True)
class Features:
    """Mean magnitude of each feature over points of the seen part, before and after training."""

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """Networks and their features."""

    networks: tuple[Trained, ...]
    features: tuple[Features, ...]


class Seen:
    """Uniform samples of the seen part of f2 on {-1, 1}^20."""

    scale = 1.0

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, 20) and f2(x) (B,); of x0 and x1 the three seen pairs are equally likely."""
        x = 1.0 - 2.0 * torch.randint(2, (size, D), generator=generator).to(DOUBLE)
        pairs = x.new_tensor([[1, 1], [1, -1], [-1, 1]])
        x[:, :2] = pairs[torch.randint(3, (size,), generator=generator)]
        return x, evaluate(TARGET.coefficients, x)

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error on samples of their own."""
        x, y = self.points()
        return {"seen": float((network(x) - y).square().mean())}

    def points(self) -> tuple[Tensor, Tensor]:
        """Return the same samples every time."""
        return self.batch(torch.Generator().manual_seed(2**31), POINTS)


def magnitudes(network: nn.Module, x: Tensor) -> tuple[float, ...]:
    """Return the mean magnitude of each of 20 features. The features of a DEQ are its z, of the diagonal DEQ the
    sums for x_i and -x_i, and of an FNN the inputs of its last layer."""
    with torch.no_grad():
        if isinstance(network, DiagonalDEQ):
            features = network.block(torch.cat([x, -x], 1)).unflatten(1, (2, D)).sum(1)
        elif isinstance(network, DEQ):
            features = network.block(x)
        else:
            assert isinstance(network, FNN)
            features = nn.Sequential(*list(network)[:-1])(x)
        return tuple(features.abs().mean(0).tolist())


def measure(sizes: Sizes, unit: Unit) -> Result:
    """Train the three networks; their features before training have the same seed."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "diagonal linear DEQ": lambda: DiagonalDEQ(D),
        "DEQ": lambda: DEQ(D, D),
        f"FNN, {DEPTH} hidden": partial(FNN, D, D, DEPTH),
    }
    x, _ = Seen().points()
    networks, features = [], []
    for name, make in makers.items():
        trained, network = train(name, make, Seen(), sizes.course, unit.seed)
        torch.manual_seed(unit.seed)
        features.append(Features(magnitudes(make(), x), magnitudes(network, x)))
        networks.append(trained)
    return Result(tuple(networks), tuple(features))


def tasks(sizes: Sizes) -> list[str]:
    """Return the task."""
    return ["f2"]


def density(values: tuple[float, ...]) -> tuple[float, float]:
    """Return the participation ratio, and the share of features above a tenth of the largest; 0, 0 if all are 0."""
    features = np.array(values)
    if not features.any():
        return 0.0, 0.0
    return participation(features), float((features > SHARE * features.max()).mean())


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge whether a DEQ's features are denser than the FNN's, and whether training makes them so."""
    by_seed, dense = list(results.values()), {}
    for when in ("before", "after"):
        dense[when] = [[density(getattr(each, when)) for each in result.features] for result in by_seed]
    after = [[ratio for ratio, _ in networks] for networks in dense["after"]]
    # The diagonal DEQ starts with coefficients β₊ - β₋ of 0, which have no density.
    differences = {
        "diagonal": [fnn - diagonal for diagonal, _, fnn in after],
        "deq": [fnn - deq for _, deq, fnn in after],
        "training": [start[1][0] - end[1] for start, end in zip(dense["before"], after, strict=True)],
    }
    claims = compare([comparison(f"heatmap {name}", [seeds]) for name, seeds in differences.items()])
    rows: list[Row] = []
    for index, networks in enumerate(kinds([result.networks for result in by_seed])):
        row: Row = {"network": networks[0].name, "error": spread(network.error("seen") for network in networks)}
        for when, seeds in dense.items():
            ratios, shares = zip(*(each[index] for each in seeds), strict=True)
            row |= {f"participation, {when}": spread(ratios, ".2f"), f"above a tenth, {when}": spread(shares, ".2f")}
        rows.append(row)
    note = "Medians and ranges over seeds. Above a tenth: the share of features above a tenth of the largest."
    tables = [Table("Density of the features", RECONSTRUCTION, rows, note)]
    return Section(notes("heatmap"), claims, tables, [_picture(by_seed)])


def _picture(results: list[Result]) -> Picture:
    networks = results[0].networks
    figure, axes = style.panels(len(networks), 2, height=1.2, sharex=True, sharey=True)
    for index, (row, network) in enumerate(zip(axes, networks, strict=True)):
        for axis, when in zip(row, ("before", "after"), strict=True):
            image = np.array([getattr(result.features[index], when) for result in results])
            shown = axis.imshow(image / max(image.max(), 1e-12), vmin=0, vmax=1, aspect="auto")
            axis.set(title=f"{network.name}, {when} training", xticks=range(0, D, 5), yticks=range(len(results)))
            style.bare(axis)
        row[0].set_ylabel("seed")
    figure.supxlabel("feature")
    figure.colorbar(shown, ax=axes, label="share of the largest")
    caption = "Mean magnitude of 20 features in units of the network's largest; darker is smaller. A row is a seed."
    return Picture("heatmap", "Feature heat maps", RECONSTRUCTION, caption, figure)


HEATMAP = experiment(
    __name__,
    "Feature heat maps",
    quick=Sizes(Course(200, 128, (0.003, 0.01), 2), 2),
    full=Sizes(Course(800, 128, (0.001, 0.003, 0.01), 3), 5),
)
