"""Grad-CAM and its measures compared with known answers, its control, and finished runs."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import separation
import torch
from nc_study.rundir import RunDirectory
from separation_study import frame, saliency
from separation_study.claims import FAILS, HOLDS, OPEN

TINY = saliency.Sizes(images=20, seeds=1, epochs=1, per_class=2)


def test_entropy_and_half_mass_of_known_maps():
    one_hot = torch.zeros(4, 4)
    one_hot[1, 2] = 5.0
    maps = torch.stack([torch.full((4, 4), 0.3), one_hot, torch.tensor([[4.0, 2, 1, 1]] + [[0.0] * 4] * 3)])
    assert [saliency.spread(one[None])["entropy"] for one in maps] == pytest.approx([4, 0, 1.75])
    assert [saliency.spread(one[None])["half"] for one in maps] == [8, 1, 1]
    found = saliency.spread(torch.cat([maps, torch.zeros(1, 4, 4)]))
    assert found == pytest.approx({"entropy": 5.75 / 3, "half": 10 / 3, "empty": 0.25})
    assert saliency.spread(torch.zeros(2, 4, 4)) == {"entropy": None, "half": None, "empty": 1.0}


@pytest.mark.parametrize("arm", ["explicit", "deq-implicit"])
def test_maps_are_grad_cams_and_the_control_changes_them_and_keeps_the_trunk(arm):
    network, settings = saliency.train_small(arm, TINY, 0)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    maps, classes = saliency.explain(network, images)
    torch.testing.assert_close(classes, network(images).logits.argmax(1))
    features = network.last(network.trunk(network.stem(images))).detach().requires_grad_()
    logits = network.classifier(features.mean((2, 3))).gather(1, classes[:, None])
    (gradient,) = torch.autograd.grad(logits.sum(), features)
    torch.testing.assert_close(maps, (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu().detach())
    other = saliency.randomised(network, settings)
    control, same = saliency.explain(other, images, classes)
    assert maps.shape == (3, 4, 4) and torch.equal(same, classes)
    assert not torch.allclose(control, maps, rtol=0.1, atol=0.1 * float(maps.max()))
    torch.testing.assert_close(other.trunk(other.stem(images)), network.trunk(network.stem(images)))


def made_up(name, entropies, correlation=0.0):
    """Return an arm under one seed after another."""
    values = [{"accuracy": 0.25, "entropy": one, "half": 2 * one, "rank correlation": correlation} for one in entropies]
    return [saliency.Arm(name, one, ((0.0, 1.0, 2.0, 3.0),)) for one in values]


@pytest.mark.parametrize(
    ("seeds", "shift", "correlation", "verdict"),
    [(5, 1.0, 0.0, HOLDS), (5, -1.0, 0.0, FAILS), (4, 1.0, 0.0, OPEN), (5, 1.0, 0.9, OPEN)],
)
def test_claims_are_paired_by_seed_and_need_maps_that_do_not_survive(seeds, shift, correlation, verdict):
    start = [2.0, 3.0, 1.0, 2.5, 1.5][:seeds]
    deq = made_up("deq-jfb", [one + shift * (1 + one / 100) for one in start], correlation)
    results = {
        frame.Unit("task", seed): saliency.Result(1, (bytes(32 * 32 * 3),), arms)
        for seed, arms in enumerate(zip(made_up("explicit", start), deq, strict=True))
    }
    (claim,) = saliency.section(TINY, results).claims
    assert claim.verdict == verdict and claim.seeds == seeds
    assert "broader than those of explicit" in claim.claim, "the direction that the paper says"
    assert claim.reason.endswith("these networks are 25% accurate, and a map has 4 positions")


@pytest.mark.tier("full")
def test_finished_runs_are_loaded_as_they_were_trained(study, tmp_path, monkeypatch, capsys):
    assert study("--epochs", "1")[0] == 0
    monkeypatch.setattr(saliency, "SALIENCY", replace(saliency.SALIENCY, sizes={"quick": TINY}))
    monkeypatch.setattr(separation, "EXPERIMENTS", {"saliency": saliency.SALIENCY})
    arguments = ["--experiment", "saliency", "--jobs", "1", "--out", str(tmp_path / "out")]
    assert separation.main([*arguments, "--runs", str(tmp_path / "none")]) == 1
    assert f"--runs {tmp_path / 'none'}: there must be a finished run" in capsys.readouterr().err
    assert separation.main([*arguments, "--runs", str(tmp_path)]) == 0
    experiment = saliency.of_runs(tmp_path, tmp_path)
    (unit,) = pickle.loads(pickle.dumps(experiment)).units(TINY)  # as other processes get it
    record = frame.Job(tmp_path / "out" / "quick", experiment, "quick", unit).record
    runs = {run.result.arm: run for run in map(RunDirectory, tmp_path.glob("shapes-*"))}
    assert record.result.images == 20 and [arm.name for arm in record.result.arms] == ["explicit", "deq-implicit"]
    for arm in record.result.arms:
        network, _ = saliency.load_run(runs[arm.name].path, tmp_path)
        torch.testing.assert_close(network.state_dict(), runs[arm.name].restore()["network"], rtol=0, atol=0)
        assert 100 * arm.values["accuracy"] == pytest.approx(runs[arm.name].epochs[-1].overall)
        assert 0 < arm.values["entropy"] <= math.log2(16) and len(arm.maps) == len(record.result.shown)
    assert "runs of quick preset on shapes" in (tmp_path / "out" / "quick" / "report.md").read_text()


def test_without_runs_small_networks_are_trained_and_the_report_says_so():
    results = {unit: saliency.measure(TINY, unit) for unit in saliency.units(TINY)}
    found = saliency.section(TINY, results)
    assert "trained here on drawn shapes" in found.notes[0] and len(found.claims) == 2
    assert [row["arm"] for row in found.tables[0].rows] == list(saliency.DRAWN_ARMS)
