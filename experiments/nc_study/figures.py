"""The figure of a run: accuracy and neural collapse against epoch, from its files."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from .results import title  # noqa: E402
from .rundir import Row, RunDirectory, read_json, write_atomically  # noqa: E402

LABELS = {"explicit": "explicit", "deq": "DEQ"}
COLOURS = {"explicit": "#0072B2", "deq": "#D55E00"}
MARKERS = {"explicit": "o", "deq": "s"}
DASHES = {"overall": "-", "majority": "--", "minority": ":"}


def draw(run: RunDirectory) -> None:
    """Write figure.png from the run's result and epoch lines."""
    result = read_json(run.result)
    rows = {model: run.rows(model) for model in result["models"]}
    image = io.BytesIO()
    settings = result["settings"]
    figure = study_figure(rows, f"{title(result)}, width {settings['width']}, seed {settings['seed']}")
    figure.savefig(image, format="png", dpi=150)
    plt.close(figure)
    write_atomically(run.figure, image.getvalue())


def study_figure(rows: dict[str, list[Row]], heading: str) -> Figure:
    """Four panels: test accuracy, NC1 (log scale), NC2, NC3; a colour for each network."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
    figure.suptitle(heading)
    _accuracy(axes[0], rows)
    for axis, name in zip(axes[1:], ("nc1", "nc2", "nc3"), strict=True):
        _collapse(axis, rows, name)
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small")
    axes[1].legend(fontsize="small")
    return figure


def _accuracy(axis: Axes, rows: dict[str, list[Row]]) -> None:
    for model, lines in rows.items():
        for group, dash in DASHES.items():
            values = [line["test"][group] for line in lines]
            if values[0] is None:
                continue
            label = f"{LABELS[model]}, {group}"
            axis.plot(_epochs(lines), values, dash, color=COLOURS[model], label=label)
    axis.set_ylabel("test accuracy (%)")
    axis.set_ylim(bottom=0)


def _collapse(axis: Axes, rows: dict[str, list[Row]], name: str) -> None:
    for model, lines in rows.items():
        measured: list[Any] = [line for line in lines if line["nc"] and line["nc"][name] is not None]
        values = [line["nc"][name] for line in measured]
        axis.plot(_epochs(measured), values, color=COLOURS[model], marker=MARKERS[model], ms=4, label=LABELS[model])
    if name == "nc1":
        axis.set_yscale("log")
    axis.set_ylabel(name.upper())


def _epochs(lines: list[Row]) -> list[int]:
    return [line["epoch"] for line in lines]
