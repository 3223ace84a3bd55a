"""Which figures there are, what of the results each shows, and where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness.drawn import drawn_from

from .figures import Bars, draw, shows
from .files import PEER, Results, Row
from .solvers import EAGER, GAIN_OVER_PEER, OURS, Headline, headlines, solver_text
from .tables import figure_by_producer, threads_text
from .verdicts import bound
from .words import typical

NAMES = {OURS: "deqfast", PEER: "torchdeq", EAGER: "eager"}


def labels(headline: Headline) -> list[str]:
    return [solver_text(case.name) for case in headline.cases]


def series(headline: Headline, key: str, scale: float = 1.0) -> dict[str, list[float | None]]:
    """A number of each case, by provider."""
    found = {}
    for provider, name in NAMES.items():
        values = [typical(case.get(provider, key)) for case in headline.cases]
        if any(values):
            found[name] = [None if value is None else scale * value for value in values]
    return found


def gains(results: Results) -> Bars | None:
    """How many times faster than torchdeq, for each number of threads, beside the targets."""
    found = headlines(results)
    if not found or not any(case.get(OURS, GAIN_OVER_PEER) for case in found[0].cases):
        return None
    names = labels(found[0])
    values: dict[str, list[float | None]] = {}
    for headline in reversed(found):
        own = {solver_text(case.name): typical(case.get(OURS, GAIN_OVER_PEER)) for case in headline.cases}
        values[threads_text(headline.threads)] = [own.get(name) for name in names]
    return Bars(
        names, values, f"Solver time per iteration at {found[0].shape()}: torchdeq's over deqfast's",
        "times faster than torchdeq 0.1.0, f subtracted; median of the runs", "×",
        {"target on two cores": [bound(case.name, "gain", PEER) for case in found[0].cases]},
    )  # fmt: skip


def floors(results: Results) -> Bars | None:
    """Time per iteration of each provider over the byte floor of its own algorithm."""
    for headline in headlines(results)[:1]:
        shares = series(headline, "floor_x")
        if not shares:
            return None
        targets = [bound(case.name, "floor_x") for case in headline.cases]
        marks: dict[str, list[float | None]] = {"target": targets, "byte floor": [1.0] * len(targets)}
        return Bars(
            labels(headline), shares, f"Solver time over its byte floor at {headline.title()}",
            "times its own byte floor, f subtracted; median of the runs", "×", marks,
        )  # fmt: skip
    return None


def memory(results: Results) -> Bars | None:
    for headline in headlines(results)[:1]:
        return Bars(
            labels(headline), series(headline, "peak_bytes", 1e-6), f"Memory of a solve at {headline.title()}",
            "MB beyond what was allocated before, at its highest",
        )  # fmt: skip
    return None


# Name of the file under results/figures -> (what it shows, for those who cannot see it; the numbers).
FIGURES: dict[str, tuple[str, Callable[[Results], Bars | None]]] = {
    "gain_over_torchdeq.png": ("Bars: how many times faster than torchdeq each solver is, targets marked", gains),
    "time_and_floor.png": (
        "Bars: solver time of deqfast, torchdeq and eager, each over its own byte floor, which is marked",
        floors,
    ),
    "memory.png": ("Bars: memory of a solve by deqfast, torchdeq and eager", memory),
}


def drawable(results: Results) -> dict[Path, Bars]:
    """What there are numbers for, by the file that shows it."""
    found = {results.folder / "figures" / name: make(results) for name, (_, make) in FIGURES.items()}
    return {path: bars for path, bars in found.items() if bars is not None}


def draw_figures(results: Results) -> list[Path]:
    """Draw what there are numbers for; the paths."""
    figures = drawable(results)
    for path, bars in figures.items():
        draw(bars, path)
    return list(figures)


def stale_figures(results: Results) -> list[Path]:
    """Those that are not there or show other numbers."""
    own = [path for path, bars in drawable(results).items() if not shows(bars, path)]
    return own + [path for path, data in figures_by_producers(results) if drawn_from(path, data) is False]


def figures_by_producers(results: Results) -> Iterator[tuple[Path, list[Row]]]:
    """Each figure that a script which measured has drawn, and of what; one without a digest cannot be judged."""
    for file in results.files:
        sections, names = {row["section"] for row in file.raw}, []
        if "scaling exponents" in sections:
            names = ["scaling_time.png", "scaling_memory.png"]
        elif file.runs or "residual" in sections:
            names = [f"{file.path.stem}.png"]
        for name in names:
            path = figure_by_producer(results, name)
            if path is not None:
                yield path, file.runs or file.raw


def image(results: Results, name: str, folder: str = "results") -> list[str]:
    """The Markdown of a figure; nothing where there are no numbers for it."""
    text, make = FIGURES[name]
    return [] if make(results) is None else [f"![{text}]({folder}/figures/{name})", ""]
