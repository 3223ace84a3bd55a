"""Every table and figure of Sun & Shi (NeurIPS 2024): the runs behind them, resumed where they stopped, and a report.

A run is what cifar_lt.py or cifar_balanced.py does for one setting of a table; it gets a process and a folder of its
own. Runs that are finished are left alone, and a run that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from nc_study import distributed
from nc_study.cli import told
from nc_study.config import CLASSES, IMBALANCE, Settings, SettingsError, StudyError, add_options, check_field, option
from nc_study.data import find_source
from nc_study.models import choose_kernel
from nc_study.paper import DATA_SETS, FIGURES, TABLES, settings_of
from nc_study.rundir import prepare_out
from nc_study.scheduler import Task, plan, run_all


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What study.py takes beside the settings of its runs; SettingsError for a value that makes no sense."""

    table: str | None = option(
        "which runs", f"the paper's tables: {', '.join(TABLES)}, with commas between, or all", None
    )
    figure: str | None = option("which runs", f"its figures: {', '.join(FIGURES)}, with commas between, or all", None)
    dataset: str = option(
        "which runs",
        "cifar: CIFAR-10 and CIFAR-100 for the tables, CIFAR-10 for the figures",
        "cifar",
        choices=(*DATA_SETS, *CLASSES),
    )
    seeds: str = option("which runs", "seeds, with commas between", "0")

    jobs: int = option("how they are run", "runs at a time, each on the next GPU", 1, minimum=1)
    processes: int = option("how they are run", "processes, and GPUs, per run", 1, minimum=1)
    spread: bool = option(
        "how they are run", "under torchrun: every process takes its share of the runs, without a report", False
    )
    dry_run: bool = option("how they are run", "say what would be run, and how far it is, and stop", False)
    no_report: bool = option("how they are run", "do not write OUT/report at the end", False)

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_field(spec, getattr(self, spec.name))
        numbers = self.seeds.split(",")
        if not all(map(str.isdecimal, numbers)) or len(set(numbers)) < len(numbers):
            raise SettingsError(f"--seeds {self.seeds}: different whole numbers with commas between")
        if self.table is None and self.figure is None:
            raise SettingsError("which runs? --table all --figure all names every run of the paper")
        if self.spread and not distributed.launched():
            raise SettingsError("--spread: only under torchrun with two or more processes, over which runs are spread")
        if distributed.launched() and not self.spread:
            raise SettingsError("under torchrun study.py takes --spread; without it --processes N gives each run N")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 if a run failed or none could be begun, 2 for bad arguments, 130 after
    Ctrl-C or SIGTERM."""
    options, tasks = parse(argv)
    saved = f"finished epochs are saved, this goes on with them:\n  {distributed.command_line()}"
    return told("study.py", lambda: run_study(options, tasks), saved)


def parse(argv: Sequence[str] | None) -> tuple[StudyOptions, list[Task]]:
    """The study's own options, and the tasks that they and the settings given for all runs amount to."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--table N,N] [--figure N,N] [--dataset NAME] [--seeds N,N] [--jobs N] [options]",
        description=__doc__,
        epilog="All other options are those of cifar_lt.py, for every run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, StudyOptions)
    add_options(parser, Settings, (*IMBALANCE, "seed", "dataset", "resume"))
    given = vars(parser.parse_args(argv))
    try:
        options = StudyOptions(
            **{spec.name: given.pop(spec.name) for spec in fields(StudyOptions) if spec.name in given}
        )
        chosen = settings_of(options.table, options.figure, options.dataset)
        tasks = plan(chosen, list(map(int, options.seeds.split(","))), given, options.jobs)
    except StudyError as error:
        parser.error(str(error))
    kernel, obstacle = choose_kernel(given.get("kernel", "auto"), tasks[0].settings.device)
    if obstacle:
        print(f"kernel: {kernel}, for {obstacle}", flush=True)
    return options, tasks


def outlook(tasks: list[Task]) -> str:
    """How many epochs are left to do, and how long they take if they are like those that are done."""
    done = [epoch.seconds.total for task in tasks for model in task.settings.models for epoch in task.run.epochs(model)]
    all_epochs = sum(task.settings.epochs * len(task.settings.models) for task in tasks)
    text = f"left to do: {all_epochs - len(done)} of {all_epochs} epochs"
    if not done:
        return text
    hours = statistics.fmean(done) * (all_epochs - len(done)) / 3600
    return f"{text}, about {hours:.1f} h, one run at a time, at the pace of those done"


def run_study(options: StudyOptions, tasks: list[Task]) -> int:
    """Run what is not finished, then report; the exit status."""
    if options.spread:
        tasks = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    conflicts = {task: conflict for task in tasks if (conflict := task.conflict())}
    if options.dry_run:
        print(f"{len(tasks)} runs")
        for task in tasks:
            print(f"  {task}: {conflicts.get(task) or task.state()}")
        print(outlook([task for task in tasks if task not in conflicts]))
        return 1 if conflicts else 0
    if not tasks:
        return 0
    settings = tasks[0].settings
    out = Path(settings.out)
    prepare_out(out)
    possible = [task for task in tasks if task not in conflicts]
    for name in {task.settings.dataset for task in possible if not task.run.finished}:
        with suppress(StudyError):  # downloaded once, before several runs would; a failure is told by the runs
            find_source(name, Path(settings.data_root))
    first_slot = int(os.environ.get("LOCAL_RANK", 0)) * options.jobs
    failed = run_all(possible, options.jobs, options.processes, first_slot) | conflicts
    for task, reason in failed.items():
        print(f"study.py: {task} failed: {reason}", file=sys.stderr)
    if not (options.no_report or options.spread):
        from nc_study.reporting import report  # late: it draws figures, and the runs need none

        print(f"report: {report.write(report.collect([out]), out / 'report')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
