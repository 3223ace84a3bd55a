"""The table that a run of gpu.sh ends with, and the file of its results.

python benchmarks/gpu_report.py --stages FILE --measures FILE [--results FILE ...]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from harness.files import write_json
from harness.tables import aligned, number

COLUMNS = ("us", "floor", "x", "in place", "evals", "resid", "error", "MB", "x peer")


def stages_of(path: Path) -> list[dict[str, Any]]:
    """Tab-separated lines: name, outcome, seconds, note."""
    stages = []
    for line in path.read_text().splitlines():
        name, outcome, seconds, note = line.split("\t")
        stages.append({"stage": name, "outcome": outcome, "seconds": int(seconds), "note": note})
    return stages


def slug(gpu: str) -> str:
    """The short name of a GPU: "NVIDIA H200" is h200, "NVIDIA A100-SXM4-80GB" a100."""
    words = re.sub(r"^(nvidia|amd|tesla|geforce|quadro|rtx|\s)+", "", gpu.lower())
    return re.split(r"[^a-z0-9]", words)[0] or re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def micro(ms: float | None) -> str:
    """Microseconds of a time in milliseconds, in three digits or more."""
    return "" if ms is None else f"{1e3 * ms:.{1 if ms < 0.1 else 0}f}"


def cells(row: dict[str, Any]) -> list[str]:
    peak = row.get("peak_bytes")
    return [
        micro(row.get("ms")), micro(row.get("floor_ms")), number(row.get("ratio"), ".2f"),
        micro(row.get("in_place_ms")),
        number(row.get("evaluations"), ".3g"), number(row.get("residual"), ".0e"), number(row.get("error"), ".0e"),
        number(None if peak is None else peak / 1e6, ".1f"), number(row.get("gain"), ".1f"),
    ]  # fmt: skip


def remarks(row: dict[str, Any], dry_run: bool) -> str:
    """Targets, which tiny shapes say nothing about, and notes."""
    marks = {True: "met", False: "MISSED", None: "not told"}
    parts = [f"{t['target']}: {'not judged' if dry_run else marks[t['met']]}" for t in row.get("targets", [])]
    if "problem" in row:
        parts.insert(0, f"PROBLEM {row['problem'][:200]}")
    if "skipped" in row:
        parts.insert(0, f"skipped: {row['skipped'][:120]}")
    return "; ".join([*parts, row["note"]] if "note" in row else parts)


def table(stages: list[dict[str, Any]], data: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {value}" for name, value in data.get("machine", {}).items() if name != "kernels"]
    lines += list(aligned([[s["stage"], s["outcome"], str(s["seconds"]) + " s", s["note"]] for s in stages], 2))
    rows, dry_run = data.get("rows", []), data.get("dry_run", False)
    for section in dict.fromkeys(row["section"] for row in rows):
        here = [row for row in rows if row["section"] == section]
        body = [[row["case"], row["provider"], *cells(row), remarks(row, dry_run)] for row in here]
        used = [i for i in range(len(body[0])) if any(line[i] for line in body)]
        header = [section, "", *COLUMNS, "targets, notes"]
        lines += ["", *aligned([[line[i] for i in used] for line in [header, *body]], 2)]
    targets = [target["met"] for row in rows for target in row.get("targets", [])]
    counts = f"{targets.count(True)} met, {targets.count(False)} missed, {targets.count(None)} not told"
    problems = sum("problem" in row for row in rows)
    failed = [stage["stage"] for stage in stages if stage["outcome"].startswith("FAILED")]
    lines += ["", f"stages that failed: {', '.join(failed) or 'none'}"]
    return [*lines, f"targets: {'not judged in a dry run' if dry_run else counts}; rows with a problem: {problems}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=Path, required=True)
    parser.add_argument("--measures", type=Path, required=True, help="what gpu.py wrote; it may be missing")
    parser.add_argument("--results", type=Path, action="append", default=[], help="a folder: the GPU names the file")
    given = parser.parse_args()
    stages = stages_of(given.stages)
    data = json.loads(given.measures.read_text()) if given.measures.is_file() else {}
    data = {**data, "stages": stages}
    gpu = data.get("machine", {}).get("gpu")
    for path in given.results:
        if path.is_dir() and gpu is None:
            print(f"no results in {path}: nothing was measured on a GPU")
            continue
        target = path / f"{slug(gpu)}.json" if path.is_dir() else path
        write_json(target, data)
        print(f"results: {target}")
    print("\n".join(table(stages, data)))


if __name__ == "__main__":
    main()
