"""Known roots of the classical systems; the command judges by them."""

import json
import subprocess
import sys

import classical
import pytest
import torch
from harness.classical import EQUATIONS

ROUNDING = 1e-12
DIGITS = {"Powell badly scaled": 1e-5}  # the root is known to ten digits, and F multiplies it by 1e5


each_problem = pytest.mark.parametrize("problem", EQUATIONS, ids=lambda problem: problem.name)


@each_problem
def test_known_solutions_solve(problem):
    if problem.solution is not None:
        value = problem.map(problem.solution[None])
        assert float(value.abs().max()) <= DIGITS.get(problem.name, ROUNDING)


@each_problem
def test_rows_do_not_depend_on_each_other(problem):
    noise = torch.randn(3, len(problem.start), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = problem.start + 0.1 * noise
    value = problem.map(rows)
    assert value.shape == rows.shape and value.dtype == problem.start.dtype == torch.float64
    alone = torch.cat([problem.map(row[None]) for row in rows])
    torch.testing.assert_close(value, alone, rtol=ROUNDING, atol=ROUNDING)


def test_a_wrong_claim_is_counted_for_both_signs():
    row = classical.solve_equations(EQUATIONS[0], lambda f, z0: (z0, "CONVERGED", 1))
    assert row["false"] == 2 and row["missed"] == 1 and classical.cell(row) == "CONVERGED, false"


@pytest.mark.tier("full")
def test_the_command_prints_tables_and_writes_a_record(tmp_path):
    options = ("--only", "problem 18", "--solver", "Anderson", "--out", tmp_path / "a.json")
    command = [sys.executable, *map(str, (classical.__file__, *options))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 18 Sample problem 18 |" in result.stdout and "solved, of 1" in result.stdout
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["machine"]["commit"] and all(row["missed"] == 0 for row in record["rows"])
