"""benchmarks/gpu.sh without a GPU: the dry run, its arguments, and its report of phases that fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def a_record(row: dict[str, str]) -> str:
    return json.dumps({"machine": {}, "command": "made up", "date": "2026-11-22", "remark": None, "rows": [row]})


def run(*arguments, **environment):
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *map(str, arguments)]
    unset = {"DEQFAST_WHEELS": "", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    unset |= {name: "" for name in os.environ if name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | unset | environment, check=False)


@pytest.mark.tier("full")
def test_dry_run_measures_and_goes_on_where_it_was_stopped(tmp_path):
    kept = tmp_path / "cpu_nc.json"
    row = {"section": "nc", "case": "kept", "provider": "cpp", "fault": "made up"}
    kept.write_text(a_record(row))
    result = run("--dry-run", "--out", tmp_path, "measure", "tests")
    assert result.returncode == 0, result.stdout + result.stderr
    *_, ops, collapse, tests = result.stdout.splitlines()
    assert ops.startswith("measure-ops\tok\t") and tests.startswith("tests\tok\t")
    assert collapse == f"measure-nc\tkept\t{kept}"
    measured = json.loads((tmp_path / "cpu_ops.json").read_text())
    assert "ops" in {row["section"] for row in measured["rows"]} and measured["command"]
    assert "ops picard-step-2x64 cpp" in result.stdout and "nc kept cpp  made up" in result.stdout
    assert (tmp_path / "table.txt").read_text() in result.stdout
    assert "== measure-ops" in (tmp_path / "gpu.log").read_text()


@pytest.mark.tier("full")
def test_a_phase_that_fails_is_named_does_not_stop_the_others_and_is_tried_again(tmp_path):
    python = tmp_path / "python"
    record, row = tmp_path / "cpu_ops.json", {"section": "ops", "case": "made-up", "provider": "cpp"}
    written = f"echo '{a_record(row)}' >{record}"
    failing = f'case "$*" in *"-m ops"*) {written}; exit 3 ;; *"-m pytest"*) exit 3 ;; esac'
    python.write_text(f'#!/bin/sh\n{failing}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = run("--dry-run", "--out", tmp_path, PYTHON=str(python))
    assert result.returncode == 1, result.stdout + result.stderr
    failed = [line.split("\t")[:2] for line in result.stdout.splitlines()[-3:]]
    assert failed == [[name, "FAILED, status 3"] for name in ("smoke", "measure-ops", "measure-nc")]
    assert "ops made-up cpp" in result.stdout and (tmp_path / "cpu_ops.json.part").exists() and not record.exists()
    again = run("--dry-run", "--out", tmp_path, "measure", PYTHON=str(python))
    assert "measure-ops\tFAILED" in again.stdout, again.stdout + again.stderr  # measured again, not kept
    log = (tmp_path / "gpu.log").read_text()
    assert log.count("== smoke") == 1 and log.count("== measure-ops") == 2


@pytest.mark.tier("full")
def test_the_sanitizers_watch_the_first_look(tmp_path):
    result = run("--dry-run", "--out", tmp_path, "memcheck", "sanitizers")
    assert result.returncode == 0, result.stdout + result.stderr
    stages = [line.split("\t") for line in result.stdout.splitlines()[-4:]]
    assert [stage[:2] for stage in stages] == [
        [tool, "ok"] for tool in ("memcheck", "racecheck", "initcheck", "synccheck")
    ]
    assert all(stage[-1].startswith("torch: ") and " right, " in stage[-1] for stage in stages)


def test_the_first_look_names_what_is_wrong(monkeypatch, capsys):
    import first_look

    def looks(kernel):
        def fail(op_of):
            raise AssertionError("error 1, allowed 0")

        return [("right 1x1", lambda op_of: None), ("off 1x1", fail)]

    monkeypatch.setattr(first_look, "FAMILIES", (looks,))
    assert first_look.look("torch", "", False) == ["torch off 1x1"]
    out = capsys.readouterr().out
    assert "ok    torch right" in out and "WRONG torch off" in out and "allowed 0" in out and "1 of 2 right" in out


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--fast"], {}, "unknown argument '--fast'"),
        (["--out"], {}, "--out needs a folder"),
        (["lunch"], {}, "'lunch' is not a phase: build smoke measure memcheck tests sanitizers"),
        ([], {"PYTHON": "no-such-python"}, "'no-such-python' is not a command"),
        ([], {"DEQFAST_WHEELS": "/no/such/folder"}, "DEQFAST_WHEELS: '/no/such/folder' is not a folder"),
    ],
)
def test_wrong_arguments(arguments, environment, message):
    result = run(*arguments, **environment)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.tier("full")
def test_the_first_look_finds_every_emulated_kernel_right():
    look = [sys.executable, "benchmarks/first_look.py", "--kernel", "emulated", "--few"]
    path = os.pathsep.join(map(str, (BENCHMARKS.parent, BENCHMARKS.parent / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(look, cwd=BENCHMARKS.parent, env=environment, capture_output=True, text=True, check=False)
    verdict = re.search(r"emulated: (\d+) of (\d+) right", found.stdout)
    assert found.returncode == 0 and verdict and verdict[1] == verdict[2] and int(verdict[1]) > 50, found.stdout
