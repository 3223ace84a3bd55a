"""study.py: the runs of a table or figure, and their course: finished, failed, stopped, resumed."""

import re

import pytest
import study as script
from nc_study.config import parse
from runs.options import as_arguments
from study_helpers import STUDY

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
