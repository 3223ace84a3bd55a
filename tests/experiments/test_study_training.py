"""Training: the skip rule, the learning rate, and the contents of an epoch's line."""

import dataclasses
import math

import pytest
import torch
from correctness import GRADIENT
from nc_study import training
from nc_study.config import settings_from
from nc_study.training import Inference, SolverTally, Trainer, accuracies, describe, learning_rate, usable
from runs.options import StudyError
from study_helpers import CPU, assert_same, float64, shapes_data
from tqdm import tqdm

from deqfast import Solution, Status


def trainer(model="deq", **given):
    tiny = {"dataset": "shapes", "device": "cpu", "kernel": "torch", "width": 1, "n_majority": 16, "ratio": 4}
    tiny |= {"test_images": 20, "epochs": 2, "batch_size": 16, **given}
    settings = settings_from("cifar_lt", model=model, precision="fp32", **tiny)
    return Trainer(settings, shapes_data(settings))


def solution(status, residual):
    residual, status = torch.tensor(residual), torch.tensor([int(code) for code in status], dtype=torch.int8)
    iterations = torch.arange(1, len(status) + 1, dtype=torch.int32)
    return Solution(None, status, iterations, residual, residual, residual, len(status), len(status) ** 2)


MIXED = solution(
    [Status.CONVERGED, Status.MAX_ITER, Status.MAX_ITER, Status.NONFINITE, Status.STALLED, Status.NONFINITE],
    [1e-4, 0.5, 1.5, 0.2, 1e-2, math.inf],
)


def test_the_tally_counts_every_kind():
    assert usable(MIXED).tolist() == [True, True, False, False, True, False]
    assert usable(solution([Status.MAX_ITER], [math.nan])).tolist() == [False]
    tally = SolverTally(CPU)
    assert tally.summary() is None
    tally.add(SolverTally.sums_of(MIXED))
    tally.add(SolverTally.sums_of(solution([Status.CONVERGED] * 2, [1e-4, 1e-4])))
    summary = tally.summary()
    assert (summary.max_iter, summary.nonfinite, summary.stalled, summary.skipped) == (2, 2, 1, 3)
    assert summary.converged == pytest.approx(3 / 8)
    assert summary.iterations == pytest.approx((21 + 3) / 8)
    assert summary.residual == pytest.approx((1e-4 + 0.5 + 1.5 + 0.2 + 1e-2 + 2e-4) / 7)  # of the finite ones


def test_without_a_usable_sample_no_step_is_taken(monkeypatch):
    run = trainer()
    run.train_epoch(1, tqdm(disable=True))
    monkeypatch.setattr(training, "usable", lambda solved: torch.zeros_like(solved.status, dtype=torch.bool))
    momenta = [run.optimizer.state[parameter]["momentum_buffer"] for parameter in run.network.parameters()]
    assert any(momentum.any() for momentum in momenta)
    before = [tensor.clone() for tensor in (*run.network.parameters(), *momenta)]
    with pytest.raises(StudyError, match="no longer finite in epoch 2"):  # the mean over no sample
        run.train_epoch(2, tqdm(disable=True))
    assert all(torch.equal(a, b) for a, b in zip((*run.network.parameters(), *momenta), before, strict=True))
    assert len(run.infer("test").predictions) == 20  # evaluation leaves nothing out


@float64()
def test_a_sample_that_is_not_finite_is_left_out_as_if_it_were_not_there():
    weights = []
    for broken in (True, False):
        run = trainer()
        images, labels = next(run.data.epoch(0, 1, 16))
        run.network.eval()  # batch normalisation would spread the NaN to every sample
        others = torch.arange(16) != 3
        if broken:
            images[3] = math.nan
        else:
            images, labels = images[others], labels[others]
        tally = SolverTally(CPU)
        assert run.train_step(images, labels, tally)[2] == 15
        summary = tally.summary()
        assert summary.nonfinite == summary.skipped == broken
        weights.append([*run.network.last.parameters(), run.network.classifier.weight])
    assert_same(*weights, rtol=GRADIENT, atol=GRADIENT)


def test_a_loss_that_explodes_is_an_error_with_advice():
    run = trainer("explicit", lr=1e30, schedule="constant")
    with pytest.raises(StudyError, match="no longer finite in epoch 1: --lr 1e\\+30 is too large"):
        run.train_epoch(1, tqdm(disable=True))


def test_weights_that_are_not_finite_are_an_error_at_a_finite_loss(monkeypatch):
    """As after the last step of an epoch, whose loss is the one before it."""
    run = trainer()
    monkeypatch.setattr(run, "train_step", lambda *_: torch.ones(3, dtype=torch.float64))
    run.train_epoch(1, tqdm(disable=True))
    next(run.network.last.parameters()).data.fill_(math.nan)
    with pytest.raises(StudyError, match="no longer finite in epoch 2"):
        run.train_epoch(2, tqdm(disable=True))


def test_learning_rates():
    constant = settings_from("cifar_lt", device="cpu", lr=0.3, schedule="constant")
    assert {learning_rate(constant, done) for done in (0, 0.5, 1)} == {0.3}
    cosine = settings_from("cifar_lt", device="cpu", lr=0.3, schedule="cosine")
    rates = [learning_rate(cosine, (i + 0.5) / 1000) for i in range(1000)]
    assert 0 < rates[0] < 0.02 and max(rates) == pytest.approx(0.3, rel=0.02) and rates[-1] < 1e-4
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)


def test_metrics_and_tests_are_made_when_due():
    run = trainer("explicit", epochs=13, metrics_every=2)
    lines, saved = zip(*(run.run_epoch(epoch, tqdm(disable=True)) for epoch in (1, 2, 3, 4, 5, 12, 13)), strict=True)
    assert [line.epoch for line in lines if line.nc] == [1, 2, 4, 12, 13]
    assert [moments is None for moments in saved] == [line.nc is None for line in lines]
    assert [line.epoch for line in lines if line.overall is not None] == [1, 2, 4, 5, 12, 13]
    assert "test" in describe("explicit", lines[3], 13) and "test" not in describe("explicit", lines[2], 13)


def test_accuracy_is_the_mean_over_classes():
    data = trainer("explicit").data
    truth = torch.arange(10).repeat_interleave(2)
    predictions = torch.where(truth < 3, truth, 0)
    predictions[truth == 5] = torch.tensor([5, 7])
    seen = Inference(predictions, truth, torch.zeros(20, 1))
    parts = accuracies(seen, data)
    assert parts["majority"] == 100 and parts["minority"] == pytest.approx(50 / 7)
    assert parts["overall"] == pytest.approx(0.3 * 100 + 0.7 * 50 / 7)
    assert accuracies(seen, dataclasses.replace(data, majority=10))["minority"] is None


def test_many_medium_and_few_are_by_the_training_images_of_a_class():
    """(Liu et al., CVPR 2019.) Of 4, 4 and 2 classes; class k is right in k of 10 images."""
    data = dataclasses.replace(trainer("explicit").data, counts=(500, 300, 200, 101, 100, 50, 30, 20, 19, 5))
    truth = torch.arange(10).repeat_interleave(10)
    predictions = torch.where(torch.arange(10).repeat(10) < truth, truth, 99)
    seen = Inference(predictions, truth, torch.zeros(100, 1))
    small = dataclasses.replace(data, counts=(50,) * 10)
    for sizes, expected in ((data, (15, 55, 85)), (small, (None, 45, None))):
        parts = accuracies(seen, sizes)
        assert (parts["many"], parts["medium"], parts["few"]) == expected


@float64()
def test_logit_adjustment_adds_the_classes_shares_in_training_only():
    run, adjusted = trainer("explicit", width=2), trainer("explicit", width=2, loss="logit-adjusted")
    images, labels = next(run.data.epoch(0, 1, 16))
    logits = run.network.train()(images).logits
    shares = torch.tensor(run.data.counts, dtype=torch.float64) / len(run.data.train_labels)
    expected = torch.nn.functional.cross_entropy(logits + shares.log(), labels, reduction="sum").detach()
    trained = [each.train_step(images, labels, SolverTally(CPU)) for each in (run, adjusted)]
    assert trained[1][0] == pytest.approx(float(expected)) != pytest.approx(float(trained[0][0]))
    assert trained[0][1] == trained[1][1], "what is right is judged by the logits as they are"
