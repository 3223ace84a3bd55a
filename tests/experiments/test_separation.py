"""The separation study compared with closed forms, its frame, and small runs from end to end."""

import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import separation
import torch
from runs.options import StudyError
from separation_study import diagonal, frame, gotu, heatmap, networks, report, sawtooth, steep
from separation_study.claims import FAILS, HOLDS, OPEN, Comparison, compare
from solutions import SOLVERS

SMALL = diagonal.Sizes(((4, 2),), (0.5, 1.0), (0.4, 0.2), 1)


@pytest.fixture
def small(monkeypatch, in_this_process):
    """Only the diagonal experiment, of a tiny size."""
    tiny = replace(diagonal.DIAGONAL, sizes={"quick": SMALL, "full": replace(SMALL, seeds=2)})
    monkeypatch.setattr(separation, "EXPERIMENTS", {"diagonal": tiny})
    monkeypatch.setattr(diagonal, "HORIZON", 2.0)
    return tiny


SEEDS, UNCLEAR, CLOSE = [1.0, 1.1, 0.9, 1.05, 0.95], [1.0, -1.1, 0.3, -0.4, 0.2], [0.2, 1.0, 0.6, 0.1, 0.9]
OPPOSITE = [-value for value in SEEDS]


@pytest.mark.parametrize(
    ("comparisons", "verdicts"),
    [
        ([[OPPOSITE], [SEEDS], [UNCLEAR]], [HOLDS, FAILS, OPEN]),
        ([[SEEDS[:4]], [[-1.0]], [[]]], [OPEN] * 3),  # fewer than five seeds
        ([[SEEDS, OPPOSITE]], [OPEN]),  # tasks that contradict each other, pooled
        ([[SEEDS, SEEDS[:4]]], [OPEN]),
        ([[CLOSE]], [FAILS]),  # p = 0.03 by itself
        ([[CLOSE], [UNCLEAR]], [OPEN, OPEN]),  # and after Holm
    ],
)
def test_verdict_needs_five_seeds_and_a_pooled_p_that_survives_holm(comparisons, verdicts):
    judged = compare([Comparison("", "", tasks, "") for tasks in comparisons])
    assert [claim.verdict for claim in judged] == verdicts
    assert compare([Comparison("", "", [SEEDS], "", greater=True)])[0].verdict == HOLDS


@pytest.mark.parametrize("rule", diagonal.RULES, ids=lambda rule: rule.name)
def test_flow_ends_at_its_optimum_and_no_other(rule):
    x, truth = diagonal.draw(frame.Unit("d6-n2", 0))
    start = np.full(6, 0.4)
    limit, drift = diagonal.flow(rule, x, x @ truth, start)
    assert drift < 1e-9
    np.testing.assert_allclose(x @ limit, x @ truth, rtol=1e-9)
    assert diagonal.kkt_residual(rule.mirror(limit) - rule.mirror(start), x) < 1e-9
    q = diagonal.kkt_residual(start**-3 - limit**-3, x)
    assert q < 1e-9 if rule.name == "DEQ" else q > 1e-2
    assert diagonal.kkt_residual(-(start**-3) - limit**-3, x) > 1e-2  # the sign as printed
    if rule.name == "DEQ, JFB":  # minimises Σ[1/β + β/β(0)²]
        assert diagonal.kkt_residual(start**-2 - limit**-2, x) < 1e-9


@pytest.mark.parametrize("rule", diagonal.RULES[:2], ids=lambda rule: rule.name)
def test_descent_through_deqfast_is_of_first_order_and_solves_exactly(rule, monkeypatch):
    monkeypatch.setattr(diagonal, "HORIZON", 10.0)
    x, truth = diagonal.draw(frame.Unit("d4-n2", 0))
    coarse, fine = (diagonal.descend(rule, x, x @ truth, step) for step in (0.2, 0.1))
    assert coarse.distance / fine.distance == pytest.approx(2, rel=0.2)
    assert coarse.drift / fine.drift == pytest.approx(2, rel=0.2)
    assert max(coarse.solver_error, fine.solver_error) < 1e-11


def test_run_writes_a_report_resumes_and_refuses_other_sizes(small, tmp_path, monkeypatch, capsys):
    arguments = ["--out", str(tmp_path), "--jobs", "1", "--experiment", "diagonal"]
    assert separation.main(arguments) == 0
    text = (tmp_path / "quick" / "report.md").read_text()
    assert (tmp_path / "quick" / "report.html").exists() and (tmp_path / "quick" / "figures" / "diagonal.png").exists()
    assert text.count("(derived)") >= 3 and "| does not hold |" in text

    monkeypatch.setattr(frame.Job, "start", lambda *_: pytest.fail("a finished unit is measured again"))
    assert separation.main(arguments) == 0
    assert (tmp_path / "quick" / "report.md").read_text() == text

    other = replace(small, sizes={"quick": replace(SMALL, initials=(2.0,))})
    job = frame.Job(tmp_path / "quick", other, "quick", frame.Unit("d4-n2", 0))
    with pytest.raises(StudyError, match=r"was begun with initials \[0.5, 1.0\], not \[2.0\]"):
        job.outcome()
    job.path.write_bytes(job.path.read_bytes()[:-20])
    assert separation.main(arguments) == 1
    assert f"{job.path} cannot be read" in capsys.readouterr().err
    assert "- Left out: " in (tmp_path / "quick" / "report.md").read_text()


@pytest.mark.parametrize(("k", "solver"), [*product((1, 5), SOLVERS), (10, "picard"), (15, "picard")])
def test_theorem_1_equals_the_sawtooth_bit_by_bit(k, solver):
    assert sawtooth.exact_error(k, SOLVERS[solver](rtol=0, atol=1e-300, max_iter=400)) == 0


def test_sawtooth_has_its_pieces_and_variance():
    x = torch.arange(2**12 + 1, dtype=torch.float64) / 2**12
    y = sawtooth.sawtooth(5, x)
    assert int((y.diff().sign().diff() != 0).sum()) == 2**5 - 1
    assert float(y[:-1].var()) == pytest.approx(sawtooth.VARIANCE, rel=1e-2)


def test_matched_width_is_the_largest_within_the_budget():
    for cost in (networks.count_parameters, networks.FNN.flops):
        width = networks.matched_width(3, 2, 1000, cost)
        assert cost(networks.FNN(3, width, 2)) <= 1000 < cost(networks.FNN(3, width + 1, 2))


def test_trained_networks_see_the_same_samples_and_keep_the_bound():
    seen, course = [], networks.Course(4, 8, (0.01, 0.1), 2)

    class Watched(sawtooth.Sawtooth):
        def batch(self, generator, size):
            x, y = super().batch(generator, size)
            seen.append(x)
            return x, y

    makers = partial(networks.DEQ, 1, 4), partial(networks.FNN, 1, 4, 1)
    deq, fnn = (networks.train("", make, Watched(2), course, 3, bound=0.2)[0] for make in makers)
    half = len(seen) // 2
    assert all(torch.equal(x, same) for x, same in zip(seen[:half], seen[half:], strict=True))
    for trained in (deq, fnn):
        assert len(trained.trials) == len(course.rates) and trained.steps == (0, 2, 4)
        assert trained.largest_weight <= 0.2 and len(trained.errors["test"]) == 3
    assert deq.flops > 6 * 4**2  # at least the differentiated evaluation and the readout


def test_sawtooth_measures_a_construction_and_trained_networks():
    sizes = sawtooth.Sizes((1,), (1,), networks.Course(2, 16, (0.01,), 1), 2)
    results = {unit: sawtooth.measure(sizes, unit) for unit in sawtooth.SAWTOOTH.units(sizes)}
    construction, *trained = sawtooth.section(sizes, results).claims
    assert construction.verdict == HOLDS and construction.numbers == "largest error 0.0e+00"
    assert all(claim.seeds == 2 for claim in trained)
    assert all(claim.reason.endswith("no network learns: all errors are above 0.9") for claim in trained[:2])
    exact = results[sawtooth.SAWTOOTH.units(sizes)[0]].networks[-1]
    assert exact.name == sawtooth.EXACT_START and exact.errors["test"][0] < 1e-3


@pytest.mark.parametrize("d", [6, 20])
def test_steep_function_is_the_fixed_point_of_a_cell_with_small_weights(d):
    assert steep.exact_error(d) < steep.ROUNDING


@pytest.mark.parametrize("concentrated", [False, True])
def test_steep_errors_are_in_units_of_the_zero_functions(concentrated):
    task = steep.Steep(6, concentrated)
    x, y = task.batch(torch.Generator().manual_seed(0), 1_000_000)
    assert float(y.square().mean()) == pytest.approx(task.scale, rel=2e-2)
    assert (x[:, 0] > 1 - task.delta).double().mean() > (0.05 if concentrated else 0)
    assert float(x.min()) >= 0 and float(x.max()) <= 1
    zero = task.errors(lambda x: torch.zeros(len(x), dtype=x.dtype))
    assert zero["mse"] == pytest.approx(1) and zero["largest"] == pytest.approx(1)
    # The error of g/2 + 0.01 under uniform x, by the plain mean of a large sample.
    shifted = task.errors(lambda x: steep.steep(x, task.delta) / 2 + 0.01)["mse"]
    uniform, y = steep.Steep(6, False).batch(torch.Generator().manual_seed(1), 1_000_000)
    assert shifted == pytest.approx(float((y / 2 - 0.01).square().mean() / y.square().mean()), rel=3e-2)


@pytest.mark.parametrize(("name", "error"), [("f1", 4 * (1 + 1.25**2 + 1.5**2)), ("f2", 16.0)])
def test_walsh_coefficients_and_error_of_the_interpolator_are_the_known_ones(name, error):
    target, points = gotu.TARGETS[name], gotu.cube()
    for coefficients in (target.coefficients, target.interpolator):
        expected = torch.zeros(len(points), dtype=points.dtype)
        for places, value in coefficients.items():
            index = sum(2**place for place in places)
            expected[index] = value
            assert gotu.degrees()[index] == len(places)
        torch.testing.assert_close(gotu.walsh(gotu.evaluate(coefficients, points)), expected, rtol=0, atol=1e-13)
    seen = target.seen(points)
    assert float(seen.double().mean()) == {"f1": 0.5, "f2": 0.75}[name]
    errors = gotu.Gotu(target, points, seen).errors(lambda x: gotu.evaluate(target.interpolator, x))
    assert errors["seen"] == 0 and errors["unseen"] == pytest.approx(error)
    x, y = gotu.Gotu(target, points, seen).batch(torch.Generator().manual_seed(0), 100)
    assert bool(target.seen(x).all()) and torch.equal(y, gotu.evaluate(target.coefficients, x))


def test_diagonal_deq_on_both_signs_is_linear():
    network = gotu.DiagonalDEQ(3)
    with torch.no_grad():
        network.block.cell.weight.copy_(1 - 1 / torch.tensor([1.0, 2.0, 3.0, 0.5, 2.0, 1.0], dtype=torch.float64))
        network.bias.fill_(0.25)
        x = gotu.cube(3)
        torch.testing.assert_close(network(x), x @ x.new_tensor([0.5, 0.0, 2.0]) + 0.25)


@pytest.mark.tier("full")
@pytest.mark.parametrize("rule", diagonal.RULES, ids=lambda rule: rule.name)
def test_hold_out_ends_where_the_conserved_quantity_says(rule, monkeypatch):
    monkeypatch.setattr(gotu, "DESCENT", (0.02, 400))
    held = gotu.hold_out(rule, 0.8)
    assert held.measured == pytest.approx(held.predicted, rel=gotu.AGREES)
    assert held.measured < 4 * gotu.HELD**2  # of the minimum-degree interpolator


def test_hold_out_from_small_weights_is_the_minimum_degree_interpolators():
    errors = [gotu.predicted_error(rule, 1e-4) for rule in diagonal.RULES[:2]]
    assert errors == pytest.approx([4 * gotu.HELD**2] * 2, rel=1e-3)


def test_features_are_those_of_the_network_and_their_density_is_known():
    x, y = heatmap.Seen().points()
    assert bool(heatmap.TARGET.seen(x).all()) and torch.equal(y, x[:, 0] * x[:, 1])
    network = gotu.DiagonalDEQ(heatmap.D)
    with torch.no_grad():
        network.block.cell.weight[: heatmap.D] = torch.where(torch.arange(heatmap.D) < 5, 1 - 1 / 3.0, 0.0)
    features = heatmap.magnitudes(network, x)  # |β₊ - β₋|: 2 of five features, 0 of the others
    np.testing.assert_allclose(features, [2.0] * 5 + [0.0] * 15, atol=1e-6)
    assert heatmap.density(features) == pytest.approx((0.25, 0.25), abs=1e-6)
    fnn = networks.FNN(heatmap.D, heatmap.D, 3)
    with torch.no_grad():
        fnn[-1].weight.fill_(1.0)
        fnn[-1].bias.zero_()
        assert sum(heatmap.magnitudes(fnn, x)) == pytest.approx(float(fnn(x).mean()))


@pytest.mark.parametrize(("name", "task"), [("steep", "d12-uniform"), ("sawtooth", "k1"), ("diagonal", "d20-n8")])
def test_claims_name_the_seeds_and_dimensions_that_were_measured(name, task, tmp_path):
    """And a claim and a table without units are left out: only the first problem of `diagonal` has descents."""
    whole = Path(separation.__file__).parent / "results/separation/full" / name
    (tmp_path / name).mkdir()
    for seed in range(2):
        shutil.copy(whole / f"{task}-seed{seed}.json", tmp_path / name)
    again = frame.recorded(tmp_path, "full", separation.EXPERIMENTS[name])
    results = {job.unit: job.record.result for job in frame.jobs_of(tmp_path, again, "full") if job.finished}
    section = again.section(again.sizes["full"], results)
    claims = section.claims
    assert all(table.rows for table in section.tables)
    assert {claim.seeds for claim in claims} == {2} and not any("2^-20" in claim.reason for claim in claims)
    assert claims[0].reason.endswith("at δ = 2^-d for d = 12") == (name == "steep")


@pytest.mark.parametrize("preset", ["full", "long"])
def test_the_committed_report_is_what_the_committed_records_say(preset, tmp_path, monkeypatch):
    folder = tmp_path / preset
    shutil.copytree(Path(separation.__file__).parent / "results/separation" / preset, folder)
    committed = (folder / "report.md").read_text()
    monkeypatch.setattr(report, "png", lambda figure: plt.close(figure) or b"")
    # Records of audio's first seed are not committed.
    experiments = [task for name, task in separation.EXPERIMENTS.items() if preset in task.sizes and name != "audio"]
    again = [frame.recorded(folder, preset, experiment) for experiment in experiments]
    report.write(again, preset, folder, keep=True)
    assert (folder / "report.md").read_text() == committed
