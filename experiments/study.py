"""Runs of a study, resumed where they stopped, and a report. The runs are those of experiments/protocol.md, or of the
tables and figures of Sun & Shi (NeurIPS 2024).

A run is what cifar_lt.py or cifar_balanced.py does for one arm of one setting. It has its own process and folder.
Finished runs are kept, and a run that fails does not stop the others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from nc_study import protocol
from nc_study.config import CLASSES, IMBALANCE, RUNNABLE, Settings, arm_options, shown_presets
from nc_study.data import find_source
from nc_study.paper import DATA_SETS, FIGURES, TABLES, paper_settings
from nc_study.scheduler import Task, plan
from nc_study.training import DIVERGED
from runs.files import prepare_out, to_json, write_atomically
from runs.options import Checked, Parser, SettingsError, StudyError, add_options, flag_of, option, seed_numbers
from runs.processes import run_all, tell_failed
from runs.script import resume_hint, run_main

from deqfast._checks import did_you_mean


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
    dry_run: bool = option("how they are run", "print the runs and their progress, and stop", False)
    no_report: bool = option("how they are run", "do not write OUT/report at the end", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        seed_numbers(self.seeds)
        if unknown := set(self.arms.split(",")) - set(RUNNABLE):
            first = min(unknown)
            raise SettingsError(
                f"--arms {self.arms}: {first} is none of {', '.join(RUNNABLE)}{did_you_mean(first, RUNNABLE)}"
            )
        if (self.table is not None or self.figure is not None) + (self.protocol is not None) != 1:
            raise SettingsError("which runs? --protocol PART, or --table or --figure (all: the paper's)")


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
    without = (*IMBALANCE, "seed", "dataset", "resume", "model", "adjoint")
    add_options(parser, Settings, without, shown_presets())
    given = vars(parser.parse_args(argv))
    try:
        options = StudyOptions(
            **{spec.name: given.pop(spec.name) for spec in fields(StudyOptions) if spec.name in given}
        )
        tasks = plan(wanted(options, given), given)
    except StudyError as error:
        parser.error(str(error))
    return options, tasks


def wanted(options: StudyOptions, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options that name each run, all arms of a seed together. Raises StudyError if the user may not choose a setting
    given for all runs, or if --protocol rates has not chosen rates yet."""
    if options.protocol is None:
        chosen = paper_settings(options.table, options.figure, options.dataset)
        each = product(seed_numbers(options.seeds), chosen, options.arms.split(","))
        return [{**setting.options, "seed": seed, **arm_options(arm)} for seed, setting, arm in each]
    if fixed := [flag_of(name) for name in given if name not in protocol.MACHINE]:
        raise SettingsError(f"{', '.join(fixed)}: experiments/protocol.md decides it")
    return list(protocol.trials() if options.protocol == "rates" else protocol.runs(options.protocol))


def conclude_trials(tasks: list[Task], failed: Mapping[Task, str]) -> None:
    """Write the results of the trials, and the rates that they choose."""
    finished = []
    for task in tasks:
        diverged = DIVERGED in failed.get(task, "")
        if diverged or (task.finished and task not in failed):
            own, overall = task.settings, None if diverged else task.run.result.network.quantity("overall")
            finished.append(protocol.Rate(own.arm, own.ratio or 0, own.weight_decay, own.lr, overall))
    if len(finished) < len(protocol.rates().trials):
        print(f"{len(finished)} of {len(tasks)} trials: {protocol.CHOSEN}, which has more, stays")
        return
    write_atomically(protocol.CHOSEN, to_json(protocol.choose_rates(finished), indented=True))
    print(f"{len(finished)} of {len(tasks)} trials: {protocol.CHOSEN}")


def run_study(options: StudyOptions, tasks: list[Task]) -> int:
    """Run the unfinished tasks, then report; return the exit status."""
    conflicts = {task: conflict for task in tasks if (conflict := task.conflict())}
    if options.dry_run:
        print(f"{len(tasks)} runs")
        for task in tasks:
            print(f"  {task}: {conflicts.get(task) or task.state()}")
        return 1 if conflicts else 0
    settings = tasks[0].settings
    out = Path(settings.out)
    prepare_out(out)
    possible = [task for task in tasks if task not in conflicts]
    for name in {task.settings.dataset for task in possible if not task.finished}:
        find_source(name, Path(settings.data_root))  # at once, and downloaded once
    failed = run_all(possible, options.jobs) | conflicts
    status = tell_failed("study.py", failed)
    if options.protocol == "rates":
        conclude_trials(tasks, failed)
    elif not options.no_report and any(task.finished for task in tasks):
        from nc_study.reporting import report  # late: it draws figures, and the runs need none

        print(f"report: {report.write(report.collect([out]), out / 'report')}")
    return status


if __name__ == "__main__":
    sys.exit(main())
