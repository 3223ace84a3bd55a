"""benchmarks/scaling.py and internet_scale.py: what they count, their arithmetic, and what they refuse."""

import json
import math
from dataclasses import replace

import internet_model as model
import internet_scale
import mdeq
import pytest
import scaling
import scaling_figures
import torch
from harness import counters, traffic
from harness.record import read_record

import deqfast
from deqfast.ops import choose_kernel

TINY = mdeq.Size("tiny", (8, 16), (8, 16), image=32, classes=10)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The rows of a quick run of scaling.py, and the folder of its figures."""
    pytest.importorskip("torchdeq.solver")
    folder = tmp_path_factory.mktemp("scaling")
    path = folder / "scaling.json"
    threads = torch.get_num_threads()
    files = ["--json", str(path), "--figure", str(folder)]
    scaling.main(["--quick", "--threads", "1", "--seconds", "1", "--remark", "busy", *files])
    torch.set_num_threads(threads)
    record = read_record(path)
    assert record["remark"] == "--quick: no times to be quoted; busy"
    return record["rows"], folder


def of(rows, **wanted):
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def test_every_size_is_solved_by_both_libraries(quick):
    rows = of(quick[0], section="scaling")
    assert not [row for row in rows if "problem" in row and row["provider"] == "cpp"]
    assert {row["series"] for row in rows} == {
        "batch", "dim, one sample", "dim", "history", "iterations", "threads (1, 256)", "threads (2, 64)"
    }  # fmt: skip
    for name in ("picard", "anderson", "broyden"):
        for provider in ("cpp", "torchdeq"):
            assert [row["batch"] for row in of(rows, series="batch", case=name, provider=provider)] == [1, 4]


def test_rows_of_a_solve_count_what_they_should(quick):
    rows = [row for row in of(quick[0], section="scaling", provider="cpp") if "ms" in row]
    assert rows
    for row in rows:
        state = 4 * row["batch"] * row["dim"]
        assert row["evaluations"] == row["iterations"]
        assert row["ms_min"] <= row["ms"] and math.isclose(row["solve_ms"], row["ms_min"] - row["f_ms"])
        # The rest is a window matrix and a few numbers for every sample.
        beside = 4 * row["batch"] * (row["history"] + 2) * row["history"] + 64 * row["batch"] + 1024
        assert 0 <= row["peak_bytes"] - row["held_bytes"] <= beside
        if row["case"] == "picard":
            assert row["bytes"] == (3 * row["iterations"] - 1) * state
    (row,) = of(rows, series="history", case="anderson", history=4)
    # Steps with windows of 0 to 4 pairs: 8 + 2 n passes each; the sixth value of f is read with its z, without a step.
    assert row["bytes"] == (8 + 10 + 12 + 14 + 16 + 2) * 4 * row["batch"] * row["dim"]


def test_training_memory_grows_with_iterations_only_when_unrolled(quick):
    peaks = {(row["case"], row["iterations"]): row["peak_bytes"] for row in of(quick[0], section="scaling training")}
    state = 4 * 2 * 8 * 4 * 4
    grown = {case: peaks[case, 6] - peaks[case, 2] for case in ("jfb", "implicit", "unrolled")}
    assert grown["unrolled"] >= 4 * 4 * state  # what one residual cell keeps, at least, of four more evaluations
    assert max(grown["jfb"], grown["implicit"]) <= 2 * 4 * state + 4096  # four more pairs, until the window is full


def test_figures_are_drawn(quick):
    for name in ("scaling_time.png", "scaling_memory.png"):
        assert (quick[1] / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (quick[1] / "scaling_time.svg").read_text()


def test_a_wrong_answer_gets_no_time():
    point = scaling.Point("batch", batch=2, dim=64, iterations=6)
    solver = scaling.cases(point)[0].solver
    f = scaling.Contraction(2, 64)
    right = scaling.solve_with(solver, "torch")(f, torch.zeros(2, 64))
    for value, wrong in ((right, False), (2 * right, True), (math.nan * right, True)):
        row = {"provider": "cpp"}
        scaling.check(row, f, value, solver)
        assert ("problem" in row) == wrong


def test_torchdeq_is_left_out_when_time_is_up():
    points = [scaling.Point("batch", batch=1, dim=64, iterations=4, series="batch")]
    copies = [{"threads": 1, "bytes": 1, "bytes_per_s": 1e9}]
    rows = list(scaling.solves(points, copies, 1e-9))
    assert {row["provider"]: "skipped" in row for row in rows} == {"torchdeq": True, "cpp": False}
    assert not [row for row in rows if "gain" in row] and all(scaling.line(row) for row in rows)


def solver_of(side, evaluations):
    """The solver of a side that evaluates f so often; torchdeq's Broyden does once more than it has pairs."""
    if side.solver == "broyden":
        return deqfast.Broyden(scaling.NEVER, evaluations, history=evaluations - (side.provider == "torchdeq"))
    dtype = torch.bfloat16 if side.solver.endswith("bf16") else None
    return deqfast.Anderson(scaling.NEVER, evaluations, history=6, history_dtype=dtype)


SIDES = [side for pair in model.sides(model.Inputs()) for side in pair]


@pytest.mark.parametrize("side", SIDES, ids=lambda side: f"{side.provider}-{side.solver}")
def test_memory_of_a_solve_is_the_models(side):
    provider = "cpp" if side.provider == "deqfast" else "torchdeq"
    if provider == "torchdeq":
        pytest.importorskip("torchdeq.solver")
    solver = solver_of(side, 12)
    if provider == "cpp" and isinstance(solver, deqfast.Broyden):
        solver = replace(solver, kind="bad")  # which keeps pairs on every kernel; the model is of a GPU
    solve = scaling.solve_with(solver, provider)
    f, z0 = scaling.Contraction(2, 8192), torch.zeros(2, 8192)
    assert counters.memory(lambda: solve(f, z0))[1] / z0.nbytes == pytest.approx(side.held(12), rel=0.02)
    assert f.calls == 12


@pytest.mark.parametrize("evaluations", [6, 14])
@pytest.mark.parametrize("side", [side for side in SIDES if side.provider == "torchdeq"], ids=lambda side: side.solver)
def test_bytes_of_torchdeq_are_the_models(side, evaluations):
    pytest.importorskip("torchdeq.solver")
    f, z0 = scaling.Contraction(2, 16384), torch.zeros(2, 16384)
    solve = scaling.solve_with(solver_of(side, evaluations), "torchdeq")
    own = evaluations * sum(moved for _, moved in model.Work.of(lambda: f(z0)).operations)
    moved = sum(moved for _, moved in model.Work.of(lambda: solve(f, z0)).operations) - own
    assert moved / z0.nbytes == pytest.approx(side.solve_passes(evaluations), rel=0.01)


def test_passes_of_deqfast_are_its_formula():
    (_, anderson), (_, broyden) = model.sides(model.Inputs())  # (torchdeq, deqfast) each
    # bf16: 7 + n passes with windows of 0, 1, 2, ...; fp32: 8 + 2 n. The last value of f is judged, by 2 passes.
    assert anderson.solve_passes(9) == 2 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 13
    assert broyden.solve_passes(5) == 2 + 8 + 10 + 12 + 14


def test_window_is_the_solvers():
    bad = [deqfast.Broyden(max_iter=n, kind="bad") for n in (9, 30)]  # keeps pairs on every kernel
    for solver in (*bad, deqfast.Anderson(max_iter=30)):
        state = solver.init(torch.zeros(1, 4), choose_kernel("torch", torch.device("cpu")))
        assert traffic.window(solver) == state.df.shape[1]


MACHINE = model.Machine(
    copy_rate=100.0, product_rate=1000.0, efficiency=0.5, per_node=4, node_rate=10.0, network_rate=1.0
)


def test_work_takes_the_longer_of_bytes_and_arithmetic():
    work = model.Work(((0, 200), (1000, 100), (100, 100)))
    # 2 s of bytes; 2 s of arithmetic against 1 s; 0.2 s of arithmetic against 1 s of bytes
    assert work.seconds(MACHINE) == pytest.approx(5)
    assert work.compute_share(MACHINE) == pytest.approx(2 / 5)
    assert internet_scale.fitted(MACHINE, work, 4.0).efficiency == pytest.approx(1.0, rel=5e-3)


def test_all_reduce_by_hand():
    assert model.all_reduce_seconds(MACHINE, 1, 80.0) == 0
    assert model.all_reduce_seconds(MACHINE, 4, 80.0) == pytest.approx(2 * 3 / 4 * 80 / 10)
    # 16 GPUs, four nodes: within, as above; between, on the quarter that each GPU holds
    assert model.all_reduce_seconds(MACHINE, 16, 80.0) == pytest.approx(12 + 2 * 3 / 4 * 20 / 1)
    for gpus in (0, -1, 6):
        with pytest.raises(ValueError, match=f"gpus must be 1 to 4 or a multiple of 4, got {gpus}"):
            model.all_reduce_seconds(MACHINE, gpus, 80.0)


def test_step_by_hand():
    inputs = replace(model.Inputs(), forward_evaluations=3, backward_evaluations=2, optimizer_bytes=10)
    f, vjp, once = (model.Work(((0, moved),)) for moved in (100, 300, 500))
    counts = model.Counts(parameters=20, dim=5, batch=2, f=f, vjp=vjp, gradient=once, saved_bytes=1000)
    side = model.Side("library", "solver", lambda k: 10 + k, lambda n: 4 * n)
    found = model.step(MACHINE, inputs, counts, side, "implicit", 4)
    # A state of 40 bytes; forward 10 + 11 passes, backward 10.
    assert found.solver == pytest.approx(40 * 31 / 100)
    assert found.f == pytest.approx(3 * 1 + 2 * 3)
    assert (found.gradient, found.optimizer) == (5, 2)
    assert found.all_reduce == pytest.approx(2 * 3 / 4 * 4 * 20 / 10)
    assert found.seconds == pytest.approx(12.4 + 9 + 5 + 2 + 12)
    assert found.memory == 14 * 20 + 100 + max(4 * 3 * 40, 1000 + 4 * 2 * 40)
    assert found.bound == "solver"
    assert model.step(MACHINE, inputs, counts, side, "jfb", 1).seconds == pytest.approx(40 * 21 / 100 + 3 + 5 + 2)
    with pytest.raises(ValueError, match="adjoint must be one of implicit, jfb, got 'unrolled'"):
        model.step(MACHINE, inputs, counts, side, "unrolled", 1)


def test_counted_flops_and_parameters_by_hand():
    counts = model.count(TINY, 3)
    # Blocks of two 3x3 convolutions to and from five times the channels; 8 to 16 channels by a 3x3 convolution onto
    # 4x4 pixels, 16 to 8 by a 1x1 convolution on 4x4; a 1x1 convolution of each sum. State: 8 of 8x8, 16 of 4x4.
    blocks = [2 * 9 * 5 * c * c * side**2 for c, side in ((8, 8), (16, 4))]
    products = sum(blocks) + 9 * 8 * 16 * 16 + 16 * 8 * 16 + 8 * 8 * 64 + 16 * 16 * 16
    assert counts.f.flops == 2 * 3 * products
    assert counts.vjp.flops == counts.f.flops  # the product with the transposed convolution, none of the weights
    assert counts.dim == TINY.dim == 8 * 64 + 16 * 16
    assert counts.parameters == sum(p.numel() for p in mdeq.Network(TINY).parameters())
    assert model.count(TINY, 6).f.flops == 2 * counts.f.flops


def test_networks_are_those_of_the_paper():
    found = [sum(p.numel() for p in mdeq.Network(size).parameters()) / 1e6 for size in mdeq.SIZES]
    assert found == pytest.approx([18, 63, 81], rel=0.08)  # Table 2 of the paper, in millions
    assert [size.dim for size in mdeq.SIZES] == [c * (56**2 + 2 * 28**2 + 4 * 14**2 + 8 * 7**2) for c in (32, 80, 88)]


def test_cell_runs_in_a_deq_block():
    torch.manual_seed(0)
    network = mdeq.Network(TINY)
    block = deqfast.DEQBlock(network.cell, deqfast.Anderson(1e-3, 6), deqfast.Implicit(deqfast.Anderson(1e-3, 6)))
    state = block(network.stem(torch.randn(2, 3, 32, 32)), z0=model.unflat(torch.zeros(2, TINY.dim), TINY))
    network.classify(state).square().sum().backward()
    assert [part.shape for part in state] == [(2, 8, 8, 8), (2, 16, 4, 4)]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.fixture(scope="module")
def rows():
    return list(internet_scale.rows_of(model.Machine(), replace(model.Inputs(), batch=4), [TINY]))


def test_model_is_monotone(rows):
    rate = {(r["adjoint"], r["solver"].split()[0], r["provider"], r["gpus"]): r["images_per_second"] for r in rows}
    assert len(rate) == len(rows) == 2 * 2 * 2 * 3
    for (adjoint, solver, provider, gpus), value in rate.items():
        if gpus > 1:
            assert rate[adjoint, solver, provider, 1] < value <= gpus * rate[adjoint, solver, provider, 1]
        assert rate["jfb", solver, provider, gpus] >= value
        assert rate[adjoint, solver, "deqfast", gpus] >= value
    for row in rows:
        by_efficiency = list(row["images_per_second_by_efficiency"].values())
        assert by_efficiency == sorted(by_efficiency)
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["model"] is True
        assert row["epoch_s"] * row["images_per_second"] == pytest.approx(1_281_167)


def test_only_a_whole_run_replaces_the_committed_record(rows, monkeypatch, tmp_path):
    for module, option, name in ((scaling, "--quick", "scaling_cpu"), (internet_scale, "--no-check", "internet_scale")):
        assert module.arguments([]).json == module.RESULTS / f"{name}.json" and module.arguments([option]).json is None
    written = tmp_path / "given.json"
    monkeypatch.setattr(internet_scale, "RESULTS", tmp_path)
    monkeypatch.setattr(internet_scale, "rows_of", lambda *inputs: rows)
    internet_scale.main(["--no-check"])
    assert not list(tmp_path.iterdir())
    internet_scale.main(["--no-check", "--json", str(written)])
    assert read_record(written)["remark"] == "--no-check: nothing was measured"


def test_text_says_that_it_is_a_model(rows):
    machine, inputs = model.Machine(), replace(model.Inputs(), batch=4)
    text = internet_scale.markdown(
        machine, inputs, [*internet_scale.input_rows(machine), *internet_scale.input_rows(inputs), *rows]
    )
    assert all("odel" in line for line in text.splitlines() if line.startswith("#"))
    heads = [above for above, line in zip(text.splitlines(), text.splitlines()[1:], strict=False) if "|---" in line]
    assert heads[0].startswith("| input") and all(head.startswith("| model of") for head in heads[1:])
    assert "**Nothing here was measured on a GPU.**" in text


def test_model_is_checked_against_this_machine():
    rows = internet_scale.check_rows(1, TINY, 2)
    assert [row["case"] for row in rows] == [
        "f", "product with a vector", "solve, anderson m=6 bf16", "solve, broyden", "step, implicit", "step, jfb"
    ]  # fmt: skip
    for row in rows:
        assert row["assumed_over_measured"] == pytest.approx(row["assumed_ms"] / row["ms"])


def test_exponents_are_found_with_their_change():
    square = [(x, 3.0 * x**2) for x in (1, 2, 4, 8, 16)]
    assert scaling_figures.segments(square) == [(1, 16, pytest.approx(2))]
    bent = [(x, max(5.0, 5.0 * x / 16)) for x in (1, 2, 4, 8, 16, 32, 64, 128)]
    (low, turn, flat), (again, high, slope) = scaling_figures.segments(bent)
    assert (low, turn, again, high) == (1, 16, 16, 128)
    measured = [{"section": "scaling", "series": "dim", "axis": "dim", "case": "picard", "provider": "cpp",
                 "dim": 4**k, "solver_ms": 4.0**k} for k in range(7, 11)]  # fmt: skip
    assert [row["text"] for row in scaling_figures.exponents(measured)] == ["1.00 from 16384 to 1048576"]
    assert (flat, slope) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    for curve in ([(1, 1)], [(1, 0), (2, 1)], [(0, 1), (2, 1)]):
        with pytest.raises(ValueError, match="at least two points, all positive"):
            scaling_figures.segments(curve)


def test_history_leaves_the_cache_where_it_is_as_large():
    rows = [{"section": "scaling caches", "case": name, "bytes": size} for name, size in (("L1", 10), ("L2", 1000))]
    shared = {"section": "scaling", "series": "batch", "axis": "batch", "case": "anderson"}
    rows += [shared | {"batch": x, "history_bytes": 125 * x} for x in (1, 4, 16)]
    assert scaling_figures.leaves_cache(rows, "batch", "anderson") == pytest.approx(8)
    assert scaling_figures.leaves_cache(rows[:-1], "batch", "anderson") is None
    assert [(row["case"], row["series"]) for row in scaling.cache_rows(rows)] == [("anderson", "batch")]


@pytest.mark.parametrize(
    ("main", "given", "said"),
    [
        (scaling.main, ["--threads", "0"], "--threads 0: numbers from 1 on"),
        (scaling.main, ["--seconds", "0"], "--seconds 0: more than 0"),
        (scaling.main, ["--figure", "nowhere"], "--figure: nowhere is not a folder"),
        (scaling.main, ["--redraw"], "--redraw needs --figure"),
        (internet_scale.main, ["--threads", "0"], "--threads 0: from 1 on"),
        (internet_scale.main, ["--json", "nowhere/file.json"], "nowhere is not a folder"),
    ],
)
def test_bad_arguments_are_refused(capsys, main, given, said):
    with pytest.raises(SystemExit) as refused:
        main(given)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_rates_are_those_that_gpu_sh_has_recorded_and_else_said_to_be_of_elsewhere(tmp_path):
    path = tmp_path / "h200.json"
    assert model.h200(path) == model.Machine() and "not by gpu.sh" in model.Machine().rates_from
    rows = [{"section": "rates", "case": "copy", "provider": "torch", "bytes": 8e9, "ms": 2.0}]
    data = {"machine": {"gpu": "NVIDIA H200", "commit": "c" * 40}, "rows": rows}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="section rates has no time of bf16"):
        model.h200(path)
    rows.append({"section": "rates", "case": "bf16 product 8192^3", "provider": "torch", "flop": 1.4e12, "ms": 2.0})
    path.write_text(json.dumps(data))
    found = model.h200(path)
    assert (found.copy_rate, found.product_rate) == (4e12, 7e14)
    assert found.rates_from == "rates of the NVIDIA H200 measured by gpu.sh, h200.json, commit ccccccc"
    text = internet_scale.markdown(found, model.Inputs(), internet_scale.input_rows(found))
    assert "Copy 4 TB/s and product 700 TFLOP/s are rates of the NVIDIA H200 measured by gpu.sh" in text
