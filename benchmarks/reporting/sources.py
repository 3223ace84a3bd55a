"""What was measured, and where: the files, their machines, versions, commits and commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .files import File, Results, Row, each
from .words import link, listed, plural, span, table, whole

PAGE = "benchmarks/RESULTS.md"
ANCHOR = "#what-was-measured-and-where"  # of the section that `sources` fills


def sources(results: Results) -> list[str]:
    if not results.files:
        return ["Nothing has been measured yet: there is no JSON under `benchmarks/results`."]
    header = ["file", "holds", "machine", "threads", "commit", "date"]
    body = [[link(file.name, f"results/{file.name}"), holds(file), machine(file), threads(file), commit(file),
             day(file)] for file in results.files]  # fmt: skip
    lines = table(header, body, text=header)
    return [*lines, "", *[f"- `{file.name}`: {details(file)}" for file in results.files]]


def holds(file: File) -> str:
    """The sections of a file, each with the number of its rows."""
    counts = Counter(row["section"] for row in file.rows)
    parts = [f"{section} ({count})" for section, count in counts.items()]
    return ", ".join([*parts, f"training steps of the study ({len(file.runs)})"] if file.runs else parts)


def machine(file: File) -> str:
    parts = [file.gpu, file.machine.get("processor") or "processor not recorded"]
    cores = file.machine.get("cores")
    return ", ".join(str(part) for part in [*parts, cores and plural(cores, "core")] if part)


def threads(file: File) -> str:
    """Of the machine, or of the rows where these set them."""
    found = sorted({row["threads"] for row in file.rows if row.get("threads")} or {file.machine.get("threads", 0)})
    return listed(str(count) for count in found)


def commit(file: File) -> str:
    """The first digits, and whether the checkout differed from it."""
    sha, plus, _ = str(file.machine.get("commit", "not recorded")).partition("+")
    short = sha[:7] if len(sha) == 40 else sha
    return short + (" with changes" if plus else "")


def day(file: File) -> str:
    return file.date[:10] if file.date else "not recorded"


def versions(machine: dict[str, Any]) -> str:
    names = {"deqfast": "deqfast", "torch": "torch", "triton": "triton", "python": "Python", "cuda": "CUDA"}
    return ", ".join(f"{text} {machine[name]}" for name, text in names.items() if machine.get(name))


def ran(file: File) -> str:
    """The command that it records."""
    return f"`{file.command}`" if file.command else "command not recorded"


def details(file: File) -> str:
    """How to measure it again, with what it was measured, what else is to be known."""
    vectors = file.machine.get("vectors")
    parts = [ran(file), versions(file.machine),
             vectors and f"vectors {vectors}", file.machine.get("system"), file.machine.get("nvidia_smi")]  # fmt: skip
    text = "; ".join(part for part in parts if part)
    return text + (f". {file.remark[0].upper()}{file.remark[1:].rstrip('.')}." if file.remark else ".")


def origin_of(files: Iterable[File]) -> str:
    """Where the numbers of a sentence in README come from: the files, threads, commit and day.

    The page holds the machine, the versions and the command of each.
    """
    found: dict[str, list[str]] = {}
    for file in files:
        counts = threads(file)
        made = f"{counts} {'thread' if counts == '1' else 'threads'}, {commit(file)}, {day(file)}"
        found.setdefault(made, []).append(link(file.path.stem, PAGE + ANCHOR))
    return "; ".join(f"{', '.join(names)}: {made}" for made, names in found.items())


def number_of_runs(rows: Iterable[Row]) -> str:
    """ "1 run", "3 runs", "1 to 3 runs": what each number is the median of."""
    counts = [len(each(row["file"])) for row in rows]
    return f"{span(counts, whole)} {'run' if max(counts) == 1 else 'runs'}"


def origin_sentence(results: Results, rows: Sequence[Row]) -> str:
    """The files that a table of the page is made from."""
    files = listed(link(file.name, f"results/{file.name}") for file in results.files_of(rows))
    return f"From {files}; {number_of_runs(rows)} of each case."
