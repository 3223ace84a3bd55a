"""Folders that count as runs, and runs that may be averaged or compared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from nc_study.config import Setting
from nc_study.reporting.runs import collect
from nc_study.rundir import RunDirectory
from runs.files import to_json

SETTING = Setting("cifar10", 3, 10)


def test_seeds_and_settings_are_one_group(made_up):
    root = made_up().parent
    made_up(seed=1, kernel="torch", metrics_every=1)
    made_up(ratio=100)
    made_up(adjoint="implicit", seed=1)
    made_up(study="cifar_balanced")
    (group,) = collect([root]).groups
    assert group.settings == [Setting("cifar10"), SETTING, Setting("cifar10", 3, 100)]
    assert {arm: list(group.networks(SETTING, arm)) for arm in ("deq-jfb", "deq-implicit", "once")} == {
        "deq-jfb": [0, 1],
        "deq-implicit": [1],
        "once": [],
    }


def test_runs_of_other_options_are_never_in_one_group(made_up):
    made_up("first")
    options = [{"dataset": "shapes"}, {"solver": "anderson"}, {"lr": 0.3}, {"precision": "bf16"}]
    options += [{"e_w": 0.01}, {"preset": "tuned", "width": 16, "n_majority": 1000, "batch_size": 32}]
    for number, given in enumerate(options):
        root = made_up(f"other{number}", **given).parent
    groups = collect([root]).groups
    assert len(groups) == len({group.name for group in groups}) == 7
    assert groups[-1].experiment.dataset == "shapes", "real data come before drawn images"


def test_a_difference_is_of_the_same_seed_and_group_and_of_nc1_a_ratio(made_up):
    root = made_up("e0", model="explicit").parent
    made_up("d1", seed=1)
    made_up("d0", max_iter=30)
    assert not any(group.differences(SETTING, "deq-jfb", "explicit", "nc2") for group in collect([root]).groups)
    made_up("d2", shift=2.0)
    made_up("e1", model="explicit", seed=1)
    group = collect([root]).groups[0]
    assert group.differences(SETTING, "deq-jfb", "explicit", "overall") == pytest.approx({0: 2.0, 1: 1.0})
    assert group.differences(SETTING, "explicit", "deq-jfb", "nc2") == pytest.approx({0: 0.2, 1: 0.1})
    assert group.differences(SETTING, "deq-jfb", "explicit", "nc1") == {0: 0.0, 1: 0.0}
    path = root / "e1" / "result.json"
    result = RunDirectory(path.parent).result
    network = replace(result.network, nc={**result.network.nc, "nc1": 1.5, "nc2": None})
    path.write_bytes(to_json(replace(result, network=network)))
    group = collect([root]).groups[0]
    assert group.differences(SETTING, "explicit", "deq-jfb", "nc2") == pytest.approx({0: 0.2})
    assert group.differences(SETTING, "deq-jfb", "explicit", "nc1")[1] == pytest.approx(math.log(0.5))
