"""The solvers: that they solve the problem table, that their iterates are the textbook's, and their arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from correctness import PROBLEMS, FixedPoint, after_solve, assert_close, linear, rounding, tanh
from solutions import SOLVERS, Recorder, assert_solves, every_solver, in_process, on_cpu, solve_with_inverse

from deqfast import Anderson, Broyden, Picard, Solver, solve
from deqfast.ops import choose_kernel
from deqfast.solvers.base import State

multisecant = pytest.mark.parametrize("name", [name for name in SOLVERS if name != "picard"])

NEVER = 1e-300  # a tolerance that is never met


@pytest.mark.covering(1)
@every_solver
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_every_solver_solves_every_problem(name, problem_name, kernel, device):
    size = {"dim": 5} if problem_name == "sawtooth" else {}
    if kernel == "triton" and device == "cpu":  # interpreted, which is slow: one sample, and not as far
        cases = [(torch.float32, 1e-2, 1)]
    else:
        cases = [(torch.float32, 1e-4, 3), *[(torch.float64, 1e-11, 2)] * (kernel != "triton")]
    for dtype, tol, batch in cases:
        problem = PROBLEMS[problem_name](batch=batch, dtype=dtype, device=device, **size)
        solver = SOLVERS[name](rtol=tol, max_iter=600 if name == "picard" else 100)
        assert_solves(solve(problem.f, problem.z0, solver, kernel), problem)


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize(("tol", "dtype"), [(1e-4, torch.float32), (1e-9, torch.float64)])
@on_cpu
def test_broyden_from_steps_ends_as_soon_as_from_pairs(problem_name, tol, dtype, kernel):
    problem = PROBLEMS[problem_name](batch=3, dtype=dtype, **({"dim": 5} if problem_name == "sawtooth" else {}))
    solver = Broyden(tol, 40, history_size=40)
    steps = solve(problem.f, problem.z0, solver, kernel)
    pairs, _ = solve_with_inverse(problem.f, problem.z0, solver, kernel)
    assert_solves(steps, problem)
    assert_solves(pairs, problem)
    assert (steps.iterations - pairs.iterations).abs().max() <= 1


def textbook(problem: FixedPoint, count: int, history: int, step: Callable) -> torch.Tensor:
    """Iterates (count, B, D); step(g, pairs) follows from the newest pairs (s, y)."""
    pairs: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=history)
    z = problem.z0
    g, iterates = problem.f(z) - z, [z]
    for _ in range(count - 1):
        z_next = z + step(g, pairs)
        g_next = problem.f(z_next) - z_next
        pairs.append((z_next - z, g_next - g))
        z, g = z_next, g_next
        iterates.append(z)
    return torch.stack(iterates)


def broyden(relaxation: float, kind: str, g: torch.Tensor, pairs: deque) -> torch.Tensor:
    """By updates of a dense inverse Jacobian, rebuilt from -I on the newest pairs."""
    h = -torch.eye(g.shape[1], dtype=g.dtype).expand(len(g), -1, -1)
    for s, y in pairs:
        error = s - (h @ y[:, :, None])[:, :, 0]
        row = (s[:, None] @ h)[:, 0] if kind == "good" else y
        h = h + error[:, :, None] * (row / (row * y).sum(dim=1, keepdim=True))[:, None]
    return -relaxation * (h @ g[:, :, None])[:, :, 0]


def anderson(relaxation: float, kind: str, g: torch.Tensor, pairs: deque) -> torch.Tensor:
    """gamma by least squares on the residuals (II) or by S^T Y gamma = S^T g (I)."""
    if not pairs:
        return relaxation * g
    s, y = (torch.stack(column, dim=2) for column in zip(*pairs, strict=True))
    if kind == "II":
        gamma = torch.linalg.lstsq(y, g[:, :, None]).solution
    else:
        gamma = torch.linalg.solve(s.mT @ y, s.mT @ g[:, :, None])
    return relaxation * g - ((s + relaxation * y) @ gamma)[:, :, 0]


class TestIterates:
    """In float64 the pair form takes the steps of the textbook's methods, full and with a sliding window."""

    COUNT = 10

    def compare(self, solver, step, kernel, device, kind=""):
        problems = [tanh(batch=2, dim=12, dtype=torch.float64, device=where) for where in ("cpu", device)]
        history = getattr(solver, "history_size", 1) or self.COUNT
        expected = textbook(problems[0], self.COUNT, history, partial(step, solver.relaxation, kind))
        condition = self.condition(problems[0], expected, history) if kind else 1
        f = Recorder(problems[1].f)
        solve(f, problems[1].z0, solver, kernel)
        assert len(f) == len(expected)
        for k, (actual, iterate) in enumerate(zip(f.arguments, expected, strict=True)):
            assert_close(actual, iterate, rounding(torch.float64) * condition, f"iterate {k}")

    def condition(self, problem, iterates, history):
        """Condition number of the windows: of the changes of f(z) - z, each of length 1."""
        g = torch.stack([problem.f(z) - z for z in iterates])
        y = torch.nn.functional.normalize(g.diff(dim=0), dim=2).transpose(0, 1)
        windows = [y[:, max(0, k - history) : k] for k in range(1, y.shape[1] + 1)]
        return max(float(torch.linalg.cond(window).max()) for window in windows)

    @pytest.mark.covering(1)
    @pytest.mark.parametrize(
        ("solver", "kind", "step"),
        [
            (Broyden, "good", broyden),
            (Broyden, "bad", broyden),
            (partial(Anderson, ridge=0.0), "I", anderson),
            (partial(Anderson, ridge=0.0), "II", anderson),
        ],
    )
    @pytest.mark.parametrize(("relaxation", "history"), [(1.0, COUNT), (0.7, 3), (1.0, 1)])
    def test_multisecant(self, solver, kind, step, relaxation, history, kernel, device):
        made = solver(NEVER, self.COUNT, kind=kind, relaxation=relaxation, history_size=history)
        self.compare(made, step, kernel, device, kind)

    @pytest.mark.parametrize("relaxation", [1.0, 0.7, 1.3])
    def test_picard(self, relaxation, kernel, device):
        solver = Picard(NEVER, self.COUNT, relaxation=relaxation)
        self.compare(solver, lambda relaxation, kind, g, pairs: relaxation * g, kernel, device)


class TestDegenerateHistory:
    """At the rounding floor pairs lose their meaning; the solve stays at the floor and finite."""

    @every_solver
    @in_process
    @pytest.mark.parametrize("problem_name", ["linear-0.5", "tanh", "sawtooth"])
    def test_long_after_convergence(self, name, problem_name, kernel, device):
        problem = PROBLEMS[problem_name](device=device)
        f = Recorder(problem.f)
        solution = solve(f, problem.z0, SOLVERS[name](rtol=1e-30, max_iter=100), kernel)
        assert all(torch.isfinite(z).all() for z in f.arguments)
        assert (solution.residual < rounding(torch.float32)).all()
        assert_close(solution.value, problem.solution, rounding(torch.float32) * problem.amplification)


@pytest.mark.covering(1)
@every_solver
@pytest.mark.parametrize("norm", ["euclidean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contractions_of_any_scale(name, norm, dtype, kernel, device):
    limits = torch.finfo(dtype)
    scales = torch.tensor([limits.tiny**0.8, limits.tiny**0.66, 1.0, limits.max**0.52, limits.max**0.78], dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=generator, dtype=torch.float64).mul(0.05).to(device, dtype)
    c = torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype).mul(scales[:, None]).to(device)
    solution = solve(lambda z: z @ weight.T + c, torch.zeros_like(c), SOLVERS[name](rtol=1e-3, norm=norm), kernel)
    assert solution.converged.all()

    unit, value = c.cpu().double() / scales[:, None], solution.value.cpu().double() / scales[:, None]
    matrix, order = weight.cpu().double(), 2 if norm == "euclidean" else math.inf
    f = value @ matrix.T + unit
    absolute, size = (torch.linalg.vector_norm(v, order, dim=1) for v in (f - value, f))
    assert_close(solution.residual.cpu(), absolute / size, rounding(torch.float32) / 1e-3)
    assert_close(solution.residual_abs.cpu() / scales, absolute, rounding(torch.float32) / 1e-3)
    inverse = torch.linalg.inv(torch.eye(6) - matrix)
    condition = float(torch.linalg.matrix_norm(inverse, order))
    for row, fixed in zip(value, unit @ inverse.T, strict=True):
        assert_close(row, fixed, after_solve(1e-3, condition))


@pytest.mark.covering(0)
@every_solver
def test_an_absolute_tolerance_finds_zero(name, kernel, device):
    """f(z) = J z, whose relative residual falls no more than z does."""
    rates = torch.linspace(0.2, 0.7, 6, device=device)
    z0 = torch.ones(2, 6, device=device) * torch.tensor([[1.0], [1e-3]], device=device)
    relative = solve(lambda z: rates * z, z0, Picard(rtol=1e-3), kernel)
    assert not relative.converged.any()
    solution = solve(lambda z: rates * z, z0, SOLVERS[name](rtol=1e-3, atol=1e-8, max_iter=60), kernel)
    assert solution.converged.all()
    value = solution.value.double()
    g, f = (rates.double() - 1) * value, rates.double() * value
    assert (g.norm(dim=1) <= 1e-8 + 1e-3 * f.norm(dim=1)).all() and (value.norm(dim=1) < 1e-7).all()
    assert_close(solution.residual, g.norm(dim=1) / (f.norm(dim=1) + 1e-5), rounding(torch.float32))


@multisecant
@pytest.mark.usefixtures("cpp_kernels")
def test_a_window_is_as_long_as_a_gpu_kernel_holds(name):
    problem, kernel = linear(), choose_kernel("triton", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    default, longer = (SOLVERS[name](max_iter=40, history_size=size) for size in (None, 33))
    assert default.init(problem.z0, kernel).left.shape[1] == 32
    with pytest.raises(ValueError, match="history_size must be at most 32 on kernel='triton', got 33"):
        longer.init(problem.z0, kernel)
    assert solve(problem.f, problem.z0, longer, "cpp").converged.all()


@pytest.mark.parametrize(
    ("rtol", "atol", "kept"),
    [(1e-2, 1e-4, (1e-2, False, 1e-2)), (0, 1e-4, (1e-4, True, 0)), (0, 1e30, (1e30, True, 0))],
)
def test_the_tolerances(rtol, atol, kept):
    solver = Picard(rtol=rtol, atol=atol)
    assert (solver.tol, solver.is_absolute, solver.offset) == kept


def test_a_solver_of_your_own_says_what_it_lacks():
    class Own(Solver):
        pass

    with pytest.raises(NotImplementedError, match=r"Own must define init\(z, kernel\)"):
        solve(torch.cos, torch.zeros(2, 3), Own())
    Own.init = lambda self, z, kernel: State.start(z, kernel)
    with pytest.raises(NotImplementedError, match="Own must define advance.+, or operation"):
        solve(torch.cos, torch.zeros(2, 3), Own())


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_what_your_own_advance_returns_has_no_meaning(kernel):
    class Own(Picard):
        def advance(self, state, fz, k, last):
            super().advance(state, fz, k, last)
            return state

    expected = solve(torch.cos, torch.zeros(2, 3), Picard(), kernel)
    for dropping in (False, True):
        solution = solve(lambda z, rows=None: z.cos(), torch.zeros(2, 3), Own(), kernel, drop_converged=dropping)
        assert torch.equal(solution.value, expected.value) and solution.evaluations == expected.evaluations
