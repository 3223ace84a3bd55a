"""deepinv's algorithms on deqfast's solvers: their own fixed points and gradients, an image by itself."""

import pytest
import torch
from correctness import after_solve, assert_close, rounding
from torch import nn

from deqfast import Anderson, Picard, Status
from deqfast.compat.deepinv import Equilibrium

deepinv = pytest.importorskip("deepinv")

TIGHT = Anderson(1e-6, 200)
EXACT = TIGHT.tol + rounding(torch.float32)


class Denoiser(nn.Module):
    """A contraction that deepinv takes for a denoiser."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)

    def forward(self, x, sigma):
        return 0.6 * x + 0.2 * torch.tanh(self.conv(x))


def problem(algorithm="PGD", batch=3, **options):
    """A model, measurements of random images blurred along a line, and their physics."""
    torch.manual_seed(1)
    blur = torch.zeros(1, 1, 5, 5)
    blur[..., 2, :] = 0.2
    physics = deepinv.physics.BlurFFT((1, 16, 16), blur)
    prior = deepinv.optim.PnP(denoiser=Denoiser())
    given = {"data_fidelity": deepinv.optim.L2(), "prior": prior, "sigma_denoiser": 0.1, "stepsize": 0.8}
    given |= {"max_iter": 300, "early_stop": True, "lambda_reg": 1.0, "thres_conv": 1e-7, "crit_conv": "residual"}
    model = getattr(deepinv.optim, algorithm)(**given | options)
    return model, physics(torch.rand(batch, 1, 16, 16)), physics


OUTPUT = {"get_output": lambda X: X["est"][0] - 2 * X["est"][1]}


@pytest.mark.parametrize(
    ("algorithm", "options"), [(name, {}) for name in ("PGD", "HQS", "ADMM", "DRS", "PDCP")] + [("ADMM", OUTPUT)]
)
def test_the_fixed_points_and_outputs_are_deepinvs(algorithm, options):
    model, y, physics = problem(algorithm, **options)
    with torch.no_grad():
        restored = Equilibrium(model, TIGHT)
        assert_close(restored(y, physics), model(y, physics), after_solve(EXACT))
    assert restored.solution.converged.all()


@pytest.mark.parametrize("algorithm", ["PGD", "HQS"])
def test_gradients_are_those_of_deepinvs_own_deq(algorithm):
    gradients = []
    for own in (True, False):
        model, y, physics = problem(algorithm, DEQ=True)
        call = model if own else Equilibrium(model, TIGHT, "implicit")
        loss = call(y.requires_grad_(), physics).square().sum()
        leaves = [y, *[p for p in model.parameters() if p.requires_grad]]
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    assert sum(grad is not None and bool(grad.any()) for grad in gradients[0]) > 1
    for a, b in zip(*gradients, strict=True):
        if a is not None and a.norm() > 1e-3:  # the relaxation moves no fixed point
            assert_close(a, b, after_solve(EXACT, derivatives=1))


def test_an_image_by_itself():
    """A broken image spoils no other, and images take the evaluations that they need."""
    model, y, physics = problem(batch=4)
    y[1] = float("nan")
    y[2] *= 0
    restored = Equilibrium(model, Picard(1e-4, 200), warn=False)
    value = restored(y, physics, init=torch.zeros_like(y))
    assert restored.solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED, Status.CONVERGED]
    assert torch.isfinite(value[[0, 2, 3]]).all() and restored.solution.iterations[2] < restored.solution.iterations[0]
    alone = Equilibrium(model, Picard(1e-4, 200))(y[3:], physics, init=torch.zeros_like(y[3:]))
    assert_close(value[3:], alone, after_solve(1e-4))


def test_what_has_no_fixed_point_or_is_no_model():
    with pytest.raises(TypeError, match="model must be a deepinv.optim.BaseOptim, got Linear"):
        Equilibrium(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the model has lists of {'stepsize': 2}"):
        Equilibrium(problem(stepsize=[0.1, 0.2], max_iter=2)[0])
    with pytest.raises(ValueError, match="model must be one of GD, PGD, HQS, ADMM, DRS, CP, got FISTA"):
        Equilibrium(problem("FISTA")[0])
