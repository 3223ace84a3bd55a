"""Report on the experiments: verdicts, tables and figures as Markdown and as one page of HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nc_study.reporting.document import render, write_page
from runs.files import prepare_out, write_atomically
from runs.processes import made, unreadable
from runs.style import png

from .frame import SOURCES, Experiment, Job, Record, jobs_of

LISTED = 12  # units not measured that are named
TITLE = "Separation and bias of deep equilibrium models: what was measured"


def write(experiments: Iterable[Experiment], preset: str, folder: Path) -> Path:
    """Write report.md, report.html and figures/ from the records of finished units; the path of the Markdown."""
    prepare_out(folder / "figures")
    parts = [part for experiment in experiments if (part := _part(experiment, preset, folder))]
    template = Path(__file__).with_name("separation.md")
    text = render(template, title=TITLE, preset=preset, sources=SOURCES.items(), parts=parts)
    return write_page(TITLE, text, folder / "report.md")


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
