"""The paper's tables as typed in, the record of a run, and the row that is compared with the paper's."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from nc_study.config import BOTH, Setting, settings_from
from nc_study.paper import INCONSISTENT, PAPER, on_cifar, settings_of
from nc_study.record import Accuracy, RunResult, Spread
from nc_study.results import STUDIED, difference, network_result, report
from runs.files import to_json
from study_helpers import EXPERIMENTS, made_up_epoch, made_up_result, made_up_settings


def paper_settings(**given):
    return settings_from("cifar_lt", **{"preset": "paper", "dataset": "cifar10", "device": "cpu", **given})


def test_the_tables_are_complete_and_overall_is_the_class_mean_but_for_the_entries_marked():
    assert set(PAPER) == set(settings_of("all", None, "cifar")) and len(PAPER) == 20
    assert PAPER[Setting("cifar10", 5, 100)]["deq"].minority == Spread(1.26, 4.93)
    assert PAPER[Setting("cifar100")]["deq"] == Accuracy(Spread(64.77, 0.36))
    for setting in filter(lambda setting: setting.majority, PAPER):
        for model, entry in PAPER[setting].items():
            share = setting.majority / 10
            mean = share * entry.majority.mean + (1 - share) * entry.minority.mean
            assert (abs(mean - entry.overall.mean) > 0.03) == ((setting, model) in INCONSISTENT)


def test_tables_and_figures_name_a_setting_once_in_the_papers_order():
    assert settings_of("2", "4,2", "cifar10") == [Setting("cifar10", 3, ratio) for ratio in (10, 50, 100)]
    assert settings_of(None, "3", "cifar") == [Setting("cifar10"), Setting("cifar10", 5, 100)]
    assert on_cifar(Setting("shapes100", 3, 10)) == Setting("cifar100", 3, 10)


def epochs(number, model="deq", **given):
    settings = made_up_settings(model=model, **given)
    return [made_up_epoch(i, settings) for i in range(1, number + 1)]


def test_a_network_is_summed_up_over_its_last_ten_epochs():
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0) and Spread.of([4.0]) == Spread(4.0, 0.0)
    network = network_result(1, epochs(12), None)
    assert network.epochs_averaged == 10
    assert network.accuracy.overall.mean == pytest.approx(41.75) and network.accuracy.majority == Spread(81.0, 0.0)
    assert network.solver.skipped == 12 and network.solver.iterations == 11
    assert (network.seconds.train, network.seconds.test, network.seconds.metrics) == (12.0, 3.0, 6.0)
    short = network_result(1, epochs(4, "explicit"), None)
    assert short.epochs_averaged == 4 and short.solver is None
    assert network.quantity("overall") == pytest.approx(42.2) and network.quantity("nc2") == network.nc["nc2"]
    assert network.curves["nc2_centered"][-3:] == (0.9, None, 0.9), "the course of the primary metrics is logged"


@pytest.mark.parametrize(
    ("precision", "native", "said"),
    [("bf16", True, "instructions"), ("bf16", False, "float32 kernels"), ("fp32", False, None)],
)
def test_a_record_says_how_products_of_bfloat16_were_computed(precision, native, said, monkeypatch):
    monkeypatch.setattr("runs.provenance.multiplies_bf16", lambda: native)
    result = made_up_result(made_up_settings(precision=precision))
    assert result.machine.bf16 == said
    read = msgspec.json.decode(to_json(result), type=RunResult)
    assert read == result
    old = to_json(result).replace(f',"bf16":{json.dumps(said)}'.encode(), b"")
    assert msgspec.json.decode(old, type=RunResult).machine.bf16 is None, "a record from before"


def test_the_studys_interval_is_the_reports():
    first = [made_up_result(paper_settings(epochs=4, model="explicit"))]
    assert difference(first) == "" and f"and {STUDIED} in the study" in difference(
        [*first, made_up_result(made_up_settings())]
    )
    report = (EXPERIMENTS / "results" / "report" / "report.md").read_text().replace("\\", "")
    assert STUDIED in next(
        line for line in report.splitlines() if line.startswith("| A1: overall higher than explicit |")
    )


def test_no_record_holds_a_nan():
    result = made_up_result(made_up_settings())
    with pytest.raises(ValueError, match="Expected `float`, got `null`"):
        to_json(replace(result.network.accuracy.overall, mean=float("nan")))


def test_the_report_shows_the_row_next_to_the_papers_and_says_what_cannot_be_compared():
    text = report([made_up_result(paper_settings(epochs=4, model=model)) for model in BOTH])
    explicit, deq = (line for line in text.splitlines() if line.startswith("  paper"))
    assert explicit == "  paper: overall 72.57±0.25, majority 96.40±0.32, minority 62.36±0.12"
    assert deq == "  paper: overall 73.84±0.72, majority 96.68±0.87, minority 64.06±0.66"
    assert "40.25±0.13" in text and "not comparable with the paper: epochs 4 instead of 100" in text
    assert "it has no entry" in report([made_up_result(paper_settings(ratio=20, model="tied"))])
    text = report([made_up_result(made_up_settings("cifar_balanced", preset="paper", dataset="cifar100"))])
    assert "64.77±0.36" in text and "minority" not in text and "cifar100, balanced" in text
