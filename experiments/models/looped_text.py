"""A looped language model after Attractor: a trunk proposes z0, one shared block refines it, by a solver or in loops.

The trunk is one block. Its value x is the shared block's input at every evaluation, and z0 = norm(x). All arms have the
same modules, and train with the same budget of applications of a block, the trunk's too. A differentiated application
counts as three, a product with the Jacobian as one. The first three arms have no solver:

- loops-1: one application, an ordinary network of two blocks.
- loops-4: four applications, differentiated through all.
- loops-4-last: the same, differentiated through the last two (`bptt_through=2` of Attractor's Sudoku).
- solver: a solve to 1e-2; value z*, gradient through two plain steps from there, `Phantom(steps=2, relaxation=1.0)`.
- solver-last: the same; the value is the second of these steps.
- solver-implicit: a solve to 1e-2; gradient by `Implicit`, with a solve to 1e-2.
- internalised: as solver, with --weight times |z0 - z*|^2 / |z*|^2 added to the loss, z* as a constant.
- consistent: as solver, with --weight times |f(z_k) - z*|^2 / |z*|^2 added, for a random state z_k of the solve.

The scores were decided before the runs. On validation and test text: the loss of an arm's own way, its loops or a solve
to 1e-3. On validation text: the loss after 1, 2, 4 and 8 plain loops; the loss, evaluations and converged share of a
solve to 1e-3; and |z0 - z*| / |z*|. Sources: Fein-Ashley and Rashidinejad, arXiv 2605.12466; Lin et al., arXiv
2602.03024. The latter train a second network for consistency; here it is the block itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from matplotlib.figure import Figure
from runs import style
from runs.options import option
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import deqfast
from deqfast.regularize import internalisation

from .frame import Example, Outcome, Record, Run, descend
from .text import Block, Cell, Corpus, TextOptions, adamw, evaluate, initialise, load

ARMS = ("loops-1", "loops-4", "loops-4-last", "solver", "solver-last", "solver-implicit", "internalised", "consistent")
LOOPS = {"loops-1": 1, "loops-4": 4, "loops-4-last": 4}
TRUNK, STEPS = 1, 2  # blocks of the trunk; plain steps that are differentiated, unless all are
ONCE = {"loops-1": 1, "loops-4": 4, "solver-implicit": 1, "consistent": STEPS + 1}
"""Differentiated applications of the shared block, if not as many as `STEPS`."""
SHOWN = (1, 2, 4, 8)  # loops in evaluation
DIFFERENTIATED = 3  # applications that a differentiated one counts as
POINTS = 12  # of a curve


@dataclass(frozen=True, kw_only=True)
class LoopedText(TextOptions):
    """Options of the model."""

    all_arms = ARMS

    width: int = option("model", "features of a character", 32, minimum=8)
    lr: float = option("training", "largest learning rate of AdamW, falling to a tenth", 3e-3, above=0.0)
    budget: int = option("training", "applications of a block to a batch", 6_000, minimum=1)
    weight: float = option("training", "weight of the added loss, of arms that have one", 0.1, above=0.0)


class Looped(nn.Module):
    """Logits of the next character at every position, from numbers of characters (B, T).

    Attributes:
        used: applications of a block to a batch in the last call in training, without its backward solve.
        added: the loss that the last call in training adds.
    """

    def __init__(self, arm: str, options: LoopedText, characters: int) -> None:
        super().__init__()
        width, heads = options.width, options.heads
        self.arm, self.weight, self.used, self.added = arm, options.weight, 0.0, torch.zeros(())
        self.embedding = nn.Embedding(characters, width)
        self.trunk = nn.Sequential(*(Block(width, heads) for _ in range(TRUNK)))
        self.start, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        solver = deqfast.Anderson(options.tol, options.max_iter)
        adjoint = deqfast.Implicit(solver) if arm == "solver-implicit" else deqfast.Phantom(STEPS, relaxation=1.0)
        self.equilibrium = deqfast.DEQBlock(
            Cell(width, heads),
            solver,
            adjoint,
            eval_solver=deqfast.Anderson(options.eval_tol, max_iter=40),
            stop_fn=self.look if arm == "consistent" else None,
            drop_converged=True,
            warn=False,
        )
        self.readout = nn.Linear(width, characters, bias=False)
        self.states: list[Tensor] = []
        initialise(self, TRUNK + 1)

    def look(self, z: Tensor, value: Tensor, k: int) -> Tensor:
        """Keep the states of a solve; a rule that ends no sample."""
        self.states = [*self.states[: k - 1], z.clone()]
        return torch.zeros(len(z), dtype=torch.bool)

    def forward(self, indices: Tensor, loops: int | None = None) -> tuple[Tensor, deqfast.Solution | None]:
        """Logits by the arm's own way; by `loops` applications, if given; by a solve, if 0."""
        x = self.trunk(self.embedding(indices))
        z0, solution = self.start(x), None
        loops = LOOPS.get(self.arm, 0) if loops is None else loops
        if loops:
            z = self.loop(z0, x, loops)
        else:
            with torch.set_grad_enabled(self.training and self.arm != "solver-last"):
                z, solution = self.equilibrium(x, z0, return_solution=True)
        if self.training:
            if self.arm == "solver-last":
                z = self.loop(z, x, STEPS)
            self.added = self.weight * self.added_loss(z, z0, x)
            once = ONCE.get(self.arm, STEPS)
            plain = solution.sample_evaluations / len(x) if solution else loops - once
            self.used = plain + DIFFERENTIATED * (TRUNK + once)
        return self.readout(self.norm(z)), solution

    def loop(self, z: Tensor, x: Tensor, loops: int) -> Tensor:
        """Value after this many applications of the block."""
        constant = loops - STEPS if self.training and self.arm == "loops-4-last" else 0
        with torch.no_grad():
            for _ in range(constant):
                z = self.equilibrium.cell(z, x)
        for _ in range(loops - constant):
            z = self.equilibrium.cell(z, x)
        return z

    def added_loss(self, z: Tensor, z0: Tensor, x: Tensor) -> Tensor:
        """Loss that the arm adds, without its weight."""
        if self.arm == "internalised":
            return internalisation(z0, z)
        if self.arm == "consistent":
            state = self.states[int(torch.randint(len(self.states), ()))]
            return internalisation(self.equilibrium.cell(state, x), z)
        return torch.zeros(())


def train(run: Run) -> Outcome:
    """Train an arm until its budget is used, and measure it."""
    options: LoopedText = run.options
    corpus = load(options)
    model = Looped(run.arm, options, len(corpus.characters))
    optimizer, used, part = adamw(model), 0.0, corpus.validation[: 100 * options.context + 1]
    for _ in run.steps(options.budget // (DIFFERENTIATED * (TRUNK + 1)) + 1, model=model, optimizer=optimizer):
        used = run.rows[-1]["used"] if run.rows else 0.0
        if used >= options.budget:
            continue  # the number of steps is not known before
        optimizer.param_groups[0]["lr"] = options.rate(used, options.budget, options.budget / 20)
        sequences = options.sequences(corpus.train)
        logits, solution = model.train()(sequences[:, :-1])
        loss = cross_entropy(logits.mT, sequences[:, 1:])
        descend(loss + model.added, optimizer, clip=1.0)
        if backward := model.equilibrium.backward_solution:
            model.used += backward.sample_evaluations / options.batch
        run.rows.append({"loss": loss.item(), "used": used + model.used})
        run.rows[-1] |= {"evaluations": solution.sample_evaluations / options.batch} if solution else {}
        if int(POINTS * used / options.budget) < int(POINTS * run.rows[-1]["used"] / options.budget):
            run.rows[-1]["validation"] = evaluate(model.eval(), part, options.context)["loss"]
    curve = [(step, row["used"], row["validation"]) for step, row in enumerate(run.rows, 1) if "validation" in row]
    return Outcome(model, corpus.name, scores(model.eval(), corpus, run.rows, options), {"curve": curve})


def scores(model: Looped, corpus: Corpus, rows: Sequence[dict[str, float]], options: LoopedText) -> dict[str, float]:
    """Scores of a trained model, see the module's docstring."""
    own = {
        f"loss, {name}": evaluate(model, getattr(corpus, name), options.context)["loss"]
        for name in ("validation", "test")
    }
    looped = {
        f"{k} loops": evaluate(partial(model, loops=k), corpus.validation, options.context)["loss"] for k in SHOWN
    }
    solved = evaluate(partial(model, loops=0), corpus.validation, options.context)
    count = min(256, (len(corpus.validation) - 1) // options.context)
    with torch.no_grad():
        x = model.trunk(model.embedding(corpus.validation[: count * options.context].view(count, -1)))
        apart = internalisation(model.start(x), model.equilibrium(x, model.start(x))).sqrt()
    found = (
        own | looped | {"solved": solved.pop("loss")} | solved | {"z0 to z*": float(apart), "steps": float(len(rows))}
    )
    used = [row["evaluations"] for row in rows if "evaluations" in row]
    return found | ({"evaluations, training": fmean(used)} if used else {})


def draw(records: Sequence[Record]) -> Figure:
    """Losses against budget and steps, and against the loops in evaluation; means over seeds, with ranges."""
    figure, (axes,) = style.panels(1, 3, 2.8)
    for arm in dict.fromkeys(record.arm for record in records):
        color = style.look(arm)["color"]
        mine = [record for record in records if record.arm == arm]
        curves = [
            [{used: loss for _, used, loss in record.shown["curve"]} for record in mine],
            [{step: loss for step, _, loss in record.shown["curve"]} for record in mine],
            [{k: record.scores[f"{k} loops"] for k in SHOWN} for record in mine],
        ]
        for axis, of_seeds in zip(axes, curves, strict=True):
            places = [fmean(at) for at in zip(*of_seeds, strict=False)]
            losses = list(zip(*(curve.values() for curve in of_seeds), strict=False))
            style.band(axis, places, list(zip(*losses, strict=True)), label=arm, color=color)
    axes[0].set(xlabel="applications of a block", ylabel="nats a character", title="loss on validation text")
    axes[1].set(xlabel="training steps", title="the same against steps")
    axes[2].set(xlabel="plain loops in evaluation", xscale="log", title="the trained models, after few loops")
    axes[2].set_xticks(SHOWN, [str(k) for k in SHOWN])
    axes[2].minorticks_off()
    style.legend(figure)
    return figure


EXAMPLE = Example(LoopedText, train, draw, load)
