"""Interleaved training steps of the study's two networks, NC1-NC4 as a share of an epoch, and the paper's hours."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from nc_study.config import Settings, settings_from
from nc_study.data import Source, load
from nc_study.record import EAGER
from nc_study.training import EVALUATION_BATCH, SolverTally, Trainer, autocast
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import deqfast

from .collapse import clusters
from .record import Row
from .suite import columns_of
from .timing import in_turns, wait

MODELS = ("explicit", "deq")
_start: Barrier | None = None
EPOCH = 50_000  # images of balanced CIFAR-10
# The 20 settings of the paper's tables, 100 epochs each: images of an epoch, epochs with metrics, and with a test.
PAPER_IMAGES, PAPER_SETTINGS, PAPER_EPOCHS, PAPER_METRICS, PAPER_TESTS, TEST_IMAGES = 569_500, 20, 100, 21, 29, 10_000


class Stepper:
    """Network of the study with its own batches. evaluations: mean evaluations per sample, for each step made."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        epochs = (trainer.data.epoch(0, epoch, trainer.settings.batch_size) for epoch in itertools.count(1))
        self.batches = itertools.chain.from_iterable(epochs)
        self.evaluations: list[float] = []
        self.state: Tensor | None = None
        if trainer.steps == EAGER and isinstance(trainer.network.last, deqfast.DEQBlock):  # a graph's are not counted
            trainer.network.last.register_forward_hook(self._solved)

    def _solved(self, block: Any, inputs: Any, output: Any) -> None:
        self.state = output[0].detach()
        self.evaluations.append(output[1].sample_evaluations / len(self.state))

    def step(self) -> None:
        """Make a training step, including its batch's augmentation."""
        self.trainer.network.train()
        images, labels = next(self.batches)
        self.trainer.train_step(images, labels, SolverTally(images.device))

    def flop(self) -> float:
        """Floating-point operations of a step with the mean number of evaluations of the steps so far."""
        mean = statistics.fmean(self.evaluations) if self.evaluations else 0
        with FlopCounterMode(display=False) as counter:
            self.step()
        total = counter.get_total_flops()
        if self.state is None:
            return total
        block: Any = self.trainer.network.last
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block.cell(self.state, self.state)
        return total + (mean - self.evaluations[-1]) * counter.get_total_flops()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Apply the network to a batch in evaluation mode."""
        network, data = self.trainer.network.eval(), self.trainer.data
        repeats = -(-EVALUATION_BATCH // len(data.train_images))
        with autocast(self.trainer.settings):
            network(data.normalise(data.train_images.repeat(repeats, 1, 1, 1)[:EVALUATION_BATCH]))


def steppers_of(settings: Settings) -> dict[str, Stepper]:
    """The study's two networks, on drawn images."""
    data = load(Source("shapes", ""), settings, torch.device(settings.device))
    return {model: Stepper(Trainer(replace(settings, model=model), data)) for model in MODELS}


def measure(settings: Settings, steps: int, seconds: float) -> list[Row]:
    """A row for each network of one size: the times of its steps, and numbers derived from them.

    times_explicit: the DEQ's time over the explicit network's. flop_ratio: the same for floating-point operations.
    over_flop: the first over the second. nc_ms, nc_share: NC1-NC4 of an epoch's features, also as a share of an
    explicit epoch. paper_hours: all trainings of the paper's tables at these rates.
    """
    device, batch, steppers = settings.device, settings.batch_size, steppers_of(settings)
    calls = {model: stepper.step for model, stepper in steppers.items()}
    spent = in_turns(calls, device, rounds=steps, seconds=seconds)
    about: Row = {"section": "training step", "case": f"width {settings.width}, batch {batch}, {settings.adjoint}"}
    about |= {name: getattr(settings, name) for name in ("width", "device", "precision", "adjoint", "threads")}
    rows: list[Row] = []
    for model, stepper in steppers.items():
        row = {**about, "batch": batch, "provider": model, **columns_of(spent[model])}
        if stepper.evaluations:
            row["evaluations"] = statistics.fmean(stepper.evaluations)
        row["flop"] = stepper.flop()
        row["images_per_second"] = 1e3 * EVALUATION_BATCH / median_ms(stepper.evaluate, device, 2)
        row["paper_hours"] = paper_hours(batch, row["ms"], row["images_per_second"])
        rows.append(row)
    explicit, deq = rows
    deq["times_explicit"], deq["flop_ratio"] = deq["ms"] / explicit["ms"], deq["flop"] / explicit["flop"]
    deq["over_flop"] = deq["times_explicit"] / deq["flop_ratio"]
    drawn = clusters(EPOCH, 8 * settings.width, settings.classes)
    features, labels, weight = (tensor.to(device) for tensor in drawn)
    collapse = partial(deqfast.neural_collapse, features, labels, weight, settings.classes)
    explicit["nc_ms"] = median_ms(collapse, device, 5)
    explicit["nc_share"] = explicit["nc_ms"] / (EPOCH / batch * explicit["ms"])
    return rows


def meet_at(start: Barrier) -> None:
    """Let this process begin to count at the barrier."""
    global _start
    _start = start


def steps_per_second(width: int, batch: int, device: str, seconds: float) -> float:
    """Rate of the DEQ's steps, as the study runs them, from the moment at which the first steps of all are made."""
    step = steppers_of(settings_of(width, batch, device, eager=False, threads=1))["deq"].step
    for _ in range(5):
        step()
    wait(device)
    assert _start is not None
    _start.wait()
    made, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        step()
        made += 1
        if made % 20 == 0:
            wait(device)  # else the host would count steps that the device has yet to make
    wait(device)
    return made / (time.monotonic() - end + seconds)


def median_ms(call: Any, device: str, rounds: int) -> float:
    return 1e3 * statistics.median(in_turns({"call": call}, device, rounds)["call"])


def paper_hours(batch: int, step_ms: float, images_per_second: float) -> float:
    """Hours for a network's trainings of the paper's tables, if all steps and evaluations ran at these rates."""
    trained = PAPER_IMAGES * PAPER_EPOCHS
    evaluated = PAPER_IMAGES * PAPER_METRICS + PAPER_SETTINGS * PAPER_TESTS * TEST_IMAGES
    return (trained * step_ms / (1e3 * batch) + evaluated / images_per_second) / 3600


def settings_of(width: int, batch: int, device: str, **given: Any) -> Settings:
    """Settings of the study on drawn images, which need no data; the gradient is JFB, the steps eager, unless given."""
    sizes = {"width": width, "batch_size": batch, "n_majority": batch, "test_images": 10, "adjoint": "jfb"}
    sizes |= {"eager": True}
    return settings_from("cifar_balanced", preset="quick", dataset="shapes", device=device, **sizes | given)
