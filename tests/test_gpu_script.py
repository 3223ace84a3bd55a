"""benchmarks/gpu.sh where there is no GPU: the dry run, its arguments, and what it says of stages that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_table import merged, slug, stages_of, table

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SECTIONS = {"ops", "solves", "fc", "cells", "training", "nc", "options"}


def run(*arguments, **environment):
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *map(str, arguments)]
    unset = {"OUT": "", "DEQFAST_WHEELS": "", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    unset |= {name: "" for name in os.environ if name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | unset | environment, check=False)


def stages(path):
    return {stage["stage"]: stage["outcome"] for stage in json.loads(path.read_text())["stages"]}


def test_dry_run(tmp_path):
    results = BENCHMARKS / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    result = run("--dry-run", "--json", tmp_path / "dry.json", OUT=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "dry.json").read_text())
    assert {row["section"] for row in data["rows"]} >= SECTIONS
    assert not [row for row in data["rows"] if "problem" in row]
    assert all("ms" in row or "skipped" in row for row in data["rows"] if row["section"] in SECTIONS)
    names = list(stages(tmp_path / "dry.json"))
    assert [name for name in names if not name.startswith("measure")] == ["environment", "smoke", "memcheck", "tests"]
    assert names.index("smoke") < names.index("measure-all") < names.index("memcheck")
    assert result.stdout.splitlines()[-1] == "stages that failed: none; rows with a problem: 0"
    assert (tmp_path / "table.txt").read_text() in result.stdout
    assert "== measure-all" in (tmp_path / "gpu.log").read_text()
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


def test_stages_that_fail_are_named_and_do_not_stop_the_others(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *"-m pytest"*) exit 3 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = run("--dry-run", "--from", "memcheck", "--json", tmp_path / "dry.json", PYTHON=str(python))
    assert result.returncode == 1, result.stdout + result.stderr
    assert stages(tmp_path / "dry.json") == {"memcheck": "ok", "tests": "FAILED, status 3"}
    assert "nothing was measured" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("stages that failed: tests;")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--fast"], {}, "unknown argument '--fast'"),
        (["--json"], {}, "--json needs a file"),
        (["--json", "/no/such/folder/a.json"], {}, "'/no/such/folder' is not a folder"),
        (["--from"], {}, "--from needs a phase"),
        (["--from", "lunch"], {}, "'lunch' is no phase, only: build smoke measure memcheck tests sanitizers"),
        ([], {"PYTHON": "no-such-python"}, "'no-such-python' is no command"),
        ([], {"DEQFAST_WHEELS": "/no/such/folder"}, "DEQFAST_WHEELS: '/no/such/folder' is not a folder"),
    ],
)
def test_wrong_arguments(arguments, environment, message):
    result = run(*arguments, **environment)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA", "nvidia"),
    ],
)
def test_the_gpu_names_the_results(gpu, name):
    assert slug(gpu) == name


def test_the_table_has_the_stages_and_the_rows_of_parts_that_did_not_end(tmp_path):
    (tmp_path / "stages").write_text("build\tFAILED, status 1\t12\tno nvcc\n")
    row = {"section": "ops", "case": "picard-step", "provider": "cuda"}
    (tmp_path / "ops.json").write_text(
        json.dumps({"machine": {"gpu": "H"}, "rows": [row | {"ms": 1.0, "ms_min": 0.5}]})
    )
    (tmp_path / "fc.json.part").write_text(json.dumps({"machine": {"gpu": "H"}, "rows": [row | {"problem": "wrong"}]}))
    data = merged(tmp_path) | {"stages": stages_of(tmp_path / "stages")}
    lines = table(data, judged=True)
    assert lines[:2] == ["gpu: H", "build FAILED, status 1 12 s no nvcc"]
    assert "0.5000" in "\n".join(lines) and "PROBLEM wrong" in "\n".join(lines)
    assert lines[-1] == "stages that failed: build; rows with a problem: 1"
