"""The table that a run of gpu.sh ends with, and the file of its results.

python benchmarks/gpu_table.py --stages FILE --parts FOLDER [--out FOLDER] [--json FILE] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from harness.files import write_json
from harness.tables import aligned, summary

RESULTS = Path(__file__).resolve().parent / "results"


def stages_of(path: Path) -> list[dict[str, Any]]:
    """Tab-separated lines: name, outcome, seconds, note."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [{"stage": name, "outcome": outcome, "seconds": int(s), "note": note} for name, outcome, s, note in lines]


def merged(folder: Path) -> dict[str, Any]:
    """One record of those in a folder; of a part that did not come to its end the rows that it has."""
    data: dict[str, Any] = {"rows": []}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.part")], key=lambda path: path.stat().st_mtime):
        record = json.loads(path.read_text())
        data = record | {"rows": data["rows"] + record.get("rows", []), "remark": None}
    return data


def slug(gpu: str) -> str:
    """The short name of a GPU: "NVIDIA H200" is h200, "NVIDIA A100-SXM4-80GB" a100."""
    words = re.sub(r"^(nvidia|amd|tesla|geforce|quadro|rtx|\s)+", "", gpu.lower())
    return re.split(r"[^a-z0-9]", words)[0] or re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def table(data: dict[str, Any], judged: bool) -> list[str]:
    """What the machine is, how the stages ended, and what was measured."""
    lines = [f"{name}: {value}" for name, value in data.get("machine", {}).items() if name != "kernels"]
    stages = [[s["stage"], s["outcome"], f"{s['seconds']} s", s["note"]] for s in data["stages"]]
    lines += [*aligned(stages, 2), "", *(summary(data["rows"], judged) if data["rows"] else ["nothing was measured"])]
    failed = [stage["stage"] for stage in data["stages"] if stage["outcome"].startswith("FAILED")]
    problems = sum("problem" in row for row in data["rows"])
    return [*lines, "", f"stages that failed: {', '.join(failed) or 'none'}; rows with a problem: {problems}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=Path, required=True)
    parser.add_argument("--parts", type=Path, required=True, help="a folder of the records that were measured")
    parser.add_argument("--out", type=Path, help="a folder that also receives the results")
    parser.add_argument("--json", type=Path, help="the file of the results, else the GPU names it")
    parser.add_argument("--dry-run", action="store_true", help="no results but to --json; no targets")
    given = parser.parse_args()
    data = merged(given.parts) | {"stages": stages_of(given.stages)}
    gpu = data.get("machine", {}).get("gpu")
    targets = [given.json] if given.json else []
    if gpu and not given.dry_run:
        folders = [given.out] if given.json else [given.out, RESULTS]
        targets += [folder / f"{slug(gpu)}.json" for folder in folders if folder]
    for target in targets:
        write_json(target, data)
        print(f"results: {target}")
    print("\n".join(table(data, judged=not given.dry_run)))


if __name__ == "__main__":
    main()
