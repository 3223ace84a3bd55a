"""Sudoku: the solver and generator are exact, tiny runs train, and bad input is told in a line."""

from __future__ import annotations

import io
import random

import msgspec
import pytest
import runs
import sudoku
import sudoku_puzzles
import torch
from PIL import Image
from sudoku_figure import animation

EASY = (
    "050703060007000800000816000000030000005000100730040086906000204840572093000409000 "
    "158723469367954821294816375619238547485697132732145986976381254841572693523469718"
)
TINY = ["--size", "4", "--puzzles", "8", "--tests", "4", "--steps", "2", "--evaluations", "3", "--starts", "2"]
TINY += ["--width", "4", "--batch-size", "2", "--seeds", "1", "--jobs", "1"]


@pytest.fixture
def run(tmp_path, capsys):
    """Run the script with --out in tmp_path: exit status, output and errors."""

    def run(*arguments):
        options = [*arguments, "--out", str(tmp_path / "out")]
        try:
            status = runs.main(None, sudoku.Sudoku, sudoku.ARMS, sudoku.train, sudoku.draw, options, sudoku.check)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


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


def test_tiny_runs_make_table_figure_and_film(run, tmp_path):
    status, output, _ = run(*TINY)
    assert status == 0
    assert all(arm in output for arm in sudoku.ARMS) and "least residual of 2" in output
    assert (tmp_path / "out/sudoku.png").stat().st_size > 10_000
    assert Image.open(tmp_path / "out/deq-seed0.gif").n_frames > 1
    record = msgspec.json.decode((tmp_path / "out/deq-seed0.json").read_bytes(), type=runs.Record)
    assert 0 < record.scores["evaluations a solve"] <= 3


def test_film_is_a_small_picture():
    frames = [[[1 + (cell + k) % 9 for cell in range(81)], [k / 30] * 81] for k in range(30)]
    content = animation({"clues": [0] * 81, "digits": [1] * 81, "frames": frames})
    assert len(content) < 300_000 and Image.open(io.BytesIO(content)).n_frames == 16


def test_least_residuals_are_the_confidence():
    residual, boards = torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([True, False, True, False])
    assert sudoku.auc(residual, boards) == 1 and sudoku.auc(-residual, boards) == 0
    assert sudoku.answered(residual, boards, 4) == pytest.approx([100, 100, 200 / 3, 50])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("12 34", "line 2: not 81 digits"),
        (EASY.replace("0507", "5507"), "line 2: the puzzle has no solution"),
        (EASY.replace("0507", "0007").replace("7003", "0000").replace("0409", "0000"), "more than one solution"),
        (EASY[:-1] + "1", "another solution than the line says"),
    ],
)
def test_bad_line_is_named(run, tmp_path, line, told):
    (tmp_path / "real.txt").write_text(f"{EASY}\n{line}\n")
    status, _, errors = run("--size", "9", "--data-root", str(tmp_path))
    assert status == 1 and told in errors and "real.txt, line 2" in errors


def test_bad_options_and_folders(run, tmp_path):
    assert "folder of *.txt" in run("--size", "9", "--data-root", str(tmp_path / "none"))[2]
    status, _, errors = run("--clues", "3")
    assert status == 2 and "--clues 3: 8 to 35 with --size 6" in errors
    assert "--size 6: 9 with --data-root" in run("--data-root", str(tmp_path))[2]
