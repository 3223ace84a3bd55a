"""Report on the experiments: verdicts, tables and figures as Markdown and as one page of HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nc_study.reporting.document import narrow, render, to_html
from runs.files import prepare_out, reading, write_atomically
from runs.processes import made, unreadable
from runs.style import png

from .frame import SOURCES, Experiment, Job, Record, jobs_of

LISTED = 12  # units not measured that are named
TITLE = "Separation and bias of deep equilibrium models: what was measured"


def write(experiments: Iterable[Experiment], preset: str, folder: Path, keep: bool = False) -> Path:
    """Write report.md, report.html and figures/ from the records of finished units; the path of the Markdown.

    With `keep` the sections of other experiments stay as report.md has them.
    """
    prepare_out(folder / "figures")
    before = _sections(folder / "report.md") if keep else {}
    parts = [part for experiment in experiments if (part := _part(experiment, preset, folder))]
    template = Path(__file__).with_name("separation.md")
    text = narrow(render(template, title=TITLE, preset=preset, sources=SOURCES.items(), parts=parts))
    if before:
        made = _divided(text)
        text = made.pop("") + "".join(part for title, part in {**before, **made}.items() if title)
        text = text.rstrip("\n") + "\n"
    write_atomically(folder / "report.md", text)
    write_atomically(folder / "report.html", to_html(TITLE, text, folder))
    return folder / "report.md"


def _sections(page: Path) -> dict[str, str]:
    """Read the sections of an earlier report; none without one."""
    if not page.exists():
        return {}
    with reading(page, "remove it to have the report written without its other sections"):
        text = page.read_text(encoding="utf-8")
    return _divided(text)


def _divided(text: str) -> dict[str, str]:
    """Divide a report at its titles; the text before the first one has an empty name."""
    start, *parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {"": start} | {part.partition("\n")[0].removeprefix("## "): part.rstrip("\n") + "\n\n" for part in parts}


def _part(experiment: Experiment, preset: str, folder: Path) -> dict[str, Any] | None:
    """Draw the figures of an experiment; return the values for the template, or None if no unit is finished."""
    jobs, sizes = jobs_of(folder, experiment, preset), experiment.sizes[preset]
    finished = [job for job in jobs if job.finished]
    if not finished:
        return None
    records: dict[Job, Record] = {}
    left_out = unreadable(finished, lambda job: records.update({job: job.record}))
    section, unfit = made(records, lambda some: experiment.section(sizes, {each.unit: each.result for each in some}))
    left_out |= unfit
    part = {"title": experiment.title, "left_out": list(left_out.values()), "measured": section is not None}
    if section is None:
        return part
    used = [record for job, record in records.items() if job not in left_out]
    for picture in section.pictures:
        write_atomically(folder / "figures" / f"{picture.name}.png", png(picture.figure))
    missing = [str(job) for job in jobs if not job.finished]
    last = max(record.finished for record in used)
    origins = Counter((record.versions["torch"], record.machine.cpu, str(record.commit)[:7]) for record in used)
    shown = "; ".join(f"{n} with torch {torch} on {cpu} at commit {at}" for (torch, cpu, at), n in origins.items())
    return part | {
        **vars(section),
        "verdicts": list(map(vars, section.claims)),
        "missing": missing if len(missing) <= LISTED else [f"{len(missing)} units"],
        "provenance": f"{len(used)} of {len(jobs)} units: {shown}; finished {last}",
    }
