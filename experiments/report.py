"""The report on finished runs: the paper's tables and figures beside ours, with a verdict on each of its claims.

Folders are searched, with all below them, for the runs of cifar_balanced.py, cifar_lt.py and study.py. Written are
report.html (one file with everything in it), report.md, and figures/ with every figure as PNG and SVG.
"""

import argparse
import sys
from pathlib import Path

from nc_study.config import StudyError
from nc_study.report import write


def main() -> int:
    """The exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folder that holds runs, at any depth")
    parser.add_argument("--out", type=Path, help="folder for the report (default: report in the first of RUNS)")
    asked = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
