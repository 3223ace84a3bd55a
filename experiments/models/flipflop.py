"""Fixed points of a recurrent network that remembers bits: deqfast.find_fixed_points, next to gradient descent.

A GRU of --width units learns the flip-flop task: pulses of +1 and -1 set --bits memories, and the outputs show them.
Then all inputs are zero, and states that it has visited are the starts of a search for h = GRU(0, h).
anderson: deqfast.find_fixed_points. gradient-descent: Adam on |GRU(0, h) - h|^2 / 2 of every start, the usual way; its
rate falls to 0 along a cosine. Both count a result with a relative residual of at most --tol.
A symmetric network of n bits has 3^n points: 2^n stable ones, the memories, and saddles between them. Both arms of a
seed have the same network and starts.
Source: Sussillo and Barak, Neural Computation 2013.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from runs import style
from runs.options import StudyError, option
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import deqfast

from .frame import Example, Options, Outcome, Record, Run, descend

ARMS = ("anderson", "gradient-descent")


@dataclass(frozen=True, kw_only=True)
class FlipFlop(Options):
    """Options of the model."""

    all_arms = ARMS

    bits: int = option("model", "memories", 3, minimum=1, maximum=8)
    width: int = option("model", "units of the GRU", 64, minimum=1)
    steps: int = option("training", "training steps", 1200, minimum=1)
    batch_size: int = option("training", "sequences per step", 64, minimum=1)
    length: int = option("training", "time steps of a sequence", 64, minimum=1)
    lr: float = option("training", "learning rate of Adam", 3e-3, above=0.0)
    starts: int = option("search", "visited states to start from", 1024, minimum=1)
    tol: float = option("search", "relative residual of a fixed point", 1e-8, above=0.0)
    descents: int = option("search", "steps of the gradient descent", 5000, minimum=1)
    descent_lr: float = option("search", "its learning rate at first", 3e-2, above=0.0)


class Memory(nn.Module):
    """GRU with a linear readout; `step` is one time step with zero input."""

    def __init__(self, options: FlipFlop) -> None:
        super().__init__()
        self.cell = nn.GRU(options.bits, options.width, batch_first=True)
        self.readout = nn.Linear(options.width, options.bits)

    def step(self, states: Tensor) -> Tensor:
        """States (B, D) after one step."""
        silence = states.new_zeros(len(states), 1, self.cell.input_size)
        return self.cell(silence, states[None])[1][0]


def sequences(options: FlipFlop) -> tuple[Tensor, Tensor]:
    """Draw pulses (B, T, bits), one in ten time steps, and the bits that they set; 0 before the first pulse."""
    shape = options.batch_size, options.length, options.bits
    pulses = torch.randn(shape).sign() * (torch.rand(shape) < 0.1)
    held = torch.zeros(options.batch_size, options.bits)
    bits = []
    for pulse in pulses.unbind(1):
        held = torch.where(pulse != 0, pulse, held)
        bits.append(held)
    return pulses, torch.stack(bits, 1)


def train(run: Run) -> Outcome:
    """Train the network of the run's seed, then search by the run's arm."""
    options = run.options
    model = Memory(options)
    optimizer = torch.optim.Adam(model.parameters(), options.lr)
    for step in run.steps(options.steps, model=model, optimizer=optimizer):
        pulses, bits = sequences(options)
        loss = mse_loss(model.readout(model.cell(pulses)[0]), bits)
        descend(loss, optimizer, clip=1.0)
        run.rows.append({"step": step, "loss": loss.item()})
    torch.manual_seed(run.seed)
    model = model.double().requires_grad_(False)
    visited = model.cell(sequences(options)[0].double())[0].flatten(0, 1)
    starts = visited[torch.randperm(len(visited))[: options.starts]]
    begun = time.perf_counter()
    solver = deqfast.Anderson(options.tol, max_iter=1000)
    ends = starts if run.arm == "anderson" else descended(model, starts, options)
    if run.arm == "gradient-descent":  # no more than a check of its results, which keeps those within the tolerance
        solver = deqfast.Anderson(options.tol, max_iter=1)
    found = deqfast.find_fixed_points(model.step, ends, solver)
    seconds = time.perf_counter() - begun
    run.minutes += seconds / 60
    scores = {
        "points": len(found.value),
        "stable": int(found.stable.sum()),
        "starts converged, %": 100 * float(found.solution.converged.double().mean()),
        "seconds": seconds,
        "loss": run.rows[-1]["loss"],
    }
    shown = {"bits": model.readout(found.value).tolist(), "unstable": found.unstable_directions.tolist()}
    return Outcome(model, f"flip-flop of {options.bits} bits, {len(starts)} starts", scores, shown)


def descended(model: Memory, starts: Tensor, options: FlipFlop) -> Tensor:
    """States after Adam's descent of |step(h) - h|^2 / 2, each start by itself."""
    states = starts.clone().requires_grad_()
    optimizer = torch.optim.Adam([states], options.descent_lr)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.descents)
    for _ in range(options.descents):
        descend((model.step(states) - states).square().sum() / 2, optimizer)
        rates.step()
    return states.detach()


def draw(records: Sequence[Record]) -> Figure:
    """The points that each arm found under the first seed, by the readouts of the first two bits."""
    first = [record for record in records if record.seed == records[0].seed]
    figure, axes = style.panels(1, len(first), height=3.8, sharex=True, sharey=True)
    for axis, record in zip(axes[0], first, strict=True):
        bits, unstable = np.array(record.shown["bits"]), np.array(record.shown["unstable"])
        for directions in sorted(set(unstable.tolist())):
            own = bits[unstable == directions]
            colour = f"C{directions}"
            label = f"unstable directions: {directions}" if directions else "stable"
            second = own[:, min(1, own.shape[1] - 1)]
            fill = "none" if directions else colour
            axis.scatter(own[:, 0], second, 40 + 40 * directions, fill, edgecolors=colour, label=label)
        axis.set(title=f"{record.arm}: {len(bits)} points", xlabel="first bit")
    axes[0, 0].set_ylabel("second bit")
    style.legend(figure)
    return figure


def load(options: FlipFlop) -> None:
    """Raise StudyError for a --data-root: the task is drawn."""
    if options.data_root is not None:
        raise StudyError(f"--data-root {options.data_root}: flipflop draws its task, and reads no data")


EXAMPLE = Example(FlipFlop, train, draw, load)
