"""Fixtures of the studies: tiny runs inside this process, and made-up results."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import FORKSERVER
from models.frame import Run
from nc_study.cli import main
from nc_study.record import FORMAT, Begun
from nc_study.rundir import RunDirectory
from runs.files import to_json
from runs.processes import Spawned
from separation_study.frame import Job
from study_helpers import TINY, made_up_epoch, made_up_result, made_up_settings


@pytest.fixture(scope="module", autouse=True)
def process_settings() -> Iterator[None]:
    """Restore settings that runs change for the whole process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    precision, repeatable = cudnn.conv.fp32_precision, cudnn.deterministic
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    cudnn.conv.fp32_precision, cudnn.deterministic = precision, repeatable
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a tiny cifar_lt with --out tmp_path: return exit status, output, and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main("cifar_lt", None, [*TINY, "--out", str(tmp_path), *arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder of a finished run with made-up numbers, without training; its path. `shift`: see
    `study_helpers.made_up_epoch`."""

    def write(name: str = "", shift: float = 1.0, **given: Any) -> Path:
        settings = made_up_settings(**given)
        run = RunDirectory(tmp_path / "runs" / (name or settings.run_name))
        run.path.mkdir(parents=True)
        for number in range(1, settings.epochs + 1):
            run.append(made_up_epoch(number, settings, shift))
        (run.path / "settings.json").write_bytes(to_json(Begun(FORMAT, settings.experiment)))
        run.conclude(made_up_result(settings, shift))
        return run.path

    return write


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Train an example model up to its last step, with a checkpoint of every step before."""
    steps = Run.steps

    def cut(run: Run, total: int, **kept: Any) -> Iterator[int]:
        for step in steps(run, total, **kept):
            if step == total - 1:
                raise KeyboardInterrupt
            yield step

    def cut_off(train: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("models.frame.FIRST_CHECKPOINT", 0.0)
            patch.setattr("models.frame.SECONDS_BETWEEN_CHECKPOINTS", 0.0)
            patch.setattr(Run, "steps", cut)
            train()

    return cut_off


class Done:
    """A process that is over."""

    pid = os.getpid()

    def poll(self) -> int:
        return 0

    terminate = kill = poll


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are measured here, not in fresh processes, which would not see what a test has replaced."""

    def start(job: Job) -> Done:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        job.measure()
        return Done()

    monkeypatch.setattr(Job, "start", start)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forks of a process that has imported torch, which takes seconds. Other tests have fresh ones."""
    monkeypatch.setattr(Spawned, "_Popen", staticmethod(FORKSERVER.Process._Popen))
