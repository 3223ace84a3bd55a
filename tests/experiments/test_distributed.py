"""Two processes on one run: shared, gathered and agreed values; their numbers equal those of one process."""

from dataclasses import asdict

import pytest
import study
import torch
from correctness import GRADIENT
from nc_study import distributed, training
from nc_study.config import settings_from
from nc_study.rundir import RunDirectory
from nc_study.training import SolverTally, Trainer
from runs.options import StudyError
from study_helpers import CPU, HERE, KILLED, STUDY, TINY, assert_same, float64, folder_of, python, shapes_data

UNITS = """
import sys, torch, test_distributed
from nc_study import distributed
from study_helpers import float64
with float64(), distributed.processes("cpu"):
    torch.set_num_threads(1)
    seen = test_distributed.steps_of_every_kind()
    rank = torch.distributed.get_rank()
    seen["gathered"] = distributed.gather(torch.full((2 + rank, 2), float(rank)))
    seen["from first"] = distributed.from_first(lambda: {"rank": rank})
    statistics = torch.nn.BatchNorm1d(1)
    statistics.running_mean += rank + 3
    distributed.share_statistics(statistics)
    seen["statistics"] = statistics.running_mean
    print("rank", rank)
    torch.save(seen, f"{sys.argv[1]}/{rank}.pt")
    distributed.from_first(test_distributed.refuse)
"""


TWO_EPOCHS = ("--epochs", "2")


def together(*program: str, **given):
    """Run a program in two processes."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program, cwd=HERE, **given)


def refuse() -> None:
    """Raise an error that the user can correct."""
    raise StudyError("no")


def steps_of_every_kind() -> dict[str, object]:
    """Weights, momenta and counts after steps with batches of 5, 1 (an empty share) and 4 images. Samples are left out
    in one process, in both, and all."""
    kinds: dict[str, object] = {}
    for name, model, given in (
        ("explicit", "explicit", {}),
        ("jfb", "deq", {"e_w": 0.5, "e_h": 2.0}),
        ("implicit", "deq", {"adjoint": "implicit"}),
    ):
        tiny = {"dataset": "shapes", "device": "cpu", "width": 4, "n_majority": 16, "ratio": 4, "test_images": 13}
        settings = settings_from(
            "cifar_lt", **tiny, model=model, epochs=2, batch_size=5, lr=1e-3, precision="fp32", **given
        )
        trainer = Trainer(settings, shapes_data(settings))
        if name == "implicit":  # the initial cell does not contract: its adjoint solve amplifies a rounding to 1e-5
            trainer.network.last.cell.conv2.weight.data *= 0.03
            trainer.network.last.cell.norm2.weight.data *= 10
        tally, losses = SolverTally(CPU), []
        for left_out in ((), (0,), (0, 1, 2, 3, 4))[: 1 if name == "implicit" else 3]:
            losses += [step(trainer, size, left_out, tally) for size in (5, 1, 4)]
        seen, solver = trainer.infer("test"), tally.summary()
        kinds[name] = {
            "losses": losses,
            "state": trainer.state(1),
            "solver": solver and asdict(solver),
            "test": [seen.predictions, seen.labels, seen.features],
        }
    return kinds


def step(trainer: Trainer, size: int, left_out: tuple[int, ...], tally: SolverTally) -> list[float]:
    """Make a step with the first images; the solves of the samples left out are reported as broken. It uses the running
    statistics, because processes on CPUs do not share those of a batch."""
    mine, real = distributed.share(0, size), training.usable
    mask = torch.tensor([i not in left_out for i in range(mine.start, mine.stop)], dtype=torch.bool)
    training.usable = lambda solution: real(solution) & mask
    try:
        trainer.network.eval()
        images = trainer.data.normalise(trainer.data.train_images[mine])
        return distributed.total(trainer.train_step(images, trainer.data.train_labels[mine], tally)).tolist()
    finally:
        training.usable = real


@pytest.mark.tier("full")
def test_gradients_counts_and_predictions_are_those_of_the_whole_batch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(UNITS)
    done = together(str(program), str(tmp_path))
    assert done.stdout == "rank 0\n", done.stderr
    assert done.returncode != 0 and done.stderr.count("StudyError: no") == 1  # only the first process reports it
    with float64():
        expected = steps_of_every_kind()
    assert expected["jfb"]["solver"]["skipped"] == 3 + 10 and expected["jfb"]["losses"][-1] == [0, 0, 0]
    for rank in range(2):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert seen.pop("gathered").tolist() == [[0, 0]] * 2 + [[1, 1]] * 3
        assert seen.pop("from first") == {"rank": 0} and seen.pop("statistics") == 3
        assert_same(seen, expected, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.tier("full")
def test_a_run_of_two_goes_on_after_one_of_them_was_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    arguments = (*TINY, *TWO_EPOCHS, "--model", "explicit", "--out", str(tmp_path))
    folder = tmp_path / folder_of(*TWO_EPOCHS)
    killed = together(str(program), *arguments, environment={"KILL": "10"})  # in the second epoch of 7 steps
    assert killed.returncode != 0 and not (folder / "result.json").exists(), killed.stderr
    assert study.main([*STUDY, *TWO_EPOCHS, "--processes", "2", "--no-report", "--out", str(tmp_path)]) == 0
    log = (folder / "log.txt").read_text()
    assert log.count("explicit: continues after epoch 1\n") == 1 and log.count("results: ") == 1
    assert "2 processes, each with batch statistics" in log
    result = RunDirectory(folder).result
    assert result.machine.processes == 2 and result.command.startswith("torchrun --nproc-per-node 2 ")
    assert result.network.curves["epoch"] == (1, 2)
