"""The transposed product of a window of pairs, and the adjoint made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from correctness import ACCURACY_UNITS, after_solve, assert_accurate, assert_close, lost, rounding
from correctness.states import METHODS, Case, make_state
from interpreter import INTERPRETED
from op_calls import OPTIONS, SHORT_HISTORY, check_bits
from solutions import SOLVERS, solve_with_inverse

import deqfast
from deqfast.ops import Kernel

DTYPES = OPTIONS | {"bf16 history": SHORT_HISTORY}
every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
SCALARS = {"alpha": 0.7, "beta": 0.8}


def window_after(case: Case, k: int, device="cpu"):
    """left, df, gram when the step of iteration k has been taken: pairs 0 ... k - 1 are in the matrix."""
    case = replace(case, k=k)
    state = make_state(case, device)
    case.call(case.reference, state)
    return state["left"], state["df"], state["gram"]


def arguments(case: Case, k: int, counts: list[int], device="cpu"):
    """Windows whose newest pair is k - 1. The next step lies in slot k, the oldest pair's in a full window."""
    left, df, gram = window_after(case, k, device)
    newest = torch.full((case.batch,), k - 1, dtype=torch.int32, device=device)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    # What lies outside the window must not matter.
    for row, n in enumerate(counts):
        inside = [(k - 1 - age) % case.history for age in range(n)]
        outside = [slot for slot in range(case.history) if slot not in inside]
        left[row, outside], df[row, outside] = torch.nan, torch.nan
        gram[row][:, outside] = torch.nan
        gram[row][outside] = torch.nan
    v = torch.randn(case.batch, case.size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return v.to(case.dtype).to(device), left, df, gram, newest, count


def scalars(case: Case):
    return METHODS[case.method], case.alpha, case.beta, case.ridge


def as_exact(args):
    return [a.double() if a.is_floating_point() else a for a in args]


def shared_by_blocks(size: int, implementation) -> int:
    """Of 8200, what Triton's interpreter runs in a short time: a program has 1024 columns, so three share a sample."""
    return 3080 if size == 8200 and implementation.name == "triton" and INTERPRETED else size


@pytest.fixture
def op(implementation):
    return implementation.op("multisecant_transposed"), implementation.device


def dense(case: Case, left, df, gram, newest: int, count: int):
    """L, DF (n, D) and the inverse of N of one sample by age; N is as the step solves with it, of pairs of length 1."""
    order = [(newest - age) % case.history for age in range(count)]
    lengths = gram[case.history :, order].rsqrt()
    scaled = gram[order][:, order] * lengths[0][:, None] * lengths[1]
    if case.method == "bad":
        scaled = scaled.tril()
    elif case.method.startswith("and"):
        scaled = scaled + case.ridge * torch.diag(scaled.diagonal().sign())
    inverse = lengths[1][:, None] * torch.linalg.inv(scaled) * lengths[0]
    return left[order], df[order], inverse, scaled / lengths[0][:, None] / lengths[1]


@every_method
def test_it_is_the_transpose_of_the_step(method):
    """Against the matrix that the step applies to g, built column by column."""
    size, k, n = 7, 5, 3
    case = Case(method, batch=1, size=size, history=4, k=k, dtype=torch.float64, ridge=2.0**-10, **SCALARS)
    window = window_after(case, k)
    left, df, inverse, _ = dense(case, *(t[0] for t in window), k - 1, n)
    step = case.alpha * (case.beta * torch.eye(size, dtype=torch.float64) - df.T @ inverse @ left)  # -H
    many = [t.expand(size, *t.shape[1:]).contiguous() for t in window]
    newest, count = (torch.full((size,), value, dtype=torch.int32) for value in (k - 1, n))
    v = torch.eye(size, dtype=torch.float64)
    rows = Kernel("torch").op("multisecant_transposed")(v, *many, newest, count, *scalars(case))
    # Row j is -H^T e_j, which is row j of -H.
    assert_close(rows, step, rounding(torch.float64, ACCURACY_UNITS * condition(case, [v, *many, newest, count], rows)))


def condition(case: Case, args, exact) -> float:
    """Condition number of the product: the sum of the magnitudes of its terms over the largest entry of the result.

    A rounding of every operand of the sums and of the elimination changes the result by this number of roundings.
    """
    v, left, df, gram, newest, count = as_exact(args)
    largest = 0.0
    for row, n in enumerate(count.tolist()):
        lefts, dfs, inverse, matrix = (t.abs() for t in dense(case, left[row], df[row], gram[row], int(newest[row]), n))
        t = dfs @ v[row].abs()
        gamma = inverse.T @ (t + matrix.T @ inverse.T @ t)
        largest = max(largest, float((case.beta * v[row].abs() + lefts.T @ gamma).max()))
    return abs(case.alpha) * largest / float(exact.abs().max())


# Of the CPU also a size of several chunks, of which two threads share three samples: see csrc/cpu/samples.h.
# The longest is shared by blocks, and its last one is short.
SIZES = [(1, 1, 3), (63, 4, 6), (777, 3, 2), (64, 12, 12), (40, 20, 19), (8200, 10, 12)]
RUNS = [(made, *size) for made in ("cpp", "triton", "cuda", "emulated") for size in SIZES]


@pytest.mark.covering(2)
@every_method
@every_dtype
@pytest.mark.parametrize(
    ("implementation", "size", "history", "k"), [*RUNS, ("cpp", 3 * 4096 + 777, 4, 6)], indirect=["implementation"]
)
def test_accuracy(method, dtype, size, history, k, op, implementation, set_threads):
    set_threads(2 if size > 4096 else 1)
    size = shared_by_blocks(size, implementation)
    product, device = op
    case = Case(method, batch=3, size=size, history=history, wobble=0.5, ridge=2.0**-6, **SCALARS, **DTYPES[dtype])
    counts = [max(0, min(k, history - 1)), min(1, max(0, history - 1)), 0]
    args = arguments(case, k, counts, device)
    actual = product(*args, *scalars(case))
    exact = Kernel("torch").op("multisecant_transposed")(*as_exact(args), *scalars(case))
    plain = Kernel("torch").op("multisecant_transposed")(*args, *scalars(case))
    assert_accurate(actual, plain, exact, units=ACCURACY_UNITS * condition(case, args, exact))
    assert_close(actual[2], case.alpha * case.beta * args[0][2], rounding(case.dtype, 2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [70, 8200])
@every_method
def test_an_empty_batch_and_the_same_bits(method, size, op, implementation, set_threads):
    size = shared_by_blocks(size, implementation)
    product, device = op
    case = Case(method, batch=3, size=size, history=4)
    args = arguments(case, 6, [3, 2, 0], device)
    check_bits(product, [*args, *scalars(case)], implementation, set_threads, case.batch)
    assert product(*(tensor[:0] for tensor in args), *scalars(case)).shape == (0, size)


@pytest.mark.parametrize("name", ["anderson", "broyden"])
def test_gradients_are_nearer_to_the_implicit_ones_than_those_of_jfb(name):
    x, cell = torch.randn(5, 4, dtype=torch.float64), deqfast.FCCell(4, 6).double()
    solver, gradients = SOLVERS[name](rtol=1e-10, max_iter=40, history_size=20), []
    for adjoint in ("implicit", "shine", "jfb"):
        value = deqfast.DEQBlock(cell, solver, adjoint)(x).pow(2).sum()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, [*cell.parameters()])]))
    exact, shine, jfb = gradients
    assert (shine - exact).norm() < 0.7 * (jfb - exact).norm()


def test_the_history_of_a_finished_sample_stays(kernel, device):
    """The windows slide on for the others long after the first is done."""
    rates = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=device)[:, None]

    def estimate(rates, **options):
        def f(z, rows=None):
            here = rates if rows is None else rates[rows]
            return here * torch.linspace(0.2, 1, 12, dtype=z.dtype, device=device) * torch.cos(z) + 1

        z0 = torch.zeros(len(rates), 12, dtype=rates.dtype, device=device)
        solver = deqfast.Anderson(rtol=1e-5, history_size=3, max_iter=60)
        _, inverse = solve_with_inverse(f, z0, solver, kernel, **options)
        return inverse(torch.ones_like(z0))

    alone = torch.cat([estimate(rate[None]) for rate in rates])
    for compact in (False, True):
        assert_close(
            estimate(rates, drop_converged=compact), alone, after_solve(lost(torch.float64, 1e-5), 1 / (1 - 0.9))
        )


def test_without_a_gradient_it_needs_no_history():
    with torch.no_grad():
        deqfast.DEQBlock(deqfast.LinearCell(3), "picard", "shine")(torch.randn(2, 3))


def test_jfb_is_taken_for_samples_that_the_inverse_of_the_history_makes_too_long():
    """Of slopes near 0 and near 1, whose inverse is 1 and 20."""
    slope, gradients = torch.tensor([[0.05], [0.95]], dtype=torch.float64), []
    for adjoint in ("jfb", deqfast.SHINE(fallback=1e9), deqfast.SHINE(fallback=5)):
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        block = deqfast.DEQBlock(lambda z, x: slope * z + x, deqfast.Broyden(rtol=1e-10), adjoint)
        gradients.append(torch.autograd.grad(block(x).sum(), x)[0])
    jfb, free, bounded = gradients
    assert (free[1] > 15 * jfb[1]).all() and torch.equal(bounded[1], jfb[1])
    assert torch.equal(bounded[0], free[0]) and not torch.equal(free[0], jfb[0])
