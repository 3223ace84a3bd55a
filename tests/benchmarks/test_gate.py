"""The regression gate: what it counts, what it says of a difference, and that a planted wait does not pass."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import counted, gate
from harness.counters import count
from harness.gate import MISSING, NOT_JUDGED, WORSE, Baseline

ROOT = Path(__file__).resolve().parents[2]
X, MASK, INDEX = torch.eye(3), torch.eye(3) > 0, torch.tensor([0, 2])

WAITS = {
    "X[0, 0].item()": True,
    "INDEX.tolist()": True,
    "X.numpy()": True,
    "torch.where(MASK)": True,
    "torch.where(MASK, X, 0)": False,
    "X[MASK]": True,
    "X[INDEX]": False,
    "X.clone().__setitem__(MASK, 0.0)": False,
    "torch.equal(X, X)": True,
    "torch.linalg.solve(X, X)": True,
    "torch.linalg.solve_ex(X, X)": False,
    "INDEX.bincount()": True,
    "torch.repeat_interleave(INDEX, INDEX)": True,
    "torch.repeat_interleave(INDEX, INDEX, output_size=2)": False,
    "X.to('meta')": True,
    "X.to('meta', non_blocking=True)": False,
}


@pytest.mark.parametrize("expression", WAITS)
def test_what_makes_the_host_wait_counts_once_and_what_is_queued_never(expression):
    call = eval(f"lambda: {expression}")
    assert count(lambda f: call(), lambda: None, "cpu").host_waits == WAITS[expression]


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
    ("now", "alike", "verdict", "text"),
    [
        ({"operations": 5, "host_waits": 6}, True, WORSE, "host_waits 4 -> 6 (+50%); operations 10 -> 5 (-50%) since"),
        ({"operations": 10}, True, MISSING, "host_waits: in the baseline or now, not both; accept it with"),
        ({"operations": 11}, False, WORSE, "operations 10 -> 11 (+10%)"),
        ({"others": 11}, False, NOT_JUDGED, "nothing that the baseline"),
    ],
)
def test_counters_are_judged_one_by_one(now, alike, verdict, text):
    baseline = Baseline("counters", {"a": {"operations": 10, "host_waits": 4}}, "abcdef12 of 2026-01-02")
    (finding,) = baseline.judge({"a": now}, alike)
    assert finding.verdict == verdict and finding.text.startswith(text)


COUNTS = {"a": {"operations": 3}, "b": {"operations": 5, "host_waits": 0}}
KERNELS = {"x": {"registers sm_90": 9}, "y": {"registers sm_90": 9}}


def of_gate(folder, on="counters", update=False):
    """The plugin as `--gate` makes it, with baselines in `folder`."""
    options = {"gate": on, "update_baseline": update}
    config = SimpleNamespace(getoption=lambda name, *default: options.get(name), addinivalue_line=lambda *line: None)
    return gate.Gate(config, folder)


def judge(plugin, counts=COUNTS, kernels=KERNELS, nvcc="1.0"):
    """What the tests of a session ask: counters, kernels. How many of them fail, and what is told."""
    failed, lines = [], []
    for given in (("counters", counts), (f"cuda-{nvcc}", kernels, f"nvcc {nvcc}")):
        try:
            plugin.judge(*given)
        except pytest.fail.Exception as error:
            failed.append(str(error))
    plugin.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    return failed, "\n".join(lines)


@pytest.fixture
def baselines(tmp_path):
    failed, text = judge(of_gate(tmp_path, update=True))
    assert not failed and text.count("written: ") == 2
    assert judge(of_gate(tmp_path)) == ([], "gate\nsame: 4")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "failures", "said"),
    [
        (
            {
                "counts": {"a": {"operations": 2}, "b": {"operations": 6, "host_waits": 0}, "c": {"operations": 1}},
                "kernels": {"x": {"registers sm_90": 10}},
            },
            2,
            r"worse: 2\n  counters: b: operations 5 -> 6 \(\+20%\) since \w+ of 20\d\d-\d\d-\d\d"
            r"\n  cuda-1.0: x: registers sm_90 9 -> 10.*\nmissing: 2\n  counters: c: has no baseline; .*"
            r"\n  cuda-1.0: y: has a baseline.*"
            r"\nbetter: 1\n  counters: a: operations 3 -> 2.*\n.*again with --update-baseline",
        ),
        (
            {"nvcc": "2.0", "kernels": {"x": {"registers sm_90": 99}}},
            0,
            r"  cuda-2.0: all cases: no baseline for nvcc 2.0",
        ),
    ],
    ids=["worse, better, new and gone", "other compiler"],
)
def test_what_is_worse_or_missing_fails_and_everything_is_told(baselines, change, failures, said):
    failed, text = judge(of_gate(baselines), **change)
    assert len(failed) == failures and re.search(said, text), text


def test_refused_are_an_update_of_nothing_and_extensions_of_other_sources(tmp_path, monkeypatch):
    with pytest.raises(pytest.UsageError, match="--update-baseline: only with --gate"):
        of_gate(tmp_path, on=None, update=True)
    monkeypatch.setattr(gate, "stale_extensions", lambda: ["_C_cpu was built before: install again"])
    of_gate(tmp_path, on=None)
    with pytest.raises(pytest.UsageError, match="_C_cpu was built before"):
        of_gate(tmp_path)


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
    # Of no other solver, in which nothing is planted.
    assert re.search(r"worse: 1\n  counters: picard 12 iterations: .*host_waits 12 -> 24 \(\+100%\)", result.stdout)
