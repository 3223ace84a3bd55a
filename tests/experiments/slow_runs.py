"""Script with runs, named by its arguments after their folder, that last until there is a file "go" in the folder."""

import os
import sys
import time
from pathlib import Path

from runs.processes import Run, run_all, tell_failed
from runs.script import told


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


def work():
    folder, *names = sys.argv[1:]
    return tell_failed("slow_runs.py", run_all([Slow(Path(folder) / f"{name}.json") for name in names], len(names)))


if __name__ == "__main__":
    sys.exit(told("slow_runs.py", work, ""))
