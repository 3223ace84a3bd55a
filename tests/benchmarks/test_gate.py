"""The regression gate: its counters, its messages on differences; it fails for a planted wait."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import counted, gate
from harness.counters import count

ROOT = Path(__file__).resolve().parents[2]
X, MASK, INDEX = torch.eye(3), torch.eye(3) > 0, torch.tensor([0, 2])

WAITING = ("X[0, 0].item()", "INDEX.tolist()", "X.numpy()", "torch.where(MASK)", "X[MASK]", "torch.equal(X, X)")
WAITING += ("torch.linalg.solve(X, X)", "INDEX.bincount()", "torch.repeat_interleave(INDEX, INDEX)", "X.to('meta')")
QUEUED = ("torch.where(MASK, X, 0)", "X[INDEX]", "X.clone().__setitem__(MASK, 0.0)", "torch.linalg.solve_ex(X, X)")
QUEUED += ("torch.repeat_interleave(INDEX, INDEX, output_size=2)", "X.to('meta', non_blocking=True)")


@pytest.mark.parametrize("expression", WAITING + QUEUED)
def test_what_makes_the_host_wait_counts_once_and_what_is_queued_never(expression):
    call = eval(f"lambda: {expression}")
    assert count(lambda f: call(), lambda: None, "cpu").host_waits == (expression in WAITING)


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
def test_counters_are_compared_one_by_one(now, alike, worse, better):
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
