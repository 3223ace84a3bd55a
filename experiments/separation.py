"""Experiments after Wu et al., "Separation and Bias of Deep Equilibrium Models" (NeurIPS 2024), with exact checks.

Finished units under --out are kept, so that an interrupted run continues with the same command. The script writes a
record of every unit, report.md and report.html with a verdict on each claim, and figures/, in a folder of the preset.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runs.files import locked, prepare_out
from runs.options import Checked, SettingsError, listed, option, parsed
from runs.processes import run_all, tell_failed, unreadable
from runs.script import resume_hint, run_main
from separation_study import audio, report, saliency
from separation_study.diagonal import DIAGONAL
from separation_study.frame import Job, jobs_of, recorded
from separation_study.gotu import GOTU
from separation_study.heatmap import HEATMAP
from separation_study.sawtooth import SAWTOOTH
from separation_study.steep import STEEP

EXPERIMENTS = {each.name: each for each in (SAWTOOTH, STEEP, GOTU, DIAGONAL, HEATMAP, audio.AUDIO, saliency.SALIENCY)}


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Options of separation.py."""

    experiment: str = option("study", "which experiment", "all", choices=("all", *EXPERIMENTS))
    preset: str = option(
        "study",
        "quick: few seeds, minutes; full: five seeds and larger sizes, hours; long: 20,000 steps of sawtooth and steep",
        "quick",
        choices=("quick", "full", "long"),
    )
    task: str | None = option(
        "study", "only these tasks, with commas between, such as k5,d20-concentrated", None, metavar="A,B"
    )
    audio: str | None = option(
        "data", "folder of WAV files to fit in audio; off: a chirp is drawn", None, metavar="DIR"
    )
    runs: str | None = option(
        "data",
        "folder of the CIFAR study's finished runs for saliency; off: small networks on drawn shapes",
        None,
        metavar="DIR",
    )
    data_root: str = option("data", "folder that holds the CIFAR files of those runs", "data", metavar="DIR")
    jobs: int = option("machine", "parallel units, with one thread each", os.cpu_count() or 1, minimum=1)
    out: str = option("machine", "parent of the presets' folders", "runs/separation", metavar="DIR")
    report: bool = option(
        "machine", "only write the sections of --experiment again, from their records under --out", False
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments; the exit status is 0, 1 for an error (a line each), 2 for bad arguments, 130 after
    Ctrl-C."""
    examples = ("separation.py --experiment gotu --jobs 1", "separation.py --preset full --out runs/separation")
    options = parsed(Options, __doc__, examples, argv)
    return run_main("separation.py", lambda: study(options), resume_hint())


def study(options: Options) -> int:
    """Measure what is missing and write the report; 0, or 1 if a unit could not be measured."""
    folder = Path(options.out) / options.preset
    prepare_out(folder)
    experiments = {name: each for name, each in EXPERIMENTS.items() if options.preset in each.sizes}
    if options.experiment not in ("all", *experiments):
        raise SettingsError(f"--preset {options.preset}: only for {', '.join(experiments)}, not {options.experiment}")
    if options.preset == "long" and (options.audio, options.runs) != (None, None):
        raise SettingsError("--preset long: it takes neither --audio nor --runs")
    if options.report:
        names = experiments if options.experiment == "all" else [options.experiment]
        again = [recorded(folder, options.preset, experiments[name]) for name in names]
        print(f"report: {report.write(again, options.preset, folder, keep=options.experiment != 'all')}")
        return 0
    if options.audio is not None:
        experiments["audio"] = audio.recorded(Path(options.audio))
    if options.runs is not None:
        experiments["saliency"] = saliency.finished(Path(options.runs), Path(options.data_root))
    chosen = experiments.values() if options.experiment == "all" else [experiments[options.experiment]]
    jobs = [job for experiment in chosen for job in jobs_of(folder, experiment, options.preset)]
    jobs = sorted(_chosen(jobs, options.task), key=lambda job: job.unit.seed)  # all tasks of a seed first
    # Other sizes are an error now rather than after all the others.
    failed = unreadable([job for job in jobs if job.finished], Job.outcome)
    with locked(folder):
        failed |= run_all([job for job in jobs if job not in failed], options.jobs)
    # On all experiments, so that they can be run one by one; which recordings and runs there are, the options say.
    print(f"report: {report.write(experiments.values(), options.preset, folder)}")
    return tell_failed("separation.py", failed)


def _chosen(jobs: list[Job], tasks: str | None) -> list[Job]:
    """Choose the jobs of some tasks, all without a choice."""
    if tasks is None:
        return jobs
    wanted = listed("task", tasks, [*dict.fromkeys(job.unit.task for job in jobs)])
    return [job for job in jobs if job.unit.task in wanted]


if __name__ == "__main__":
    sys.exit(main())
