"""torchdeq's interface: the same numbers where torchdeq is right, the right ones where it is not; trajectories."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from correctness import ITERATES, after_solve, rounding
from own_sums import product
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import deqfast
from deqfast import compat
from deqfast.compat import get_deq

torchdeq = pytest.importorskip("torchdeq")

WIDTH = 8
RADIUS = 0.7
CONDITION = 1 / (1 - RADIUS)


def weight(radius: float = RADIUS, seed: int = 0) -> Tensor:
    """A leaf (WIDTH, WIDTH) of this spectral norm."""
    gaussian = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (gaussian * radius / torch.linalg.matrix_norm(gaussian, 2)).requires_grad_()


def injection(batch: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def iterated(f, z, times=150):
    """z after this number of calls of f."""
    for _ in range(times):
        z = f(z)
    return z


class Call(NamedTuple):
    """What a call gives, the gradients in the weight and the injection of a loss of all states, and its evaluations."""

    states: list[Tensor]
    info: dict[str, Tensor]
    gradients: tuple[Tensor, ...]
    evaluations: int


def call(library, batch=1, given=None, slope=1.0, training=True, **options) -> Call:
    """Call of a layer with these options for tanh(slope z W^T + x)."""
    w, x, calls = weight(), injection(batch), [0]

    def func(z):
        calls[0] += 1
        return torch.tanh(product(slope * z, w) + x)

    layer = library.get_deq(**options).train(training)
    states, info = layer(func, torch.zeros_like(x), solver_kwargs=given)
    made = calls[0]  # an implicit gradient makes more
    loss = sum((i + 1) * z.square().sum() for i, z in enumerate(states))
    return Call(states, info, torch.autograd.grad(loss, [w, x]), made)


def assert_same(ours, theirs, tolerance=ITERATES):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compared(batch=1, given=None, tolerances=(ITERATES, ITERATES), **options) -> tuple[Call, Call]:
    """Our call and torchdeq's, whose states and gradients are the same to these tolerances."""
    ours, theirs = (call(library, batch, given, **options) for library in (compat, torchdeq))
    assert_same(ours.states, theirs.states, tolerances[0])
    assert_same(ours.gradients, theirs.gradients, tolerances[1])
    return ours, theirs


SOLVERS = [
    ("fixed_point_iter", None),
    ("fixed_point_iter", {"tau": 0.8}),
    ("simple_fixed_point_iter", None),
    ("anderson", {"lam": 0.0}),
    ("anderson", {"lam": 0.0, "m": 3}),
    ("broyden", None),
    ("broyden", {"f_max_iter": 7}),
]
STATISTIC = rounding(torch.float32, 8)  # torchdeq keeps them in float32
STATISTICS = "abs_lowest", "rel_lowest", "nstep", "abs_trace", "rel_trace"
GRADIENTS = [{}, {"grad": [4], "tau": 0.8}, {"grad": 4, "sup_gap": 2}, {"grad": 4, "sup_loc": [1]}]


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


# Functions and starts of solves.
PROBLEMS = {
    "contraction": (lambda z: torch.tanh(z @ weight().T + injection(2)), zeros(2, WIDTH)),
    "list": (
        lambda a, b: (torch.tanh(b @ weight()[:, :2].T + injection(3)), 0.5 * torch.sin(a[:, :2])),
        [zeros(3, WIDTH), zeros(3, 2)],
    ),
    "divergence": (lambda z: 2 * torch.sin(5 * z) - 1.5 * z, zeros(1, 3) + 1),
    "growth": (lambda z: z + 1 + 0.1 * torch.sin(9 * z), zeros(2, 1) + 1),
    "no settling": (lambda z: 3 * torch.sin(3 * z @ weight(1.0).T) + 0.1, injection(2).detach()),
    "rest": (lambda z: torch.where(torch.tensor([[True], [False], [True]]), 0.5, torch.cos(z)), zeros(3, 2)),
    "rest of coupled samples": (
        lambda z: torch.stack([0.5 * z[0] + 1, torch.relu(z[0] - 1.5), torch.relu(z[1] - 0.2)]),
        zeros(3, 2),
    ),
}
# The last evaluation is the value where the solver is asked for it, or looks at no residual before; else the best.
LAST = [
    ("simple_fixed_point_iter", {}),
    ("simple_fixed_point_iter", {"tau": 0.7}),
    ("fixed_point_iter", {"return_final": True}),
    ("anderson", {"return_final": True, "lam": 0.0}),
    ("broyden", {"return_final": True}),
]
AT_REST = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 30}
TEN = {"f_solver": "broyden", "f_max_iter": 10, "f_tol": 0.0}
VALUES = [
    ("contraction", {}, TEN),
    ("contraction", {}, TEN | {"eval_factor": 0.5}),
    ("contraction", {}, TEN | {"eval_f_max_iter": 5}),
    ("contraction", {}, {"f_max_iter": 3, "grad": 2, "tau": 0.5}),
    ("list", {}, {"f_max_iter": 15, "f_tol": 0.0, "grad": 2}),
    ("divergence", {}, {"f_max_iter": 9}),
    *[("growth", {}, {"f_max_iter": 9, "f_tol": 1e-9, "f_stop_mode": mode}) for mode in ("abs", "rel")],
    *[("no settling", given, {"f_solver": name, "f_max_iter": n}) for name, given in LAST for n in (7, 9)],
    *[(name, {}, AT_REST) for name in ("rest", "rest of coupled samples")],
    *[(name, {}, AT_REST | {"core": "indexing", "indexing": [3, 7]}) for name in ("rest", "rest of coupled samples")],
]

STATES = [{"n_states": 3}, {"indexing": [2, 5]}, {"indexing": [2, 5], "grad": [1, 2, 3]}]
STEPS = [{"grad": 12}, {"grad": 3, "tau": 0.5}, {"grad": 2, "n_states": 3}]
# With this slope the best iterate of some samples is not the last.
SLOW = {"f_max_iter": 12, "f_tol": 1e-9, "slope": 4.0}
SOLVES = "fixed_point_iter", "anderson", "broyden"
# Batch, keywords of the call, options.
CASES = [
    *[
        (1, None, {"core": core, "f_solver": solver, "f_max_iter": 12, "f_tol": 0.0} | states)
        for core in ("sliced", "indexing")
        for solver in ("fixed_point_iter", "broyden")
        for states in STATES
    ],
    *[
        (5, None, SLOW | {"f_solver": "simple_fixed_point_iter"} | more)
        for more in ({}, {"slope": 1.0}, {"f_solver": "fixed_point_iter"}, {"n_states": 6, "f_max_iter": 42})
    ],
    (5, {"lam": 0.0}, SLOW | {"f_solver": "anderson"}),
    *[(2, {"f_max_iter": 0}, {"f_solver": solver, "f_max_iter": 9} | more) for solver in SOLVES for more in STEPS],
]


class TestTheSameAsTorchdeq:
    @pytest.mark.covering(2)
    @pytest.mark.parametrize("tol", [5e-2, 1e-5, 0.0])
    @pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
    @pytest.mark.parametrize(("solver", "given"), SOLVERS, ids=str)
    def test_solvers_and_gradients(self, solver, given, gradient, tol):
        self.check(1, given, {"f_solver": solver, "f_max_iter": 12, "f_tol": tol, "f_stop_mode": "rel", **gradient})

    @pytest.mark.parametrize(("batch", "given", "options"), CASES, ids=str)
    def test_cases(self, batch, given, options):
        self.check(batch, given, options)

    def check(self, batch, given, options):
        """Compare iterates, stop, value, gradients, evaluations and statistics."""
        ours, theirs = (call(library, batch, given, **options) for library in (compat, torchdeq))
        if (options.get("core"), options["f_solver"]) == ("indexing", "broyden"):  # torchdeq drops its last iterate
            assert_same(ours.states[:-1], theirs.states[:-1])
            return
        assert_same([*ours.states, *ours.gradients], [*theirs.states, *theirs.gradients])
        # Without a solve the steps of the gradient from z0 are all that we make.
        unsolved = (given or {}).get("f_max_iter") == 0
        assert ours.evaluations == (options["grad"] * len(ours.states) if unsolved else theirs.evaluations)
        for name, statistic in theirs.info.items():
            assert ours.info[name].shape == statistic.shape, name
            if name != "sradius":
                torch.testing.assert_close(ours.info[name].double(), statistic.double(), rtol=STATISTIC, atol=ITERATES)

    @pytest.mark.covering(2)
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize(("problem", "given", "options"), VALUES, ids=str)
    @torch.no_grad()
    def test_values_and_statistics(self, problem, given, options, training):
        """Without gradients, where the phantom steps of training are part of the value all the same."""
        func, z0 = PROBLEMS[problem]
        both = []
        for library in (compat, torchdeq):
            states, info = library.get_deq(**options).train(training)(func, z0, solver_kwargs=given)
            both.append([*pytree.tree_leaves(states), *(info[name].double() for name in STATISTICS)])
        assert_same(*both, 1e-6)  # torchdeq adds 1e-8 to the length of a value, and keeps statistics in float32

    @pytest.mark.parametrize(
        ("more", "evaluations"), [({"sup_gap": 1}, 16), ({"sup_gap": 5}, 14), ({"sup_loc": [2, 7]}, 16)], ids=str
    )
    @pytest.mark.parametrize("tau", [1.0, 0.6])
    def test_a_single_chain_of_steps(self, more, evaluations, tau):
        """All states of sup_gap or sup_loc lie on the way of the same steps, of which none is made in vain."""
        ours, theirs = compared(3, grad=12, f_max_iter=4, f_tol=0.0, tau=tau, **more)
        assert ours.evaluations == evaluations <= theirs.evaluations == 16

    @pytest.mark.parametrize("kind", ["ift", "hook_ift"])
    @pytest.mark.parametrize("solver", SOLVES)
    def test_implicit(self, solver, kind):
        """The same gradient passes in evaluation, in which torchdeq has none."""
        options = {"f_solver": solver, "f_tol": 1e-9, "f_max_iter": 80, kind: True}
        options |= {"b_solver": solver, "b_tol": 1e-9, "b_max_iter": 80}
        tolerances = after_solve(1e-9, CONDITION), after_solve(1e-9, CONDITION, derivatives=1)
        ours, _ = compared(4, tolerances=tolerances, **options)
        assert_same(call(compat, 4, training=False, **options).gradients, ours.gradients, tolerances[1])
        with pytest.raises(RuntimeError):
            call(torchdeq, 4, training=False, **options)

    @pytest.mark.parametrize("solver", ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"])
    @pytest.mark.parametrize("more", [{}, {"n_states": 2}, {"f_stop_mode": "rel", "f_tol": 1e-3}], ids=str)
    def test_devices_that_are_not_waited_for(self, solver, more, monkeypatch):
        """There the samples are chosen without a look at the mask."""
        options = {"f_solver": solver, "f_max_iter": 12, "f_tol": 1e-2, "slope": 4.0, **more}
        looked = call(compat, 5, **options)
        monkeypatch.setattr("deqfast.compat.torchdeq._surely_all", lambda samples: False)
        blind = call(compat, 5, **options)
        for a, b in zip(looked[:3], blind[:3], strict=True):
            assert all(map(torch.equal, *(each.values() if isinstance(each, dict) else each for each in (a, b))))

    @pytest.mark.parametrize("solver", SOLVES)
    def test_no_solve_in_evaluation(self, solver):
        z0 = injection(2).detach()
        (value,), _ = get_deq(f_solver=solver, f_max_iter=0).eval()(torch.cos, z0)
        assert torch.equal(value, z0) and value.data_ptr() != z0.data_ptr()


@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_in_positions_that_the_call_is_given(training):
    """Of a loss of forces, which are the gradient of an energy. torchdeq's implicit gradient is silently wrong."""
    layer = get_deq(f_solver="broyden", f_tol=1e-12, ift=True, b_solver="broyden", b_tol=1e-12).train(training)
    theirs = torchdeq.get_deq(f_tol=1e-12, f_max_iter=80, ift=True, b_tol=1e-12)

    def derivatives(run):
        w, x = weight(0.6), injection(3)
        energy = run(lambda z, x: torch.tanh(z @ w.T + x), x, torch.zeros_like(x)).square().sum()
        forces = -torch.autograd.grad(energy, x, create_graph=True)[0]
        return torch.autograd.grad((forces - 1).square().sum(), [w, x])

    exact = derivatives(lambda f, x, z0: iterated(lambda z: f(z, x), z0))
    assert_same(derivatives(lambda f, x, z0: layer(f, z0, x=x)[0][-1]), exact, 1e-8)
    wrong = derivatives(lambda f, x, z0: theirs(lambda z: f(z, x), z0)[0][-1])
    assert (wrong[0] - exact[0]).norm() > 0.1 * exact[0].norm()


class TestNames:
    def test_every_public_name_of_torchdeq_is_there(self):
        """Except names that its modules import for their own use."""
        for module in (torchdeq, torchdeq.core, torchdeq.norm, torchdeq.loss, torchdeq.utils, torchdeq.dropout):
            named = getattr(module, "__all__", vars(module))
            public = [
                name
                for name in named
                if name[0] != "_" and getattr(getattr(module, name), "__module__", "").startswith("torchdeq")
            ]
            assert len(public) > 1
            for name in public:
                own = name in compat.__all__
                assert (getattr(compat, name) is getattr(module, name)) != own, name

    @pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(torchdeq.__path__, "torchdeq.")])
    def test_every_submodule_has_a_counterpart(self, name):
        """With all names, private ones too. The layers are deqfast's, and so is what makes them."""
        theirs, ours = import_module(name), import_module(name.replace("torchdeq", "deqfast.compat"))
        assert ours.__name__.startswith("deqfast.compat.") and ours.__doc__ == theirs.__doc__
        assert hasattr(ours, "__path__") == hasattr(theirs, "__path__")
        layers = {**{name: getattr(compat, name) for name in compat.__all__}, "DEQBase": compat.DEQ}
        for each, value in vars(theirs).items():
            if each == "__all__" or not each.startswith("__"):
                expected = sys.modules.get(f"{ours.__name__}.{each}", layers.get(each, value))
                assert getattr(ours, each) is expected, each

    def test_without_torchdeq(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchdeq", None)
        get_deq(f_tol=1e-4)(torch.cos, torch.zeros(2, 3))
        with pytest.raises(ImportError, match="reset_deq belongs to torchdeq: pip install torchdeq"):
            exec("from deqfast.compat import reset_deq")
        with pytest.raises(ImportError, match="reset_dek"):
            exec("from deqfast.compat import reset_dek")

    def test_classes_of_layers(self, monkeypatch):
        for library in (compat, torchdeq.core):
            sliced, indexing = library.get_deq(), library.get_deq(core="indexing")
            assert isinstance(sliced, library.DEQSliced) and not isinstance(sliced, library.DEQIndexing)
            assert isinstance(indexing, library.DEQIndexing) and not isinstance(indexing, library.DEQSliced)
            made = library.DEQIndexing({"f_tol": 0.1, "core": "sliced"}, f_max_iter=3)
            assert isinstance(made, library.DEQIndexing) and (made.f_tol, made.f_max_iter) == (0.1, 3)
        own = type("Own", (compat.DEQSliced,), {})
        monkeypatch.setattr("deqfast.compat.torchdeq._CORES", {})
        compat.register_deq("own", own)
        layer = get_deq(core="own", f_max_iter=7)
        assert type(layer) is own and layer.f_max_iter == 7
        with pytest.raises(NotImplementedError, match="must define forward"):
            compat.DEQ()(torch.cos, zeros(2, 3))

    def test_attributes(self):
        options = {"f_max_iter": 7, "f_tol": 0.1, "f_stop_mode": "rel", "b_max_iter": 5, "b_tol": 0.2}
        ours, theirs = (library.get_deq(eval_factor=2.0, **options) for library in (compat, torchdeq))
        for name in (*options, "b_stop_mode", "eval_f_max_iter"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.f_solver == ours.b_solver == "fixed_point_iter"
        for solver in ("fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"):
            names = {library.get_deq(f_solver=solver).f_solver.__name__ for library in (compat, torchdeq)}
            assert len(names) == 1
        set_later = get_deq(eval_factor=2.0)
        for name, value in options.items():
            setattr(set_later, name, value)
        with pytest.raises(ValueError, match="f_tol must be"):
            set_later.f_tol = -1.0
        assert set_later.options == ours.options
        set_later.eval_f_max_iter, set_later.f_tol = 5, 0.1
        assert set_later.eval_f_max_iter == 5 and ours.eval_f_max_iter == 14
        with pytest.raises(ValueError, match="eval_f_max_iter must be"):
            set_later.eval_f_max_iter = -3
        assert torch.equal(*(layer(torch.cos, torch.zeros(2, 3))[0][0] for layer in (ours, set_later)))


def test_a_function_that_returns_its_own_buffer():
    x = injection(3).detach()
    buffer = torch.zeros_like(x)
    values = []
    for solver in ("simple_fixed_point_iter", "fixed_point_iter"):
        layer = get_deq(f_solver=solver, f_max_iter=40, f_tol=1e-9)
        values.append(layer(lambda z: buffer.copy_(torch.tanh(0.5 * z + x)), torch.zeros_like(x))[0][0].clone())
    torch.testing.assert_close(*values)


class TestWhereTorchdeqIsWrong:
    @pytest.mark.parametrize("core", ["sliced", "indexing"])
    @pytest.mark.parametrize("solver", ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"])
    def test_a_sample_that_breaks_down(self, solver, core):
        """The others are what they would be without it, and so is the weight's gradient."""

        def run(library, batch):
            w, x, calls = weight(), injection(4)[:batch], [0]

            def func(z):
                calls[0] += 1
                value = torch.tanh(z @ w.T + x)
                return torch.where(torch.arange(batch)[:, None] == 3, torch.nan, value) if calls[0] > 4 else value

            layer = library.get_deq(f_solver=solver, f_tol=1e-8, core=core)
            states, info = layer(func, torch.zeros_like(x))
            return states[-1], info["rel_lowest"], torch.autograd.grad(states[-1][:3].sum(), w)[0], calls[0]

        with pytest.warns(UserWarning, match="1 of 4 samples ended with NONFINITE") as warned:
            value, residual, gradient, calls = run(compat, 4)
        alone = run(compat, 3)
        assert len(warned) == 1 and bool(value.isfinite().all())
        assert_same([value[:3], gradient], [alone[0], alone[2]], after_solve(1e-8, CONDITION, derivatives=1))
        if solver == "simple_fixed_point_iter":  # which looks at the last residual only: the sample is as in z0
            assert not bool(value[3].any())
        else:  # at its best iterate
            assert bool(value[3].any()) and bool(residual.isfinite().all()) and calls < 38
        assert not bool(run(torchdeq, 4)[0].isfinite().all())

    def test_spectral_radius_of_a_rotation(self):
        turn = 0.9 * torch.tensor([[0.5, -(0.75**0.5)], [0.75**0.5, 0.5]], dtype=torch.float64)
        z0 = torch.ones(3, 2, dtype=torch.float64)
        radii = [
            library.get_deq(f_max_iter=5).eval()(lambda z: z @ turn.T, z0, sradius_mode=True)[1]["sradius"]
            for library in (compat, torchdeq)
        ]
        torch.testing.assert_close(radii[0], torch.full((3,), 0.9, dtype=torch.float64), rtol=0.02, atol=0)
        assert bool((radii[1] < 0.8).all())


CONFIG = {"core": "indexing", "f_max_iter": 7, "norm_clip_val": 1.0, "lr": 0.1, "jac_loss_freq": 0.2}
ALL_UNUSED = "does not use 'lr', 'norm_clip_val' .did you mean 'norm_clip_value'"
RESEMBLING = "does not use 'norm_clip_val' .did you mean 'norm_clip_value'"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG, ALL_UNUSED),
        (torchdeq.utils.config.DEQConfig(CONFIG), ALL_UNUSED),
        (argparse.Namespace(**CONFIG), RESEMBLING),
        (SimpleNamespace(**CONFIG), RESEMBLING),
    ],
    ids=["dict", "DEQConfig", "Namespace", "object"],
)
def test_a_configuration_that_holds_more(config, message):
    """One warning for all that is not used. A program's other attributes are not named; args.config has all."""
    with pytest.warns(UserWarning, match=message) as warned:
        layer = get_deq(config, f_tol=0.1)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert isinstance(layer, compat.DEQIndexing) and (layer.f_max_iter, layer.f_tol) == (7, 0.1)
    theirs = torchdeq.get_deq(dict(CONFIG), f_tol=0.1).args.config
    assert layer.args.get("jac_loss_freq") == 0.2 and layer.args.get("f_tol") == 0.1
    assert all(layer.args.config[name] == value for name, value in (CONFIG | theirs).items())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["ift", "hook_ift"])
@pytest.mark.parametrize("grad", [4, [4], [3, 2]])
def test_steps_next_to_an_implicit_gradient(kind, grad):
    """The last state has the implicit gradient, whatever grad says: a configuration may hold both."""
    options = {kind: True, "tau": 0.8, "n_states": 2 if grad == [3, 2] else 1}
    options |= {"f_max_iter": 120, "f_tol": 1e-10, "b_max_iter": 120, "b_tol": 1e-10}
    tolerances = after_solve(1e-10, CONDITION), after_solve(1e-10, CONDITION, derivatives=1)
    ours, _ = compared(3, grad=grad, tolerances=tolerances, **options)
    if grad != [3, 2]:
        assert_same(ours.gradients, call(compat, 3, **options).gradients, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_mode": "rel"}, "'stop_mode'; did you mean 'f_stop_mode'"),
        ({"args": {"f_max_iter": 3}, "stop_mode": "rel"}, "'stop_mode'; did you mean 'f_stop_mode'"),
        ({"core": "slice"}, "core must be one of 'sliced', 'indexing', got 'slice'"),
        ({"f_solver": "newton"}, "f_solver must be"),
        ({"b_stop_mode": "relative"}, "b_stop_mode must be"),
        ({"f_max_iter": -1}, "f_max_iter must be"),
        ({"b_max_iter": 0}, "b_max_iter must be"),
        ({"f_tol": -1.0}, "f_tol must be"),
        ({"b_tol": 2.0, "ift": True}, "b_tol must be less than 1"),
        ({"grad": [1, 2]}, "grad must hold"),
        ({"tau": 1.5}, "tau must be"),
        ({"n_states": 41}, "at most f_max_iter"),
        ({"indexing": [5, 3]}, "must ascend"),
        ({"indexing": [40]}, "below f_max_iter"),
        ({"grad": 2, "sup_gap": 3}, "within the 2 steps"),
        ({"m": 4}, "solver_kwargs"),
        ({"sup_loc": 3}, "sup_loc must be a list .*, got 3"),
        ({"solver_kwargs": {"tau": 3.0}}, "tau must be"),
        ({"f_solver": "anderson", "solver_kwargs": {"m": 1}}, "m must be"),
        ({"solver_kwargs": {"f_max_iter": -1}}, "f_max_iter must be"),
        ({"z_init": 0.0}, "z_init must be a tensor or a list of tensors, got float"),
        ({"z_init": torch.zeros(2, 3, dtype=torch.int64)}, "z_init must be floating-point, got torch.int64"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    z_init, given = options.get("z_init", torch.zeros(2, 3)), options.get("solver_kwargs")
    with pytest.raises((TypeError, ValueError), match=message):
        layer = get_deq(**{name: value for name, value in options.items() if name not in ("z_init", "solver_kwargs")})
        layer(torch.cos, z_init, solver_kwargs=given)


@pytest.mark.parametrize(
    ("solver", "given", "message"),
    [
        ("fixed_point_iter", {"solver_kwargs": {"m": 4}}, "fixed_point_iter does not use m=4$"),
        ("anderson", {"solver_kwargs": {"beta": 1.0, "lam": 0.0}}, "anderson does not use beta=1.0$"),
        ("broyden", {"solver_kwargs": {"LBFGS_thresh": 4}}, "did you mean 'LBFGS_thres'"),
        ("fixed_point_iter", {"f_max_iter": 3}, "f_max_iter=3; it belongs in solver_kwargs"),
        ("fixed_point_iter", {"backward_write": print}, "backward_write=.*; did you mean 'backward_writer'"),
        ("fixed_point_iter", {"verbose": True}, "verbose=True$"),
    ],
)
def test_keywords_that_are_not_used(solver, given, message):
    """torchdeq drops them without a word; those that are None, as MDEQ's writer, are dropped here too."""
    w, x = weight().detach(), injection(1).detach()

    def called(library):
        return library.get_deq(f_solver=solver)(lambda z: torch.tanh(z @ w.T + x), 0 * x, writer=None, **given)[0]

    with pytest.warns(UserWarning, match=message) as warned:
        ours = called(compat)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert_same(ours, called(torchdeq))


def halved(func, x0, max_iter=50, tol=1e-3, stop_mode="abs", indexing=None, step=0.5, **kwargs):
    """Damped iteration, called as torchdeq calls its solvers; only max_iter stops it."""
    z, states = x0, []
    for k in range(max_iter):
        z = z + step * (func(z) - z)
        states += [z] if k + 1 in (indexing or []) else []
    return z, states or [z], dict(torchdeq.solver_stat_from_final_step(z, func(z), max_iter))


class TestWhatOnlyTorchdeqRuns:
    """A ridge, a line search, and solvers of a program: to the bit, with as many evaluations."""

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        monkeypatch.setattr(torchdeq.solver, "_solvers", dict(torchdeq.solver._solvers))
        compat.register_solver("halved", halved)

    @pytest.mark.parametrize("core", ["sliced", "indexing"])
    @pytest.mark.parametrize(
        ("given", "options"),
        [
            ({"lam": 1e-3, "m": 4}, {"f_solver": "anderson"}),
            ({"ls": True}, {"f_solver": "broyden", "grad": 2, "tau": 0.5}),
            ({"step": 0.7}, {"f_solver": "halved", "n_states": 2}),
            ({"f_max_iter": 5}, {"f_solver": "halved", "eval_factor": 2.0, "ift": True}),
            ({}, {"b_solver": "halved", "ift": True}),
        ],
        ids=str,
    )
    def test_the_same(self, given, options, core):
        ours, theirs = compared(3, given, (0.0, 0.0), core=core, f_max_iter=12, **options)
        assert ours.evaluations == theirs.evaluations
        values = [
            library.get_deq(core=core, **options).eval()(torch.cos, torch.zeros(2, 3), solver_kwargs=given)[0][0]
            for library in (compat, torchdeq)
        ]
        assert torch.equal(*values)

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("kind", [{}, {"ift": True}, {"f_solver": "broyden"}], ids=str)
    def test_an_assigned_function(self, kind, training):
        both = []
        for library in (compat, torchdeq):
            w, layer = weight(), library.get_deq(f_max_iter=9, **kind).train(training)
            layer.f_solver = halved
            states, _ = layer(lambda a, b, w=w: (torch.tanh(product(b, w)) + 1, torch.sin(a)), (zeros(2, WIDTH),) * 2)
            both.append([leaf.detach() for leaf in states[-1]])
            if training:
                both[-1].append(torch.autograd.grad(states[-1][0].sum(), w)[0])
        assert_same(*both, 0.0)

    def test_what_may_be_assigned(self):
        """A function of torchdeq stands for its name, a module is not registered as a part of the layer."""
        layer = get_deq()
        for given, kept in ((torchdeq.get_solver("broyden"), "broyden"), (module := nn.Identity(), module)):
            layer.f_solver = halved
            layer.f_solver = given
            assert layer.f_solver is kept or layer.f_solver == kept
        layer.b_solver = torchdeq.get_solver("anderson")
        assert layer.b_solver == "anderson"
        for name, value in (("b_solver", halved), ("f_solver", 3)):
            with pytest.raises((TypeError, ValueError), match=f"{name} must be one of"):
                setattr(layer, name, value)

    @pytest.mark.parametrize(
        ("options", "given", "message"),
        [
            ({"f_solver": "anderson"}, {"lam": 1e-3}, "lam is run by torchdeq.*leave lam out"),
            ({"f_solver": "broyden"}, {"ls": True}, "ls is run by torchdeq.*leave ls out"),
            ({"f_solver": "halved"}, {}, "f_solver is run by torchdeq"),
            ({"b_solver": "halved", "ift": True}, {}, "b_solver is run by torchdeq"),
        ],
        ids=str,
    )
    def test_errors(self, options, given, message, monkeypatch):
        layer, z0 = get_deq(**options), torch.zeros(2, 3)
        for more in ({"x": z0}, {"groups": "batch"}):
            with pytest.raises(ValueError, match=message):
                layer(lambda z, x=0.0: torch.cos(z) + x, z0, solver_kwargs=given, **more)
        monkeypatch.setitem(sys.modules, "torchdeq", None)
        with pytest.raises(ImportError, match=message):
            layer(torch.cos, z0, solver_kwargs=given)
        with pytest.raises(ValueError, match="f_solver must be one of"):
            get_deq(f_solver="halved")


@pytest.mark.filterwarnings("ignore:deqfast. in a backward solve")
def test_the_backward_solve_is_written_down():
    statistics, w = [], torch.tensor(0.5, requires_grad=True)
    for factor, options in ((1.0, {}), (w, {}), (w, {"b_max_iter": 4, "b_tol": 1e-9})):
        states, _ = get_deq(ift=True, **options)(
            lambda z, factor=factor: 0.5 * factor * z + 1, torch.zeros(2, 3), backward_writer=statistics.append
        )
        if factor is w:
            states[-1].sum().backward()
    assert len(statistics) == 2 and statistics[0]["rel_lowest"].shape == (2,)
    assert statistics[1]["nstep"].tolist() == [4, 4]


class TestTrajectory:
    SOLVER = deqfast.Picard(rtol=1e-9, max_iter=60)
    AT = (1, 2, 4)

    def setup_method(self):
        self.w, self.x = weight(), injection(3)

    def cell(self, z, x):
        return torch.tanh(product(z, self.w) + x)

    def iterate(self, times=150):
        """Picard's by hand: evaluation times + 1 is given it."""
        return iterated(lambda z: self.cell(z, self.x), torch.zeros_like(self.x), times)

    @pytest.mark.parametrize(("adjoint", "steps"), [(deqfast.JFB(), 1), (deqfast.Phantom(3, 0.8), 3)], ids=str)
    def test_each_state_has_its_gradient(self, adjoint, steps):
        states = deqfast.DEQBlock(self.cell, self.SOLVER, adjoint).trajectory(self.x, self.AT)
        damping = getattr(adjoint, "relaxation", 1.0)
        for state, times in zip(states, [n - 1 for n in self.AT] + [150], strict=True):
            iterate = self.iterate(times).detach()
            torch.testing.assert_close(state, iterate, rtol=0, atol=after_solve(1e-9, CONDITION))
            z = iterated(lambda z: (1 - damping) * z + damping * self.cell(z, self.x), iterate, steps)
            ours, by_hand = (
                torch.autograd.grad((iterate * value).sum(), [self.w, self.x], retain_graph=True)
                for value in (state, z)
            )
            assert_same(ours, by_hand, after_solve(1e-9, CONDITION, derivatives=1))

    def test_a_solve_that_ends_before(self):
        """The states after its end are copies of the value."""
        solver = deqfast.Picard(rtol=1e-2, max_iter=50)
        block = deqfast.DEQBlock(self.cell, solver)
        first, late, last, value = block.trajectory(self.x, [1, 40, 50])
        assert torch.equal(late, value) and torch.equal(last, value) and not first.any()
        torch.testing.assert_close(value, block(self.x), rtol=0, atol=0)
        with torch.no_grad():
            states = block.trajectory(self.x, [1, 40, 50])
        assert not any(state.requires_grad for state in states)
        assert len({state.data_ptr() for state in states}) == 4  # a caller may work in place on each
