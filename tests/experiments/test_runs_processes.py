"""Runs in processes of their own: some fail, some are killed, and an interrupt ends all."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import files
from runs.files import locked
from runs.options import StudyError
from runs.processes import Run, made, run_all, tell_failed
from runs.script import CLOSED_PIPE, run_main
from study_helpers import environment, python


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


@pytest.mark.tier("full")
def test_a_run_that_fails_stops_no_other_and_says_why(tmp_path, capsys, forked_runs):
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


class Slow(Run):
    """A run that notes its processes, and lasts until there is a file "go" in its folder."""

    def measure(self):
        with open(self.path.with_suffix(".begun"), "a") as file:
            file.write(f"{os.getpid()}\n")
        while not (self.path.parent / "go").exists():
            time.sleep(0.05)
        with open(self.path, "a") as file:
            file.write("done\n")

    outcome = Writing.outcome


def slow_script(folder):
    """What the script SLOW does: runs a and b in this folder."""
    runs = [Slow(Path(folder) / f"{name}.json") for name in "ab"]
    return run_main("slow.py", lambda: tell_failed("slow.py", run_all(runs, 2)), "")


SLOW = "import sys, test_runs_processes; sys.exit(test_runs_processes.slow_script(sys.argv[1]))"


def wait_for(condition, *arguments):
    end = time.monotonic() + 120
    while not (value := condition(*arguments)):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def is_free(folder, name):
    """Whether no process works on the run."""
    try:
        with locked(folder, name):
            return True
    except StudyError:
        return False


def begun(folder, name):
    """Process ids of the workers that have begun the run."""
    path = folder / f"{name}.begun"
    return [int(word) for word in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.tier("full")
def test_workers_end_with_their_parent_and_no_run_has_two(tmp_path):
    """The parent is killed, and a worker that is stopped outlives it: only the other run is done again."""
    arguments = "-c", SLOW, str(tmp_path)
    parent = subprocess.Popen([sys.executable, *arguments], env=environment(), stdout=subprocess.DEVNULL)
    a, b = (wait_for(begun, tmp_path, name)[0] for name in "ab")
    os.kill(b, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    wait_for(is_free, tmp_path, "a")
    assert not is_free(tmp_path, "b")
    (tmp_path / "go").touch()
    again = python(*arguments)
    assert again.returncode == 1 and again.stderr.count("\n") == 1, again.stderr
    assert f"{tmp_path / 'b'}: another process is working on this run" in again.stderr
    assert (tmp_path / "a.json").read_text() == "done\n" and len(begun(tmp_path, "a")) == 2
    (tmp_path / "go").unlink()  # so that b can end only because its parent has
    os.kill(b, signal.SIGCONT)
    wait_for(is_free, tmp_path, "b")
    assert begun(tmp_path, "b") == [b] and not (tmp_path / "b.json").exists()


def test_a_run_that_another_process_has_finished_is_not_done_again(tmp_path):
    run = Writing(tmp_path / "broken.json")
    run.path.write_text("done")
    run.work()


@pytest.mark.parametrize(("kind", "status"), [("closed pipe", CLOSED_PIPE), ("full disk", 1)])
@pytest.mark.parametrize("lines", [1, 10_000])
def test_output_that_cannot_be_written_ends_a_script_without_a_traceback(kind, status, lines, monkeypatch, capsys):
    if kind == "closed pipe":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115  # closed below
        assert run_main("it.py", lambda: print("line\n" * lines), "") == status
        sys.stdout.close()  # what Python does at its end, without an error
    error = "it.py: error: cannot print (No space left on device)\n"
    assert capsys.readouterr().err == (error if kind == "full disk" else "")


def test_writers_of_the_same_file_do_not_meet_and_leave_nothing(tmp_path):
    path, rounds = tmp_path / "one.json", 50
    contents = [bytes([letter]) * 10_000 for letter in b"abcd"]

    def write(content):
        for _ in range(rounds):
            files.write_atomically(path, content)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert path.read_bytes() in contents and list(tmp_path.iterdir()) == [path]


def test_temporary_files_of_a_kill_are_removed_by_a_later_write(tmp_path):
    old, new, other = (tmp_path / name for name in ("one.json.0a.tmp", "one.json.0b.tmp", "two.json.0a.tmp"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    files.write_atomically(tmp_path / "one.json", b"content")
    assert {*tmp_path.iterdir()} == {tmp_path / "one.json", new, other}


def test_a_damaged_record_is_left_out_and_a_fault_of_the_code_is_raised():
    records = {Writing(Path(f"{n}.json")): n for n in range(3)}
    total, unfit = made(records, lambda numbers: sum(6 // n for n in numbers))
    assert total == 9 and [run.path.name for run in unfit] == ["0.json"]
    with pytest.raises(NameError):
        made(records, lambda numbers: no_such_name)  # noqa: F821  # the fault that must be raised
