"""Cases of the options that affect training: layers of 64 units that classify scikit-learn's 8x8 digits."""

from __future__ import annotations

import functools
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deqfast

from .entry import Case, Contender, check
from .options import option
from .record import Row

ALL, IMAGES = 1797, 1500  # all images, and how many of them are trained on; the others are for testing
SOLVER = deqfast.Broyden(1e-3, 30)
IMPLICIT = deqfast.Implicit(SOLVER)
FEW = 3  # evaluations
ON_THE_WAY = {2: 0.64, 4: 0.8}  # evaluation -> weight of its state's loss, relative to the loss of z*


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 64), from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / images.max(), torch.from_numpy(labels)


class Cell(nn.Module):
    """``FCCell`` with dropout of its state."""

    def __init__(self, features: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.fc, self.drop = deqfast.FCCell(64, features, activation), deqfast.SolveDropout(dropout)

    def initial_state(self, x: Tensor) -> Tensor:
        return self.fc.initial_state(x)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.fc(self.drop(z), x)


@functools.cache
def learn(
    seed: int,
    steps: int,
    images: int,
    penalty: float = 0.0,
    dropout: float = 0.0,
    adjoint: Any = IMPLICIT,
    on_the_way: bool = False,
    features: int = 64,
    activation: str = "tanh",
    solver: Any = SOLVER,
    rate: float = 1e-2,
) -> tuple[Cell, nn.Linear]:
    """Cell and readout after `steps` steps of Adam; penalty: weight of ``jacobian_penalty``."""
    x, y = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cell, readout = Cell(features, activation, dropout), nn.Linear(features, 10)
        block = deqfast.DEQBlock(cell, solver, adjoint, warn=False)
        optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=rate)
        for _ in range(steps):
            rows = torch.randint(images, (64,))
            states = block.trajectory(x[rows], [*ON_THE_WAY]) if on_the_way else [block(x[rows])]
            weights = [*ON_THE_WAY.values(), 1.0][-len(states) :]
            loss = sum(w * F.cross_entropy(readout(z), y[rows]) for w, z in zip(weights, states, strict=True))
            if penalty:
                loss = loss + penalty * deqfast.regularize.jacobian_penalty(cell, states[-1], x[rows])
            optimizer.zero_grad()
            torch.as_tensor(loss).backward()
            optimizer.step()
    return cell.eval(), readout


@torch.no_grad()
def told(
    cell: Cell, readout: nn.Linear, x: Tensor, tol: float = 1e-3, most: int = 60, moves: float | None = None
) -> tuple[Tensor, Tensor, deqfast.Solution]:
    """Digits predicted for x, z* and its solve.

    moves: end samples whose output changes by less in an evaluation, in Kullback-Leibler divergence.
    """
    seen: list[Tensor] = []

    def settled(z: Tensor, value: Tensor, k: int) -> Tensor:
        seen.append(readout(value).log_softmax(dim=1))
        now, before = seen[-1], seen[max(0, k - 2)]
        return (now.exp() * (now - before)).sum(dim=1).lt(moves or 0.0) & (k > 1)

    halt = None if moves is None else settled
    z, solution = deqfast.DEQBlock(cell, deqfast.Broyden(tol, most), warn=False, stop_fn=halt)(x, return_solution=True)
    return readout(z).argmax(dim=1), z, solution


def digits_case(name: str, providers: dict[str, Row], steps: int = 400, seeds: int = 3, images: int = IMAGES) -> Case:
    """Case of means over the seeds; providers: further arguments of ``learn`` and, in "told", of ``told``."""

    def contender(provider: str, device: str) -> Contender:
        training = {key: value for key, value in providers[provider].items() if key != "told"}
        evaluation = providers[provider].get("told", {})
        x, y = (part[images:] for part in digits())
        rows: list[dict[str, float]] = []
        for seed in range(seeds):
            net = learn(seed, steps, images, **training)
            found, z, solution = told(*net, x, **evaluation)
            check("samples that broke down", float((solution.status == deqfast.Status.NONFINITE).sum()), 0)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                radius = deqfast.regularize.spectral_radius(net[0], z, x).mean()
            early = told(*net, x, most=FEW)[0]
            facts = {"accuracy": (found == y).float().mean(), "accuracy_of_few": (early == y).float().mean()}
            facts |= {"mean_evaluations": solution.iterations.float().mean(), "radius": radius}
            rows.append({column: float(value) for column, value in facts.items()})
        means = {column: mean(row[column] for row in rows) for column in rows[0]}
        return Contender(lambda: told(*net, x, **evaluation), means)

    return option(f"digits-{name}", tuple(providers), contender, devices=("cpu",))
