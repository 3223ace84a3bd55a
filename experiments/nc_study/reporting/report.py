"""The report on a set of runs: the paper's tables and figures beside ours, and the verdicts of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runs.files import prepare_out, write_atomically

from ..figures import png
from ..paper import RATIOS, TABLES
from ..protocol import tuning
from ..record import AVERAGED
from . import tables
from .document import TEMPLATES, render, to_html
from .geometry import geometry_rows
from .pictures import pictures
from .runs import Collection, Group, collect

TITLE = "Deep equilibrium models through neural collapse: what was measured"


def show(runs: list[Path], out: Path) -> int:
    """Write the report on the runs under some folders into `out`, and print the verdicts; 0."""
    found = collect(runs)
    page = write(found, out)
    for entry in found.rejected:
        print(f"{entry.state}: {entry.folder} ({entry.reason})")
    print(*tables.findings(found.groups), sep="\n", end="\n\n")
    for group in found.groups:
        lines = (f"  {row['']} {row['verdict']:22} {row['claim']}" for row in tables.verdict_rows(group))
        print(f"{group.name}, {len(group.finished)} finished runs", *lines, sep="\n", end="\n\n")
    print(f"report:   {page}\nmarkdown: {out / 'report.md'}\nfigures:  {out / 'figures'}")
    return 0


def write(found: Collection, out: Path) -> Path:
    """Write report.md, report.html, provenance.md and figures/ into `out`; return the page's path. StudyError where
    nothing can be written."""
    prepare_out(out / "figures")
    explained: set[str] = set()
    groups = found.groups
    runs = {run.path: run for group in groups for run in group.finished}
    text = render(
        TEMPLATES / "report.md",
        title=TITLE,
        findings=tables.findings(found.groups),
        groups=[
            {
                "group": group,
                "verdicts": tables.verdict_rows(group),
                "chosen": tables.chosen_rows(tuning()) if group.first_recipe else [],
                "differences": tables.difference_rows(group),
                "controls": tables.control_rows(group) if group.recipe_b or group.first_recipe else [],
                "results": tables.result_rows(group),
                "collapse": tables.collapse_rows(group),
                "geometry": geometry_rows(group),
                "papers": {name: tables.paper_rows(group, name) for name in TABLES if number == 1 and not group.drawn},
                "broken": tables.broken(group, group.settings),
                "figures": list(_draw(group, out, "" if number == 1 else f"group{number}-", explained)),
            }
            for number, group in enumerate(groups, 1)
        ],
        rejected=[vars(entry) for entry in found.rejected],
        ratios=RATIOS,
        averaged=AVERAGED,
    )
    rows = list(map(tables.provenance, runs.values()))
    write_atomically(out / "provenance.md", render(TEMPLATES / "provenance.md", runs=rows).encode())
    write_atomically(out / "report.md", text.encode())
    write_atomically(out / "report.html", to_html(TITLE, text, out).encode())
    return out / "report.html"


def _draw(group: Group, out: Path, prefix: str, explained: set[str]) -> Iterator[dict[str, str]]:
    """Write a group's figures under names that begin with the prefix; what the template shows of each, with those
    captions that are not explained yet."""
    for picture in pictures(group):
        path = f"figures/{prefix}{picture.name}.png"
        write_atomically(out / path, png(picture.figure))
        caption = "As above." if picture.caption in explained else picture.caption
        explained.add(picture.caption)
        yield {"title": picture.title, "caption": caption, "path": path}
