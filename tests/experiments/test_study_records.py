"""Settings, the run's folder, the record of a run, its saved moments, and the paper's tables as typed in."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from nc_study.config import ARMS, Experiment, Setting, arm_options, settings_from
from nc_study.moments import moments
from nc_study.paper import INCONSISTENT, PAPER, settings_of
from nc_study.record import Accuracy, Spread
from nc_study.results import network_result, report
from nc_study.rundir import RunDirectory
from runs.files import locked, read_arrays
from runs.options import StudyError
from runs.states import write_state
from study_helpers import made_up_epoch, made_up_result, made_up_settings
from torch import nn


@pytest.mark.parametrize(
    ("gpu", "cpu", "auto"),
    [
        (False, {"avx512_bf16": False}, "fp32"),
        (False, {"avx512_bf16": True}, "bf16"),
        (False, {"amx_bf16": True}, "bf16"),
        (True, {}, "bf16"),
    ],
)
def test_preset_and_precision_are_for_the_machine_but_for_the_papers(gpu, cpu, auto, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: cpu)
    assert settings_from("cifar_lt").preset == ("paper" if gpu else "quick")
    assert settings_from("cifar_lt", preset="study").precision == auto
    assert settings_from("cifar_lt", preset="paper").precision == "fp32"
    assert settings_from("cifar_lt", precision="fp32").precision == "fp32"
    assert settings_from("cifar_lt", preset="paper", precision="auto").precision == auto


def test_every_option_that_decides_the_outcome_makes_a_folder_of_its_own():
    plain = settings_from("cifar_lt", device="cpu", dataset="cifar10", precision="fp32", model="explicit")
    assert plain.run_name == "cifar10-k3-r10-quick-explicit-seed0"
    words = {"dataset": "cifar100", "preset": "tuned", "solver": "anderson", "schedule": "constant"}
    words |= {"precision": "bf16", "evaluate": "validation", "compile": True, "tf32": True, "no_augmentation": True}
    words |= {"e_w": 0.5, "e_h": 0.5, "majority": 4, "imbalance": "exp", "loss": "logit-adjusted"}
    words |= {"tol": 0.5, "momentum": 0.5}
    options = [spec.name for spec in fields(Experiment) if spec.metadata]
    free = {"model", "cells", "adjoint", "device", "kernel"}
    changed = {name: words.get(name) or getattr(plain, name) + 1 for name in options if name not in free}
    others = [replace(plain, **{name: value}) for name, value in changed.items()]
    others += [replace(plain, **arm_options(arm)) for arm in ARMS]
    assert [other.arm for other in others[-len(ARMS) :]] == list(ARMS)
    assert len({other.run_name for other in others}) == len(others)


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


def test_weights_are_of_the_checkpoint_or_else_the_final_ones(run):
    network, saved = nn.Linear(2, 2), {"epoch": 1, "network": nn.Linear(2, 2).state_dict()}
    with pytest.raises(StudyError, match="has neither last.ckpt nor weights.ckpt"):
        run.load_weights(network)
    final = {name: tensor.bfloat16() for name, tensor in nn.Linear(2, 2).state_dict().items()}  # as a run writes them
    write_state(run.weights, final)
    run.load_weights(network)
    assert all(torch.equal(tensor, final[name].float()) for name, tensor in network.state_dict().items())
    run.save(saved)
    run.load_weights(network)
    assert all(torch.equal(tensor, saved["network"][name]) for name, tensor in network.state_dict().items())
    run.weights.write_bytes(b"damaged")
    (run.path / "last.ckpt").unlink()
    with pytest.raises(StudyError, match="weights.ckpt cannot be read"):
        run.load_weights(network)


def test_what_was_saved_after_the_checkpoint_is_dropped(run):
    """Lines, and the moments that are measured in every second epoch."""
    lines = [made_up_epoch(number, made_up_settings()) for number in range(1, 5)]
    saved = {line.epoch: {"means": np.full((10, 3), line.epoch, np.float32)} for line in lines if line.nc}
    for line in lines[:3]:
        run.append(line, saved.get(line.epoch))
    with open(run.path / "epochs.jsonl", "a") as file:
        file.write('{"epoch": 4, "te')
    assert run.epochs == lines[:3]
    run.cut(2)
    with pytest.raises(StudyError, match="epochs.jsonl lacks lines of the 3 finished epochs"):
        run.cut(3)
    run.append(lines[2])
    assert run.epochs == lines[:3] and len((run.path / "epochs.jsonl").read_text().splitlines()) == 3
    run.append(lines[3], saved[4])
    kept = read_arrays(run.moments)
    assert kept["epoch"].tolist() == [2, 4] and kept["means"][:, 0, 0].tolist() == [2, 4]
    run.cut(3)
    assert read_arrays(run.moments)["epoch"].tolist() == [2]
    run.append(lines[3])
    with pytest.raises(StudyError, match="moments.npz lacks measurements of these epochs: start again"):
        run.cut(4)
    run.cut(1)
    assert not run.moments.exists()


def test_a_run_is_neither_overwritten_nor_gone_on_with_under_other_settings(run):
    run.start(made_up_settings())
    run.start(made_up_settings(lr=0.3))  # nothing has been trained yet
    run.save({"epoch": 1})
    with pytest.raises(StudyError, match="holds a run of these settings: --resume continues it"):
        run.start(made_up_settings(lr=0.3))
    run.start(made_up_settings(lr=0.3, resume=True, out="elsewhere", data_root="elsewhere", threads=2))
    with pytest.raises(StudyError, match="was begun with --lr 0.3, not 0.1"):
        run.start(made_up_settings(lr=0.1, resume=True))
    with pytest.raises(StudyError, match="was begun with --kernel auto, not torch"):  # no advice that fails
        run.start(made_up_settings(lr=0.3, kernel="torch"))


def test_a_second_process_is_kept_out(run):
    with locked(run.path), pytest.raises(StudyError, match="another process"), locked(run.path):
        pass
    with locked(run.path):
        pass


def test_the_tables_are_complete_and_overall_is_the_class_mean_but_for_the_entries_marked():
    assert set(PAPER) == set(settings_of("all", None, "cifar")) and len(PAPER) == 20
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


def test_solves_without_a_finite_residual_are_reported_as_such():
    result = made_up_result(made_up_settings())
    nothing = replace(result.network.solver, residual=None, converged=0.0)
    text = report([replace(result, network=replace(result.network, solver=nothing))])
    assert "mean residual undefined" in text and "mean residual 5.0e-04" in report([result])


UNIT = 2.0**-24  # rounding to float32


def test_the_scatter_is_the_within_class_covariance_in_the_span_of_the_centred_means():
    """A sample that is not finite is left out. Tolerances: float32, times the condition of the means."""
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.repeat(np.arange(4), (50, 20, 5, 6)))
    features = draw.normal(size=(4, 7))[labels] + 0.3 * draw.normal(size=(81, 7)) @ draw.normal(size=(7, 7))
    features[np.flatnonzero(labels == 3)[0], 2] = math.inf
    saved = moments(torch.from_numpy(features), torch.from_numpy(labels), torch.ones(4, 7, dtype=torch.float64))
    kept = np.isfinite(features).all(1)
    features, labels = features[kept], labels[kept]
    assert saved["counts"].tolist() == [50, 20, 5, 5] and saved["weight"].dtype == np.float32
    means = np.stack([features[labels == label].mean(0) for label in range(4)])
    deviations = features - means[labels]
    np.testing.assert_allclose(saved["means"], means, rtol=UNIT, atol=1e-15)
    traces = [(deviations[labels == label] ** 2).sum(1).mean() for label in range(4)]
    np.testing.assert_allclose(saved["traces"], traces, rtol=UNIT + 1e-13)
    centred = means - means.mean(0)
    directions, singular, _ = np.linalg.svd(centred.T, full_matrices=False)
    span = directions[:, :3]
    condition = (singular[0] / singular[2]) ** 2
    inside = span @ span.T @ (deviations.T @ deviations / 80) @ span @ span.T
    ours = centred.T @ saved["scatter"].astype(np.float64) @ centred
    assert np.linalg.norm(ours - inside) <= condition * 10 * UNIT * np.linalg.norm(inside)
