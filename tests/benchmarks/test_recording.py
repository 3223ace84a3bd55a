"""Contents of a record: commit, processor, command, and whether the run was completed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import record, suite

ROOT = Path(__file__).resolve().parents[2]
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
        monkeypatch.setenv("DEQFAST_COMMIT", "told")
        assert record.commit() == "told+changes"


def recorded(folder, target, *options):
    """Run the suite's smallest case, with the plugins in `folder`."""
    # A worker of xdist sets this for its children; pytest-benchmark would then write no file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    selected = ["benchmarks/test_suite.py", "-k", "fc_vjp and not cuda"]
    command = [sys.executable, "-m", "pytest", *selected, "--record", str(target), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_record_in_no_folder_is_refused(tmp_path):
    result = recorded(tmp_path, "/no/such/folder/a.json")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR and "/no/such/folder is not a folder" in result.stderr


def test_a_run_ends_with_a_table_and_a_record_that_an_interrupted_one_leaves_alone(tmp_path):
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
    assert "fc_vjp-128x1024" in end and f"record: {target}" in end
    kept = {entry["param"]: entry for entry in record.read_record(timings)["benchmarks"]}["fc_vjp-128x1024-cpp"]
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
