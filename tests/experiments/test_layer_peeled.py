"""The layer-peeled study compared with closed forms, its verdicts, and a small run from end to end."""

import json
import math
from decimal import Decimal, localcontext

import layer_peeled
import pytest
import torch
from peeled import theory
from peeled.problem import FEATURES, Problem, cross_entropy, minimise
from peeled.report import local_minima, markdown
from peeled.study import PeeledSettings, describe, run
from study_helpers import EXPERIMENTS

MODELS = ("explicit", "deq")
RESULTS = EXPERIMENTS / "results" / "layer_peeled"
SMALL = ["--classes", "4", "--dimension", "5", "--samples", "2", "--ratio", "2", "--majority", "2", "--steps", "8"]
SMALL += ["--e-w", "10", "--e-h", "0.5", "--ratios", "10", "--seeds", "0"]


def problem(model, features="final", classes=4, e_w=10.0, e_h=0.5, counts=None, dimension=6):
    counts = counts or (3,) * classes
    shares = tuple(n / sum(counts) for n in counts)
    return Problem(model, features, counts, shares, dimension, e_w, e_h)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("features", FEATURES)
def test_start_meets_the_constraints_as_the_paper_states_them(model, features):
    which = problem(model, features, counts=(5, 4, 2, 2))
    point = which.start(3)
    weight = which.weight(point)
    assert weight.square().sum(1).mean().item() == pytest.approx(which.e_w)
    assert which.e_h * torch.linalg.matrix_norm(point.layer).item() == pytest.approx(which.e_h)
    bounded = which.outputs(point) if features == "final" else which.backbone(point)
    torch.testing.assert_close(bounded, point.features * which.radii, rtol=1e-10, atol=1e-12)
    squares = bounded.square().sum(1)
    mean = torch.stack([squares[which.labels == k].mean() for k in range(4)]).mean()
    assert mean.item() == pytest.approx(which.e_h)


def test_gradient_through_the_deq_is_that_of_a_linear_solve():
    which = problem("deq", "backbone", counts=(5, 4, 2, 2))
    point = which.start(2)
    leaves = [part.clone().requires_grad_() for part in point]
    weight, layer, features = leaves
    system = torch.eye(6, dtype=torch.float64) - which.e_h * layer
    h = torch.linalg.solve(system, (features * which.radii).T).T
    logits = h @ weight.T * math.sqrt(4 * which.e_w)
    loss = which.weights @ torch.nn.functional.cross_entropy(logits, which.labels, reduction="none")
    assert which.loss(point).item() == pytest.approx(loss.item(), rel=1e-12)
    for ours, exact in zip(which.gradient(point), torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 60.0])
def test_cross_entropy_keeps_its_digits(scale):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.rand(3, 4, generator=generator, dtype=torch.float64)
    labels = logits.argmax(1)
    for i in range(3):
        with localcontext() as context:
            context.prec = 50
            values = [Decimal(value) for value in logits[i].tolist()]
            exact = sum((value - values[labels[i]]).exp() for value in values).ln()
            difference = exact - Decimal(4).ln()
        close, far = (cross_entropy(logits, labels, flag)[i].item() for flag in (False, True))
        assert close == pytest.approx(float(exact), rel=1e-13)
        assert far == pytest.approx(float(difference), rel=1e-6 if scale == 60 else 1e-13)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("e_w, e_h", [(10.0, 0.5), (0.05, 0.05)])
def test_balanced_optimum_under_final_features_is_the_simplex_etf(model, e_w, e_h):
    which = problem(model, e_w=e_w, e_h=e_h)
    optimum = minimise(which, which.start(0), 400, 1e-7, which.frozen)
    record = describe(which, optimum)
    assert optimum.residual < 1e-5
    assert record["nc"]["nc1"] < 1e-8 and record["nc"]["nc2"] < 1e-3 and record["nc"]["nc3"] < 1e-4
    assert optimum.loss == pytest.approx(theory.closed_form_loss(which, 1.0), rel=1e-8)
    # (22) with the constant of Lemma B.1 is this loss.
    bounds = theory.paper_bounds(problem("explicit", e_w=e_w, e_h=e_h))
    assert bounds["repaired"] == pytest.approx(optimum.loss, rel=1e-8)
    assert bounds["printed"] < 0


def test_the_committed_numbers_give_the_committed_verdicts():
    result = json.loads((RESULTS / "layer_peeled.json").read_text())
    assert json.loads(json.dumps(theory.claims_of(result))) == result["claims"] and len(result["claims"]) == 169
    assert markdown(result) == (RESULTS / "layer_peeled.md").read_text()
    assert not local_minima(result)
    etf = {
        (claim["model"], claim["e_w"]): claim["verdict"] == theory.HOLDS
        for claim in result["claims"]
        if claim["claim"] == "class means form a simplex ETF" and claim["features"] == "backbone"
    }
    assert etf == {("explicit", 0.01): False, ("deq", 0.01): False, ("explicit", 100): False, ("deq", 100): True}
    bounds = [bound["comparisons"]["own optimum"]["models"].values() for bound in result["imbalanced"]["bounds"]]
    met = [model["condition"]["met"] for models in bounds for model in models]
    assert 0 < max(met) < 100, "the condition of NC2 is met for some pairs of classes, not for all"


def test_small_run_from_end_to_end_is_the_same_every_time(tmp_path, capsys):
    assert layer_peeled.main([*SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert {path.name for path in tmp_path.iterdir()} == {"layer_peeled.json", "layer_peeled.md"}
    result = json.loads((tmp_path / "layer_peeled.json").read_text())
    assert {"versions", "machine", "commit", "seconds"} <= result.keys() and result["settings"]["classes"] == 4
    assert [len(result[part]["bounds"]) for part in ("balanced", "imbalanced", "limit")] == [2, 2, 2]
    shared = {"both on the explicit model's h0", "both on the DEQ's h0"}
    assert set(result["imbalanced"]["bounds"][1]["comparisons"]) == {"own optimum"} | shared
    assert result["limit"]["bounds"][0]["rows"][-1]["ratio"] is None
    assert markdown(result) == (tmp_path / "layer_peeled.md").read_text() and "## Verdicts" in printed.out
    again = run(PeeledSettings(**result["settings"]))
    assert json.loads(json.dumps(again["claims"])) == result["claims"]
