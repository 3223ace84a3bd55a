"""benchmarks/gpu.sh where there is no GPU: the dry run, its arguments, and what it says of stages that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
from gpu_report import slug, stages_of, table  # noqa: E402  (found through the path above)

SECTIONS = {"rates", "step", "solve", "fc", "cell", "training", "parts", "NC"}


def run(*arguments, **environment):
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *map(str, arguments)]
    unset = {"OUT": "", "DEQFAST_WHEELS": "", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | unset | environment, check=False)


def test_dry_run(tmp_path):
    results = BENCHMARKS / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    result = run("--dry-run", "--json", tmp_path / "dry.json", OUT=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "dry.json").read_text())
    assert {row["section"] for row in data["rows"]} == SECTIONS
    assert not [row for row in data["rows"] if "problem" in row]
    assert all("ms" in row or "skipped" in row for row in data["rows"])
    assert {stage["stage"] for stage in data["stages"]} >= {"environment", "build", "tests", "sanitize.py", "measure"}
    assert "rows with a problem: 0" in result.stdout.splitlines()[-1]
    assert (tmp_path / "table.txt").read_text() in result.stdout
    assert "== measure" in (tmp_path / "gpu.log").read_text()
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


def test_stages_that_fail_are_named_and_do_not_stop_the_others(tmp_path):
    python = tmp_path / "python"
    refused = "*'-m pytest'*|*/gpu.py*|*/sanitize.py*"
    python.write_text(f'#!/bin/sh\ncase "$*" in {refused}) exit 3 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = run("--dry-run", "--json", tmp_path / "dry.json", PYTHON=str(python))
    assert result.returncode == 1, result.stdout + result.stderr
    outcomes = {stage["stage"]: stage["outcome"] for stage in json.loads((tmp_path / "dry.json").read_text())["stages"]}
    assert outcomes["environment"] == outcomes["build"] == "ok"
    assert "stages that failed: tests, sanitize.py, measure" in result.stdout
    assert outcomes["tests"] == outcomes["sanitize.py"] == outcomes["measure"] == "FAILED, status 3"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--fast"], {}, "unknown argument '--fast'"),
        (["--json"], {}, "--json needs a file"),
        (["--json", "/no/such/folder/a.json"], {}, "'/no/such/folder' is not a folder"),
        ([], {"PYTHON": "no-such-python"}, "'no-such-python' is no command"),
        ([], {"DEQFAST_WHEELS": "/no/such/folder"}, "DEQFAST_WHEELS: '/no/such/folder' is not a folder"),
        ([], {"OUT": "/no/such/folder"}, "OUT: '/no/such/folder' is not a folder"),
    ],
)
def test_wrong_arguments(arguments, environment, message):
    result = run(*arguments, **environment)
    assert result.returncode == 2
    assert message in result.stderr


def test_help():
    result = run("--help")
    assert result.returncode == 0
    for word in ("--dry-run", "--json", "DEQFAST_WHEELS", "OUT"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA", "nvidia"),
    ],
)
def test_the_gpu_names_the_results(gpu, name):
    assert slug(gpu) == name


def test_table_without_measures(tmp_path):
    stages = tmp_path / "stages"
    stages.write_text("build\tFAILED, status 1\t12\tno nvcc\n")
    lines = table(stages_of(stages), {})
    assert lines[0].split() == ["build", "FAILED,", "status", "1", "12", "s", "no", "nvcc"]
    assert lines[-2] == "stages that failed: build"
    assert lines[-1].endswith("rows with a problem: 0")


def test_table_of_a_problem_and_of_targets():
    row = {"section": "step", "case": "picard", "provider": "cuda", "ms": 0.0123, "floor_ms": 0.01, "ratio": 1.23}
    rows = [
        row | {"targets": [{"target": "<=20 us", "met": True}, {"target": ">=85% of copy", "met": False}]},
        {"section": "step", "case": "picard", "provider": "triton", "problem": "AssertionError: wrong"},
    ]
    text = "\n".join(table([], {"rows": rows}))
    assert "12.3" in text and "<=20 us: met; >=85% of copy: MISSED" in text
    assert "PROBLEM AssertionError: wrong" in text
    assert "1 met, 1 missed, 0 not told; rows with a problem: 1" in text
