"""Time to a residual: Picard, Anderson and Broyden compared with torchdeq's, each until the worst sample meets it.

    pytest benchmarks/test_time_to_residual.py --full --record FILE [--run RUN --data-root DATA]

docs/pages/choosing.md describes the comparison. A time counts only if the returned value, put into f in
float64, has a relative residual within the tolerance in every sample; torchdeq's own claim does not count. On trained
cells deqfast's default solvers also run with kernel="torch". deqfast returns a sample's first iterate within the
tolerance. torchdeq continues with all samples until one iterate of the whole batch is within it. Its finished samples
therefore end nearer to the solution, and may leave it again.
"""

from __future__ import annotations

import pytest
from harness import problems, trained
from harness.races import TOLERANCES, measure, providers

ROUNDS = 5


def race(board, problem, on_torch):
    """Keep the rows of a problem. A wrong answer is recorded, and does not fail the test."""
    pytest.importorskip("torchdeq")
    compared = providers(on_torch)
    for row in [row for tol in TOLERANCES for row in measure(problem, compared, tol, ROUNDS)]:
        board.add(row)


@pytest.mark.full
@pytest.mark.parametrize("name", problems.MAPS)
def test_suite(board, name):
    for problem in problems.suite(name):
        race(board, problem, on_torch=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("activation", trained.DIGITS_STEPS)
def test_digits(board, activation):
    race(board, trained.digits_cell(activation), on_torch=True)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_study(board, pytestconfig):
    run, data_root = pytestconfig.getoption("--run"), pytestconfig.getoption("--data-root")
    if run is None:
        pytest.skip("--run names no run of the study")
    race(board, trained.study_cell(run, data_root), on_torch=True)
