"""Pictures of Sudoku boards while they are solved, and the figure of the example."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
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
DARK, GREY, LINE, RIGHT, WRONG = (40, 44, 58), (233, 233, 236), (190, 194, 204), (64, 132, 214), (222, 62, 56)


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


def picture(film: dict[str, Any], k: int, side: int = 340) -> Image.Image:
    """The board after k evaluations: clues grey, right cells blue, wrong ones red; paler means less confident."""
    size, scale = round(len(film["clues"]) ** 0.5), 2
    height, width = BOXES[size]
    cell, foot = scale * side / size, scale * 44
    board = Image.new("RGB", (scale * side + 1, scale * side + foot), "white")
    draw = ImageDraw.Draw(board)
    path = font_manager.findfont("DejaVu Sans")
    font, small = ImageFont.truetype(path, int(cell * 0.56)), ImageFont.truetype(path, scale * 17)
    digits, sure = film["frames"][k]
    for place, (clue, digit, true) in enumerate(zip(film["clues"], digits, film["digits"], strict=True)):
        row, column = divmod(place, size)
        shade = max(0.0, (sure[place] - 1 / size) / (1 - 1 / size))
        hue = RIGHT if digit == true else WRONG
        fill = GREY if clue else tuple(round(255 - (255 - c) * (0.06 + 0.62 * shade)) for c in hue)
        draw.rectangle((column * cell, row * cell, (column + 1) * cell, (row + 1) * cell), fill)
        ink = (
            DARK
            if clue
            else tuple(round(b + min(1, 2 * shade) * (0.35 * c - b)) for b, c in zip(fill, hue, strict=True))
        )
        draw.text(((column + 0.5) * cell, (row + 0.5) * cell), str(clue or digit), ink, font, anchor="mm")
    for line in range(size + 1):
        for thick, ends in (
            (line % height == 0, (0, line * cell, size * cell, line * cell)),
            (line % width == 0, (line * cell, 0, line * cell, size * cell)),
        ):
            draw.line(ends, DARK if thick else LINE, 3 * scale if thick else scale)
    draw.text((scale * side / 2, scale * side + foot / 2), progress(film, k), DARK, small, anchor="mm")
    return board.resize((side, side + foot // scale), Image.Resampling.LANCZOS)


def animation(film: dict[str, Any]) -> bytes:
    """GIF of at most 25 evaluations: each one, or every second, third, ... one; the last frame stays."""
    last = len(film["frames"]) - 1
    frames = [picture(film, k) for k in [*range(0, last, 1 + last // 25), last]]
    shown = Image.new("RGB", (frames[0].width, sum(frame.height for frame in frames)))
    for k, frame in enumerate(frames):
        shown.paste(frame, (0, k * frame.height))
    palette = shown.quantize(32)  # one palette for all frames, so that the file of a frame holds only its changes
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [800, *[250] * len(frames)][: len(frames) - 1] + [3000]
    content = io.BytesIO()
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    return content.getvalue()


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
            board = picture(films[0], k)
            axis.imshow(board.crop((0, 0, board.width, board.width)))
            axis.set_title(progress(films[0], k).replace(":  ", ":\n"), fontsize="small")
            axis.axis("off")
    return figure
