"""The study's training step: its counters, and the numbers derived from its times."""

from dataclasses import replace

import pytest
import torch
from harness.study_step import Stepper, measure, settings_of
from nc_study.data import Source, load
from nc_study.training import Trainer

SETTINGS = settings_of(2, 4, "cpu", threads=1)


def test_operations_are_those_of_the_mean_number_of_evaluations():
    data = load(Source("shapes", ""), SETTINGS, torch.device("cpu"))
    stepper = Stepper(Trainer(replace(SETTINGS, model="deq"), data))
    stepper.step()
    batch, pixels, channels = 4, 4 * 4, 16
    operations = 2 * (2 * batch * pixels * 9 * channels**2)  # two convolutions
    (made,) = stepper.evaluations
    assert stepper.flop() > (made + 3) * operations  # another one for the gradient, which costs twice as much
    stepper.evaluations = [made]
    before = stepper.flop()
    stepper.evaluations = [made + 10]
    assert stepper.flop() == pytest.approx(before + 10 * operations)


def test_the_rows_of_a_size():
    explicit, deq = measure(SETTINGS, 3, 60)
    assert (explicit["provider"], deq["provider"], deq["rounds"]) == ("explicit", "deq", 3)
    assert "evaluations" not in explicit and deq["evaluations"] >= 1
    assert deq["over_flop"] == pytest.approx(deq["ms"] / explicit["ms"] / (deq["flop"] / explicit["flop"]))
    assert explicit["nc_share"] == pytest.approx(explicit["nc_ms"] / (50_000 / 4 * explicit["ms"]))
    # 569 500 images an epoch in the 20 entries; metrics at epochs 1, 5, ... 100; tests then and in the last 10.
    evaluated = 569_500 * 21 + 20 * 29 * 10_000
    hours = (56_950_000 * deq["ms"] / 4000 + evaluated / deq["images_per_second"]) / 3600
    assert deq["paper_hours"] == pytest.approx(hours)
