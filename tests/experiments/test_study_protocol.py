"""The protocol: its list is ordered and fair to the arms, and the choice is the best trial's. study.py: its tasks."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import study as script
from nc_study import protocol
from nc_study.config import parse, settings_from
from nc_study.protocol import CLAIMS, PRIMARY, RECIPE_B, TRIED, Rate, choose_rates, counts, has_own_rate, runs, trials
from nc_study.reporting.verdicts import BANDS
from nc_study.scheduler import plan
from runs.files import to_json
from runs.options import as_arguments
from study_helpers import EXPERIMENTS, STUDY, made_up_result

ONE_EPOCH = [*STUDY, "--epochs", "1", "--no-report"]


def rows_of(heading):
    """The rows of the first table below a heading of the protocol, as entries."""
    text = (EXPERIMENTS / "protocol.md").read_text().split(heading, 1)[1]
    rows = re.search(r"^\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1].splitlines()
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in rows]


def test_primary_runs_count_on_a_gpu():
    assert [(block.setting.imbalance, *block.seeds) for block in PRIMARY] == [
        ("(3,7) R = 10", 0, 1, 2, 3, 4, 5),
        ("(3,7) R = 100", 0, 1, 2),
        ("(5,5) R = 100", 0, 1, 2),
    ]
    assert sum(len(block.seeds) * len(block.arms) for block in PRIMARY) == 48
    given = {**PRIMARY[0].setting.options, **RECIPE_B, "preset": "study", "model": "explicit", "precision": "bf16"}
    experiment = settings_from("cifar_lt", device="cpu", **given)
    assert [counts(replace(experiment, device=device)) for device in ("cpu", "cuda")] == [False, True]


def test_claims_and_sizes_of_the_parts_are_the_registered_ones():
    names = {"overall": "overall", "nc2": "NC2 as printed", "nc1": "NC1", "nc3_centered": "centred NC3"}
    claims = [claim for part in ("mechanism", "settings", "size") for claim in CLAIMS[part]]
    table = rows_of("### Claims")
    assert [row[:3] for row in table] == [[claim.name, claim.arm, claim.control] for claim in claims]
    assert [row[4] for row in table] == [claim.expected for claim in claims]
    shown = [row[3].partition(",")[0].partition(" of")[0] for row in table]
    assert shown == [names.get(claim.quantity, claim.quantity) for claim in claims]
    assert {claim.quantity for part in CLAIMS.values() for claim in part} == BANDS.keys()


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """All trials are finished: every arm's rate is 0.1 at R = 10, 0.01 at R = 100; of equal ones the least counts."""
    monkeypatch.setattr(protocol, "CHOSEN", tmp_path / "rates.json")
    made = [settings_from("cifar_lt", device="cpu", **options) for options in trials()]
    accuracy = {(10, 0.01): 50.0, (10, 0.1): 51.0, (100, 0.01): 50.0, (100, 0.1): 50.0}
    finished = [
        Rate(each.arm, each.ratio, each.weight_decay, each.lr, accuracy.get((each.ratio, each.lr))) for each in made
    ]
    assert choose_rates(finished[:-1]).chosen == (), "not before all are finished"
    (tmp_path / "rates.json").write_bytes(to_json(choose_rates(finished)))
    return made


def test_trials_are_fair_and_none_sees_the_test_set(chosen):
    kinds = Counter((each.arm, each.ratio, each.weight_decay) for each in chosen)
    assert set(kinds.values()) == {3} and len(kinds) == 2 * (8 + 2) and len(chosen) == 60
    assert {each.evaluate for each in chosen} == {"validation"} and {each.n_majority for each in chosen} == {4500}
    assert {each.seed for each in chosen} == {100} and {each.epochs for each in chosen} == {10}


@pytest.mark.parametrize("part", protocol.PARTS)
def test_the_runs_of_a_part_are_the_registered_ones(part, chosen, tmp_path):
    listed = [task.settings for task in plan(runs(part), {"device": "cpu", "out": str(tmp_path)})]
    registered, name = Counter(), ""
    for row in rows_of("### Parts, in this order"):
        name = row[0].strip("`") or name
        registered[name] += int(row[4])
    assert len(listed) == registered[part] and registered.keys() == {"rates", *protocol.PARTS}
    assert {each.seed for each in listed} <= set(range(10, 22)) and {each.precision for each in listed} == {"bf16"}
    rates = (
        {each.lr for each in listed if each.ratio in (None, 10)},
        {each.lr for each in listed if each.ratio in (50, 100)},
    )
    assert rates == (({1e-4},) * 2 if part == "printed" else ({0.1}, {0.01}))
    assert {each.weight_decay for each in listed} == {2e-3 if part == "decay" else 5e-4}
    assert {each.width for each in listed} == {64 if part in ("printed", "size") else 16}
    assert {each.epochs for each in listed} == {100 if part == "printed" else 30}
    on_gpu = [replace(each, device="cuda") for each in listed]
    assert all(has_own_rate(each, protocol.rates()) == (part != "printed") for each in on_gpu)
    assert not any(has_own_rate(each, protocol.rates()) for each in listed), "runs on a CPU are pilots"
    assert not any(has_own_rate(replace(each, seed=0), protocol.rates()) for each in on_gpu)


def test_trials_are_run_and_recorded_and_a_part_waits_for_them(tmp_path, monkeypatch, capsys):
    """Of two trials one ends and one diverges."""
    monkeypatch.setattr(protocol, "CHOSEN", tmp_path / "rates.json")
    for name, values in (("NEW_ARMS", ("explicit",)), ("PAIR", ()), ("RATES", (0.3, 0.1)), ("TRIED", TRIED[:1])):
        monkeypatch.setattr(protocol, name, values)
    monkeypatch.setattr(script, "find_source", lambda *_: None)
    with pytest.raises(SystemExit):
        script.main(["--protocol", "mechanism"])
    assert "no rate of explicit is chosen: study.py --protocol rates" in capsys.readouterr().err

    def run_all(tasks, *_):
        first, second = tasks
        second.run.path.mkdir(parents=True, exist_ok=True)
        second.run.conclude(made_up_result(second.settings))
        return {first: "cifar_lt.py: error: the loss is no longer finite in epoch 2"}

    monkeypatch.setattr(script, "run_all", run_all)
    assert script.main(["--protocol", "rates", "--out", str(tmp_path / "runs")]) == 1
    assert not (tmp_path / "rates.json").exists() and "pilots on a CPU" in capsys.readouterr().out
    monkeypatch.setattr(protocol, "is_pilot", lambda settings: False)
    assert script.main(["--protocol", "rates", "--out", str(tmp_path / "runs")]) == 1
    rates = protocol.rates()
    assert [trial.overall is None for trial in rates.trials] == [True, False] and [
        trial.lr for trial in rates.chosen
    ] == [0.1]
    (tmp_path / "rates.json").unlink()
    monkeypatch.setattr(script, "launched", lambda: True)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(script, "run_all", lambda *_: {})
    assert script.main(["--protocol", "rates", "--spread", "--out", str(tmp_path / "runs")]) == 0
    assert not (tmp_path / "rates.json").exists() and "without torchrun and --spread" in capsys.readouterr().out
    monkeypatch.setattr(script, "launched", lambda: False)
    monkeypatch.setattr(script, "run_all", run_all)
    whole = to_json(replace(rates, trials=(*rates.trials, rates.trials[0])))
    (tmp_path / "rates.json").write_bytes(whole)
    script.main(["--protocol", "rates", "--out", str(tmp_path / "runs")])
    assert (tmp_path / "rates.json").read_bytes() == whole, "a part of the trials does not take the place of all"


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
