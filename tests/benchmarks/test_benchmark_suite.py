"""The suite of `pytest benchmarks`: registry, byte formulas, how it times, and that it records no wrong answer."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import cases, maps, ops, solves, suite, tables, targets, timing, traffic, training
from harness.entry import KERNELS, Case, Contender, Skipped, Wrong, check

import deqfast

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16


class TestTraffic:
    @pytest.mark.parametrize(
        ("solver", "evaluations", "provider", "passes"),
        [
            (deqfast.Picard(), 20, "cpp", 3 * 19),
            (deqfast.Anderson(), 20, "cpp", 8 + 10 + 12 + 14 + 16 + 18 + 13 * 20),  # windows of 0 to 5 pairs, then 6
            (deqfast.Anderson(history_dtype=BF16), 20, "cpp", 7 + 8 + 9 + 10 + 11 + 12 + 13 * 13),
            (deqfast.Broyden(), 20, "cpp", sum(6 + steps for steps in range(19))),  # the steps alone
            (deqfast.Broyden(history=18), 20, "cpp", sum(8 + 2 * min(pairs, 18) for pairs in range(19))),
            *((deqfast.Broyden(), 3, provider, 6 + 7) for provider in ("torch", "eager")),
            (deqfast.Broyden(), 3, "cuda", 8 + 10),  # a GPU keeps pairs
        ],
    )
    def test_a_solve(self, solver, evaluations, provider, passes):
        """The last evaluation is read, with its z, and no step follows."""
        assert traffic.solve_passes(solver, evaluations, provider) == passes + 2

    @pytest.mark.parametrize(("provider", "history_dtype"), [("cpp", BF16), ("eager", BF16), ("torchdeq", None)])
    def test_a_floor_is_of_the_history_that_the_provider_keeps(self, provider, history_dtype):
        case = solves.SolveCase(solver=deqfast.Anderson(maps.NEVER, 20, history_dtype=BF16), batch=2, dim=64)
        kept = deqfast.Anderson(max_iter=20, history_dtype=history_dtype)
        assert case.contender(provider, "cpu").facts["bytes"] == 4 * 2 * 64 * traffic.solve_passes(kept, 20, provider)

    def test_others(self):
        assert traffic.transposed_passes(20, 1) == 43
        assert traffic.fc_vjp_bytes(2, 3) == 72
        assert traffic.class_means_bytes(10, 4, 2, 4) == 10 * 16 + 10 * 8 + 2 * 4 * 8
        assert traffic.scatter_bytes(10, 4, 3, 2, 2) == 10 * 8 + 10 * 8 + 4 * 8 * (3 + 2)

    @pytest.mark.parametrize("case", [case for case in cases.OPS if isinstance(case, ops.NormOpCase)], ids=str)
    def test_norms_are_the_bytes_of_their_images(self, case):
        """Of those that a call takes and returns; vectors and statistics are left out."""
        small = ops.NormOpCase(op=case.op, shape=(2, 16, 3, 5), dtypes=case.dtypes)
        arguments = list(ops.norm_states.NormCase(small.op, small.shape, 8, small.dtypes).arguments().values())
        results = ops.TORCH.op(small.op)(*arguments)
        images = [t for t in [*arguments, *results] if isinstance(t, torch.Tensor) and t.shape == small.shape]
        assert small.contender("torch", "cpu").facts["bytes"] == sum(image.nbytes for image in images)


class TestRegistry:
    def test_names_are_unique_and_fit_for_selection(self):
        names = [(case.section, case.name) for case in cases.CASES]
        assert len(set(names)) == len(names)
        assert all(" " not in name and "(" not in name for _, name in names)
        assert all(cases.find(case.section, case.name) is case for case in cases.CASES)
        with pytest.raises(KeyError, match="has no case 'x'"):
            cases.find("ops", "x")

    def test_it_spans_what_it_should(self):
        sizes = [case.size() for case in cases.CASES if not case.full]
        assert {1, 128, 256} <= {size.get("batch") for size in sizes}
        assert {256, 1024, 8192, 65536} <= {size["dim"] for size in sizes}
        default = [case for case in cases.CASES if case.section != "scaling"]
        assert {case.section for case in default} == SECTIONS
        assert {type(case) for case in default} == {type(case) for case in cases.SMALL}
        run = {case.op for case in cases.OPS}
        assert run >= {"picard_step", "multisecant_step", "multisecant_transposed", "norm_act", "norm_act_residual"}
        assert run >= {"broyden_step", "fc_fixed_point", "fc_vjp", "class_means", "within_class_scatter"}
        for case in default:
            assert set(case.peers) <= set(case.providers)
            assert case.section in ("rates", "options") or set(KERNELS) <= set(case.providers)
        improving = {(case.op, case.method) for case in cases.OPS if getattr(case, "improving", False)}
        assert improving == {("picard_step", None), ("multisecant_step", "and2"), ("multisecant_step", "good")}

    def test_every_option_has_a_case(self):
        providers = {provider for case in cases.OPTIONS for provider in case.providers}
        options = {"compact", "eval-solver", "trace", "shine", "anderson-I", "broyden-bad", "streaming"}
        assert options <= providers
        for case in cases.OPTIONS:
            assert not set(case.providers) <= options and case.peers[0] not in options

    def test_a_provider_is_asked_for_where_it_can_be(self):
        case = cases.find("solves", "picard-128x8192")
        assert case.providers_on("cpu") == ["torch", "cpp", "torchdeq", "eager"]
        on_gpu = ["torch", "triton", "cuda", "triton-graph", "cuda-graph", "torchdeq", "eager"]
        assert case.providers_on("cuda") == on_gpu

    def test_the_cases_with_targets_are_run_by_default(self):
        for name in targets.ITERATED:
            case = cases.find("solves", name)
            assert (case.batch, case.dim, case.solver.max_iter, case.full) == (128, 8192, 20, False)
        for target in (*targets.TARGETS, *targets.GPU_TARGETS):
            if target.section == "training step":
                continue
            for case in (cases.find(target.section, name) for name in targets.named(target.case)):
                assert set(targets.named(target.provider)) & set(case.providers)
                assert target.against is None or target.against in case.peers


SMALL = cases.SMALL
SECTIONS = {"rates", "ops", "solves", "fc", "cells", "training", "nc", "options"}
QUICK = {"rounds": 1, "seconds": 0.1}


@pytest.fixture(scope="module")
def copy():
    return timing.Copy(elements=1 << 12)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_kind_of_case_has_rows_of_all_its_providers(case, copy):
    outcomes, contenders = suite.measure(case, case.providers_on("cpu"), "cpu", copy, **QUICK)
    assert list(outcomes) == case.providers_on("cpu")
    for provider, row in outcomes.items():
        assert isinstance(row, dict), (provider, row)
        assert (row["section"], row["case"], row["provider"]) == (case.section, case.name, provider)
        assert "problem" not in row, row
        assert ("skipped" in row) != ("ms" in row)
        if "ms" in row:
            assert row["ms_min"] <= row["ms"] and len(row["ms_quartiles"]) == 2 and row["rounds"] >= 1
        if provider in contenders and contenders[provider].another is not None:
            contenders[provider].another()()
            contenders[provider].verify()
        if "bytes" in row and "ms" in row:
            assert row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / (1e9 * row["copy_gb_per_s"]))
            assert row["floor_x"] == pytest.approx((row["ms_min"] - row.get("f_ms", 0)) / row["floor_ms"])
    assert all("ms" in outcomes[kernel] for kernel in ("torch", "cpp") if kernel in outcomes)
    if isinstance(case, training.TrainingCase):
        ran = [row for row in outcomes.values() if "skipped" not in row]
        assert all(row["launches"] > row["evaluations"] and row["host_waits"] >= 0 for row in ran)
    if case.section in ("solves", "fc"):
        made = {provider: row["evaluations"] for provider, row in outcomes.items() if "skipped" not in row}
        assert set(made) >= {"torch", "cpp", "torchdeq", "eager"} and set(made.values()) == {row["iterations"]}
    assert json.loads(json.dumps(list(outcomes.values())))
    assert tables.table(list(outcomes.values()))


def broken_ops(monkeypatch):
    """Kernels whose ops are off by a hundredth."""
    choose = ops.kernel_of

    def op(kernel, name):
        def off(*arguments):
            result = kernel.op(name)(*arguments)
            changed = arguments[0] if result is None else result
            for tensor in [changed] if isinstance(changed, torch.Tensor) else changed[:1]:
                tensor.mul_(1.01)
            return result

        return off

    def broken(provider, device):
        kernel = choose(provider, device)
        return SimpleNamespace(op=lambda name: op(kernel, name), name=kernel.name, has_broyden_step=True)

    monkeypatch.setattr(ops, "kernel_of", broken)


@pytest.mark.parametrize("case", [case for case in SMALL if case.section == "ops"], ids=lambda case: case.name)
def test_a_wrong_op_is_not_recorded(case, copy, monkeypatch):
    broken_ops(monkeypatch)
    outcome = suite.measure(case, ["cpp"], "cpu", copy, **QUICK)[0]["cpp"]
    assert isinstance(outcome, AssertionError), outcome


def test_a_solve_that_stops_short_is_not_recorded(copy, monkeypatch):
    monkeypatch.setattr(deqfast, "solve", lambda f, z0, *rest: SimpleNamespace(value=f(f(z0))))
    for case in (case for case in SMALL if case.section == "solves"):
        outcome = suite.measure(case, ["cpp"], "cpu", copy, **QUICK)[0]["cpp"]
        assert isinstance(outcome, Wrong) and "relative residual" in str(outcome)


def test_the_gradient_of_another_adjoint_is_not_recorded(copy, monkeypatch):
    case = next(case for case in SMALL if case.section == "training" and case.adjoint == "implicit")
    block = deqfast.DEQBlock
    monkeypatch.setattr(
        deqfast,
        "DEQBlock",
        lambda cell, solver, adjoint, kernel: block(cell, solver, "jfb" if kernel == "cpp" else adjoint, kernel),
    )
    outcomes, _ = suite.measure(case, ["torch", "cpp"], "cpu", copy, **QUICK)
    assert isinstance(outcomes["cpp"], Wrong) and "gradient" in str(outcomes["cpp"])
    assert "ms" in outcomes["torch"]


def test_a_wrong_nc1_is_not_recorded(copy, monkeypatch):
    right = deqfast.neural_collapse
    monkeypatch.setattr(
        deqfast, "neural_collapse", lambda *given, **kw: SimpleNamespace(nc1=right(*given, **kw).nc1 * (1 + 1e-9))
    )
    case = next(case for case in SMALL if case.section == "nc")
    assert isinstance(suite.measure(case, ["cpp"], "cpu", copy, **QUICK)[0]["cpp"], Wrong)


@dataclass(frozen=True, kw_only=True)
class Fake(Case):
    """Providers that are right, wrong, absent, or left in a state without work."""

    section = "ops"
    providers = ("torch", "cpp", "triton", "cuda", "torchdeq")
    peers = ("torch",)
    name = "fake"

    def size(self):
        return {"batch": 1}

    def contender(self, provider, device):
        if provider == "cuda":
            raise Skipped("no device")
        check("relative error", float("nan") if provider in ("cpp", "torchdeq") else 0.0, 1.0)

        def verify():
            if provider == "triton":
                raise Wrong("samples ended")

        return Contender(lambda: None, verify=verify)


def test_what_becomes_of_wrong_and_absent_providers(copy):
    outcomes, _ = suite.measure(Fake(), Fake.providers, "cpu", copy, **QUICK)
    assert "ms" in outcomes["torch"]
    assert isinstance(outcomes["cpp"], Wrong) and "nan" in str(outcomes["cpp"])
    assert isinstance(outcomes["triton"], Wrong) and "samples ended" in str(outcomes["triton"])
    assert outcomes["cuda"]["skipped"] == "no device"
    assert "relative error nan" in outcomes["torchdeq"]["problem"] and "ms" not in outcomes["torchdeq"]


def test_the_board_keeps_no_row_of_a_wrong_provider_and_shows_what_others_miss():
    board, case = suite.Board("cpu"), Fake()
    board._copy = timing.Copy(elements=1 << 12)
    with pytest.raises(Wrong):
        board.run(None, case, "cpp", Fake.providers)
    assert not board.rows
    with pytest.raises(pytest.xfail.Exception):
        board.run(None, case, "torchdeq", Fake.providers)
    with pytest.raises(pytest.skip.Exception):
        board.run(None, case, "cuda", Fake.providers)
    assert [row["provider"] for row in board.rows] == ["torchdeq", "cuda"]


def test_in_turns_takes_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.in_turns(calls, rounds=4)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4}
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns[-8:] == ["a", "b"] * 4
    assert order.count("a") == 2 + 4 * timing.MOST_REPEATS


def test_in_turns_gives_up_rounds_but_not_the_fewest():
    counts = {"slow": 0, "quick": 0}

    def call(name, seconds):
        counts[name] += 1
        timing.time.sleep(seconds)

    calls = {"slow": lambda: call("slow", 0.02), "quick": lambda: call("quick", 0.003)}
    times = timing.in_turns(calls, rounds=100, seconds=0.01)
    assert len(times["slow"]) == 1 and counts["slow"] == 1
    assert timing.FEWEST_ROUNDS <= len(times["quick"]) < 10
    assert min(times["quick"]) >= 0.003 and times["slow"][0] >= 0.02


class FakeEvent:
    """A CUDA event 60 ms from any other."""

    def __init__(self, **given):
        self.record = self.synchronize = lambda: None

    def elapsed_time(self, other):
        return 60.0


@pytest.fixture
def fake_gpu(monkeypatch):
    """What captures and times a graph, without a GPU: a capture makes the calls once, and a replay again."""

    def capture(work, *where):
        work()
        return SimpleNamespace(replay=work)

    names = {"aside": lambda work: work(), "capture": capture, "new_pool": lambda: None, "new_stream": lambda: None}
    for name, function in names.items():
        monkeypatch.setattr(timing.graphs, name, function)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(suite, "buffers", lambda nbytes: 3)


def test_a_graph_makes_its_calls_in_turns_and_tells_the_time_of_one(fake_gpu):
    made = []
    graph = timing.Graph([lambda name=name: made.append(name) for name in "abc"], per=2)
    assert "".join(made) == "abc" * 14  # aside and in the capture, 21 each
    assert timing.seconds_of(graph, 3, "cuda") == pytest.approx(0.06 / 3 * 2 / 21) and len(made) == 5 * 21


def test_kernels_on_a_gpu_take_turns_among_buffers_and_what_has_a_host_keeps_it(fake_gpu):
    made = []
    contender = Contender(lambda: made.append("own"), {"bytes": 8}, another=lambda: lambda: made.append("other"))
    parts = suite.parts_of(contender, "cuda")
    assert set(parts) == {"whole", suite.IN_PLACE} and made[-21:] == ["own", "other", "other"] * 7
    assert suite.parts_of(contender, "cpu") == {"whole": contender.call}
    of_host = Contender(lambda: None, {"bytes": 8}, f=lambda: None)
    assert suite.parts_of(of_host, "cuda") == {"whole": of_host.call, "f": of_host.f}


COLLAPSE_ROW = {"section": "nc", "case": "nc-50000x512-K10-fp32", "provider": "cpp", "ms": 1001.0}


def test_gains_and_targets():
    name = "anderson-m6-128x8192"
    rows = [
        {"section": "solves", "case": name, "provider": provider, "ms": 1, "ms_min": 1, "solver_ms": ms, "floor_x": 1.6}
        for provider, ms in (("cpp", 2.0), ("torchdeq", 10.0), ("eager", -1.0))
    ]
    suite.compare(cases.find("solves", name), rows)
    assert "gains" not in rows[0]  # eager's time is lost in that of f
    suite.compare(cases.find("solves", name), rows[:2])
    assert rows[0]["gain"] == 5 and rows[0]["peer"] == "torchdeq" and "gain" not in rows[1]
    rows[0]["peak_bytes"], rows[1]["peak_bytes"] = 3, 4
    told = {target.what: (value, met) for target, value, met in targets.verdicts(rows) if met is not None}
    assert told == {
        f"{name} cpp: >= 4.5x faster than torchdeq": (5, True),
        f"{name} cpp: <= 1.15x the time of its bytes at the copy rate": (1.6, False),
    }
    told = {target.what: met for target, _, met in targets.verdicts([COLLAPSE_ROW]) if met is not None}
    assert told == {"nc-50000x512-K10-fp32 cpp: <= 1000 ms": False}
    memory = targets.Target("solves", name, "cpp", "peak_bytes", 0.75, "torchdeq")
    assert memory.value(rows) == 0.75 and memory.met(0.75) and not memory.met(0.76)


def test_a_run_writes_a_record_and_ends_with_a_table(tmp_path):
    path, json_path = tmp_path / "record.json", tmp_path / "benchmark.json"
    files = ["--record", str(path), "--benchmark-json", str(json_path)]
    command = [sys.executable, "-m", "pytest", "benchmarks/test_ops.py", "-k", "fc_vjp and not cuda"]
    # A worker of xdist says so to its children, in which pytest-benchmark then would write no file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(
        [*command, *files, "--remark", "a try"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(path.read_text())
    assert record["remark"].startswith("a try; partial: ") and "--record" in record["command"]
    rows = {row["provider"]: row for row in record["rows"]}
    assert set(rows) == {"torch", "cpp"}
    assert rows["cpp"]["gains"]["torch"] == pytest.approx(rows["torch"]["ms_min"] / rows["cpp"]["ms_min"], rel=1e-4)
    end = result.stdout[result.stdout.index("Least of the rounds") :]
    assert "fc_vjp-128x1024" in end and f"record: {path}" in end
    kept = {entry["param"]: entry for entry in json.loads(json_path.read_text())["benchmarks"]}["fc_vjp-128x1024-cpp"]
    assert kept["extra_info"]["ms_min"] == pytest.approx(rows["cpp"]["ms_min"], rel=1e-5)  # six digits are written
    assert kept["stats"]["rounds"] == suite.BENCHMARK_ROUNDS and kept["stats"]["min"] > 0


def test_a_record_in_no_folder_is_refused():
    spec = importlib.util.spec_from_file_location("options_of_benchmarks", ROOT / "benchmarks" / "conftest.py")
    options = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(options)
    given = {"--record": Path("/no/such/folder/a.json"), "--device": None}
    config = SimpleNamespace(addinivalue_line=lambda *line: None, getoption=given.get, stash={})
    with pytest.raises(pytest.UsageError, match="/no/such/folder is not a folder"):
        options.pytest_configure(config)


@pytest.mark.parametrize("provider", ["torch", "cpp", "torchdeq", "eager"])
def test_f_is_called_without_gradients(provider, monkeypatch):
    call, enabled = maps.Contraction.__call__, []

    def watched(f, z):
        enabled.append(torch.is_grad_enabled())
        return call(f, z)

    monkeypatch.setattr(maps.Contraction, "__call__", watched)
    contender = solves.SolveCase(solver=cases.SOLVERS[0], batch=2, dim=64).contender(provider, "cpu")
    enabled.clear()
    contender.call()
    contender.f()
    assert enabled == [False] * 2 * cases.ITERATIONS
