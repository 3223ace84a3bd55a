"""The course of a study script, from its command line to its last printed line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from . import distributed
from .analysis import last_block_radius, shown_features
from .config import Settings, StudyError, parse
from .data import Source, find_source, load
from .models import choose_kernel
from .record import KernelChoice, NetworkResult
from .results import network_result, report, run_result
from .rundir import RunDirectory, prepare_out, write_arrays
from .training import train


def main(study: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C or
    SIGTERM."""
    settings = parse(study, description, argv)
    again = distributed.command_line() + ("" if settings.resume else " --resume")
    saved = f"finished epochs are saved, this goes on with them:\n  {again}"
    return told(f"{study}.py", lambda: run_study(settings), saved)


def told(script: str, work: Callable[[], int], when_interrupted: str) -> int:
    """Do the work of a script; its exit status. A StudyError becomes a line on stderr and 1; Ctrl-C becomes 130 and a
    line that says `when_interrupted`.

    SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) are like Ctrl-C.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        return work()
    except StudyError as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if distributed.is_first():
            print(f"\ninterrupted; {when_interrupted}", file=sys.stderr)
        return 130


def run_study(asked: Settings) -> int:
    """Train the networks that the settings name, or go on with them, and print what came out; 0. With several processes
    the first one alone has to do with files."""
    first = distributed.from_first
    prepare(asked)
    out = Path(asked.out)
    with distributed.processes(asked.device), ExitStack() as stack:
        first(prepare_out, out)
        source = first(find_source, asked.dataset, Path(asked.data_root))
        kernel, obstacle = choose_kernel(asked.kernel, asked.device)
        settings = replace(asked, dataset=source.name, kernel=kernel)
        announce(settings, source, obstacle)
        run = RunDirectory(out / settings.run_name)
        first(lambda: stack.enter_context(run.locked()))
        first(run.start, settings)
        if not first(lambda: run.finished):
            train_all(settings, source, run, KernelChoice(asked.kernel, kernel, obstacle or None))
        first(show, run)
    return 0


def prepare(settings: Settings) -> None:
    """Threads, and on the CPU the same bits for the same settings; an error if a compiler is needed and missing."""
    if settings.compile and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise StudyError("--compile: torch.compile needs a C++ compiler, and neither CXX, c++, g++ nor clang++ is one")
    torch.set_num_threads(settings.threads)
    if settings.device == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor with NaN is a debugging aid, not part of being deterministic.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def announce(settings: Settings, source: Source, obstacle: str) -> None:
    """A line each: preset, processes, data and kernel, with the reason where one is not what was asked for."""
    networks = f"width {settings.width}, {settings.epochs} epochs, learning rate {settings.lr:g}"
    print(f"preset: {settings.preset} on {settings.device} ({networks})")
    if (processes := distributed.world_size()) > 1:
        alone = "" if settings.device == "cuda" else ", each with batch statistics of its own"
        print(f"{processes} processes{alone}")
    print(f"data: {source.name}" + (f" instead of CIFAR-10: {source.reason}" if source.reason else ""))
    print(f"kernel: {settings.kernel}" + (f", for {obstacle}" if obstacle else ""), flush=True)


def train_all(settings: Settings, source: Source, run: RunDirectory, kernel: KernelChoice) -> None:
    """Train the networks one after the other and write the result."""
    data = load(source, settings, torch.device(settings.device))
    minority = data.classes - data.majority
    split = f"{data.majority} classes of {data.counts[0]}"
    split += f" and {minority} of {data.counts[-1]}" if minority else ""
    print(f"{len(data.train_images)} training images ({split}), {len(data.test_images)} test images", flush=True)
    networks = {model: train(model, settings, data, run).network for model in settings.models}

    def conclude() -> None:
        results: dict[str, NetworkResult] = {}
        arrays: dict[str, np.ndarray] = {}
        for model, network in networks.items():
            arrays |= {f"{model}/{name}": array for name, array in shown_features(network, data).items()}
            parameters = sum(parameter.numel() for parameter in network.parameters())
            results[model] = network_result(parameters, run.epochs(model), last_block_radius(network, data))
        write_arrays(run.features, arrays)
        run.conclude(run_result(settings, kernel, data.counts, results))

    distributed.from_first(conclude)


def show(run: RunDirectory) -> None:
    """Draw the figure of a finished run and print its result."""
    from . import figures  # late: matplotlib takes a second or more, which the first epoch need not wait for

    figures.draw(run)
    print(f"\n{report(run.result)}\n\nresults: {run.path / 'result.json'}\nfigure:  {run.figure}")
