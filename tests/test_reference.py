"""The reference ops against literal tables and dense linear algebra: the ground truth of all other kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from correctness import ITERATES, assert_accurate, assert_close, linear, relative_error, rounding
from correctness.states import METHODS, Case, StepsCase, make_state, same_bits, start_state, value_of_f
from deqfast.kernels.constants import ANDERSON_I, ANDERSON_II, BROYDEN_BAD, BROYDEN_GOOD, PIVOT_FLOOR
from solutions import assert_solves

from deqfast import Status
from deqfast.ops import Kernel
from deqfast.ops.steps import PROGRESS, StopRule
from deqfast.ops.steps.reference import solve_window

# (z, f(z), what is given, status)
JUDGED = [
    ([3, 4], [3, 4.25], {}, Status.CONVERGED),
    ([0, 3], [0, 4], {"tol": 0.25}, Status.CONVERGED),  # the tolerance itself
    ([0, 3], [0, 4], {"tol": 1.0, "absolute": True}, Status.CONVERGED),
    ([0, 3], [0, 4], {"tol": 0.24999}, 0),
    ([0, 0], [0, 0], {}, Status.CONVERGED),
    ([3, 4], [0, 0], {}, 0),
    # A tolerance that is met is not enough.
    ([3, 4], [6, 8], {"tol": 0.6, "first": 5.0, "start": 5.0}, Status.CONVERGED),  # |f(z)| = 10 is twice the start
    ([3, 4], [6, 8], {"tol": 0.6, "first": 4.99, "start": 5.0}, 0),  # the residual, 5, is longer than the first one
    ([3, 4], [6, 8], {"tol": 0.6, "first": 49.9, "start": 4.99}, 0),  # outgrown, and less than nine tenths are gone
    ([3, 4], [6, 8], {"tol": 0.6, "first": 50.1, "start": 4.99}, Status.CONVERGED),
    # The reduction asked for is a hundred times the tolerance: 1 + eps 1e7 is 2.2, which must be 1e-4 of the first.
    ([0, 1e7], [0, 1e7 + 1], {"tol": 1e-6, "first": 2.0e4, "start": 1.0}, 0),
    ([0, 1e7], [0, 1e7 + 1], {"tol": 1e-6, "first": 2.4e4, "start": 1.0}, Status.CONVERGED),
    # A residual below the absolute tolerance, tol * offset, needs no reduction.
    ([3, 4], [6, 8], {"tol": 5.01, "absolute": True, "first": 5.5, "start": 0.0}, Status.CONVERGED),
    ([3, 4], [6, 8], {"tol": 0.5, "offset": 10.02, "first": 5.5, "start": 0.0}, Status.CONVERGED),
    # Rounding may hide the residual: eps |f(z)| is 1.2e3, and more of a low precision, whose unit is floor / 8.
    ([0, 1e10], [0, 1e10], {"first": 1e3, "start": 1.0}, 0),
    ([0, 1e10], [0, 1e10], {"first": 1e5, "start": 1.0}, Status.CONVERGED),
    ([0, 100], [0, 100], {"first": 1.0, "start": 1.0}, Status.CONVERGED),
    ([0, 100], [0, 100], {"first": 1.0, "start": 1.0, "stall_floor": 0.0625}, 0),
    # A sample that ran away has a status of its own at the end, also if an earlier iterate met the tolerance.
    ([3, 4], [6, 8], {"tol": 0.6, "first": 5.0, "start": 1.0}, 0),
    ([3, 4], [6, 8], {"tol": 0.6, "first": 5.0, "start": 1.0, "last": True}, Status.ESCAPED),
    ([3, 4], [60, 80], {"tol": 0.88, "first": 5.0, "start": 1.0, "last": True}, Status.ESCAPED),  # the least is 0.875
    ([3, 4], [6, 8], {"tol": 0.4, "last": True}, Status.MAX_ITER),
    # A sample stalls after five iterations without a gain of 5 % below the floor; convergence goes first.
    ([3, 4], [6, 8], {"k": 5, "gain": 0.5, "gain_iteration": 0, "stall_floor": 0.6}, Status.STALLED),
    ([3, 4], [6, 8], {"k": 5, "gain": 0.5, "gain_iteration": 1, "stall_floor": 0.6}, 0),
    ([3, 4], [6, 8], {"k": 5, "gain": 0.5, "gain_iteration": 0, "stall_floor": 0.5}, 0),
    ([3, 4], [6, 8], {"k": 5, "gain": 0.5, "gain_iteration": 0}, 0),
    ([3, 4], [6, 8], {"k": 5, "gain": 0.53, "gain_iteration": 0, "stall_floor": 0.6}, 0),
    ([3, 4], [6, 8], {"k": 5, "gain": 0.5, "gain_iteration": 0, "stall_floor": 0.6, "tol": 0.5}, Status.CONVERGED),
    # The offset is added to the size: 5 / (10 + 2).
    ([3, 4], [6, 8], {"tol": 0.4, "offset": 2.0}, 0),
    ([3, 4], [6, 8], {"tol": 0.42, "offset": 2.0}, Status.CONVERGED),
]
LARGEST = torch.finfo(torch.float32).max

picard_step, multisecant_step = map(Kernel("torch").op, ("picard_step", "multisecant_step"))
NAN, INF = math.nan, math.inf


def monitor() -> dict[str, torch.Tensor]:
    """The records of one sample before its first evaluation."""
    state = start_state(Case(batch=1, size=2))
    return {name: state[name] for name in ("status", "iterations", "residual", "progress", "active")}


class TestPicardStep:
    """One sample of two elements; z = (3, 4) and f(z) = (6, 8) or as said, best = (9, 9)."""

    def step(self, z=(3, 4), fz=(6, 8), k=2, last=False, damping=1.0, **given):
        """What is given beyond z and f(z): rules by name, rows of PROGRESS by name, other records whole."""
        z, fz = torch.tensor([z], dtype=torch.float32), torch.tensor([fz], dtype=torch.float32)
        rule = StopRule(**{"tol": 0.1} | {name: given.pop(name) for name in StopRule._fields if name in given})
        state = monitor()
        for name, value in ({"least": 0.875} | given).items():
            record = state["progress"][PROGRESS.index(name)] if name in PROGRESS else state[name]
            record[:] = torch.tensor(value, dtype=record.dtype).view(-1, *record.shape[1:])
        best = torch.full_like(z, 9.0)
        picard_step(z, fz, best, *state.values(), k, last, *rule, damping)
        after = {name: tensor.flatten().tolist() for name, tensor in state.items()}
        return {"z": z[0].tolist(), "best": best[0].tolist(), **after}

    def test_a_running_sample_takes_the_step(self):
        after = self.step(least=INF)
        assert after["z"] == [6, 8] and after["best"] == [3, 4]
        assert after["residual"] == [0.5, 5.0] and after["progress"] == [0.5, 2.0, INF, INF, 10.0, 0.5]
        assert (after["status"], after["iterations"], after["active"]) == ([0], [3], [1])
        assert self.step(damping=0.5)["z"] == [4.5, 6.0]

    def test_the_last_evaluation_is_judged_only(self):
        after = self.step(last=True)
        assert after["z"] == [3, 4] and after["residual"] == [0.5, 5.0]
        assert after["status"] == [Status.MAX_ITER] and after["active"] == [0]

    @pytest.mark.parametrize(("z", "fz", "given", "status"), JUDGED)
    def test_the_status(self, z, fz, given, status):
        after = self.step(z, fz, **given)
        assert after["status"] == [status] and after["active"] == [status == 0]
        if status == Status.CONVERGED:
            assert after["z"] == after["best"] == z

    @pytest.mark.parametrize("absolute", [False, True])
    def test_the_absolute_residual_chooses_the_best(self, absolute):
        kept = {"residual": [0.9, 4.0], "gain": 0.4, "best_size": 4.4}  # worse relatively, better absolutely
        after = self.step(absolute=absolute, **kept)
        assert after["best"] == [9, 9] and after["status"] == [0]
        assert_close(torch.tensor(after["residual"]), torch.tensor([0.9, 4.0]), rounding(torch.float32))

    def test_what_rounding_may_hide_counts_in_the_best(self):
        kept = {"residual": [0.0, 0.0], "first": 0.0, "start": 0.0, "best_size": 2.0**30}  # f(z) - z has rounded to 0
        assert self.step(**kept)["best"] == [3, 4]  # 5 + 10 eps is less than 2^30 eps

    def test_what_the_first_evaluation_leaves(self):
        assert self.step(k=0)["progress"] == [0.5, 0.0, 5.0, 10.0, 10.0, 0.5]
        assert self.step(fz=[3, 0], k=0)["progress"][2:5] == [4.0, 4.0, 3.0]  # |f(z) - z| is the longer one

    def test_a_gain_is_of_five_percent(self):
        for before, after in ((33 / 64, [33 / 64, 0.0]), (0.53, [0.5, 5.0])):
            assert self.step(k=5, gain=before, gain_iteration=0)["progress"][:2] == after

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_a_value_that_is_not_finite(self, bad):
        kept = {"residual": [0.5, 5.0], "progress": [0.5, 1.0, 5.0, 6.0, 7.0, 0.875]}
        after = self.step(fz=[6, bad], **kept)
        assert after["status"] == [Status.NONFINITE] and after["active"] == [0] and after["iterations"] == [3]
        assert after["z"] == after["best"] == [9, 9] and {name: after[name] for name in kept} == kept

    @pytest.mark.parametrize("scale", [1e-40, 1e-25, 1.0, 1e20, 1e37])
    @pytest.mark.parametrize(("maximum", "absolute"), [(False, 5.0), (True, 4.0)])
    def test_any_scale(self, maximum, absolute, scale):
        after = self.step([3 * scale, 4 * scale], [6 * scale, 8 * scale], maximum=maximum)
        relative, length = after["residual"]
        assert (relative, length / scale) == pytest.approx((0.5, absolute), rel=1e-4) and after["status"] == [0]

    def test_residuals_at_the_ends_of_the_range(self):
        assert self.step([0, 0], [0, 0])["residual"] == [0, 0]
        assert self.step(fz=[0, 0])["residual"] == [LARGEST, 5.0]
        assert self.step([0, 0], [LARGEST, LARGEST])["residual"] == [1.0, LARGEST]
        assert self.step(offset=2.0)["residual"] == [pytest.approx(5 / 12), 5.0]

    @pytest.mark.parametrize("status", [Status.CONVERGED, Status.NONFINITE, Status.STALLED])
    def test_a_finished_sample_is_left_alone(self, status):
        before = {"status": [status], "iterations": [7], "residual": [0.25, 2.0], "active": [0]}
        before |= {"progress": [0.25, 1.0, 4.0, 5.0, 6.0, 0.875]}
        assert self.step(fz=[NAN, 8], **before) == {"z": [3, 4], "best": [9, 9], **before}


class TestWindow:
    """The small solve, against dense linear algebra on the pairs in age order."""

    def window(self, k, history, method, dim=24, seed=0, batch=2):
        """(gram, t, L, Y by age, slots by age) of a random window at iteration k."""
        generator = torch.Generator().manual_seed(seed)
        n = min(k, history)
        slots = [(k - 1 - age) % history for age in range(n)]
        s, y, g = (torch.randn(batch, n or 1, dim, generator=generator, dtype=torch.float64) for _ in range(3))
        y = y * 3 + s  # away from singular
        left = y if method in (BROYDEN_BAD, ANDERSON_II) else s
        df = y + s
        matrix = left @ y.mT
        if method == BROYDEN_GOOD:  # s_i . y_j for i older than j, s_i . Df_j for i newer; age falls with the index
            older = torch.ones(n, n).tril().bool()
            matrix = torch.where(older, matrix, left @ df.mT)
        gram = torch.full((batch, history + 2, history), NAN, dtype=torch.float64)
        for i, a in enumerate(slots):
            for j, b in enumerate(slots):
                gram[:, a, b] = matrix[:, i, j]
            gram[:, history, a] = (left[:, i] ** 2).sum(-1)
            gram[:, history + 1, a] = (y[:, i] ** 2).sum(-1)
        t = torch.full((batch, n), NAN, dtype=torch.float64)
        t[:, slots] = (left @ g[:, :1].mT)[:, :, 0]
        return gram, t, matrix, slots

    def expected(self, matrix, t, slots, method):
        if method == BROYDEN_BAD:  # the newest pair stands first: the oldest is solved from all newer ones
            matrix = matrix.tril()
        gamma = torch.linalg.solve(matrix, t[:, slots, None])[:, :, 0]
        return torch.empty_like(gamma).index_copy_(1, torch.tensor(slots), gamma)

    @pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
    @pytest.mark.parametrize(("k", "history"), [(1, 4), (3, 4), (4, 4), (5, 4), (11, 4), (6, 8), (1, 1), (9, 1)])
    def test_against_a_dense_solve(self, method, k, history):
        gram, t, matrix, slots = self.window(k, history, method)
        gamma = solve_window(gram, t, k, method, 0.0)
        assert gamma.shape == (2, min(k, history))
        assert_close(gamma, self.expected(matrix, t, slots, method), ITERATES)

    @pytest.mark.parametrize("method", [ANDERSON_I, ANDERSON_II])
    def test_the_ridge_is_relative_to_the_lengths_of_the_pairs(self, method):
        gram, t, matrix, slots = self.window(3, 4, method)
        ridge = 0.25
        lengths = gram[:, 4, slots].sqrt(), gram[:, 5, slots].sqrt()
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        diagonal += ridge * lengths[0] * lengths[1] * torch.where(diagonal < 0, -1, 1)
        expected = self.expected(matrix, t, slots, method)
        assert_close(solve_window(gram, t, 3, method, ridge), expected, ITERATES)

    @pytest.mark.parametrize("method", [BROYDEN_GOOD, BROYDEN_BAD])
    def test_broyden_has_no_ridge(self, method):
        gram, t, _, _ = self.window(3, 4, method)
        assert torch.equal(solve_window(gram, t, 3, method, 0.5), solve_window(gram, t, 3, method, 0.0))

    # Not for BROYDEN_BAD: the pivots of its triangular matrix are squared lengths, so only a pair of length zero drops.
    @pytest.mark.parametrize("method", [BROYDEN_GOOD, ANDERSON_I, ANDERSON_II])
    @pytest.mark.parametrize("repeated", [1, 2, 3])
    def test_dependent_pairs_are_dropped_oldest_first(self, method, repeated):
        """Pair `repeated` (by age) repeats the one before it: it and all older ones get no weight."""
        history, k = 4, 9
        gram, t, _, slots = self.window(k, history, method)
        a, b = slots[repeated - 1], slots[repeated]
        gram[:, b] = gram[:, a]
        gram[:, :, b] = gram[:, :, a]
        t[:, b] = t[:, a]
        gamma = solve_window(gram, t, k, method, 0.0)
        kept, dropped = slots[:repeated], slots[repeated:]
        assert (gamma[:, dropped] == 0).all() and (gamma[:, kept] != 0).all()
        matrix = gram[:, kept][:, :, kept]
        assert_close(gamma[:, kept], torch.linalg.solve(matrix, t[:, kept, None])[:, :, 0], ITERATES)

    @pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
    def test_a_newest_pair_of_length_zero_leaves_a_picard_step(self, method):
        gram, t, _, slots = self.window(4, 4, method)
        newest = slots[0]
        gram[:, newest] = gram[:, :, newest] = 0
        t[:, newest] = 0
        assert (solve_window(gram, t, 4, method, 0.0) == 0).all()

    def test_pivots_just_above_and_below_the_floor(self):
        for factor, kept in ((1.01, True), (0.99, False)):
            gram = torch.tensor([[[PIVOT_FLOOR * factor], [1.0], [1.0]]])
            gamma = solve_window(gram, torch.ones(1, 1), 1, BROYDEN_GOOD, 0.0)
            assert bool(gamma != 0) == kept

    def test_a_solution_that_overflows_is_no_solution(self):
        gram = torch.tensor([[[1e-6], [1.0], [1.0]], [[1.0], [1.0], [1.0]]])
        gamma = solve_window(gram, torch.tensor([[1e37], [2.0]]), 1, BROYDEN_GOOD, 0.0)
        assert gamma.tolist() == [[0.0], [2.0]]


def test_a_first_multisecant_step_is_a_mixed_picard_step_and_starts_the_history():
    z, fz = torch.zeros(1, 2), torch.tensor([[2.0, 4.0]])
    left, df = (torch.full((1, 3, 2), NAN) for _ in range(2))
    gram = torch.full((1, 5, 3), NAN)
    rule = 0, False, *StopRule(1e-3)
    multisecant_step(z, fz, z.clone(), *monitor().values(), z, left, df, gram, *rule, ANDERSON_II, 0.5, 0.5, 0.0)
    assert z.tolist() == left[:, 0].tolist() == [[0.5, 1.0]]
    assert left[:, 1:].isnan().all() and df.isnan().all() and gram.isnan().all()


def test_the_last_evaluation_leaves_state_and_history_alone():
    tensors = [torch.randn(1, 3, 2), torch.randn(1, 3, 2), torch.randn(1, 5, 3)]
    z, f_prev = torch.randn(1, 2), torch.randn(1, 2)
    before = [t.clone() for t in (z, *tensors)]
    records = monitor()
    rule = 2, True, *StopRule(1e-3)
    multisecant_step(z, z + 1, z.clone(), *records.values(), f_prev, *tensors, *rule, BROYDEN_GOOD, 1.0, 1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (z, *tensors), strict=True))
    assert records["iterations"].tolist() == [3]


@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestForgetting:
    """Broyden's method from its steps only: after a singular update it takes a Picard step, and begins again."""

    def test_what_follows_is_a_run_from_there(self, kernel, dtype):
        case = StepsCase(batch=1, size=33, history=12, k=5, dtype=dtype, rows=("singular",), tol=0.0)
        state = make_state(case)
        afresh = make_state(replace(case, k=0, rows=())) | {name: state[name].clone() for name in ("z", "fz")}
        for k in range(7):
            for shift, run in ((5, state), (0, afresh)):
                replace(case, k=k + shift).call(Kernel(kernel).op("broyden_step"), run)
                run["fz"] = value_of_f(run["z"])
            assert same_bits(state["z"], afresh["z"]), k
        assert (state["first"].item(), afresh["first"].item()) == (5, 0)

    def by_hand(self, kernel, dtype, steps, g, first=0):
        """(z, first) after the step from z = 0 with f(z) = g, in one dimension."""
        k = len(steps)
        case = StepsCase(batch=1, size=1, history=k + 1, k=k, dtype=dtype)
        known = torch.tensor(steps, dtype=dtype)
        state = make_state(replace(case, k=0)) | {
            "z": torch.zeros(1, 1, dtype=dtype),
            "fz": torch.full((1, 1), g, dtype=dtype),
        }
        state["first"].fill_(first)
        state["steps"][0, :k, 0] = known
        state["gram"][0, : k - 1, :k] = torch.outer(known[:-1], known).tril()
        case.call(Kernel(kernel).op("broyden_step"), state)
        assert state["status"].item() == 0 and same_bits(state["z"], state["steps"][:, k])
        return state["z"].item(), state["first"].item()

    def test_coefficients_of_known_steps(self, kernel, dtype):
        limits = torch.finfo(dtype)
        small, large = limits.smallest_normal**0.5 / 256, limits.max**0.5 / 4
        for steps, g, first, expected in (
            # A step of length zero has no coefficient.
            ([0.0], 3.0, 0, (3.0, 0)),
            # c_0 = 1/2 and c_1 = 3/2: the step is (g + c_0) / (1 - c_1).
            ([2.0, 1.0], 1.0, 0, (-3.0, 0)),
            ([2.0, 1.0, 0.0], 1.0, 0, (1.5, 0)),
            # |s|^2 is hardly a number, s . g is not small: c_0 overflows.
            ([small], large, 0, (float(torch.tensor(large, dtype=dtype)), 1)),
            # The same step is forgotten; c_1 = g, so that the step is g / (1 - g).
            ([small, 1.0], large, 1, (-1.0, 1)),
            # s_1 . s_2 and |s_1|^2 are infinite, c_0 = c_1 = 0 and c_2 nearly so: nothing is forgotten.
            ([0.0, limits.max**0.8, limits.max**0.3], 1.0, 0, (1.0, 0)),
        ):
            assert self.by_hand(kernel, dtype, steps, g, first) == expected, steps


class TestPolicy:
    """The tolerance policy refuses what it should."""

    def test_close(self):
        ones = torch.ones(3)
        assert_close({"a": ones}, {"a": ones * (1 + 1e-5)}, 1e-4)
        for wrong in (ones * 1.01, ones[:2], torch.tensor([1.0, 1.0, NAN]), torch.tensor([1.0, 1.0, INF])):
            with pytest.raises(AssertionError):
                assert_close({"a": wrong}, {"a": ones}, 1e-4)
        with pytest.raises(AssertionError, match="structure"):
            assert_close([ones], {"a": ones}, 1e-4)
        assert_close(torch.tensor([INF, NAN]), torch.tensor([INF, NAN]), 0)
        with pytest.raises(AssertionError):
            assert_close(torch.tensor([INF]), torch.tensor([-INF]), 1.0)

    def test_accuracy_is_measured_by_plain_torch(self):
        exact = torch.linspace(1, 2, 5, dtype=torch.float64)
        plain = (exact * (1 + 1e-3)).float()
        assert_accurate((exact * (1 + 1.9e-3)).float(), plain, exact)
        with pytest.raises(AssertionError, match="relative error 0.0021, allowed 0.002"):
            assert_accurate((exact * (1 + 2.1e-3)).float(), plain, exact)
        assert_accurate(exact.float(), exact.float(), exact)

    def test_zero_is_met_exactly(self):
        zero = torch.zeros(2)
        assert relative_error(zero, zero) == 0 and relative_error(zero + 1e-30, zero) == INF
        assert relative_error(zero[:0], zero[:0]) == 0 and rounding(torch.float64) < 1e-12

    def test_a_solution_far_from_the_fixed_point_is_refused(self):
        from deqfast import Picard, solve

        problem = linear()
        solution = solve(problem.f, problem.z0, Picard(rtol=1e-4, max_iter=50))
        assert_solves(solution, problem)
        solution.value.add_(1e-2)
        with pytest.raises(AssertionError, match="errors"):
            assert_solves(solution, problem)
        with pytest.raises(AssertionError, match="MAX_ITER"):
            assert_solves(solve(problem.f, problem.z0, Picard(rtol=1e-4, max_iter=2)), problem)
