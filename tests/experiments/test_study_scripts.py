"""The scripts from command line to last line: fresh, killed, interrupted, resumed, and in trouble."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from nc_study.record import RunResult, read_record
from nc_study.training import Trainer
from study_helpers import EXPERIMENTS, KILLED, RUN, TINY, assert_same, full_disk, python, write_cifar
from torchvision.datasets import CIFAR100


def script(name, *arguments, cwd):
    """Run a script as a user does, on a machine without GPU, interpreter and network."""
    return python(str(EXPERIMENTS / f"{name}.py"), *arguments, cwd=cwd)


def outcome(folder):
    """All of a finished run that must not depend on how it came about: weights, and lines without their times."""
    states = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.ckpt")}
    assert "deq.ckpt" in states
    lines = {}
    for path in folder.glob("*.jsonl"):
        lines[path.name] = [json.loads(line) | {"seconds": None} for line in path.read_text().splitlines()]
    return states, lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed, in a process of its own."""
    out = tmp_path_factory.mktemp("whole")
    done = script("cifar_lt", *TINY, "--out", str(out), "--kernel", "triton", cwd=out)
    assert done.returncode == 0, done.stderr
    return out / RUN, done


def test_a_run_ends_with_row_metrics_paths_and_figure(whole):
    folder, done = whole
    lines = done.stdout.splitlines()
    result = read_record(RunResult, folder / "result.json")
    assert result.train_images_per_class == (30,) * 3 + (3,) * 7 and list(result.networks) == ["explicit", "deq"]
    assert result.networks["deq"].solver.iterations > 1
    assert result.command.startswith("python ") and "--kernel triton" in result.command
    kernel = result.kernel
    if not torch.cuda.is_available():
        assert f"kernel: {kernel.used}, for kernel='triton' is not available: no CUDA device" in done.stdout
        assert kernel.requested == "triton" and "no CUDA device" in kernel.reason
    assert any(line.startswith("data: shapes") for line in lines)
    assert sum(line.startswith(("explicit   ", "deq   ")) for line in lines) == 6
    assert any(line.split() == ["overall", "majority", "minority", "NC1", "NC2", "NC3", "NC4"] for line in lines)
    assert "not comparable with the paper: shapes, not CIFAR" in done.stdout
    assert lines[-2] == f"results: {folder / 'result.json'}" and lines[-1] == f"figure:  {folder / 'figure.png'}"
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr and "%|" not in done.stderr  # no bars outside a terminal


def test_without_data_and_network_the_balanced_script_says_why_it_takes_shapes(tmp_path):
    arguments = [word for word in TINY if word not in ("--dataset", "shapes", "--ratio", "10")]
    done = script("cifar_balanced", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "data: shapes instead of CIFAR-10: not under data, and the download failed" in done.stdout
    assert "300 training images (10 classes of 30)" in done.stdout
    assert "93.23±0.13" in done.stdout and "minority" not in done.stdout
    assert (tmp_path / "runs" / "shapes-balanced-quick-both-broyden-jfb-seed0" / "result.json").exists()
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("steps", [4, 32])
def test_kill_9_and_resume_end_in_the_same_bits(steps, whole, study, tmp_path):
    """111 images are 7 steps an epoch: killed in the explicit network's first epoch and in the DEQ's second."""
    killed = python("-c", KILLED, str(steps), *TINY, "--out", str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / RUN / "result.json").exists()
    status, printed, errors = study("--resume")
    assert status == 0, errors
    assert ("going on after epoch" in printed) == (steps > 8)
    assert_same(outcome(tmp_path / RUN), outcome(whole[0]))


def signal_at_step(monkeypatch, number):
    """Raise a signal in the middle of the second epoch."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    step, left = Trainer.train_step, [12]

    def train_step(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(number)
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", train_step)


@pytest.mark.parametrize("trouble", [signal.SIGINT, signal.SIGTERM, "full disk"])
def test_what_ends_a_run_early_is_told_in_a_line_and_resume_goes_on(trouble, study, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        full_disk(patch, writes=6) if trouble == "full disk" else signal_at_step(patch, trouble)
        status, _, errors = study()
    if trouble == "full disk":
        assert status == 1 and errors.count("\n") == 1
        assert "error: cannot write" in errors and "No space left on device" in errors
    else:
        assert status == 130 and "interrupted" in errors and errors.rstrip().endswith("--resume")
    assert study("--resume")[0] == 0
    assert_same(outcome(tmp_path / RUN), outcome(whole[0]))


def test_a_finished_run_is_printed_again_and_never_overwritten(study, tmp_path):
    first = study("--model", "explicit")
    assert first[0] == 0
    folder = next(tmp_path.iterdir())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix != ".png"}
    status, _, errors = study("--model", "explicit")
    assert status == 1 and "holds a finished run of this kind: --resume" in errors
    status, printed, _ = study("--model", "explicit", "--resume")
    assert status == 0
    assert printed.partition("Test accuracy")[2] == first[1].partition("Test accuracy")[2] != ""
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix != ".png"}
    assert after == before | {".lock": after[".lock"]}


def test_cifar100_from_its_files(study, tmp_path, monkeypatch):
    """Tenths of the classes: 30 and 70 of a hundred, whose labels are the file's fine ones."""
    write_cifar(tmp_path / "data", CIFAR100, 6, monkeypatch)
    arguments = ("--dataset", "cifar100", "--data-root", str(tmp_path / "data"), "--majority", "3", "--ratio", "4")
    arguments += ("--n-majority", "4", "--test-images", "200", "--epochs", "1", "--out", str(tmp_path / "runs"))
    status, printed, errors = study(*arguments)
    assert status == 0, errors
    assert "data: cifar100" in printed and "(30 classes of 4 and 70 of 1)" in printed
    (folder,) = (tmp_path / "runs").iterdir()
    result = read_record(RunResult, folder / "result.json")
    for network in result.networks.values():
        assert len(network.per_class) == 100 and [sum(counts) for counts in network.confusion] == [2] * 100
    assert set(result.networks["deq"].spectral_radius.labels) == set(range(100))


def test_compiling_without_a_compiler_is_an_error_in_a_line(study, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    status, printed, errors = study("--compile")
    assert status == 1 and printed == "" and errors.count("\n") == 1 and "--compile: torch.compile needs" in errors
