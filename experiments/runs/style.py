"""Style of all figures: colours, markers, sizes, type, and a figure as a PNG. Importing it sets matplotlib's defaults.

The colours suit readers with any colour vision. Sources: Okabe and Ito, Color Universal Design, 2008; for ten classes
Petroff, arXiv:2107.02270.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WIDTH = 8.2  # inches; a page shows them on 780 pixels, so that letters of 9 points are 12 pixels high
NARROW = 4.6  # inches of a figure that is readable on a phone
BLACK, GREY, BLUE, SKY = "#000000", "#777777", "#0072B2", "#56B4E9"
GREEN, ORANGE, VERMILLION, PURPLE = "#009E73", "#E69F00", "#D55E00", "#CC79A7"
CLASSES = matplotlib.color_sequences["petroff10"]
KINDS = {  # colour and marker: beginnings of names, in lower case; the DEQ itself looks the same in all figures
    (VERMILLION, "D"): ("deq", "implicit", "broyden"),
    (PURPLE, "s"): ("deq-jfb", "deq, jfb", "jfb", "hook"),
    (ORANGE, "P"): ("deq-phantom", "deq from", "diagonal linear deq", "phantom"),
    (BLUE, "o"): ("explicit", "fnn", "diagonal network", "reversible", "anderson"),
    (GREEN, "^"): ("explicit-compute", "once", "fnn, 3", "fnn, equal flops", "neumann", "picard", "plain", "untied"),
    (SKY, "v"): ("explicit-norm", "shine"),
    (GREY, "X"): ("deq-unrolled", "perceptron", "unrolled", "tied"),
    (ORANGE, "<"): ("tied-4",),
    (BLACK, ">"): ("tied-12",),
    (BLACK, ""): ("recording",),
}

matplotlib.use("Agg")  # no window, on any machine
plt.rc("axes", grid=True, titlesize="medium")
plt.rc("axes", prop_cycle=plt.cycler(color=[BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, GREY]))
plt.rc("axes.spines", right=False, top=False)
plt.rc("figure", titlesize="medium", labelsize="medium")
plt.rc("figure.constrained_layout", use=True, h_pad=0.06, w_pad=0.06)
plt.rc("font", size=9)
plt.rc("grid", alpha=0.3)
plt.rc("legend", frameon=False)
plt.rc("lines", markersize=4)
plt.rc("savefig", dpi=150)
plt.rc("xtick", labelsize="small")
plt.rc("ytick", labelsize="small")


def look(name: str) -> dict[str, Any]:
    """Colour and marker of an arm, a network, a gradient or a solver. Raises KeyError for an unknown beginning."""
    known = {start: kind for kind, starts in KINDS.items() for start in starts if name.lower().startswith(start)}
    if not known:
        raise KeyError(f"{name}: add the beginning of its name to KINDS")
    return dict(zip(("color", "marker"), known[max(known, key=len)], strict=True))


def page(height: float, width: float = WIDTH) -> Figure:
    """Empty figure in inches, by default of a page's width."""
    return plt.figure(figsize=(width, height))


def panels(rows: int = 1, columns: int = 1, height: float = 2.6, **shared: Any) -> tuple[Figure, np.ndarray]:
    """Figure of a page's width with axes (rows, columns); `height` of a row in inches, without the legend below."""
    figure = page(height * rows + 0.4)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def band(axis: Axes, x: Sequence[float], seeds: Any, **line: Any) -> None:
    """Draw the mean of seeds (S, N) against x (N,), and a band from the smallest to the largest."""
    values = np.asarray(seeds, dtype=float)
    axis.plot(x, values.mean(0), **line)
    axis.fill_between(x, values.min(0), values.max(0), color=line["color"], alpha=0.15, lw=0)


def legend(figure: Figure | SubFigure, columns: int = 4, **more: Any) -> None:
    """Explain all lines below the panels, each label once."""
    entries = [axis.get_legend_handles_labels() for axis in figure.axes]
    known = {label: handle for handles, labels in entries for handle, label in zip(handles, labels, strict=True)}
    figure.legend([*known.values()], [*known], loc="outside lower center", ncols=columns, **more)


def bare(axis: Axes) -> None:
    """Leave out grid and spines, which would cover an image."""
    axis.grid(False)
    axis.spines[:].set_visible(False)


def decimal(axis: Axis, labelled: Sequence[float] = (1, 2, 5)) -> None:
    """Label these multiples of every power of ten on a logarithmic axis by decimal numbers."""
    axis.set_major_locator(LogLocator(subs=labelled, numticks=99))  # enough that none is left out
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def png(figure: Figure, **text: str) -> bytes:
    """PNG of at most 256 colours with some entries of text; the same figure gives the same bytes. Closes the figure."""
    content, small, entries = io.BytesIO(), io.BytesIO(), PngInfo()
    figure.savefig(content, format="png", metadata={"Software": None})
    plt.close(figure)
    for name, value in text.items():
        entries.add_text(name, value)
    picture = Image.open(content).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True, pnginfo=entries)
    return small.getvalue()
