"""The peers of the benchmarks compute the same as deqfast: only then do their times say anything."""

import pytest
import torch
from harness import collapse, maps, peers, training

import deqfast
from deqfast.testing import GRADIENT, relative_error


@pytest.mark.parametrize("adjoint", ["jfb", "implicit"])
@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (3, 16)], ids=["residual", "fc"])
def test_torchdeqs_layer_has_the_gradient_of_deqfast(adjoint, shape):
    kind = "residual" if len(shape) == 4 else "fc"
    given = training.Layer(kind, shape, adjoint, deqfast.Broyden(1e-12, 80, history=80))
    setup, (exact, _) = training.Setup(given, "torch", "cpu", torch.float64), training.exact_gradient(given)
    gradient, _ = setup.step(peers.torchdeq_layer(setup.cell, given.solver, adjoint))
    # Its backward solve stops at a residual of 1e-6.
    tolerance = GRADIENT if adjoint == "jfb" else 1e-4
    assert relative_error(training.flat(gradient), exact) <= tolerance


def test_the_pseudo_inverse_measures_the_same_neural_collapse():
    features, labels, weight = (t.double() if t.is_floating_point() else t for t in collapse.clusters(60, 9, 3))
    expected = deqfast.neural_collapse(features, labels, weight, kernel="torch")
    found = peers.pinv_collapse(features, labels, weight)
    for name, value in found.items():
        assert value == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert collapse.exact_nc1(features, labels, 3) == pytest.approx(expected.nc1, rel=1e-12)


@pytest.mark.parametrize(
    ("solver", "window"),
    [
        (deqfast.Picard(maps.NEVER, 8), {}),
        (deqfast.Anderson(maps.NEVER, 12, history=4), {"m": 4}),
        (deqfast.Broyden(maps.NEVER, 12), {"LBFGS_thres": 12}),
        (deqfast.Broyden(maps.NEVER, 12, history=5), {"LBFGS_thres": 5}),
    ],
    ids=str,
)
def test_torchdeq_has_the_window_of_the_solver_and_calls_f_as_often(solver, window):
    f = maps.FullyConnected(3, 24)
    f.wide, f.c = f.wide.double(), f.c.double()
    assert peers.torchdeq_method(solver)[0].keywords == window
    peers.torchdeq_solve(solver)(f, torch.zeros(3, 24, dtype=torch.float64))
    assert f.calls == solver.max_iter
