"""Where a training step of the study goes, explicit network and DEQ in turns, and what the paper would take here.

    python benchmarks/training_step.py --size 16x32 64x128 --threads 1 --json FILE --figure FILE

The step is the study's own, on drawn images; hooks note the time where one part ends and the next begins. Prints a
table; FILE.png and FILE.svg show it as stacked bars. --seconds bounds the timed steps of a size; warm-up, counting of
FLOPs and evaluation batches come on top. At the rates of results/training_step_cpu.json, on one core, that is less than
half a minute for 16x32 and two and a half minutes for 64x128.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import timing
from harness.drawn import stamp
from harness.files import write_json
from harness.record import processor, provenance
from harness.tables import aligned
from harness.targets import FLOP_TARGET, NC_TARGETS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import deqfast

sys.path.append(str(Path(__file__).resolve().parent.parent / "experiments"))
from nc_study.config import Settings, SettingsError, settings_from  # noqa: E402  (found through the path above)
from nc_study.data import Source, StudyData, class_sizes, load  # noqa: E402  (found through the path above)
from nc_study.results import PAPER  # noqa: E402  (found through the path above)
from nc_study.training import EVALUATION_BATCH, SolverTally, Trainer, autocast  # noqa: E402  (through the path above)

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
# Okabe and Ito's palette, and a grey: told apart by colour-blind readers too.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#D55E00", "#CC79A7", "#0072B2", "#009E73", "#F0E442", "#999999")
MODELS = ("explicit", "deq")
WARM_UPS = 2
FEWEST_STEPS = 3
EPOCH = 50_000  # images of balanced CIFAR-10
Record = dict[str, Any]


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


def measure(width: int, batch: int, steps: int, seconds: float, **given: Any) -> Record:
    """Everything about one size; `given`: further settings of the study, device among them."""
    values = {"dataset": "shapes", "width": width, "batch_size": batch, "n_majority": batch, "test_images": 10}
    settings = settings_from("cifar_balanced", preset="quick", **values, **given)
    torch.set_num_threads(settings.threads)
    data = load(Source("shapes", ""), settings, torch.device(settings.device))
    watches = {model: Stopwatch(Trainer(model, settings, data), model) for model in MODELS}
    counts = {model: watch.flop() for model, watch in watches.items()}
    spent = in_turns(watches, steps, seconds)
    record: Record = {name: getattr(settings, name) for name in ("width", "device", "precision", "adjoint", "threads")}
    record |= {"batch": batch, "steps": len(spent["deq"]), "processor": processor()}
    record["models"] = {model: summary(spent[model], watches[model], counts[model]) for model in MODELS}
    explicit, deq = (record["models"][model] for model in MODELS)
    record["times_explicit"], record["flop_ratio"] = deq["ms"] / explicit["ms"], deq["flop"] / explicit["flop"]
    record["over_flop"] = record["times_explicit"] / record["flop_ratio"]
    record["metrics"] = metrics(settings, watches, explicit["ms"])
    record["paper"] = paper_hours(record)
    return record


def in_turns(watches: dict[str, Stopwatch], steps: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Steps of the networks one after the other, so that a disturbance hits both; fewer if the time is up."""
    spent: dict[str, list[dict[str, float]]] = {model: [] for model in watches}
    for _ in range(WARM_UPS):
        for watch in watches.values():
            watch.step()
    for watch in watches.values():
        watch.evaluations.clear()
    deadline = time.monotonic() + seconds
    for step in range(steps):
        if step >= FEWEST_STEPS and time.monotonic() > deadline:
            break
        for model, watch in watches.items():
            spent[model].append(watch.step())
    return spent


def summary(spent: list[dict[str, float]], watch: Stopwatch, counts: tuple[int, int, int]) -> Record:
    """Medians; FLOPs for the mean number of evaluations of the steps timed."""
    totals = [sum(parts.values()) for parts in spent]
    flop, of_f, counted = counts
    evaluations = statistics.fmean(watch.evaluations[: len(spent)]) if watch.evaluations else 0
    return {
        "ms": statistics.median(totals),
        "quartiles": statistics.quantiles(totals)[::2],
        "parts": {part: statistics.median(parts[part] for parts in spent) for part in PARTS},
        "evaluations": evaluations or None,
        "flop": flop + (evaluations - counted) * of_f,
    }


def metrics(settings: Settings, watches: dict[str, Stopwatch], step_ms: float) -> Record:
    """Neural collapse of the features of an epoch's images, and the pass that makes them, beside an explicit epoch."""
    epoch_ms = EPOCH / settings.batch_size * step_ms
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(EPOCH) % settings.classes
    centres = torch.randn(settings.classes, 8 * settings.width, generator=generator)
    features = centres[labels] + torch.randn(EPOCH, 8 * settings.width, generator=generator)
    weight = torch.randn(centres.shape, generator=generator)
    features, labels, weight = (tensor.to(settings.device) for tensor in (features, labels, weight))
    clock = Timer(settings.device)
    nc_ms = clock.wall(lambda: deqfast.neural_collapse(features, labels, weight, settings.classes), 5)
    rates = {model: 1e3 * EVALUATION_BATCH / pass_ms(clock, watch) for model, watch in watches.items()}
    return {
        "features": [*features.shape],
        "nc_ms": nc_ms,
        "nc_share": nc_ms / epoch_ms,
        "images_per_second": rates,
        "pass_share": 1e3 * EPOCH / rates["explicit"] / epoch_ms,
    }


class Timer:
    """Medians of rounds on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def wall(self, run: Callable[[], Any], rounds: int) -> float:
        """Milliseconds from the call until the device is done."""
        return 1e3 * statistics.median(timing.in_turns({"": run}, self.device, rounds)[""])


def pass_ms(clock: Timer, watch: Stopwatch) -> float:
    """Time of an evaluation batch."""
    network, data = watch.trainer.network.eval(), watch.trainer.data
    images = batch_of(data, EVALUATION_BATCH)

    @torch.no_grad()
    def evaluate() -> None:
        with autocast(watch.trainer.settings):
            network(images)

    return clock.wall(evaluate, 2)


def batch_of(data: StudyData, size: int) -> Tensor:
    repeats = -(-size // len(data.train_images))
    return data.normalise(data.train_images.repeat(repeats, 1, 1, 1)[:size])


def paper_hours(record: Record) -> Record:
    """Hours for all trainings of the paper's tables at the measured rates, if every epoch ran at them."""
    settings = [settings_of(*entry) for entry in PAPER]
    trained = sum(sum(class_sizes(one)) for one in settings)
    epochs, every = settings[0].epochs, settings[0].metrics_every
    measured = len({1, epochs, *range(every, epochs + 1, every)})
    evaluated = trained * measured + epochs * sum(one.test_images for one in settings)
    hours = {
        model: (trained * epochs / (1e3 * record["batch"] / record["models"][model]["ms"])
                + evaluated / record["metrics"]["images_per_second"][model]) / 3600
        for model in MODELS
    }  # fmt: skip
    return {
        "note": "extrapolated from a few steps at this size to 100 epochs of every entry of the tables",
        "trainings": len(PAPER) * len(MODELS),
        "training_images": trained * epochs,
        "evaluated_images": evaluated,
        "hours": hours,
    }


def settings_of(dataset: str, majority: int | None, ratio: int | None) -> Settings:
    """Of an entry of the paper's tables."""
    split = {} if majority is None else {"majority": majority, "ratio": ratio}
    study = "cifar_lt" if split else "cifar_balanced"
    return settings_from(study, preset="paper", device="cpu", dataset=dataset, **split)


def table(record: Record) -> list[str]:
    """A record as text."""
    explicit, deq = (record["models"][model] for model in MODELS)
    rows = [["ms", *MODELS, ""]]
    rows += [[part, *(f"{model['parts'][part]:.2f}" for model in (explicit, deq)), ""] for part in PARTS]
    rows += [["step (median)", *(f"{model['ms']:.2f}" for model in (explicit, deq)), ""]]
    rows += [["quartiles", *("-".join(f"{q:.1f}" for q in model["quartiles"]) for model in (explicit, deq)), ""]]
    rows += [["GFLOP", *(f"{model['flop'] / 1e9:.2f}" for model in (explicit, deq)), ""]]
    found, hours = record["metrics"], record["paper"]["hours"]
    return [
        heading(record),
        *aligned(rows, 1),
        f"DEQ / explicit: {record['times_explicit']:.2f} in time, {record['flop_ratio']:.2f} in FLOPs with "
        f"{deq['evaluations']:.1f} evaluations: {verdict(record['over_flop'], FLOP_TARGET, '.2f')}",
        f"neural collapse of {found['features']} features: {found['nc_ms']:.1f} ms, "
        f"{verdict(found['nc_share'], NC_TARGETS[record['device']], '.2%')} of an explicit epoch; "
        f"the pass that makes them {found['pass_share']:.0%}",
        f"the paper's {record['paper']['trainings']} trainings, extrapolated from these steps to this machine: "
        + ", ".join(f"{model} {hours[model]:.0f} h" for model in MODELS),
    ]


def heading(record: Record) -> str:
    """Size, device and settings of a record."""
    return (
        f"width {record['width']}, batch {record['batch']}, {record['device']}, {record['precision']}, "
        f"{record['adjoint']}, {record['threads']} threads, {record['steps']} steps"
    )


def verdict(value: float, target: float, form: str) -> str:
    return f"{value:{form}} (target {target:{form}}: {'met' if value <= target else 'MISSED'})"


def draw(records: list[Record], stem: Path) -> None:
    """Stacked bars of the parts, a panel for each size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(records), figsize=(1.5 + 3.5 * len(records), 4), layout="constrained", squeeze=False
    )
    for axis, record in zip(axes[0], records, strict=True):
        bottom = [0.0] * len(MODELS)
        for index, part in enumerate(PARTS):
            heights = [record["models"][model]["parts"][part] for model in MODELS]
            axis.bar(MODELS, heights, 0.6, bottom, label=part, color=COLOURS[index])
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axis.set_title(heading(record).replace(f", {record['precision']}", f"\n{record['precision']}"), fontsize=8)
        axis.set_ylabel("ms per training step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    for suffix, metadata in ((".png", stamp(records)), (".svg", {"Date": None})):
        figure.savefig(stem.with_suffix(suffix), dpi=110, metadata=metadata)
    plt.close(figure)


def size(text: str) -> tuple[int, int]:
    """ "16x32" as (16, 32)."""
    try:
        width, batch = map(int, text.split("x"))
    except ValueError:
        width = batch = 0
    if width < 1 or batch < 1:
        raise argparse.ArgumentTypeError(f"{text}: WIDTHxBATCH, two numbers from 1 on")
    return width, batch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size, nargs="+", metavar="WIDTHxBATCH", help="64x128 with a GPU, else 16x32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="where the networks train; auto: cuda where there is a GPU (%(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as many as PyTorch takes")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="as the study's")
    parser.add_argument("--adjoint", choices=("jfb", "implicit", "phantom", "unrolled"), default="jfb",
                        help="gradient of the DEQ's fixed point, as the study's (%(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each network (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="a size is ended after these (%(default)s)")
    parser.add_argument("--remark", help="what else is to be known of the machine, kept in the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write; an existing one is replaced")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the parts; FILE.png and FILE.svg are replaced"
    )
    given = parser.parse_args()
    if given.steps < FEWEST_STEPS or given.seconds <= 0:
        parser.error(f"--steps {given.steps} --seconds {given.seconds:g}: at least {FEWEST_STEPS} steps, some seconds")
    for name in ("json", "figure"):
        path = getattr(given, name)
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"--{name}: {path.resolve().parent} is not a folder")
    try:
        settings = settings_from("cifar_balanced", device=given.device, threads=given.threads)
    except SettingsError as error:
        parser.error(str(error))
    given.device = settings.device
    given.size = given.size or [(64, 128) if given.device == "cuda" else (16, 32)]
    return given


def main() -> None:
    given = arguments()
    shared = {name: getattr(given, name) for name in ("device", "threads", "precision", "adjoint")}
    records = []
    for width, batch in given.size:
        records.append(measure(width, batch, given.steps, given.seconds, **shared))
        print("\n".join([*table(records[-1]), ""]), flush=True)
        if given.json:
            write_json(given.json, provenance(given.device, given.remark) | {"runs": records})
    if given.figure:
        draw(records, given.figure)


if __name__ == "__main__":
    main()
