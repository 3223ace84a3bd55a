"""study.py: which runs stand behind a table or figure, and what becomes of them: finished, failed, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import EXPERIMENTS, TINY
from nc_study.cells import Cell, cells_of
from nc_study.config import SettingsError, StudyError, parse
from nc_study.driver import command as study
from nc_study.driver import plan as planning
from nc_study.driver import scheduler
from nc_study.driver.plan import device_of, plan
from nc_study.rundir import RunDirectory

QUICK = [word for word in TINY if word not in ("--ratio", "10")]
ONE_EPOCH = [*QUICK, "--model", "explicit", "--epochs", "1", "--no-report"]


def test_the_cells_of_all_tables_are_the_forty_trainings_of_the_paper():
    cells = cells_of("all", None, "cifar")
    assert len(cells) == len(set(cells)) == 20
    assert cells[:2] == [Cell("cifar10"), Cell("cifar100")]
    assert {(cell.majority, cell.ratio) for cell in cells[2:]} == {(k, r) for k in (3, 5, 7) for r in (10, 50, 100)}
    assert set(cells_of(None, "all", "cifar")) < set(cells)


def test_tables_and_figures_name_a_cell_once_in_the_papers_order():
    assert cells_of("2", "4,2", "cifar10") == [Cell("cifar10", 3, ratio) for ratio in (10, 50, 100)]
    assert cells_of(None, "3", "cifar") == [Cell("cifar10"), Cell("cifar10", 5, 100)]
    assert cells_of("4", None, "shapes100") == [Cell("shapes100", 7, ratio) for ratio in (10, 50, 100)]
    assert str(Cell("cifar10", 3, 100)) == "cifar10 (3,7) R=100" and str(Cell("cifar100")) == "cifar100 balanced"


@pytest.mark.parametrize(("table", "figure"), [("5", None), (None, "1"), ("1,,2", None), ("", None), ("all,1", None)])
def test_a_number_that_the_paper_lacks_is_an_error(table, figure):
    with pytest.raises(StudyError, match="with commas between"):
        cells_of(table, figure, "cifar")


def test_a_task_has_the_settings_that_its_script_makes_of_the_arguments(tmp_path):
    given = {"out": str(tmp_path), "epochs": 2, "kernel": "torch", "preset": "quick"}
    tasks = plan(cells_of("1,2", None, "cifar10"), [0, 4], given, jobs=1)
    assert len(tasks) == 8 and len({task.run.path for task in tasks}) == 8
    for task in tasks:
        assert parse(task.cell.study, None, task.arguments) == task.settings
    assert [task.settings.seed for task in tasks] == [0] * 4 + [4] * 4


def test_runs_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr(planning.os, "cpu_count", lambda: 8)
    cells = [Cell("shapes")]
    assert plan(cells, [0], {}, jobs=2)[0].settings.threads == 4
    assert plan(cells, [0], {}, jobs=16)[0].settings.threads == 1
    assert plan(cells, [0], {"threads": 3}, jobs=2)[0].settings.threads == 3


def test_settings_that_no_run_can_have_end_the_study_before_it_begins():
    with pytest.raises(SettingsError, match="--ratio 100 leaves minority classes empty at --n-majority 50"):
        plan(cells_of("2", None, "shapes"), [0], {"n_majority": 50}, jobs=1)


def test_the_next_run_gets_the_next_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [device_of(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["4", "7", "4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(planning.torch.cuda, "device_count", lambda: 0)
    assert device_of(0) == {}


def states(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/result.json")}


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    bad = tmp_path / "shapes-k3-r10-quick-explicit-broyden-jfb-seed0"
    arguments = ["--figure", "2", "--dataset", "shapes", "--seeds", "0,1", *ONE_EPOCH[2:], "--out", str(tmp_path)]
    assert study.main(None, [*arguments, "--dry-run"]) == 0
    assert "2 runs" in capsys.readouterr().out and not list(tmp_path.iterdir())
    bad.mkdir()
    RunDirectory(bad).start(study.parse(None, arguments).tasks[0].settings)
    (bad / "explicit.ckpt").write_bytes(b"half")
    assert study.main(None, arguments) == 1
    printed, errors = capsys.readouterr()
    assert "(3,7) R=10 seed 0: FAILED" in printed and "seed 1: explicit" in printed and "2 of 2 runs" in printed
    assert errors.count("\n") == 1 and "seed 0 failed" in errors and "explicit.ckpt is damaged" in errors
    failure = json.loads((bad / "failed.json").read_text())
    assert "is damaged" in failure["error"] and "--seed 0" in failure["command"] and failure["when"]
    assert list(states(tmp_path)) == [bad.name.replace("seed0", "seed1")]

    before = states(tmp_path)
    (bad / "explicit.ckpt").unlink()
    assert study.main(None, [*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "failed (" in planned and "to be tried again" in planned and "seed 1: finished" in planned
    assert "left to do: about" in planned and "at the pace of those finished" in planned
    assert study.main(None, arguments) == 0
    after = states(tmp_path)
    assert len(after) == 2 and before.items() <= after.items() and not (bad / "failed.json").exists()


def test_a_folder_with_a_run_of_other_settings_is_an_error_and_left_alone(tmp_path, capsys):
    arguments = ["--figure", "2", "--dataset", "shapes", *ONE_EPOCH[2:], "--out", str(tmp_path)]
    assert study.main(None, arguments) == 0
    before = states(tmp_path)
    capsys.readouterr()
    assert study.main(None, [*arguments, "--lr", "0.5"]) == 1
    assert "was begun with --lr 0.01, not 0.5" in capsys.readouterr().err
    assert states(tmp_path) == before


def test_ctrl_c_stops_the_runs_and_the_same_command_goes_on(tmp_path):
    arguments = [sys.executable, str(EXPERIMENTS / "study.py"), "--figure", "2", "--dataset", "shapes", *QUICK[2:]]
    arguments += ["--model", "explicit", "--no-report", "--out", str(tmp_path)]
    long = subprocess.Popen([*arguments, "--epochs", "400"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*/explicit.jsonl")), long)
    os.kill(long.pid, signal.SIGTERM)
    _, errors = long.communicate(timeout=60)
    assert long.returncode == 130 and "the same command goes on with them" in errors and "Traceback" not in errors
    (folder,) = tmp_path.iterdir()
    lines = (folder / "explicit.jsonl").read_text().splitlines()
    assert 1 <= len(lines) < 400
    time.sleep(1)
    assert (folder / "explicit.jsonl").read_text().splitlines() == lines  # nobody goes on in the background
    log = (folder / "log.txt").read_text()
    assert "interrupted" in log and not (folder / "failed.json").exists()
    dry = subprocess.run([*arguments, "--epochs", "400", "--dry-run"], capture_output=True, text=True, check=True)
    assert f"to be resumed at explicit {len(lines)}/400" in dry.stdout


def test_a_file_in_the_place_of_a_folder_fails_that_run_alone(tmp_path, capsys):
    arguments = ["--figure", "2", "--dataset", "shapes", "--seeds", "0,1", *ONE_EPOCH[2:], "--out", str(tmp_path)]
    (tmp_path / "shapes-k3-r10-quick-explicit-broyden-jfb-seed0").touch()
    assert study.main(None, arguments) == 1
    assert "seed 0 failed: cannot be started" in capsys.readouterr().err
    assert len(states(tmp_path)) == 1


def test_a_run_of_another_version_is_refused_before_any_work(tmp_path, capsys):
    arguments = ["--figure", "2", "--dataset", "shapes", *ONE_EPOCH[2:], "--out", str(tmp_path)]
    folder = tmp_path / "shapes-k3-r10-quick-explicit-broyden-jfb-seed0"
    folder.mkdir()
    (folder / "result.json").write_text("{}")
    assert study.main(None, arguments) == 1
    assert "holds a run of another version" in capsys.readouterr().err


def test_without_the_data_the_runs_that_need_them_fail_and_the_study_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    arguments = ["--figure", "2", "--dataset", "cifar10", *ONE_EPOCH[2:], "--out", str(tmp_path / "runs")]
    assert study.main(None, [*arguments, "--data-root", str(tmp_path / "none")]) == 1
    assert "cifar10 (3,7) R=10 seed 0 failed: cifar_lt.py: error: --dataset cifar10" in capsys.readouterr().err


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_end_by_a_signal_is_named(tmp_path):
    task = plan([Cell("shapes")], [0], {"out": str(tmp_path)}, jobs=1)[0]
    assert scheduler._reason(task, -signal.SIGKILL, 0) == "ended by SIGKILL (out of memory?)"
    task.run.path.mkdir()
    (task.run.path / "log.txt").write_text("cifar_lt.py: error: of an attempt before\n")
    assert scheduler._reason(task, 3, (task.run.path / "log.txt").stat().st_size) == "exit status 3"
    assert scheduler._reason(task, 3, 0) == "cifar_lt.py: error: of an attempt before"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which runs? --table all --figure all"),
        (["--table", "9"], "--table 9: all, or some of 1, 2, 3, 4"),
        (["--table", "1", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--table", "1", "--seeds", "1,1"], "1,1: different whole numbers"),
        (["--table", "1", "--seeds", "9" * 20], "from 0 to 2**63 - 1"),
        (["--table", "1", "--out", ""], "--out '': must not be empty"),
        (["--table", "1", "--seeds", "a"], "a: different whole numbers"),
        (["--table", "1", "--dataset", "mnist"], "invalid choice: 'mnist'"),
        (["--table", "1", "--epochs", "0"], "--epochs 0: at least 1"),
    ],
)
def test_bad_arguments_end_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        study.main(None, arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def torchrun(out, *arguments):
    """study.py in two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(EXPERIMENTS / "study.py"), "--figure", "2", "--dataset", "shapes", "--seeds", "0,1"]
    command += [*ONE_EPOCH[2:], "--out", str(out), *arguments]
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )


def loss(folder):
    (line,) = (folder / "explicit.jsonl").read_text().splitlines()
    return json.loads(line)["train"]["loss"]


def test_under_torchrun_runs_are_spread_or_shared_and_their_numbers_are_those_of_one_process(tmp_path):
    gentle = ("--width", "4", "--lr", "0.001")  # rounding grows tenfold a step in the dead channels of width 1
    spread = torchrun(tmp_path / "spread", *gentle, "--spread")
    together = torchrun(tmp_path / "together", *gentle)
    assert spread.returncode == together.returncode == 0, spread.stderr + together.stderr
    for seed in (0, 1):
        name = f"shapes-k3-r10-quick-explicit-broyden-jfb-seed{seed}"
        alone, shared = tmp_path / "spread" / name, tmp_path / "together" / name
        assert f"seed {seed}: explicit" in spread.stdout and f"[{seed + 1} of 2]" in together.stdout
        assert loss(shared) == pytest.approx(loss(alone), rel=1e-3)  # test_distributed.py is sharp, in float64
        assert "processes" not in (alone / "log.txt").read_text()
    assert together.stdout.count("2 processes") == 2


def test_under_torchrun_a_run_that_fails_stops_no_other(tmp_path):
    arguments = ["--figure", "2", "--dataset", "shapes", *ONE_EPOCH[2:], "--out", str(tmp_path)]
    bad = study.parse(None, arguments).tasks[0]
    bad.run.path.mkdir()
    bad.run.start(bad.settings)
    (bad.run.path / "explicit.ckpt").write_bytes(b"half")
    done = torchrun(tmp_path)
    assert done.returncode != 0 and done.stderr.count("study.py: shapes (3,7) R=10 seed 0 failed:") == 1
    assert "explicit.ckpt is damaged" in json.loads(bad.run.failure.read_text())["error"]
    assert len(states(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (["--spread"], "1", "only under torchrun with two or more processes"),
        (["--jobs", "2"], "2", "under torchrun one run at a time"),
    ],
)
def test_what_fits_torchrun_alone_and_what_does_not(arguments, world, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        study.main(None, ["--table", "1", *arguments])
    assert message in capsys.readouterr().err
