"""Runs in processes of their own: some fail, some are killed, and an interrupt ends all."""

from __future__ import annotations

import os
import signal
import time

import pytest
from runs import processes
from runs.options import StudyError
from runs.processes import Run, run_all, tell_failed


class Writing(Run):
    """Run that writes its record, or fails in the way that its name says."""

    def measure(self):
        time.sleep(0.2)
        match str(self):
            case "refused":
                raise StudyError("there is no data")
            case "broken":
                raise ZeroDivisionError("a bug")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "long":
                time.sleep(300)
            case "empty":
                return
        self.path.write_text("done")

    def outcome(self):
        return self.path.read_text()


def test_a_run_that_fails_stops_no_other_and_says_why(tmp_path, capsys):
    runs = [Writing(tmp_path / f"{name}.json") for name in ("refused", "broken", "good", "killed", "empty", "before")]
    runs[-1].path.write_text("before")
    failed = run_all(runs, 2)
    assert {str(run): why for run, why in failed.items()} == {
        "refused": "refused: error: there is no data",
        "broken": "ZeroDivisionError: a bug",
        "killed": "ended by SIGKILL (out of memory?)",
        "empty": "exit status 0",
    }
    printed = capsys.readouterr().out
    assert "good: done" in printed and printed.count("process ") == 5 and "[6 of 6] " in printed
    assert "before" not in printed and (tmp_path / "broken.log").read_text().startswith("Traceback")
    assert tell_failed("it.py", failed) == 1 and tell_failed("it.py", {}) == 0
    assert capsys.readouterr().err.count("it.py: ") == 4


def test_an_interrupt_ends_all_runs(tmp_path, monkeypatch):
    """Two are at work when it comes, one of them while it is being started."""
    children, start = [], Run.start

    def interrupted(run):
        children.append(start(run))
        if len(children) == 2:
            signal.raise_signal(signal.SIGINT)
        return children[-1]

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    monkeypatch.setattr(Run, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([Writing(tmp_path / str(number) / "long.json") for number in range(3)], 2)
    assert [child.poll() for child in children] == [-signal.SIGTERM] * 2


def test_a_run_that_does_not_end_when_asked_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    asked = []

    class Stubborn:
        def poll(self):
            return None

        def terminate(self):
            asked.append("terminate")

        def kill(self):
            asked.append("kill")

    processes._stop([Stubborn()])
    assert asked == ["terminate", "kill"]
