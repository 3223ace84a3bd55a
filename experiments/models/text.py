"""A language model by characters whose one transformer block is an equilibrium: z* = norm(block(z* + x)).

deq: a pre-norm block with rotary positions that is given the embedded characters x at every evaluation.
explicit-parameters: four blocks of half the width, which have as many parameters as the one. explicit-compute: as many
untied blocks as cost what a training step of the DEQ costs, where an evaluation that is differentiated counts as three.
All arms have the recipe of nanoGPT's small setting (Karpathy, 2022): AdamW, warm-up, cosine. Without --data-root, the
text is that of Python's help topics. Source: Bai, Kolter, Koltun, NeurIPS 2019.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from runs import Options, Outcome, Record, Run, SettingsError, StudyError, main, option
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import deqfast

ARMS = ("deq", "explicit-parameters", "explicit-compute")
BLOCKS_OF_TWIN = 5
GAIN = 2.0  # of x beside z, whose entries have size 1: the block is a contraction at the start
PASSAGE, WRITTEN = 64, 200


@dataclass(frozen=True, kw_only=True)
class Text(Options):
    """Options of text.py."""

    width: int = option("model", "features of a character in the DEQ", 128, minimum=8)
    heads: int = option("model", "attention heads", 4, minimum=1)
    tol: float = option("model", "relative residual of a solve in training", 1e-2, above=0.0)
    eval_tol: float = option("model", "relative residual of a solve in evaluation", 1e-3, above=0.0)
    max_iter: int = option("model", "evaluations of a solve in training at most", 12, minimum=1)
    phantom: int = option("model", "differentiated evaluations of a training step", 1, minimum=1)
    context: int = option("training", "characters of a sequence", 64, minimum=2)
    batch: int = option("training", "sequences of a step", 12, minimum=1)
    steps: int = option("training", "training steps", 2000, minimum=1)
    lr: float = option("training", "largest learning rate of AdamW, falling to a tenth", 1e-3, above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (4 * self.heads):
            raise SettingsError(f"--width {self.width}: a multiple of {4 * self.heads}, four times --heads")


class Corpus(NamedTuple):
    """A text as numbers of its characters: the first nine tenths, and the last two twentieths."""

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
        try:
            text, source = "".join(path.read_text(encoding="utf-8") for path in paths), root.name
        except (OSError, UnicodeDecodeError) as error:
            raise StudyError(f"--data-root {root}: must be UTF-8 text or a folder of *.txt: {error}") from error
        if "\0" in text:
            raise StudyError(f"--data-root {root}: must be UTF-8 text or a folder of *.txt: it has a zero byte")
    if len(text) < (least := 20 * (options.context + 1)):
        raise StudyError(f"--data-root {options.data_root}: {len(text)} characters; at least {least}, 20 sequences")
    characters = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(characters)}
    parts = torch.tensor([number[character] for character in text]).tensor_split(
        [len(text) * 18 // 20, len(text) * 19 // 20]
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Corpus(f"{source} ({len(text):,} characters, sha256 {digest})", characters, *parts)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys (B, H, T, D) with their positions (Su et al., 2021): pairs of features turned by angles."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and beside the identity: (B, T, D) to (B, T, D)."""

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
        self.block, self.norm = Block(width, heads), nn.RMSNorm(width)
        self.inject = nn.RMSNorm(width)
        nn.init.constant_(self.inject.weight, GAIN)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.block(z + self.inject(x)))


class Language(nn.Module):
    """Logits of the next character at every position, from numbers of characters (B, T)."""

    def __init__(self, arm: str, options: Text, characters: int) -> None:
        super().__init__()
        width = options.width // 2 if arm == "explicit-parameters" else options.width
        blocks = {"explicit-parameters": 4, "explicit-compute": BLOCKS_OF_TWIN}.get(arm, 0)
        self.embedding = nn.Embedding(characters, width)
        self.layers = nn.Sequential(*(Block(width, options.heads) for _ in range(blocks)), nn.RMSNorm(width))
        self.equilibrium = None if blocks else self._equilibrium(options)
        self.readout = nn.Linear(width, characters, bias=False)
        self.readout.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * max(1, blocks)) if last else 0.02)

    @staticmethod
    def _equilibrium(options: Text) -> deqfast.DEQBlock:
        adjoint = deqfast.Phantom(steps=options.phantom, damping=1.0) if options.phantom > 1 else deqfast.JFB()
        return deqfast.DEQBlock(
            Cell(options.width, options.heads),
            deqfast.Anderson(options.tol, options.max_iter),
            adjoint,
            eval_solver=deqfast.Anderson(options.eval_tol, 40),
            warn=False,
        )

    def forward(self, indices: Tensor) -> tuple[Tensor, deqfast.Solution | None]:
        z, solution = self.embedding(indices), None
        if self.equilibrium is not None:
            z, solution = self.equilibrium(z, return_solution=True)
        return self.readout(self.layers(z)), solution


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats a character of logits (B, T, C)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(run: Run) -> Outcome:
    """Train an arm by nanoGPT's recipe, and measure it."""
    options: Text = run.options
    corpus = load(options)
    model = Language(run.arm, options, len(corpus.characters))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    span, warm = torch.arange(options.context + 1), min(100, options.steps // 10 + 1)
    every = max(1, options.steps // 20)
    for step in run.steps(options.steps, model=model, optimizer=optimizer):
        falling = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warm) / options.steps)
        optimizer.param_groups[0]["lr"] = options.lr * min((step + 1) / warm, falling)
        sequences = corpus.train[torch.randint(len(corpus.train) - options.context, (options.batch, 1)) + span]
        logits, solution = model(sequences[:, :-1])
        loss = loss_of(logits, sequences[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        row = {"step": step + 1.0, "loss": loss.item()}
        if solution is not None:
            row |= {"evaluations": solution.evaluations}
        if (step + 1) % every == 0:
            row |= {"validation": evaluate(model, corpus.validation[: 100 * options.context + 1], options)["loss"]}
        run.log.append(row)
    return measured(model.eval(), corpus, run)


@torch.no_grad()
def evaluate(model: Language, text: Tensor, options: Text) -> dict[str, float]:
    """Mean loss over all sequences of a text, side by side, and how the solves went."""
    training, rows = model.training, []
    count = (len(text) - 1) // options.context
    pairs = (part[: count * options.context].view(count, -1).split(64) for part in (text[:-1], text[1:]))
    for inputs, targets in zip(*pairs, strict=True):
        logits, solution = model.eval()(inputs)
        row = {"loss": loss_of(logits, targets).item()}
        if solution is not None:
            row["evaluations"] = float(solution.iterations.float().mean())
            row["converged"] = float(solution.converged.float().mean())
        rows.append((len(inputs), row))
    model.train(training)
    return {name: sum(size * row[name] for size, row in rows) / count for name in rows[0][1]}


def measured(model: Language, corpus: Corpus, run: Run) -> Outcome:
    """Scores of a trained model, and what the figure shows."""
    options: Text = run.options
    validation, test = (evaluate(model, part, options) for part in (corpus.validation, corpus.test))
    scores = {"loss, validation": validation.pop("loss"), "loss, test": test["loss"], **validation}
    shown: dict[str, Any] = {"curve": [[row["step"], row["validation"]] for row in run.log if "validation" in row]}
    if model.equilibrium is not None:
        used = [row["evaluations"] for row in run.log]
        scores |= {"evaluations, training": fmean(used), "at the end": fmean(used[-len(used) // 10 :])}
        passage = corpus.validation[: min(PASSAGE, options.context)]
        cold, warm, written = write(model, passage, options)
        scores |= {"evaluations a character, cold": cold, "warm": warm}
        shown |= {"evaluations": used, "residuals": residuals(model, passage[None], options)[0].tolist()}
        shown |= {
            name: "".join(corpus.characters[i] for i in part)
            for name, part in (("passage", passage), ("written", written))
        }
        rates = speed(model, corpus, options)
        shown |= {"speed": rates}
    return Outcome(model, corpus.name, scores, shown)


@torch.no_grad()
def residuals(model: Language, indices: Tensor, options: Text) -> Tensor:
    """Relative residual of every character at every evaluation of a solve to --eval-tol, (B, K, T)."""
    assert model.equilibrium is not None
    cell, x, seen = model.equilibrium.cell, model.embedding(indices), []

    def look(z: Tensor, value: Tensor, k: int) -> Tensor:
        """A rule that ends no sample: it sees every evaluation."""
        seen.append((value - z).norm(dim=-1) / value.norm(dim=-1))
        return torch.zeros(len(z), dtype=torch.bool)

    deqfast.solve(lambda z: cell(z, x), torch.zeros_like(x), model.equilibrium.current_solver, halt=look)
    return torch.stack(seen, dim=1)


def speed(model: Language, corpus: Corpus, options: Text) -> dict[str, float]:
    """Evaluations until the residual of a character is at most 1e-2, the mean by character: those found 50 times."""
    count = min(256, (len(corpus.validation) - 1) // options.context)
    indices = corpus.validation[: count * options.context].view(count, -1)
    course = residuals(model, indices, options)
    needed = 1 + (course > 1e-2).long().cumsum(1).argmax(1)  # the last evaluation above, and one
    means = {c: needed[indices == i].float() for i, c in enumerate(corpus.characters)}
    return {c: float(found.mean()) for c, found in means.items() if len(found) >= 50}


@torch.no_grad()
def write(model: Language, prompt: Tensor, options: Text) -> tuple[float, float, list[int]]:
    """Write on from a prompt (T,): evaluations a character with the solve begun at 0 and at the last character's z*,
    and the characters. What came before stays at its fixed point, and is not solved again."""
    assert model.equilibrium is not None
    cell, solver = model.equilibrium.cell, model.equilibrium.current_solver
    generator = torch.Generator().manual_seed(0)
    x = model.embedding(prompt[None])
    z, counts, written = model.equilibrium(x), [], []
    for _ in range(WRITTEN):
        chances = model.readout(model.layers(z[:, -1])).softmax(dim=1)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
        x = torch.cat([x, model.embedding(torch.tensor([[written[-1]]]))], dim=1)[:, -options.context :]
        past = z[:, 1 - x.shape[1] :]

        def position(new: Tensor, past: Tensor = past, x: Tensor = x) -> Tensor:
            return cell(torch.cat([past, new], dim=1), x)[:, -1:]

        cold, warm = (deqfast.solve(position, start, solver) for start in (torch.zeros_like(x[:, :1]), z[:, -1:]))
        counts.append((cold.evaluations, warm.evaluations))
        z = torch.cat([past, warm.value], dim=1)
    cold_mean, warm_mean = (fmean(column) for column in zip(*counts, strict=True))
    return cold_mean, warm_mean, written


def draw(records: Sequence[Record]) -> Figure:
    """Losses, evaluations in training, residuals of every character of a passage, and evaluations by character."""
    figure = plt.figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplot_mosaic("lt;rr;ss", height_ratios=(3, 3, 2))
    for record in records:
        colour, label = f"C{ARMS.index(record.arm)}", record.arm if record.seed == 0 else None
        axes["l"].plot(*zip(*record.shown["curve"], strict=True), color=colour, label=label)
        if used := record.shown.get("evaluations"):
            size = max(1, len(used) // 100)
            means = [fmean(used[i : i + size]) for i in range(0, len(used), size)]
            axes["t"].plot([size * i for i in range(len(means))], means, color=colour)
    axes["l"].set(xlabel="step", ylabel="loss, validation (nats a character)")
    axes["l"].legend()
    axes["t"].set(xlabel="step", ylabel="evaluations a solve", title="training of the DEQ")
    if equilibrium := next((record.shown for record in records if record.arm == "deq"), None):
        course, passage = equilibrium["residuals"], equilibrium["passage"]
        picture = axes["r"].imshow([[math.log10(max(r, 1e-9)) for r in row] for row in course], aspect="auto")
        axes["r"].set_xticks(
            range(len(passage)), [character if character.isprintable() else "⏎" for character in passage]
        )
        axes["r"].set_yticks(range(len(course)), [str(k + 1) for k in range(len(course))])
        axes["r"].set(ylabel="evaluation", title="residual of every character of a passage of the validation text")
        figure.colorbar(picture, ax=axes["r"], label="log10, relative")
        rates = sorted(equilibrium["speed"].items(), key=lambda item: item[1])
        axes["s"].bar(range(len(rates)), [rate for _, rate in rates])
        names = {"\n": "⏎", " ": "␣"}
        axes["s"].set_xticks(range(len(rates)), [names.get(character, character) for character, _ in rates])
        axes["s"].set(ylabel="evaluations to 1e-2", ylim=(min(rate for _, rate in rates) - 0.5, None))
    return figure


if __name__ == "__main__":
    sys.exit(main(__doc__, Text, ARMS, train, draw, check=load))
