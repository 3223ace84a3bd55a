"""Sudoku: the solver and generator are exact, digits and lines interchangeable, and bad input is told in a line."""

from __future__ import annotations

import random

import pytest
import sudoku
import sudoku_puzzles
import torch
from runs import SettingsError, StudyError

EASY = (
    "050703060007000800000816000000030000005000100730040086906000204840572093000409000 "
    "158723469367954821294816375619238547485697132732145986976381254841572693523469718"
)


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


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("12 34", "not 81 digits"),
        (EASY.replace("0507", "5507"), "the puzzle has no solution"),
        (EASY.replace("0507", "0007").replace("7003", "0000").replace("0409", "0000"), "more than one solution"),
        (EASY[:-1] + "1", "another solution than the line says"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, told):
    (tmp_path / "real.txt").write_text(f"{EASY}\n{line}\n")
    with pytest.raises(StudyError, match=f"real.txt, line 2: .*{told}"):
        sudoku.check(sudoku.Sudoku(size="9", data_root=str(tmp_path)))


def test_bad_options_and_folders(tmp_path):
    with pytest.raises(StudyError, match=r"folder of \*.txt"):
        sudoku.check(sudoku.Sudoku(size="9", data_root=str(tmp_path)))
    with pytest.raises(SettingsError, match="--clues 3: 8 to 35 with --size 6"):
        sudoku.Sudoku(clues=3)
    with pytest.raises(SettingsError, match="--size 6: 9 with --data-root"):
        sudoku.Sudoku(data_root=str(tmp_path))
