"""Course of a script: its command line, its errors in one line, and its message after an interrupt."""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from .files import as_text
from .options import StudyError

PARENT = "DEQFAST_PARENT_HOLDS_STDIN"
"""Variable of the environment of scripts that end with the process that holds the other end of their stdin."""
CLOSED_PIPE = 128 + signal.SIGPIPE
STREAM_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
    words = [*start, sys.argv[0] if script.startswith(os.pardir) else script, *sys.argv[1:]]
    return shlex.join(map(as_text, words))


def resume_hint(added: str = "") -> str:
    """Message after an interrupt; `added` is what the command needs to resume."""
    return f"what is finished is saved; this command continues:\n  {command_line()}{added}"


def end_with(wait: Callable[[], object]) -> None:
    """End this process as soon as `wait`, which runs in a thread, returns: its parent has ended, even by kill -9."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_main(script: str, work: Callable[[], int], when_interrupted: str) -> int:
    """Do the work of a script and return its exit status. A StudyError becomes a line on stderr and 1. Ctrl-C becomes
    130 and the line `when_interrupted`.

    SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) act like Ctrl-C.
    A closed pipe as stdout becomes 141, as of a program that SIGPIPE ends; another failure of stdout a line and 1.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    if PARENT in os.environ:
        end_with(lambda: os.read(0, 1))
    _prepare_streams()
    try:
        status = work()
        sys.stdout.flush()
        return status
    except StudyError as error:
        return _fail(f"{script}: error: {error}", 1)
    except KeyboardInterrupt:
        return _fail(f"\ninterrupted; {when_interrupted}" if is_first() else "", 130)
    except OSError as error:
        if error.filename is not None or error.errno not in STREAM_ERRORS:
            raise
        if error.errno == errno.EPIPE:
            return _fail("", CLOSED_PIPE)
        return _fail(f"{script}: error: cannot print ({error.strerror})", 1)


def _prepare_streams() -> None:
    """Let stdout take every name: what it cannot encode becomes an escape, as on stderr. A closed stream takes all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _fail(text: str, status: int) -> int:
    """Print a line on stderr and return the status. A stream that fails now would fail again when Python ends."""
    with suppress(OSError):
        print(text, end="\n" if text else "", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status
