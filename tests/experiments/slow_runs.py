"""Script with runs that last until there is a file "go" in their folder.

test_runs_processes.py starts, kills and resumes it:

    python tests/experiments/slow_runs.py FOLDER one two    runs of these names
"""

import argparse
import os
import sys
import time
from pathlib import Path

from runs.processes import Run, run_all, tell_failed
from runs.script import run_main


class Slow(Run):
    """A run that notes its processes."""

    def measure(self):
        with open(self.path.with_suffix(".begun"), "a") as file:
            file.write(f"{os.getpid()}\n")
        while not (self.path.parent / "go").exists():
            time.sleep(0.05)
        with open(self.path, "a") as file:
            file.write("done\n")

    def outcome(self):
        return self.path.read_text()


def work(folder, names):
    return tell_failed("slow_runs.py", run_all([Slow(folder / f"{name}.json") for name in names], len(names)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    given = parser.parse_args()
    sys.exit(run_main("slow_runs.py", lambda: work(given.folder, given.names), ""))
