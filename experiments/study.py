"""Runs of a study, resumed where they stopped, and a report. The runs are those of experiments/protocol.md, or of the
tables and figures of Sun & Shi (NeurIPS 2024).

A run is what cifar_lt.py or cifar_balanced.py does for one arm of one setting. It has its own process and folder.
Finished runs are kept, and a run that fails does not stop the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from nc_study import protocol
from nc_study.config import CLASSES, IMBALANCE, RUNNABLE, Settings, arm_options, shown_presets
from nc_study.data import find_source
from nc_study.paper import DATA_SETS, FIGURES, TABLES, settings_of
from nc_study.scheduler import Task, hours_left, plan
from nc_study.training import DIVERGED
from runs.files import prepare_out, to_json, write_atomically
from runs.options import Checked, Parser, SettingsError, StudyError, add_options, flag_of, listed, option
from runs.processes import run_all, tell_failed
from runs.script import launched, resume_hint, run_main


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Checked):
    """Options of study.py in addition to the settings of its runs."""

    table: str | None = option(
        "which runs", f"the paper's tables: {', '.join(TABLES)}, with commas between, or all", None, metavar="N,N"
    )
    figure: str | None = option(
        "which runs", f"its figures: {', '.join(FIGURES)}, with commas between, or all", None, metavar="N,N"
    )
    dataset: str = option(
        "which runs",
        "cifar: CIFAR-10 and CIFAR-100 for the tables, CIFAR-10 for the figures",
        "cifar",
        choices=(*DATA_SETS, *CLASSES),
    )
    arms: str = option("which runs", f"what is compared: {', '.join(RUNNABLE)}", "explicit,deq-implicit", metavar="A,B")
    seeds: str = option("which runs", "seeds, with commas between", "0", metavar="N,N")
    protocol: str | None = option(
        "which runs",
        "a part of the last amendment of experiments/protocol.md; rates: the trials that choose each arm's rate",
        None,
        choices=("rates", *protocol.PARTS),
    )

    jobs: int = option("how they are run", "parallel runs, each on the next GPU", 1, minimum=1)
    processes: int = option("how they are run", "processes, and GPUs, per run", 1, minimum=1)
    spread: bool = option(
        "how they are run",
        "under torchrun: every process takes its share of the runs, without a report or rates",
        False,
    )
    dry_run: bool = option("how they are run", "print the runs and their progress, and stop", False)
    no_report: bool = option("how they are run", "do not write OUT/report at the end", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = self.seeds.split(",")
        if not all(map(str.isdecimal, numbers)) or len(set(numbers)) < len(numbers):
            raise SettingsError(f"--seeds {self.seeds}: different whole numbers with commas between")
        listed("arms", self.arms, RUNNABLE)
        if (self.table is not None or self.figure is not None) + (self.protocol is not None) != 1:
            raise SettingsError("which runs? --protocol PART, or --table or --figure (all: the paper's)")
        if self.spread and not launched():
            raise SettingsError("--spread: only under torchrun with two or more processes, over which runs are spread")
        if launched() and not self.spread:
            raise SettingsError("under torchrun study.py takes --spread; without it --processes N gives each run N")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 if a run failed or none could be begun, 2 for bad arguments, 130 after
    Ctrl-C or SIGTERM."""
    options, tasks = parse(argv)
    return run_main("study.py", lambda: run_study(options, tasks), resume_hint())


def parse(argv: Sequence[str] | None) -> tuple[StudyOptions, list[Task]]:
    """Parse the study's own options, and the tasks that result from them and the settings given for all runs."""
    examples = (
        "study.py --table 1,2 --preset quick --dry-run",
        "study.py --figure all --arms explicit,deq-implicit --seeds 0,1,2 --out runs/study",
        "study.py --protocol rates --jobs 2",
    )
    usage = "[--protocol PART | --table N,N --figure N,N] [--arms A,B] [--seeds N,N] [options]"
    parser = Parser(
        f"{__doc__}\nThe groups from study to machine are options of cifar_lt.py, for every run.", examples, usage
    )
    add_options(parser, StudyOptions)
    without = (*IMBALANCE, "seed", "dataset", "resume", "model", "cells", "adjoint")
    add_options(parser, Settings, without, shown_presets())
    given = vars(parser.parse(argv))
    try:
        options = StudyOptions(
            **{spec.name: given.pop(spec.name) for spec in fields(StudyOptions) if spec.name in given}
        )
        tasks = plan(wanted(options, given), given, options.processes)
    except StudyError as error:
        parser.error(str(error))
    return options, tasks


def wanted(options: StudyOptions, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options that name each run, all arms of a seed together. Raises StudyError if the user may not choose a setting
    given for all runs, or if --protocol rates has not chosen rates yet."""
    if options.protocol is None:
        chosen = settings_of(options.table, options.figure, options.dataset)
        each = product(map(int, options.seeds.split(",")), chosen, listed("arms", options.arms, RUNNABLE))
        return [{**setting.options, "seed": seed, **arm_options(arm)} for seed, setting, arm in each]
    if fixed := [flag_of(name) for name in given if name not in protocol.MACHINE]:
        raise SettingsError(f"{', '.join(fixed)}: experiments/protocol.md decides it")
    return list(protocol.trials() if options.protocol == "rates" else protocol.runs(options.protocol))


def conclude_trials(tasks: list[Task], failed: Mapping[Task, str]) -> None:
    """Write the results of the trials, and the rates that they choose; on a CPU they are pilots, which choose none."""
    if any(protocol.is_pilot(task.settings) for task in tasks):
        print(f"pilots on a CPU: {protocol.CHOSEN} stays")
        return
    trials = []
    for task in tasks:
        diverged = DIVERGED in failed.get(task, "")
        if diverged or (task.finished and task not in failed):
            settings, overall = task.settings, None if diverged else task.run.result.network.quantity("overall")
            trials.append(protocol.Rate(settings.arm, settings.ratio or 0, settings.weight_decay, settings.lr, overall))
    if len(trials) < len(protocol.rates().trials):
        print(f"{len(trials)} of {len(tasks)} trials: {protocol.CHOSEN}, which has more, stays")
        return
    write_atomically(protocol.CHOSEN, to_json(protocol.choose_rates(trials), indented=True))
    print(f"{len(trials)} of {len(tasks)} trials: {protocol.CHOSEN}")


def run_study(options: StudyOptions, tasks: list[Task]) -> int:
    """Run the unfinished tasks, then report; return the exit status."""
    if obstacle := tasks[0].obstacle:
        print(f"kernel: {tasks[0].settings.kernel}, for {obstacle}", flush=True)
    if options.spread:
        tasks = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    conflicts = {task: conflict for task in tasks if (conflict := task.conflict())}
    if options.dry_run:
        hours = hours_left(task for task in tasks if task not in conflicts)
        print(f"{len(tasks)} runs")
        for task in tasks:
            left = f", {hours[task]:.1f} h" if task in hours else ""
            print(f"  {task}: {conflicts.get(task) or task.state()}{left}")
        print(f"about {sum(hours.values()):.1f} h are left, one run at a time, by steps timed now")
        return 1 if conflicts else 0
    if not tasks:
        return 0
    settings = tasks[0].settings
    out = Path(settings.out)
    prepare_out(out)
    possible = [task for task in tasks if task not in conflicts]
    for name in {task.settings.dataset for task in possible if not task.finished}:
        find_source(name, Path(settings.data_root))  # at once, and downloaded once
    first_slot = int(os.environ.get("LOCAL_RANK", 0)) * options.jobs
    failed = run_all(possible, options.jobs, first_slot) | conflicts
    status = tell_failed("study.py", failed)
    if options.spread:
        if options.protocol == "rates":  # a process knows only its share
            print("no rates are chosen: afterwards run it without torchrun and --spread, which keeps finished trials")
    elif options.protocol == "rates":
        conclude_trials(tasks, failed)
    elif not options.no_report and any(task.finished for task in tasks):
        from nc_study.reporting import report  # late: it draws figures, and the runs need none

        print(f"report: {report.write(report.collect([out]), out / 'report')}")
    return status


if __name__ == "__main__":
    sys.exit(main())
