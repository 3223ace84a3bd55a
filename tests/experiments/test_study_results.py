"""The paper's tables as typed in, the record of a run, and the row that is compared with the paper's."""

from __future__ import annotations

import pytest
from nc_study.config import Setting
from nc_study.paper import INCONSISTENT, PAPER, paper_settings
from nc_study.record import Accuracy, Spread
from nc_study.results import network_result
from study_helpers import made_up_epoch, made_up_settings


def test_the_tables_are_complete_and_overall_is_the_class_mean_but_for_the_entries_marked():
    assert set(PAPER) == set(paper_settings("all", None, "cifar")) and len(PAPER) == 20
    assert PAPER[Setting("cifar10", 5, 100)]["deq"].minority == Spread(1.26, 4.93)
    assert PAPER[Setting("cifar100")]["deq"] == Accuracy(Spread(64.77, 0.36))
    for setting in filter(lambda setting: setting.majority, PAPER):
        for model, entry in PAPER[setting].items():
            share = setting.majority / 10
            mean = share * entry.majority.mean + (1 - share) * entry.minority.mean
            assert (abs(mean - entry.overall.mean) > 0.03) == ((setting, model) in INCONSISTENT)


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
