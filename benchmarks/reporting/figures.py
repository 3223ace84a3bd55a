"""Bars from numbers that the page has picked; Okabe and Ito's palette, told apart by colour-blind readers too."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.drawn import drawn_from, stamp
from harness.files import write_bytes

from .words import digits

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999",
)  # fmt: skip
COLOURS = {"deqfast": BLUE, "torchdeq": ORANGE, "eager": GREY, "1 thread": SKY, "2 threads": BLUE}
SPARE = (GREEN, PURPLE, SKY, GREY)  # of series that have no colour of their own
MARKS = (RED, BLACK)
DPI = 110
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # so that no line runs through a number


@dataclass(frozen=True)
class Bars:
    """Groups of horizontal bars; `values`: series -> one number, or None, for each label.

    marks: name -> what each label is compared with, drawn as a line across its group; unit: written after each number.
    """

    labels: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    title: str
    axis: str
    unit: str = ""
    marks: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


def shows(bars: Bars, path: Path) -> bool:
    """Whether the PNG at `path` was drawn from `bars`."""
    return bool(drawn_from(path, asdict(bars)))


def draw(bars: Bars, path: Path) -> None:
    """Write `bars` as PNG, which tells by ``shows`` what it was drawn from."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Each label takes a height of 1, of which its bars share 0.8.
    thickness = 0.8 / len(bars.values)
    height = 1.3 + len(bars.labels) * max(0.45, 0.24 * len(bars.values))
    figure, axis = plt.subplots(figsize=(7.5, height), layout="constrained")
    for index, (name, values) in enumerate(bars.values.items()):
        draw_series(axis, name, values, index, thickness, bars.unit)
    for (name, values), colour in zip(bars.marks.items(), MARKS, strict=False):
        draw_marks(axis, name, values, colour)
    axis.set_yticks(range(len(bars.labels)), bars.labels)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.08 * axis.get_xlim()[1])  # room for the numbers at the ends of the bars
    axis.set_xlabel(bars.axis)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(bars.title, x=0.01, ha="left", fontsize=11)
    handles, names = axis.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, metadata={"Software": None, **stamp(asdict(bars))})
    write_bytes(path, content.getvalue())
    plt.close(figure)


def draw_series(
    axis: Any, name: str, values: Sequence[float | None], index: int, thickness: float, unit: str
) -> None:  # fmt: skip
    places = [(label - 0.4 + (index + 0.5) * thickness, value) for label, value in enumerate(values) if value]
    if not places:
        return
    colour = COLOURS.get(name, SPARE[index % len(SPARE)])
    drawn = axis.barh([y for y, _ in places], [x for _, x in places], 0.9 * thickness, color=colour, label=name)
    axis.bar_label(drawn, [f"{digits(x)}{unit}" for _, x in places], padding=3, fontsize=8, zorder=4, bbox=WHITE)


def draw_marks(axis: Any, name: str, values: Sequence[float | None], colour: str) -> None:
    found = [(label, value) for label, value in enumerate(values) if value]
    if found:
        low, high = [y - 0.43 for y, _ in found], [y + 0.43 for y, _ in found]
        axis.vlines([x for _, x in found], low, high, color=colour, linewidth=2, label=name)
