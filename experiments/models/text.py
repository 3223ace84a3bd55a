"""A language model by characters whose one transformer block is an equilibrium: z* = norm(block(z* + x)).

deq: a pre-norm block with rotary positions that is given the embedded characters x at every evaluation.
explicit-parameters: four blocks of half the width, with the same number of parameters within 4 %. explicit-compute:
untied blocks that cost the same as a training step of the DEQ, where a differentiated evaluation counts as three.
All arms have the recipe of nanoGPT's small setting (Karpathy, 2022): AdamW, warm-up, cosine. Without --data-root, the
text is Python's help topics. Source: Bai, Kolter, Koltun, NeurIPS 2019.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import style
from runs.files import as_text, reading
from runs.options import SettingsError, StudyError, option
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import deqfast

from .frame import Example, Outcome, Record, Run, Training, descend

ARMS = ("deq", "explicit-parameters", "explicit-compute")
BLOCKS_OF_TWIN, WRITTEN = 3, 200
SIGNS = {"\n": "↵", " ": "␣"}
GAIN = 2.0  # of x relative to z, whose entries have size 1: the block is a contraction at the start


@dataclass(frozen=True, kw_only=True)
class Text(Training):
    """Options of the model."""

    all_arms = ARMS

    width: int = option("model", "features of a character in the DEQ", 128, minimum=8)
    heads: int = option("model", "attention heads", 4, minimum=1)
    tol: float = option("model", "relative residual of a solve in training", 1e-2, above=0.0)
    eval_tol: float = option("model", "relative residual of a solve in evaluation", 1e-3, above=0.0)
    max_iter: int = option("model", "most evaluations of a solve in training", 12, minimum=1)
    causal: bool = option("model", "no character of a solve depends on a later one", False)
    context: int = option("training", "characters of a sequence", 64, minimum=2)
    batch: int = option("training", "sequences of a step", 12, minimum=1)
    steps: int = option("training", "training steps", 2000, minimum=1)
    lr: float = option("training", "largest learning rate of AdamW, falling to a tenth", 1e-3, above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (4 * self.heads):
            raise SettingsError(f"--width {self.width}: a multiple of {4 * self.heads}, four times --heads")

    def sequences(self, text: Tensor) -> Tensor:
        """Numbers of the characters of a training step, (batch, context + 1)."""
        return text[torch.randint(len(text) - self.context, (self.batch, 1)) + torch.arange(self.context + 1)]

    def rate(self, step: int) -> float:
        """Learning rate of a step: a warm-up, then a cosine."""
        warm = min(100, self.steps // 10 + 1)
        fallen = max(0, step - warm) / max(1, self.steps - warm)
        return self.lr * min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * fallen))


class Corpus(NamedTuple):
    """Text as numbers of its characters: the first nine tenths, and the last two twentieths."""

    name: str
    characters: str
    train: Tensor
    validation: Tensor
    test: Tensor


def load(options: Text) -> Corpus:
    """The text of --data-root, a file or all *.txt of a folder; or the topics of Python's help()."""
    if options.data_root is None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
        source = f"help topics of Python {sys.version_info.major}.{sys.version_info.minor}"
    else:
        root = Path(options.data_root)
        paths = sorted(root.glob("*.txt")) if root.is_dir() else [root]
        text, source = "", as_text(root.name)
        for path in paths:
            with reading(path, "--data-root takes UTF-8 text, or a folder of it as *.txt"):
                text += path.read_text(encoding="utf-8")
                if "\0" in text:
                    raise ValueError("it has a zero byte")
    if len(text) < (least := 20 * (options.context + 1)):
        raise StudyError(f"--data-root {options.data_root}: {len(text)} characters; at least {least}, 20 sequences")
    characters = "".join(sorted(set(text)))
    cuts = [len(text) * 18 // 20, len(text) * 19 // 20]
    parts = torch.tensor([characters.index(character) for character in text]).tensor_split(cuts)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Corpus(f"{source} ({len(text):,} characters, sha256 {digest})", characters, *parts)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys (B, H, T, D) with their positions (Su et al., 2021): pairs of features turned by angles."""
    half = x.shape[-1] // 2
    place, pair = (torch.arange(count, device=x.device) for count in (x.shape[-2], half))
    angle = place[:, None] * 10_000.0 ** (-pair / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and added to its input: (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.into(self.norms[0](z)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        z = z + self.out(mixed.transpose(1, 2).flatten(2))
        return z + self.down(self.up(self.norms[1](z)).relu())


class Cell(nn.Module):
    """f(z, x) = norm(block(z + gain x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.block, self.norm, self.inject = Block(width, heads), nn.RMSNorm(width), nn.RMSNorm(width)
        nn.init.constant_(self.inject.weight, GAIN)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.block(z + self.inject(x)))

    def last(self, z: Tensor, past: Tensor, x: Tensor) -> Tensor:
        """Return the value at the last position, whose state is z (B, 1, D)."""
        return self(torch.cat([past, z], dim=1), x)[:, -1:]


class Language(nn.Module):
    """Logits of the next character at every position, from numbers of characters (B, T)."""

    def __init__(self, arm: str, options: Text, characters: int) -> None:
        super().__init__()
        width = options.width // 2 if arm == "explicit-parameters" else options.width
        blocks = {"explicit-parameters": 4, "explicit-compute": BLOCKS_OF_TWIN}.get(arm, 0)
        self.embedding = nn.Embedding(characters, width)
        self.layers = nn.Sequential(*(Block(width, options.heads) for _ in range(blocks)), nn.RMSNorm(width))
        self.equilibrium: deqfast.DEQBlock | None = None
        if not blocks:
            cell, solver = Cell(width, options.heads), deqfast.Anderson(options.tol, options.max_iter)
            eval_solver = deqfast.Anderson(options.eval_tol, max_iter=40)
            ordered: dict[str, Any] = {"causal": True} if options.causal else {"drop_converged": options.drops}
            self.equilibrium = deqfast.DEQBlock(cell, solver, "jfb", eval_solver=eval_solver, warn=False, **ordered)
        self.readout = nn.Linear(width, characters, bias=False)
        for name, weight in self.named_parameters():  # drawn as nanoGPT does
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * max(1, blocks)) if last else 0.02)

    def forward(self, indices: Tensor) -> tuple[Tensor, deqfast.Solution | None]:
        z, solution = self.embedding(indices), None
        if self.equilibrium is not None:
            z, solution = self.equilibrium(z, return_solution=True)
        return self.readout(self.layers(z)), solution


def train(run: Run) -> Outcome:
    """Train an arm by nanoGPT's recipe, and measure it."""
    options: Text = run.options
    corpus = load(options)
    model = Language(run.arm, options, len(corpus.characters)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1, **run.fused)

    def learn(sequences: Tensor) -> tuple[Tensor, deqfast.Solution | None]:
        logits, solution = model(sequences[:, :-1])
        loss = cross_entropy(logits.mT, sequences[:, 1:])
        descend(loss, optimizer, clip=1.0)
        return loss.detach(), solution

    learns = run.stepped(learn, optimizer, "--causal" if options.causal and model.equilibrium else "")
    for step in run.steps(options.steps, model=model, optimizer=optimizer):
        optimizer.param_groups[0]["lr"] = options.rate(step)
        model.train()
        loss, solution = learns(options.sequences(corpus.train))
        run.rows.append({"loss": loss.item()} | ({"evaluations": solution.evaluations} if solution else {}))
        if (step + 1) % max(1, options.steps // 20) == 0 or step + 1 == options.steps:
            part = corpus.validation[: 100 * options.context + 1]
            run.rows[-1]["validation"] = evaluate(model.eval(), run.on_device(part), options.context)["loss"]
    validation, test = (
        evaluate(model.eval().cpu(), part, options.context) for part in (corpus.validation, corpus.test)
    )
    scores = {"loss, validation": validation.pop("loss"), "loss, test": test["loss"]} | validation
    shown: dict[str, Any] = {name: [row.get(name) for row in run.rows] for name in run.rows[-1]}
    if model.equilibrium is not None:
        scores |= {"evaluations, training": fmean(shown["evaluations"])}
        within, drawn = look_inside(model, corpus, options)
        scores, shown = {**scores, **within}, {**shown, **drawn}
    return Outcome(model, corpus.name, scores, shown)


@torch.no_grad()
def evaluate(model: Language, text: Tensor, context: int) -> dict[str, float]:
    """Mean loss over the consecutive sequences of a text, and statistics of the solves."""
    count, rows = (len(text) - 1) // context, list[dict[str, Tensor]]()
    pairs = (part[: count * context].view(count, -1).split(64) for part in (text[:-1], text[1:]))
    for inputs, targets in zip(*pairs, strict=True):
        logits, solution = model(inputs)
        losses = cross_entropy(logits.mT, targets, reduction="none").mean(dim=1)
        solve = {"evaluations": solution.iterations, "converged": solution.converged} if solution else {}
        rows.append({"loss": losses, **solve})
    return {name: float(torch.cat([row[name] for row in rows]).double().mean()) for name in rows[0]}


def look_inside(model: Language, corpus: Corpus, options: Text) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores of the solves character by character, and the data of the figure."""
    count = min(256, (len(corpus.validation) - 1) // options.context)
    indices = corpus.validation[: count * options.context].view(count, -1)
    needed = 1.0 + (residuals(model, indices) > 1e-2).cumprod(dim=1).sum(dim=1)
    means = {c: needed[indices == i] for i, c in enumerate(corpus.characters)}
    cold, warm = write(model, indices[0], options)
    shown = {
        "residuals": residuals(model, indices[:1])[0].tolist(),
        "passage": "".join(corpus.characters[i] for i in indices[0].tolist()),
        "needed": {c: float(counts.mean()) for c, counts in means.items() if len(counts) >= 50},
    }
    return {"writing, cold": cold, "writing, warm": warm}, shown


@torch.no_grad()
def residuals(model: Language, indices: Tensor) -> Tensor:
    """Relative residual of every character of (B, T) at every evaluation of its solve, (B, K, T)."""
    assert model.equilibrium is not None
    cell, x, seen = model.equilibrium.cell, model.embedding(indices), list[Tensor]()

    def look(z: Tensor, value: Tensor, k: int) -> Tensor:
        seen.append((value - z).norm(dim=-1) / value.norm(dim=-1))
        return torch.zeros(len(z), dtype=torch.bool)  # a rule that ends no sample

    deqfast.solve(lambda z: cell(z, x), torch.zeros_like(x), model.equilibrium.current_solver, stop_fn=look)
    return torch.stack(seen, dim=1)


@torch.no_grad()
def write(model: Language, prompt: Tensor, options: Text) -> tuple[float, float]:
    """Continue a prompt (T,). Return the mean evaluations of a character's solve from 0 and from the last one's z*.

    Earlier characters stay at their fixed points, which no later one changes.
    """
    assert model.equilibrium is not None and isinstance(cell := model.equilibrium.cell, Cell)
    generator, counts = torch.Generator().manual_seed(0), []
    x = model.embedding(prompt[None])
    z = model.equilibrium(x)
    for _ in range(WRITTEN):
        chances = model.readout(model.layers(z[:, -1])).softmax(dim=1)
        written = torch.multinomial(chances, 1, generator=generator)
        x = torch.cat([x, model.embedding(written)], dim=1)[:, -options.context :]
        past, starts = z[:, 1 - x.shape[1] :], torch.cat([torch.zeros_like(z[:, -1:]), z[:, -1:]])
        last = partial(cell.last, past=past.expand(2, -1, -1), x=x.expand(2, -1, -1))
        solution = deqfast.solve(last, starts, model.equilibrium.current_solver)
        counts.append(solution.iterations.tolist())
        z = torch.cat([past, solution.value[1:]], dim=1)
    cold, warm = (fmean(column) for column in zip(*counts, strict=True))
    return cold, warm


def draw(records: Sequence[Record]) -> Figure:
    """Losses, evaluations in training, residuals of every character of a passage, and evaluations by character.

    A line is the mean over the seeds, its band their range.
    """
    figure = style.page(6.6)
    axes = figure.subplot_mosaic([["loss", "used"], ["passage"] * 2, ["needed"] * 2], height_ratios=(3, 3, 2))
    for arm in dict.fromkeys(record.arm for record in records):
        runs = [record.shown for record in records if record.arm == arm]
        look = style.look(arm) | {"marker": "", "label": arm}
        steps = [step for step, loss in enumerate(runs[0]["validation"]) if loss is not None]
        losses = [[run["validation"][step] for step in steps] for run in runs]
        style.band(axes["loss"], [step + 1 for step in steps], losses, **look)
        if "evaluations" in runs[0]:
            size = math.ceil(len(runs[0]["evaluations"]) / 100)
            starts = range(0, len(runs[0]["evaluations"]), size)
            means = [[fmean(run["evaluations"][k : k + size]) for k in starts] for run in runs]
            style.band(axes["used"], [k + size // 2 for k in starts], means, **look)
    axes["loss"].set(xlabel="step", ylabel="nats per character", title="loss on the beginning of the validation text")
    axes["used"].set(xlabel="step", ylabel="evaluations", title="solves of the DEQ in training")
    if shown := next((record.shown for record in records if record.arm == "deq"), None):
        draw_passage(axes["passage"], shown["passage"], shown["residuals"])
        draw_needed(axes["needed"], shown["needed"])
    style.legend(figure)
    return figure


def draw_passage(axis: Axes, passage: str, residuals: Sequence[Sequence[float]]) -> None:
    """Draw one column per character and one row per evaluation."""
    count = len(residuals)
    picture = axis.imshow(
        [[math.log10(max(value, 1e-9)) for value in row] for row in residuals],
        aspect="auto",
        extent=(-0.5, len(passage) - 0.5, count + 0.5, 0.5),
    )
    axis.set_xticks(range(len(passage)), [SIGNS.get(character, character) for character in passage])
    axis.set(ylabel="evaluation", title="residual of every character of a validation passage")
    style.bare(axis)
    axis.figure.colorbar(picture, ax=axis, label="log10, relative")


def draw_needed(axis: Axes, needed: dict[str, float]) -> None:
    """Draw one dot per character of the alphabet."""
    names = sorted(needed, key=lambda name: needed[name])
    axis.plot(range(len(names)), [needed[name] for name in names], ls="", **style.look("deq"))
    axis.set_xticks(range(len(names)), [SIGNS.get(name, name) for name in names])
    axis.set(ylabel="evaluations", title="until the residual of a character is at most 1e-2, means by character")


EXAMPLE = Example(Text, train, draw, load)
