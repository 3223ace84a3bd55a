"""Heads alone on one frozen trunk, as experiments/protocol.md has it: what comes before the last block is taken from a
finished explicit run and computed once; the last block and the classifier of every arm are then trained on it, under
one seed after another.

A head is a run: a folder under TRUNK/heads, with a line and a checkpoint per epoch. Finished ones are left alone, and
what was cut off goes on at its last epoch. Images are not augmented; rate, weight decay and gain are those chosen for
the arm by the trials, all else is the trunk's recipe. report.py shows the heads in a section of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from nc_study import distributed, protocol
from nc_study.cli import conclude, prepare, told
from nc_study.config import Settings, StudyError, arm_options, settings_from
from nc_study.data import CachedFeatures, StudyData, find_source, load
from nc_study.models import ResNet18, build, choose_kernel, widened
from nc_study.record import KernelChoice
from nc_study.rundir import RunDirectory, prepare_out
from nc_study.training import EVALUATION_BATCH, autocast, train
from torch import nn


def main(argv: Sequence[str] | None = None) -> int:
    """Train the heads; the exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trunk", type=Path, metavar="TRUNK", help="folder of a finished explicit run, with last.ckpt")
    parser.add_argument("--seeds", type=int, default=protocol.HEAD_SEEDS, help="how many (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--data-root", default="data", help="folder that holds the CIFAR files (default: %(default)s)")
    asked = parser.parse_args(argv)
    for name in ("seeds", "threads"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} {getattr(asked, name)}: at least 1")
    if distributed.launched():
        parser.error("heads.py is one process: start it with python, not with torchrun")
    saved = f"finished epochs are saved, this goes on with them:\n  {distributed.command_line()}"
    return told("heads.py", lambda: train_heads(asked), saved)


def train_heads(asked: argparse.Namespace) -> int:
    """Train every head that is not finished; 0."""
    planned = list(heads(asked))
    out = asked.trunk / protocol.HEADS
    prepare_out(out)
    prepare(planned[0])
    cached: CachedFeatures | None = None
    for number, settings in enumerate(planned, 1):
        run = RunDirectory(out / settings.run_name)
        with run.locked():
            run.start(settings)
            if not run.finished:
                cached = cached or cache(asked, settings.device)
                head = build(settings)
                head.stem, head.trunk = nn.Sequential(), nn.Sequential()
                train(settings, cached, run, head)
                conclude(settings, cached, run, KernelChoice("auto", settings.kernel, None), head)
        one = run.result.network
        accuracy, trained = one.quantity("overall"), one.curves["train_accuracy"][-1]
        shown = f"test {accuracy:.2f} %, training {trained:.2f} % in the last epoch"
        print(f"[{number} of {len(planned)}] {settings.arm}, seed {settings.seed}: {shown}", flush=True)
    return 0


def heads(asked: argparse.Namespace) -> Iterator[Settings]:
    """The settings of every head, all arms of a seed together."""
    chosen, given = protocol.tuned(), trunk_options(asked)
    for seed, arm in product(range(asked.seeds), protocol.ARMS):
        options = {**given, **arm_options(arm), **chosen[arm], "seed": seed}
        device = settings_from(protocol.HEADS, **options).device
        yield settings_from(protocol.HEADS, **options, kernel=choose_kernel("auto", device)[0], resume=True)


def trunk_options(asked: argparse.Namespace) -> dict[str, Any]:
    """The options of the trunk's run but for those of the machine; StudyError if it is no finished explicit run."""
    run = RunDirectory(asked.trunk)
    if not run.finished:
        raise StudyError(
            f"{asked.trunk} holds no finished run: python experiments/study.py --protocol trains the trunk"
        )
    found = run.result.settings
    if found.arm != "explicit":
        raise StudyError(f"{asked.trunk} holds a run of {found.arm}: the trunk is that of an explicit one")
    own = ("study", "drawing", "device", "kernel")
    return {name: one for name, one in asdict(found).items() if name not in own} | {
        "threads": asked.threads,
        "data_root": asked.data_root,
    }


def cache(asked: argparse.Namespace, device: str) -> CachedFeatures:
    """The trunk's features before its last block, of all images as they are."""
    settings = settings_from("cifar_lt", **trunk_options(asked), device=device)
    state = RunDirectory(asked.trunk).restore()
    if state is None:
        raise StudyError(
            f"{asked.trunk / 'last.ckpt'} is missing: it holds the trunk's weights, and is not in the repository. Run "
            "the `command` of result.json there with another --out, and give the folder of that run"
        )
    trunk = build(settings)
    trunk.load_state_dict(state["network"])
    data = load(find_source(settings.dataset, Path(asked.data_root)), settings, torch.device(device))
    values = {spec.name: getattr(data, spec.name) for spec in fields(data)}
    made = {f"{split}_images": before_last_block(trunk, data, settings, split) for split in ("train", "test")}
    print(f"cached: features of {len(made['train_images'])} training and {len(made['test_images'])} test images")
    return CachedFeatures(**{**values, **made})


@torch.no_grad()
def before_last_block(trunk: ResNet18, data: StudyData, settings: Settings, split: str) -> torch.Tensor:
    """(N, C, H, W) float32: what the last block is given of the images of "train" or "test"."""
    trunk.eval()
    with autocast(settings):
        return torch.cat(
            [widened(trunk.trunk(trunk.stem(images))) for images, _ in data.plain(split, EVALUATION_BATCH)]
        )


if __name__ == "__main__":
    sys.exit(main())
