"""Time to a residual: what time_to_residual.py has recorded, over its suite of problems and for each trained cell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness import residual_report

from .files import File, Results, Row
from .sources import origin_of
from .tables import image_by_producer
from .words import absent, duration, link, listed, optional, percent, table, times, tolerance, whole

COMMAND = (
    "python benchmarks/time_to_residual.py --json benchmarks/results/residual_cpu.json "
    "--figure benchmarks/results/residual_cpu"
)
SYNTHETIC = re.compile(r", b [\d.e-]+$")  # how the names of the suite's problems end: the scale of their injection


def races(file: File) -> list[tuple[str, list[Row]]]:
    """The rows of the suite, then those of every trained cell."""
    rows = residual_report.solves(file.raw)
    synthetic = [row for row in rows if SYNTHETIC.search(row["case"])]
    problems = len({row["case"] for row in synthetic})
    found = [(f"The suite of {problems} problems", synthetic)] if synthetic else []
    cells = dict.fromkeys(row["case"] for row in rows if not SYNTHETIC.search(row["case"]))
    return found + [(f"Trained cell: {name}", [row for row in rows if row["case"] == name]) for name in cells]


def tolerances(rows: Sequence[Row]) -> list[float]:
    """The loosest first."""
    return sorted({row["tol"] for row in rows}, reverse=True)


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


def race_table(rows: list[Row]) -> list[str]:
    header = ["solver", "residual", "failures", "median evaluations", "time", "of it f", "gain", "over problems"]
    body = [
        [line["provider"], tolerance(tol), f"{line['failures']} of {line['problems']}", whole(line["evaluations"]),
         optional(line["ms"], duration), optional(line["f_share"], percent), optional(line["gain"], times),
         str(line["gains"] or "")]
        for tol in tolerances(rows) for line in residual_report.summary(rows, tol)
    ]  # fmt: skip
    return table(header, body)


def residual_sentence(results: Results) -> str:
    """Of the suite at the tightest tolerance, for README: our solvers as they are by default beside torchdeq's."""
    for file in results.files:
        for title, rows in races(file)[:1]:
            tol = tolerances(rows)[-1]
            lines = {line["provider"]: line for line in residual_report.summary(rows, tol)}
            peers = {row["provider"]: row["peer"] for row in rows}
            parts = [race_text(lines[name], lines[peers[name]]) for name in residual_report.DEFAULTS if name in lines]
            return (
                f"{title} to a relative residual of {tolerance(tol)} in every sample, f included, solvers with their "
                f"default settings: {'; '.join(parts)}. "
                f"Ratios are geometric means over the problems that both solve; {origin_of(file)}."
            )
    return absent("the time that each solver takes to a residual", COMMAND)[0]


def race_text(line: Row, peer: Row) -> str:
    """ "anderson m=6 is 3.10× as fast as torchdeq's and misses 1 (torchdeq's 8)"."""
    fast = f"is {times(line['gain'])} as fast as torchdeq's" if line["gain"] else "solves none that torchdeq's solves"
    name = line["provider"].removeprefix("deqfast ")
    return f"{name} {fast} and misses {line['failures']} (torchdeq's {peer['failures']})"


def default_sentence(results: Results) -> str:
    """How often our solvers miss over the suite and the trained cells, by default settings: why one is the default."""
    for file in results.files:
        rows = [row for _, found in races(file) for row in found]
        if not rows:
            continue
        missed = {
            name: sum(not row["reached"] for row in rows if row["provider"] == name)
            for name in residual_report.DEFAULTS
        }
        solves = sum(row["provider"] == residual_report.DEFAULT for row in rows)
        fewest = missed[residual_report.DEFAULT] == min(missed.values())
        counts = listed(f"{name.removeprefix('deqfast ')} {count}" for name, count in missed.items())
        verdict = "misses no more than any" if fewest else "is not the one that misses the fewest"
        return (
            f"The default solver is Broyden: of {solves} solves, the suite's and the trained cells' at "
            f"{listed(map(tolerance, tolerances(rows)))}, it {verdict} ({counts})."
        )
    return absent("which solver misses the fewest problems", COMMAND)[0]
