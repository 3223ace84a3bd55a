"""broyden_step, Broyden's good method from its steps alone: the reference, the CPU kernel, and solves with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deqfast
from deqfast import Broyden, Status, solve
from deqfast.ops import Kernel, choose_kernel
from deqfast.solvers.broyden import StepsState
from deqfast.solvers.multisecant import MultisecantState
from deqfast.testing import ITERATES, PROBLEMS, assert_close, assert_solves, linear
from deqfast.testing.states import (
    RULES,
    Case,
    State,
    StepsCase,
    assert_same_bits,
    check_close,
    check_iterates,
    length,
    make_state,
    outcomes,
    same_bits,
    start_state,
    start_steps,
    strike,
    value_of_f,
)

TORCH = Kernel("torch")
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
EVENTS = (
    "run",
    "done",
    "nan",
    "inf",
    "overflow",
    "tiny",
    "converged",
    "zero",
    "stalled",
    "degenerate",
    "singular",
    "forgotten",
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
on_cpu = pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
has_cpp = deqfast.backends()["cpp"]
needs_cpp = pytest.mark.skipif(not has_cpp, reason=f"kernel cpp: {has_cpp.reason}")


def cpp(*args):
    torch.ops.deqfast.broyden_step(*args)


def make(case: StepsCase) -> State:
    """State at iteration case.k: the reference has run those before it, and `case.rows` have been struck."""
    state = make_state(replace(case, rows=()))
    for row, event in enumerate(case.rows):
        if event == "degenerate":
            state["steps"][row, case.k - 1] = 0
        elif event == "singular":
            make_singular(state, row, case.k)
        elif event == "forgotten":
            state["first"][row] = case.k // 2
        else:
            strike(state, row, event, case)
    return state


def make_singular(state: State, row: int, k: int) -> None:
    """A history of the newest step alone, and g equal to it: 1 - c = 0, without rounding."""
    step = (torch.arange(state["z"].shape[1]) % 5 - 2).to(state["z"].dtype)
    state["steps"][row, k - 1] = step
    state["z"][row] = 3 * step
    state["fz"][row] = 4 * step
    state["first"][row] = k - 1


def compare(case: StepsCase, before: State) -> State:
    """Compare one step of cpp with the reference; return the state after the step."""
    after, exact, rounded = outcomes(cpp, case, before)
    stepped = check_iterates(case, before, after, exact, rounded)
    assert_same_bits("first", after["first"], rounded[0]["first"])
    assert_same_bits("first", after["first"], exact["first"])
    steps_written, gram_written = (torch.zeros_like(before[name], dtype=torch.bool) for name in ("steps", "gram"))
    steps_written[stepped, case.k : case.k + 1] = True
    gram_written[stepped, max(case.k - 1, 0), : case.k] = True
    assert_same_bits("steps elsewhere", after["steps"][~steps_written], before["steps"][~steps_written])
    assert_same_bits("gram elsewhere", after["gram"][~gram_written], before["gram"][~gram_written])
    if stepped.any():
        # A step is made of differences of f and z: its rounding errors are relative to them.
        size = length(before["z"][stepped]).maximum(length(before["fz"][stepped]))
        written = [state["steps"][stepped, case.k] for state in (after, exact, *rounded)]
        check_close("steps", case, written[0], written[1], written[2:], size)
    if stepped.any() and case.k:
        norms = torch.linalg.vector_norm(exact["steps"][stepped, : case.k], dim=-1)
        scale = norms * norms[:, -1:]
        scale = torch.where(scale > 0, scale, 1)
        dots = [s["gram"][stepped, case.k - 1, : case.k].double() / scale for s in (after, exact, *rounded)]
        check_close("gram", case, dots[0], dots[1], dots[2:], 1.0)
    return after


def compare_run(case: StepsCase, state: State, k: int = 0) -> State:
    """Compare the steps k .. case.k of one run of cpp."""
    for i in range(k, case.k + 1):
        state = compare(replace(case, k=i), state)
        state["fz"] = value_of_f(state["z"], i + 1, case.wobble)
    return state


def iterates(step: Callable[..., None], f: Callable, z: torch.Tensor, count: int) -> list[torch.Tensor]:
    """z_1 .. z_count of `step` from z (B, D)."""
    case = StepsCase(batch=z.shape[0], size=z.shape[1], history=count, dtype=z.dtype, tol=0.0)
    state, found = start_steps(case) | {"z": z.clone(), "best": z.clone()}, []
    for k in range(count):
        state["fz"] = f(state["z"])
        replace(case, k=k).call(step, state)
        found.append(state["z"].clone())
    return found


class TestReference:
    """In exact arithmetic it is Broyden's good method: in float64, up to rounding."""

    def pairs(self, f, z, count):
        """The iterates of multisecant_step with all pairs in its window."""
        case = Case("good", batch=z.shape[0], size=z.shape[1], history=count, dtype=z.dtype, tol=0.0)
        state, found = start_state(case) | {"z": z.clone(), "best": z.clone()}, []
        for k in range(count):
            state["fz"] = f(state["z"])
            replace(case, k=k).call(TORCH.op("multisecant_step"), state)
            state["f_prev"] = state["fz"]
            found.append(state["z"].clone())
        return found

    @pytest.mark.parametrize(("rho", "tolerance"), [(0.6, 1e-12), (0.95, 1e-12), (1.5, ITERATES)])
    def test_the_iterates_of_the_pair_form(self, rho, tolerance):
        problem = linear(batch=3, dim=40, dtype=torch.float64, rho=rho)
        expected = self.pairs(problem.f, problem.z0, 15)
        assert_close(iterates(TORCH.op("broyden_step"), problem.f, problem.z0, 15), expected, tolerance)

    def test_a_map_that_is_not_linear(self):
        z = start_steps(StepsCase(batch=2, size=30, dtype=torch.float64))["z"]
        assert_close(iterates(TORCH.op("broyden_step"), value_of_f, z, 12), self.pairs(value_of_f, z, 12), 1e-12)

    def test_the_first_steps_by_hand(self):
        """f(z) = 3 - z / 2 in one dimension: s_0 = 3, g = -1.5, c_0 = -0.5, s_1 = -1.5 / 1.5; z = 2 is the solution."""
        case = StepsCase(batch=1, size=1, history=3)
        state = start_steps(case) | {"z": torch.zeros(1, 1), "best": torch.zeros(1, 1)}
        for k in range(2):
            state["fz"] = 3 - state["z"] / 2
            replace(case, k=k).call(TORCH.op("broyden_step"), state)
        assert state["z"].item() == 2.0 and state["steps"][0, :2, 0].tolist() == [3.0, -1.0]
        assert state["gram"][0, 0, 0].item() == 9.0 and state["gram"].isnan().sum() == 8 and state["first"].item() == 0


@needs_cpp
class TestAccuracy:
    """cpp against the reference in float64: at most twice the error of plain torch in the same dtype."""

    @every_dtype
    @pytest.mark.parametrize("batch", [0, 1, 3])
    @pytest.mark.parametrize("size", [16, 63, 64, 257, 777, 1025, 2500])
    def test_a_run(self, size, batch, dtype):
        case = StepsCase(batch=batch, size=size, history=10, k=9, dtype=dtype)
        compare_run(case, start_steps(case))

    @every_dtype
    @pytest.mark.parametrize(("size", "threads"), [(4097, 1), (5 * 4096 + 777, 2)])
    def test_samples_of_several_chunks(self, size, threads, dtype, set_threads):
        """See csrc/cpu/samples.h; two threads share three samples."""
        set_threads(threads)
        case = StepsCase(batch=3, size=size, history=6, k=5, dtype=dtype)
        compare_run(case, start_steps(case))

    @every_dtype
    @pytest.mark.parametrize("batch", [0, 1, 3])
    def test_one_dimension(self, batch, dtype):
        case = StepsCase(batch=batch, size=1, history=4, k=3, dtype=dtype)
        compare_run(case, start_steps(case))

    @every_dtype
    @pytest.mark.parametrize("k", [6, 7, 13, 19, 25])
    def test_many_steps(self, k, dtype):
        """Rows are taken six, four, two and one at a time."""
        case = StepsCase(size=300, history=26, k=k, dtype=dtype, wobble=0.3)
        compare(case, make(case))

    def befallen(self, dtype, **settings):
        return StepsCase(batch=len(EVENTS), size=70, history=9, k=6, stall_floor=1e-3, dtype=dtype, **settings)

    @every_dtype
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_what_can_befall_a_sample(self, rule, dtype):
        case = self.befallen(dtype, rows=EVENTS, **rule)
        after = compare(case, make(case))
        status = dict(zip(EVENTS, after["status"].tolist(), strict=True))
        assert {event for event in EVENTS if status[event] == 0} == {
            "run",
            "overflow",
            *EVENTS[-3:],
            *([] if rule else ["tiny"]),
        }
        assert [status[event] for event in ("nan", "inf")] == [Status.NONFINITE] * 2
        assert [status[event] for event in ("converged", "zero", "stalled")] == [1, 1, Status.STALLED]

    @every_dtype
    def test_the_run_goes_on_for_the_others(self, dtype):
        case = self.befallen(dtype, rows=EVENTS)
        after = compare_run(replace(case, k=8), make(case), k=6)
        assert after["z"][after["status"] == 0].isfinite().all() and (after["status"] == 0).sum() >= 3

    @pytest.mark.parametrize("k", [5, 6])
    @every_dtype
    def test_the_last_evaluation_is_judged_only(self, k, dtype):
        case = replace(self.befallen(dtype, rows=EVENTS), k=k, history=6, last=True)
        before = make(case)
        after = compare(case, before)
        for name in ("steps", "gram", "first"):
            assert same_bits(after[name], before[name]), name
        assert after["iterations"][0] == k + 1

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(
        dtype=st.sampled_from(list(DTYPES.values())),
        batch=st.integers(1, 5),
        size=st.integers(16, 600),
        room=st.integers(1, 4),
        k=st.integers(1, 8),
        events=st.lists(st.sampled_from(EVENTS), max_size=5),
    )
    def test_any_state(self, dtype, batch, size, room, k, events):
        case = StepsCase(batch=batch, size=size, history=k + room, k=k, dtype=dtype, rows=tuple(events[:batch]))
        compare(case, make(case))


@on_cpu
@every_dtype
class TestForgetting:
    """Where the update is singular, the sample takes a Picard step and its history begins anew."""

    STEPS = {"torch": TORCH.op("broyden_step"), "cpp": cpp}

    def test_a_singular_update(self, kernel, dtype):
        case = StepsCase(batch=2, size=33, history=8, k=5, dtype=dtype, rows=("singular",))
        state = make(case)
        fz, z = state["fz"].clone(), state["z"].clone()
        case.call(self.STEPS[kernel], state)
        assert same_bits(state["z"][0], fz[0]) and same_bits(state["steps"][0, 5], (fz - z)[0])
        assert state["first"].tolist() == [5, 0] and not same_bits(state["z"][1], fz[1])

    def test_what_follows_is_a_run_from_there(self, kernel, dtype):
        case = StepsCase(batch=1, size=33, history=12, k=5, dtype=dtype, rows=("singular",), tol=0.0)
        state = make(case)
        afresh = start_steps(case) | {name: state[name].clone() for name in ("z", "fz")}
        for k in range(7):
            for shift, run in ((5, state), (0, afresh)):
                replace(case, k=k + shift).call(self.STEPS[kernel], run)
                run["fz"] = value_of_f(run["z"])
            assert same_bits(state["z"], afresh["z"]), k
        assert (state["first"].item(), afresh["first"].item()) == (5, 0)

    def by_hand(self, kernel, dtype, steps, g, first=0):
        """(z, first) after the step from z = 0 with f(z) = g, in one dimension."""
        k = len(steps)
        case = StepsCase(batch=1, size=1, history=k + 1, k=k, dtype=dtype)
        known = torch.tensor(steps, dtype=dtype)
        state = start_steps(case) | {"z": torch.zeros(1, 1, dtype=dtype), "fz": torch.full((1, 1), g, dtype=dtype)}
        state["first"].fill_(first)
        state["steps"][0, :k, 0] = known
        state["gram"][0, : k - 1, :k] = torch.outer(known[:-1], known).tril()
        case.call(self.STEPS[kernel], state)
        assert state["status"].item() == 0 and same_bits(state["z"], state["steps"][:, k])
        return state["z"].item(), state["first"].item()

    def test_a_step_of_length_zero_has_no_coefficient(self, kernel, dtype):
        """With steps 2 and 1, c_0 = 1/2 and c_1 = 3/2: the step is (g + c_0) / (1 - c_1)."""
        assert self.by_hand(kernel, dtype, [0.0], 3.0) == (3.0, 0)
        assert self.by_hand(kernel, dtype, [2.0, 1.0], 1.0) == (-3.0, 0)
        assert self.by_hand(kernel, dtype, [2.0, 1.0, 0.0], 1.0) == (1.5, 0)

    def test_a_coefficient_that_overflows(self, kernel, dtype):
        """|s|^2 is hardly a number, s . g is not small."""
        limits = torch.finfo(dtype)
        small, large = limits.smallest_normal**0.5 / 256, limits.max**0.5 / 4
        assert self.by_hand(kernel, dtype, [small], large) == (float(torch.tensor(large, dtype=dtype)), 1)

    def test_a_dot_that_overflows_beside_a_zero_coefficient(self, kernel, dtype):
        """s_1 . s_2 and |s_1|^2 are infinite, c_0 = c_1 = 0 and c_2 nearly so: the step is g, nothing is forgotten."""
        largest = torch.finfo(dtype).max
        assert self.by_hand(kernel, dtype, [0.0, largest**0.8, largest**0.3], 1.0) == (1.0, 0)

    def test_what_is_forgotten_has_no_coefficient(self, kernel, dtype):
        """The forgotten step is one whose coefficient would overflow; c_1 = g, so that the step is g / (1 - g)."""
        limits = torch.finfo(dtype)
        small, large = limits.smallest_normal**0.5 / 256, limits.max**0.5 / 4
        assert self.by_hand(kernel, dtype, [small, 1.0], large, first=1) == (-1.0, 1)


@on_cpu
class TestSolves:
    @pytest.mark.parametrize(
        ("solver", "alone"),
        [
            (Broyden(), True),
            (Broyden(max_iter=1), True),
            (Broyden(max_iter=30, history_size=30), True),
            (Broyden(history_size=50), True),
            (Broyden(history_dtype=torch.float32), True),
            (Broyden(max_iter=22), True),
            (Broyden(max_iter=22, history_size=20), False),
            (Broyden(history_size=18), False),
            (Broyden(kind="bad"), False),
            (Broyden(relaxation=0.7), False),
            (Broyden(history_dtype=torch.bfloat16), False),
        ],
        ids=str,
    )
    def test_when_steps_are_kept_alone(self, solver, alone, kernel):
        kernel = choose_kernel(kernel, CPU)
        assert type(solver.init(torch.zeros(2, 5), kernel)) is (StepsState if alone else MultisecantState)
        assert type(solver.init(torch.zeros(2, 5), kernel, keep_inverse=True)) is MultisecantState

    def test_what_is_kept(self, kernel):
        """One step less than evaluations, in the dtype of the state."""
        state = Broyden(max_iter=7).init(torch.zeros(2, 5, dtype=torch.float64), choose_kernel(kernel, CPU))
        assert state.steps.shape == (2, 6, 5) and state.steps.dtype == torch.float64 and state.gram.shape == (2, 6, 6)

    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize(("tol", "dtype"), [(1e-4, torch.float32), (1e-9, torch.float64)])
    def test_as_soon_as_with_pairs(self, name, tol, dtype, kernel):
        problem = PROBLEMS[name](batch=3, dtype=dtype, **({"dim": 5} if name == "sawtooth" else {}))
        solver = Broyden(tol, 40, history_size=40)
        alone = solve(problem.f, problem.z0, solver, kernel)
        pairs = solve(problem.f, problem.z0, solver, kernel, keep_inverse=True)
        assert_solves(alone, problem)
        assert_solves(pairs, problem)
        assert (alone.iterations - pairs.iterations).abs().max() <= 1

    def test_a_map_without_a_solution(self, kernel):
        """f(z) = z + 1: every update is singular, every step a Picard step."""
        z = torch.arange(3.0)[:, None].expand(3, 4).contiguous()
        solver = Broyden(rtol=1e-6, max_iter=9)
        state = solver.init(z.clone(), choose_kernel(kernel, CPU))
        for k in range(9):
            solver.advance(state, state.z + 1, k, k == 8)
        assert same_bits(state.z, z + 8) and state.status.tolist() == [Status.MAX_ITER] * 3
        assert state.first.tolist() == [7] * 3 and (state.steps == 1).all()

    def test_a_restarted_solve_forgets(self, kernel):
        solver, z = Broyden(rtol=1e-6, max_iter=6), torch.zeros(2, 4)
        state = solver.init(z.clone(), choose_kernel(kernel, CPU))
        for _ in range(2):
            for k in range(6):
                solver.advance(state, state.z + 1, k, k == 5)
            assert state.first.tolist() == [4, 4]
            state.restart(z)
            assert state.first.tolist() == [0, 0] and state.active.item() == 2


@pytest.mark.parametrize("kernel", ["triton", "cuda"], indirect=True)
def test_other_kernels_keep_pairs(kernel, device):
    state = Broyden().init(torch.zeros(2, 5, device=device), choose_kernel(kernel, torch.device(device)))
    assert type(state) is MultisecantState
