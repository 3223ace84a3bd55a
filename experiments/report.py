"""Report on finished runs: the paper's tables and figures next to ours, differences between arms, and the verdicts of
the protocol.

The folders and everything below them are searched for runs of cifar_balanced.py, cifar_lt.py and study.py. The script
writes a report, an appendix with other recipes, and the provenance: as .md, and as .html with all pictures in it. The
pictures are also in figures/.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from runs.options import Parser, StudyError
from runs.script import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; the exit status is 0, 1 for an error (printed in a line), 2 for bad arguments, 130 after
    Ctrl-C."""
    parser = Parser(__doc__, ("report.py runs", "report.py runs/a runs/b --out report"), "DIR [DIR ...] [options]")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder that holds runs, at any depth")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the report (default: report in the first DIR)"
    )
    parser.add_argument("--power", action="store_true", help="print what the last amendment's tests can see, and stop")
    asked = parser.parse(argv)

    def work() -> int:
        if absent := [root for root in asked.runs if not root.is_dir()]:
            raise StudyError(f"{absent[0]}: no such folder")
        if not any(any(root.rglob(name)) for root in asked.runs for name in ("settings.json", "result.json")):
            raise StudyError(f"no runs under {', '.join(map(str, asked.runs))}")
        from nc_study.reporting import power, report  # late: there may be nothing to report, and these take seconds

        return power.show(asked.runs) if asked.power else report.show(asked.runs, asked.out or asked.runs[0] / "report")

    return run_main("report.py", work, "nothing was written" if asked.power else "the report is not whole")


if __name__ == "__main__":
    sys.exit(main())
