"""Which folders count as runs, and which runs may be averaged or compared."""

from __future__ import annotations

import json
from dataclasses import replace

from nc_study.config import Setting
from nc_study.record import FORMAT, RunResult, read_record, to_json
from nc_study.reporting.runs import collect

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
    with open(root / "unfinished" / "deq.jsonl", "r+b") as log:
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
        "unfinished": ("unfinished", "explicit: 4 of 4 epochs, deq: 1 of 4 epochs"),
    }
    assert told.keys() == expected.keys()
    for name, (state, reason) in expected.items():
        assert told[name][0] == state and reason in told[name][1]


def test_seeds_and_settings_are_one_group(made_up):
    root = made_up().parent
    made_up(seed=1, kernel="torch", threads=2, metrics_every=1, compile=True)
    made_up(ratio=100)
    made_up(study="cifar_balanced")
    (group,) = collect([root]).groups
    assert group.settings == [Setting("cifar10"), SETTING, Setting("cifar10", 3, 100)]
    assert list(group.networks(SETTING, "deq")) == [0, 1] and len(group.pairs(SETTING)) == 2


def test_runs_of_other_options_are_never_in_one_group(made_up):
    made_up("first")
    options = [{"dataset": "shapes"}, {"solver": "anderson"}, {"adjoint": "implicit"}, {"precision": "bf16"}]
    options += [{"e_w": 0.01}, {"preset": "tuned", "width": 16, "n_majority": 1000, "batch_size": 32}]
    for number, given in enumerate(options):
        root = made_up(f"other{number}", **given).parent
    groups = collect([root]).groups
    assert len(groups) == len({group.name for group in groups}) == 7
    assert any(group.name == "quick preset on cifar10, broyden, jfb, epochs 4" for group in groups)
    assert groups[-1].experiment.dataset == "shapes", "real data come before drawn images"


def test_a_pair_takes_the_same_seed_and_the_same_group(made_up):
    root = made_up("e0", model="explicit").parent
    made_up("d1", model="deq", seed=1)
    made_up("d0", model="deq", adjoint="implicit")
    assert all(group.pairs(SETTING) == [] for group in collect([root]).groups)
    made_up("d2", model="deq")
    assert [len(group.pairs(SETTING)) for group in collect([root]).groups] == [1, 0]


def test_a_run_found_twice_counts_once(made_up, tmp_path):
    root = made_up("a").parent
    made_up("b")
    for name, day in (("a", 2), ("b", 1)):
        path = root / name / "result.json"
        path.write_bytes(to_json(replace(read_record(RunResult, path), finished=f"2026-01-0{day}T00:00:00+00:00")))
    found = collect([root, root / "a", tmp_path])
    assert [run.path.name for run in found.groups[0].finished] == ["a"]
    assert {(entry.folder.name, entry.state) for entry in found.rejected} == {("b", "duplicate")}
    assert "seed 0" in found.rejected[0].reason and str(root / "a") in found.rejected[0].reason
