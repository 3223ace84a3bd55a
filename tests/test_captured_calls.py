"""Captured solves of other callers, as in test_graphs: ``get_deq(cuda_graph=True)``, and the benchmarks."""

import copy
import pickle

import pytest
import torch
from harness import cases, phases
from recorded import DEVICE, as_graphs  # noqa: F401  # a fixture for every test
from torch import nn

from deqfast.compat import get_deq
from deqfast.engine.runners.cuda_graph import Outcome


class Model(nn.Module):
    """tanh(W z + 2 x + shift), the function new in each call; W is an attribute that each call computes."""

    def __init__(self, slope=1.0, **options):
        super().__init__()
        torch.manual_seed(0)
        self.v = nn.Parameter(0.1 * torch.randn(8, 8, dtype=torch.float64, device=DEVICE))
        self.linear = nn.Linear(8, 8, dtype=torch.float64, device=DEVICE)
        del self.linear.weight
        self.deq = get_deq(**{"f_tol": 1e-6, "f_max_iter": 30, "f_stop_mode": "rel"} | options)
        self.slope, self.calls = slope, 0

    def forward(self, x, **options):
        self.linear.weight, nested, slope = self.v + 0, {"x": [2 * x]}, self.slope

        def f(z):
            self.calls += 1
            return torch.tanh(slope * self.linear(z) + nested["x"][0])

        states, info = self.deq(f, torch.zeros_like(x), **options)
        gradients = torch.autograd.grad(sum(state.sum() for state in states), [x, self.v])
        return [*states, *gradients, info["abs_lowest"], info["rel_lowest"]]


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, dtype=torch.float64, generator=generator).to(DEVICE).requires_grad_()


def assert_same(captured, eager, x):
    for own, other in zip(captured(x), eager(x), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-15)  # residuals in another order of sums


@pytest.mark.parametrize("solver", ["fixed_point_iter", "anderson", "broyden"])
@pytest.mark.parametrize(
    "options", [{}, {"ift": True}, {"tau": 0.7, "grad": 3}, {"n_states": 2}, {"f_max_iter": 3}], ids=str
)
def test_each_call_has_the_values_and_gradients_of_its_own_function(solver, options):
    captured, eager = (Model(f_solver=solver, **options, **more) for more in ({"cuda_graph": True}, {}))
    for seed in range(3):
        captured.calls = 0
        assert_same(captured, eager, inputs(seed))
    # A replay calls nothing. Left are the value, which is f's at the iterate, and the gradient's steps.
    per_state = (solver != "broyden") + options.get("grad", 1)
    assert captured.calls == options.get("n_states", 1) * per_state


@pytest.mark.parametrize("core", ["sliced", "indexing"])
def test_a_call_reads_no_number_of_its_solve(core, monkeypatch):
    model = Model(f_solver="anderson", core=core, cuda_graph=True)
    monkeypatch.setattr(Outcome, "has_arrived", lambda outcome: False)
    monkeypatch.setattr(Outcome, "check", lambda outcome: pytest.fail("this waits for the device"))
    model(inputs(0))


def test_another_function_and_another_number_are_captured_again():
    captured, eager = Model(cuda_graph=True), Model()
    for slope in (1.0, 0.5, 1.0):
        captured.slope = eager.slope = slope
        assert_same(captured, eager, inputs(0))
    assert len(captured.deq._captures._calls) == 2
    for again in (copy.deepcopy(captured.deq), pickle.loads(pickle.dumps(captured.deq))):
        assert not again._captures._calls and again.options["cuda_graph"]


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"f_solver": "simple_fixed_point_iter"}, {}, "cannot be combined with simple_fixed_point_iter"),
        ({"core": "indexing", "n_states": 2}, {}, "cannot be combined with core='indexing' with several states"),
        ({}, {"solver_kwargs": {"return_final": True}}, "cannot be combined with return_final=True"),
        ({}, {"groups": "batch"}, "cannot be combined with groups"),
        ({"f_solver": "anderson"}, {"solver_kwargs": {"lam": 1.0}}, "lam is run by torchdeq, which takes no x"),
    ],
)
def test_refusals(options, given, message):
    with pytest.raises(ValueError, match=message):
        Model(cuda_graph=True, **options)(inputs(0), **given)
    with pytest.raises(ValueError, match="cuda_graph must be one of False, True, got 'whole'"):
        get_deq(cuda_graph="whole")


@pytest.mark.parametrize("solver", cases.SOLVERS, ids=str)
def test_the_benchmarks_compare_bits_of_replays(solver, monkeypatch):
    graph = "cuda-graph" if DEVICE == "cuda" else "cpp-graph"
    monkeypatch.setattr(phases, "GRAPHS", (graph,))
    place, asked, run = phases.Place(DEVICE, True, []), solver.__class__(1e-2, 19), phases.deqfast.solve
    for each in (solver, asked):
        assert phases.same_bits(place, each, (3, 32), graph).keys() == {"evaluations"}
    may_round = isinstance(solver, phases.deqfast.Broyden)
    factor, fault = (1.5, "other bits of status") if may_round else (1 + 1e-7, "other bits of value")
    monkeypatch.setattr(phases.deqfast, "solve", lambda f, z0, *given: run(lambda z: f(z) * factor, z0, *given))
    assert phases.same_bits(place, asked, (3, 32), graph)["fault"].startswith(fault)
