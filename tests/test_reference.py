"""The reference ops against literal tables and dense linear algebra: the ground truth of all other kernels."""

from __future__ import annotations

import math

import pytest
import torch
from deqfast.kernels.constants import ANDERSON_I, ANDERSON_II, BROYDEN_BAD, BROYDEN_GOOD, PIVOT_FLOOR

from deqfast import Status
from deqfast.ops import Kernel
from deqfast.ops.steps import StopRule
from deqfast.ops.steps.reference import solve_window
from deqfast.testing import ITERATES, assert_accurate, assert_close, assert_solves, linear, relative_error, rounding
from deqfast.testing.states import METHODS

picard_step, multisecant_step = map(Kernel("torch").op, ("picard_step", "multisecant_step"))
NAN, INF = math.nan, math.inf


def monitor(batch: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "status": torch.zeros(batch, dtype=torch.int8),
        "iterations": torch.zeros(batch, dtype=torch.int32),
        "residual": torch.full((2, batch), INF, dtype=dtype),
        "progress": torch.full((6, batch), INF, dtype=dtype),
        "active": torch.tensor([batch], dtype=torch.int32),
    }


class TestPicardStep:
    """One sample of two elements each; z = (3, 4) or as said, best = (9, 9)."""

    def step(self, z, fz, k=2, last=False, tol=0.1, absolute=False, stall_floor=0.0, damping=1.0, **more):
        z, fz = torch.tensor([z], dtype=torch.float32), torch.tensor([fz], dtype=torch.float32)
        state = monitor(1)
        rule = StopRule(tol, absolute, stall_floor, more.pop("offset", 0.0), more.pop("maximum", False))
        more.get("progress", []).append(0.875)  # the least residual
        for name, value in more.items():
            state[name][:] = torch.tensor(value, dtype=state[name].dtype).view_as(state[name])
        best = torch.full_like(z, 9.0)
        picard_step(z, fz, best, *state.values(), k, last, *rule, damping)
        after = {name: tensor.flatten().tolist() for name, tensor in state.items()}
        return {"z": z[0].tolist(), "best": best[0].tolist(), **after}

    def test_a_running_sample_takes_the_step(self):
        after = self.step([3, 4], [6, 8])
        assert after["z"] == [6, 8] and after["best"] == [3, 4]
        assert after["residual"] == [0.5, 5.0] and after["progress"] == [0.5, 2.0, INF, INF, 10.0, 0.5]
        assert (after["status"], after["iterations"], after["active"]) == ([0], [3], [1])

    def test_damping(self):
        assert self.step([3, 4], [6, 8], damping=0.5)["z"] == [4.5, 6.0]

    def test_the_last_evaluation_is_judged_only(self):
        after = self.step([3, 4], [6, 8], last=True)
        assert after["z"] == [3, 4] and after["residual"] == [0.5, 5.0]
        assert after["status"] == [Status.MAX_ITER] and after["active"] == [0]

    def test_converged(self):
        after = self.step([3, 4], [3, 4.25])
        assert after["status"] == [Status.CONVERGED] and after["active"] == [0]
        assert after["z"] == after["best"] == [3, 4]

    def test_the_tolerance_itself_is_met(self):
        assert self.step([0, 3], [0, 4], tol=0.25)["status"] == [Status.CONVERGED]
        assert self.step([0, 3], [0, 4], tol=1.0, absolute=True)["status"] == [Status.CONVERGED]
        assert self.step([0, 3], [0, 4], tol=0.24999)["status"] == [0]

    @pytest.mark.parametrize("absolute", [False, True])
    def test_the_absolute_residual_chooses_the_best(self, absolute):
        kept = {"residual": [0.9, 4.0], "progress": [0.4, 1.0, 6.0, 6.0, 4.4]}  # worse relatively, better absolutely
        after = self.step([3, 4], [6, 8], absolute=absolute, **kept)
        assert after["best"] == [9, 9] and after["status"] == [0]
        assert_close(torch.tensor(after["residual"]), torch.tensor([0.9, 4.0]), rounding(torch.float32))

    def test_what_rounding_may_hide_counts_in_the_best(self):
        kept = {"residual": [0.0, 0.0], "progress": [0.1, 1.0, 0.0, 0.0, 2.0**30]}  # f(z) - z has rounded to 0
        assert self.step([3, 4], [6, 8], **kept)["best"] == [3, 4]  # 5 + 10 eps is less than 2^30 eps

    def test_what_the_first_evaluation_leaves(self):
        assert self.step([3, 4], [6, 8], k=0)["progress"] == [0.5, 0.0, 5.0, 10.0, 10.0, 0.5]
        assert self.step([3, 4], [3, 0], k=0)["progress"][2:5] == [4.0, 4.0, 3.0]  # |f(z) - z| is the longer one

    @pytest.mark.parametrize(
        ("first", "start", "converges"),
        [
            (5.0, 5.0, True),  # |f(z)| = 10 is twice the start
            (4.99, 5.0, False),  # the residual, 5, is longer than the first one
            (49.9, 4.99, False),  # it has outgrown the start, and less than nine tenths of the residual are gone
            (50.1, 4.99, True),
        ],
    )
    def test_a_tolerance_that_is_met_is_not_enough(self, first, start, converges):
        after = self.step([3, 4], [6, 8], tol=0.6, progress=[0.5, 1.0, first, start, INF])
        assert after["status"] == [converges]

    def test_the_reduction_asked_for_is_a_hundred_times_the_tolerance(self):
        for first, converges in ((2.0e4, False), (2.4e4, True)):  # 1 + eps 1e7 is 2.2, which must be 1e-4 of the first
            after = self.step([0, 1e7], [0, 1e7 + 1], tol=1e-6, progress=[INF, INF, first, 1.0, INF])
            assert after["status"] == [converges]

    def test_a_sample_that_ran_away_has_a_status_of_its_own(self):
        gone = {"progress": [0.1, 1.0, 5.0, 1.0, 1.0]}
        assert self.step([3, 4], [6, 8], tol=0.6, **gone)["status"] == [0]
        gone = {"progress": [0.1, 1.0, 5.0, 1.0, 1.0]}
        assert self.step([3, 4], [6, 8], tol=0.6, last=True, **gone)["status"] == [Status.ESCAPED]
        assert self.step([3, 4], [6, 8], tol=0.4, last=True)["status"] == [Status.MAX_ITER]

    def test_an_iterate_that_met_the_tolerance_is_remembered(self):
        met = {"progress": [0.1, 1.0, 5.0, 1.0, 1.0]}  # the least residual is 0.875
        assert self.step([3, 4], [60, 80], tol=0.88, last=True, **met)["status"] == [Status.ESCAPED]

    def test_rounding_may_hide_the_residual(self):
        for first, converges in ((1e3, False), (1e5, True)):  # eps |f(z)| is 1.2e3
            assert self.step([0, 1e10], [0, 1e10], progress=[INF, INF, first, 1.0, INF])["status"] == [converges]

    def test_a_low_precision_f_hides_more(self):
        for floor, converges in ((0.0, True), (0.0625, False)):  # an eighth of it is bfloat16's unit
            after = self.step([0, 100], [0, 100], stall_floor=floor, progress=[INF, INF, 1.0, 1.0, INF])
            assert after["status"] == [converges]

    @pytest.mark.parametrize("more", [{"absolute": True, "tol": 5.01}, {"tol": 0.5, "offset": 10.02}], ids=str)
    def test_a_residual_below_the_absolute_tolerance_needs_no_reduction(self, more):
        after = self.step([3, 4], [6, 8], progress=[0.5, 1.0, 5.5, 0.0, INF], **more)  # atol is tol * offset
        assert after["status"] == [Status.CONVERGED]

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_a_value_that_is_not_finite(self, bad):
        after = self.step([3, 4], [6, bad], residual=[0.5, 5.0], progress=[0.5, 1.0, 5.0, 6.0, 7.0])
        assert after["status"] == [Status.NONFINITE] and after["active"] == [0] and after["iterations"] == [3]
        assert after["z"] == after["best"] == [9, 9]
        assert after["residual"] == [0.5, 5.0] and after["progress"] == [0.5, 1.0, 5.0, 6.0, 7.0, 0.875]

    @pytest.mark.parametrize("scale", [1e-40, 1e-25, 1.0, 1e20, 1e37])
    @pytest.mark.parametrize(("maximum", "absolute"), [(False, 5.0), (True, 4.0)])
    def test_any_scale(self, maximum, absolute, scale):
        after = self.step([3 * scale, 4 * scale], [6 * scale, 8 * scale], maximum=maximum)
        relative, length = after["residual"]
        assert (relative, length / scale) == pytest.approx((0.5, absolute), rel=1e-4) and after["status"] == [0]

    def test_a_length_beyond_the_dtype_is_its_largest_number(self):
        largest = torch.finfo(torch.float32).max
        assert self.step([0, 0], [largest, largest])["residual"] == [1.0, largest]

    @pytest.mark.parametrize("tol", [0.4, 0.42])
    def test_the_offset_is_added_to_the_size(self, tol):
        after = self.step([3, 4], [6, 8], offset=2.0, tol=tol)  # 5 / (10 + 2)
        assert after["residual"] == [pytest.approx(5 / 12), 5.0] and after["status"] == [tol > 5 / 12]

    def test_zero_over_zero(self):
        after = self.step([0, 0], [0, 0])
        assert after["status"] == [Status.CONVERGED] and after["residual"] == [0, 0]

    def test_a_value_of_zero(self):
        after = self.step([3, 4], [0, 0])
        assert after["status"] == [0] and after["residual"] == [torch.finfo(torch.float32).max, 5.0]

    @pytest.mark.parametrize(
        ("relative", "since", "floor", "status"),
        [
            (0.5, 0, 0.6, Status.STALLED),
            (0.5, 1, 0.6, 0),  # four iterations without a gain
            (0.5, 0, 0.5, 0),  # not below the floor
            (0.5, 0, 0.0, 0),
            (0.53, 0, 0.6, 0),  # 0.5 is a gain of more than 5 %
        ],
    )
    def test_stall(self, relative, since, floor, status):
        progress = [relative, since, INF, INF, 20.0]
        after = self.step([3, 4], [6, 8], k=5, stall_floor=floor, progress=progress, residual=[relative, 9.0])
        gain = [0.5, 5.0] if relative == 0.53 else [relative, since]
        assert after["status"] == [status] and after["progress"][:2] == gain

    def test_convergence_goes_before_a_stall(self):
        after = self.step([3, 4], [6, 8], k=5, tol=0.5, stall_floor=0.6, progress=[0.5, 0, INF, INF, 20.0])
        assert after["status"] == [Status.CONVERGED]

    @pytest.mark.parametrize("status", [Status.CONVERGED, Status.NONFINITE, Status.STALLED])
    def test_a_finished_sample_is_left_alone(self, status):
        before = {"status": [status], "iterations": [7], "residual": [0.25, 2.0], "active": [0]}
        before |= {"progress": [0.25, 1.0, 4.0, 5.0, 6.0]}
        after = self.step([3, 4], [NAN, 8], **before)
        assert after == {"z": [3, 4], "best": [9, 9], **before}  # `step` has added the least residual


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
        """Pair `repeated` (by age) is the one before it once more: it and all older ones get no weight."""
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
    multisecant_step(z, fz, z.clone(), *monitor(1).values(), z, left, df, gram, *rule, ANDERSON_II, 0.5, 0.5, 0.0)
    assert z.tolist() == left[:, 0].tolist() == [[0.5, 1.0]]
    assert left[:, 1:].isnan().all() and df.isnan().all() and gram.isnan().all()


def test_the_last_evaluation_leaves_state_and_history_alone():
    tensors = [torch.randn(1, 3, 2), torch.randn(1, 3, 2), torch.randn(1, 5, 3)]
    z, f_prev = torch.randn(1, 2), torch.randn(1, 2)
    before = [t.clone() for t in (z, *tensors)]
    records = monitor(1)
    rule = 2, True, *StopRule(1e-3)
    multisecant_step(z, z + 1, z.clone(), *records.values(), f_prev, *tensors, *rule, BROYDEN_GOOD, 1.0, 1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (z, *tensors), strict=True))
    assert records["iterations"].tolist() == [3]


class TestPolicy:
    """The tolerance policy refuses what it should."""

    def test_close(self):
        one = torch.ones(3)
        assert_close({"a": one}, {"a": one * (1 + 1e-5)}, 1e-4)
        for wrong in (one * 1.01, one[:2], torch.tensor([1.0, 1.0, NAN]), torch.tensor([1.0, 1.0, INF])):
            with pytest.raises(AssertionError):
                assert_close({"a": wrong}, {"a": one}, 1e-4)
        with pytest.raises(AssertionError, match="structure"):
            assert_close([one], {"a": one}, 1e-4)
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
