"""The suite of `pytest benchmarks`: its registry, its byte formulas, its timing. It records no wrong answer."""

import json
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from correctness import norm_states
from harness import by_hand, cases, counters, maps, ops, suite, targets, timing, traffic
from harness.entry import Case, Contender, Skipped, Wrong, check
from harness.record import RESULTS, read_record
from harness.solves import FC_ITERATIONS, solver_name

import deqfast
from deqfast.ops import Kernel

BF16 = torch.bfloat16
SMALL = cases.SMALL
NAMED = {(case.section, case.name): case for case in cases.CASES}
QUICK = {"rounds": 1, "seconds": 0.1}


def test_a_graph_holds_the_tensors_that_its_calls_work_on(monkeypatch):
    """Without them, a replay would use memory that belongs to others by then."""
    monkeypatch.setattr(timing, "captured", lambda work: SimpleNamespace(replay=work()))
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    graph = timing.Graph([partial(tensor.add_, 1)])
    del tensor
    assert held() is not None and graph.share == 1 / timing.CALLS_PER_GRAPH


class TestTraffic:
    @pytest.mark.parametrize(
        ("solver", "evaluations", "provider", "passes"),
        [
            (deqfast.Picard(), 20, "cpp", 4 * 19 + 1),
            (deqfast.Anderson(), 20, "cpp", 8 + 10 + 12 + 14 + 16 + 18 + 13 * 20),  # windows of 0 to 5 pairs, then 6
            (deqfast.Anderson(history_dtype=BF16), 20, "cpp", 7 + 8 + 9 + 10 + 11 + 12 + 13 * 13),
            (deqfast.Anderson(history_dtype=BF16), 20, "torchdeq", 8 + 10 + 12 + 14 + 16 + 18 + 13 * 20),
            (deqfast.Broyden(), 20, "cpp", sum(6 + steps for steps in range(19))),  # only the steps
            (deqfast.Broyden(history_size=18), 20, "cpp", sum(8 + 2 * min(pairs, 18) for pairs in range(19))),
            (deqfast.Anderson(max_iter=50, history_size=None), 50, "cuda", sum(8 + 2 * min(k, 32) for k in range(49))),
            *((deqfast.Broyden(), 3, provider, 8 + 10) for provider in ("torchdeq", "cuda")),  # which keep pairs
        ],
    )
    def test_a_solve(self, solver, evaluations, provider, passes):
        """The last evaluation is read, with its z, and no step follows. Picard keeps every iterate."""
        assert traffic.solve_passes(solver, evaluations, provider) == passes + 2

    def test_others(self):
        means, scatter = 10 * 16 + 10 * 8 + 3 * 4 * 8, 10 * 8 + 10 * 8 + 4 * 8 * (3 + 2)
        assert traffic.collapse_bytes(10, 4, 3, 2, classifier=False) == means - 10 * 8 + scatter
        assert traffic.collapse_bytes(10, 4, 3, 2, classifier=True) == means + scatter

    @pytest.mark.parametrize("dtypes", ["fp32", "bf16 with fp32"])
    @pytest.mark.parametrize("op", norm_states.NORM_OPS)
    def test_norms_are_the_bytes_of_their_images(self, op, dtypes):
        """Bytes of the images that a call takes and returns, without vectors and statistics."""
        shape = (2, 16, 3, 5)
        arguments = [*norm_states.NormCase(op, shape, 8, dtypes).arguments().values()]
        images = [t for t in [*arguments, *ops.TORCH.op(op)(*arguments)] if getattr(t, "shape", ()) == shape]
        y, z = norm_states.NORM_DTYPES[dtypes]
        moved = traffic.norm_bytes(op, images[0].numel(), y.itemsize, z.itemsize)
        assert moved == sum(image.nbytes for image in images)


class TestRegistry:
    def test_names_are_unique_and_fit_for_selection_and_small_cases_of_every_section(self):
        assert len(NAMED) == len(cases.CASES)
        assert all(" " not in name and "(" not in name for _, name in NAMED)
        assert {case.section for case in SMALL} == {section for section, _ in NAMED}

    def test_records_are_of_its_cases(self):
        """Except records of single ops and options: some of these cases no longer exist."""
        names = {(section, name) for section, name in NAMED if section not in ("ops", "options")}
        rows = [row for path in RESULTS.glob("*.json") for row in read_record(path)["rows"]]
        sections = {section for section, _ in names}
        recorded = {(row["section"], row["case"]) for row in rows if row["section"] in sections}
        assert recorded <= names and {section for section, _ in recorded} == sections - {"cells"}

    def test_the_cases_with_targets_are_measured(self):
        for target in targets.TARGETS:
            if target.section == "training step" or target.awaited:
                continue
            for case in (NAMED[target.section, name] for name in target.cases):
                assert set(target.providers) & set(case.providers)
                assert not target.against or target.against in case.peers


@pytest.fixture(scope="module")
def copy():
    return timing.Copy(elements=1 << 12)


def measured(case, copy, providers=("cpp",)):
    return suite.measure(case, providers, "cpu", copy, **QUICK)[0]


@pytest.mark.filterwarnings("ignore:deqfast. in ")  # cells so small need not contract
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.tier("full")] * (case.section == "rivals")) for case in SMALL],
    ids=lambda case: case.name,
)
def test_every_kind_of_case_has_rows_of_all_its_providers(case, copy):
    providers = case.providers_on("cpu")
    outcomes, contenders = suite.measure(case, providers, "cpu", copy, **QUICK)
    assert list(outcomes) == providers and json.loads(json.dumps(list(outcomes.values())))
    timed = {provider: row for provider, row in outcomes.items() if "ms" in row}
    for provider, row in outcomes.items():
        assert (row["section"], row["case"], row["provider"]) == (case.section, case.name, provider)
        assert "fault" not in row and ("skipped" in row) != ("ms" in row), row
        if provider in contenders and contenders[provider].another is not None:
            contenders[provider].another()()
            contenders[provider].verify()
    for row in timed.values():
        assert row["ms_min"] <= row["ms"] and len(row["ms_quartiles"]) == 2 and row["rounds"] >= 1
        if "bytes" in row:
            assert row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / (1e9 * row["copy_gb_per_s"]))
            assert row["floor_x"] == pytest.approx((row["ms_min"] - row.get("f_ms", 0)) / row["floor_ms"])
    assert timed.keys() >= {"torch", "cpp"} & outcomes.keys()
    if iterations := {"solves": cases.ITERATIONS, "fc": FC_ITERATIONS}.get(case.section):
        assert timed.keys() >= {"torch", "cpp", "torchdeq"}
        assert {row["evaluations"] for row in timed.values()} == {iterations}


def broken_op(right):
    """Ops of the kernel cpp that are off by a hundredth."""

    def op(kernel, name):
        def off(*arguments):
            result = right(kernel, name)(*arguments)
            changed = arguments[0] if result is None else result
            (changed if isinstance(changed, torch.Tensor) else changed[0]).mul_(1.01)
            return result

        return off if kernel.name == "cpp" else right(kernel, name)

    return op


def broken_solve(right):
    return lambda f, z0, *rest: SimpleNamespace(value=f(f(z0)))


def broken_layer(right):
    """Layers of the kernel cpp with the gradient of JFB."""
    return lambda cell, solver, adjoint, kernel: right(
        cell, solver, adjoint if kernel != "cpp" else "jfb", kernel=kernel
    )


def broken_metric(right):
    return lambda *x, **more: SimpleNamespace(nc1=right(*x, **more).nc1 * (1 + 1e-9))


BROKEN = {  # by section: what is replaced, and by what that is made of it
    "ops": (Kernel, "op", broken_op),
    "solves": (deqfast, "solve", broken_solve),
    "training": (deqfast, "DEQBlock", broken_layer),
    "nc": (deqfast, "neural_collapse", broken_metric),
}
JUDGED = [case for case in SMALL if case.section in BROKEN and "jfb" not in case.name]


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_a_wrong_answer_is_not_recorded(case, copy, monkeypatch):
    owner, name, broken = BROKEN[case.section]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    assert isinstance(measured(case, copy)["cpp"], AssertionError)


def fake(provider, device):
    """Provider that is right, wrong, absent, or left in a state without work."""
    if provider == "cuda":
        raise Skipped("no device")
    check("relative error", float("nan") if provider in ("cpp", "torchdeq") else 0.0, 1.0)

    def verify():
        if provider == "triton":
            raise Wrong("samples ended")

    return Contender(lambda: None, verify=verify)


def test_what_becomes_of_wrong_and_absent_providers(copy):
    providers = ("torch", "cpp", "triton", "cuda", "torchdeq")
    board, case = suite.Board("cpu"), Case("ops", "fake", providers, ("torch",), fake)
    board._copy = copy
    for provider, error, words in (
        ("cpp", Wrong, "relative error nan"),
        ("triton", Wrong, "samples ended"),
        ("torchdeq", pytest.xfail.Exception, "relative error nan"),
        ("cuda", pytest.skip.Exception, "no device"),
    ):
        with pytest.raises(error, match=words):
            board.run(None, case, provider, providers)
    assert [row["provider"] for row in board.rows] == ["torchdeq", "cuda"]  # what others miss is shown
    assert "ms" not in board.rows[0] and "ms" in measured(case, copy, providers)["torch"]


def test_the_residual_of_a_map_is_of_float64_and_counts_no_call():
    linear, dense = maps.Contraction(2, 8), maps.FullyConnected(2, 8, weight_dtype=BF16)
    for f, exact in (
        (linear, lambda z: linear.c.double() + z * linear.eigenvalues.double()),
        (dense, lambda z: torch.tanh(z @ dense.weight.double().T + dense.c.double())),
    ):
        z = f(f(torch.zeros_like(f.c)))
        residual = maps.relative_residual(exact(z.double()), z.double())
        assert f.residual(z) == pytest.approx(residual, rel=1e-12)
        assert f.calls == 2 and f.c.dtype == torch.float32


@pytest.mark.parametrize("solver", [cases.SOLVERS[0], cases.SOLVERS[1], cases.SOLVERS[3]], ids=solver_name)
def test_a_loop_by_hand_makes_the_same_evaluations_without_a_wait(solver):
    """So that a GPU can capture it."""
    f, loop = maps.FullyConnected(3, 64), by_hand.loop_of(solver)
    z0 = torch.zeros_like(f.c)
    residual, calls = f.residual(loop(f, z0)), f.calls
    ours = f.residual(deqfast.solve(f, z0, solver).value)
    assert calls == f.calls - calls == cases.ITERATIONS and residual < 2 * ours  # whose value is the last argument of f
    assert counters.count(lambda g: loop(g, z0), f, "cpu").host_waits == 0


def test_a_profile_counts_kernels_and_not_the_annotations_around_them(monkeypatch):
    """As of an optimizer's step: the profiler shows its span on the device too."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        SimpleNamespace(
            name=name, device_type=kind, is_user_annotation=spans, time_range=SimpleNamespace(elapsed_us=us)
        )
        for name, kind, spans, us in [
            ("cudaLaunchKernel", cpu, False, lambda: 9),
            ("step", cpu, True, lambda: 9),
            ("step", gpu, True, lambda: 70),
            *[("add", gpu, False, lambda: 20)] * 2,
        ]
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(counters, "profile", lambda **given: nullcontext(SimpleNamespace(events=lambda: events)))
    profile = counters.profiled(lambda: None)
    assert (profile.launches, profile.host_waits, profile.kernels) == (1, 0, {"add": (2, pytest.approx(0.04))})


def test_in_turns_takes_turns_and_gives_up_rounds_but_not_the_fewest(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))

    def takes(name, seconds):
        order.append(name)
        now[0] += seconds

    times = timing.in_turns({name: partial(takes, name, 1e-6) for name in "ab"}, rounds=4)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4}
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns[-8:] == ["a", "b"] * 4 and order.count("a") == 2 + 4 * timing.MOST_REPEATS
    calls = {"slow": partial(takes, "slow", 0.02), "quick": partial(takes, "quick", 0.003)}
    times = timing.in_turns(calls, rounds=100, seconds=0.01)
    assert times == {"slow": [pytest.approx(0.02)], "quick": [pytest.approx(0.003)] * 4}
    times = timing.in_turns({"long": partial(takes, "long", 0.9)}, rounds=100, seconds=1.0)
    assert len(times["long"]) == timing.FEWEST_ROUNDS


def test_kernels_on_a_gpu_take_turns_among_buffers_and_what_has_a_host_keeps_it(monkeypatch):
    made, event = [], SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 60.0)
    monkeypatch.setattr(timing, "captured", lambda work: work() or SimpleNamespace(replay=work))
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(suite, "buffers", lambda nbytes: 3)
    contender = Contender(lambda: made.append("own"), {"bytes": 8}, another=lambda: lambda: made.append("other"))
    (graph,) = suite.parts_of(contender, "cuda").values()
    assert made[-21:] == ["own", "other", "other"] * 7
    made.clear()
    assert timing.seconds_of(graph, 3, "cuda") == pytest.approx(0.06 / 3 / 21) and len(made) == 3 * 21
    assert suite.parts_of(contender, "cpu") == {"whole": contender.call}
    hosted = Contender(lambda: None, {"bytes": 8}, f=lambda: None)
    assert suite.parts_of(hosted, "cuda") == {"whole": hosted.call, "f": hosted.f}


def test_gains():
    name = "anderson-m6-128x8192"
    row = {"section": "solves", "case": name, "ms": 1, "ms_min": 1}
    ours, theirs = row | {"provider": "cpp", "solver_ms": 2.0}, row | {"provider": "torchdeq", "solver_ms": 10.0}
    suite.compare(NAMED["solves", name], [ours, theirs | {"solver_ms": -1.0}])
    assert "gains" not in ours  # torchdeq's time is too short compared with f's
    suite.compare(NAMED["solves", name], [ours, theirs])
    assert ours["gains"] == {"torchdeq": 5} and "gains" not in theirs
    for device, own in (("cpu", {"solver_ms", "floor_ms", "floor_x"}), ("cuda", set())):  # nothing is subtracted there
        row = {"bytes": 10, "device_ms": 3.0, "evaluations": 2}
        suite.add_times(row, {"whole": [5e-3, 4e-3], "f": [1e-3]}, 1e9, device)
        assert (row["ms_min"], row["f_ms"], row["share_of_f"], row["busy"]) == (4.0, 1.0, 3.0, 0.75)
        assert row.keys() & {"solver_ms", "floor_ms", "floor_x"} == own
