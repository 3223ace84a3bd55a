"""Solver time per iteration at (128, 8192) fp32 beside torchdeq as it ships: same f, same iterations, one run.

    pytest benchmarks

f is an element-wise contraction, cheap enough to be subtracted. The byte floor is what the algorithm must move, at the
copy rate measured in the same run.
"""

import statistics
import time

import pytest
import torch

import deqfast

BATCH, DIM, ITERATIONS, ROUNDS = 128, 8192, 20, 7
STATE_BYTES = BATCH * DIM * 4
NEVER = 1e-30  # a tolerance no solve meets, so that all make the same number of iterations

SOLVERS = {
    "picard": (deqfast.Picard(NEVER, ITERATIONS), "fixed_point_iter", {}),
    "anderson m=6": (deqfast.Anderson(NEVER, ITERATIONS), "anderson", {"m": 6}),
    "anderson m=6 bf16 history": (deqfast.Anderson(NEVER, ITERATIONS, history_dtype=torch.bfloat16), None, {}),
    "broyden n=20": (deqfast.Broyden(NEVER, ITERATIONS), "broyden", {}),
}


def passes_over_the_state(solver) -> float:
    """Passes of the algorithm over (B, D) fp32 per iteration, averaged over a solve that fills the window."""
    if isinstance(solver, deqfast.Picard):
        return 3  # read z and f, write z
    width = 0.5 if solver.history_dtype == torch.bfloat16 else 1
    sizes = [min(k, solver.history or ITERATIONS) for k in range(ITERATIONS - 1)]
    return sum(6 + 2 * width + 2 * width * n for n in sizes) / ITERATIONS


class Contraction:
    """f(z) = c + lambda z, whose fixed point is known; counts its calls."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.c = torch.randn(BATCH, DIM, generator=generator)
        self.eigenvalues = torch.linspace(-0.9, 0.95, DIM)
        self.calls = 0

    def __call__(self, z):
        self.calls += 1
        return torch.addcmul(self.c, z, self.eigenvalues)

    def residual(self, z):
        """Largest relative residual of the batch, in float64."""
        z = z.double()
        f = self.c.double() + z * self.eigenvalues.double()
        return float(((f - z).norm(dim=1) / f.norm(dim=1)).max())


def least_seconds(run, rounds=ROUNDS):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture(scope="module")
def copy_rate():
    """Bytes per second of a large copy, read and write counted."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / least_seconds(lambda: target.copy_(source))


def solve_deqfast(name, kernel):
    solver = SOLVERS[name][0]
    return lambda f, z0: deqfast.solve(f, z0, solver, kernel).value


def solve_torchdeq(name):
    get_solver = pytest.importorskip("torchdeq.solver", reason="torchdeq is not installed").get_solver
    solver, options = get_solver(SOLVERS[name][1]), SOLVERS[name][2]
    return lambda f, z0: solver(f, z0, max_iter=ITERATIONS, tol=NEVER, stop_mode="rel", **options)[0]


CASES = [(name, provider) for name, (_, peer, _) in SOLVERS.items()
         for provider in ("cpp", "torch", *(["torchdeq"] if peer else []))]  # fmt: skip


@pytest.mark.parametrize(("name", "provider"), CASES, ids=[f"{n.replace(' ', '-')}-{p}" for n, p in CASES])
def test_solver_time(benchmark, record, copy_rate, name, provider):
    if provider != "torchdeq" and not deqfast.backends()[provider]:
        pytest.skip(deqfast.backends()[provider].reason)
    f, z0 = Contraction(), torch.zeros(BATCH, DIM)
    solve = solve_torchdeq(name) if provider == "torchdeq" else solve_deqfast(name, provider)

    value = solve(f, z0)  # warm-up, and the answer is checked before any time is taken
    evaluations, residual = f.calls, f.residual(value)
    assert residual < 0.05, f"{provider} did not approach the fixed point: relative residual {residual:.1e}"

    def calls_of_f():
        z = z0
        for _ in range(evaluations):
            z = f(z)

    benchmark.group = name
    benchmark.pedantic(solve, args=(f, z0), rounds=ROUNDS, warmup_rounds=1)
    f_seconds = least_seconds(calls_of_f)
    seconds = benchmark.stats.stats.min - f_seconds
    passes = None if provider == "torchdeq" else passes_over_the_state(SOLVERS[name][0])
    row = {
        "case": name,
        "peer": name.removesuffix(" bf16 history"),
        "provider": provider,
        "ms": 1e3 * seconds / evaluations,
        "floor": passes and 1e3 * passes * STATE_BYTES / copy_rate,
        "evaluations": evaluations,
        "residual": residual,
    }
    benchmark.extra_info.update(
        row,
        f_ms=1e3 * f_seconds / evaluations,
        copy_gb_per_s=copy_rate / 1e9,
        median_ms=1e3 * (statistics.median(benchmark.stats.stats.data) - f_seconds) / evaluations,
    )
    record(row)
