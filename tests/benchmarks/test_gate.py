"""The regression gate: its counters, its messages on differences; the contents of a record of the suite."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import counted, gate, record, suite
from harness.counters import count, count_call

ROOT = Path(__file__).resolve().parents[2]
X, MASK, INDEX = torch.eye(3), torch.eye(3) > 0, torch.tensor([0, 2])

WAITING = ("X[0, 0].item()", "INDEX.tolist()", "X.numpy()", "torch.where(MASK)", "X[MASK]", "torch.equal(X, X)")
WAITING += ("torch.linalg.solve(X, X)", "INDEX.bincount()", "torch.repeat_interleave(INDEX, INDEX)", "X.to('meta')")
QUEUED = ("torch.where(MASK, X, 0)", "X[INDEX]", "X.clone().__setitem__(MASK, 0.0)", "torch.linalg.solve_ex(X, X)")
QUEUED += ("torch.repeat_interleave(INDEX, INDEX, output_size=2)", "X.to('meta', non_blocking=True)")


@pytest.mark.parametrize("expression", WAITING + QUEUED)
def test_what_makes_the_host_wait_counts_once_and_what_is_queued_never(expression):
    call = eval(f"lambda: {expression}")
    assert count_call(call, "cpu").host_waits == (expression in WAITING)


def test_views_and_empty_memory_are_no_operations_and_f_is_left_out():
    x = torch.zeros(4, 4)

    def call(f):
        return f(x[0].view(2, 2).T + torch.empty(2, 2, 2).select(0, 0))

    counters = count(call, lambda z: (z * 2, bool(z.any()), z.tolist()), "cpu")
    assert (counters.operations, counters.host_waits) == (1, 0)


@pytest.mark.parametrize(("solver", "problem"), [(s, p) for s in counted.SOLVED for p in counted.SOLVED[s]])
def test_iterations_are_counted_where_rounding_changes_none(solver, problem):
    solution = counted.solve_to_tolerance(solver, problem, trace=True)
    residuals = solution.trace[solution.trace > 0] / counted.SOLVED[solver][problem]
    assert bool(solution.converged.all())
    assert float(residuals.log().abs().min()) > math.log(counted.CLEAR)


@pytest.mark.parametrize(
    ("now", "alike", "worse", "better"),
    [
        ({"a": {"operations": 10, "host_waits": 4}}, True, [], []),
        ({"a": {"operations": 9, "host_waits": 4}}, True, [], ["a: operations 10 -> 9"]),
        ({"a": {"operations": 5, "host_waits": 6}}, True, ["a: operations 10 -> 5; host_waits 4 -> 6"], []),
        ({"a": {"operations": 10}}, True, ["a: host_waits 4 -> None"], []),
        ({"a": {"operations": 11}}, False, ["a: operations 10 -> 11"], []),
        ({"a": {"others": 11}}, False, [], []),
        ({"b": {"operations": 1}}, False, ["a: counted no more", "b: has no baseline"], []),
    ],
)
def test_counters_are_compared(now, alike, worse, better):
    assert gate.differences({"a": {"operations": 10, "host_waits": 4}}, now, alike) == (worse, better)


def test_a_kernel_may_lose_registers_but_no_barrier():
    before = {"a": {"registers sm_90": 64, "barriers sm_90": 3}}
    for counter, value, counts in (("registers", 63, [0, 1]), ("barriers", 2, [1, 0]), ("barriers", 4, [1, 0])):
        now = {"a": before["a"] | {f"{counter} sm_90": value}}
        assert [*map(len, gate.differences(before, now, alike=False))] == counts


def test_a_baseline_is_written_and_judges(tmp_path, monkeypatch):
    def judge(operations, name="counters", update=False, **given):
        gate.judge(name, {"a": {"operations": operations}, "b": {"host_waits": 0}}, update, folder=tmp_path, **given)

    judge(3, update=True)
    judge(3)
    with pytest.warns(UserWarning, match="counters: fallen, which .* keeps\n  a: operations 3 -> 2$"):
        judge(2)
    worse = r"counters: worse than at \w+ of 20[\d-]+\n  a: operations 3 -> 4\naccept it with .*--update-baseline"
    with pytest.raises(pytest.fail.Exception, match=worse):
        judge(4)
    with pytest.raises(pytest.skip.Exception, match="no baseline for cuda-2.0"):
        judge(3, "cuda-2.0", alike=False)
    with pytest.raises(pytest.skip.Exception, match="counters was counted for other architectures"):
        gate.judge("counters", {"a": {"others": 1}}, False, alike=False, folder=tmp_path)
    monkeypatch.setattr(gate, "stale_extensions", lambda: ["_C_cpu was built before: install again"])
    with pytest.raises(pytest.fail.Exception, match="_C_cpu was built before"):
        judge(4, update=True)


PLANTED = """
from deqfast.solvers.picard import Picard
advance = Picard.advance
def planted(self, state, *step):
    advance(self, state, *step)
    state.active.item()
Picard.advance = planted
"""


def test_a_wait_planted_in_the_library_fails_against_the_committed_baseline(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "benchmarks/test_counters.py::test_counters", "-p", "planted", "--gate"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    # No other solver, in which nothing is planted, is named.
    assert re.search(r"worse than at .*\n  picard 12 iterations: .*host_waits 12 -> 24\naccept", result.stdout)


PLUGIN = """
import pytest
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    {}
"""


def test_what_a_recording_writes_is_no_change_of_the_commit_and_sources_and_extensions_are(tmp_path, monkeypatch):
    names = ["README.md", "benchmarks/RESULTS.md", "benchmarks/results/a.json", "benchmarks/baselines/b.json", "a.py"]
    *written, source = [tmp_path / name for name in names]
    for path in (*written, source):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    commit = record.commit()
    assert len(commit) == 40
    for path in written:
        path.write_text("after")
    assert record.commit() == commit
    source.write_text("after")
    assert record.commit() == commit + "+changes"
    source.write_text("before")
    monkeypatch.setattr(record, "stale_extensions", lambda: ["_C_cpu was built before"])
    with pytest.warns(UserWarning, match="_C_cpu was built before"):
        assert record.commit() == commit + "+changes"
        monkeypatch.setenv("DEQFAST_COMMIT", "copied")
        assert record.commit() == "copied+changes"


def recorded(folder, target, *options):
    """Run the suite's smallest case, with the plugins in `folder`."""
    # A worker of xdist sets this for its children; pytest-benchmark would then write no file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    selected = ["benchmarks/test_suite.py", "-k", "fc_vjp and not cuda"]
    command = [sys.executable, "-m", "pytest", *selected, "--small", "--record", str(target), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_record_in_no_folder_is_refused(tmp_path):
    result = recorded(tmp_path, "/no/such/folder/a.json")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR and "/no/such/folder is not a folder" in result.stderr


def test_a_run_ends_with_a_table_and_a_record_that_an_interrupted_run_does_not_replace(tmp_path):
    for name, body in (("interruption", "raise KeyboardInterrupt"), ("failure", 'pytest.fail("planted")')):
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(body))
    target, timings = tmp_path / "suite.json", tmp_path / "benchmark.json"
    result = recorded(tmp_path, target, "-p", "failure", "--remark", "quiet", "--benchmark-json", str(timings))
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    data = record.read_record(target)
    assert data["remark"].startswith("quiet; partial: ") and "--record" in data["command"]
    assert data["remark"].endswith(" rows are absent, 2 tests failed")
    rows = {row["provider"]: row for row in data["rows"]}
    assert set(rows) == {"torch", "cpp"}
    assert rows["cpp"]["gains"]["torch"] == pytest.approx(rows["torch"]["ms_min"] / rows["cpp"]["ms_min"], rel=1e-4)
    end = result.stdout[result.stdout.index("Least of the rounds") :]
    assert "fc_vjp-3x16" in end and f"record: {target}" in end
    kept = {entry["param"]: entry for entry in record.read_record(timings)["benchmarks"]}["fc_vjp-3x16-cpp"]
    assert kept["extra_info"]["ms_min"] == pytest.approx(rows["cpp"]["ms_min"], rel=1e-5)  # six digits are written
    assert kept["stats"]["rounds"] == suite.BENCHMARK_ROUNDS and kept["stats"]["min"] > 0

    target.write_text("whole")
    result = recorded(tmp_path, target, "-p", "interruption")
    assert result.returncode == pytest.ExitCode.INTERRUPTED, result.stdout
    assert f"record: not written, the run was interrupted: {target}; the rows so far: {target}.part" in result.stdout
    assert target.read_text() == "whole"
    part = record.read_record(tmp_path / "suite.json.part")
    assert part["rows"] and part["remark"] == "the run did not come to its end"


def test_a_recorded_command_names_what_limits_the_threads(monkeypatch):
    monkeypatch.setattr(record.os, "cpu_count", lambda: 4)
    for cores, threads, limits in (({0, 1, 2, 3}, None, ""), ({2, 3}, "1", "OMP_NUM_THREADS=1 taskset -c 2,3 ")):
        monkeypatch.setattr(record.os, "sched_getaffinity", lambda _, cores=cores: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert record.command(["/bin/python3", "-m", "pytest"]) == f"{limits}python -m pytest"
