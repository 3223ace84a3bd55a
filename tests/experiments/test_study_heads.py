"""Heads alone on a frozen trunk: what they are trained on, that they resume, and that no other run is taken for one."""

from __future__ import annotations

import argparse
import re
import shutil

import heads
import pytest
import torch
from nc_study import protocol
from nc_study.record import RunResult, read_record
from nc_study.reporting.report import write
from nc_study.reporting.runs import collect
from nc_study.training import Trainer
from study_helpers import folder_of

TUNED = {arm: {"lr": 0.1, "weight_decay": 5e-4, "scale": 0.3} for arm in protocol.ARMS}


def test_heads_of_all_arms_on_one_trunk(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "tuned", lambda: TUNED)
    assert study("--model", "explicit")[0] == 0
    trunk = tmp_path / folder_of()
    asked = argparse.Namespace(trunk=trunk, seeds=1, threads=1, data_root="data")
    cached = heads.cache(asked, "cpu")
    (settings, *_) = heads.heads(asked)
    whole = Trainer(settings, cached)
    whole.network.load_state_dict(torch.load(trunk / "last.ckpt", weights_only=True)["network"])
    whole.network.stem, whole.network.trunk = torch.nn.Sequential(), torch.nn.Sequential()
    shown = read_record(RunResult, trunk / "result.json").network
    collapse, _ = whole.measure_collapse()
    assert collapse["nc1"] == pytest.approx(shown.nc["nc1"]), "the trunk's own head, on what was cached, is its network"
    orders = [torch.cat([one for _, one in cached.epoch(0, epoch, 16)]) for epoch in (1, 1, 2)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])

    capsys.readouterr()
    assert heads.main([str(trunk), "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("cached: features of 111 training and 20 test images") == 1
    assert "[10 of 10] deq-implicit, seed 1: test" in printed
    results = {path: path.stat().st_mtime_ns for path in trunk.glob("heads/*/result.json")}
    assert len(results) == 10
    (cut,) = trunk.glob("heads/*deq-jfb-seed1*")
    before = read_record(RunResult, cut / "result.json").network
    (cut / "result.json").unlink()
    assert heads.main([str(trunk), "--seeds", "2"]) == 0, "goes on from the checkpoint"
    assert read_record(RunResult, cut / "result.json").network.curves == before.curves
    assert sum(path.stat().st_mtime_ns != time for path, time in results.items()) == 1

    groups = collect([tmp_path]).groups
    assert sorted((group.trunk is not None, len(group.finished)) for group in groups) == [(False, 1), (True, 10)]
    assert not any(group.protocol for group in groups)
    (group,) = [group for group in groups if group.trunk]
    assert re.match("heads alone on the frozen trunk of shapes-k3-r10", group.name)
    assert set(group.differences(group.settings[0], "deq-jfb", "explicit", "overall")) == {0, 1}
    monkeypatch.setattr("nc_study.reporting.report.pictures", lambda group: iter(()))
    text = write(collect([tmp_path]), tmp_path / "report").with_name("report.md").read_text()
    assert "every seed): explicit; explicit, normalised; cell once; DEQ, JFB; DEQ, implicit." in text
    assert text.count("No verdict: it tells which ending") == 1 and "All arms are in the terminal" not in text


def test_a_trunk_that_cannot_be_used_is_an_error_in_a_line(made_up, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "tuned", lambda: TUNED)
    explicit, deq = made_up(model="explicit", dataset="shapes"), made_up(dataset="shapes")
    for folder, reason in (
        (tmp_path / "none", "holds no finished run: python experiments/study.py --protocol trains the trunk"),
        (deq, "holds a run of deq-jfb: the trunk is that of an explicit one"),
        (explicit, "last.ckpt is missing: it holds the trunk's weights"),
    ):
        assert heads.main([str(folder)]) == 1
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and str(folder) in errors and reason in errors
        shutil.rmtree(folder / "heads", ignore_errors=True)
