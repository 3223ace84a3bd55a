"""Folders that count as runs, and runs that may be averaged or compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from nc_study.config import Setting
from nc_study.record import FORMAT
from nc_study.reporting.runs import collect
from nc_study.reporting.tables import geometry_rows
from nc_study.rundir import RunDirectory
from runs.files import to_json, write_arrays

SETTING = Setting("cifar10", 3, 10)


def test_each_kind_of_folder_is_told_apart(made_up, tmp_path):
    whole = made_up()
    for name in ("old", "new", "half", "mistyped", "wrong", "unfinished"):
        made_up(name, seed=9)
    root = whole.parent
    result = json.loads((whole / "result.json").read_text())
    (root / "old" / "result.json").write_text('{"study": "cifar_lt"}')
    (root / "new" / "result.json").write_text(json.dumps({**result, "format": FORMAT + 1}))
    (root / "half" / "result.json").write_text((whole / "result.json").read_text()[:500])
    (root / "mistyped" / "result.json").write_text(json.dumps({**result, "machine": "fast"}))
    result["settings"]["lr"] = -1
    (root / "wrong" / "result.json").write_text(json.dumps(result))
    (root / "unfinished" / "result.json").unlink()
    with open(root / "unfinished" / "epochs.jsonl", "r+b") as log:
        log.truncate(len(log.readline()) + 7)
    (root / "other").mkdir()
    found = collect([tmp_path])
    assert [run.path for group in found.groups for run in group.finished] == [whole]
    told = {entry.folder.name: (entry.state, entry.reason) for entry in found.rejected}
    expected = {
        "old": ("unreadable", "an older version"),
        "new": ("unreadable", "a newer version"),
        "half": ("unreadable", "half/result.json cannot be read"),
        "mistyped": ("unreadable", "$.machine"),
        "wrong": ("unreadable", "--lr -1.0: more than 0"),
        "unfinished": ("unfinished", "1 of 4 epochs"),
    }
    assert told.keys() == expected.keys()
    for name, (state, reason) in expected.items():
        assert told[name][0] == state and reason in told[name][1]


def test_seeds_and_settings_are_one_group(made_up):
    root = made_up().parent
    made_up(seed=1, kernel="torch", metrics_every=1, compile=True)
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


def test_a_run_found_twice_counts_once(made_up, tmp_path):
    root = made_up("a").parent
    made_up("b")
    for name, day in (("a", 2), ("b", 1)):
        path = root / name / "result.json"
        path.write_bytes(to_json(replace(RunDirectory(path.parent).result, finished=f"2026-01-0{day}T00:00:00+00:00")))
    found = collect([root, root / "a", tmp_path])
    assert [run.path.name for run in found.groups[0].finished] == ["a"]
    assert {(entry.folder.name, entry.state) for entry in found.rejected} == {("b", "duplicate")}
    assert "seed 0" in found.rejected[0].reason and str(root / "a") in found.rejected[0].reason


def test_the_geometry_is_of_the_last_measurement_of_the_runs_that_saved_it(made_up):
    """Class means of length n_k^(-1/4) at right angles are the orthogonal frame; the measurement before was none."""
    counts = np.array([5000] * 3 + [500] * 7)
    frame, other = np.diag(counts**-0.25), np.random.default_rng(0).normal(size=(10, 10))
    arrays = {"epoch": [2, 4], "counts": [counts] * 2, "means": [other, frame], "weight": [other, other]}
    arrays |= {"traces": np.ones((2, 10)), "scatter": np.zeros((2, 10, 10))}
    path = made_up(seed=0)
    made_up(seed=1)
    write_arrays(path / "moments.npz", {name: np.array(one) for name, one in arrays.items()})
    (group,) = collect([path.parent]).groups
    (row,) = geometry_rows(group)
    assert (row["setting"], row["seeds"]) == ("(3,7) R = 10", 1) and row["means: orthogonal"] == "0.00"
    assert row["means: SELI"] > "0.1" and row["classifier: orthogonal"] > "0.1"
