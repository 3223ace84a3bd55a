"""Training steps in graphs. Without a GPU a graph is a recording; ``recorded`` says what that cannot show."""

from __future__ import annotations

import functools

import pytest
import torch
from own_sums import LoopedFCCell
from recorded import DEVICE, GPU, Graph, as_graphs  # noqa: F401
from torch import nn

import deqfast
from deqfast.api import graphed_step

IMPLICIT = deqfast.Implicit(deqfast.Anderson(1e-5, max_iter=20))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, adjoint="jfb", dropout=0.0, solver="anderson"):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 5), nn.Dropout(dropout), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(
            deqfast.DEQBlock(LoopedFCCell(n, 12), solver, adjoint, warn=False, trace=True) for n in (5, 12)
        )

    def forward(self, x):
        z, one = self.blocks[0](self.dropout(self.first(x)), return_solution=True)
        z, other = self.blocks[1](z, return_solution=True)
        return self.last(z), [one, other]


class Training:
    """A network, its optimiser and a cosine schedule, eager or in graphs."""

    def __init__(self, graphed, optimizer="sgd", scales=False, clip=None, autocast=False, zeroes=True, **net):
        torch.manual_seed(0)
        self.net = Net(**net).to(DEVICE)
        rate = torch.tensor(0.05, device=DEVICE)
        of = {
            "sgd": lambda p: torch.optim.SGD(p, rate, momentum=0.9, weight_decay=1e-3, fused=True),
            "adam": lambda p: torch.optim.AdamW(p, rate, capturable=True, fused=True),
        }
        self.optimizer = of[optimizer](self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=7, enabled=scales)
        self.clip, self.autocast, self.zeroes = clip, autocast, zeroes
        self.step = deqfast.make_graphed_step(self._step) if graphed else self._step

    def _step(self, batch):
        if self.zeroes:
            self.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast):
            y, solutions = self.net(batch["x"])
            loss = (y - batch["y"]).square().mean()
        self.scaler.scale(loss).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"loss": loss, "solutions": solutions, "kind": "mean"}

    def run(self, steps, sizes=(6,)):
        """Losses, iterations and evaluations of each step."""
        generator, seen = torch.Generator().manual_seed(1), []
        torch.manual_seed(2)
        for k in range(steps):
            x = torch.randn(sizes[k % len(sizes)], 4, generator=generator).to(DEVICE)
            result = self.step({"x": x, "y": x[:, :3].tanh()})
            seen.append((result["loss"].detach(), result["solutions"], result["kind"]))
            self.schedule.step()
        return seen


CASES = {
    "jfb": {},
    "implicit": {"adjoint": IMPLICIT, "optimizer": "adam", "clip": 0.5},
    "phantom": {"adjoint": "phantom", "scales": True, "clip": 0.5, "solver": "broyden"},
    "scaled adam": {"optimizer": "adam", "scales": True, "solver": "picard"},
    "autocast": {"autocast": True},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.tier("full") if case else ()) for name, case in CASES.items()],
)
def test_the_steps_are_those_of_the_eager_loop(case):
    """Fifty steps of two layouts, with a schedule: the first two of each are eager, the others one launch each."""
    graphed, plain = Training(True, **case), Training(False, **case)
    launches = Graph.launches
    seen, expected = (training.run(50, sizes=(6, 6, 6, 4)) for training in (graphed, plain))
    close = functools.partial(torch.testing.assert_close, rtol=1e-3 if GPU else 0, atol=1e-5 if GPU else 0)
    for (loss, solutions, kind), (loss_of_loop, of_loop, _) in zip(seen, expected, strict=True):
        close(loss, loss_of_loop)
        for one, other in zip(solutions, of_loop, strict=True):
            close(one.value, other.value)
            needed = int(other.iterations.max())
            close(one.iterations, other.iterations)
            assert one.evaluations in (needed, needed + 1)
            close(one.trace[:needed], other.trace[:needed])
        assert kind == "mean"
    for p, q in zip(graphed.net.parameters(), plain.net.parameters(), strict=True):
        close(p, q)
        close(p.grad, q.grad)
    assert graphed.scaler.state_dict() == plain.scaler.state_dict()
    assert len(graphed.step._captured) == 2
    assert GPU or Graph.launches - launches == 46
    losses = [float(loss) for loss, *_ in seen]
    assert losses[-1] < 0.7 * losses[0]


def test_each_replay_draws_new_numbers_or_a_draw_is_refused(as_graphs):  # noqa: F811
    """torch registers its generator with its own graphs only; in parts that C++ joins, draws would be repeated."""
    graphed = Training(True, dropout=0.5)
    if as_graphs:
        with pytest.raises(RuntimeError, match=r"draws random numbers \(in .*self.dropout.*\).* or use torch 2.14"):
            graphed.run(2)
        return
    losses, expected = ([loss for loss, *_ in Training(mode, dropout=0.5).run(12)] for mode in (True, False))
    assert len(set(map(float, losses))) == 12
    assert GPU or losses == expected


CHANGES = {
    "the mode": lambda training: training.net.dropout.eval(),
    "a parameter": lambda training: setattr(training.net.last, "bias", None),
    "weight decay": lambda training: training.optimizer.param_groups[0].update(weight_decay=0.1),
    "a loaded state": lambda training: training.optimizer.load_state_dict(training.optimizer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    trainings = [Training(mode) for mode in (True, False)]
    for training in trainings:
        training.run(4)
        change(training)
    losses = [torch.stack([loss for loss, *_ in training.run(4)]) for training in trainings]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zeroes_outside", [True, False])
def test_gradients_that_the_step_keeps(zeroes_outside):
    """They are added to, or begin again, as in the eager loop."""
    ends = []
    for mode in (True, False):
        training, grads = Training(mode, zeroes=False), []
        for _ in range(6):
            if zeroes_outside:
                training.optimizer.zero_grad()
            training.run(1)
            grads.append([p.grad.clone() for p in training.net.parameters()])
        ends.append(grads)
    for grads, expected in zip(*ends, strict=True):
        torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-5)


def test_what_a_call_submits():
    """A copy of the batch, the launch, and a copy of the results, however many blocks and parameters there are."""
    training, made = Training(True), []
    training.run(4)

    class Submissions(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    (captured,) = training.step._captured.values()
    captured.launch = lambda stream: made.append("launch")
    batch = {"x": torch.zeros(6, 4, device=DEVICE), "y": torch.zeros(6, 3, device=DEVICE)}
    with Submissions():
        training.step(batch)
    assert [name for name in made if name not in ("empty", "set_")] == ["_foreach_copy_", "launch", "clone"]


def waiting(training):
    step = training._step

    def waits(batch):
        result = step(batch)
        return result["loss"].item()

    return waits


def sets_rate(training):
    return lambda batch: (training._step(batch), training.schedule.step())


REFUSED = {
    "a wait": (waiting, "the step .*test_graphed_step.py:[0-9]+: return result..loss...item()"),
    "a schedule": (sets_rate, "it sets the learning rate, which must be done outside"),
    "a float lr": (lambda t: t.optimizer.param_groups[0].update(lr=0.1), "lr of SGD must be a tensor .*got 0.1, in .*"),
    "steps on the host": (
        lambda t: setattr(t, "optimizer", torch.optim.Adam(t.net.parameters(), torch.tensor(0.1, device=DEVICE))),
        "Adam must have capturable=True, got False: .*scaler.step",
    ),
    "another solver": (lambda t: setattr(t.net.blocks[0], "solver", "auto"), "cannot be combined with Auto"),
}


@pytest.mark.parametrize(("change", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(change, match):
    training = Training(True)
    if callable(step := change(training)):
        training.step = deqfast.make_graphed_step(step)
    batch = {"x": torch.ones(6, 4, device=DEVICE), "y": torch.ones(6, 3, device=DEVICE)}
    with pytest.raises((RuntimeError, ValueError), match=match):
        for _ in range(3):
            training.step(batch)


def test_bad_arguments(monkeypatch):
    with pytest.raises(TypeError, match="needs a callable step, got 3"):
        deqfast.make_graphed_step(3)
    step = deqfast.make_graphed_step(lambda batch: batch)
    with pytest.raises(ValueError, match="needs a tensor in the batch, got none"):
        step({"k": 1})
    with pytest.raises(ValueError, match="a batch without gradient"):
        step(torch.zeros(2, device=DEVICE, requires_grad=True))
    monkeypatch.setattr(graphed_step, "DEVICE", "xpu")
    with pytest.raises(ValueError, match="needs a batch on one xpu device, got a tensor on"):
        step(torch.zeros(2, device=DEVICE))
