"""The paper's tables as typed in, the record of a run and what it refuses, and the row measured beside the paper's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from nc_study import figures
from nc_study.config import MODELS, Setting, StudyError, settings_from
from nc_study.paper import CLAIMS, INCONSISTENT, PAPER, QUANTITIES, differences, on_cifar, settings_of
from nc_study.record import Accuracy, OtherFormat, RunResult, Spread, from_json, read_record, to_json
from nc_study.results import curves, network_result, report, title
from study_helpers import EXPERIMENTS, made_up_epoch, made_up_result, made_up_settings

COMMITTED = sorted((EXPERIMENTS / "results" / "cifar10-quick").glob("*/result.json"))


def paper_settings(**given):
    return settings_from("cifar_lt", **{"preset": "paper", "dataset": "cifar10", "device": "cpu", **given})


def test_the_tables_are_complete():
    assert set(PAPER) == set(settings_of("all", None, "cifar")) and len(PAPER) == 20
    assert PAPER[Setting("cifar10", 5, 100)]["deq"].minority == Spread(1.26, 4.93)
    assert PAPER[Setting("cifar100")]["deq"] == Accuracy(Spread(64.77, 0.36))
    assert {claim.quantity for claim in CLAIMS} <= set(QUANTITIES)


@pytest.mark.parametrize("setting", [setting for setting in PAPER if setting.majority], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_overall_is_the_class_mean_but_for_the_entries_marked(setting, model):
    share, entry = setting.majority / 10, PAPER[setting][model]
    mean = share * entry.majority.mean + (1 - share) * entry.minority.mean
    assert (abs(mean - entry.overall.mean) > 0.03) == ((setting, model) in INCONSISTENT)


def test_tables_and_figures_name_a_setting_once_in_the_papers_order():
    assert settings_of("2", "4,2", "cifar10") == [Setting("cifar10", 3, ratio) for ratio in (10, 50, 100)]
    assert settings_of(None, "3", "cifar") == [Setting("cifar10"), Setting("cifar10", 5, 100)]
    assert settings_of("4", None, "shapes100") == [Setting("shapes100", 7, ratio) for ratio in (10, 50, 100)]
    assert on_cifar(Setting("shapes100", 3, 10)) == Setting("cifar100", 3, 10)
    assert on_cifar(Setting("cifar10", 7, 50)) == Setting("cifar10", 7, 50)
    assert str(Setting("cifar10", 3, 100)) == "cifar10 (3,7) R=100" and str(Setting("cifar100")) == "cifar100 balanced"


@pytest.mark.parametrize(("table", "figure"), [("5", None), (None, "1"), ("1,,2", None), ("", None), ("all,1", None)])
def test_a_number_that_the_paper_lacks_is_an_error(table, figure):
    with pytest.raises(StudyError, match="with commas between"):
        settings_of(table, figure, "cifar")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"metrics_every": 1, "seed": 3, "adjoint": "implicit", "kernel": "torch", "e_w": 0.01}, []),
        ({"precision": "bf16", "e_h": 2.0}, ["e-h 2.0 instead of 0.01", "precision bf16 instead of fp32"]),
        ({"lr": 0.1}, ["lr 0.1 instead of 0.0001"]),
        ({"dataset": "shapes"}, ["shapes, not CIFAR"]),
    ],
)
def test_in_what_a_run_differs_from_the_papers(given, expected):
    assert differences(paper_settings(**given)) == expected


def epochs(number, model="deq", **given):
    settings = made_up_settings(**given)
    return [made_up_epoch(i, settings, model == "deq") for i in range(1, number + 1)]


def test_a_network_is_summed_up_over_its_last_ten_epochs():
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0) and Spread.of([4.0]) == Spread(4.0, 0.0)
    network = network_result(1, epochs(12), 3, None)
    assert network.epochs_averaged == 10
    assert network.accuracy.overall.mean == pytest.approx(41.75) and network.accuracy.majority == Spread(81.0, 0.0)
    assert network.solver.skipped == 12 and network.solver.iterations == 11
    assert (network.seconds.train, network.seconds.test, network.seconds.metrics) == (12.0, 3.0, 6.0)
    short = network_result(1, epochs(4, "explicit"), 3, None)
    assert short.epochs_averaged == 4 and short.solver is None
    assert network.quantity("minority") == network.accuracy.minority.mean and network.quantity("nc2") == network.nc.nc2


def test_the_curves_hold_a_value_per_epoch_and_means_over_the_classes_of_a_group():
    found = curves(epochs(5), 3)
    assert found["epoch"] == (1, 2, 3, 4, 5) and found["loss"] == (1.0,) * 5 and found["overall"][0] == 41.1
    assert found["nc1"] == (None, 3 / 2, None, 3 / 4, None)
    assert found["iterations_majority"] == pytest.approx([11 * 1.01] * 5)
    assert found["iterations_minority"] == pytest.approx([11 * 1.06] * 5)
    assert found["iterations"] == (11,) * 5 and found["skipped"] == (1,) * 5
    balanced = curves(epochs(5, study="cifar_balanced"), 10)
    assert balanced["minority"] == balanced["residual_minority"] == (None,) * 5
    assert "iterations" not in curves(epochs(5, "explicit"), 3)


def test_a_result_comes_back_as_it_was_written(tmp_path):
    result = made_up_result(made_up_settings())
    path = tmp_path / "result.json"
    path.write_bytes(to_json(result))
    assert read_record(RunResult, path) == result
    assert {"python", "torch", "deqfast", "triton"} <= set(result.versions) and result.machine.threads == 1
    assert result.setting == Setting("cifar10", 3, 10) and result.seconds == 14.0


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_the_committed_results_can_be_read(path):
    result = read_record(RunResult, path)
    assert result.settings.run_name == path.parent.name and set(result.networks) == set(MODELS)
    assert result.settings.precision == "fp32" and result.networks["deq"].solver.converged > 0.9


def spoiled(change):
    content = json.loads(to_json(made_up_result(made_up_settings())))
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("kernel"), "missing required field `kernel`"),
        (lambda r: r["networks"]["deq"]["accuracy"]["overall"].update(mean="x"), r"accuracy\.overall\.mean"),
        (lambda r: r["networks"]["deq"]["curves"]["loss"].pop(), "columns of different lengths.*'loss': 3"),
        (lambda r: r["networks"]["explicit"]["confusion"].pop(), "networks.explicit: not the numbers of 10 classes"),
        (lambda r: r["networks"].update(vgg=r["networks"]["deq"]), "explicit, deq, vgg instead of both"),
        (lambda r: r["settings"].update(lr=-1), "--lr -1.0: more than 0"),
        (lambda r: r["train_images_per_class"].pop(), "not the numbers of 10 classes"),
        (lambda r: r["networks"]["deq"]["solver"]["per_class"]["residual"].pop(), "columns of different lengths"),
        (lambda r: r["settings"].update(colour=1), "settings that there are not: colour"),
    ],
)
def test_a_damaged_result_is_an_error_that_names_the_place(change, message, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(spoiled(change))
    with pytest.raises(StudyError, match=f"result.json cannot be read .*{message}"):
        read_record(RunResult, path)


@pytest.mark.parametrize(("version", "age"), [(2, "an older"), (99, "a newer"), (None, "an older")])
def test_another_format_is_said(version, age, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(spoiled(lambda r: r.update(format=version) if version else r.pop("format")))
    with pytest.raises(OtherFormat, match=f"was written by {age} version of this project"):
        read_record(RunResult, path)


def test_no_record_holds_a_nan():
    result = made_up_result(made_up_settings())
    with pytest.raises(ValueError, match="Expected `float`, got `null`"):
        to_json(replace(result.networks["deq"].accuracy.overall, mean=float("nan")))
    with pytest.raises(ValueError, match="invalid"):
        from_json(Spread, b'{"mean": NaN, "std": 0.0}')


def test_the_report_shows_the_row_beside_the_papers():
    text = report(made_up_result(paper_settings(epochs=4)))
    lines = {line[2:17].strip(): line.split()[-3:] for line in text.splitlines() if line.startswith("  paper")}
    assert lines["paper, explicit"] == ["72.57±0.25", "96.40±0.32", "62.36±0.12"]
    assert lines["paper, deq"] == ["73.84±0.72", "96.68±0.87", "64.06±0.66"]
    assert "40.25±0.13" in text and "over the last 4\nof 4 epochs" in text
    assert "not comparable with the paper: epochs 4 instead of 100" in text
    assert all(name in text for name in ("NC1", "NC2", "NC3", "NC4", "kernel cpp")) and "†" not in text


def test_the_report_says_what_is_inconsistent_absent_undefined_or_balanced():
    text = report(made_up_result(paper_settings(majority=5)))
    assert "paper, explicit†" in text and "not the class" in text
    assert "the paper has no entry" in report(made_up_result(paper_settings(ratio=20)))
    result = made_up_result(made_up_settings())
    network = replace(result.networks["deq"], nc=replace(result.networks["deq"].nc, nc1=None))
    assert "undefined" in report(replace(result, networks={"deq": network}))
    balanced = made_up_result(made_up_settings("cifar_balanced", preset="paper", dataset="cifar100"))
    text = report(balanced)
    assert "64.77±0.36" in text and "minority" not in text and title(balanced) == "cifar100, balanced"


@pytest.mark.parametrize("models", [("explicit",), MODELS])
def test_the_figure_names_axes_and_lines(models):
    figure = figures.study_figure({"heading": {model: [curves(epochs(6, model), 3)] for model in models}})
    accuracy, *collapse = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == ["test accuracy (%)", "NC1", "NC2", "NC3"]
    assert len(accuracy.lines) == 3 * len(models)
    assert collapse[0].get_yscale() == "log"
    assert list(collapse[0].lines[0].get_xdata()) == [2, 4, 6]
    assert {axis.get_xlabel() for axis in figure.axes} == {"epoch"}
