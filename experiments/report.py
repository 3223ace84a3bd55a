"""Report on finished runs: the paper's tables and figures next to ours, differences between arms, and the verdicts of
the protocol.

The folders and everything below them are searched for runs of cifar_balanced.py, cifar_lt.py and study.py. The script
writes a report, an appendix with other recipes, and the provenance: as .md, and as .html with all pictures in it. The
pictures are also in figures/.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Write a report; the exit status is 0, 1 for an error (printed in a line), 2 for bad arguments, 130 after
    Ctrl-C."""
    command = "python experiments/report.py"
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"examples:\n  {command} runs\n  {command} runs/a runs/b --out report",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder that holds runs, at any depth")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the report (default: report in the first DIR)"
    )
    parser.add_argument("--power", action="store_true", help="print what the last amendment's tests can see, and stop")
    asked = parser.parse_args()
    absent = [root for root in asked.runs if not root.is_dir()]
    if absent or not any(any(root.rglob(name)) for root in asked.runs for name in ("settings.json", "result.json")):
        reason = f"{absent[0]}: no such folder" if absent else f"no runs under {', '.join(map(str, asked.runs))}"
        print(f"report.py: error: {reason}", file=sys.stderr)
        return 1
    from nc_study.reporting import power  # late: there may be nothing to report, and these take seconds
    from nc_study.reporting.report import show
    from runs.script import run_main

    if asked.power:
        return run_main("report.py", lambda: power.show(asked.runs), "nothing was written")
    return run_main(
        "report.py", lambda: show(asked.runs, asked.out or asked.runs[0] / "report"), "the report is not whole"
    )


if __name__ == "__main__":
    sys.exit(main())
