"""The course of a script: its command line, its errors in a line, and what it says when it is interrupted."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable

from .options import StudyError


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started several processes."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return not launched() or int(os.environ["RANK"]) == 0


def command_line() -> str:
    """The command that started this process, its script by the path from the working directory if that is above it."""
    start = ["python"]
    if launched():
        start = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])]
    script = os.path.relpath(sys.argv[0])
    return shlex.join([*start, sys.argv[0] if script.startswith(os.pardir) else script, *sys.argv[1:]])


def how_to_go_on(added: str = "") -> str:
    """What to say of runs that were interrupted; `added`: what the command needs to resume them."""
    return f"what is finished is saved, this goes on with it:\n  {command_line()}{added}"


def told(script: str, work: Callable[[], int], when_interrupted: str) -> int:
    """Do the work of a script; its exit status. A StudyError becomes a line on stderr and 1; Ctrl-C becomes 130 and a
    line that says `when_interrupted`.

    SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) are like Ctrl-C.
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
