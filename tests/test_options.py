"""What the options of a solve do: groups, scale, per_sample, drop_converged, stop_fn, trace, mixing_fn, Auto.

TWINS holds every option that changes no answer. Of the others each test says what they change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, assert_close, bounds, rounding
from harness.counters import count
from own_sums import product
from solutions import SOLVERS, TIGHT, adjoints, assert_same_solution, on_cpu, some_solvers

from deqfast import (
    JFB,
    SHINE,
    Anderson,
    Auto,
    Broyden,
    DEQBlock,
    Groups,
    Implicit,
    LinearCell,
    MixedAnderson,
    Neumann,
    Phantom,
    Picard,
    Reversible,
    Status,
    Unrolled,
    diagnose,
    fixed_point,
    solve,
)
from deqfast.state.rows import mark_samples

MIX = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
GROUPS = torch.tensor([2, 0, 0, 1, 2, 2, 0])  # neither in order nor equally long
LARGE = 2.0**13  # the power of two next to 1e4
SCALE = {"large": 1e4, "small": 1.0}
RATES = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.7, 0.9])[:, None]
every_adjoint = adjoints("jfb", "implicit", "neumann", "phantom", "reversible", "shine", "unrolled")


def plain(z, x):
    """A contraction of rows of eight numbers."""
    return torch.tanh(product(0.8 * z, MIX.T.to(z.dtype)) + x)


def parts(z):
    """The state as one whose first five numbers are `LARGE` times as large."""
    return {"large": LARGE * z[:, :5], "small": z[:, 5:]}


def joined(z):
    return torch.cat([z["large"] / LARGE, z["small"]], dim=1)


def plain_of_parts(z, x):
    return parts(plain(joined(z), x))


def as_complex(z):
    return torch.view_as_complex(z.unflatten(1, (4, 2)))


def as_real(z):
    return torch.view_as_real(z).flatten(1)


def never(z, value, k):
    return torch.zeros(4, dtype=torch.bool)


class Twin(NamedTuple):
    """Options of a cell that is `plain` in disguise: its state is ``disguised`` and ``bare`` makes it plain again."""

    options: dict[str, Any]
    cell: Callable = plain
    disguised: Callable = lambda z: z
    bare: Callable = lambda z: z

    @property
    def shared(self) -> dict[str, Any]:
        """Options that the plain cell has too."""
        return {name: value for name, value in self.options.items() if isinstance(value, str)}


TWINS = {
    "scale": Twin({"scale": SCALE}, plain_of_parts, parts, joined),
    "complex": Twin({}, lambda z, x: as_complex(plain(as_real(z), x)), as_complex, as_real),
    "groups": Twin({"groups": torch.arange(4)}),
    "stop_fn": Twin({"stop_fn": never}),
    "scale of a group": Twin({"scale": SCALE, "groups": "batch"}, plain_of_parts, parts, joined),
    "trace": Twin({"trace": True}),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
@pytest.mark.parametrize("solver", [Picard(1e-5, 60), Anderson(1e-5, 40), Broyden(1e-5, 40)], ids=repr)
@on_cpu
def test_an_option_that_changes_no_answer(twin, solver, kernel):
    x = torch.randn(4, 8)
    expected = solve(lambda z: plain(z, x), torch.zeros(4, 8), solver, kernel, **twin.shared)
    solution = solve(lambda z: twin.cell(z, x), twin.disguised(torch.zeros(4, 8)), solver, kernel, **twin.options)
    assert expected.converged.all() and torch.equal(twin.bare(solution.value), expected.value)
    assert_same_solution(solution, expected, but=("value", "trace", "trace_rel", "trace_abs"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["scale", "complex", "groups", "scale of a group", "scale, torch.func"])
@every_adjoint
def test_the_gradient_of_an_option_that_changes_no_answer(adjoint, name):
    name, func = name.removesuffix(", torch.func"), name.endswith("func")
    if func and isinstance(adjoint, (SHINE, Neumann, Reversible)):
        pytest.skip("has no derivative there")
    x, weights = torch.randn(2, 4, 8, dtype=torch.float64)

    def gradient(twin):
        options = {"init": lambda x: twin.disguised(torch.zeros_like(x)), "warn": False, **twin.options}
        block = DEQBlock(twin.cell, TIGHT, adjoint, **options)
        if func:
            each = torch.func.vmap(lambda x: twin.bare(block(x)))
            return torch.func.grad(lambda x: (weights * each(x[:, None]).squeeze(1)).sum())(x), None
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad((weights * twin.bare(block(leaf))).sum(), leaf)
        return grad, block.backward_solution and block.backward_solution.evaluations

    (grad, calls), (expected, plain_calls) = gradient(TWINS[name]), gradient(Twin(TWINS[name].shared))
    assert_close(grad, expected, GRADIENT)
    assert calls == plain_calls


class TestGroups:
    """Coupled rows are judged, accelerated and frozen together, in the solve and its gradient."""

    @staticmethod
    def graph(groups, dtype=torch.float64):
        """Mixing matrix (N, N) of norm below 1 within the samples, and injection (N, 3)."""
        generator = torch.Generator().manual_seed(0)
        mixing = torch.rand(len(groups), len(groups), generator=generator, dtype=torch.float64)
        mixing *= groups[:, None] == groups
        mixing *= 0.8 / torch.linalg.matrix_norm(mixing, 2)
        return mixing.to(dtype), torch.randn(len(groups), 3, generator=generator, dtype=torch.float64).to(dtype)

    def test_a_sample_without_rows_and_a_batch_without_samples(self):
        solution = solve(torch.cos, torch.zeros(3, 2), groups=torch.tensor([0, 2, 2]))
        assert solution.status.tolist() == [Status.CONVERGED] * 3 and solution.iterations.tolist()[1] == 1
        for groups in ("batch", torch.zeros(0, dtype=torch.int64)):
            solution = solve(lambda z: z, (torch.zeros(0, 2), torch.zeros(0, 3)), groups=groups)
            assert [part.shape for part in solution.value] == [(0, 2), (0, 3)] and solution.status.shape == (0,)

    @pytest.mark.parametrize("groups", [GROUPS, "batch"], ids=["ragged", "batch"])
    def test_gradients_against_finite_differences(self, groups):
        mixing, x = (t.requires_grad_() for t in self.graph(GROUPS))

        def layer(x, mixing):
            block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + x), TIGHT, Implicit(TIGHT))
            return block(x, groups=groups)

        assert torch.autograd.gradcheck(layer, (x, mixing), **FINITE_DIFFERENCES)

    @pytest.mark.parametrize("adjoint", [JFB(), Implicit(TIGHT), SHINE()])
    def test_a_broken_sample_leaves_no_trace(self, adjoint):
        mixing, x = self.graph(GROUPS)
        x[3] = torch.nan  # all of sample 1
        x.requires_grad_()
        scale = torch.ones((), dtype=x.dtype, requires_grad=True)
        block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + scale * x), TIGHT, adjoint, warn=False)
        z, solution = block(x, z0=torch.zeros_like(x), groups=GROUPS, return_solution=True)
        assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
        x_grad, scale_grad = torch.autograd.grad(z.sum(), (x, scale))
        assert torch.isfinite(scale_grad) and not x_grad[3].any() and x_grad[[0, 1, 2, 4, 5, 6]].all()

    def test_groups_of_the_block_serve_every_call(self):
        mixing, x = self.graph(torch.zeros(6, dtype=torch.int64), torch.float32)

        class Mixed(torch.nn.Module):
            def forward(self, z, x):
                return torch.tanh(product(z.mT, mixing).mT + x)

        options = {"solver": Anderson(max_iter=3), "kernel": "torch", "warn": False}  # an export holds all evaluations
        expected = DEQBlock(Mixed(), **options)(x, groups="batch")
        block = DEQBlock(Mixed(), **options, groups="batch")
        calls = [block, torch.compile(block, backend="eager", fullgraph=True), lambda x: block.trajectory(x, [1])[-1]]
        calls += [torch.export.export(block.eval(), (x,)).module()]
        assert all(torch.equal(call(x), expected) for call in calls)
        for layer, groups, samples in ((block, None, 1), (block, torch.arange(6), 6), (DEQBlock(Mixed()), None, 6)):
            assert len(layer(x, groups=groups, return_solution=True)[1].status) == samples

    @pytest.mark.parametrize("adjoint", [JFB(), Implicit(Broyden(rtol=1e-30, max_iter=5)), SHINE(), Unrolled()])
    def test_groups_made_once_wait_for_nothing(self, adjoint):
        mixing, x = self.graph(GROUPS)
        solver = Broyden(rtol=1e-30, max_iter=5)
        block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + x), solver, adjoint, warn=False)
        x.requires_grad_()

        def waits(groups):
            return count(
                lambda f: torch.autograd.grad(block(x, groups=groups).sum(), x), lambda: None, "cpu"
            ).host_waits

        assert waits(None) == waits(Groups(GROUPS)) < waits(GROUPS)

    def test_the_callers_tensor_may_change_later(self):
        index = torch.tensor([0, 0, 1, 1])
        groups = Groups(index)
        index.zero_()
        assert groups.per_row(torch.tensor([False, True])).tolist() == [False, False, True, True]

    @pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom", "shine"])
    def test_rows_that_are_coupled_without_a_group_are_inconsistent(self, adjoint):
        mixing, x = self.graph(torch.zeros(300, dtype=torch.int64), torch.float32)
        block = DEQBlock(lambda z, x: torch.tanh(1.2 * mixing @ z + x), Anderson(rtol=1e-3), adjoint)
        with pytest.warns(UserWarning, match=r"\d+ samples ended with INCONSISTENT: pass groups= .* warn=False"):
            _, solution = block(x.requires_grad_(), return_solution=True)
        assert Status.INCONSISTENT in solution.status.tolist()
        _, solution = block(x, groups="batch", return_solution=True)
        assert solution.status.tolist() == [Status.CONVERGED]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("absolute", [False, True])
    def test_nothing_is_inconsistent_in_a_cell_that_keeps_its_promise(self, dtype, absolute, recwarn):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        solver = Broyden(**bounds(1e-2 if dtype == torch.bfloat16 else 1e-6, absolute), max_iter=30)
        _, solution = DEQBlock(lambda z, x: torch.tanh(0.5 * z + x), solver)(x, return_solution=True)
        assert solution.converged.all() and not recwarn.list


@pytest.mark.parametrize("keys", [("large", "small"), ("small", "large")])
def test_the_order_of_keys_in_scale_does_not_count(keys):
    """The gradient's evaluation moves the small tensor by half of its size: that is no longer the same map."""

    def cell(z, x):
        moved = 0.5 if torch.is_grad_enabled() else 0.0
        return {"large": 0.5 * z["large"] + 5e3, "small": 0.5 * z["small"] + 0.5 + moved + 0 * x}

    block = DEQBlock(cell, scale={key: SCALE[key] for key in keys}, warn=False)
    x, z0 = torch.ones(2, 8, requires_grad=True), {"large": torch.zeros(2, 8), "small": torch.zeros(2, 8)}
    assert (block(x, z0=z0, return_solution=True)[1].status == Status.INCONSISTENT).all()


def test_the_callers_scale_may_change_later():
    scale = {"a": 1.0, "b": 1.0}
    block = DEQBlock(lambda z, x: {key: 0.5 * z[key] + x for key in z}, scale=scale)
    scale["a"] = -1.0
    assert block.scale == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    "adjoint",
    [Implicit(Anderson(1e-13, 60)), Neumann(60), Phantom(60), Unrolled(60), Reversible(12)],
    ids=lambda adjoint: type(adjoint).__name__,
)
def test_complex_gradients(adjoint):
    """Those of torch's convention: conjugates in the products, for maps that are not holomorphic too."""
    x = torch.randn(1, 2, dtype=torch.complex128, requires_grad=True)
    mix = (0.2 * torch.randn(2, 2, dtype=torch.complex128)).requires_grad_()

    def solved(x, mix):
        def f(z, x, given):
            return torch.tanh(z @ given["mix"]) + 0.1 * z.conj() + 0.3j * x

        z0, solver = torch.zeros_like(x), Picard(1e-13, 200)
        return fixed_point(f, z0, x, {"mix": mix}, solver=solver, adjoint=adjoint, warn=False)

    assert torch.autograd.gradcheck(solved, (x, mix), **FINITE_DIFFERENCES)
    if isinstance(adjoint, (Implicit, Unrolled)):
        assert torch.autograd.gradgradcheck(solved, (x, mix), eps=1e-5, atol=1e-5, nondet_tol=GRADIENT)


class TestSamples:
    """Which tensors of x have rows of samples: what takes the place of a broken sample, and what compaction cuts."""

    def gradients(self, batch, adjoint, transform, size=6):
        """Gradients in what samples share, of a loss of samples 0, 2, 3 and 4 of `batch`; sample 1 breaks down."""
        torch.manual_seed(0)
        shapes = (size, size), (size,), (size, 2), (size + 1, size), (size + 1, size)
        weight, bias, memory, gate, argument = (0.3 * torch.rand(s, dtype=torch.float64) for s in shapes)
        argument[1] = -1.0

        def cell(z, x):
            read = product(torch.softmax(product(z, x["memory"].T), dim=1), x["memory"])
            inner = product(z, x["weight"].T) * x["gate"] + read + x["bias"]
            return 0.5 * torch.tanh(inner) + 0.1 * x["bias"] * x["argument"].log()

        block = DEQBlock(cell, TIGHT, adjoint, warn=False, init=lambda x: torch.zeros_like(x["gate"]))

        def loss(*shared):
            x = dict(zip(("weight", "bias", "memory"), shared, strict=True))
            z = block({**x, "gate": gate[:batch], "argument": argument[:batch]})
            return z[[0, 2, 3, 4]].square().sum()

        if transform:
            return torch.func.grad(loss, (0, 1, 2))(weight, bias, memory)
        shared = [tensor.requires_grad_() for tensor in (weight, bias, memory)]
        return torch.autograd.grad(loss(*shared), shared)

    @pytest.mark.parametrize("transform", [False, True], ids=["autograd", "torch.func"])
    @every_adjoint
    def test_a_batch_as_large_as_the_width_has_the_gradients_of_others(self, adjoint, transform):
        """Each tensor of x then has a row per sample by its shape, whether or not it has them."""
        if transform and isinstance(adjoint, (Reversible, SHINE)):
            pytest.skip("has no derivative in torch.func")
        gradients = self.gradients(6, adjoint, transform)
        assert all(grad.isfinite().all() and grad.any() for grad in gradients)
        for batch in (5, 7):
            assert_close(gradients, self.gradients(batch, adjoint, transform), GRADIENT)

    def test_a_diagnosis_takes_a_sample_from_the_tensors_of_samples(self):
        x = {"weight": 0.1 * torch.randn(5, 5), "shift": torch.randn(5, 5)}
        report = diagnose(DEQBlock(lambda z, x: torch.tanh(z @ x["weight"] + x["shift"])), x, torch.zeros(5, 5))
        assert report.alone is not None and report.alone < 1e-5

    @pytest.mark.parametrize("batch", [5, 6])
    def test_drop_converged_asks_which_tensors_have_rows_at_every_batch_size(self, batch):
        x = {"features": torch.randn(batch, 4, dtype=torch.float64), "weight": torch.zeros(5, 5), "name": "a"}
        with pytest.raises(ValueError, match=f"per_sample=.'features': True, 'weight': {batch == 5}, 'name': False"):
            DEQBlock(lambda z, x: z, drop_converged=True)(x, z0=torch.zeros(batch, 5, dtype=torch.float64))

    def test_the_rule(self):
        square, parameter = torch.zeros(5, 5), torch.nn.Parameter(torch.zeros(5, 2))
        x = [square, torch.zeros(5), torch.zeros(3, 5), torch.tensor(1.0), parameter, torch.eye(5).to_sparse(), "a"]
        assert mark_samples(x, 5) == [None, None, False, False, False, False, False]
        assert mark_samples(square, 5) == [True]  # by itself it is the batch
        assert mark_samples([square, square], 5, [True, False]) == [True, False]


class Spread:
    """f(z) = rate cos(z) + 1: the samples need different numbers of iterations, and f gets the indices of its rows."""

    def __init__(self, device="cpu"):
        self.rate, self.wave = RATES.to(device), torch.linspace(0.5, 1, 16, device=device)
        self.start = torch.zeros(6, 16, device=device)
        self.sizes: list[int] = []

    def __call__(self, z, rows=None):
        self.sizes.append(len(z))
        rate = self.rate if rows is None else self.rate[rows]
        assert len(rate) == len(z)
        return rate * self.wave * torch.cos(z) + 1


class TestDropConverged:
    @pytest.mark.covering(0)
    @some_solvers
    @pytest.mark.parametrize("stops", [False, True])
    def test_the_answer_is_the_same_with_less_work(self, stops, name, kernel, device):
        """To a rule those that the batch has left stand there with their iterate."""
        solutions, fs, last = {}, {}, {}

        def rule(z, value, k):
            last[drops] = z.clone(), value.clone()
            return torch.tensor([k >= 2, k >= 3, *[False] * 4], device=device)

        for drops in (False, True):
            options = {"drop_converged": drops, "stop_fn": rule if stops else None}
            f = fs[drops] = Spread(device)
            solutions[drops] = solve(f, f.start, SOLVERS[name](rtol=1e-5), kernel, **options)
        whole, compact = fs[False].sizes, fs[True].sizes
        assert_same_solution(solutions[True], solutions[False], but=("sample_evaluations",))
        assert solutions[False].sample_evaluations == sum(whole) == solutions[False].evaluations * 6
        assert solutions[True].sample_evaluations == sum(compact) < 0.9 * sum(whole)
        assert compact == sorted(compact, reverse=True) and len(set(compact)) > 1
        if stops:
            assert solutions[True].status[1] == Status.STOPPED
            (z, expected), (_, value) = last.values()
            assert torch.equal(value[1], z[1]) and torch.equal(value[-1], expected[-1])

    def test_f_gets_the_rows_in_the_order_of_memory_and_the_structure_of_the_batch(self, kernel, device):
        seen = []

        def f(z, rows):
            seen.append((z["a"].is_contiguous(memory_format=torch.channels_last), z["b"].dtype, len(z["a"])))
            rate = RATES.to(device) if rows is None else RATES.to(device)[rows]
            return {"a": rate[..., None, None] * torch.cos(z["a"]), "b": 0.1 * rate.double() * z["b"] + 1}

        z0 = {
            "a": torch.zeros(6, 4, 3, 2, device=device).contiguous(memory_format=torch.channels_last),
            "b": torch.zeros(6, 2, dtype=torch.float64, device=device),
        }
        compact = solve(f, z0, Picard(rtol=1e-6, max_iter=60), kernel, drop_converged=True)
        assert all(order and dtype == torch.float64 for order, dtype, _ in seen) and seen[-1][2] < 6
        whole = solve(lambda z: f(z, None), z0, Picard(rtol=1e-6, max_iter=60), kernel)
        assert torch.equal(compact.value["a"], whole.value["a"]) and torch.equal(compact.value["b"], whole.value["b"])

    @pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom"])
    def test_in_a_block_x_is_taken_row_by_row(self, adjoint):
        shift = torch.linspace(0.5, 1, 6)  # of the features, which are as many as the samples
        x, scale = {"rate": RATES, "shift": shift, "note": "kept"}, torch.ones((), requires_grad=True)
        rows, results, sizes = {"rate": True, "shift": False, "note": False}, [], []

        def cell(z, x):
            sizes.append(len(z))
            return scale * x["rate"] * torch.cos(z) + x["shift"]

        for compact in (False, True):
            block = DEQBlock(cell, Anderson(rtol=1e-5), adjoint, drop_converged=compact, per_sample=rows)
            z, solution = block(x, z0=torch.zeros(6, 6), return_solution=True)
            results.append((z, torch.autograd.grad(z.square().sum(), scale)[0], solution.sample_evaluations))
        (z, grad, whole), (compact_z, compact_grad, less) = results
        assert torch.equal(z, compact_z) and torch.equal(grad, compact_grad) and less < whole
        assert sizes[-1] == 6  # the gradient's evaluation holds all samples


def test_residuals_are_traced():
    f = Spread()
    solution = solve(f, f.start, Anderson(rtol=1e-5), trace=True)
    assert solution.trace.shape == (solution.evaluations, 6) and torch.equal(solution.trace[-1], solution.residual)
    assert bool((solution.trace.diff(dim=0) <= 0).all())
    first = f(f.start)
    assert_close(solution.trace[0], (first - f.start).norm(dim=1) / first.norm(dim=1), rounding(torch.float32))
    absolute = solve(f, f.start, Anderson(rtol=0, atol=1e-5), trace=True)
    assert torch.equal(absolute.trace[-1], absolute.residual_abs)


def slow(z):
    return 0.9 * z + 1


class TestStopFn:
    """Rules of the caller's own that end samples."""

    @pytest.mark.parametrize("drop_converged", [False, True])
    @pytest.mark.parametrize("solver", [Picard(1e-6, 50), Anderson(1e-6, 50), Broyden(1e-6, 50)])
    @on_cpu
    def test_each_sample_ends_where_its_rule_says(self, solver, kernel, drop_converged):
        seen, weight, shift = {}, torch.randn(4, 4) / 3, torch.randn(3, 4)

        def rule(z, value, k):
            seen[k] = z.clone()
            assert (z.dtype, value.dtype, len(value)) == (torch.float32, torch.float64, 3)
            return torch.tensor([k == 2, k >= 3, False])

        def f(z, rows=None):
            return torch.sin(product(z.double(), weight.T) + (shift if rows is None else shift[rows]))

        options = {"drop_converged": drop_converged}
        unstopped = solve(f, torch.zeros(3, 4), solver, kernel, **options)
        stopped = solve(f, torch.zeros(3, 4), solver, kernel, stop_fn=rule, **options)
        assert stopped.status.tolist() == [Status.STOPPED, Status.STOPPED, Status.CONVERGED]
        assert stopped.iterations[:2].tolist() == [2, 3] and not stopped.converged[:2].any()
        assert torch.equal(stopped.value[0], seen[2][0]) and torch.equal(stopped.value[1], seen[3][1])
        assert torch.equal(stopped.value[2], unstopped.value[2]) and stopped.residual[2] == unstopped.residual[2]
        size, gap = f(stopped.value).norm(dim=1), (f(stopped.value) - stopped.value).norm(dim=1)
        assert ((stopped.residual_abs - gap).abs() <= rounding(torch.float32) * size).all()
        assert ((stopped.residual_rel - gap / size).abs() <= rounding(torch.float32)).all()

    def test_the_solve_ends_with_the_last_sample_and_convergence_and_nan_come_first(self):
        solution = solve(slow, torch.zeros(5, 2), Picard(1e-9, 100), stop_fn=lambda z, v, k: torch.full((5,), k == 7))
        assert solution.evaluations == 7 and (solution.status == Status.STOPPED).all()
        for f, start, status in (
            (torch.cos, torch.full((1, 1), 0.739), Status.CONVERGED),
            (lambda z: z / 0, torch.ones(1, 1), Status.NONFINITE),
        ):
            at_once = solve(f, start, Picard(1e-2), stop_fn=lambda z, value, k: torch.tensor([True]))
            assert at_once.status.tolist() == [status]

    def test_a_block_with_a_rule_has_gradients_and_no_warning(self, recwarn):
        """The rule compares with the value of the call before, as models of recurrent depth do with outputs."""
        x, before = torch.randn(8, 6, requires_grad=True), {}

        def settled(z, value, k):
            before[k] = value.clone()
            return (value - before.get(k - 1, torch.inf)).norm(dim=1) < 1e-2

        value, solution = DEQBlock(LinearCell(6), Picard(1e-7, 60), stop_fn=settled)(x, return_solution=True)
        assert (solution.status == Status.STOPPED).all() and len(set(solution.iterations.tolist())) > 1
        value.sum().backward()
        assert torch.isfinite(x.grad).all() and x.grad.any() and not recwarn.list

    def test_groups_end_as_samples(self):
        groups = Groups(torch.tensor([0, 1, 1, 0]), 4, torch.device("cpu"))
        options = {"groups": groups, "stop_fn": lambda z, value, k: torch.tensor([k == 3, False])}
        solution = solve(slow, torch.zeros(4, 2), "picard", **options)
        assert solution.status.tolist() == [Status.STOPPED, Status.MAX_ITER]
        assert solution.iterations.tolist() == [3, 20] and torch.equal(solution.value[0], solution.value[3])
        assert not torch.equal(solution.value[0], solution.value[1])

    def test_a_rule_may_keep_and_spoil_z_but_not_the_value(self):
        kept, running, expected = [], torch.zeros(3, dtype=torch.bool), solve(slow, torch.zeros(3, 2), Picard(1e-3, 50))
        for rule in (lambda z, value, k: kept.append(z) or running, lambda z, value, k: z.sub_(value) is z and running):
            assert torch.equal(solve(slow, torch.zeros(3, 2), Picard(1e-3, 50), stop_fn=rule).value, expected.value)
        assert torch.equal(kept[1], slow(kept[0])) and not kept[0].any()
        with pytest.raises(ValueError, match="stop_fn must not modify its argument value"):
            solve(slow, torch.zeros(3, 2), stop_fn=lambda z, value, k: value.mul_(2).sum(dim=1) > 3)


class Map:
    """tanh(W z) + b of B samples of 12 numbers, each with its own W; the first is the steepest."""

    def __init__(self, batch=3, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(batch, 12, 12, dtype=torch.float64, generator=generator)
        rates = torch.tensor([1.5, 0.9, 0.2, 0.6, 0.3][:batch], dtype=torch.float64)
        weight = rates[:, None, None] * weight / torch.linalg.matrix_norm(weight, 2)[:, None, None]
        bias = torch.randn(batch, 12, dtype=torch.float64, generator=generator)
        self.weight, self.bias = weight.to(device), bias.to(device)
        self.start = torch.zeros_like(self.bias)

    def __call__(self, z, rows=None):
        rows = slice(None) if rows is None else rows
        return torch.tanh((self.weight[rows] @ z[..., None])[..., 0]) + self.bias[rows]


class Recorded:
    """A `mixing_fn` with 20 numbers of error a sample and a preconditioner, which keeps what it saw and returned."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(1)
        self.metric = torch.randn(12, 4, 5, dtype=torch.float64, generator=generator).to(device)
        self.preconditioner = torch.linspace(0.5, 1.0, 12, dtype=torch.float64, device=device)
        self.seen = self.error, self.z, self.proposal = [], [], []

    def __call__(self, z, fz):
        error = torch.einsum("bd,dij->bij", fz - z, self.metric)
        proposal = z + self.preconditioner * (fz - z)
        for kept, rows in zip(self.seen, (error.flatten(1), z, proposal), strict=True):
            kept.append(rows.clone().cpu())
        return error, proposal


def pulay(errors, targets):
    """Next iterate of a sample by Pulay's equations, from rows (n, E) and (n, D), and the condition of the errors."""
    # In the plane sum c_i = 1, by orthogonal factors instead of normal equations.
    differences = (errors[1:] - errors[:-1]).T
    gamma = torch.linalg.lstsq(differences, errors[-1:].T, driver="gelsd").solution
    values = torch.linalg.svdvals(differences / differences.norm(dim=0))
    return targets[-1] - (targets[1:] - targets[:-1]).T @ gamma[:, 0], float(values[0] / values[-1])


class TestMixedAnderson:
    """Anderson with the caller's own errors and proposals."""

    @pytest.mark.parametrize(("relaxation", "history"), [(1.0, 2), (0.7, 5)])
    def test_every_step_is_pulays(self, relaxation, history, kernel, device):
        f, mixing = Map(device=device), Recorded(device)
        solver = MixedAnderson(1e-3, 9, history_size=history, relaxation=relaxation, ridge=0.0, mixing_fn=mixing)
        ends = solve(f, f.start, solver, kernel).iterations.tolist()
        compared = frozen = 0
        for k in range(1, len(mixing.z) - 1):
            kept = slice(max(0, k - history), k + 1)
            for i in range(len(f.start)):
                actual = mixing.z[k + 1][i]
                if k + 1 >= ends[i]:
                    assert torch.equal(actual, mixing.z[k][i])
                    frozen += 1
                    continue
                errors, z, proposal = (torch.stack([rows[i] for rows in kind[kept]]) for kind in mixing.seen)
                expected, condition = pulay(errors, z + relaxation * (proposal - z))
                # Normal equations square the condition number.
                bound = rounding(torch.float64, errors.numel()) * condition**2 * float(z.norm())
                assert (actual - expected).norm() <= bound < 1e-6
                compared += 1
        assert compared >= 12 and frozen

    def test_samples_that_are_done_leave_the_batch(self):
        f, sizes = Map(batch=5), []

        def mixing(z, fz, rows=None):
            sizes.append((len(z), None if rows is None else len(rows)))
            metric = f.weight if rows is None else f.weight[rows]
            return ((fz - z)[:, None] @ (metric + torch.eye(12, dtype=torch.float64)))[:, 0], fz

        solver = MixedAnderson(1e-8, 60, mixing_fn=mixing)
        whole = solve(f, f.start, solver)
        assert sizes == [(5, None)] * len(sizes)
        sizes.clear()
        compact = solve(f, f.start, solver, drop_converged=True)
        assert_same_solution(compact, whole, but=("sample_evaluations",))
        assert sizes[0] == (5, None) and sizes[-1][0] == sizes[-1][1] < 5

    def test_gradients_do_not_depend_on_it(self):
        cell, x = LinearCell(6).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        mixed = MixedAnderson(1e-12, 60, mixing_fn=lambda z, fz: ((fz - z) * torch.arange(1.0, 7.0), fz))
        blocks = [DEQBlock(cell, solver, Implicit(Anderson(1e-12, 100))) for solver in (Anderson(1e-12, 60), mixed)]
        assert_close(torch.compile(blocks[1], backend="eager", fullgraph=True)(x), blocks[1](x), GRADIENT)
        assert_close(*(torch.autograd.grad(block(x).square().sum(), x)[0] for block in blocks), GRADIENT)

    def test_a_proposal_that_is_not_finite_ends_its_sample(self):
        f = Map()

        def mixing(z, fz):
            spoiled = torch.where(torch.arange(3)[:, None] == 1, torch.nan, fz)
            return fz - z, spoiled if (fz - z)[1].norm() < 0.1 else fz

        solver = MixedAnderson(1e-6, 60, mixing_fn=mixing)
        healthy = solve(f, f.start, replace(solver, mixing_fn=lambda z, fz: (fz - z, fz)))
        broken = solve(f, f.start, solver)
        assert broken.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
        assert healthy.converged.all() and torch.equal(broken.value[::2], healthy.value[::2])
        assert broken.value.isfinite().all()


def cubic(z, rows=None):
    """A map with one fixed point, which is not finite far from it: Broyden's method leaves many starts unsolved."""
    return torch.where(z.abs() > 3, torch.nan, -2 * z**3 + z - 1)


def test_trajectories_compile_their_solve_once():
    block = DEQBlock(lambda z, x: 0.5 * z + x, drop_converged=True)
    for _ in range(3):
        block.trajectory(torch.ones(2, 3), [1])
    assert len(block._solves._kept) == 1


class TestAuto:
    """The first stage is Broyden, later stages solve the rest, and no sample depends on the others."""

    STARTS = torch.linspace(-2.5, 2.5, 9, dtype=torch.float64)[:, None].repeat(1, 3)

    @pytest.mark.parametrize("wave", [torch.tanh, torch.cos])
    def test_what_broyden_solves_is_the_same(self, wave):
        slopes, z0 = torch.linspace(-2.0, 0.9, 9), torch.zeros(7, 9)
        expected = solve(lambda z: slopes * wave(z) + 1, z0, Broyden(rtol=1e-5, max_iter=60))
        assert bool(expected.converged.all())
        assert_same_solution(solve(lambda z: slopes * wave(z) + 1, z0, Auto(rtol=1e-5, max_iter=60)), expected)

    @pytest.mark.parametrize(
        ("kernel", "options"),
        [("torch", {}), ("cpp", {}), ("cpp", {"drop_converged": True}), ("cpp", {"trace": True})],
        indirect=["kernel"],
        ids=str,
    )
    def test_what_broyden_leaves_is_solved_sample_by_sample(self, options, kernel):
        solver = Auto(rtol=1e-8, max_iter=400)
        left = ~solve(cubic, self.STARTS, Broyden(rtol=1e-8, max_iter=400), kernel).converged
        solution = solve(cubic, self.STARTS, solver, kernel, **options)
        assert left.sum() > 3 and bool(solution.converged.all())
        assert_close(cubic(solution.value), solution.value, 2e-8)
        assert (solution.iterations <= solution.evaluations).all() and solution.evaluations <= 400
        for i in range(0, 9, 4):
            single = solve(cubic, self.STARTS[i : i + 1], solver, kernel, **options)
            for name in ("value", "status", "iterations", "residual_rel", "residual_abs"):
                assert torch.equal(getattr(single, name)[0], getattr(solution, name)[i]), name
            assert single.iterations <= single.evaluations
        if solution.trace is not None:
            assert solution.trace.shape == (solution.evaluations, 9)
            assert torch.equal(solution.trace[-1], solution.residual)

    def test_a_stage_without_progress_ends_after_thirty_evaluations(self):
        """The residual falls in the first stage, and never again."""
        moved = []

        class Watched(Auto):
            def _change_stages(self, state, k):
                super()._change_stages(state, k)
                moved.append((k, state.stage.item()))

        sizes, signs = iter([*(0.7**n for n in range(23)), *[0.7**23] * 97]), torch.tensor([[1.0], [-1.0]])

        def f(z):
            size = next(sizes)
            return z + size * signs[torch.randint(2, (1,))]

        solve(f, torch.ones(1, 4), Watched(rtol=1e-7, max_iter=120))
        assert moved == [(30, 0), (60, 1), (90, 2)]

    def test_a_sample_whose_start_is_broken_is_not_tried_again(self):
        z0 = torch.tensor([[5.0], [0.5]], dtype=torch.float64)
        solution = solve(cubic, z0, Auto(rtol=1e-8, max_iter=400))
        assert solution.status.tolist() == [Status.NONFINITE, Status.CONVERGED] and solution.evaluations < 60

    @on_cpu
    def test_a_stage_does_not_take_its_own_start_for_that_of_the_solve(self, kernel):
        """Far away, where no iterate gains any more, residuals are small only compared with |z|."""
        solver = Auto(max_iter=80, rtol=2e-3)
        assert not bool(solve(lambda z: z + 1 + 1e-3 * z.abs(), torch.zeros(1, 2), solver, kernel).converged.any())

    def test_a_rule_of_the_callers_ends_samples_in_any_stage(self):
        solver = Auto(rtol=1e-8, max_iter=400)
        solution = solve(cubic, self.STARTS, solver, stop_fn=lambda z, fz, k: torch.full((9,), k > 34))
        late = solution.status == Status.STOPPED
        assert late.any() and (late | solution.converged).all()
        unended = solve(cubic, self.STARTS, Auto(rtol=1e-8, max_iter=35))
        assert torch.equal(solution.iterations[late], unended.iterations[late])

    def test_a_block_with_groups_and_gradients(self):
        a = torch.tensor([[0.6], [0.9], [1.1]], dtype=torch.float64, requires_grad=True)
        block = DEQBlock(lambda z, a: cubic(z) + a, Auto(rtol=1e-12, max_iter=600), Implicit(TIGHT))
        z, solution = block(a, z0=self.STARTS[::4, :1].contiguous(), return_solution=True, groups="batch")
        assert solution.converged.all()
        (slope,) = torch.autograd.grad(z.sum(), a)
        assert_close(slope, 1 / (6 * z.detach() ** 2), GRADIENT)
