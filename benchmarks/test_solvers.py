"""Solver time per iteration at (128, 8192) fp32 beside torchdeq as it ships: same f, same iterations, one run.

    pytest benchmarks

f is an element-wise contraction, cheap enough to be subtracted. The byte floor is what the algorithm must move, at the
copy rate measured in the same run.
"""

import statistics

import pytest
import torch
from common import APPROACHED, Contraction, least_seconds, passes_over_the_state, peer_of, solvers, torchdeq_solve

import deqfast

BATCH, DIM, ITERATIONS, ROUNDS = 128, 8192, 20, 7
STATE_BYTES = BATCH * DIM * 4
SOLVERS = solvers(ITERATIONS)


@pytest.fixture(scope="module")
def copy_rate():
    """Bytes per second of a large copy, read and write counted."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / least_seconds(lambda: target.copy_(source), ROUNDS)


def solve_deqfast(name, kernel):
    solver = SOLVERS[name][0]
    return lambda f, z0: deqfast.solve(f, z0, solver, kernel).value


def solve_torchdeq(name):
    pytest.importorskip("torchdeq.solver", reason="torchdeq is not installed")
    return torchdeq_solve(SOLVERS[name][1], ITERATIONS, SOLVERS[name][2])


CASES = [(name, provider) for name, (_, peer, _) in SOLVERS.items()
         for provider in ("cpp", "torch", *(["torchdeq"] if peer else []))]  # fmt: skip


@pytest.mark.parametrize(("name", "provider"), CASES, ids=[f"{n.replace(' ', '-')}-{p}" for n, p in CASES])
def test_solver_time(benchmark, record, copy_rate, name, provider):
    if provider != "torchdeq" and not deqfast.backends()[provider]:
        pytest.skip(deqfast.backends()[provider].reason)
    f, z0 = Contraction(BATCH, DIM), torch.zeros(BATCH, DIM)
    solve = solve_torchdeq(name) if provider == "torchdeq" else solve_deqfast(name, provider)

    value = solve(f, z0)  # warm-up, and the answer is checked before any time is taken
    evaluations, residual = f.calls, f.residual(value)
    assert residual < APPROACHED, f"{provider} did not approach the fixed point: relative residual {residual:.1e}"

    def calls_of_f():
        z = z0
        for _ in range(evaluations):
            z = f(z)

    benchmark.group = name
    benchmark.pedantic(solve, args=(f, z0), rounds=ROUNDS, warmup_rounds=1)
    f_seconds = least_seconds(calls_of_f, ROUNDS)
    seconds = benchmark.stats.stats.min - f_seconds
    passes = None if provider == "torchdeq" else passes_over_the_state(SOLVERS[name][0])
    row = {
        "case": name,
        "peer": peer_of(name),
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
