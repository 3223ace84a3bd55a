"""Solvers on classical problems: 23 systems of equations, 18 fixed points of other libraries' tests, our own 24.

    python benchmarks/classical.py [--out FILE] [--only WORD] [--solver WORD] [--slow]

Prints a Markdown table for each: the evaluations that a solver needs, or why it fails. harness/classical.py says where
the problems come from. harness/contest.py solves and judges them; its ``SOLVERS`` are the columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from harness.contest import attempts, parts, table
from harness.record import Row, write_record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of all rows, with machine and commit")
    parser.add_argument("--only", default="", metavar="WORD", help="problems with this in their name")
    parser.add_argument("--solver", default="", metavar="WORD", help="solvers with this in their name")
    parser.add_argument("--slow", action="store_true", help="also solvers that take minutes for a problem")
    options = parser.parse_args()
    if options.out and not options.out.resolve().parent.is_dir():
        parser.error(f"{options.out.resolve().parent} is not a folder")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for part in parts():
        solvers = {name: one for name, one in attempts(part.with_scipy, options.slow).items() if options.solver in name}
        mine: list[Row] = []
        for case, solve in part.entries.items():
            for name, attempt in solvers.items() if options.only in case else ():
                print(f"{part.title}: {case}, {name}", file=sys.stderr)
                mine.append({"section": part.title, "case": case, "provider": name} | solve(attempt))
        if mine:
            print(table(part.title, mine), flush=True)
        rows += mine
    if options.out:
        write_record(options.out, rows)
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
