"""The course of a study script, from its command line to its last printed line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from . import distributed
from .analysis import analyse
from .config import Settings, StudyError, parse
from .data import Source, find_source, load
from .models import choose_kernel
from .record import KernelChoice
from .results import network_result, report, run_result
from .rundir import RunDirectory, prepare_out, write_arrays
from .training import train


def main(study: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run a study; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C or
    SIGTERM."""
    settings = parse(study, description, argv)
    again = distributed.command_line() + ("" if settings.resume else " --resume")
    with told(f"{study}.py", again) as status, distributed.processes(settings.device):
        run_study(settings)
    return status[0]


@contextmanager
def told(script: str, again: str) -> Iterator[list[int]]:
    """Turn what ends a script early into a line on stderr and its exit status, the element of the list: a StudyError
    into 1, Ctrl-C into 130 with the command that goes on.

    SIGTERM, with which clusters end jobs, and a lost terminal (unless it is ignored, as under nohup) are like Ctrl-C.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    status = [0]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield status
    except StudyError as error:
        status[0] = 1
        print(f"{script}: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status[0] = 130
        if distributed.is_first():
            print(f"\ninterrupted; finished epochs are saved, this goes on with them:\n  {again}", file=sys.stderr)


def run_study(asked: Settings) -> None:
    """Train the networks that the settings name, or go on with them, and print what came out. All `processes` call it;
    the first one alone has to do with files."""
    first = distributed.from_first
    prepare(asked)
    out = Path(asked.out)
    first(prepare_out, out)
    source = first(find_source, asked.dataset, Path(asked.data_root))
    kernel, obstacle = choose_kernel(asked.kernel, asked.device)
    settings = replace(asked, dataset=source.name, kernel=kernel)
    announce(settings, source, obstacle)
    run = RunDirectory(out / settings.run_name)
    with ExitStack() as stack:
        first(lambda: stack.enter_context(run.locked()))
        first(run.start, settings)
        if not first(lambda: run.finished):
            train_all(settings, source, run, KernelChoice(asked.kernel, kernel, obstacle or None))
        first(show, run)


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
        results, arrays = {}, {}
        for model, network in networks.items():
            radius, arrays[model] = analyse(network, data)
            parameters = sum(parameter.numel() for parameter in network.parameters())
            results[model] = network_result(parameters, run.epochs(model), data.majority, radius)
        write_arrays(run.features, arrays)
        run.conclude(run_result(settings, kernel, data.counts, results))

    distributed.from_first(conclude)


def show(run: RunDirectory) -> None:
    """Draw the figure of a finished run and print its result."""
    from . import figures  # late: matplotlib takes a second or more, which the first epoch need not wait for

    figures.draw(run)
    print(f"\n{report(run.result)}\n\nresults: {run.path / 'result.json'}\nfigure:  {run.figure}")
