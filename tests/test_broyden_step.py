"""broyden_step, Broyden's good method from its steps only: when it forgets, and solves with it. See test_steps.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from correctness import PROBLEMS
from correctness.states import StepsCase, make_state, same_bits, value_of_f
from solutions import assert_solves, solve_with_inverse

from deqfast import Broyden, solve
from deqfast.ops import Kernel, choose_kernel
from deqfast.solvers.broyden import StepsState
from deqfast.solvers.multisecant import MultisecantState

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
on_cpu = pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)


@on_cpu
@every_dtype
class TestForgetting:
    """If the update is singular, the sample takes a Picard step and its history begins again."""

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


@on_cpu
class TestSolves:
    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize(("tol", "dtype"), [(1e-4, torch.float32), (1e-9, torch.float64)])
    def test_as_soon_as_with_pairs(self, name, tol, dtype, kernel):
        problem = PROBLEMS[name](batch=3, dtype=dtype, **({"dim": 5} if name == "sawtooth" else {}))
        solver = Broyden(tol, 40, history_size=40)
        steps = solve(problem.f, problem.z0, solver, kernel)
        pairs, _ = solve_with_inverse(problem.f, problem.z0, solver, kernel)
        assert_solves(steps, problem)
        assert_solves(pairs, problem)
        assert (steps.iterations - pairs.iterations).abs().max() <= 1


ONLY_STEPS = [
    Broyden(),
    Broyden(max_iter=1),
    Broyden(max_iter=30, history_size=30),
    Broyden(history_size=19),  # as many as steps
    Broyden(history_dtype=torch.float32),
    Broyden(max_iter=22),
]
PAIRS = [
    Broyden(max_iter=22, history_size=20),
    Broyden(history_size=18),
    Broyden(kind="bad"),
    Broyden(relaxation=0.7),
    Broyden(history_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("solver", [*ONLY_STEPS, *PAIRS], ids=str)
def test_when_only_steps_are_kept(solver, kernel, device):
    on_cpu, kernel, z = kernel in ("torch", "cpp"), choose_kernel(kernel, torch.device(device)), torch.zeros(2, 5)
    state = solver.init(z.to(device), kernel)
    assert type(state) is (StepsState if solver in ONLY_STEPS and on_cpu else MultisecantState)
    assert type(solver.init_pairs(z.to(device), kernel)) is MultisecantState
    if type(state) is StepsState:  # one less than evaluations
        assert state.steps.shape == (2, max(1, solver.max_iter - 1), 5) and state.steps.dtype == z.dtype
