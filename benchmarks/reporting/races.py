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
BROYDEN = "deqfast broyden"  # how the names of all settings of the default solver's method start
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


def several(rows: Sequence[Row]) -> bool:
    """Whether they are of several problems: the suite's."""
    return len({row["case"] for row in rows}) > 1


def residual_section(results: Results) -> list[str]:
    lines: list[str] = []
    for file in results.files:
        found = races(file)
        if not found:
            continue
        lines += [
            f"Each solver until the worst sample's relative residual, in float64, is within the tolerance, f included, "
            f"at most {found[0][1][0]['most_evaluations']} evaluations ({link(file.name, f'results/{file.name}')}). "
            "Gains are over torchdeq's same method: of a suite geometric means over the problems that both solve, its "
            "times totals over the problems that all solve. torchdeq runs as it ships: its Anderson adds an absolute "
            "ridge to the matrix of dots, `lam=1e-4`, unless the name says another; deqfast's ridge is relative.",
            "",
            *image_by_producer(results, f"{file.path.stem}.png", "Curves: residual against time and evaluations"),
        ]
        for title, rows in found:
            lines += [f"### {title}", "", *(race_table if several(rows) else problem_table)(rows), ""]
        lines += ["### The default solver", "", default_text(found), "", *default_table(found), ""]
    return lines or absent("the time that each solver takes to a residual", COMMAND)


def race_table(rows: list[Row]) -> list[str]:
    """Over several problems."""
    header = ["solver", "residual", "failures", "median evaluations", "time", "of it f", "gain", "over problems"]
    body = [
        [line["provider"], tolerance(tol), f"{line['failures']} of {line['problems']}", whole(line["evaluations"]),
         optional(line["ms"], duration), optional(line["f_share"], percent), optional(line["gain"], times),
         str(line["gains"] or "")]
        for tol in tolerances(rows) for line in residual_report.summary(rows, tol)
    ]  # fmt: skip
    return table(header, body)


def problem_table(rows: list[Row]) -> list[str]:
    """Of one problem: each solve by itself, timed where it reaches the tolerance."""
    header = ["solver", "residual", "samples missed", "evaluations", "time", "of it f", "gain"]
    body = [
        [row["provider"], tolerance(tol), f"{row['samples_missed']} of {row['batch']}", whole(row["evaluations"]),
         optional(row.get("ms"), duration), optional(row["f_ms"] / row["ms_min"] if row["reached"] else None, percent),
         optional(row.get("gain"), times)]
        for tol in tolerances(rows) for row in rows if row["tol"] == tol
    ]  # fmt: skip
    return table(header, body)


def first_races(results: Results) -> tuple[File, list[tuple[str, list[Row]]]] | None:
    """Of the first file that has any, for README."""
    return next(((file, races(file)) for file in results.files if races(file)), None)


def residual_sentence(results: Results) -> str:
    """Of the suite at the tightest tolerance, for README: our solvers as they are by default beside torchdeq's."""
    found = first_races(results)
    if found is None:
        return absent("the time that each solver takes to a residual", COMMAND)[0]
    file, [(title, rows), *_] = found
    tol = tolerances(rows)[-1]
    lines = {line["provider"]: line for line in residual_report.summary(rows, tol)}
    peers = {row["provider"]: row["peer"] for row in rows}
    parts = [race_text(lines[name], lines[peers[name]]) for name in residual_report.DEFAULTS if name in lines]
    small = lines.get(residual_report.SMALL_RIDGE)
    ridge = f" torchdeq's Anderson with its ridge at 1e-8 misses {small['failures']}." if small else ""
    return (
        f"{title} to a relative residual of {tolerance(tol)} in every sample, f included, default settings: "
        f"{'; '.join(parts)}.{ridge} Geometric means over the problems that both solve ({origin_of([file])})."
    )


def race_text(line: Row, peer: Row) -> str:
    """ "anderson m=6 is 3.10× as fast as torchdeq's and misses 1 (torchdeq's 8)"."""
    fast = f"is {times(line['gain'])} as fast as torchdeq's" if line["gain"] else "solves none that torchdeq's solves"
    return f"{named(line)} {fast} and misses {line['failures']} (torchdeq's {peer['failures']})"


def named(row: Row) -> str:
    return row["provider"].removeprefix("deqfast ")


def default_sentence(results: Results) -> str:
    """Which solver is the default, why, and where it is not the fastest, for README."""
    found = first_races(results)
    if found is None:
        return absent("which solver misses the fewest problems", COMMAND)[0]
    file, of_file = found
    return f"{default_text(of_file)} From {origin_of([file])}."


def default_text(found: list[tuple[str, list[Row]]]) -> str:
    suite, trained = ([row for _, rows in found if several(rows) == many for row in rows] for many in (True, False))
    missed = misses(suite + trained)
    fewest = missed.get(residual_report.DEFAULT) == min(missed.values())
    verdict = f"{'as none' if fewest else 'though another'} of deqfast's solvers misses less often"
    parts = [
        misses_text(rows, what) for rows, what in ((suite, "the suite's"), (trained, "the trained cells'")) if rows
    ]
    faster = faster_texts(found)
    more = f" Others are faster on some trained cells: {listed(faster)}." if faster else ""
    tols = listed(map(tolerance, tolerances(suite + trained)))
    return f"The default solver is Broyden, {verdict}: to {tols} it misses {listed(parts)}.{more}"


def misses(rows: list[Row]) -> dict[str, int]:
    """Of each of deqfast's solvers, how many solves did not reach the tolerance."""
    names = dict.fromkeys(row["provider"] for row in rows if row["provider"].startswith("deqfast "))
    return {name: sum(not row["reached"] for row in rows if row["provider"] == name) for name in names}


def misses_text(rows: list[Row], whose: str) -> str:
    """ "1 of the suite's 48 solves (picard 22, anderson m=6 3)"."""
    missed = {name: count for name, count in misses(rows).items() if name in residual_report.DEFAULTS}
    solves = sum(row["provider"] == residual_report.DEFAULT for row in rows)
    own = missed.pop(residual_report.DEFAULT, 0)
    others = ", ".join(f"{name.removeprefix('deqfast ')} {count}" for name, count in missed.items())
    return f"{own} of {whose} {solves} solves ({others})"


def faster_texts(found: list[tuple[str, list[Row]]]) -> list[str]:
    """The trained cells for which another of deqfast's methods takes less time than the default one."""
    texts = []
    for _, rows in found:
        parts = [faster_text(rows, tol) for tol in tolerances(rows)] if not several(rows) else []
        if any(parts):
            texts.append(f"{rows[0]['case']} ({', '.join(filter(None, parts))})")
    return texts


def faster_text(rows: list[Row], tol: float) -> str:
    """ "anderson m=6 64.3 ms against 67.7 ms to 1e-3"; "" where nothing is faster than the default solver."""
    reached = {row["provider"]: row for row in rows if row["tol"] == tol and row["reached"]}
    default = reached.get(residual_report.DEFAULT)
    others = [row for name, row in reached.items() if name.startswith("deqfast ") and not name.startswith(BROYDEN)]
    fastest = min(others, key=lambda row: row["ms"], default=None)
    if default is None or fastest is None or fastest["ms"] >= default["ms"]:
        return ""
    return f"{named(fastest)} {duration(fastest['ms'])} against {duration(default['ms'])} to {tolerance(tol)}"


def kernel_text(results: Results) -> str:
    """In how many solves of trained cells our kernel is faster than plain torch, for README; "" without any."""
    found = first_races(results)
    rows = [row for _, of_one in (found[1] if found else []) if not several(of_one) for row in of_one]
    reached = {(row["case"], row["tol"], row["provider"]): row["ms"] for row in rows if row["reached"]}
    pairs = [
        (reached[case, tol, name], plain)
        for (case, tol, other), plain in reached.items()
        for name, on_torch in residual_report.ON_TORCH.items()
        if other == on_torch and (case, tol, name) in reached
    ]
    if not pairs:
        return ""
    return f", and in {sum(ours < plain for ours, plain in pairs)} of {len(pairs)} solves of trained cells"


def default_table(found: list[tuple[str, list[Row]]]) -> list[str]:
    """A line for each of deqfast's solvers: what it misses of the suite, its time on each trained cell."""
    columns = [(rows, tol) for _, rows in found for tol in tolerances(rows)]
    header = ["solver"]
    header += [f"{'suite' if several(rows) else rows[0]['case']}, {tolerance(tol)}" for rows, tol in columns]
    body = [
        [name, *(outcome([row for row in rows if (row["provider"], row["tol"]) == (name, tol)])
                 for rows, tol in columns)]
        for name in misses([row for _, rows in found for row in rows])
    ]  # fmt: skip
    words = "Of the suite how many problems are missed, of a trained cell the time, or that it is missed:"
    return [words, "", *table(header, body)]


def outcome(rows: list[Row]) -> str:
    if len(rows) == 1:
        return duration(rows[0]["ms"]) if rows[0]["reached"] else "missed"
    return f"{sum(not row['reached'] for row in rows)} of {len(rows)}" if rows else ""
