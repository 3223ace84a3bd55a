"""Sudoku puzzles: their rules, an exact solver, a generator, and files of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from runs.files import reading
from runs.options import StudyError
from torch import Tensor
from torch.nn.functional import one_hot

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # height and width of a box
FEWEST = {4: 4, 6: 8, 9: 24}  # with fewer clues the generator takes long, or no puzzle has one solution

Puzzle = tuple[list[int], list[int]]  # clues with 0 for empty, and solution, row by row


@cache
def units(size: int) -> tuple[list[list[int]], list[set[int]]]:
    """Cells of every row, column and box; and for every cell the cells that share one with it."""
    height, width = BOXES[size]
    cells = [divmod(cell, size) for cell in range(size**2)]
    keys = [(("row", r), ("column", c), ("box", r // height, c // width)) for r, c in cells]
    groups = [[cell for cell, mine in enumerate(keys) if key in mine] for key in dict.fromkeys(sum(keys, ()))]
    return groups, [{o for group in groups if cell in group for o in group} - {cell} for cell in range(size**2)]


def propagate(board: list[int], known: list[int], size: int) -> bool:
    """Remove digits (bits) that the cells `known` and those that follow from them rule out; False: a contradiction."""
    groups, peers = units(size)
    while True:
        while known:
            cell = known.pop()
            for peer in peers[cell]:
                if board[peer] & board[cell]:
                    board[peer] ^= board[cell]
                    if not board[peer]:
                        return False
                    if not board[peer] & (board[peer] - 1):
                        known.append(peer)
        for group in groups:
            once = twice = 0
            for cell in group:
                once, twice = once | board[cell], twice | once & board[cell]
            if once != (1 << size) - 1:
                return False
            for cell in group:  # this digit has one place left
                only = board[cell] & once & ~twice
                if only and only != board[cell]:
                    board[cell] = only & -only
                    known.append(cell)
        if not known:
            return True


def solutions(board: list[int], known: list[int], size: int, rng: random.Random | None = None) -> Iterator[list[int]]:
    """All solutions of a board of candidate digits (bits), in an order drawn by `rng`; the board is overwritten."""
    if not propagate(board, known, size):
        return
    if not (unknown := [cell for cell, digits in enumerate(board) if digits & (digits - 1)]):
        yield [digit.bit_length() for digit in board]
        return
    cell = min(unknown, key=lambda cell: board[cell].bit_count())
    digits = [1 << digit for digit in range(size) if board[cell] >> digit & 1]
    for digit in rng.sample(digits, len(digits)) if rng else digits:
        yield from solutions([*board[:cell], digit, *board[cell + 1 :]], [cell], size, rng)


def candidates(clues: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Board of candidate digits as bits, and the cells that are known."""
    board = [1 << digit >> 1 or (1 << size) - 1 for digit in clues]
    return board, [cell for cell, digit in enumerate(clues) if digit]


def generate(size: int, clues: int, rng: random.Random) -> Puzzle:
    """A puzzle with exactly one solution: cells of a random board are emptied as long as the solution stays unique."""
    while True:
        solution = next(solutions(*candidates([0] * size**2, size), size, rng))
        puzzle, left = solution.copy(), size**2
        for cell in rng.sample(range(size**2), size**2):
            if left == clues:
                return puzzle, solution
            puzzle[cell] = 0
            board, known = candidates(puzzle, size)
            board[cell] ^= 1 << solution[cell] >> 1
            if next(solutions(board, known, size), None):
                puzzle[cell] = solution[cell]
            else:
                left -= 1
        if left == clues:
            return puzzle, solution


def read(path: Path, most: int | None = None, skip: int = 0) -> list[Puzzle]:
    """Puzzles of a file, each a line of 81 digits, 0 for empty, a space, and the solution; StudyError names a line."""
    with reading(path, "--data-root takes a folder of puzzles, a line each"):
        path.name.encode()  # the name is part of records
        lines = path.read_text("ascii").splitlines()[skip:][:most]
    puzzles = []
    for number, line in enumerate(lines, skip + 1):
        fields = line.split()
        if [len(field) for field in fields] != [81, 81] or not "".join(fields).isdigit() or "0" in fields[1]:
            raise StudyError(f"{path}, line {number}: not 81 digits (0: empty), a space, and 81 digits of 1 to 9")
        clues, solution = ([int(digit) for digit in field] for field in fields)
        two = list(islice(solutions(*candidates(clues, 9), 9), 2))
        if two != [solution]:
            what = ("no solution", "another solution than the line says", "more than one solution")[len(two)]
            raise StudyError(f"{path}, line {number}: the puzzle has {what}")
        puzzles.append((clues, solution))
    return puzzles


def read_folder(folder: Path, most: int | None = None, skip: int = 0) -> dict[str, list[Puzzle]]:
    """The first puzzles of every *.txt of a folder after `skip` of them, by its name."""
    paths = [path for path in sorted(folder.glob("*.txt")) if path.stem not in ("LICENSE", "README")]
    known = {path.stem: puzzles for path in paths if (puzzles := read(path, most, skip))}
    if not known:
        raise StudyError(f"--data-root {folder}: a folder of *.txt with a puzzle a line")
    return known


def tensors(puzzles: Sequence[Puzzle], size: int) -> tuple[Tensor, Tensor]:
    """Clues and digits (B, n, n)."""
    clues, digits = torch.tensor(puzzles).view(-1, 2, size, size).unbind(1)
    return clues, digits


def encode(clues: Tensor) -> Tensor:
    """x (B, n, n, n, 2) of clues (B, n, n): the placement is given; another one in its cell is."""
    given = one_hot(clues, clues.shape[1] + 1)[..., 1:].float()
    return torch.stack([given, (clues > 0).float()[..., None] - given], -1)
