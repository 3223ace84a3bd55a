"""Layer-peeled problems of Sun & Shi (NeurIPS 2024): their optima, and the paper's theorems about them.

The script solves (7), (9) and (10) in float64, the linear DEQ through deqfast. It prints a verdict on each claim of
Theorems 3.1 and 4.1, Proposition 4.2 and the bounds (22) and (33). Results replace those of an earlier run in the same
--out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from peeled.problem import Part
from peeled.report import markdown
from peeled.study import PeeledSettings, run
from runs.files import prepare_out, read_record, reading, to_json, write_atomically
from runs.options import parsed
from runs.script import run_main

REMEDY = "run it without --report"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; the exit status is 0, 1 for an error (printed in a line), 2 for bad arguments, 130 after
    Ctrl-C."""
    examples = ("layer_peeled.py --e-w 1 --e-h 0.5 --seeds 0", "layer_peeled.py --report --out runs/layer_peeled")
    settings = parsed(PeeledSettings, __doc__, examples, argv)
    return run_main("layer_peeled.py", lambda: study(settings, Path(settings.out)), "nothing was written")


def study(settings: PeeledSettings, out: Path) -> int:
    """Solve, or with --report read earlier solutions; write the results, print them and return 0."""
    prepare_out(out)
    record, page = out / "layer_peeled.json", out / "layer_peeled.md"
    if not settings.report:
        write_atomically(record, to_json(run(settings)))
    result: Part = read_record(record, dict, REMEDY)
    with reading(record, REMEDY):
        text = markdown(result)
    write_atomically(page, text)
    print(f"{text}\nwritten: {record}, {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
