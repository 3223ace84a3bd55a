"""The figures of scaling.py, and the exponents of its curves; made from the rows of the record alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.drawn import stamp

Row = dict[str, Any]
Curve = list[tuple[float, float]]

# Okabe and Ito's palette, which stays distinct for colour-blind readers.
COLOURS = {"picard": "#009E73", "anderson": "#0072B2", "anderson bf16 history": "#56B4E9", "broyden": "#D55E00",
           "jfb": "#009E73", "implicit": "#0072B2", "unrolled": "#D55E00"}  # fmt: skip
MARKERS = {"picard": "o", "anderson": "s", "anderson bf16 history": "D", "broyden": "^",
           "jfb": "o", "implicit": "s", "unrolled": "^"}  # fmt: skip
# The panels: label of the horizontal axis, with what a row of the series holds; measure and label of its time.
LABELS = {
    "batch": "batch B  (D = {dim})",
    "dim, one sample": "state size D  (B = {batch})",
    "dim": "state size D  (B = {batch})",
    "history": "history n  (B = {batch}, D = {dim}, {iterations} iterations)",
    "iterations": "iterations  (B = {batch}, D = {dim})",
}
TRAINING_LABEL = "iterations  ({batch} samples of {dim} elements)"
PER_ITERATION = "solver time per iteration [ms]"
TIMES = {series: ("solver_ms", PER_ITERATION) for series in LABELS} | {
    "iterations": ("solve_ms", "solver time of a whole solve [ms]")
}
BREAK = 0.25  # of two slopes: less is one slope
POINTS_PER_SLOPE = 3


def slope(curve: Curve) -> tuple[float, float, float]:
    """Least squares of log y = a log x + b: (a, b, sum of squared errors)."""
    xs, ys = [math.log(x) for x, _ in curve], [math.log(y) for _, y in curve]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    a = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    b = y_mean - a * x_mean
    return a, b, sum((y - a * x - b) ** 2 for x, y in zip(xs, ys, strict=True))


def segments(curve: Curve) -> list[tuple[float, float, float]]:
    """(from, to, exponent) of y ~ x^a: one piece, or two that share a point if the slopes differ and it fits better.

    Raises ValueError for fewer than two points or values that are not positive.
    """
    curve = sorted(curve)
    if len(curve) < 2 or min(min(point) for point in curve) <= 0:
        raise ValueError(f"curve must have at least two points, all positive, got {curve}")
    whole = slope(curve)
    cuts = range(POINTS_PER_SLOPE - 1, len(curve) - POINTS_PER_SLOPE + 1)
    pairs = [(slope(curve[: cut + 1]), slope(curve[cut:]), cut) for cut in cuts]
    if pairs:
        low, high, cut = min(pairs, key=lambda pair: pair[0][2] + pair[1][2])
        if abs(low[0] - high[0]) > BREAK and low[2] + high[2] < 0.5 * whole[2]:
            return [(curve[0][0], curve[cut][0], low[0]), (curve[cut][0], curve[-1][0], high[0])]
    return [(curve[0][0], curve[-1][0], whole[0])]


def curves(rows: Iterable[Row], series: str, measure: str) -> dict[tuple[str, str], Curve]:
    """(case, provider) -> the points of a series that have a positive value of `measure`."""
    found: dict[tuple[str, str], Curve] = {}
    for row in rows:
        measured = row["section"] in ("scaling", "scaling training") and row.get(measure)
        if row.get("series") == series and measured and measured > 0:
            found.setdefault((row["case"], row["provider"]), []).append((row[row["axis"]], measured))
    return found


def exponents(rows: list[Row]) -> list[Row]:
    """A row for every curve of time and of peak memory with at least three points."""
    found = []
    for series in (*LABELS, "training"):
        for measure in (TIMES.get(series, TIMES["batch"])[0], "peak_bytes"):
            for (case, provider), curve in curves(rows, series, measure).items():
                if len(curve) < POINTS_PER_SLOPE:
                    continue
                pieces = segments(curve)
                text = ", ".join(f"{a:.2f} from {low:.0f} to {high:.0f}" for low, high, a in pieces)
                found.append(
                    {"section": "scaling exponents", "case": case, "provider": provider, "series": series,
                     "measure": measure, "segments": [list(piece) for piece in pieces], "text": text}
                )  # fmt: skip
    return found


def style(case: str, provider: str) -> dict[str, Any]:
    theirs = provider == "torchdeq"
    return {
        "color": COLOURS[case], "marker": MARKERS[case], "markersize": 4, "linewidth": 1.5,
        "linestyle": "--" if theirs else "-", "markerfacecolor": "white" if theirs else COLOURS[case],
        "label": f"{case}, {provider}",
    }  # fmt: skip


def draw_curves(axis: Any, rows: list[Row], series: str, measure: str, scale: float, label: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for (case, provider), curve in curves(rows, series, measure).items():
        xs, ys = zip(*sorted(curve), strict=True)
        axis.plot(xs, [scale * y for y in ys], **style(case, provider))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    row = next((row for row in rows if row.get("series") == series), None)
    axis.set_xlabel(label.format(**row) if row else series, fontsize=9)
    if row and row["axis"] != "dim":
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    low, high = axis.get_ylim()
    if high < 300 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", color="0.9", linewidth=0.6)
    plain(axis)


def plain(axis: Any) -> None:
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def draw_floors(axis: Any, rows: list[Row], series: str) -> None:
    """The byte floor of fp32 Anderson, from the rate of a cache to that of memory."""
    band = {row[row["axis"]]: row for row in rows if row.get("series") == series and row["case"] == "anderson"
            and "floor_ms" in row}  # fmt: skip
    xs = sorted(band)
    per_solve = TIMES[series][0] == "solve_ms"
    low, high = (
        [band[x][name] / (1 if per_solve else band[x]["evaluations"]) for x in xs]
        for name in ("cache_floor_ms", "floor_ms")
    )
    axis.fill_between(xs, low, high, color=COLOURS["anderson"], alpha=0.15, linewidth=0,
                      label="byte floor of anderson: in a cache to in memory")  # fmt: skip


def leaves_cache(rows: list[Row], series: str, case: str) -> float | None:
    """Where on the axis of a series the history of all samples outgrows the largest cache; None: nowhere within it."""
    largest = max((row["bytes"] for row in rows if row["section"] == "scaling caches"), default=None)
    held = sorted((row[row["axis"]], row["history_bytes"]) for row in rows if row.get("series") == series
                  and row["case"] == case and row.get("history_bytes"))  # fmt: skip
    for (x_low, low), (x_high, high) in zip(held, held[1:], strict=False):
        if largest is not None and low <= largest < high:
            return x_low * (x_high / x_low) ** (math.log(largest / low) / math.log(high / low))
    return None


def mark_cache(axis: Any, rows: list[Row], series: str) -> None:
    """A line where the history of fp32 Anderson leaves the cache."""
    x = leaves_cache(rows, series, "anderson")
    if x is not None:
        axis.axvline(x, color="0.6", linestyle=":", linewidth=1)
        axis.annotate("anderson's history leaves the cache", (x, 0.02), xycoords=("data", "axes fraction"),
                      rotation=90, fontsize=7, color="0.4", ha="right", va="bottom")  # fmt: skip


def draw_threads(axis: Any, rows: list[Row]) -> None:
    """Time per iteration with one thread over that with several."""
    chosen = [row for row in rows if row.get("axis") == "threads" and row.get("solver_ms", 0) > 0]
    one = {(row["series"], row["case"], row["provider"]): row["solver_ms"] for row in chosen if row["threads"] == 1}
    most = max((row["threads"] for row in chosen), default=1)
    if most == 1:
        axis.set_visible(False)
        return
    problems = sorted({row["series"] for row in chosen})
    offsets: dict[tuple[str, str], int] = {}
    for row in chosen:
        key = (row["series"], row["case"], row["provider"])
        if row["threads"] == most and key in one:
            offset = offsets.setdefault(key[1:], len(offsets))
            look = style(row["case"], row["provider"]) | {"linestyle": "", "markersize": 6}
            axis.plot(problems.index(row["series"]) + 0.08 * (offset - 3), one[key] / row["solver_ms"], **look)
    axis.axhline(1, color="0.6", linewidth=0.8)
    axis.axhline(most, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(problems)), [name.removeprefix("threads ") for name in problems], fontsize=8)
    axis.set_xlabel("problem (B, D)", fontsize=9)
    axis.set_ylabel(f"speed-up of {most} threads over 1", fontsize=9)
    axis.set_ylim(0, most + 0.5)
    plain(axis)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """scaling_time and scaling_memory as PNG and SVG; the paths written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "deqfast"  # the same rows give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines
    written = []
    for name, scale in (("scaling_time", 1.0), ("scaling_memory", 2.0**-20)):
        figure, grid = plt.subplots(2, 3, figsize=(12, 7.4), layout="constrained")
        for axis, (series, label) in zip(grid.flat, LABELS.items(), strict=False):
            measure, title = TIMES[series] if name == "scaling_time" else ("peak_bytes", "peak memory of a solve [MiB]")
            draw_curves(axis, rows, series, measure, scale, label)
            axis.set_ylabel(title, fontsize=9)
            if name == "scaling_time":
                draw_floors(axis, rows, series)
                mark_cache(axis, rows, series)
        last = grid.flat[len(LABELS)]
        if name == "scaling_time":
            draw_threads(last, rows)
        else:
            draw_curves(last, rows, "training", "peak_bytes", scale, TRAINING_LABEL)
            last.set_ylabel("peak memory of a training step [MiB]", fontsize=9)
            last.legend(fontsize=8, frameon=False)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
        for suffix, metadata in ((".png", stamp(rows)), (".svg", {"Date": None})):
            path = folder / f"{name}{suffix}"
            figure.savefig(path, dpi=120, metadata=metadata)
            written.append(path)
        plt.close(figure)
    return written
