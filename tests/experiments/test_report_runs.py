"""Which folders count as runs, and which runs may be averaged or compared."""

from __future__ import annotations

import json
import shutil

import pytest
from nc_study.cells import Cell
from nc_study.config import StudyError
from nc_study.reporting.runs import collect
from nc_study.rundir import read_arrays

CELL = Cell("cifar10", 3, 10)


def change(path, **entries):
    """Overwrite entries of a result; None takes one out."""
    result = json.loads((path / "result.json").read_text())
    result |= {name: value for name, value in entries.items() if value is not None}
    for name in (name for name, value in entries.items() if value is None):
        del result[name]
    (path / "result.json").write_text(json.dumps(result))


def states(found):
    return {entry.path.name: entry.state for entry in found.rejected}


def test_each_kind_of_folder_is_told_apart(made_up, tmp_path):
    whole = made_up()
    for name in ("old", "new", "half", "text", "unfinished", "failed", "other"):
        made_up(name, seed=9)
    root = whole.parent
    change(root / "old", format=None)
    change(root / "new", format=99)
    (root / "half" / "result.json").write_text((whole / "result.json").read_text()[:500])
    (root / "text" / "result.json").write_text("[1, 2]")
    (root / "unfinished" / "result.json").unlink()
    (root / "unfinished" / "deq.jsonl").write_text('{"epoch": 1}\n{"epo')
    (root / "failed" / "result.json").unlink()
    (root / "failed" / "failed.json").write_text(json.dumps({"error": "the disk is full", "command": "x", "when": "y"}))
    shutil.rmtree(root / "other")
    (root / "other").mkdir()
    found = collect([tmp_path])
    assert [run.path for group in found.groups for run in group.finished_runs] == [whole]
    reasons = {entry.path.name: entry.reason for entry in found.rejected}
    assert states(found) == {
        "old": "written by an older version",
        "new": "written by a newer version",
        "half": "unreadable",
        "text": "unreadable",
        "unfinished": "unfinished",
        "failed": "failed",
    }
    assert reasons["unfinished"] == "explicit: 4 of 4 epochs, deq: 1 of 4 epochs"
    assert reasons["failed"] == "the disk is full"
    assert "half/result.json cannot be read" in reasons["half"]


def test_a_run_that_failed_once_and_then_finished_counts(made_up):
    path = made_up()
    (path / "failed.json").write_text('{"error": "killed"}')
    assert states(collect([path])) == {} and len(collect([path]).groups) == 1


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        (("models", "deq", "accuracy", "overall", "mean"), "high", "models.deq.accuracy.overall.mean is 'high'"),
        (("models", "deq", "curves", "minority"), [1.0], "models.deq.curves.minority: not 4 numbers"),
        (("models", "explicit", "confusion"), [[1]], "models.explicit.confusion: not 10 rows"),
        (("settings", "seed"), None, "settings.seed is missing"),
        (("models", "deq", "confusion", 3), [1] * 9 + ["x"], "models.deq.confusion.3: not 10 numbers"),
        (
            ("models", "deq", "curves", "solver", "minority", "residual"),
            [1.0],
            "curves.solver.minority.residual: not 4",
        ),
        (("models", "deq", "curves", "solver"), None, "models.deq.curves.solver.iterations: not 4 numbers"),
        (("models", "deq", "curves", "epoch"), [], "models.deq.curves.epoch: not any numbers"),
        (("models", "deq", "spectral_radius", "labels"), [], "models.deq.spectral_radius.labels: not any numbers"),
        (("models", "deq", "accuracy", "overall", "std"), float("nan"), "models.deq.accuracy.overall.std is nan"),
        (("models",), {}, "models: none"),
        (("machine",), "fast", "machine is 'fast'"),
        (("models", "deq", "accuracy", "minority"), {"mean": 1.0}, "models.deq.accuracy.minority.std is missing"),
    ],
)
def test_a_result_that_lacks_a_part_is_named_and_not_counted(made_up, where, value, named):
    path = made_up()
    result = json.loads((path / "result.json").read_text())
    part = result
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    (path / "result.json").write_text(json.dumps(result))
    found = collect([path])
    assert found.groups == [] and named in found.rejected[0].reason


def test_seeds_and_cells_are_one_group(made_up):
    root = made_up().parent
    made_up(seed=1, kernel="torch", threads=2, metrics_every=1, compile=True)
    made_up(ratio=100)
    made_up(study="cifar_balanced")
    (group,) = collect([root]).groups
    assert group.cells == [Cell("cifar10"), CELL, Cell("cifar10", 3, 100)]
    assert list(group.seeds(CELL, "deq")) == [0, 1] and list(group.pairs(CELL)) == [0, 1]


@pytest.mark.parametrize(
    "given",
    [
        {"preset": "tuned", "width": 16, "n_majority": 1000, "batch_size": 32, "test_images": 2000},
        {"dataset": "shapes"},
        {"solver": "anderson"},
        {"adjoint": "implicit"},
        {"lr": 0.02},
        {"epochs": 6},
        {"precision": "bf16"},
        {"e_w": 0.01},
        {"width": 8},
        {"max_iter": 30},
    ],
)
def test_runs_of_other_settings_are_never_in_one_group(made_up, given):
    root = made_up("first").parent
    made_up("second", seed=1, **given)
    found = collect([root])
    assert [len(group.runs) for group in found.groups] == [2, 2]
    names = {group.name for group in found.groups}
    assert len(names) == 2
    assert "quick preset on cifar10, Broyden, JFB, epochs 4" in names


def test_a_pair_takes_the_same_seed_and_the_same_group(made_up):
    root = made_up("e0", model="explicit").parent
    made_up("d1", model="deq", seed=1)
    made_up("d0", model="deq", adjoint="implicit")
    assert all(group.pairs(CELL) == {} for group in collect([root]).groups)
    made_up("d2", model="deq")
    assert [len(group.pairs(CELL)) for group in collect([root]).groups] == [1, 0]


def test_a_run_found_twice_counts_once(made_up, tmp_path):
    root = made_up("a").parent
    made_up("b")
    change(root / "a", finished="2026-01-02T00:00:00+00:00")
    change(root / "b", finished="2026-01-01T00:00:00+00:00")
    found = collect([root])
    assert [run.path.name for run in found.groups[0].finished_runs] == ["a"]
    assert states(found) == {"b": "duplicate"}
    assert "seed 0" in found.rejected[0].reason and str(root / "a") in found.rejected[0].reason
    twice = collect([root, root / "a", tmp_path])
    assert len(twice.groups[0].runs) == 2 and len(twice.rejected) == len(found.rejected)


def test_a_setting_that_an_earlier_result_does_not_name_has_its_default(made_up):
    path = made_up("a")
    made_up("b", seed=1)
    result = json.loads((path / "result.json").read_text())
    del result["settings"]["precision"], result["settings"]["e_w"]
    result["settings"]["amp"] = False
    (path / "result.json").write_text(json.dumps(result))
    assert len(collect([path.parent]).groups) == 1
    result["settings"]["amp"] = True
    (path / "result.json").write_text(json.dumps(result))
    assert sorted(group.name for group in collect([path.parent]).groups) == [
        "quick preset on cifar10, Broyden, JFB, epochs 4",
        "quick preset on cifar10, Broyden, JFB, epochs 4, precision bf16 in all of the network",
    ]


def test_real_data_comes_before_drawn_images(made_up):
    root = made_up("a", dataset="shapes").parent
    made_up("b", lr=1.0)
    made_up("c")
    assert [group.dataset for group in collect([root]).groups] == ["cifar10", "cifar10", "shapes"]


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(StudyError, match="absent: no such folder"):
        collect([tmp_path / "absent"])
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="file: not a folder"):
        collect([tmp_path / "file"])


def test_theory_is_found_and_a_damaged_one_named(tmp_path):
    claim = {"claim": "c", "source": "s", "verdict": "holds", "numbers": {"a": 1.0}, "text": "t"}
    for name, content in (("good", {"kind": "layer_peeled", "claims": [claim]}), ("bad", {"claims": [{"claim": "c"}]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layer_peeled.json").write_text(json.dumps(content))
    found = collect([tmp_path])
    assert [path.parent.name for path, _ in found.theory] == ["good"]
    assert "claims[0].source is missing" in found.rejected[0].reason


def test_damaged_features_are_named(made_up):
    path = made_up(features=True) / "features.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(StudyError, match=r"features\.npz cannot be read"):
        read_arrays(path)
