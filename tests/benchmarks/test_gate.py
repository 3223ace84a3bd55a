"""The regression gate: what it counts, what it says of a difference, and that a planted slowdown does not pass."""

import dataclasses
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from harness import compiled, counted, gate, ratios
from harness.cases import find
from harness.counters import count
from harness.gate import BASELINES, BETTER, MISSING, NOT_JUDGED, SAME, WORSE, Baseline
from harness.timing import Copy

import deqfast
from deqfast.solvers.picard import Picard

ROOT = Path(__file__).resolve().parents[2]
RUNS = 200
X, MASK, INDEX = torch.eye(3), torch.eye(3) > 0, torch.tensor([0, 2])

WAITS = {
    "X[0, 0].item()": True,
    "bool(MASK.any())": True,
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
    "torch.linalg.pinv(X)": True,
    "INDEX.bincount()": True,
    "torch.repeat_interleave(INDEX, INDEX)": True,
    "torch.repeat_interleave(INDEX, INDEX, output_size=2)": False,
    "X.to('meta')": True,
    "X.to('meta', non_blocking=True)": False,
    "X.T.reshape(-1).unsqueeze(0).expand(2, 9)[0, :2].split(1)": False,
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


def baseline(name, rows, depends_on=""):
    return Baseline(name, rows, "abcdef12 of 2026-01-02", depends_on)


def step_twice(advance):
    """The step on a copy of the state first."""

    def planted(self, state, fz, k, last):
        copies = {name: t.clone() for name, t in vars(state).items() if isinstance(t, torch.Tensor)}
        advance(self, dataclasses.replace(state, **copies), fz.clone(), k, last)
        advance(self, state, fz, k, last)

    return planted


@pytest.mark.parametrize(
    ("now", "alike", "verdict", "text"),
    [
        ({"operations": 5, "host_waits": 6}, True, WORSE, "host_waits 4 -> 6 (+50%); operations 10 -> 5 (-50%) since"),
        ({"operations": 9, "host_waits": 4}, True, BETTER, "operations 10 -> 9 (-10%) since abcdef12"),
        ({"operations": 10, "host_waits": 4}, True, SAME, "as since abcdef12 of 2026-01-02"),
        ({"operations": 10}, True, MISSING, "host_waits: in the baseline or now, not both; accept it with"),
        ({"operations": 11}, False, WORSE, "operations 10 -> 11 (+10%)"),
        ({"others": 11}, False, NOT_JUDGED, "nothing that the baseline"),
    ],
)
def test_counters_are_judged_one_by_one(now, alike, verdict, text):
    finding = baseline("counters", {"a": {"operations": 10, "host_waits": 4}}).judge("a", now, alike)
    assert finding.verdict == verdict and finding.text.startswith(text)


def test_a_baseline_is_read_as_it_was_written_a_line_per_case(tmp_path):
    rows = {"a": {"operations": 1}, "b": {"registers": 2, "stack": 0}}
    path = Baseline("cuda-13.0", rows, depends_on="nvcc 13.0").write(tmp_path)
    read = Baseline.read(tmp_path, "cuda-13.0")
    assert (read.rows, read.depends_on) == (rows, "nvcc 13.0") and read.since.endswith(
        f" of {json.loads(path.read_text())['date'][:10]}"
    )
    assert '["b", null, 2, 0]\n' in path.read_text()
    assert Baseline.read(tmp_path, "cuda-99.0").rows == {}


def test_the_committed_baselines_break_no_limit():
    """They are what an unknown compiler is not compared with."""
    kernels = [path.stem for path in BASELINES.glob("*-*.json")]
    assert "cuda-13.0" in kernels and "triton-3.9" in kernels
    for name in kernels:
        assert compiled.broken_limits(Baseline.read(BASELINES, name).rows) == {}
    assert compiled.broken_limits({"a": {"stack sm_120": 0, "shared sm_120": 262144}}) == {}  # a limit nobody listed
    assert set(compiled.broken_limits({"a": {"stack sm_90a": 8}})) == {"a"}
    broken = compiled.broken_limits({"a": {"stack sm_90": 8, "shared sm_80": 262144, "registers sm_90": 255}})
    assert broken == {"a": "stack sm_90 8 bytes, the limit is 0; shared sm_80 262144 bytes, the limit is 166912"}


def noisy(rng, ratio):
    """Pairs of times on a shared machine: heavy tails (Student's t of two degrees, no variance) of 8 %, every tenth
    time of either side up to four times as long, and a ratio that is another by 4 % in every run."""
    ratio *= math.exp(rng.gauss(0, 0.04))

    def burst():
        return rng.uniform(1.2, 4) if rng.random() < 0.1 else 1.0

    def measure(pairs):
        tails = (rng.gauss(0, 1) / math.sqrt(rng.expovariate(1)) for _ in range(pairs))
        return [ratio * math.exp(0.08 * tail) * burst() / burst() for tail in tails]

    return measure


def ratio_of(before):
    return baseline("ratios", {"a": {"ratio": before}})


@pytest.mark.parametrize(
    ("slowdown", "verdict", "least", "most"),
    [
        (1.0, WORSE, 0, 0),
        (1.3, WORSE, 0.9, 1),
        (1.5, WORSE, 0.98, 1),
        (1 / 1.5, BETTER, 0.98, 1),
    ],
)
def test_slowdowns_are_worse_and_noise_alone_is_not(slowdown, verdict, least, most):
    rng = random.Random(5)
    found = [ratio_of(0.2).judge_ratio("a", noisy(rng, 0.2 * slowdown)).verdict for _ in range(RUNS)]
    assert least * RUNS <= found.count(verdict) <= most * RUNS


def test_new_pairs_decide_and_a_ratio_may_have_its_own_margin():
    asked = []

    def measure(pairs):
        asked.append(pairs)
        return [2.0 if len(asked) == 1 else 1.4] * pairs

    wider = ratio_of(1.0).judge_ratio("a", measure, margin=1.5)
    assert wider.verdict is SAME and "margin 50%" in wider.text
    assert asked == [gate.PAIRS, gate.MORE_PAIRS]
    assert ratio_of(1.0).judge_ratio("a", measure).verdict is WORSE


def test_two_threads_are_timed_beside_one_where_there_are_two_cores(monkeypatch):
    monkeypatch.setattr(ratios, "cores", lambda: 1)
    alone = set(ratios.available())
    monkeypatch.setattr(ratios, "cores", lambda: 2)
    both = {name for name in ratios.NAMES if name.endswith(ratios.ONE_THREAD)}
    assert both and set(ratios.available()) - alone == both and ratios.margin(min(both)) == 1.5
    threads, solve = [], deqfast.solve

    def once(calls, **options):
        return {name: [calls[name]() is None] for name in calls}

    measure = ratios.pairs(find("solves", "picard-256x1024"), ratios.ONE_THREAD)
    monkeypatch.setattr(deqfast, "solve", lambda *given: threads.append(torch.get_num_threads()) or solve(*given))
    monkeypatch.setattr(ratios, "in_turns", once)
    measure(1)
    assert threads == [2, 1]


def test_a_slower_step_is_found_by_the_clock(monkeypatch):
    """Times are real: each step is made twice, on copies the first time."""
    copy = Copy(elements=1 << 20)
    monkeypatch.setattr(ratios, "copy", lambda: copy)
    monkeypatch.setattr(gate, "MORE_PAIRS", gate.BASELINE_PAIRS)
    measure = ratios.pairs(find("solves", "picard-256x1024"), "copy")
    before = baseline("ratios", {"a": {"ratio": statistics.median(measure(gate.PAIRS))}})
    monkeypatch.setattr(Picard, "advance", step_twice(Picard.advance))
    finding = before.judge_ratio("a", measure)
    assert finding.verdict is WORSE, finding
    assert "since abcdef12" in finding.text and "(+" in finding.text


KERNELS = {case: {"registers sm_90": 9} for case in "xy"}


def of_mode(folder, mode="all", update=False):
    """The plugin as `--gate=mode` makes it, with baselines in `folder`."""
    options = {"gate": mode, "update_baseline": update}
    config = SimpleNamespace(getoption=lambda name, *default: options.get(name), addinivalue_line=lambda *line: None)
    return gate.Gate(config, folder)


def judge(
    plugin, a=3, b=5, ratio=0.5, processor=1, kernels=KERNELS, broken=MappingProxyType({}), nvcc="1.0", absent=("c",)
):
    """What the tests of a session ask: two counters, a ratio, kernels. How many of them fail, and what is told."""
    counts = {case: {"operations": value} for case, value in (("a", a), ("b", b), ("c", 1)) if case not in absent}
    asked = [partial(plugin.counters, case, counters) for case, counters in counts.items()]
    asked += [
        partial(plugin.close, "counters", [*counts] if not plugin.update else ["a", "b"]),
        partial(plugin.ratio, "r", lambda pairs: [ratio] * pairs, f"processor {processor}"),
        partial(plugin.close, "ratios", ["r"], f"processor {processor}"),
        partial(plugin.compiled, f"cuda-{nvcc}", kernels, broken, f"nvcc {nvcc}"),
    ]
    failed, lines = [], []
    for ask in asked:
        try:
            ask()
        except pytest.fail.Exception as error:
            failed.append(str(error))
        except pytest.skip.Exception:
            pass
    plugin.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    return failed, "\n".join(lines)


@pytest.fixture
def baselines(tmp_path):
    failed, text = judge(of_mode(tmp_path, update=True))
    assert not failed and {path.name for path in tmp_path.iterdir()} == {
        "counters.json",
        "ratios.json",
        "cuda-1.0.json",
    }
    assert text.count("written: ") == 3
    assert judge(of_mode(tmp_path)) == ([], "gate=all\nsame: 5")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "failures", "said"),
    [
        (
            {"a": 2, "b": 6, "ratio": 0.7, "kernels": {"x": {"registers sm_90": 10}}},
            3,
            r"worse: 3\n  counters: b: operations 5 -> 6 \(\+20%\) since .*"
            r"\n  ratios: r: time / reference 0.5 -> 0.7 \(\+40%\).*margin 15%.*"
            r"\n  cuda-1.0: x: registers sm_90 9 -> 10.*\nmissing: 1\n  cuda-1.0: y: has a baseline.*"
            r"\nbetter: 1\n  counters: a: operations 3 -> 2.*\n.*again with --update-baseline",
        ),
        ({"absent": ("b",)}, 2, r"missing: 2\n  counters: c: has no baseline; .*\n  counters: b: has a baseline"),
        (
            {"processor": 2, "nvcc": "2.0", "kernels": {"x": {"registers sm_90": 99}}},
            0,
            r"\n  ratios: all cases: the baseline is of processor 1, this is processor 2(.*\n)+"
            r"  cuda-2.0: all cases: no baseline for nvcc 2.0: 1 kernels judged by the limits of the hardware alone",
        ),
        ({"nvcc": "2.0", "broken": {"x": "stack 8 bytes"}}, 1, r"worse: 1\n  cuda-2.0: x: stack 8 bytes"),
    ],
    ids=["worse, better and gone", "new and gone", "other machine and compiler", "limit broken"],
)
def test_what_is_worse_or_missing_fails_and_everything_is_told(baselines, change, failures, said):
    failed, text = judge(of_mode(baselines), **change)
    assert len(failed) == failures and re.search(said, text), text


def test_a_part_of_a_group_and_broken_limits_replace_no_baseline(baselines):
    before = {path: path.read_text() for path in baselines.glob("c*.json")}
    failed, _ = judge(of_mode(baselines, update=True), absent=("b", "c"), broken={"x": "stack 8 bytes"})
    assert failed == [
        "counters.json is not written, not measured were: b",
        "cuda-1.0.json is not written, limits are broken by: x",
    ]
    assert before == {path: path.read_text() for path in baselines.glob("c*.json")}


def test_refused_are_an_update_of_nothing_and_extensions_of_other_sources(tmp_path, monkeypatch):
    with pytest.raises(pytest.UsageError, match="--update-baseline: say which"):
        of_mode(tmp_path, mode=None, update=True)
    monkeypatch.setattr(gate, "stale_extensions", lambda: ["_C_cpu was built before: install again"])
    of_mode(tmp_path, mode=None)
    with pytest.raises(pytest.UsageError, match="_C_cpu was built before"):
        of_mode(tmp_path)


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
    options = ["-p", "planted", "--gate=counters", "-k", "12 and iterations"]
    command = [sys.executable, "-m", "pytest", "benchmarks", *options]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    # Of no other solver, in which nothing is planted.
    assert "worse: 1\n  counters: picard 12 iterations: " in result.stdout
    assert "host_waits 12 -> 24 (+100%)" in result.stdout
