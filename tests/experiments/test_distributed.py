"""Two processes do what one does: the same numbers, in float64 to 1e-9, from the first step to the resumed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, as_default_dtype, float64
from nc_study import distributed, training
from nc_study.cli import main
from nc_study.config import StudyError, settings_from
from nc_study.data import Source, load
from nc_study.training import SolverTally, Trainer

# At width 1 the batch norm of a dead channel makes ten times as much of every rounding in each step.
SETTINGS = [*TINY, "--width", "4", "--lr", "0.001"]
RUN = "shapes-k3-r10-quick-both-broyden-jfb-seed0"
CPU = torch.device("cpu")
PROGRAM = """
import os, signal, sys, torch
sys.path[:0] = [{here!r}]
from conftest import float64, main
from nc_study import distributed
from nc_study.config import StudyError
from nc_study.training import Trainer
import test_distributed
{body}
"""
STUDY = """
step, left = Trainer.train_step, [{steps}]

def train_step(self, *arguments):
    left[0] -= 1
    if left[0] < 0 and os.environ["RANK"] == "1":
        {action}
    return step(self, *arguments)

Trainer.train_step = train_step
with float64():
    sys.exit(main("cifar_lt", None, sys.argv[1:]))
"""


def together(folder: Path, body: str, *arguments: str, **fields: object) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(here=str(Path(__file__).parent), body=body.format(**fields)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launch, str(program), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def run_together(
    folder: Path, *arguments: str, steps: int = 10**6, action: str = "pass"
) -> subprocess.CompletedProcess[str]:
    """A study in two processes, of which the second does something after some steps."""
    return together(folder, STUDY, *SETTINGS, "--out", str(folder), *arguments, steps=steps, action=action)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process that nothing disturbed."""
    out = tmp_path_factory.mktemp("alone")
    assert run_alone(out) == 0
    return out / RUN


def run_alone(out: Path, *arguments: str) -> int:
    with float64():
        return main("cifar_lt", None, [*SETTINGS, "--out", str(out), *arguments])


def assert_same_numbers(one: Path, other: Path) -> None:
    """Epoch lines, their times apart, and final weights and momenta; counts to the last unit."""
    for model in ("explicit", "deq"):
        lines = [[json.loads(line) for line in (run / f"{model}.jsonl").open()] for run in (one, other)]
        assert len(lines[0]) == len(lines[1]) == 3
        for mine, theirs in zip(*lines, strict=True):
            assert_close({**mine, "seconds": None}, {**theirs, "seconds": None})
        assert_close(*[torch.load(run / f"{model}.ckpt", weights_only=True) for run in (one, other)])


def assert_close(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close(a, b, f"{where}/{i}")
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda text: where + text)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-11, nan_ok=True), where
    else:
        assert one == other, where


def steps_of_every_kind() -> dict[str, object]:
    """Weights, momenta and counts after steps with batches of 5, 1 (an empty share) and 4 images, and samples left out:
    in one process, in both, and all."""
    found: dict[str, object] = {}
    for name, model, given in (
        ("explicit", "explicit", {}),
        ("jfb", "deq", {"e_w": 0.5, "e_h": 2.0}),
        ("implicit", "deq", {"adjoint": "implicit"}),
    ):
        one = trainer(model, **given)
        tally, losses = SolverTally(CPU, 10), []
        for left_out in ((), (0,), (0, 1), (0, 1, 2, 3, 4)):
            losses += [step(one, size, left_out, tally) for size in (5, 1, 4)]
        found[name] = {"losses": losses, "state": one.state(1), "solver": tally.summary()}
        seen = one.infer("test")
        found[name] |= {"test": [seen.predictions, seen.labels, seen.features], "seen": seen.solver}
    return found


def trainer(model: str, **given: object) -> Trainer:
    tiny = {"dataset": "shapes", "device": "cpu", "width": 4, "n_majority": 16, "ratio": 4, "test_images": 13}
    settings = settings_from("cifar_lt", **tiny, epochs=2, batch_size=5, lr=1e-3, **given)
    return Trainer(model, settings, as_default_dtype(load(Source("shapes", ""), settings, CPU)))


def step(one: Trainer, size: int, left_out: tuple[int, ...], tally: SolverTally) -> list[float]:
    """A step with the first images, in which the solves of those left out are reported as broken."""
    mine, real = distributed.share(0, size), training.usable
    mask = torch.tensor([i not in left_out for i in range(mine.start, mine.stop)], dtype=torch.bool)
    training.usable = lambda solution: real(solution) & mask
    try:
        one.network.train()
        images = one.data.normalise(one.data.train_images[mine])
        return distributed.total(one.train_step(images, one.data.train_labels[mine], tally)).tolist()
    finally:
        training.usable = real


UNITS = """
with float64(), distributed.processes("cpu"):
    torch.set_num_threads(1)
    found = test_distributed.steps_of_every_kind()
    rank = torch.distributed.get_rank()
    found["gathered"] = distributed.gather(torch.full((2 + rank, 2), float(rank)), 5)
    found["from first"] = distributed.from_first(lambda: {{"rank": rank}})
    try:
        distributed.from_first(test_distributed.refuse)
    except StudyError as error:
        found["refused"] = str(error)
    print("rank", rank)
    torch.save(found, f"{{sys.argv[1]}}/{{rank}}.pt")
"""


def refuse() -> None:
    """An error that is the user's."""
    raise StudyError("no")


def test_steps_gradients_statistics_and_counts_are_those_of_the_whole_batch(tmp_path):
    done = together(tmp_path, UNITS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0\n"
    with float64():
        expected = steps_of_every_kind()
    assert expected["jfb"]["solver"]["skipped"] == 3 + 5 + 10 and expected["jfb"]["losses"][-1] == [0, 0, 0]
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.pop("gathered").tolist() == [[0, 0]] * 2 + [[1, 1]] * 3
        assert found.pop("from first") == {"rank": 0} and found.pop("refused") == "no"
        assert_close(found, expected)


def test_a_run_begun_by_one_process_and_ended_by_two_has_the_numbers_of_one(alone, tmp_path, monkeypatch):
    step, left = Trainer.train_step, [8]

    def train_step(self, *arguments):
        left[0] -= 1
        return refuse() if left[0] < 0 else step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        assert run_alone(tmp_path) == 1
    done = run_together(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines.count("explicit: going on after epoch 1") == 1
        and sum(line.startswith("results: ") for line in lines) == 1
    )
    assert_same_numbers(tmp_path / RUN, alone)
    result = json.loads((tmp_path / RUN / "result.json").read_text())
    assert result["machine"]["processes"] == 2 and result["command"].startswith("torchrun --nproc-per-node 2 ")
    again = run_together(tmp_path)
    assert again.returncode != 0 and again.stderr.count("cifar_lt.py: error: ") == 1
    assert "holds a finished run of this kind" in again.stderr


def test_a_run_of_two_whose_second_is_killed_is_ended_by_one_with_the_numbers_of_one(alone, tmp_path):
    """111 images are 7 steps an epoch: killed in the DEQ's second epoch."""
    killed = run_together(tmp_path, steps=30, action="os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode != 0 and not (tmp_path / RUN / "result.json").exists()
    assert run_alone(tmp_path, "--resume") == 0
    assert_same_numbers(tmp_path / RUN, alone)


def test_an_error_in_one_process_ends_both_with_a_line(tmp_path):
    done = run_together(tmp_path, "--model", "explicit", steps=3, action="raise StudyError('the second cannot')")
    assert done.returncode != 0
    assert done.stderr.count("cifar_lt.py: error: ") == done.stderr.count("error: the second cannot") == 1
