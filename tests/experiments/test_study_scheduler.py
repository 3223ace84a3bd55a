"""study.py: which runs stand behind a table or figure, and what becomes of them: finished, failed, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import study as script
from nc_study import scheduler
from nc_study.config import Setting, parse
from nc_study.paper import settings_of
from nc_study.rundir import RunDirectory
from nc_study.scheduler import gpus_of, plan
from study_helpers import EXPERIMENTS, TINY, python

QUICK = ["--figure", "2", *[word for word in TINY if word not in ("--ratio", "10")], "--model", "explicit"]
ONE_EPOCH = [*QUICK, "--epochs", "1", "--no-report"]
RUN = "shapes-k3-r10-quick-explicit-broyden-jfb-seed0"


def test_a_task_has_the_settings_that_its_script_makes_of_the_arguments(tmp_path):
    given = {"out": str(tmp_path), "epochs": 2, "kernel": "torch", "preset": "quick"}
    tasks = plan(settings_of("1,2", None, "cifar10"), [0, 4], given, jobs=1)
    assert len({task.run.path for task in tasks}) == 8
    for task in tasks:
        assert parse(task.settings.study, None, task.arguments) == task.settings
    assert [task.settings.seed for task in tasks] == [0] * 4 + [4] * 4


@pytest.mark.parametrize(("jobs", "given", "threads"), [(2, {}, 4), (16, {}, 1), (2, {"threads": 3}, 3)])
def test_runs_at_a_time_share_the_cores(jobs, given, threads, monkeypatch):
    monkeypatch.setattr(scheduler.os, "cpu_count", lambda: 8)
    assert plan([Setting("shapes")], [0], given, jobs)[0].settings.threads == threads


def test_the_next_run_gets_the_next_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,8")
    assert [gpus_of(slot, 1)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["4", "7", "8", "4"]
    assert [gpus_of(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["4,7", "8,4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(scheduler.torch.cuda, "device_count", lambda: 0)
    assert gpus_of(0, 1) == {}


def results(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/result.json")}


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    bad = tmp_path / RUN
    arguments = [*ONE_EPOCH, "--seeds", "0,1", "--jobs", "2", "--out", str(tmp_path)]
    assert script.main([*arguments, "--dry-run"]) == 0
    assert "2 runs" in capsys.readouterr().out and not list(tmp_path.iterdir())
    bad.mkdir()
    RunDirectory(bad).start(script.parse(arguments)[1][0].settings)
    (bad / "explicit.ckpt").write_bytes(b"half")
    assert script.main(arguments) == 1
    printed, errors = capsys.readouterr()
    assert "(3,7) R=10 seed 0: FAILED" in printed and "seed 1: explicit" in printed and "[2 of 2]" in printed
    assert errors.count("\n") == 1 and "seed 0 failed" in errors and "explicit.ckpt is damaged" in errors
    failure = RunDirectory(bad).failure
    assert "is damaged" in failure.error and "--seed 0" in failure.command and failure.when
    before = results(tmp_path)
    assert list(before) == [RUN.replace("seed0", "seed1")]

    (bad / "explicit.ckpt").unlink()
    assert script.main([*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "failed (" in planned and "to be tried again" in planned and "seed 1: finished" in planned
    assert "left to do: 1 of 2 epochs, about 0.0 h" in planned and "at the pace of those done" in planned
    assert script.main(arguments) == 0
    after = results(tmp_path)
    assert len(after) == 2 and before.items() <= after.items() and RunDirectory(bad).failure is None

    capsys.readouterr()
    assert script.main([*arguments, "--lr", "0.5"]) == 1
    assert "was begun with --lr 0.01, not 0.5" in capsys.readouterr().err and results(tmp_path) == after


def test_sigterm_stops_the_runs_and_the_same_command_goes_on(tmp_path):
    command = [str(EXPERIMENTS / "study.py"), *QUICK, "--epochs", "400", "--no-report", "--out", str(tmp_path)]
    long = subprocess.Popen([sys.executable, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob("*/explicit.jsonl")):
        assert long.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.kill(long.pid, signal.SIGTERM)
    _, errors = long.communicate(timeout=60)
    assert long.returncode == 130 and "this goes on with them" in errors and "Traceback" not in errors
    (folder,) = tmp_path.iterdir()
    lines = (folder / "explicit.jsonl").read_text().splitlines()
    assert 1 <= len(lines) < 400
    time.sleep(1)
    assert (folder / "explicit.jsonl").read_text().splitlines() == lines  # nobody goes on in the background
    assert "interrupted" in (folder / "log.txt").read_text() and not (folder / "failed.json").exists()
    dry = python(*command, "--dry-run")
    assert f"to be resumed at explicit {len(lines)}/400" in dry.stdout, dry.stderr


def test_what_no_run_can_begin_with_fails_that_run_alone(tmp_path, capsys):
    (tmp_path / RUN).touch()
    broken = tmp_path / RUN.replace("seed0", "seed1")
    broken.mkdir()
    (broken / "result.json").write_text("{}")
    arguments = [*ONE_EPOCH, "--seeds", "0,1", "--out", str(tmp_path)]
    assert script.main(arguments) == 1
    errors = capsys.readouterr().err
    assert "seed 0 failed: cannot be started" in errors and "was written by an older version" in errors


def test_the_end_by_a_signal_is_named(tmp_path):
    task = plan([Setting("shapes")], [0], {"out": str(tmp_path)}, jobs=1)[0]
    assert scheduler.reason(task, -signal.SIGKILL) == "ended by SIGKILL (out of memory?)"
    task.run.path.mkdir()
    for log, told in (("", "exit status 3"), ("cifar_lt.py: error: no\nrest\n", "cifar_lt.py: error: no")):
        (task.run.path / "log.txt").write_text(log)
        assert scheduler.reason(task, 3) == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which runs? --table all --figure all"),
        (["--table", "9"], "--table 9: all, or some of 1, 2, 3, 4"),
        (["--table", "1", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--table", "1", "--processes", "0"], "--processes 0: at least 1"),
        (["--table", "1", "--seeds", "1,1"], "1,1: different whole numbers"),
        (["--table", "1", "--seeds", "9" * 20], "at most 9223372036854775807"),
        (["--table", "1", "--out", ""], "--out '': must not be empty"),
        (["--table", "1", "--dataset", "mnist"], "invalid choice: 'mnist'"),
        (["--table", "2", "--n-majority", "50"], "--ratio 100 leaves minority classes empty at --n-majority 50"),
        (["--table", "1", "--spread"], "only under torchrun with two or more processes"),
    ],
)
def test_bad_arguments_end_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_under_torchrun_every_process_takes_its_share_of_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = [*ONE_EPOCH, "--seeds", "0,1,2", "--dry-run", "--spread", "--out", str(tmp_path)]
    shares = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert script.main(arguments) == 0
        shares.append([line.split(":")[0][-1] for line in capsys.readouterr().out.splitlines() if "seed" in line])
    assert shares == [["0", "2"], ["1"]]
    with pytest.raises(SystemExit):
        script.main(["--table", "1"])
    assert "under torchrun study.py takes --spread" in capsys.readouterr().err


def test_a_run_over_several_processes(tmp_path, capsys):
    assert script.main([*ONE_EPOCH, "--processes", "2", "--out", str(tmp_path)]) == 0, capsys.readouterr()
    result = json.loads((tmp_path / RUN / "result.json").read_text())
    assert result["machine"]["processes"] == 2 and result["command"].startswith("torchrun --nproc-per-node 2 ")
