"""The suite of fixed-point problems: races of solvers, their judgement, and peers that compute the same as deqfast."""

import json
import math

import pytest
import torch
from correctness import GRADIENT, after_solve, relative_error
from harness import collapse, maps, peers, problems, races, trained, training

import deqfast

pytest.importorskip("torchdeq")


def generator():
    return torch.Generator().manual_seed(5)


def test_spectra_have_their_radius_and_are_spread_as_named():
    sizes = torch.linalg.eigvals(problems.gaussian(60, generator(), 0.9)).abs()
    assert float(sizes.max()) == pytest.approx(0.9, rel=1e-9) and float(sizes.min()) < 0.3 * 0.9
    kinds = ((problems.even, -0.9, 0.11), (problems.clustered, -0.9, 0.37), (problems.decaying, -0.72, 0.03))
    for build, low, share in kinds:  # of the eigenvalues above 0.7
        values = torch.linalg.eigvalsh(build(40, generator(), 0.9))
        assert float(values.max()) == pytest.approx(0.9, rel=1e-9)
        assert float(values.min()) == pytest.approx(low, rel=0.02)
        assert float((values > 0.7).double().mean()) == pytest.approx(share, abs=0.03)
    outliers = torch.linalg.eigvals(problems.outliers(200, generator(), 0.5, (-2.5, -1.5, 0.95)))
    assert sorted(outliers[outliers.abs() > 0.7].real.tolist()) == pytest.approx([-2.5, -1.5, 0.95], abs=0.1)


def test_fixed_points_exist_and_residuals_are_of_float64():
    cheap = [name for name, (dim, *_) in problems.MAPS.items() if dim <= 256]
    for problem in (problem for name in cheap for problem in problems.suite(name, batch=2)):
        solver = deqfast.Broyden(1e-11, 300, history_size=300)
        exact = deqfast.solve(problem.exact, problem.z0.double(), solver, "torch").value
        # In float32 residuals below about 1e-8 could not be distinguished from zero.
        assert float(problem.residuals(exact).max()) < 1e-10, problem.name
        assert 1e-10 < float(problem.residuals(exact.float()).max()) < 1e-5, problem.name


HALF = problems.fully_connected("half", 0.5 * torch.eye(2), torch.ones(2, 2))


def stub(values, calls):
    """Solver that calls f `calls` times, and returns `values`."""

    def solve(f, z0):
        for _ in range(calls):
            f(z0)
        return values(z0)

    return races.Provider("stub", "stub", lambda tol: solve)


def test_evaluations_are_counted_and_the_value_of_every_sample_is_judged():
    """A value that is not finite does not reach the tolerance."""
    (right,) = races.measure(HALF, [stub(lambda z: torch.full_like(z, 2), 7)], 1e-3, rounds=2)
    assert (right["evaluations"], right["reached"], right["residual"]) == (7, True, 0.0)
    assert 0 < right["ms_min"] <= right["ms"]
    (wrong,) = races.measure(HALF, [stub(lambda z: z + torch.tensor([[2.0], [1.99]]), 7)], 1e-3, rounds=2)
    assert not wrong["reached"] and "ms" not in wrong and "2.5e-03 after 7" in wrong["skipped"]
    assert HALF.residuals(torch.tensor([[2.0, 2.0], [0.0, 0.0]])).tolist() == [0.0, 1.0]
    for bad in (math.nan, math.inf):
        (row,) = races.measure(HALF, [stub(lambda z, bad=bad: torch.full_like(z, bad), 1)], 1e-3, rounds=1)
        assert not row["reached"] and row["residual"] is None
        json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("provider", races.providers(), ids=lambda provider: provider.name)
def test_every_solver_reaches_the_tolerance_and_may_evaluate_equally_often(provider):
    expanding = problems.fully_connected("expanding", torch.diag(torch.linspace(-1.3, 1.3, 80)), torch.ones(1, 80))
    row = races.judged(expanding, provider, 1e-30)
    assert row["evaluations"] == races.EVALUATIONS and not row["reached"]
    row = races.judged(problems.suite("triangular", batch=2)[0], provider, 1e-3)
    assert row["reached"] and row["evaluations"] < races.EVALUATIONS


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(trained.StudyError, match="not the folder of a finished run"):
        trained.study_cell(tmp_path, None)


@pytest.mark.parametrize("adjoint", ["jfb", "implicit"])
@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (3, 16)], ids=["residual", "fc"])
def test_torchdeqs_layer_has_the_gradient_of_deqfast(adjoint, shape):
    kind = "residual" if len(shape) == 4 else "fc"
    given = training.Layer(kind, shape, adjoint, deqfast.Broyden(1e-12, 80, history_size=80))
    setup, (exact, _) = training.Setup(given, "torch", "cpu", torch.float64), training.exact_gradient(given)
    gradient, _ = setup.step(peers.torchdeq_layer(setup.cell, given.solver, adjoint))
    tolerance = GRADIENT if adjoint == "jfb" else after_solve(1e-6, derivatives=1)  # of its backward solve
    assert relative_error(training.flat(gradient), exact) <= tolerance


def test_the_pseudo_inverse_measures_the_same_neural_collapse():
    features, labels, weight = (t.double() if t.is_floating_point() else t for t in collapse.clusters(60, 9, 3))
    expected = deqfast.neural_collapse(features, labels, weight, kernel="torch")
    for name, value in peers.pinv_collapse(features, labels, weight).items():
        assert value == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert collapse.exact_nc1(features, labels, 3) == pytest.approx(expected.nc1, rel=1e-12)


@pytest.mark.parametrize("solver", [deqfast.Anderson, deqfast.Broyden])
def test_torchdeq_takes_the_window_of_the_solver(solver):
    """torchdeq ignores unknown arguments."""
    f, z0 = maps.FullyConnected(3, 24), torch.zeros(3, 24)
    short, long = (peers.torchdeq_solve(solver(maps.NEVER, 12, history_size=window))(f, z0) for window in (2, 6))
    assert not torch.equal(short, long)
