"""Options of the benchmarks, the board that measures, and what a run ends with: tables, targets, a record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.cases import CASES, pairs
from harness.gate_plugin import Gate, add_options
from harness.record import joined, machine, write_record
from harness.suite import Board
from harness.tables import table
from harness.targets import verdicts

BOARD = pytest.StashKey[Board]()


def pytest_addoption(parser):
    group = parser.getgroup("deqfast", "Benchmarks: less than eight minutes on two quiet CPU cores")
    group.addoption(
        "--record", type=Path, metavar="FILE", help="JSON of all rows; replaces a file, unless the run is interrupted"
    )
    group.addoption("--remark", help="what else is to be known of the machine, kept in the record")
    group.addoption("--full", action="store_true", help="half an hour: ResNet-18's last block, D=8192's pinv too")
    group.addoption("--device", choices=("cpu", "cuda"), help="where to measure (cuda where there is one)")
    add_options(parser)


def pytest_configure(config):
    config.addinivalue_line("markers", "suite: a timing of `pytest benchmarks`")
    config.addinivalue_line("markers", "full: a large case, run with --full alone")
    path, device = config.getoption("--record"), config.getoption("--device")
    if path is not None and not path.resolve().parent.is_dir():
        raise pytest.UsageError(f"--record: {path.resolve().parent} is not a folder")
    if path is not None and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record runs in one process, which has all the rows: no -n")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    config.stash[BOARD] = Board(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config.pluginmanager.register(Gate(config), "deqfast-gate")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        large = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]


@pytest.fixture(scope="session")
def gate(request):
    """Judges by the committed baselines."""
    return request.config.pluginmanager.get_plugin("deqfast-gate")


@pytest.fixture
def measured(request, benchmark):
    """(case, provider) -> None: a timing of the suite; providers of a case that are selected are timed together."""
    board = request.config.stash[BOARD]

    def run(case, provider):
        selected = [item.callspec.params for item in request.session.items if item.get_closest_marker("suite")]
        together = [params["provider"] for params in selected if params["case"] is case]
        board.run(benchmark, case, provider, together)

    return run


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["deqfast"] = machine(config.stash[BOARD].device)


def pytest_sessionfinish(session, exitstatus):
    config, board = session.config, session.config.stash[BOARD]
    path = config.getoption("--record")
    if path is not None and board.rows and ended(exitstatus):
        remark = joined(config.getoption("--remark"), partial(session, board.rows))
        write_record(path, board.rows, board.device, remark)


def ended(exitstatus):
    """Whether a run came to its end, be it with failures."""
    return exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def partial(session, rows):
    """What a record of `rows` lacks, as a remark; None where it is whole."""
    full, keyword = session.config.getoption("--full"), session.config.getoption("keyword")
    every = {(case.section, case.name, provider) for case, provider in pairs(CASES) if full or not case.full}
    absent = every - {(row["section"], row["case"], row["provider"]) for row in rows}
    if not absent and not session.testsfailed:
        return None
    selected = f", selected by -k {keyword!r}" if keyword else ""
    return f"partial: {len(absent)} of {len(every)} rows are absent, {session.testsfailed} tests failed{selected}"


@pytest.hookimpl(trylast=True)  # after the tables of pytest-benchmark
def pytest_terminal_summary(terminalreporter, exitstatus, config):
    rows = config.stash[BOARD].rows
    if not rows:
        return
    write = terminalreporter.write_line
    write("")
    write("Least of the rounds, which the providers of a case take in turns with a copy that gives the floor.")
    for section in dict.fromkeys(row["section"] for row in rows):
        write(f"\n{section}")
        for line in table([row for row in rows if row["section"] == section]):
            write(line)
    told = [verdict for verdict in verdicts(rows) if verdict[2] is not None]
    if told:
        write("\ntargets, which are those of a quiet machine with two cores")
    for target, value, met in told:
        write(f"{'met   ' if met else 'MISSED'} {target.what}: {value:.3g}")
    if config.getoption("--record"):
        written = "" if ended(exitstatus) else "not written, the run was interrupted: "
        write(f"\nrecord: {written}{config.getoption('--record')}")
