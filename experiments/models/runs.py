"""What the example models share: the arms of a script under several seeds, a process each, that survive a kill; then
a table and a figure."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure
from tabulate import tabulate
from tqdm import tqdm

from deqfast._checks import did_you_mean

sys.path.append(str(Path(__file__).parents[1]))  # where nc_study is, when a script of this folder is run

from nc_study.arguments import Parser
from nc_study.cli import told
from nc_study.config import Checked, SettingsError, StudyError, add_options, flag_of, option
from nc_study.figures import png
from nc_study.models import count_parameters
from nc_study.record import Machine, to_json
from nc_study.results import provenance
from nc_study.rundir import prepare_out, read_state, write_atomically, write_state
from nc_study.shapes import draw_shapes

__all__ = ["Options", "Outcome", "Record", "Run", "SettingsError", "StudyError", "draw_shapes", "main", "option"]

SECONDS_BETWEEN_CHECKPOINTS = 60.0
EXECUTION = {"seeds", "jobs", "out", "resume", "data_root"}  # options that do not change what one run comes to


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Options of every script; a script adds its own."""

    seeds: int = option("runs", "seeds of every arm, from 0", 3, minimum=1)
    arms: str = option("runs", "arms to train, with commas between; all: each of them", "all", metavar="A,B")
    data_root: str | None = option(
        "data", "folder (or file) of the real data; off: the script makes its own", None, metavar="PATH"
    )
    jobs: int = option("runs", "runs at a time, with a thread each", os.cpu_count() or 1, minimum=1)
    out: str | None = option(
        "runs", "folder for records, weights, table, figure; off: runs/ and the script's name", None, metavar="DIR"
    )
    resume: bool = option("runs", "go on with the runs in --out, and leave finished ones as they are", False)

    @property
    def deciding(self) -> dict[str, Any]:
        """What a run's outcome depends on."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name not in EXECUTION | {"arms"}}


@dataclass(frozen=True)
class Record:
    """The file of a finished run. `scores` are numbers of the table, `shown` what the figure draws."""

    arm: str
    seed: int
    data: str
    options: dict[str, Any]
    scores: dict[str, float]
    shown: dict[str, Any]
    parameters: int
    minutes: float
    peak_memory: int  # bytes, of the whole process
    machine: Machine
    versions: dict[str, str | None]
    commit: str | None
    finished: str


@dataclass(frozen=True)
class Outcome:
    """What training an arm comes to: `model` is counted, `data` names what it was trained on."""

    model: torch.nn.Module
    data: str
    scores: dict[str, float]
    shown: dict[str, Any]


class Run:
    """One arm under one seed, as its training function sees it."""

    def __init__(self, options: Any, folder: Path, arm: str, seed: int, position: int = 0) -> None:
        self.options, self.arm, self.seed, self.position = options, arm, seed, position
        self.path = folder / f"{arm}-seed{seed}.json"
        self.checkpoint = self.path.with_suffix(".ckpt")
        self.minutes = 0.0
        self.log: list[dict[str, float]] = []
        """Rows that the training function appends to; they are kept by the checkpoint."""

    def steps(self, total: int, **kept: Any) -> Iterator[int]:
        """Yield the steps that are left, with a progress bar and a checkpoint a minute of what has a `state_dict`.

        torch's generator is seeded anew at every step, so that a run that was cut off draws what it would have drawn.
        """
        first, saved = self._restore(kept), time.monotonic()
        label = f"{self.arm}, seed {self.seed}"
        bar = tqdm(range(first, total), label, total, initial=first, position=self.position, leave=False)
        for step in bar:
            torch.manual_seed(self.seed * 1_000_003 + step)
            yield step
            if self.log:
                last = {name: f"{value:.4g}" for name, value in self.log[-1].items() if name != "step"}
                bar.set_postfix(last, refresh=False)
            now = time.monotonic()
            if now - saved >= SECONDS_BETWEEN_CHECKPOINTS:
                self.minutes += (now - saved) / 60
                saved = now
                self._save(step + 1, kept)
        self.minutes += (time.monotonic() - saved) / 60

    def _save(self, step: int, kept: Mapping[str, Any]) -> None:
        state = {name: one.state_dict() for name, one in kept.items()}
        state |= {"step": step, "minutes": self.minutes, "log": self.log, "options": self.options.deciding}
        write_state(self.checkpoint, state)

    def _restore(self, kept: Mapping[str, Any]) -> int:
        if not self.checkpoint.exists():
            return 0
        state = read_state(self.checkpoint)
        check_same(self.checkpoint, state["options"], self.options)
        try:
            for name, one in kept.items():
                one.load_state_dict(state[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise StudyError(f"{self.checkpoint} is of other code ({error}): remove it to train anew") from error
        self.minutes, self.log = state["minutes"], state["log"]
        return int(state["step"])


def check_same(path: Path, before: Mapping[str, Any], options: Options) -> None:
    """StudyError that names the option in which a file was made otherwise."""
    for name, value in options.deciding.items():
        if before.get(name) != value:
            raise StudyError(
                f"{path} was made with {flag_of(name)} {before.get(name)}, not {value}: take the same or another --out"
            )


Train = Callable[[Run], Outcome]


def main(
    description: str | None,
    options_type: type[Options],
    arms: Sequence[str],
    train: Train,
    draw: Callable[[Sequence[Record]], Figure],
    argv: Sequence[str] | None = None,
    check: Callable[[Any], object] = lambda options: None,
) -> int:
    """Train what is asked for and print the table; the exit status is 0, 1 for an error (told in a line), 2 for bad
    arguments, 130 after Ctrl-C. `check` looks at the data before any work is done."""
    script = Path(sys.modules[train.__module__].__file__ or "").stem
    examples = f"{script}.py --arms {arms[0]},{arms[1]} --seeds 1", f"{script}.py --out runs/{script} --resume"
    parser = Parser(description, [f"models/{example}" for example in examples])
    add_options(parser, options_type)
    try:
        options = options_type(**vars(parser.parse_args(argv)))
        chosen = arms if options.arms == "all" else list(dict.fromkeys(options.arms.split(",")))
        if unknown := [one for one in chosen if one not in arms]:
            raise SettingsError(f"--arms {unknown[0]}: one of all, {', '.join(arms)}{did_you_mean(unknown[0], arms)}")
    except SettingsError as error:
        parser.error(str(error))
    folder = Path(options.out or f"runs/{script}")

    def work() -> int:
        prepare_out(folder)
        check(options)
        runs = [Run(options, folder, arm, seed) for seed in range(options.seeds) for arm in chosen]
        finish(runs, train)
        show(script, [read(run) for run in runs], draw, folder)
        return 0

    return told(f"{script}.py", work, "what is done is saved: the same command with --resume goes on with it")


def finish(runs: Sequence[Run], train: Train) -> None:
    """Train the runs that have no record, each in a process of its own, so that its peak memory is its own."""
    options = runs[0].options
    if begun := [run.path for run in runs if run.path.exists() or run.checkpoint.exists()]:
        if not options.resume:
            raise StudyError(f"{begun[0].parent} holds runs: --resume goes on with them, another --out starts anew")
        for run in runs:
            if run.path.exists():
                check_same(run.path, read(run).options, options)
    waiting = [run for run in runs if not run.path.exists()]
    for number, run in enumerate(waiting):
        run.position = 1 + number % options.jobs
    if not waiting:
        return
    context = multiprocessing.get_context("spawn")
    lock = context.RLock()  # before the mask, which making the first lock would take off
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for this process alone
    with context.Pool(options.jobs, _in_child, (lock,), maxtasksperchild=1) as pool:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with tqdm(total=len(waiting), desc="runs") as bar:
            for name in pool.imap_unordered(partial(measure, train), waiting):
                bar.set_postfix_str(name)
                bar.update()


def _in_child(lock: Any) -> None:
    tqdm.set_lock(lock)
    torch.set_num_threads(1)


def measure(train: Train, run: Run) -> str:
    """Train a run, write its weights and its record; its name."""
    torch.manual_seed(run.seed)
    outcome = train(run)
    record = Record(
        arm=run.arm,
        seed=run.seed,
        data=outcome.data,
        options=run.options.deciding,
        scores=outcome.scores,
        shown=outcome.shown,
        parameters=count_parameters(outcome.model),
        minutes=round(run.minutes, 2),
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **provenance(1, "cpu"),
    )
    write_state(run.path.with_suffix(".pt"), outcome.model.state_dict())
    write_atomically(run.path, to_json(record))
    run.checkpoint.unlink(missing_ok=True)
    return run.path.stem


def read(run: Run) -> Record:
    """The record of a finished run; StudyError if it cannot be read."""
    try:
        return msgspec.json.decode(run.path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise StudyError(f"{run.path} cannot be read ({error}): remove it to train anew") from error


def table(records: Sequence[Record]) -> str:
    """A row an arm: means over seeds, with the range where there are several, as Markdown."""
    rows = []
    for arm in dict.fromkeys(record.arm for record in records):
        mine = [record for record in records if record.arm == arm]
        row: dict[str, Any] = {"arm": arm, "parameters": mine[0].parameters, "seeds": len(mine)}
        names = dict.fromkeys(name for record in mine for name in record.scores)
        row |= {name: spread([record.scores[name] for record in mine]) for name in names}
        row |= {"minutes a run": spread([record.minutes for record in mine])}
        row |= {"peak MB": f"{max(record.peak_memory for record in mine) / 1e6:.0f}"}
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", missingval="–", disable_numparse=True)


def spread(values: Sequence[float]) -> str:
    """A mean, and the least and largest value behind it."""
    among = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{fmean(values):.4g}{among}"


def show(script: str, records: Sequence[Record], draw: Callable[[Sequence[Record]], Figure], folder: Path) -> None:
    """Write the figure and the table, and print the table."""
    last = max(records, key=lambda record: record.finished)
    where = f"{last.machine.cpu}, a thread a run, torch {last.versions['torch']}"
    text = f"{table(records)}\n\n{last.data}; {where}; commit {last.commit}, {last.finished}\n"
    write_atomically(folder / "table.md", text.encode())
    write_atomically(folder / f"{script}.png", png(draw(records)))
    print(f"{text}\ntable:  {folder / 'table.md'}\nfigure: {folder / f'{script}.png'}")
