"""The protocol: its list is ordered and fair to the arms, and the choice is the best trial's."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import msgspec
import pytest
import study as script
from nc_study import protocol
from nc_study.config import CLASSES, settings_from
from nc_study.protocol import ARMS, CLAIMS, GRID, PRIMARY, RECIPE_B, TUNED, choose, counts, runs, trials, tuned
from nc_study.reporting.verdicts import BANDS
from nc_study.rundir import RunDirectory
from nc_study.scheduler import plan
from runs.files import to_json
from runs.options import StudyError
from study_helpers import EXPERIMENTS, made_up_result, made_up_trials


def preregistered():
    """The rows of the protocol's list of runs."""
    text = (EXPERIMENTS / "protocol.md").read_text().split("## Amendment of 2026-11-26", 1)[1]
    rows = re.search(r"^\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1].splitlines()
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in rows]


def test_primary_runs_count_on_a_gpu():
    assert {claim.quantity for claim in CLAIMS} == BANDS.keys()
    assert [(one.setting.imbalance, *one.seeds) for one in PRIMARY] == [
        ("(3,7) R = 10", 0, 1, 2, 3, 4, 5),
        ("(3,7) R = 100", 0, 1, 2),
        ("(5,5) R = 100", 0, 1, 2),
    ]
    assert sum(len(block.seeds) * len(block.arms) for block in PRIMARY) == 48
    listed = [task.settings for task in plan(runs(), {"device": "cpu"})]
    assert not any(map(counts, listed)), "runs on a CPU do not count"
    counted = [counts(replace(one, device="cuda")) for one in listed]
    assert counted == [True] * 48 + [False] * (len(listed) - 48)
    assert GRID == {"lr": (0.03, 0.1, 0.3), "weight_decay": (5e-4, 2e-3), "scale": (1.0, 0.3)}


def test_the_list_of_runs_is_the_preregistered_one(tmp_path):
    listed = [task.settings for task in plan(runs(), {"device": "cpu", "out": str(tmp_path)})]
    assert {(one.preset, one.precision, one.threads, one.evaluate, one.width) for one in listed} == {
        ("study", "bf16", 1, "test", 16)
    }
    expected = []
    for settings, recipe, arms, seeds, _ in preregistered():
        values, *rest = recipe.split(", ")
        tuned_values = tuple(map(float, values.split(" / "))) if values != "B" else tuple(RECIPE_B.values())
        apart = ("without crops and flips" in rest, "constant" in rest, "100 epochs" in rest)
        first, last = map(int, seeds.split("-"))
        for setting, seed, arm in product(settings.split("; "), range(first, last + 1), arms.split(", ")):
            expected.append((setting, seed, arm, tuned_values, apart))
    found = []
    for one in listed:
        data = {"cifar10": "", "cifar100": "CIFAR-100 "}[one.dataset]
        apart = (one.no_augmentation, one.schedule == "constant", one.epochs == 100)
        values = tuple(getattr(one, name) for name in TUNED)
        found.append((f"{data}{one.setting.imbalance}", one.seed, one.arm, values, apart))
        assert one.n_majority == {10: 5000, 100: 500}[CLASSES[one.dataset]]
        assert one.epochs in (30, 100) and one.schedule in ("cosine", "constant")
    assert found == expected and len(found) == 81


def test_every_arm_has_the_same_trials_none_of_which_sees_the_test_set():
    settings = [settings_from("cifar_lt", device="cpu", **options) for options in trials()]
    values = {arm: Counter((one.lr, one.weight_decay, one.scale) for one in settings if one.arm == arm) for arm in ARMS}
    assert all(found == values["explicit"] and len(found) == 12 for found in values.values())
    assert {one.evaluate for one in settings} == {"validation"} and {one.n_majority for one in settings} == {4500}
    assert [one.arm for one in settings] == list(ARMS) * 12
    assert {one.seed for one in settings}.isdisjoint(range(10))


def test_the_best_trial_is_chosen_and_of_equal_ones_the_first():
    found = choose(made_up_trials(7))
    assert set(found.chosen) == set(ARMS) and found.chosen["once"] == {"lr": 0.1, "weight_decay": 2e-3, "scale": 0.3}
    assert choose(made_up_trials(99)).chosen["once"] == {"lr": 0.03, "weight_decay": 5e-4, "scale": 0.3}
    assert choose(made_up_trials(7)[:-1]).chosen == {}


def test_trials_are_run_recorded_and_read_by_the_reports(tmp_path, monkeypatch):
    """Of two trials one ends and one diverges; there is a choice when all are finished."""
    monkeypatch.setattr(protocol, "TUNING", tmp_path / "tuning.json")
    monkeypatch.setattr(protocol, "ARMS", ("explicit",))
    monkeypatch.setattr(protocol, "GRID", {"lr": (0.3, 0.1), "weight_decay": (5e-4,), "scale": (1.0,)})
    monkeypatch.setattr(script, "find_source", lambda *_: None)
    with pytest.raises(StudyError, match="tuning.json cannot be read"):
        tuned()

    def run_all(tasks, *_):
        first, second = tasks
        if not second.run.finished:
            second.run.path.mkdir(parents=True)
            second.run.conclude(made_up_result(second.settings))
        return {first: "cifar_lt.py: error: the loss is no longer finite in epoch 2"}

    monkeypatch.setattr(script, "run_all", run_all)
    assert script.main(["--tune", "--out", str(tmp_path / "runs")]) == 1
    written = msgspec.json.decode((tmp_path / "tuning.json").read_bytes(), type=protocol.Tuning)
    (path,) = (tmp_path / "runs").glob("*/result.json")
    result = RunDirectory(path.parent).result
    assert result.settings.evaluate == "validation" and to_json(result)
    assert [trial.overall for trial in written.trials] == [None, result.network.quantity("overall")]
    assert tuned() == {"explicit": {"lr": 0.1, "weight_decay": 5e-4, "scale": 1.0}}
    whole = msgspec.json.encode(protocol.Tuning((*written.trials, written.trials[0]), written.chosen))
    (tmp_path / "tuning.json").write_bytes(whole)
    script.main(["--tune", "--out", str(tmp_path / "runs")])
    assert (tmp_path / "tuning.json").read_bytes() == whole, "a part of the trials does not take the place of all"
    monkeypatch.setattr(protocol, "GRID", {**protocol.GRID, "scale": (1.0, 0.3)})
    (tmp_path / "tuning.json").write_bytes(msgspec.json.encode(choose(list(written.trials))))
    with pytest.raises(StudyError, match="not all trials are finished: .* --tune continues"):
        tuned()


@pytest.mark.usefixtures("no_network")
def test_without_data_the_study_fails_at_once_and_says_what_to_do(tmp_path, capsys):
    arguments = ["--table", "2", "--dataset", "cifar10", "--data-root", str(tmp_path / "none"), "--out", str(tmp_path)]
    assert script.main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and f"not under {tmp_path / 'none'}, and the download failed" in errors
    assert "--data-root" in errors and not list(tmp_path.glob("cifar10-*")) and not (tmp_path / "report").exists()
