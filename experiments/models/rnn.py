"""Recurrent networks h_t = step(h_{t-1}, x_t), all positions at once: a Newton step by a prefix scan is the cell.

Its Jacobian vanishes at the fixed point: JFB is exact. An arm is a kind of step: a GRU, an LSTM, or a GRU whose units
read their own state only. Sources: Lim et al., ICLR 2024 (DEER); Danieli et al., 2025 (ParaRNN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from runs import style
from runs.options import option
from torch import Tensor, nn
from torch.nn.functional import pad

import deqfast

from .frame import Example, Options, Outcome, Record, Run

ARMS, GAINS = ("gru", "lstm", "diagonal"), (1.0, 4.0, 12.0)


@dataclass(frozen=True, kw_only=True)
class Rnn(Options):
    """Options of the model."""

    all_arms = ARMS
    length: int = option("model", "positions of a sequence", 256, minimum=2)


class Step(nn.Module):
    """step(h, x) for states (..., S) and inputs (..., width); an LSTM has S = 2 width. `gain`: of recurrent weights."""

    def __init__(self, kind: str, width: int, gain: float = 1.0) -> None:
        super().__init__()
        cells: dict[str, Any] = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "diagonal": nn.Linear}
        self.cell = cells[kind](width, 3 * width if kind == "diagonal" else width)
        self.kind, self.size, self.own = kind, width * (1 + (kind == "lstm")), nn.Parameter(torch.rand(3, width) - 0.5)
        with torch.no_grad():
            (self.own if kind == "diagonal" else self.cell.weight_hh).mul_(gain)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        if self.kind != "diagonal":
            return self.cell(x, h) if self.kind == "gru" else torch.cat(self.cell(x, h.chunk(2, dim=-1)), dim=-1)
        reset, keep, new = self.cell(x).chunk(3, dim=-1)
        reset, keep = (reset + self.own[0] * h).sigmoid(), (keep + self.own[1] * h).sigmoid()
        return keep * h + (1 - keep) * (new + reset * self.own[2] * h).tanh()


def times(a: Tensor, h: Tensor) -> Tensor:
    """Products of matrices or diagonals with vectors."""
    return a * h if a.dim() == h.dim() else (a @ h[..., None])[..., 0]


def scan(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t from h_{-1} = 0 by doublings: b (B, T, S), a (B, T, S, S) or diagonals (B, T, S)."""
    step = 1  # torch's own associative scan is private, and differs between versions
    while step < b.shape[1]:
        late, early = a[:, step:], a[:, :-step]
        b = torch.cat([b[:, :step], b[:, step:] + times(late, b[:, :-step])], dim=1)
        a, step = torch.cat([a[:, :step], late * early if a.dim() == b.dim() else late @ early], dim=1), 2 * step
    return b


def newton(step: Step, h: Tensor, x: Tensor) -> Tensor:
    """Newton's step for h_t = step(h_{t-1}, x_t) at all t: h (B, T, S), x (B, T, F). Jacobians are constants."""
    before, x = pad(h[:, :-1], (0, 0, 1, 0)).flatten(0, 1), x.flatten(0, 1)
    rows, diagonal = (before.detach(), x.detach()), torch.func.grad(lambda h, x: step(h, x).sum())
    derivative = diagonal if step.kind == "diagonal" else torch.func.vmap(torch.func.jacrev(step))
    a = derivative(*rows).detach()
    return scan(a.unflatten(0, h.shape[:2]), (step(before, x) - times(a, before)).view_as(h))


def loop(step: Step, x: Tensor) -> Tensor:
    """States (B, T, S), one after the other."""
    h = x.new_zeros(len(x), step.size)
    return torch.stack([h := step(h, at) for at in x.unbind(1)], dim=1)


def train(run: Run) -> Outcome:
    """Solve sequences by the run's kind of step, and compare with the loop."""
    x, scores, shown = torch.randn(4, run.options.length, 4), dict[str, float](), dict[str, list[float]]()
    how: dict[str, Any] = {"solver": deqfast.Picard(1e-5, 40), "adjoint": "jfb", "trace": True, "warn": False}
    for gain in GAINS:
        step = Step(run.arm, x.shape[2], gain)
        start = x.new_zeros(*x.shape[:2], step.size)
        h, solution = deqfast.fixed_point(partial(newton, step), start, x, return_solution=True, **how)
        states, weights = (h, loop(step, x)), [*step.cell.parameters()]
        grads = [torch.cat([*map(torch.flatten, torch.autograd.grad(z.square().sum(), weights))]) for z in states]
        for name, numbers in {"converged": solution.converged, "evaluations": solution.iterations}.items():
            scores[f"{gain:g}: {name}"] = numbers.double().mean().item()
        for name, (own, right) in {"value": states, "gradient": grads}.items() if solution.converged.all() else ():
            scores[f"{gain:g}: {name} error"] = ((own - right).norm() / right.norm()).item()
        shown[f"{gain:g}"] = solution.trace.amax(dim=1).tolist()
    return Outcome(step, f"4 sequences of {run.options.length} normal inputs", scores, shown)


def draw(records: Sequence[Record]) -> Figure:
    """Residuals against evaluations, under the first seed."""
    figure, (axes,) = style.panels(1, len(ARMS), 2.6, sharey=True)
    for axis, record in zip(axes, (each for each in records if each.seed == records[0].seed), strict=False):
        for gain, residuals in record.shown.items():
            axis.semilogy(range(1, len(residuals) + 1), residuals, label=f"weights x {gain}")
        axis.set(title=record.arm, xlabel="evaluations", ylabel="largest residual")
    style.legend(figure)
    return figure


EXAMPLE = Example(Rnn, train, draw)
