"""The scripts from command line to last line: fresh, killed, interrupted, resumed, and with errors."""

import io
import json
import shutil
import signal
from contextlib import redirect_stdout
from itertools import count

import pytest
import torch
from correctness import ITERATES, assert_close
from harness import trained
from nc_study.cli import main
from nc_study.rundir import RunDirectory
from nc_study.training import Trainer
from runs.files import read_arrays
from study_helpers import KILLED, TINY, assert_same, folder_of, full_disk, python

import deqfast

RUNS = [folder_of(), folder_of(model="deq")]  # the DEQ that is trained by default has the implicit gradient


def outcome(out):
    """Everything of finished runs that must not depend on their course: weights, moments, and lines without their
    times."""
    runs = {}
    for name in RUNS:
        state = torch.load(out / name / "last.ckpt", weights_only=True)
        lines = [
            json.loads(line) | {"seconds": None} for line in (out / name / "epochs.jsonl").read_text().splitlines()
        ]
        moments = {key: torch.from_numpy(value) for key, value in read_arrays(out / name / "moments.npz").items()}
        kept, last = torch.load(out / name / "weights.ckpt", weights_only=True), state["network"]
        assert kept.keys() == last.keys() and all((kept[key] == last[key].to(kept[key].dtype)).all() for key in kept)
        assert {kept[key].dtype for key in kept if key.endswith("weight")} == {torch.bfloat16}
        runs[name] = state, lines, moments
    return runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of two undisturbed runs, and their output."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.delenv("TRITON_INTERPRET", raising=False)  # as a user has it
        assert main("cifar_lt", None, [*TINY, "--out", str(out), "--kernel", "triton"]) == 0
    return out, printed.getvalue()


def test_a_run_ends_with_row_metrics_paths_and_figure(whole):
    out, printed = whole
    lines = printed.splitlines()
    explicit, result = (RunDirectory(out / name).result for name in RUNS)
    assert result.train_images_per_class == (30,) * 3 + (3,) * 7
    assert (explicit.arm, result.arm) == ("explicit", "deq-implicit") and explicit.network.solver is None
    curves = result.network.curves
    assert result.network.solver.iterations > 1 and "test_converged" not in explicit.network.curves
    assert all(0 <= curves[f"{part}_converged"][-1] <= 1 and curves["epoch"][-1] == 3 for part in ("test", "nc"))
    assert result.network.cost.evaluations == curves["test_iterations"][-1] > explicit.network.cost.evaluations == 1
    if not torch.cuda.is_available():
        assert f"kernel: {result.kernel.used}, for kernel='triton' is not available: no CUDA device" in printed
    assert "not comparable with the paper: shapes, not CIFAR" in printed
    assert lines[-4:-2] == [f"results: {out / name / 'result.json'}" for name in RUNS]
    assert (out / RUNS[1] / "figure.png").read_bytes().startswith(b"\x89PNG")
    apart = result.network.quantity("overall") - explicit.network.quantity("overall")
    assert lines[-1].startswith(f"The DEQ's overall accuracy is {apart:+.2f} points from")


def test_the_cell_of_a_finished_run_is_a_problem_of_the_benchmarks(whole, tmp_path):
    """Also for a run on a GPU."""
    run = shutil.copytree(whole[0] / RUNS[1], tmp_path / "run")
    record = (run / "result.json").read_text()
    (run / "result.json").write_text(record.replace('"device":"cpu"', '"device":"cuda"').replace('"cpp"', '"cuda"'))
    problem = trained.study_cell(run, None, batch=4)
    assert problem.z0.shape == (4, 8, 4, 4) and problem.name == "residual block, shapes"
    solution = deqfast.solve(problem.f, problem.z0, "broyden")
    assert_close(solution.residual_rel, problem.residuals(solution.value), 1e-3)
    # With a group per channel the last normalisation makes every channel's mean its trained bias.
    bias = torch.load(run / "last.ckpt", weights_only=True)["network"]["last.cell.norm3.bias"]
    means = problem.exact(problem.z0.double()).mean((2, 3))
    assert float(bias.abs().max()) > 0
    assert_close(means, bias.expand_as(means), ITERATES)


@pytest.mark.tier("full")
def test_kill_9_and_resume_end_in_the_same_bits(whole, study, tmp_path):
    """111 images are 7 steps per epoch: killed in the DEQ's second epoch, after three of the explicit network."""
    killed = python("-c", KILLED, *TINY, "--out", str(tmp_path), environment={"KILL": "32"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [(tmp_path / name / "result.json").exists() for name in RUNS] == [True, False]
    status, printed, errors = study("--resume")
    assert status == 0, errors
    assert "deq-implicit: continues after epoch 1" in printed
    assert_same(outcome(tmp_path), outcome(whole[0]))


def signal_at_step(monkeypatch, number):
    """Raise a signal in the middle of the second epoch from now on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    step, steps = Trainer.train_step, count(1)

    def train_step(self, *arguments):
        if next(steps) == 12:
            signal.raise_signal(number)
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", train_step)


def test_what_ends_a_run_early_is_named_in_a_line_and_resume_goes_on(study, whole, tmp_path, monkeypatch):
    """A run is interrupted, resumed and terminated, and resumed until the disk is full."""
    for number, given in ((signal.SIGINT, ()), (signal.SIGTERM, ("--resume",))):
        with monkeypatch.context() as patch:
            signal_at_step(patch, number)
            status, _, errors = study(*given)
        assert status == 130 and "interrupted" in errors and errors.rstrip().endswith("--resume") == (not given)
    with monkeypatch.context() as patch:
        full_disk(patch, writes=7)
        status, _, errors = study("--resume")
    assert status == 1 and errors.count("\n") == 1
    assert "error: cannot write" in errors and "No space left on device; what was saved before is intact" in errors
    assert not list(tmp_path.glob("*/*.tmp"))
    assert study("--resume")[0] == 0
    assert_same(outcome(tmp_path), outcome(whole[0]))


def test_a_finished_run_is_printed_again_and_never_overwritten(study, whole):
    def files():
        kept = (path for path in folder.glob("*/*") if path.suffix in (".json", ".jsonl", ".ckpt", ".npz"))
        return {path: path.stat().st_mtime_ns for path in kept}

    folder, printed = whole
    before, out = files(), ("--out", str(folder))
    status, _, errors = study(*out)
    assert status == 1 and "holds a run of these settings: --resume" in errors
    status, again, _ = study(*out, "--resume")
    assert status == 0 and again.partition("Test accuracy")[2] == printed.partition("Test accuracy")[2] != ""
    assert files() == before
