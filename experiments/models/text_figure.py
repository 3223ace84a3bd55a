"""Figure of text.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import Record

SIGNS = {"\n": "↵", " ": "␣"}


def draw(records: Sequence[Record]) -> Figure:
    """Losses, evaluations in training, residuals of every character of a passage, and evaluations by character."""
    figure = plt.figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "used"], ["passage"] * 2, ["needed"] * 2], height_ratios=(3, 3, 2))
    colours = {arm: f"C{i}" for i, arm in enumerate(dict.fromkeys(record.arm for record in records))}
    for record in records:
        style: dict[str, Any] = {"color": colours[record.arm], "label": None if record.seed else record.arm}
        losses = {step: loss for step, loss in enumerate(record.shown["validation"], 1) if loss is not None}
        axes["loss"].plot([*losses], [*losses.values()], **style)
        if used := record.shown.get("evaluations"):
            size = math.ceil(len(used) / 100)
            means = {k + size // 2: fmean(used[k : k + size]) for k in range(0, len(used), size)}
            axes["used"].plot([*means], [*means.values()], **style)
    axes["loss"].set(xlabel="step", ylabel="nats a character", title="loss on validation text")
    axes["loss"].legend()
    axes["used"].set(xlabel="step", ylabel="evaluations", title="solves of the DEQ in training")
    if shown := next((record.shown for record in records if record.arm == "deq"), None):
        draw_passage(axes["passage"], shown["passage"], shown["residuals"])
        draw_needed(axes["needed"], shown["needed"])
    return figure


def draw_passage(axis: Axes, passage: str, residuals: Sequence[Sequence[float]]) -> None:
    """A column a character, a row an evaluation."""
    count = len(residuals)
    picture = axis.imshow(
        [[math.log10(max(value, 1e-9)) for value in row] for row in residuals],
        aspect="auto",
        extent=(-0.5, len(passage) - 0.5, count + 0.5, 0.5),
    )
    axis.set_xticks(range(len(passage)), [SIGNS.get(one, one) for one in passage])
    axis.set(ylabel="evaluation", title="residual of every character of a validation passage")
    axis.figure.colorbar(picture, ax=axis, label="log10, relative")


def draw_needed(axis: Axes, needed: dict[str, float]) -> None:
    """A dot a character of the alphabet."""
    names = sorted(needed, key=lambda name: needed[name])
    axis.plot(range(len(names)), [needed[name] for name in names], "o")
    axis.set_xticks(range(len(names)), [SIGNS.get(one, one) for one in names])
    axis.set(ylabel="evaluations", title="until the residual of a character is at most 1e-2, means by character")
    axis.grid(axis="y", alpha=0.3)
