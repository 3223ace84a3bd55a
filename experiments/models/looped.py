"""Sudoku by a looped block: trained with a carry, compared with training that makes all steps of every puzzle.

Both arms train the block of the model sudoku, from the same weights, in the way of TRM (Jolicoeur-Martineau, 2025). A
step solves by six evaluations from the kept state, calls the block four times with a gradient, and updates the weights.
The next step starts from the state at which this one has ended. A puzzle takes at most eight steps.
all-steps: every puzzle of a batch takes all of them, then the next batch comes. carry: a puzzle whose solve has
converged (1e-3) leaves, and another one takes its place. A solve that does not converge gives its last state.

Decided before the runs: both arms get the same --seconds of CPU time (time.process_time) of training. Tests do not
count. The learning rate is one function of the share of these seconds that is spent. The score is the share of boards
solved at the end, by one solve of 64 evaluations from a random start. The second score is its mean over the tests
during training. Options are those of the model sudoku. The time at hand set --seconds.
One thing was changed after a run: the first form took phantom gradients at the last state of a solve. In seed 0 no
solve converged then. Boards solved went up and down between 0 and 77 % with the carry, and ended at 41 % without it.

Afterwards the trained block solves puzzles in batches in three ways. all rows: each batch until its slowest puzzle is
done. drop_converged: the same with this option. carry: the batch is refilled after every eight evaluations. All have
the same starts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from runs import style
from runs.options import option
from torch import Tensor

import deqfast

from .frame import Example, Outcome, Record, Run, descend
from .sudoku import PHANTOM, Block, Equilibrium, State, SudokuOptions, drawn, loss_of, percent, solved
from .sudoku_puzzles import encode, generate, tensors

ARMS = ("carry", "all-steps")
MOST = 8  # steps of a puzzle
TESTS = 6  # during training, at equal distances
PART, ROWS = 8, 32  # evaluations between two refills, and rows of a batch, when a trained block solves


@dataclass(frozen=True, kw_only=True)
class Looped(SudokuOptions):
    """Options of the model."""

    all_arms = ARMS

    seconds: float = option("training", "CPU seconds of training", 30.0, above=0.0)
    steps: int = option("training", "most training steps", 1_000_000, minimum=1)
    tests: int = option("data", "puzzles to test on", 128, minimum=1)
    served: int = option("data", "puzzles that the trained block solves in three ways", 384, minimum=1)


class Loop(Equilibrium):
    """The block's fixed point, or the last state of a solve that does not get there, also in training.

    A carry of the states of least residual could return to its own start in every step.
    """

    def ends(self, state: State, value: State, k: int) -> Tensor:
        return torch.full((len(state[0]),), k == self.current_solver.max_iter)


class Clock:
    """CPU seconds of this process that were spent within it."""

    def __init__(self) -> None:
        self.spent = 0.0

    def __enter__(self) -> None:
        self.begun = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.spent += time.process_time() - self.begun

    def state_dict(self) -> dict[str, float]:
        return {"spent": self.spent}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.spent = state["spent"]


def train(run: Run) -> Outcome:
    options: Looped = run.options
    size, rng, rng_of_tests = int(options.size), random.Random(run.seed), random.Random("test")
    clues, digits = tensors([generate(size, options.shown, rng) for _ in range(options.puzzles)], size)
    asked, answers = tensors([generate(size, options.shown, rng_of_tests) for _ in range(options.tests)], size)
    torch.manual_seed(run.seed)
    model = Loop(Block(size, options.width), options.evaluations)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    carry, clock = deqfast.Carry(model, endless(clues, digits, options.batch_size), options.batch_size), Clock()
    for step in run.steps(options.steps, model=model, optimizer=optimizer, carry=carry, clock=clock):
        with clock:
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate(clock.spent / options.seconds)
            x, target = carry.data
            with torch.no_grad():
                state, solution = model(x, carry.z, return_solution=True)
            for _ in range(PHANTOM):
                state = model.cell(state, x)
            loss = loss_of(state[0], target)
            descend(loss, optimizer, clip=1.0)
            done = carry.age >= MOST - 1
            carry.advance(state, done | solution.converged if run.arm == "carry" else done)
        ends = clock.spent >= options.seconds or step + 1 == options.steps
        if ends or clock.spent >= (len(run.rows) + 1) * options.seconds / TESTS:
            boards = percent(tested(model, encode(asked), answers, run.seed))
            row = {"step": step + 1, "seconds": clock.spent, "boards": boards, "puzzles": carry.taken}
            run.rows.append(row | {"loss": loss.item()})
        if ends:
            break
    served = tensors([generate(size, options.shown, rng_of_tests) for _ in range(options.served)], size)
    last, ways = run.rows[-1], solved_in_ways(model, encode(served[0]), served[1], options.evaluations)
    scores = {"boards, %": last["boards"], "mean of the tests, %": fmean(row["boards"] for row in run.rows)}
    scores |= {"CPU seconds": last["seconds"], "steps": last["step"], "puzzles": last["puzzles"]}
    for name, way in ways.items():
        scores |= {f"{name}: {what}": value for what, value in way.items()}
    data = f"{options.puzzles} generated {size} x {size} puzzles of {options.shown} clues, {options.tests} for the test"
    return Outcome(model, data, scores, {"rows": run.rows})


def endless(clues: Tensor, digits: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield drawn(clues, digits, count)


def rate(share: float) -> float:
    """Factor of the learning rate: a warm-up over a tenth, then half a period of a cosine."""
    return min(1.0, 10 * share) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@torch.no_grad()
def tested(model: Loop, x: Tensor, digits: Tensor, seed: int) -> Tensor:
    """Mask of the boards that one solve gets right."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        answer = torch.cat([model.eval()(part)[0] for part in x.split(ROWS)]).argmax(-1) + 1
    model.train()
    return solved(answer == digits)


@torch.no_grad()
def solved_in_ways(model: Loop, x: Tensor, digits: Tensor, most: int) -> dict[str, dict[str, float]]:
    """Calls of the block, rows in them, CPU seconds and boards of three ways to solve all puzzles."""
    found: dict[str, dict[str, float]] = {}
    tensors_of_all = x, torch.arange(len(x)), *model.cell.start(x)
    batches = list(zip(*(one.split(ROWS) for one in tensors_of_all), strict=True))
    for name, drops in (("all rows", False), ("drop_converged", True)):
        solver = Loop(model.cell, most).eval()
        solver.drop_converged = drops
        begun = time.process_time()
        done = [solver(part, (y, z), return_solution=True) for part, _, y, z in batches]
        seconds, answer = time.process_time() - begun, torch.cat([y for (y, _), _ in done])
        found[name] = counted([solution for _, solution in done], seconds, answer, digits)
    solver, begun = Loop(model.cell, PART).eval(), time.process_time()
    carry = deqfast.Carry(lambda data: data[2:], batches, ROWS)
    answer, solutions = torch.empty_like(x[..., 0]), []
    steps = math.ceil((most - 1) / (PART - 1))  # the first evaluation of a step repeats the last one of the step before
    while len(carry):
        part, number, *_ = carry.data
        state, solution = solver(part, carry.z, return_solution=True)
        done = (solution.status != deqfast.Status.STOPPED) | (carry.age >= steps - 1)
        answer[number[done]] = state[0][done]
        solutions.append(solution)
        carry.advance(state, done)
    found["carry"] = counted(solutions, time.process_time() - begun, answer, digits)
    return found


def counted(solutions: Sequence[Any], seconds: float, answer: Tensor, digits: Tensor) -> dict[str, float]:
    return {
        "calls": sum(solution.evaluations for solution in solutions),
        "rows": sum(solution.sample_evaluations for solution in solutions),
        "CPU s": round(seconds, 3),
        "boards, %": percent(solved(answer.argmax(-1) + 1 == digits)),
    }


def draw(records: Sequence[Record]) -> Figure:
    """Figure of boards solved and of puzzles seen against CPU seconds of training."""
    figure, ((boards, puzzles),) = style.panels(1, 2)
    for record in records:
        rows, look = record.shown["rows"], {"label": record.arm, **style.look(record.arm)}
        for axis, name in ((boards, "boards"), (puzzles, "puzzles")):
            axis.plot([row["seconds"] for row in rows], [row[name] for row in rows], **look)
    boards.set(title="boards solved, %", xlabel="CPU seconds of training", ylim=(0, 102))
    puzzles.set(title="puzzles seen", xlabel="CPU seconds of training")
    style.legend(figure)
    return figure


def check(options: Looped) -> None:
    """Nothing is read."""


EXAMPLE = Example(Looped, train, draw, check)
