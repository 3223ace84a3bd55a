"""An implicit graph network, Z = relu(A Z W' + X B'), whose receptive field is the whole graph.

A is the adjacency matrix with its rows divided by their sums, sparse; the rows of W have an absolute sum of at most
kappa < 1, so that there is one fixed point. explicit-parameters: the same weights as two graph convolutions.
perceptron: the same without edges, which shows the effect of a node's own features.
explicit-compute: --layers steps of the same map from 0, without the bound on W. By default they see every node of the
longest chain; training the DEQ takes nearly twice as long. In the default task, the first node of a chain determines
the class of all. With --data-root, the task is node classification on the ten splits of Geom-GCN, a seed each.
Sources: Gu et al., NeurIPS 2020; Pei et al., ICLR 2020 (splits).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from runs import style
from runs.files import read_arrays, reading
from runs.options import StudyError, option
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils import parametrize

import deqfast

from .frame import Example, Outcome, Record, Run, Training, descend

ARMS = {  # names in figures
    "deq": "DEQ",
    "explicit-parameters": "two graph convolutions",
    "explicit-compute": "unrolled steps",
    "perceptron": "no edges",
}
LENGTHS, CLASSES, NOISE = (10, 20, 40, 60, 80, 100), 4, 0.01
CHAINS = {"train": 16, "valid": 8, "test": 16}  # of each length
GRAPHS = ("cora", "citeseer", "cornell", "texas", "wisconsin")
MOST_FEATURES = 10**6  # of a node
REMEDY = "--data-root takes the graphs of Geom-GCN as .npz"


@dataclass(frozen=True, kw_only=True)
class Graphs(Training):
    """Options of the model."""

    all_arms, files = tuple(ARMS), ("*.npz",)

    data: str = option("data", "chains, or one of the graphs in --data-root", "chains", choices=("chains", *GRAPHS))
    width: int = option("model", "features of a node", 16, minimum=1)
    kappa: float = option("model", "bound on the rows of W", 0.99, above=0.0, maximum=0.999)
    tol: float = option("model", "relative residual of a solve", 1e-4, above=0.0)
    max_iter: int = option("model", "most evaluations of a solve", 150, minimum=1)
    layers: int = option("model", "steps of explicit-compute", 101, minimum=1)
    drop: float = option("training", "dropout of the features", 0.0, minimum=0.0, maximum=0.99)
    steps: int = option("training", "training steps; the best one in validation is kept", 150, minimum=1)
    lr: float = option("training", "learning rate of Adam", 0.02, above=0.0)
    decay: float = option("training", "weight decay", 0.0, minimum=0.0)


warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")  # the part of it used here is tested


class Problem(NamedTuple):
    """Nodes of one or several graphs."""

    name: str
    adjacency: Tensor  # (N, N), sparse CSR, rows sum to 1
    features: Tensor  # (N, F), sparse CSR
    labels: Tensor  # (N,)
    graph: Tensor  # (N,): the graph of each node
    masks: dict[str, Tensor]  # masks of nodes for training, validation and test
    chained: bool = False  # whether the graphs are chains
    groups: deqfast.Groups | None = None  # of the nodes, made once


class RowSums(nn.Module):
    """Scale down the rows of a matrix whose absolute sum is above a bound, to that bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.bound / weight.abs().sum(dim=1, keepdim=True)).clamp(max=1.0)


class Cell(nn.Module):
    """f(Z, (A, U)) = relu(A Z W' + U)."""

    def __init__(self, width: int, kappa: float | None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.linear.weight)  # nodes pass on their features from the start
        if kappa is not None:
            parametrize.register_parametrization(self.linear, "weight", RowSums(kappa))

    def forward(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        adjacency, injected = x
        return (adjacency @ self.linear(z) + injected).relu()


class Network(nn.Module):
    """Logits of every node."""

    def __init__(self, arm: str, options: Graphs, features: int, classes: int) -> None:
        super().__init__()
        self.arm, self.layers, self.drop = arm, options.layers, options.drop
        self.embed = nn.Parameter(torch.randn(features, options.width) / math.sqrt(options.width))
        self.cell = Cell(options.width, options.kappa if arm == "deq" else None)
        # On a chain nothing is faster than plain iteration, which is exact after one evaluation per node.
        kind = deqfast.Picard if options.data == "chains" else deqfast.Anderson
        solver = kind(options.tol, options.max_iter)
        self.block = deqfast.DEQBlock(self.cell, solver, deqfast.Implicit(solver), warn=False)
        self.readout = nn.Linear(options.width, classes)

    def forward(self, problem: Problem) -> tuple[Tensor, deqfast.Solution | None]:
        injected = dropout(torch.sparse.mm(problem.features, self.embed), self.drop, self.training)
        x, solution = (problem.adjacency, injected), None
        if self.arm == "deq":
            z, solution = self.block(
                x, z0=torch.zeros_like(injected), return_solution=True, groups=problem.groups or problem.graph
            )
        elif self.arm == "explicit-compute":
            z = torch.zeros_like(injected)
            for _ in range(self.layers):
                z = self.cell(z, x)
        elif self.arm == "explicit-parameters":
            z = (problem.adjacency @ self.cell.linear((problem.adjacency @ injected).relu())).relu()
        else:
            z = self.cell.linear(injected.relu()).relu()
        return self.readout(dropout(z, self.drop, self.training)), solution


def adjacency(rows: Tensor, columns: Tensor, nodes: int) -> Tensor:
    """(N, N) sparse CSR with entries at (row, column), and rows that sum to 1 where they have entries."""
    degrees = torch.bincount(rows, minlength=nodes)[rows].float()
    entries = torch.stack([rows, columns])
    matrix = torch.sparse_coo_tensor(entries, 1 / degrees, (nodes, nodes), check_invariants=True)
    return matrix.coalesce().to_sparse_csr()


def chains(seed: int) -> Problem:
    """Directed chains of all lengths and splits: the features of the first node give the class; all nodes have
    noise."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(split, length) for split, count in CHAINS.items() for length in LENGTHS for _ in range(count)]
    lengths = torch.tensor([length for _, length in sizes])
    first = lengths.cumsum(0) - lengths
    graph = torch.arange(len(sizes)).repeat_interleave(lengths)
    classes = torch.randint(CLASSES, (len(sizes),), generator=generator)
    features = NOISE * torch.randn(len(graph), CLASSES, generator=generator)
    features[first, classes] += 1
    nodes = torch.arange(len(graph))
    inner = nodes[~torch.isin(nodes, first)]
    masks = {s: torch.tensor([split == s for split, _ in sizes])[graph] for s in CHAINS}
    matrix = adjacency(inner, inner - 1, len(nodes))
    name = f"{len(sizes)} generated chains"
    return Problem(name, matrix, features.to_sparse_csr(), classes[graph], graph, masks, chained=True)


def citations(options: Graphs, seed: int) -> Problem:
    """A graph of --data-root under split `seed`; StudyError if the file is missing or invalid."""
    path = Path(options.data_root or ".") / f"{options.data}.npz"
    masks = {ours: f"{theirs}_mask_{seed}" for ours, theirs in (("train", "train"), ("valid", "val"), ("test", "test"))}
    names = ["x_indptr", "x_indices", "x_data", "x_shape", "y", "edges", *masks.values()]
    arrays = read_arrays(path, names, REMEDY)
    with reading(path, REMEDY):
        part = {name: torch.from_numpy(array) for name, array in arrays.items()}
        problem = as_problem(options.data, part, {ours: part[name].bool() for ours, name in masks.items()})
    return problem


def as_problem(name: str, part: dict[str, Tensor], masks: dict[str, Tensor]) -> Problem:
    """Node classification on a graph with loops added; raises ValueError or RuntimeError if its parts do not match."""
    labels, edges = part["y"].long(), part["edges"].long()
    if edges.dim() != 2 or edges.shape[1] != 2 or not len(edges):
        raise ValueError(f"edges must be (E, 2) with E > 0, not {tuple(edges.shape)}")
    nodes = len(labels)
    if edges.min() < 0 or edges.max() >= nodes:
        raise ValueError(f"edges must join nodes from 0 to {nodes - 1}, not {edges.min()} and {edges.max()}")
    fit = all(mask.shape == (nodes,) and mask.any() for mask in masks.values())
    if labels.dim() != 1 or labels.min() < 0 or labels.max() >= nodes or not fit:
        raise ValueError(f"y must be classes of {nodes} nodes from 0, less than {nodes}, and each mask take some nodes")
    crow, columns, values = part["x_indptr"].long(), part["x_indices"].long(), part["x_data"].float()
    features = torch.sparse_csr_tensor(crow, columns, values, part["x_shape"].tolist(), check_invariants=True)
    if features.dim() != 2 or len(features) != nodes or features.shape[1] > MOST_FEATURES:
        raise ValueError(f"x_shape must be ({nodes}, F) with F <= {MOST_FEATURES}, not {tuple(features.shape)}")
    if not values.isfinite().all():
        raise ValueError("x_data must be finite")
    own = torch.arange(nodes)
    both = torch.cat([edges, torch.stack([own, own], dim=1)]).unique(dim=0)
    matrix = adjacency(both[:, 0], both[:, 1], nodes)
    return Problem(f"{name}, split", matrix, features, labels, torch.zeros_like(labels), masks)


def load(options: Graphs, seed: int = 0) -> Problem:
    """Return the problem of a seed."""
    if (options.data == "chains") != (options.data_root is None):
        raise StudyError(f"--data {options.data}: graphs come from --data-root, chains are made without it")
    if options.data != "chains" and options.seeds > 10:
        raise StudyError(f"--seeds {options.seeds}: at most 10, the splits of a graph")
    return chains(seed) if options.data == "chains" else citations(options, seed)


def train(run: Run) -> Outcome:
    """Train an arm on all graphs together, and measure the weights that are best in validation."""
    options: Graphs = run.options
    problem = load(options, run.seed)
    near = run.on_device(problem)
    near, rows = near._replace(groups=deqfast.Groups(near.graph)), near.masks["train"].nonzero().flatten()
    model = Network(run.arm, options, problem.features.shape[1], int(problem.labels.max()) + 1).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, weight_decay=options.decay, **run.fused)
    best = copy.deepcopy(model)

    def learn(labels: Tensor) -> tuple[Tensor, deqfast.Solution | None, deqfast.Solution | None]:
        logits, solution = model(near)
        loss = cross_entropy(logits[rows], labels)
        descend(loss, optimizer)
        return loss.detach(), solution, model.block.backward_solution

    learns = run.stepped(learn, optimizer)
    for step in run.steps(options.steps, model=model, best=best, optimizer=optimizer):
        model.train()
        loss, solution, backward = learns(near.labels[rows])
        row: dict[str, float] = {"step": step, "loss": loss.item()}
        if solution is not None and backward is not None:
            row |= {"evaluations": solution.evaluations, "backward": backward.evaluations}
        if step % 5 == 4 or step == options.steps - 1:
            with torch.no_grad():
                row["valid"] = right(model.eval()(near)[0], near, "valid").mean().item()
            if row["valid"] >= max(before.get("valid", 0.0) for before in [row, *run.rows]):
                best.load_state_dict(model.state_dict())
        run.rows.append(row)
    return Outcome(best, problem.name.split(",")[0], *measured(best.eval().cpu(), problem, run.rows))


def right(logits: Tensor, problem: Problem, split: str) -> Tensor:
    """Return which nodes of a split are classified correctly; of chains only the last nodes."""
    mask = problem.masks[split]
    if problem.chained:
        mask = mask & (problem.graph != torch.cat([problem.graph[1:], problem.graph.new_tensor([-1])]))
    return (logits.argmax(dim=1) == problem.labels)[mask].float()


@torch.no_grad()
def measured(model: Network, problem: Problem, log: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return scores in % of the test nodes, for chains also by length."""
    logits, solution = model(problem)
    hits = right(logits, problem, "test")
    scores = {"accuracy": 100 * float(hits.mean())}
    shown: dict[str, Any] = {"log": log}
    if problem.chained:
        by_length = hits.view(len(LENGTHS), -1).mean(dim=1)
        shown["by length"] = (100 * by_length).tolist()
        scores["of 100 nodes"] = 100 * float(by_length[-1])
    if solution is not None:
        scores |= {"evaluations": solution.evaluations, "converged": float(solution.converged.float().mean())}
        scores |= {f"{name}, training": fmean(row[name] for row in log) for name in ("evaluations", "backward")}
        if problem.chained:
            used = solution.iterations.float()
            sizes = torch.bincount(problem.graph)
            shown["iterations"] = [float(used[sizes == length].mean()) for length in LENGTHS]
    return scores, shown


def draw(records: Sequence[Record]) -> Figure:
    """Accuracy and evaluations against the length of chains; of other graphs the losses.

    A line is the mean over the seeds, and its band goes from the smallest to the largest. Arms that cannot see the
    first node only guess; their range over 16 chains says nothing, and is not drawn.
    """
    figure = style.page(6, style.NARROW)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    chained = "by length" in records[0].shown
    across, title = ("nodes of a chain", "right at the last node, %") if chained else ("step", "training loss")
    for arm, name in ARMS.items():
        shown = [record.shown for record in records if record.arm == arm]
        if shown:
            look = style.look(arm) | {"label": name} | ({} if chained else {"marker": ""})
            courses = [run["by length"] if chained else [row["loss"] for row in run["log"]] for run in shown]
            steps = LENGTHS if chained else range(len(courses[0]))
            blind = chained and arm in ("explicit-parameters", "perceptron")
            style.band(upper, steps, [np.mean(courses, axis=0)] if blind else courses, **look)
        if shown and arm == "deq":
            used = [run["iterations"] if chained else [row["evaluations"] for row in run["log"]] for run in shown]
            style.band(lower, steps, used, **look)
    if chained:
        upper.axhline(100 / CLASSES, color=style.BLACK, lw=1, ls=":", label="chance")
        upper.set_ylim(0, 103)
    seeds = len({record.seed for record in records})
    upper.set(xlabel=across, title=f"{title} (mean of {seeds} seeds; bands: their range)")
    lower.set(xlabel=across, title="evaluations that the DEQ takes")
    style.legend(figure, 2)
    return figure


EXAMPLE = Example(Graphs, train, draw, load)
