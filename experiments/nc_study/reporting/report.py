"""The report on a set of runs: the paper's tables and figures beside ours, and a verdict on each of its claims."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..config import StudyError
from ..paper import RATIOS
from ..record import AVERAGED
from ..rundir import prepare_out, write_atomically
from . import pictures, tables
from .document import TEMPLATES, render, to_html
from .runs import Collection, Theory, collect
from .verdicts import CONFIDENCE, SEEDS_NEEDED, judge_all

TITLE = "Deep equilibrium models through neural collapse: what was measured"


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Write a report; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folder that holds runs, at any depth")
    parser.add_argument("--out", type=Path, help="folder for the report (default: report in the first of RUNS)")
    asked = parser.parse_args(argv)
    out = asked.out or asked.runs[0] / "report"
    try:
        found = collect(asked.runs)
        page = write(found, out)
    except StudyError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(summary(found)))
    print(f"\nreport:   {page}\nmarkdown: {out / 'report.md'}\nfigures:  {out / 'figures'}")
    return 0


def build(runs: list[Path], out: Path) -> Path:
    """Write the report on the runs under some folders into `out`; return the path of its HTML page."""
    return write(collect(runs), out)


def write(found: Collection, out: Path) -> Path:
    """Write report.md, report.html and figures/ into `out`; return the page's path. StudyError where nothing can be
    written."""
    prepare_out(out / "figures")
    text = render(
        TEMPLATES / "report.md",
        title=TITLE,
        facts=tables.facts(found),
        groups=[
            {
                "group": group,
                "verdicts": tables.verdict_table(group, judge_all(group)),
                "tables": list(tables.paper_tables(group)),
                "variation": tables.variation(group),
                "networks": tables.network_table(group),
                "figures": pictures.draw_all(group, out / "figures", "" if number == 1 else f"group{number}-"),
            }
            for number, group in enumerate(found.groups, 1)
        ],
        theory=[_theory(path, theory, out) for path, theory in found.theory.items()],
        rejected=[vars(entry) for entry in found.rejected],
        runs=tables.run_table(found.groups) if found.groups else "",
        ratios=RATIOS,
        averaged=AVERAGED,
        seeds_needed=SEEDS_NEEDED,
        level=f"{100 * CONFIDENCE:g}",
    )
    write_atomically(out / "report.md", text.encode())
    write_atomically(out / "report.html", to_html(TITLE, text, out).encode())
    return out / "report.html"


def _theory(path: Path, theory: Theory, out: Path) -> dict[str, object]:
    """Sum up a result of the layer-peeled study, and point to its account and figures where they lie."""
    account = path.with_suffix(".md")
    counts = Counter(one.verdict for one in theory.claims)
    return {
        "path": os.path.relpath(path, out),
        "counts": ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "table": tables.theory_table(theory),
        "account": os.path.relpath(account, out) if account.exists() else None,
        "pictures": [os.path.relpath(one, out) for one in sorted(path.parent.glob(f"{path.stem}*.png"))],
    }


def summary(found: Collection) -> list[str]:
    """Tell how many runs there are, and the verdicts of each group."""
    count = sum(len(group.finished) for group in found.groups)
    lines = [f"{count} finished runs in {len(found.groups)} groups of like options"]
    lines += [f"{entry.state}: {entry.folder} ({entry.reason})" for entry in found.rejected]
    for group in found.groups:
        lines += [f"\n{group.name}", *(f"  {one.verdict:22} {one.claim.text}" for one in judge_all(group))]
    return lines
