"""The study's training step: what is counted, which part a time is put to, and what follows from it."""

import time

import pytest
import torch
from harness import study_step
from harness.study_step import Stopwatch, measure, settings_of
from nc_study.data import Source, load
from nc_study.training import Trainer

SLEEP = 0.02


@pytest.fixture
def settings():
    return settings_of(2, 4, "cpu", threads=1)


@pytest.fixture
def watch(settings):
    data = load(Source("shapes", ""), settings, torch.device("cpu"))
    return Stopwatch(Trainer("deq", settings, data), "deq")


def sleep(*call):
    time.sleep(SLEEP)


def test_the_time_of_a_part_is_put_to_it(watch):
    last, trunk = watch.trainer.network.last, watch.trainer.network.trunk
    quick = watch.step()
    assert set(quick) == set(study_step.PARTS) and all(ms > 0 for ms in quick.values())
    delays = {
        "trunk forward": trunk[0].conv1.register_forward_hook,
        "head and loss": watch.trainer.network.classifier.register_forward_hook,
        "last block backward": last.cell.conv2.register_full_backward_hook,
        "trunk backward": trunk[-1].norm2.register_full_backward_hook,
        "optimiser": watch.trainer.optimizer.register_step_pre_hook,
    }
    for part, register in delays.items():
        handle = register(sleep)
        spent = watch.step()
        handle.remove()
        late = {name for name in spent if spent[name] >= 1e3 * SLEEP}
        assert part in late, (part, spent)
    last.cell.conv2.register_forward_hook(sleep)
    spent = watch.step()
    assert spent["last block f"] >= 1e3 * SLEEP * watch.evaluations[-1]
    assert 1e3 * SLEEP <= spent["f for the gradient"] < spent["last block f"]


def test_flops_of_f_are_those_of_two_convolutions(watch):
    total, of_f, evaluations = watch.flop()
    batch, pixels, channels = 4, 4 * 4, 16
    assert of_f == 2 * (2 * batch * pixels * 9 * channels**2)
    assert total > (evaluations + 3) * of_f  # once more for the gradient, which costs twice as much


def test_the_rows_of_a_size(settings):
    explicit, deq = measure(settings, 3, 60)
    assert (explicit["provider"], deq["provider"], deq["rounds"]) == ("explicit", "deq", 3)
    assert "evaluations" not in explicit and explicit["parts"]["solver"] == 0 < deq["parts"]["solver"]
    assert deq["over_flop"] == pytest.approx(deq["ms"] / explicit["ms"] / (deq["flop"] / explicit["flop"]))
    assert explicit["nc_share"] == pytest.approx(explicit["nc_ms"] / (50_000 / 4 * explicit["ms"]))
    # 569 500 images an epoch in the 20 entries; metrics at epochs 1, 5, 10, ... 100; 10 000 test images.
    evaluated = 569_500 * 21 + 20 * 100 * 10_000
    hours = (56_950_000 * deq["ms"] / 4000 + evaluated / deq["images_per_second"]) / 3600
    assert deq["paper_hours"] == pytest.approx(hours)
