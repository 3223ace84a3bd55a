"""Every table and figure of Sun & Shi (NeurIPS 2024): the runs behind them, resumed where they stopped, and a report.

A run is what cifar_lt.py or cifar_balanced.py does for one setting of a table; it gets a process and a folder of its
own. Runs that are finished are left alone, and a run that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nc_study import distributed
from nc_study.cli import terminable
from nc_study.config import CLASSES, IMBALANCE, LARGEST_SEED, Settings, StudyError, add_options
from nc_study.data import find_source
from nc_study.models import choose_kernel
from nc_study.paper import DATA_SETS, FIGURES, TABLES, settings_of
from nc_study.rundir import prepare_out
from nc_study.scheduler import Scheduler, Task, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 if a run failed or none could be begun, 2 for bad arguments, 130 after
    Ctrl-C or SIGTERM."""
    asked, tasks = parse(argv)
    try:
        with terminable():
            return run_study(asked, tasks)
    except StudyError as error:
        print(f"study.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = distributed.command_line()
        print(
            f"\ninterrupted; finished epochs are saved, the same command goes on with them:\n  {again}", file=sys.stderr
        )
        return 130


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Task]]:
    """The study's own arguments, and the tasks that they and the settings given for all runs amount to."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--table N] [--figure N] [--dataset NAME] [--seeds N,N] [--jobs N] [options]",
        description=__doc__,
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
    own.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on the next GPU (default: 1)"
    )
    own.add_argument("--processes", type=int, default=1, metavar="N", help="processes, and GPUs, per run (default: 1)")
    own.add_argument(
        "--spread",
        action="store_true",
        help="under torchrun, on one machine or several: every process takes its share of the runs, without a report",
    )
    own.add_argument("--dry-run", action="store_true", help="say what would be run, and how far it is, and stop")
    own.add_argument("--no-report", action="store_true", help="do not write OUT/report at the end")
    names = vars(parser.parse_args([]))
    add_options(parser, Settings, (*IMBALANCE, "seed", "dataset", "resume"))
    asked = parser.parse_args(argv)
    given = {name: value for name, value in vars(asked).items() if name not in names}
    try:
        _check(asked)
        chosen = settings_of(asked.table, asked.figure, asked.dataset)
        return asked, plan(chosen, asked.seeds, given, asked.jobs)
    except StudyError as error:
        parser.error(str(error))


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or max(seeds) > LARGEST_SEED or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: different whole numbers from 0 to 2**63 - 1, with commas between")
    return seeds


def _check(asked: argparse.Namespace) -> None:
    if asked.table is None and asked.figure is None:
        raise StudyError("which runs? --table all --figure all names every run of the paper")
    for name, value in (("jobs", asked.jobs), ("processes", asked.processes)):
        if value < 1:
            raise StudyError(f"--{name} {value}: at least 1")
    if asked.spread and not distributed.launched():
        raise StudyError("--spread: only under torchrun with two or more processes, over which the runs are spread")
    if distributed.launched() and not asked.spread:
        raise StudyError("under torchrun study.py takes --spread; --processes N gives each run N processes without it")


def run_study(asked: argparse.Namespace, tasks: list[Task]) -> int:
    """Run what is not finished, then report; the exit status."""
    if asked.spread:
        tasks = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    conflicts = {task: conflict for task in tasks if (conflict := task.conflict())}
    if asked.dry_run:
        return _print_plan(tasks, conflicts)
    if not tasks:
        return 0
    out, settings = Path(tasks[0].settings.out), tasks[0].settings
    prepare_out(out)
    kernel, obstacle = choose_kernel(asked.kernel if "kernel" in asked else "auto", settings.device)
    if obstacle:
        print(f"kernel: {kernel}, for {obstacle}", flush=True)
    _fetch([task for task in tasks if task not in conflicts and not task.run.finished])
    scheduler = Scheduler(asked.jobs, asked.processes, int(os.environ.get("LOCAL_RANK", 0)) * asked.jobs)
    scheduler.run([task for task in tasks if task not in conflicts])
    failed = scheduler.failed | conflicts
    for task, reason in failed.items():
        print(f"study.py: {task.name} failed: {reason}", file=sys.stderr)
    if not (asked.no_report or asked.spread):
        from nc_study.reporting.report import build  # late: it draws figures, and the runs need none

        print(f"report: {build([out], out / 'report')}")
    return 1 if failed else 0


def _fetch(tasks: list[Task]) -> None:
    """Have the data sets downloaded once, before several runs would. What cannot be had is the error of its runs."""
    for name in dict.fromkeys(task.settings.dataset for task in tasks):
        with suppress(StudyError):
            find_source(name, Path(tasks[0].settings.data_root))


def _print_plan(tasks: list[Task], conflicts: dict[Task, str]) -> int:
    if tasks:
        settings = tasks[0].settings
        where = f"preset {settings.preset} on {settings.device}, kernel {settings.kernel}, in {settings.out}"
        print(f"{len(tasks)} runs, {where}")
    for task in tasks:
        print(f"  {task.name}: {conflicts.get(task) or task.state()}")
    possible = [task for task in tasks if task not in conflicts]
    finished = [task for task in possible if task.run.finished]
    if left := sum(task.epochs - task.done for task in possible):
        pace = f"left to do: {left} of {sum(task.epochs for task in possible)} epochs"
        if finished:
            seconds = sum(task.run.result.seconds for task in finished) / sum(task.epochs for task in finished)
            pace += f", about {left * seconds / 3600:.1f} h, one run at a time, at the pace of those finished"
        print(pace)
    return 1 if conflicts else 0


if __name__ == "__main__":
    sys.exit(main())
