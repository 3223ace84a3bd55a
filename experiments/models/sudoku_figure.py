"""Pictures of Sudoku boards while they are solved, and the figure of the example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import style
from torch import Tensor

import deqfast

from .frame import Record
from .sudoku_puzzles import BOXES

ARMS = {  # names in figures
    "deq": "trained as a DEQ",
    "explicit-parameters": "trained with ten unrolled steps",
    "explicit-compute": "ten separate blocks",
}
DARK, GREY, RIGHT, WRONG = (0.16, 0.17, 0.23), (0.91, 0.91, 0.93), (0.25, 0.52, 0.84), (0.87, 0.24, 0.22)


def film(solver: deqfast.DEQBlock, x: Tensor, clues: Tensor, digits: Tensor) -> dict[str, Any]:
    """Answers (digits, confidences) of a puzzle after every evaluation, from the random start that needs the most
    evaluations."""
    most = solver.current_solver.max_iter
    states = solver.trajectory(x.expand(8, *x.shape), at=range(1, most + 1))[:most]
    sure, answer = torch.stack([y for y, _ in states]).softmax(-1).flatten(2, 3).max(-1)
    right = (answer + 1 == digits.flatten()).all(-1)
    until = (torch.arange(1, most + 1)[:, None] * ~right).amax(0)  # by start; `most`: never right
    start = int(torch.where(until < most, until, 0).argmax())
    shown = range(min(int(until[start]), most - 1) + 1)
    frames = [[(answer[k, start] + 1).tolist(), [round(p, 2) for p in sure[k, start].tolist()]] for k in shown]
    return {"clues": clues.flatten().tolist(), "digits": digits.flatten().tolist(), "frames": frames}


def progress(film: dict[str, Any], k: int) -> str:
    """How many cells are right after k evaluations."""
    cells = zip(film["clues"], film["frames"][k][0], film["digits"], strict=True)
    right = sum(not clue and digit == true for clue, digit, true in cells)
    return f"evaluation {k}:  {right} of {film['clues'].count(0)} cells right"


def board(axis: Axes, film: dict[str, Any], k: int) -> None:
    """Draw the board after k evaluations: clues grey, right cells blue, wrong ones red; paler means less confident."""
    size = round(len(film["clues"]) ** 0.5)
    height, width = BOXES[size]
    digits, sure = map(np.array, film["frames"][k])
    given, right = (np.array(film["clues"]) > 0)[:, None], (digits == film["digits"])[:, None]
    shade = 0.06 + 0.62 * np.clip((sure[:, None] - 1 / size) / (1 - 1 / size), 0, 1)
    fill = np.where(given, GREY, 1 - shade * (1 - np.where(right, RIGHT, WRONG)))
    axis.imshow(fill.reshape(size, size, 3), extent=(0, size, size, 0))
    for place, digit in enumerate(digits):
        axis.text(place % size + 0.5, place // size + 0.5, digit, ha="center", va="center", color=DARK)
    axis.hlines(range(0, size + 1, height), 0, size, DARK)
    axis.vlines(range(0, size + 1, width), 0, size, DARK)
    axis.set_axis_off()


def draw(records: Sequence[Record]) -> Figure:
    """Boards solved against evaluations and against starts, means and ranges over the seeds; and a board at the start,
    halfway and at the end of its solve."""
    figure = style.page(6.2, style.NARROW)
    above, below = figure.subfigures(2, 1, height_ratios=(2.2, 1), squeeze=False)[:, 0]
    curve, starts = above.subplots(2, 1).tolist()
    for arm, name in ARMS.items():
        own = [record for record in records if record.arm == arm]
        look = style.look(arm) | {"label": name}
        solves = [record.shown for record in own if record.shown]
        if solves:
            (evaluations, *_), *_ = curves = [list(zip(*shown["curve"], strict=True)) for shown in solves]
            style.band(curve, evaluations, [solved for _, solved in curves], **look)
            chosen = [[least for _, least in shown["starts"]] for shown in solves]
            style.band(starts, range(1, len(chosen[0]) + 1), chosen, **look)
        elif own:
            solved = [record.scores["boards as trained, %"] for record in own]
            curve.axhline(sum(solved) / len(solved), color=look["color"], ls="-.", label=name)
    curve.set_xscale("log", base=2)
    curve.xaxis.set_major_formatter("{x:g}")
    starts.xaxis.get_major_locator().set_params(integer=True)
    seeds = len({record.seed for record in records})
    curve.set(title=f"boards solved, % (mean and range of {seeds} seeds)", ylim=(0, 103))
    curve.set_xlabel("evaluations of the block")
    starts.set(title="boards solved, %, by the start of the least residual", ylim=(0, 103), xlabel="random starts")
    style.legend(above, 1)
    if films := [record.shown["film"] for record in records if record.shown]:
        below.suptitle("a board while it is solved: right cells blue, wrong ones red")
        last = len(films[0]["frames"]) - 1
        for axis, k in zip(below.subplots(1, 3), (0, last // 2, last), strict=True):
            board(axis, films[0], k)
            axis.set_title(progress(films[0], k).replace(":  ", ":\n"), fontsize="small")
    return figure
