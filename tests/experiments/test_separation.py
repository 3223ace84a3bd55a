"""The separation study compared with closed forms, its frame, and small runs from end to end."""

from __future__ import annotations

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
from separation_study import diagonal, frame, gotu, heatmap, networks, report, saliency, sawtooth, steep
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


def test_verdict_needs_five_seeds_and_a_pooled_p_that_survives_holm():
    def judge(*asked):
        found = compare([Comparison("", "", tasks, "") for tasks in asked])
        return [one.verdict for one in found]

    seeds = [1.0, 1.1, 0.9, 1.05, 0.95]
    unclear = [1.0, -1.1, 0.3, -0.4, 0.2]
    assert judge([[-one for one in seeds]], [seeds], [unclear]) == [HOLDS, FAILS, OPEN]
    assert judge([seeds[:4]], [[-1.0]], [[]]) == [OPEN] * 3
    assert judge([seeds, [-one for one in seeds]]) == [OPEN]  # tasks that contradict each other, pooled
    assert judge([seeds, seeds[:4]]) == [OPEN]
    (broader,) = compare([Comparison("", "", [seeds], "", greater=True)])
    assert broader.verdict == HOLDS
    close = [0.2, 1.0, 0.6, 0.1, 0.9]  # p = 0.03 by itself
    assert judge([close]) == [FAILS] and judge([close], [unclear]) == [OPEN, OPEN]


@pytest.mark.parametrize("rule", diagonal.RULES, ids=lambda rule: rule.name)
def test_flow_ends_at_its_optimum_and_no_other(rule):
    x, truth = diagonal.draw(frame.Unit("d6-n2", 0))
    start = np.full(6, 0.4)
    limit, drift = diagonal.flow(rule, x, x @ truth, start)
    assert drift < 1e-9
    np.testing.assert_allclose(x @ limit, x @ truth, rtol=1e-9)
    assert diagonal.kkt_residual(rule.mirror(limit) - rule.mirror(start), x) < 1e-9
    of_q = diagonal.kkt_residual(start**-3 - limit**-3, x)
    assert of_q < 1e-9 if rule.name == "DEQ" else of_q > 1e-2
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


def test_report_names_units_that_are_missing(small, tmp_path):
    frame.Job(tmp_path, small, "full", frame.Unit("d4-n2", 1)).start()
    text = report.write([small], "full", tmp_path).read_text()
    assert "Not measured: d4-n2-seed0" in text


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

    rates = len(course.rates)
    found = [
        networks.train("", make, Watched(2), course, 3, bound=0.2)[0]
        for make in (partial(networks.DEQ, 1, 4), partial(networks.FNN, 1, 4, 1))
    ]
    half = len(seen) // 2
    assert all(torch.equal(one, other) for one, other in zip(seen[:half], seen[half:], strict=True))
    for one in found:
        assert len(one.trials) == rates and one.steps == (0, 2, 4) and one.largest_weight <= 0.2
        assert len(one.errors["test"]) == 3
    assert found[0].flops > 6 * 4**2  # at least the differentiated evaluation and the readout


def test_sawtooth_section_says_what_is_constant_and_what_is_a_construction():
    sizes = sawtooth.Sizes((1,), (1,), networks.Course(2, 16, (0.01,), 1), 2)
    results = {unit: sawtooth.measure(sizes, unit) for unit in sawtooth.SAWTOOTH.units(sizes)}
    found = sawtooth.section(sizes, results)
    construction, *trained = found.claims
    assert construction.verdict == HOLDS and construction.numbers == "largest error 0.0e+00"
    assert [claim.source for claim in trained] == [frame.RECONSTRUCTION] * 2 + [frame.DERIVED]
    assert all(claim.seeds == 2 for claim in trained) and "Every network's error stays above 0.9 in: k1." in found.notes
    assert all(claim.reason.endswith("no network learns: all errors are above 0.9") for claim in trained[:2])
    assert found.tables[0].rows[0]["network"] == "DEQ" and len(found.tables) == 1
    exact = results[sawtooth.SAWTOOTH.units(sizes)[0]].networks[-1]
    assert exact.name == sawtooth.EXACT_START and exact.errors["test"][0] < 1e-3


def made_up(name, loss, weight=1.0, **errors):
    """A trained network with these last errors."""
    trials, last = (networks.Trial(0.01, loss),), {key: (value,) for key, value in errors.items()}
    return networks.Trained(name, 1, 1.0, trials, (0,), last, weight, 1.0)


def test_steep_verdicts_are_of_one_d_and_need_a_step_that_was_seen():
    sizes = steep.Sizes((6, 20), networks.Course(1, 16, (0.01,), 1), 5)

    def kinds(ending, own, others, largest):
        names = ("DEQ", "FNN, 1 hidden", "FNN, 3 hidden")
        weights = (own, *others)
        return tuple(
            made_up(f"{name}, {ending}", 0.1, weight, mse=0.5, largest=largest * (1 + index / 10))
            for index, (name, weight) in enumerate(zip(names, weights, strict=True))
        )

    def result(task, seed):
        largest = (0.5 if task.startswith("d6") else 0.99) * (1 + seed / 1000)  # at d20 uniform samples miss the step
        free = kinds("free", 1.0 + seed / 100, (2.0, 4.0), largest)
        return steep.Result(0.0, free, 0.5, kinds("bounded", 0.5, (0.5, 0.5), largest))

    found = steep.section(sizes, {unit: result(*unit) for unit in steep.STEEP.units(sizes)})
    verdicts = {claim.claim.split(" ")[0]: claim.verdict for claim in found.claims[1:3]}
    assert verdicts == {"d6:": HOLDS, "d20:": OPEN}
    assert [claim.verdict for claim in found.claims[3:]] == [HOLDS, OPEN]
    assert "0.49 of the DEQ's and 0.25 of the FNN's" in found.claims[3].reason


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
        found = gotu.walsh(gotu.evaluate(coefficients, points))
        expected = torch.zeros_like(found)
        for places, value in coefficients.items():
            expected[sum(2**place for place in places)] = value
            assert gotu.degrees()[sum(2**place for place in places)] == len(places)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
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
    found = gotu.hold_out(rule, 0.8)
    assert found.measured == pytest.approx(found.predicted, rel=gotu.AGREES)
    assert found.measured < 4 * gotu.HELD**2  # of the minimum-degree interpolator


def test_hold_out_from_small_weights_is_the_minimum_degree_interpolators():
    errors = [gotu.predicted_error(rule, 1e-4) for rule in diagonal.RULES[:2]]
    assert errors == pytest.approx([4 * gotu.HELD**2] * 2, rel=1e-3)


def test_features_are_those_of_the_network_and_their_density_is_known():
    x, y = heatmap.Seen().points()
    assert bool(heatmap.TARGET.seen(x).all()) and torch.equal(y, x[:, 0] * x[:, 1])
    network = gotu.DiagonalDEQ(heatmap.D)
    with torch.no_grad():
        network.block.cell.weight[: heatmap.D] = torch.where(torch.arange(heatmap.D) < 5, 1 - 1 / 3.0, 0.0)
    found = heatmap.magnitudes(network, x)  # |β₊ - β₋|: 2 of five features, 0 of the others
    np.testing.assert_allclose(found, [2.0] * 5 + [0.0] * 15, atol=1e-6)
    assert heatmap.density(found) == pytest.approx((0.25, 0.25), abs=1e-6)
    fnn = networks.FNN(heatmap.D, heatmap.D, 3)
    with torch.no_grad():
        fnn[-1].weight.fill_(1.0)
        fnn[-1].bias.zero_()
        assert sum(heatmap.magnitudes(fnn, x)) == pytest.approx(float(fnn(x).mean()))


def verdicts_of(page):
    """Verdict of every claim in the tables of a page."""
    rows = (line.replace("\\", "").split("|") for line in page.read_text().splitlines() if line.startswith("| "))
    found = {cells[1].strip(): cells[2].strip() for cells in rows if len(cells) > 3}
    return {claim: verdict for claim, verdict in found.items() if verdict in (HOLDS, FAILS, OPEN)}


@pytest.mark.parametrize(("preset", "least"), [("full", 20), ("long", 5)])
def test_what_is_committed_is_what_the_records_say(preset, least):
    folder = Path(separation.__file__).parent / "results/separation" / preset
    reported, claims = verdicts_of(folder / "report.md"), {}
    of_runs = frame.recorded(folder, preset, saliency.SALIENCY)
    for experiment in (sawtooth.SAWTOOTH, steep.STEEP, gotu.GOTU, diagonal.DIAGONAL, heatmap.HEATMAP, of_runs):
        if preset in experiment.sizes:
            jobs = [job for job in frame.jobs_of(folder, experiment, preset) if job.finished or preset == "full"]
            section = experiment.section(experiment.sizes[preset], {job.unit: job.record.result for job in jobs})
            claims |= {claim.claim: claim.verdict for claim in section.claims}
            plt.close("all")  # which a report does when it saves them
    assert len(claims) > least and claims.items() <= reported.items()
