"""Course of a study script, from its command line to its last printed line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runs.files import locked, prepare_out, write_arrays, write_atomically
from runs.options import StudyError
from runs.script import resume_hint, run_main
from runs.states import write_state

from . import distributed
from .analysis import last_block_radius, shown_features
from .config import Settings, parse
from .data import Source, StudyData, find_source, load
from .networks import ResNet18, choose_kernel, cost, count_parameters
from .record import KernelChoice
from .results import difference, network_result, report, run_result
from .rundir import RunDirectory
from .training import how_steps_run, train


def main(study: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run a study. The exit status is 0, 1 for an error (printed in a line), 2 for bad arguments, 130 after Ctrl-C or
    SIGTERM."""
    settings = parse(study, description, argv)
    again = resume_hint("" if settings.resume else " --resume")
    return run_main(f"{study}.py", lambda: run_study(settings), again)


def run_study(asked: Settings) -> int:
    """Train the networks that the settings name, or continue their runs, and print the results; return 0.

    With several processes, only the first one reads and writes files.
    """
    first = distributed.from_first
    prepare(asked)
    out = Path(asked.out)
    with distributed.processes(asked.device):
        first(prepare_out, out)
        source = first(find_source, asked.dataset, Path(asked.data_root))
        kernel, obstacle = choose_kernel(asked.kernel, asked.device)
        settings = replace(asked, dataset=source.name, kernel=kernel)
        announce(settings, source, obstacle)
        arms = [replace(settings, model=model) for model in settings.models]
        runs = [RunDirectory(out / arm.run_name) for arm in arms]
        with ExitStack() as stack:
            for run, arm in zip(runs, arms, strict=True):
                first(stack.enter_context, locked(run.path))
                first(run.start, arm)
            for run, arm in zip(runs, arms, strict=True):
                if not first(lambda run=run: run.finished):
                    train_arm(arm, source, run, KernelChoice(asked.kernel, kernel, obstacle or None))
        first(show, runs)
    return 0


def prepare(settings: Settings) -> None:
    """Set the threads, full float32 products, and deterministic kernels: all on a CPU, cuDNN's on a GPU.

    Raises StudyError if a compiler is needed and missing.
    """
    if settings.compile and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise StudyError("--compile: torch.compile needs a C++ compiler, and neither CXX, c++, g++ nor clang++ is one")
    torch.set_num_threads(settings.threads)
    cudnn: Any = torch.backends.cudnn
    # TF32, the default, keeps 10 bits of the operands.
    cudnn.conv.fp32_precision = "tf32" if settings.tf32 else "ieee"
    cudnn.deterministic = True
    if settings.device == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor with NaN is a debugging aid and not needed for determinism.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def announce(settings: Settings, source: Source, obstacle: str) -> None:
    """Print a line for preset, processes, data and kernel, with the reason if one differs from the request."""
    networks = f"width {settings.width}, {settings.epochs} epochs, learning rate {settings.lr:g}"
    print(f"process {os.getpid()}: kill ends it (finished epochs are kept), kill -STOP pauses it, kill -CONT continues")
    print(f"preset: {settings.preset} on {settings.device} ({networks})")
    if (processes := distributed.world_size()) > 1:
        alone = "" if settings.device == "cuda" else ", each with batch statistics of its own"
        print(f"{processes} processes{alone}")
    print(f"data: {source.name}" + (f" instead of CIFAR-10: {source.reason}" if source.reason else ""))
    print(f"kernel: {settings.kernel}" + (f", for {obstacle}" if obstacle else ""))
    print(f"training steps: {how_steps_run(settings)}", flush=True)


def train_arm(settings: Settings, source: Source, run: RunDirectory, kernel: KernelChoice) -> None:
    """Train a network and write the result."""
    data = load(source, settings, torch.device(settings.device))
    minority = data.classes - data.majority
    split = f"{data.majority} classes of {data.counts[0]}"
    split += f" and {minority} of {data.counts[-1]}" if minority else ""
    if settings.imbalance == "exp":
        split = f"{data.counts[0]} to {data.counts[-1]} of a class"
    print(
        f"{len(data.train_images)} training images ({split}), {len(data.test_images)} {settings.evaluate} images",
        flush=True,
    )
    network = train(settings, data, run).network
    distributed.from_first(conclude, settings, data, run, kernel, network)


def conclude(settings: Settings, data: StudyData, run: RunDirectory, kernel: KernelChoice, network: ResNet18) -> None:
    """Write the result of a trained network, and features of it."""
    write_arrays(run.features, shown_features(network, data))
    parameters = {name for name, _ in network.named_parameters()}
    state = network.state_dict().items()
    write_state(run.weights, {name: tensor.bfloat16() if name in parameters else tensor for name, tensor in state})
    epochs = run.epochs
    solves = epochs[-1].test_solver
    spent = cost(network, solves.iterations if solves else None)
    result = network_result(count_parameters(network), epochs, last_block_radius(network, data), spent)
    run.conclude(run_result(settings, kernel, data.counts, result, how_steps_run(settings)))


def show(runs: Sequence[RunDirectory]) -> None:
    """Draw one figure of finished runs of one setting, into the folder of the last, and print their results."""
    from . import figures  # late: matplotlib takes a second or more, and the first epoch need not wait for it

    results = [run.result for run in runs]
    write_atomically(runs[-1].figure, figures.course(results))
    print(f"\n{report(results)}\n")
    for run in runs:
        print(f"results: {run.path / 'result.json'}")
    print(f"figure:  {runs[-1].figure}")
    if said := difference(results):
        print(said)
