"""Frame of the example models: arms under several seeds, a process each, resumed after a kill; a table and a figure."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

import torch
from matplotlib.figure import Figure
from msgspec import Meta
from nc_study.networks import count_parameters
from runs import processes
from runs.files import check_same, locked, prepare_out, read_record, reading, to_json, write_atomically
from runs.options import Checked, SettingsError, flag_of, listed_or_all, option, parsed
from runs.provenance import Recorded, provenance
from runs.script import resume_hint, run_main
from runs.states import read_state, take_over, write_state
from runs.steps import DEVICES, EAGER, GRAPHED, chosen_device, eager_option, graphed, state_of
from runs.style import png
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

FIRST_CHECKPOINT, SECONDS_BETWEEN_CHECKPOINTS = 5.0, 60.0
REMEDY = "remove it to repeat the run"
EXECUTION = {"seeds", "arms", "jobs", "out", "resume", "eager"}  # these do not change the outcome of one run


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Options of every model, which adds its own."""

    all_arms: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ("*.txt",)
    """Patterns of the files that the model reads in a folder `data_root`."""
    device, eager = "cpu", False

    seeds: int = option("runs", "seeds of every arm, from 0", 3, minimum=1)
    arms: str = option("runs", "arms to train, with commas between; all: each of them", "all", metavar="A,B")
    data_root: str | None = option(
        "data", "folder (or file) of the real data; off: the model's own are made", None, metavar="PATH"
    )
    jobs: int = option("runs", "runs at a time, with a thread each", os.cpu_count() or 1, minimum=1)
    out: str | None = option(
        "runs", "folder for records, weights, table, figure; off: runs/ and the model's name", None, metavar="DIR"
    )
    resume: bool = option("runs", "continue the runs in --out, and keep finished ones as they are", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.chosen

    @property
    def chosen(self) -> list[str]:
        """Arms to train. Raises SettingsError for an unknown one."""
        return listed_or_all("arms", self.arms, self.all_arms)

    @property
    def deciding(self) -> dict[str, Any]:
        """Options that decide the outcome of a run."""
        own = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name not in EXECUTION}
        return own | {"data_root": self.digest, "device": self.device}

    @cached_property
    def digest(self) -> str:
        """Digest of the files in `data_root`, so that no run continues with other data; "absent" without one."""
        if self.data_root is None:
            return "absent"
        root, content = Path(self.data_root), hashlib.sha256()
        paths = [root] if root.is_file() else sorted(path for pattern in self.files for path in root.glob(pattern))
        for path in filter(Path.is_file, paths):
            content.update(hashlib.sha256(path.read_bytes()).digest() + os.fsencode(path.name))
        return f"sha256 {content.hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """Options of models that train networks, on a CPU or a GPU."""

    device: str = option("machine", "where to train; whole data sets are measured on the CPU", "auto", choices=DEVICES)
    eager: bool = eager_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device", chosen_device(self.device))

    @property
    def drops(self) -> bool:
        """Whether solves drop converged samples. To find them would wait for a GPU."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Record(Recorded):
    """File of a finished run. The table has the `scores`, the figure draws what is in `shown`."""

    arm: str
    seed: int
    data: str
    options: dict[str, Any]
    scores: dict[str, float]
    shown: dict[str, Any]
    parameters: int
    minutes: float
    peak_memory: int  # bytes, of the whole process
    steps: str = EAGER
    """How training steps ran: GRAPHED, or EAGER with the reason if a GPU would have allowed graphs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scores:
            raise ValueError("there are no scores")


@dataclass(frozen=True)
class Progress:
    """Entries that a checkpoint has in addition to the states of what is trained."""

    step: Annotated[int, Meta(ge=1)]
    minutes: float
    log: list[dict[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Outcome of training an arm. `data` names the training data."""

    model: torch.nn.Module
    data: str
    scores: dict[str, float]
    shown: dict[str, Any]


class Run(processes.Run):
    """One arm under one seed, as its training function sees it."""

    def __init__(self, train: Callable[[Run], Outcome], options: Any, folder: Path, arm: str, seed: int) -> None:
        super().__init__(folder / f"{arm}-seed{seed}.json")
        self.train, self.options, self.arm, self.seed = train, options, arm, seed
        self.checkpoint = self.path.with_suffix(".ckpt")
        self.minutes, self.how = 0.0, EAGER
        self.rows: list[dict[str, float]] = []
        """Measurements during the training; a checkpoint contains them."""

    @property
    def record(self) -> Record:
        """Record of the finished run. Raises Unreadable if it is damaged, or of another run."""
        record = read_record(self.path, Record, REMEDY)
        with reading(self.path, REMEDY):
            if (record.arm, record.seed) != (self.arm, self.seed):
                raise ValueError(f"it is of {record.arm}, seed {record.seed}")
        return record

    def outcome(self) -> str:
        """First score of the finished run. Raises StudyError if its record cannot be read."""
        name, score = next(iter(self.record.scores.items()))
        return f"{name} {score:.4g}"

    def check(self) -> None:
        """Raise StudyError if the run was begun with other options, or is not to be resumed; Unreadable if its record
        or checkpoint is damaged."""
        if self.finished:
            before = self.record.options
        elif state := read_state(self.checkpoint, Progress):
            before = state["options"]
        else:
            return
        before = {
            "data_root": self.options.deciding["data_root"],
            "device": "cpu",
        } | before  # earlier versions lack them
        old, new = ({flag_of(name): options[name] for name in options} for options in (before, self.options.deciding))
        check_same(self.path, old, new, self.options.resume)

    def measure(self) -> None:
        """Train an arm, write the weights and the record."""
        torch.manual_seed(self.seed)
        if self.on_gpu:
            cudnn: Any = torch.backends.cudnn
            cudnn.conv.fp32_precision = "ieee"  # TF32, the default, keeps 10 bits of the operands
        outcome = self.train(self)
        record = Record(
            arm=self.arm,
            seed=self.seed,
            data=outcome.data,
            options=self.options.deciding,
            scores=outcome.scores,
            shown=outcome.shown,
            parameters=count_parameters(outcome.model),
            minutes=round(self.minutes, 2),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            steps=self.how,
            **provenance(1, self.options.device),
        )
        write_state(self.path.with_suffix(".pt"), outcome.model.state_dict())
        write_atomically(self.path, to_json(record))
        self.checkpoint.unlink(missing_ok=True)

    @property
    def on_gpu(self) -> bool:
        return bool(self.options.device == "cuda")

    @property
    def fused(self) -> dict[str, Any]:
        """Arguments of an optimiser that a graph may have."""
        return {"fused": True, "capturable": True} if self.on_gpu else {}

    def on_device(self, tree: Any) -> Any:
        """The same tree with its tensors, drawn on the CPU for every device, on the run's."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.options.device), tree)

    def stepped(
        self, step: Callable[[Any], Any], optimizer: torch.optim.Optimizer | None = None, obstacle: str = ""
    ) -> Callable[[Any], Any]:
        """Return `step`, for trees of the CPU: on a GPU one launch, without --eager and any `obstacle`.

        optimizer: of the step, if it has one. StudyError if the step cannot be captured.
        """
        if not self.on_gpu:
            return step
        if self.options.eager or obstacle:
            self.how = ", for ".join(filter(None, [EAGER, obstacle]))
        else:
            self.how, step = GRAPHED, graphed(step, optimizer, torch.device(self.options.device))
        tqdm.write(f"{self}: training steps are {self.how}")
        return lambda batch: step(self.on_device(batch))

    def steps(self, total: int, **kept: Any) -> Iterator[int]:
        """Yield the remaining steps, with a progress bar. A checkpoint saves the `kept` states after five
        seconds, then once a minute.

        Every step seeds torch's generator, so that a resumed run draws the same numbers as an uninterrupted one.
        """
        first, saved, due = self._restore(kept), time.monotonic(), FIRST_CHECKPOINT
        label = f"{self.arm}, seed {self.seed}"
        bar = tqdm(range(first, total), label, total, initial=first, position=1 + self.slot, leave=False, disable=None)
        for step in bar:
            torch.manual_seed(self.seed * 1_000_003 + step)
            yield step
            if self.rows:
                last = {name: f"{value:.4g}" for name, value in self.rows[-1].items() if name != "step"}
                bar.set_postfix(last, refresh=False)
            now = time.monotonic()
            if now - saved >= due:
                self.minutes += (now - saved) / 60
                saved, due = now, SECONDS_BETWEEN_CHECKPOINTS
                self._save(step + 1, kept)
        self.minutes += (time.monotonic() - saved) / 60

    def _save(self, step: int, kept: Mapping[str, Any]) -> None:
        state = {
            name: state_of(part) if isinstance(part, torch.optim.Optimizer) else part.state_dict()
            for name, part in kept.items()
        }
        state |= {"step": step, "minutes": self.minutes, "log": self.rows, "options": self.options.deciding}
        write_state(self.checkpoint, state)

    def _restore(self, kept: Mapping[str, Any]) -> int:
        if not (state := read_state(self.checkpoint, Progress)):
            return 0
        take_over(self.checkpoint, state, kept)
        self.minutes, self.rows = state["minutes"], state["log"]
        return int(state["step"])


def differentiate(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    """Compute the gradient for the optimiser; `clip` bounds its norm."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], clip)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    """Take a step of the optimiser along this gradient."""
    differentiate(loss, optimizer, clip)
    optimizer.step()


@dataclass(frozen=True)
class Example:
    """Example model: its options, the training of an arm, the figure of all runs. `check` reads the data before any
    work; without it the model takes no --data-root."""

    options: type[Options]
    train: Callable[[Run], Outcome]
    draw: Callable[[Sequence[Record]], Figure]
    check: Callable[[Any], object] | None = None


def main(name: str, description: str | None, example: Example, argv: Sequence[str] | None = None) -> int:
    """Train the chosen arms and print the table. The exit status is 0, 1 for an error (a line each), 2 for bad
    arguments, 130 after Ctrl-C."""
    script, (first, second, *_) = f"model.py {name}", example.options.all_arms
    examples = f"{script} --arms {first},{second} --seeds 1", f"{script} --out runs/{name} --resume"
    options = parsed(example.options, description, examples, argv, f"{name} [options]")
    folder = Path(options.out or f"runs/{name}")

    def work() -> int:
        prepare_out(folder)
        if example.check is not None:
            example.check(options)
        elif options.data_root is not None:
            raise SettingsError(f"--data-root {options.data_root}: {name} makes its own data")
        runs = [Run(example.train, options, folder, arm, s) for s in range(options.seeds) for arm in options.chosen]
        failed = processes.unreadable(runs, Run.check)
        with locked(folder):
            failed |= processes.run_all([run for run in runs if run not in failed], options.jobs)
        records = {run: run.record for run in runs if run not in failed}
        figure, unfit = processes.made(records, lambda some: png(example.draw(some)))
        if figure:
            show(name, [record for run, record in records.items() if run not in unfit], figure, folder)
        return processes.tell_failed(script, failed | unfit)

    return run_main(script, work, resume_hint("" if options.resume else " --resume"))


def table(records: Sequence[Record]) -> str:
    """Table of the arms in Markdown: means over seeds, with the range if there are several."""
    rows = []
    for arm in dict.fromkeys(record.arm for record in records):
        mine = [record for record in records if record.arm == arm]
        row: dict[str, Any] = {"arm": arm, "parameters": mine[0].parameters, "seeds": len(mine)}
        names = dict.fromkeys(name for record in mine for name in record.scores)
        row |= {name: spread([record.scores[name] for record in mine if name in record.scores]) for name in names}
        row |= {"minutes a run": spread([record.minutes for record in mine])}
        row |= {"peak MB": f"{max(record.peak_memory for record in mine) / 1e6:.0f}"}
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", missingval="–", disable_numparse=True)


def spread(values: Sequence[float]) -> str:
    """Mean of some values, with the least and the largest."""
    among = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{fmean(values):.4g}{among}"


def show(name: str, records: Sequence[Record], figure: bytes, folder: Path) -> None:
    """Write the figure and the table, and print the table."""
    last = max(records, key=lambda record: record.finished)
    machine = f"{last.machine.gpu}, steps {last.steps}" if last.machine.gpu else last.machine.cpu
    where = f"{machine}, a thread a run, torch {last.versions['torch']}"
    text = f"{table(records)}\n\n{last.data}; {where}; commit {last.commit}, {last.finished}\n"
    write_atomically(folder / "table.md", text)
    write_atomically(folder / f"{name}.png", figure)
    print(f"{text}\ntable:  {folder / 'table.md'}\nfigure: {folder / f'{name}.png'}")
