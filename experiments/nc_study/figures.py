"""The figure of a run: accuracy and neural collapse against epoch, from its result."""

from __future__ import annotations

import io

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
    """Write figure.png from the run's result."""
    result = read_json(run.result)
    curves = {model: summary["curves"] for model, summary in result["models"].items()}
    image = io.BytesIO()
    settings = result["settings"]
    figure = study_figure(curves, f"{title(result)}, width {settings['width']}, seed {settings['seed']}")
    figure.savefig(image, format="png", dpi=150)
    plt.close(figure)
    write_atomically(run.figure, image.getvalue())


def study_figure(curves: dict[str, Row], heading: str) -> Figure:
    """Four panels: test accuracy, NC1 (log scale), NC2, NC3; a colour for each network."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
    figure.suptitle(heading)
    _accuracy(axes[0], curves)
    for axis, name in zip(axes[1:], ("nc1", "nc2", "nc3"), strict=True):
        _collapse(axis, curves, name)
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small")
    axes[1].legend(fontsize="small")
    return figure


def _accuracy(axis: Axes, curves: dict[str, Row]) -> None:
    for model, columns in curves.items():
        for group, dash in DASHES.items():
            if columns[group][0] is None:
                continue
            label = f"{LABELS[model]}, {group}"
            axis.plot(columns["epoch"], columns[group], dash, color=COLOURS[model], label=label)
    axis.set_ylabel("test accuracy (%)")
    axis.set_ylim(bottom=0)


def _collapse(axis: Axes, curves: dict[str, Row], name: str) -> None:
    for model, columns in curves.items():
        pairs = zip(columns["nc"]["epoch"], columns["nc"][name], strict=True)
        measured = [pair for pair in pairs if pair[1] is not None]
        epochs, values = zip(*measured, strict=True) if measured else ((), ())
        axis.plot(epochs, values, color=COLOURS[model], marker=MARKERS[model], ms=4, label=LABELS[model])
    if name == "nc1":
        axis.set_yscale("log")
    axis.set_ylabel(name.upper())
