"""Sudoku: the solver and generator are exact; digits and lines are interchangeable."""

from __future__ import annotations

import random

import pytest
import torch
from models import sudoku, sudoku_puzzles


@pytest.mark.parametrize(("size", "clues"), [(4, 5), (6, 10), (9, 30)])
def test_generated_puzzles_have_one_solution_and_so_many_clues(size, clues):
    puzzle, solution = sudoku_puzzles.generate(size, clues, random.Random(0))
    assert size**2 - puzzle.count(0) == clues
    assert list(sudoku_puzzles.solutions(*sudoku_puzzles.candidates(puzzle, size), size)) == [solution]
    for group in sudoku_puzzles.units(size)[0]:
        assert sorted(solution[cell] for cell in group) == list(range(1, size + 1))


def test_solver_finds_all_solutions():
    boards = list(sudoku_puzzles.solutions(*sudoku_puzzles.candidates([0] * 16, 4), 4))
    assert len(boards) == len(set(map(tuple, boards))) == 288  # of 4 x 4 boards


def test_digits_and_lines_are_interchangeable_to_the_block():
    torch.manual_seed(0)
    block = sudoku.Block(6, 8)
    clues, _ = sudoku_puzzles.tensors([sudoku_puzzles.generate(6, 12, random.Random(0))], 6)
    x = sudoku_puzzles.encode(clues)
    y, z = block.start(x)
    digits, rows = torch.randperm(6), torch.tensor([1, 0, 4, 5, 2, 3])  # lines within a band, and bands
    moved, _ = block((y[:, rows][..., digits], z[:, rows][..., digits, :]), x[:, rows][..., digits, :])
    torch.testing.assert_close(moved, block((y, z), x)[0][:, rows][..., digits])


def test_least_residuals_are_the_confidence():
    residual, boards = torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([True, False, True, False])
    assert sudoku.auc(residual, boards) == 1 and sudoku.auc(-residual, boards) == 0
    assert sudoku.answered(residual, boards, 4) == pytest.approx([100, 100, 200 / 3, 50])
