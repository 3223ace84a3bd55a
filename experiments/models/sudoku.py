"""Sudoku by a small recursive model that is iterated to its fixed point, compared with explicit twins.

The state is a pair as in TRM (Jolicoeur-Martineau, 2025, "Less is more: recursive reasoning with tiny networks"): an
answer y and a latent z, which one block updates. It passes messages as recurrent relational networks do (Palm et al.,
2018), here between placements (row, column, digit) and constraints. A constraint says that exactly one placement holds:
of those in a cell, or of those of a digit in a row, a column or a box. The block treats all digits alike. A solve
starts from random z. Restarts of a puzzle are rows of the batch; the one with the least residual is chosen (EqR,
locuslab, 2026).

A training step of each arm costs the same number of block applications; a differentiated one counts as three:
deq: phantom gradients after two evaluations and at the fixed point. explicit-parameters: the same block applied DEPTH
times with backpropagation, a recurrent relational network; it is also tested by the DEQ's solves.
explicit-compute: DEPTH blocks with separate weights, tested without solves. Losses, rate and puzzles are the same.
Boards "as trained" are after SOLVE applications of the DEQ's block, and after DEPTH of the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from runs.options import SettingsError, option
from torch import Tensor, nn

import deqfast

from .frame import Example, Outcome, Run, Training, differentiate
from .sudoku_figure import ARMS, draw, film
from .sudoku_puzzles import BOXES, FEWEST, encode, generate, read_folder, tensors

USUAL = {4: 5, 6: 10, 9: 28}
SOLVE, PHANTOM = 6, 4  # evaluations of a training solve; differentiated evaluations for each of its two losses
DEPTH = (SOLVE + 2 * 3 * PHANTOM) // 3  # applications of the twins: a differentiated one costs three
AT = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DAMPING = 0.8
MORE_CLUES = 0.3  # largest share of the empty cells that is shown in training, so that some boards are easy

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sudoku(Training):
    """Options of the model."""

    all_arms: ClassVar[tuple[str, ...]] = tuple(ARMS)

    size: str = option("data", "digits; boxes of 6 are 2 x 3", "6", choices=("4", "6", "9"))
    clues: int | None = option("data", f"clues of a generated puzzle; off: {USUAL} by size", None, minimum=1)
    puzzles: int = option("data", "generated puzzles to train on", 1000, minimum=1)
    tests: int = option("data", "puzzles to test on, of each file of --data-root", 100, minimum=1)
    skip: int = option("data", "puzzles of each file to leave out before those", 0, minimum=0)
    width: int = option("network", "features of a placement", 16, minimum=1)
    steps: int = option("training", "training steps", 400, minimum=1)
    batch_size: int = option("training", "puzzles a step", 32, minimum=1)
    lr: float = option("training", "learning rate of AdamW", 3e-3, above=0)
    evaluations: int = option("test", "most evaluations of a solve", 64, minimum=1)
    starts: int = option("test", "random starts of a puzzle", 8, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        size, least = int(self.size), FEWEST[int(self.size)]
        if not least <= self.shown < size**2:
            raise SettingsError(f"--clues {self.clues}: {least} to {size**2 - 1} with --size {size}")
        if self.data_root and size != 9:
            raise SettingsError(f"--size {size}: 9 with --data-root")
        if self.skip and not self.data_root:
            raise SettingsError(f"--skip {self.skip}: give it with --data-root, whose files it is about")

    @property
    def shown(self) -> int:
        return self.clues or USUAL[int(self.size)]


def mlp(features: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 2 * out), nn.ReLU(), nn.Linear(2 * out, out))


class Block(nn.Module):
    """f((y, z), x): three times messages from placements to constraints and back; then the answer.

    y (B, n, n, n) are logits of row, column, digit, z (B, n, n, n, width), x (B, n, n, n, 2) as of ``encode``.
    """

    def __init__(self, size: int, width: int, rounds: int = 3):
        super().__init__()
        self.size, self.width, self.rounds = size, width, rounds
        self.inject, self.send = nn.Linear(3, width), nn.Linear(width, width)
        self.cell, self.line, self.box = (mlp(width, width) for _ in range(3))
        self.update, self.norm, self.answer = mlp(2 * width, width), nn.RMSNorm(width), nn.Linear(width, 1)

    def forward(self, state: State, x: Tensor) -> State:
        y, z = state
        injected = self.inject(torch.cat([x, y.softmax(-1)[..., None]], -1))
        for _ in range(self.rounds):
            h = z + injected
            z = self.norm(h + self.update(torch.cat([h, self.constraints(self.send(h).relu())], -1)))
        return self.answer(z).squeeze(-1), z

    def constraints(self, sent: Tensor) -> Tensor:
        """Sum of the replies of each placement's four constraints to the messages of their placements."""
        n, (height, width) = self.size, BOXES[self.size]
        boxed = sent.view(-1, n // height, height, n // width, width, n, self.width)
        lines = sum(net(0.3 * sent.sum(dim, True)) for net, dim in ((self.cell, 3), (self.line, 1), (self.line, 2)))
        return (lines.view_as(boxed) + self.box(0.3 * boxed.sum((2, 4), keepdim=True))).view_as(sent)

    def start(self, x: Tensor) -> State:
        return x.new_zeros(x.shape[:-1]), torch.randn(*x.shape[:-1], self.width)


class Stack(nn.Module):
    """Explicit twin: blocks applied one after the other, `DEPTH` times in all."""

    def __init__(self, blocks: Sequence[Block]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def states(self, x: Tensor, start: State | None = None) -> list[State]:
        """States half-way and at the end."""
        blocks: list[Any] = [*self.blocks]
        states = [blocks[0].start(x) if start is None else start]
        for depth in range(DEPTH):
            states.append(blocks[depth % len(blocks)](states[-1], x))
        return [states[DEPTH // 2], states[DEPTH]]


class Equilibrium(deqfast.DEQBlock):
    """The block's fixed point."""

    cell: Block

    def __init__(self, block: Block, evaluations: int):
        training, evaluation = (deqfast.Picard(1e-3, most, relaxation=DAMPING) for most in (SOLVE, evaluations))
        adjoint = deqfast.Phantom(PHANTOM, 1.0)
        options: dict[str, Any] = {"eval_solver": evaluation, "drop_converged": True}
        super().__init__(block, training, adjoint, init=block.start, warn=False, **options)

    def train(self, mode: bool = True) -> Equilibrium:
        self.stop_fn = None if mode else self.ends  # a graph cannot ask it
        return super().train(mode)

    def ends(self, state: State, value: State, k: int) -> Tensor:
        """Mask of the last evaluation of a test: a solve that does not converge then gives its last state, not the best
        one."""
        return torch.full((len(state[0]),), k == self.current_solver.max_iter)

    def states(self, x: Tensor, start: State | None = None) -> list[State]:
        """The state after two evaluations and the fixed point, each with the phantom gradient of steps from there."""
        return self.trajectory(x, at=[3], z0=start)


def drawn(clues: Tensor, digits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw puzzles, and show some of their empty cells; return x and the digits."""
    chosen, size = torch.randint(len(clues), (count,)), digits.shape[-1]
    more = torch.rand(count, 1, 1) * MORE_CLUES
    shown = torch.where(torch.rand(count, size, size) < more, digits[chosen], clues[chosen])
    return encode(shown), digits[chosen]


def loss_of(y: Tensor, digits: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 2), digits.flatten() - 1)


def train(run: Run) -> Outcome:
    options: Sudoku = run.options
    size, rng = int(options.size), random.Random(run.seed)
    clues, digits = tensors([generate(size, options.shown, rng) for _ in range(options.puzzles)], size)
    torch.manual_seed(run.seed)
    blocks = [Block(size, options.width) for _ in range(DEPTH if run.arm == "explicit-compute" else 1)]
    model = Equilibrium(blocks[0], options.evaluations) if run.arm == "deq" else Stack(blocks)
    optimizer = torch.optim.AdamW(model.to(options.device).parameters(), options.lr, **run.fused)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.1)

    def learn(batch: tuple[Tensor, Tensor, State]) -> Tensor:
        x, target, start = batch
        loss = torch.stack([loss_of(y, target) for y, _ in model.states(x, start)]).mean()
        differentiate(loss, optimizer, clip=1.0)
        return loss.detach()

    learns = run.stepped(learn)
    for step in run.steps(options.steps, model=model, optimizer=optimizer, schedule=schedule):
        x, target = drawn(clues, digits, options.batch_size)
        loss = learns((x, target, blocks[0].start(x)))
        optimizer.step()  # outside of a graph, which would repeat the betas that the schedule sets
        schedule.step()
        if step % 10 == 0:
            run.rows.append({"step": step, "loss": loss.item()})
    with torch.no_grad():
        return evaluate(model.cpu(), run)


def evaluate(model: Stack | Equilibrium, run: Run) -> Outcome:
    """Test with several random starts; a model of one block is solved with more evaluations than in training."""
    options: Sudoku = run.options
    size, starts, rng = int(options.size), options.starts, random.Random("test")
    if options.data_root:
        sets = read_folder(Path(options.data_root), options.tests, options.skip)
    else:
        sets = {"generated": [generate(size, options.shown, rng) for _ in range(options.tests)]}
    clues, digits = tensors([puzzle for puzzles in sets.values() for puzzle in puzzles], size)
    torch.manual_seed(run.seed)
    x, target = encode(clues), digits.repeat_interleave(starts, 0)
    parts = x.repeat_interleave(starts, 0).split(256)
    right = torch.cat([model.states(part)[-1][0] for part in parts]).argmax(-1) + 1 == target  # the training solve
    shown: dict[str, Any] = {}
    scores = {"boards as trained, %": percent(solved(right))}
    boards = chosen = solved(right).view(-1, starts)
    if solver := as_equilibrium(model, options):
        done = [solver(part, return_solution=True) for part in parts]
        right = torch.cat([y for (y, _), _ in done]).argmax(-1) + 1 == target
        boards = solved(right).view(-1, starts)
        residual, iterations = (
            torch.cat([getattr(solution, name) for _, solution in done]).view(-1, starts).float()
            for name in ("residual", "iterations")
        )
        least = [boards.gather(1, residual[:, :k].argmin(1, keepdim=True)) for k in range(1, starts + 1)]
        chosen, hardest = least[-1], (iterations.mean(1) * boards.any(1)).argmax()
        shown = {
            "curve": along(solver, x, digits),
            "starts": [[percent(boards[:, :k].any(1)), percent(best)] for k, best in enumerate(least, 1)],
            "film": film(solver, x[hardest], clues[hardest], digits[hardest]),
        }
        scores["evaluations a solve"] = iterations.mean().item()
        if boards.any() and not boards.all():
            scores["residual tells right from wrong, AUC"] = auc(residual.flatten(), boards.flatten())
        scores[f"least residual of {starts}, %"], scores[f"best of {starts}, %"] = shown["starts"][-1][::-1]
    empty = (clues == 0).repeat_interleave(starts, 0)
    scores |= {"boards, any start, %": percent(boards), "empty cells, any start, %": percent(right[empty])}
    if len(sets) > 1:
        split = chosen.split([len(puzzles) for puzzles in sets.values()])
        scores |= {f"{name}, chosen, %": percent(part) for name, part in zip(sets, split, strict=True)}
    which = f" (puzzles {options.skip + 1} to {options.skip + options.tests} of each file)" if options.skip else ""
    names = ", ".join(sets) + which
    data = f"{options.puzzles} generated {size} x {size} puzzles of {options.shown} clues, tested on {names}"
    return Outcome(model, data, scores, shown)


def as_equilibrium(model: Any, options: Sudoku) -> Equilibrium | None:
    """Return the solve of a model with one block; None for others."""
    if isinstance(model, Equilibrium):
        return model.eval()
    return Equilibrium(model.blocks[0], options.evaluations).eval() if len(model.blocks) == 1 else None


def solved(right: Tensor) -> Tensor:
    return right.flatten(1).all(1)


def percent(hits: Tensor) -> float:
    return 100 * hits.float().mean().item()


def auc(residual: Tensor, boards: Tensor) -> float:
    """Probability that a solved board has a smaller residual than an unsolved one; there must be both."""
    return (residual[boards][:, None] < residual[~boards]).float().mean().item()


def along(solver: Equilibrium, x: Tensor, digits: Tensor) -> list[tuple[int, float]]:
    """Boards solved after each number of evaluations, in percent."""
    at = [k for k in AT if k < solver.current_solver.max_iter]
    states = solver.trajectory(x, at=[k + 1 for k in at])[:-1]
    return [(k, percent(solved(y.argmax(-1) + 1 == digits))) for k, (y, _) in zip(at, states, strict=True)]


def check(options: Sudoku) -> None:
    """Read all of --data-root; raise StudyError for its faults."""
    if options.data_root:
        read_folder(Path(options.data_root))


EXAMPLE = Example(Sudoku, train, draw, check)
