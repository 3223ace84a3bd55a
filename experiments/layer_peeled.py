"""Layer-peeled problems of Sun & Shi (NeurIPS 2024): their optima, and what the paper's theorems say of them.

Solves (7), (9) and (10) in float64, the linear DEQ through deqfast, and prints a verdict on each claim of Theorems 3.1
and 4.1, Proposition 4.2 and the bounds (22) and (33). Results replace those of an earlier run in the same --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nc_study.config import SettingsError, StudyError, add_options
from nc_study.rundir import prepare_out
from peeled.report import markdown, place, write
from peeled.settings import PeeledSettings
from peeled.study import run


def parse(argv: Sequence[str] | None = None) -> PeeledSettings:
    """Read the command line; a bad value ends the program with status 2 and a line that names it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, PeeledSettings)
    try:
        return PeeledSettings(**vars(parser.parse_args(argv)))
    except SettingsError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    settings = parse(argv)
    out = Path(settings.out)
    try:
        prepare_out(out)
        result = run(settings)
        paths = write(result, out)
    except StudyError as error:
        print(f"layer_peeled.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    print(markdown(result))
    print("\n".join(f"{row['source']}: {row['claim']}, {place(row)}: {row['text']}" for row in result["claims"]))
    print("\nwritten: " + ", ".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
