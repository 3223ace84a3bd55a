"""Course of a script: its command line, its errors in one line, and its message after an interrupt."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable

from .options import StudyError


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Return whether this is the process that prints and writes."""
    return not launched() or int(os.environ["RANK"]) == 0


def command_line() -> str:
    """Command that started this process; its script is relative to the working directory if it is below that."""
    start = ["python"]
    if launched():
        start = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])]
    script = os.path.relpath(sys.argv[0])
    return shlex.join([*start, sys.argv[0] if script.startswith(os.pardir) else script, *sys.argv[1:]])


def how_to_go_on(added: str = "") -> str:
    """Message after an interrupt; `added` is what the command needs to resume."""
    return f"what is finished is saved; this command continues:\n  {command_line()}{added}"


def told(script: str, work: Callable[[], int], when_interrupted: str) -> int:
    """Do the work of a script and return its exit status. A StudyError becomes a line on stderr and 1. Ctrl-C becomes
    130 and the line `when_interrupted`.

    SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) act like Ctrl-C.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        return work()
    except StudyError as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if is_first():
            print(f"\ninterrupted; {when_interrupted}", file=sys.stderr)
        return 130
