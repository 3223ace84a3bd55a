"""study.py: the runs of a table or figure, and their course: finished, failed, stopped, resumed."""

from __future__ import annotations

import re
import signal
import time

import pytest
import study as script
from nc_study import scheduler
from nc_study.config import parse
from nc_study.rundir import RunDirectory
from nc_study.scheduler import gpus_of
from runs.options import as_arguments
from study_helpers import STUDY, folder_of

ONE_EPOCH = [*STUDY, "--epochs", "1", "--no-report"]


def test_a_task_has_the_settings_that_its_script_makes_of_the_arguments(tmp_path):
    given = {"out": str(tmp_path), "epochs": 2, "kernel": "torch", "preset": "quick"}
    options = ["--table", "1,2", "--dataset", "cifar10", "--seeds", "0,4", "--arms", "explicit,deq-implicit"]
    _, tasks = script.parse([*options, *as_arguments(given)])
    assert len({task.run.path for task in tasks}) == 16
    for task in tasks:
        assert parse(task.settings.study, None, task.arguments) == task.settings
    assert [task.settings.seed for task in tasks] == [0] * 8 + [4] * 8
    assert [task.settings.arm for task in tasks] == ["explicit", "deq-implicit"] * 8
    assert {task.settings.threads for task in tasks} == {1}


def test_runs_at_a_time_take_the_next_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,8")
    assert [gpus_of(slot, 1)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["4", "7", "8", "4"]
    assert [gpus_of(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["4,7", "8,4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(scheduler.torch.cuda, "device_count", lambda: 0)
    assert gpus_of(0, 1) == {}


def results(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/result.json")}


@pytest.mark.tier("full")
def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    """Three runs, two at a time: with a damaged checkpoint, whole, and with a file in place of its folder."""
    bad, good, none = (folder_of("--epochs", "1", seed=seed) for seed in range(3))
    arguments = [*ONE_EPOCH, "--seeds", "0,1,2", "--jobs", "2", "--out", str(tmp_path)]
    assert script.main([*arguments, "--dry-run"]) == 0
    assert "3 runs" in (planned := capsys.readouterr().out) and "about 0.0 h are left" in planned
    assert not list(tmp_path.iterdir())
    run = RunDirectory(tmp_path / bad)
    run.path.mkdir()
    run.start(script.parse(arguments)[1][0].settings)
    (run.path / "last.ckpt").write_bytes(b"half")
    (tmp_path / none).touch()
    assert script.main(arguments) == 1
    printed, errors = capsys.readouterr()
    assert f"{bad}: FAILED" in printed and re.search(f"{good}: [0-9.]+ %", printed) and "[3 of 3]" in printed
    assert errors.count("\n") == 2 and f"{bad} failed" in errors and "last.ckpt cannot be read" in errors
    assert f"{none} failed: cannot be started" in errors
    before = results(tmp_path)
    assert list(before) == [good]

    (run.path / "last.ckpt").unlink()
    arguments[arguments.index("0,1,2")] = "0,1"
    assert script.main([*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert f"{bad}: to be run" in planned and f"{good}: finished" in planned
    assert script.main(arguments) == 0
    after = results(tmp_path)
    assert len(after) == 2 and before.items() <= after.items()

    (tmp_path / good / "result.json").write_text("{}")
    assert script.main([*arguments, "--kernel", "torch"]) == 1
    errors = capsys.readouterr().err
    assert ", not torch: resume it with the same" in errors and "was written by an older version" in errors


def test_sigterm_stops_the_runs_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    arguments = [*STUDY, "--epochs", "400", "--no-report", "--out", str(tmp_path)]
    log, end = tmp_path / folder_of("--epochs", "400") / "epochs.jsonl", time.monotonic() + 120

    def interrupted(seconds):
        sleep(seconds)
        assert time.monotonic() < end
        if log.exists() and log.stat().st_size:
            signal.raise_signal(signal.SIGTERM)

    sleep = time.sleep
    with monkeypatch.context() as patch:
        patch.setattr("runs.processes.time.sleep", interrupted)
        assert script.main(arguments) == 130
    assert "this command continues" in capsys.readouterr().err
    done = log.read_text().count("\n")
    time.sleep(0.5)
    assert 1 <= log.read_text().count("\n") == done < 400  # no process continues in the background
    folder = log.parent
    assert "interrupted" in (folder / "log.txt").read_text()
    assert script.main([*arguments, "--dry-run"]) == 0
    assert f"to be resumed at {done}/400" in capsys.readouterr().out


def test_under_torchrun_every_process_takes_its_share_of_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = [*ONE_EPOCH, "--seeds", "0,1,2", "--dry-run", "--spread", "--out", str(tmp_path)]
    shares = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert script.main(arguments) == 0
        shares.append(re.findall(r"seed(\d)", capsys.readouterr().out))
    assert shares == [["0", "2"], ["1"]]
    with pytest.raises(SystemExit):
        script.main(["--table", "1"])
    assert "under torchrun study.py takes --spread" in capsys.readouterr().err
