"""The course of a whole study: which runs, in which order, and what is said about them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import distributed
from ..cells import DATA_SETS, FIGURES, TABLES, cells_of
from ..config import CLASSES, IMBALANCE, LARGEST_SEED, Settings, StudyError, add_options
from ..data import find_source
from ..distributed import command_line
from ..models import choose_kernel
from ..reporting.report import build as build_report
from ..rundir import prepare_out
from .plan import Task, check_folders, pace, plan
from .ranks import run_spread, run_together
from .scheduler import Scheduler

OWN = (*IMBALANCE, "seed", "dataset", "resume")


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 if a run failed or none could be begun, 2 for bad arguments, 130 after
    Ctrl-C."""
    with distributed.one_voice():
        asked = parse(description, argv)
    try:
        return run_study(asked)
    except StudyError as error:
        if distributed.may_tell():
            print(f"study.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = f"interrupted; finished epochs are saved, the same command goes on with them:\n  {command_line()}"
        if _is_first():
            print(f"\n{again}", file=sys.stderr)
        return 130


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """The study's own arguments, with the `tasks` that they and the settings given for all runs amount to."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--table N] [--figure N] [--dataset NAME] [--seeds N,N] [--jobs N] [options]",
        description=description,
        epilog="All other options are those of cifar_lt.py, for every run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_argument_group("which runs")
    numbers = "with commas between, or all"
    own.add_argument("--table", metavar="N", help=f"the paper's tables: {', '.join(TABLES)}, {numbers}")
    own.add_argument("--figure", metavar="N", help=f"the paper's figures: {', '.join(FIGURES)}, {numbers}")
    own.add_argument(
        "--dataset",
        choices=(*DATA_SETS, *CLASSES),
        default="cifar",
        help="cifar: CIFAR-10 and CIFAR-100 for the tables, CIFAR-10 for the figures (default)",
    )
    own.add_argument("--seeds", type=_seeds, default=[0], metavar="N,N", help="seeds, with commas between (default: 0)")
    own = parser.add_argument_group("how they are run")
    own.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    own.add_argument(
        "--spread",
        action="store_true",
        help="under torchrun: every process has runs of its own; without it, all of them work on each run in turn",
    )
    own.add_argument("--dry-run", action="store_true", help="say what would be run, and how far it is, and stop")
    own.add_argument("--no-report", action="store_true", help="do not write OUT/report at the end")
    add_options(parser, Settings, OWN)
    asked = parser.parse_args(argv)
    ours = ("table", "figure", "dataset", "seeds", "jobs", "spread", "dry_run", "no_report")
    given = {name: value for name, value in vars(asked).items() if name not in ours}
    try:
        asked.tasks = _tasks(asked, given)
    except StudyError as error:
        parser.error(str(error))
    return asked


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or max(seeds) > LARGEST_SEED or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: different whole numbers from 0 to 2**63 - 1, with commas between")
    return seeds


def _tasks(asked: argparse.Namespace, given: dict[str, Any]) -> list[Task]:
    if asked.table is None and asked.figure is None:
        raise StudyError("which runs? --table all --figure all names every run of the paper")
    if asked.jobs < 1:
        raise StudyError(f"--jobs {asked.jobs}: at least 1")
    if asked.spread and not distributed.launched():
        raise StudyError("--spread: only under torchrun with two or more processes, over which the runs are spread")
    if asked.jobs > 1 and distributed.launched() and not asked.spread:
        raise StudyError(f"--jobs {asked.jobs}: under torchrun one run at a time, or several with --spread")
    return plan(cells_of(asked.table, asked.figure, asked.dataset), asked.seeds, given, asked.jobs)


def run_study(asked: argparse.Namespace) -> int:
    """Run what is not finished, then report; the exit status."""
    tasks: list[Task] = asked.tasks
    conflicts = check_folders(tasks)
    if asked.dry_run:
        return _print_plan(tasks, conflicts) if _is_first() else 0
    out = Path(tasks[0].settings.out)
    if _is_first():
        prepare_out(out)
        _announce_kernel(asked.kernel if "kernel" in asked else "auto", tasks[0].settings.device)
        _fetch([task for task in tasks if task not in conflicts and not task.run.finished])
    failed = _run([task for task in tasks if task not in conflicts], asked.jobs, asked.spread) | conflicts
    if _is_first():
        for task, reason in failed.items():
            print(f"study.py: {task.name} failed: {reason}", file=sys.stderr)
        if not asked.no_report:
            print(f"report: {build_report([out], out / 'report')}")
    return 1 if failed else 0


def _announce_kernel(requested: str, device: str) -> None:
    kernel, obstacle = choose_kernel(requested, device)
    if obstacle:
        print(f"kernel: {kernel}, for {obstacle}", flush=True)


def _fetch(tasks: list[Task]) -> None:
    """Have the data sets downloaded once, before several runs would. What cannot be had is the error of its runs."""
    for name in dict.fromkeys(task.cell.dataset for task in tasks):
        with suppress(StudyError):
            find_source(name, Path(tasks[0].settings.data_root))


def _run(tasks: list[Task], jobs: int, spread: bool) -> dict[Task, str]:
    """Run the tasks in the way that was asked for; those that failed, and why."""
    if spread:
        return run_spread(tasks, jobs)
    if tasks and distributed.launched():
        with distributed.processes(tasks[0].settings.device):
            return run_together(tasks)
    scheduler = Scheduler(jobs)
    scheduler.run(tasks)
    return scheduler.failed


def _is_first() -> bool:
    """Whether this is the process that speaks for the study; under torchrun there are others."""
    return int(os.environ.get("RANK", 0)) == 0


def _print_plan(tasks: list[Task], conflicts: dict[Task, str]) -> int:
    settings = tasks[0].settings
    print(
        f"{len(tasks)} runs, preset {settings.preset} on {settings.device}, kernel {settings.kernel}, in {settings.out}"
    )
    for task in tasks:
        print(f"  {task.name}: {conflicts.get(task) or task.state()}")
    left = sum(task.work - task.done for task in tasks if task not in conflicts)
    seconds, work = pace([task for task in tasks if task not in conflicts])
    if work and left:
        print(
            f"left to do: about {left / work * seconds / 3600:.1f} h, one run at a time, at the pace of those finished"
        )
    elif left:
        print(f"left to do: what {left:.3g} training images cost in the explicit network")
    return 1 if conflicts else 0
