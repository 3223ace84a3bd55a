"""Where a training step of the study goes, explicit network and DEQ in turns, and what the paper would take here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from nc_study.config import Settings, settings_from
from nc_study.data import Source, load
from nc_study.training import EVALUATION_BATCH, SolverTally, Trainer, autocast
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import deqfast

from .collapse import clusters
from .record import Row
from .suite import columns_of
from .timing import in_turns

PARTS = (
    "data",
    "trunk forward",
    "last block f",  # of the explicit network: the block
    "solver",
    "f for the gradient",
    "head and loss",
    "last block backward",
    "trunk backward",
    "optimiser",
)
MODELS = ("explicit", "deq")
WARM_UPS, FEWEST_STEPS = 2, 3
EPOCH = 50_000  # images of balanced CIFAR-10
# Of the 20 settings of the paper's tables, 100 epochs each: images of an epoch, and epochs with a metrics pass.
PAPER_IMAGES, PAPER_SETTINGS, PAPER_EPOCHS, PAPER_METRICS, TEST_IMAGES = 569_500, 20, 100, 21, 10_000


class Stopwatch:
    """A trainer whose hooks say which part of a step begins now; times on the device's clock."""

    def __init__(self, trainer: Trainer, model: str) -> None:
        self.trainer, self.batches = trainer, endless(trainer)
        self.marks: list[tuple[str, Any]] = []
        self.evaluations: list[int] = []
        self.last_input: Tensor | None = None
        last = trainer.network.last
        last.register_forward_pre_hook(self._enter)
        last.register_forward_hook(self._leave)
        if isinstance(last, deqfast.DEQBlock):
            cell: Any = last.cell
            cell.register_forward_pre_hook(lambda *call: self.begin(f_part()))
            cell.register_forward_hook(lambda *call: self.begin("solver"))
        trainer.optimizer.register_step_pre_hook(lambda *call: self.begin("optimiser"))
        self.on_entry = "last block f" if model == "explicit" else "solver"

    def begin(self, part: str) -> None:
        """From now on time is spent on `part`."""
        mark: Any = time.perf_counter()
        if self.trainer.settings.device == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append((part, mark))

    def _enter(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self.last_input = inputs[0].detach()
        if inputs[0].requires_grad:  # the hook runs when all of the last block's backward is done
            inputs[0].register_hook(lambda grad: self.begin("trunk backward"))
        self.begin(self.on_entry)

    def _leave(self, module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        z = output
        if isinstance(output, tuple):
            z, solution = output
            self.evaluations.append(solution.evaluations)
        if z.requires_grad:
            z.register_hook(lambda grad: self.begin("last block backward"))
        self.begin("head and loss")

    def step(self) -> dict[str, float]:
        """Milliseconds of each part of a training step."""
        self.trainer.network.train()
        self.marks.clear()
        self.begin("data")
        images, labels = next(self.batches)
        self.begin("trunk forward")
        self.trainer.train_step(images, labels, self.tally())
        self.begin("end")
        spent = dict.fromkeys(PARTS, 0.0)
        if self.trainer.settings.device == "cuda":
            torch.cuda.synchronize()
        for (part, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            spent[part] += 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)
        return spent

    def tally(self) -> SolverTally:
        data = self.trainer.data
        return SolverTally(data.train_images.device, data.classes)

    def flop(self) -> tuple[int, int, int]:
        """FLOPs of a step, of a call of f, and the evaluations that the step made."""
        images, labels = next(self.batches)
        with FlopCounterMode(display=False) as counter:
            self.trainer.train_step(images, labels, self.tally())
        total, last = counter.get_total_flops(), self.trainer.network.last
        if not isinstance(last, deqfast.DEQBlock):
            return total, 0, 0
        assert self.last_input is not None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            last.cell(self.last_input, self.last_input)
        return total, counter.get_total_flops(), self.evaluations[-1]


def f_part() -> str:
    return "f for the gradient" if torch.is_grad_enabled() else "last block f"


def endless(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        epoch += 1
        yield from trainer.data.epoch(0, epoch, trainer.settings.batch_size)


def measure(settings: Settings, steps: int, seconds: float) -> list[Row]:
    """A row for each network of one size: medians of its steps and of their parts, and what follows from them.

    times_explicit, flop_ratio, over_flop: the DEQ's time over the explicit network's, the same of floating-point
    operations, and one over the other; nc_ms, nc_share: NC1-NC4 of an epoch's features, also as a share of an explicit
    epoch, and pass_share the pass that makes them; paper_hours: all trainings of the paper's tables at these rates.
    """
    data = load(Source("shapes", ""), settings, torch.device(settings.device))
    watches = {model: Stopwatch(Trainer(model, settings, data), model) for model in MODELS}
    counts = {model: watch.flop() for model, watch in watches.items()}
    spent = steps_in_turns(watches, steps, seconds)
    shared = {name: getattr(settings, name) for name in ("width", "device", "precision", "adjoint", "threads")}
    case = f"width {settings.width}, batch {settings.batch_size}, {settings.adjoint}"
    shared |= {"section": "training step", "case": case, "batch": settings.batch_size}
    rows = {
        model: shared | {"provider": model} | summary(spent[model], watches[model], counts[model]) for model in MODELS
    }
    for model, watch in watches.items():
        rate = 1e3 * EVALUATION_BATCH / evaluation_ms(watch)
        rows[model] |= {
            "images_per_second": rate,
            "paper_hours": paper_hours(settings.batch_size, rows[model]["ms"], rate),
        }
    explicit, deq = rows["explicit"], rows["deq"]
    deq["times_explicit"], deq["flop_ratio"] = deq["ms"] / explicit["ms"], deq["flop"] / explicit["flop"]
    deq["over_flop"] = deq["times_explicit"] / deq["flop_ratio"]
    epoch_ms = EPOCH / settings.batch_size * explicit["ms"]
    explicit["nc_ms"] = collapse_ms(settings)
    explicit["nc_share"] = explicit["nc_ms"] / epoch_ms
    explicit["pass_share"] = 1e3 * EPOCH / explicit["images_per_second"] / epoch_ms
    return list(rows.values())


def steps_in_turns(watches: dict[str, Stopwatch], steps: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Steps of the networks one after the other, so that a disturbance hits both; fewer if the time is up."""
    spent: dict[str, list[dict[str, float]]] = {model: [] for model in watches}
    for watch in watches.values():
        for _ in range(WARM_UPS):
            watch.step()
        watch.evaluations.clear()
    deadline = time.monotonic() + seconds
    for step in range(steps):
        if step >= FEWEST_STEPS and time.monotonic() > deadline:
            break
        for model, watch in watches.items():
            spent[model].append(watch.step())
    return spent


def summary(spent: list[dict[str, float]], watch: Stopwatch, counts: tuple[int, int, int]) -> Row:
    """Medians of the step and its parts; floating-point operations for the mean number of evaluations."""
    flop, of_f, counted = counts
    evaluations = statistics.fmean(watch.evaluations[: len(spent)]) if watch.evaluations else 0
    row = columns_of([1e-3 * sum(parts.values()) for parts in spent])
    row |= {"parts": {part: statistics.median(parts[part] for parts in spent) for part in PARTS}}
    return row | {"flop": flop + (evaluations - counted) * of_f} | ({"evaluations": evaluations} if evaluations else {})


def collapse_ms(settings: Settings) -> float:
    """Neural collapse of the features of an epoch's images."""
    drawn = clusters(EPOCH, 8 * settings.width, settings.classes)
    features, labels, weight = (tensor.to(settings.device) for tensor in drawn)
    call = partial(deqfast.neural_collapse, features, labels, weight, settings.classes)
    return median_ms(call, settings.device, 5)


def evaluation_ms(watch: Stopwatch) -> float:
    """An evaluation batch of the network."""
    network, data = watch.trainer.network.eval(), watch.trainer.data
    repeats = -(-EVALUATION_BATCH // len(data.train_images))
    images = data.normalise(data.train_images.repeat(repeats, 1, 1, 1)[:EVALUATION_BATCH])

    @torch.no_grad()
    def evaluate() -> None:
        with autocast(watch.trainer.settings):
            network(images)

    return median_ms(evaluate, watch.trainer.settings.device, 2)


def median_ms(call: Any, device: str, rounds: int) -> float:
    return 1e3 * statistics.median(in_turns({"call": call}, device, rounds)["call"])


def paper_hours(batch: int, step_ms: float, images_per_second: float) -> float:
    """Hours that a network's trainings of the paper's tables would take if all steps and evaluations ran like these."""
    trained = PAPER_IMAGES * PAPER_EPOCHS
    evaluated = PAPER_IMAGES * PAPER_METRICS + PAPER_SETTINGS * PAPER_EPOCHS * TEST_IMAGES
    return (trained * step_ms / (1e3 * batch) + evaluated / images_per_second) / 3600


def settings_of(width: int, batch: int, device: str, **given: Any) -> Settings:
    """The study's settings on drawn images, which need no data."""
    sizes = {"width": width, "batch_size": batch, "n_majority": batch, "test_images": 10}
    return settings_from("cifar_balanced", preset="quick", dataset="shapes", device=device, **sizes, **given)
