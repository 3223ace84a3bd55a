"""Options of the benchmarks, the board that measures, and the end of a run: tables, targets, a record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from harness.cases import CASES, SMALL
from harness.record import write_record
from harness.suite import LARGE_SECONDS, Board
from harness.tables import summary

BOARD = pytest.StashKey[Board]()
ENDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # the run was completed, with or without failures


def pytest_addoption(parser):
    group = parser.getgroup("deqfast", "Benchmarks: about ten minutes on two quiet CPU cores")
    group.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="JSON of all rows; replaces a file; if the run is interrupted, the rows so far are in FILE.part",
    )
    group.addoption("--remark", help="further facts about the machine, kept in the record")
    group.addoption(
        "--full",
        action="store_true",
        help="hours: also time to a residual, the study's training step, and the largest pinv",
    )
    group.addoption(
        "--small", action="store_true", help="a tiny case of every kind: tests that it works; its times mean nothing"
    )
    group.addoption("--device", choices=("cpu", "cuda"), help="where to measure (default: cuda if available)")
    study = parser.getgroup("study", "Cell of the study (test_time_to_residual.py)")
    study.addoption("--run", type=Path, help="folder of a finished run of experiments/cifar_lt.py with a DEQ")
    study.addoption("--data-root", type=Path, help="folder of the CIFAR files that the run saw")
    models = parser.getgroup("models", "Published models (test_models.py): six minutes with -m models")
    models.addoption(
        "--models-root",
        type=Path,
        metavar="FOLDER",
        default=os.environ.get("DEQFAST_MODELS"),
        help="folder of the clones of the models (default: the variable DEQFAST_MODELS)",
    )
    gate = parser.getgroup("gate", "Counters compared with committed baselines (test_counters.py): two minutes")
    gate.addoption("--gate", action="store_true", help="judge counters instead of measuring the suite")
    gate.addoption("--update-baseline", action="store_true", help="write what --gate counts to benchmarks/baselines")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: measured only with --full")
    config.addinivalue_line("markers", "gate: judged by --gate, which selects no other test")
    config.addinivalue_line("markers", "models: published models, from clones of their repositories")
    for section in dict.fromkeys(case.section for case in CASES):
        config.addinivalue_line("markers", f"{section}: a section of the suite")
    path, device = config.getoption("--record"), config.getoption("--device")
    if path is not None and not path.resolve().parent.is_dir():
        raise pytest.UsageError(f"--record: {path.resolve().parent} is not a folder")
    if path is not None and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record runs in one process, which has all rows: omit -n")
    if config.getoption("--update-baseline") and not config.getoption("--gate"):
        raise pytest.UsageError("--update-baseline: only with --gate")
    if config.getoption("--data-root") and not config.getoption("--run"):
        raise pytest.UsageError("--data-root: only with --run, whose images are there")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    journal = path and path.with_name(path.name + ".part")
    config.stash[BOARD] = Board(device, journal, config.getoption("--small"))


def wanted(config):
    """Every (case, provider) of this run, before any selection by name."""
    device, full = config.stash[BOARD].device, config.getoption("--full")
    cases = SMALL if config.getoption("--small") else CASES
    cases = [case for case in cases if device in case.devices and (full or not case.full)]
    return [(case, provider) for case in cases for provider in case.providers_on(device)]


def pytest_generate_tests(metafunc):
    """Parametrise the suite by (case, provider), each marked by its section."""
    if "case" in metafunc.fixturenames and "provider" in metafunc.fixturenames:
        params = []
        for case, provider in wanted(metafunc.config):
            marks = [getattr(pytest.mark, case.section), *[pytest.mark.timeout(LARGE_SECONDS)] * case.full]
            params.append(pytest.param(case, provider, id=f"{case.name}-{provider}", marks=marks))
        metafunc.parametrize(("case", "provider"), params)


def pytest_collection_modifyitems(config, items):
    gate, full = config.getoption("--gate"), config.getoption("--full") and not config.getoption("--small")

    def asked(item):
        return bool(item.get_closest_marker("gate")) == gate and (full or not item.get_closest_marker("full"))

    config.hook.pytest_deselected(items=[item for item in items if not asked(item)])
    items[:] = filter(asked, items)


@pytest.fixture(scope="session")
def board(request):
    """Board that keeps the rows of this run."""
    return request.config.stash[BOARD]


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    board, path = config.stash[BOARD], config.getoption("--record")
    if path is None or not board.rows or exitstatus not in ENDED:
        return
    remarks = [config.getoption("--remark")]
    every = {(case.section, case.name, provider) for case, provider in wanted(config)}
    absent = every - {(row["section"], row["case"], row["provider"]) for row in board.rows}
    if (absent and absent != every) or session.testsfailed:  # without any, another test made the rows
        remarks.append(f"partial: {len(absent)} of {len(every)} rows are absent, {session.testsfailed} tests failed")
    write_record(board.journal, board.rows, board.device, "; ".join(filter(None, remarks)) or None)
    os.replace(board.journal, path)


@pytest.hookimpl(trylast=True)  # after the tables of pytest-benchmark
def pytest_terminal_summary(terminalreporter, exitstatus, config):
    board, path = config.stash[BOARD], config.getoption("--record")
    if not board.rows:
        return
    for line in ["", *summary(board.rows, judged=not board.small)]:
        terminalreporter.write_line(line)
    if path:
        interrupted = f"not written, the run was interrupted: {path}; the rows so far: {board.journal}"
        terminalreporter.write_line(f"\nrecord: {path if exitstatus in ENDED else interrupted}")
