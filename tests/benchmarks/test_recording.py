"""What a record says of its run: commit, processor, command, and whether it is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import record

ROOT = Path(__file__).resolve().parents[2]
ONE_OP = ["-k", "test_op and picard-step-128x256-torch"]
INTERRUPTION = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    raise KeyboardInterrupt
"""
FAILURE = """
import pytest

def pytest_runtest_teardown():
    pytest.fail("planted")
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with what a recording writes, and a source."""
    names = ["README.md", "benchmarks/RESULTS.md", "benchmarks/results/a.json", "benchmarks/baselines/b.json", "a.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    return {name: tmp_path / name for name in names}


def test_what_a_recording_writes_is_no_change_of_the_commit(checkout):
    commit = record.commit()
    assert len(commit) == 40
    source = checkout.pop("a.py")
    for path in checkout.values():
        path.write_text("after")
    assert record.commit() == commit
    source.write_text("after")
    assert record.commit() == commit + "+changes"


def test_an_extension_of_other_sources_is_a_change_and_told(checkout, monkeypatch):
    commit = record.commit()
    monkeypatch.setattr(record, "stale_extensions", lambda: ["_C_cpu was built before"])
    with pytest.warns(UserWarning, match="_C_cpu was built before"):
        assert record.commit() == commit + "+changes"


def test_processors_of_one_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(record, "CACHES", tmp_path)
    assert record.processor_details() == "" and record.processor()
    (tmp_path / "cpuinfo").write_text(
        "cpu family\t: 25\nmodel\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n\nmodel\t: 99\n"
    )
    for level, size in (("1", "32K"), ("3", "32768K"), ("2", "1024K")):
        folder = tmp_path / f"index{level}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert record.processor() == "AMD EPYC"
    assert record.processor_details() == "family 25, model 17, stepping 1, L2 1024K, L3 32768K"


def recorded(folder, target, *options):
    """A run of the suite's smallest case, with the plugins in `folder`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "benchmarks/test_ops.py", *ONE_OP, "--record", str(target), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_record_of_a_part_says_so_and_an_interrupted_run_leaves_it(tmp_path):
    (tmp_path / "interruption.py").write_text(INTERRUPTION)
    (tmp_path / "failure.py").write_text(FAILURE)
    target = tmp_path / "suite.json"
    result = recorded(tmp_path, target, "-p", "failure", "--remark", "quiet")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    data = record.read_record(target)
    assert [row["case"] for row in data["rows"]] == ["picard-step-128x256"]
    assert data["remark"].startswith("quiet; partial: ")
    assert data["remark"].endswith(f" rows are absent, 1 tests failed, selected by -k {ONE_OP[1]!r}")

    target.write_text("whole")
    result = recorded(tmp_path, target, "-p", "interruption")
    assert result.returncode == pytest.ExitCode.INTERRUPTED, result.stdout
    assert f"record: not written, the run was interrupted: {target}; what there is: {target}.part" in result.stdout
    assert target.read_text() == "whole"
    part = record.read_record(tmp_path / "suite.json.part")
    assert len(part["rows"]) == 1 and part["remark"] == "the run did not come to its end"
