"""The report on a set of runs: the paper's tables and figures beside ours, and a verdict on each of its claims."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import StudyError
from ..paper import RATIOS
from ..record import AVERAGED
from ..rundir import prepare_out, write_atomically
from . import pictures, tables
from .document import render, to_html
from .runs import Collection, collect
from .verdicts import CONFIDENCE, SEEDS_NEEDED, Judgement, judge_all

TITLE = "Deep equilibrium models through neural collapse: what was measured"


@dataclass(frozen=True)
class Report:
    """The files written, and the lines that sum them up."""

    html: Path
    markdown: Path
    summary: list[str]


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Write a report; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=_folder, metavar="RUNS", help="folder that holds runs, at any depth")
    parser.add_argument("--out", type=_folder, help="folder for the report (default: report in the first of RUNS)")
    asked = parser.parse_args(argv)
    try:
        report = write(asked.runs, asked.out or asked.runs[0] / "report")
    except StudyError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(report.summary))
    print(f"report:   {report.html}\nmarkdown: {report.markdown}\nfigures:  {report.html.parent / 'figures'}")
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def build(runs: list[Path], out: Path) -> Path:
    """Write the report on the runs under some folders into `out`; return the path of its HTML page."""
    return write(runs, out).html


def write(runs: Iterable[Path], out: Path) -> Report:
    """Write report.md, report.html and figures/ into `out`. StudyError where nothing can be read or written."""
    folders = list(runs)
    found = collect(folders)
    if not (found.groups or found.rejected or found.theory):
        raise StudyError(f"no runs under {', '.join(map(str, folders))}")
    prepare_out(out / "figures")
    judged = {group.name: judge_all(group) for group in found.groups}
    text = render(
        "report.md",
        title=TITLE,
        facts=tables.facts(found),
        groups=[
            {
                "group": group,
                "verdicts": tables.verdict_table(group, judged[group.name]),
                "tables": list(tables.paper_tables(group)),
                "variation": tables.variation(group),
                "evidence": tables.evidence_table(judged[group.name]),
                "networks": tables.network_table(group),
                "figures": pictures.draw_all(group, out / "figures", first=number == 0),
            }
            for number, group in enumerate(found.groups)
        ],
        theory=_theory(found, out),
        rejected=[(entry.path, entry.state, entry.reason) for entry in found.rejected],
        runs=tables.run_table(found.groups),
        ratios=RATIOS,
        averaged=AVERAGED,
        seeds_needed=SEEDS_NEEDED,
        level=f"{100 * CONFIDENCE:g}",
    )
    report = Report(out / "report.html", out / "report.md", _summary(found, judged))
    write_atomically(report.markdown, text.encode())
    write_atomically(report.html, to_html(TITLE, text, out).encode())
    return report


def _theory(found: Collection, out: Path) -> list[dict[str, object]]:
    """Point to the account and the figures of each result of the layer-peeled study, where they lie."""
    parts: list[dict[str, object]] = []
    for path, theory in found.theory.items():
        account = path.with_suffix(".md")
        parts.append(
            {
                "table": tables.theory_table(theory),
                "account": os.path.relpath(account, out) if account.exists() else None,
                "pictures": [os.path.relpath(one, out) for one in sorted(path.parent.glob(f"{path.stem}*.png"))],
            }
        )
    return parts


def _summary(found: Collection, judged: dict[str, list[Judgement]]) -> list[str]:
    """Tell how many runs there are, and the verdicts of each group."""
    count = sum(len(group.finished) for group in found.groups)
    lines = [f"{count} finished runs in {len(found.groups)} groups of like options"]
    lines += [f"{entry.state}: {entry.path} ({entry.reason})" for entry in found.rejected]
    for name, judgements in judged.items():
        lines += [f"\n{name}", *(f"  {one.verdict:22} {one.claim.text}" for one in judgements)]
    return [*lines, ""]
