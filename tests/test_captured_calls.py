"""Captured solves of other callers, as in test_graphs: ``get_deq(cuda_graph=True)``, and the benchmarks."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import cases, traffic
from harness.entry import GRAPHS, Skipped, kernel_of
from harness.maps import make_map
from harness.solves import Replays, solver_name
from recorded import DEVICE, as_graphs  # noqa: F401  # a fixture for every test
from torch import nn

import deqfast
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


class Holder(nn.Module):
    """An input, and a number, where a function may read them: in a module, and in an object."""

    def __init__(self):
        super().__init__()
        self.pair, self.slope = [None], 0.5
        self.own = SimpleNamespace(x=None, slope=0.5)

    def forward(self, z):
        return torch.tanh(self.slope * z + self.pair[0])

    def by_object(self, z):
        return torch.tanh(self.own.slope * z + self.own.x)


X, SLOPE = torch.zeros(0), 0.5
DEFAULTS = [torch.zeros(0)]


def by_global(z):
    return torch.tanh(SLOPE * z + X)


def by_default(z, given=DEFAULTS):
    return torch.tanh(0.5 * z + given[0])


@pytest.mark.parametrize("kind", ["global", "function of globals", "default", "module", "method", "object"])
def test_what_a_function_reads_elsewhere_is_an_input_of_the_replay(kind, monkeypatch):
    captured, eager = (get_deq(f_tol=1e-6, f_max_iter=30, **options) for options in ({"cuda_graph": True}, {}))
    holder = Holder()
    function = {
        "global": by_global,
        "function of globals": lambda z: by_global(z),
        "default": by_default,
        "module": lambda z: holder(z),
        "method": holder.by_object,
        "object": lambda z, own=holder.own: torch.tanh(own.slope * z + own.x),
    }[kind]
    for seed, slope in ((0, 0.5), (1, 0.5), (2, 0.4), (3, -0.0)):
        x = inputs(seed).detach()
        monkeypatch.setitem(globals(), "X", x)
        monkeypatch.setitem(globals(), "SLOPE", slope)
        DEFAULTS[0] = holder.pair[0] = holder.own.x = x
        holder.slope = holder.own.slope = slope
        (value, *_), (expected, *_) = (deq(function, torch.zeros_like(x))[0] for deq in (captured, eager))
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)


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


def compare_replay(solver, shape, provider):
    """A replay against the eager loop by the same kernel, for a contraction with known `eigenvalues`.

    All bits must agree, except where a graph uses other kernels: for windows of more than 8 pairs, and on triton for
    the last of `max_iter` evaluations. There both values must be as near the fixed point as their residuals say.
    """
    try:
        kernel = kernel_of(provider.removesuffix("-graph"), DEVICE).name
    except Skipped as reason:
        pytest.skip(str(reason))
    f = make_map("elementwise", shape, DEVICE, "torch")
    z0, replays = torch.zeros_like(f.c), Replays(solver, kernel)
    eager = deqfast.solve(f, z0, solver, kernel)
    for _ in range(2):  # the second is a replay
        replays(f, z0)
    other, most = replays.last, int(eager.iterations.max())
    assert other.evaluations >= most and torch.equal(other.status, eager.status)
    is_last = kernel == "triton" and most == solver.max_iter
    if isinstance(solver, deqfast.Picard) or not (is_last or traffic.window(solver, kernel) > 8):
        for name in ("value", "iterations", "residual_rel", "residual_abs"):
            assert torch.equal(getattr(eager, name), getattr(other, name)), name
        return
    # |z - z*| <= |g| / (1 - rate). A float32 of g is off by the rounding of f and of the difference.
    rounding = 4 * torch.finfo(torch.float32).eps * eager.value.norm(dim=1)
    apart = (eager.value.double() - other.value).norm(dim=1)
    allowed = (eager.residual_abs + other.residual_abs + rounding) / (1 - f.eigenvalues.abs().max())
    assert (apart <= allowed).all(), "value"


PROVIDERS = GRAPHS if DEVICE == "cuda" else ("cpp-graph",)
SHAPES = (cases.LAST_STAGE, cases.FC, cases.SINGLE) if DEVICE == "cuda" else ((3, 32),)
solvers = pytest.mark.parametrize("solver", cases.SOLVERS, ids=solver_name)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limits", [{"max_iter": 20}, {"rtol": 1e-2, "max_iter": 19}], ids=["all", "early stop"])
@solvers
def test_a_replay_has_the_bits_of_the_loop(solver, limits, shape, provider):
    compare_replay(replace(solver, **limits), shape, provider)


@solvers
def test_a_replay_with_other_bits_is_seen(solver, monkeypatch):
    may_round, solve = isinstance(solver, deqfast.Broyden), deqfast.solve
    factor = 1.5 if may_round else 1 + 1e-7
    monkeypatch.setattr(deqfast, "solve", lambda f, z0, *given: solve(lambda z: f(z) * factor, z0, *given))
    with pytest.raises(AssertionError):
        compare_replay(solver.__class__(1e-2, 19), (3, 32), PROVIDERS[0])
