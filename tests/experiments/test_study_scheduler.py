"""study.py: which runs stand behind a table or figure, and what becomes of them: finished, failed, stopped, resumed."""

from __future__ import annotations

import signal
import time

import pytest
import study as script
from nc_study import scheduler
from nc_study.config import Setting, parse
from nc_study.paper import settings_of
from nc_study.rundir import RunDirectory
from nc_study.scheduler import gpus_of, plan
from study_helpers import ONE_NETWORK, STUDY

ONE_EPOCH = [*STUDY, "--epochs", "1", "--no-report"]


def test_a_task_has_the_settings_that_its_script_makes_of_the_arguments(tmp_path):
    given = {"out": str(tmp_path), "epochs": 2, "kernel": "torch", "preset": "quick"}
    tasks = plan(settings_of("1,2", None, "cifar10"), [0, 4], given, jobs=1)
    assert len({task.run.path for task in tasks}) == 8
    for task in tasks:
        assert parse(task.settings.study, None, task.arguments) == task.settings
    assert [task.settings.seed for task in tasks] == [0] * 4 + [4] * 4


def test_runs_at_a_time_share_the_cores_and_take_the_next_gpus(monkeypatch):
    monkeypatch.setattr(scheduler.os, "cpu_count", lambda: 8)
    for jobs, given, threads in ((2, {}, 4), (16, {}, 1), (2, {"threads": 3}, 3)):
        assert plan([Setting("shapes")], [0], given, jobs)[0].settings.threads == threads
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,8")
    assert [gpus_of(slot, 1)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["4", "7", "8", "4"]
    assert [gpus_of(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["4,7", "8,4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(scheduler.torch.cuda, "device_count", lambda: 0)
    assert gpus_of(0, 1) == {}


def results(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/result.json")}


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    """Three runs at two at a time: of a damaged checkpoint, whole, and in the place of whose folder there is a file."""
    bad, good, none = (ONE_NETWORK.replace("seed0", f"seed{seed}") for seed in range(3))
    arguments = [*ONE_EPOCH, "--seeds", "0,1,2", "--jobs", "2", "--out", str(tmp_path)]
    assert script.main([*arguments, "--dry-run"]) == 0
    assert "3 runs" in capsys.readouterr().out and not list(tmp_path.iterdir())
    run = RunDirectory(tmp_path / bad)
    run.path.mkdir()
    run.start(script.parse(arguments)[1][0].settings)
    (run.path / "explicit.ckpt").write_bytes(b"half")
    (tmp_path / none).touch()
    assert script.main(arguments) == 1
    printed, errors = capsys.readouterr()
    assert "(3,7) R = 10, seed 0: FAILED" in printed and "seed 1: explicit" in printed and "[3 of 3]" in printed
    assert errors.count("\n") == 2 and "seed 0 failed" in errors and "explicit.ckpt is damaged" in errors
    assert "seed 2 failed: cannot be started" in errors
    before = results(tmp_path)
    assert list(before) == [good]

    (run.path / "explicit.ckpt").unlink()
    arguments[arguments.index("0,1,2")] = "0,1"
    assert script.main([*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "seed 0: to be run" in planned and "seed 1: finished" in planned
    assert "left to do: 1 of 2 epochs, about 0.0 h" in planned and "at the pace of those done" in planned
    assert script.main(arguments) == 0
    after = results(tmp_path)
    assert len(after) == 2 and before.items() <= after.items()

    (tmp_path / good / "result.json").write_text("{}")
    assert script.main([*arguments, "--lr", "0.5"]) == 1
    errors = capsys.readouterr().err
    assert "was begun with --lr 0.01, not 0.5" in errors and "was written by an older version" in errors


def test_sigterm_stops_the_runs_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    arguments = [*STUDY, "--epochs", "400", "--no-report", "--out", str(tmp_path)]
    log, end = tmp_path / ONE_NETWORK / "explicit.jsonl", time.monotonic() + 120

    def interrupted(futures):
        while not (log.exists() and log.stat().st_size):
            assert time.monotonic() < end
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)
        yield from futures

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "as_completed", interrupted)
        assert script.main(arguments) == 130
    assert "this goes on with them" in capsys.readouterr().err
    done = log.read_text().count("\n")
    time.sleep(0.5)
    assert 1 <= log.read_text().count("\n") == done < 400  # nobody goes on in the background
    folder = log.parent
    assert "interrupted" in (folder / "log.txt").read_text()
    assert script.main([*arguments, "--dry-run"]) == 0
    assert f"to be resumed at explicit {done}/400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which runs? --table all --figure all"),
        (["--table", "9"], "--table 9: all, or some of 1, 2, 3, 4"),
        (["--table", "1", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--table", "1", "--seeds", "1,1"], "1,1: different whole numbers"),
        (["--table", "1", "--seeds", "9" * 20], "at most 9223372036854775807"),
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
