"""Time to a residual: what time_to_residual.py has recorded, over its suite of problems and for each trained cell."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .files import File, Results, Row
from .sources import origin_of
from .tables import image_by_producer
from .words import absent, duration, link, percent, table, times, tolerance, whole

COMMAND = "python benchmarks/time_to_residual.py --json benchmarks/results/residual_cpu.json --figure FILE"
SECTION = "residual"
SYNTHETIC = re.compile(r", b [\d.e-]+$")  # how the names of the suite's problems end: the scale of their injection


@dataclass(frozen=True)
class Line:
    """A solver over several problems at one tolerance.

    evaluations: median, the most allowed where the tolerance was missed; ms, f_share: total time over the problems that
    all solvers solved, and the share of f in it; gain: geometric mean over the `both` problems that torchdeq's same
    method solved, too.
    """

    provider: str
    peer: str
    problems: int
    failures: int
    evaluations: float
    ms: float | None
    f_share: float | None
    gain: float | None
    both: int


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """A line for each solver; `rows` of one tolerance."""
    failed = {row["case"] for row in rows if not row["reached"]}
    return [line_of([row for row in rows if row["provider"] == name], failed)
            for name in dict.fromkeys(row["provider"] for row in rows)]  # fmt: skip


def line_of(rows: Sequence[Row], failed: set[str]) -> Line:
    solved = [row for row in rows if row["reached"]]
    shared = [row for row in solved if row["case"] not in failed]
    gains = [row[key] for row in solved for key in row if key.startswith("gain")]
    return Line(
        rows[0]["provider"],
        rows[0]["peer"],
        len(rows),
        len(rows) - len(solved),
        statistics.median(row["evaluations"] if row["reached"] else row["most_evaluations"] for row in rows),
        sum(row["ms"] for row in shared) if shared else None,
        sum(row["f_ms"] for row in shared) / sum(row["ms_min"] for row in shared) if shared else None,
        statistics.geometric_mean(gains) if gains else None,
        len(gains),
    )


def races(file: File) -> list[tuple[str, list[Row]]]:
    """The rows of the suite, then those of every trained cell."""
    rows = [row for row in file.rows if row["section"] == SECTION]
    synthetic = [row for row in rows if SYNTHETIC.search(row["case"])]
    problems = len({row["case"] for row in synthetic})
    found = [(f"The suite of {problems} problems", synthetic)] if synthetic else []
    cells = dict.fromkeys(row["case"] for row in rows if not SYNTHETIC.search(row["case"]))
    return found + [(f"Trained cell: {name}", [row for row in rows if row["case"] == name]) for name in cells]


def by_tolerance(rows: Sequence[Row]) -> list[tuple[float, list[Row]]]:
    """The loosest first."""
    return [(tol, [row for row in rows if row["tol"] == tol]) for tol in sorted({row["tol"] for row in rows})[::-1]]


def residual_section(results: Results) -> list[str]:
    lines: list[str] = []
    for file in results.files:
        found = races(file)
        if not found:
            continue
        lines += [
            f"Each solver until the worst sample's relative residual, in float64, is within the tolerance, f included, "
            f"at most {found[0][1][0]['most_evaluations']} evaluations ({link(file.name, f'results/{file.name}')}). "
            "Gains are over torchdeq's same method, geometric means over the problems that both solve; times are "
            "totals over the problems that all solve.",
            "",
            *image_by_producer(results, f"{file.path.stem}.png", "Curves: residual against time and evaluations"),
        ]
        for title, rows in found:
            lines += [f"### {title}", "", *race_table(rows), ""]
    return lines or absent("the time that each solver takes to a residual", COMMAND)


def race_table(rows: Sequence[Row]) -> list[str]:
    header = ["solver", "residual", "failures", "median evaluations", "time", "of it f", "gain", "over problems"]
    body = [
        [line.provider, tolerance(tol), f"{line.failures} of {line.problems}", whole(line.evaluations),
         "" if line.ms is None else duration(line.ms), "" if line.f_share is None else percent(line.f_share),
         "" if line.gain is None else times(line.gain), str(line.both or "")]
        for tol, chosen in by_tolerance(rows) for line in lines_of(chosen)
    ]  # fmt: skip
    return table(header, body)


def residual_sentence(results: Results) -> str:
    """Of the suite at the tightest tolerance, for README: the first solver of ours beside each of torchdeq's."""
    for file in results.files:
        for title, rows in races(file)[:1]:
            tol, chosen = by_tolerance(rows)[-1]
            lines = {line.provider: line for line in lines_of(chosen)}
            pairs: dict[str, Line] = {}
            for line in lines.values():
                if line.peer in lines and line.peer != line.provider:
                    pairs.setdefault(line.peer, line)
            parts = [race_text(line, lines[peer]) for peer, line in pairs.items()]
            return (
                f"{title} to a relative residual of {tolerance(tol)} in every sample, f included: {'; '.join(parts)}. "
                f"Ratios are geometric means over the problems that both solve; {origin_of(file)}."
            )
    return absent("the time that each solver takes to a residual", COMMAND)[0]


def race_text(line: Line, peer: Line) -> str:
    """ "anderson m=6 is 3.10× as fast as torchdeq's and misses 1 (torchdeq's 8)"."""
    fast = f"is {times(line.gain)} as fast as torchdeq's" if line.gain else "solves none that torchdeq's solves"
    return f"{line.provider.removeprefix('deqfast ')} {fast} and misses {line.failures} (torchdeq's {peer.failures})"
