"""Training steps in graphs. Without a GPU a graph is a recording; ``recorded`` says what that cannot show."""

from __future__ import annotations

import cProfile
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from op_calls import Operations
from own_sums import LoopedFCCell
from recorded import DEVICE, GPU, Graph, Mark, as_graphs  # noqa: F401  # a fixture for every test
from torch import nn

import deqfast
from deqfast.api import graphed_step
from deqfast.torch_internals import graphs

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
        z, inner = self.blocks[0](self.dropout(self.first(x)), return_solution=True)
        z, outer = self.blocks[1](z, return_solution=True)
        return self.last(z), [inner, outer]


class Training:
    """A network, its optimiser and a cosine schedule, eager or in graphs."""

    def __init__(self, graphed, optimizer="sgd", scales=False, clip=None, autocast=False, **net):
        torch.manual_seed(0)
        self.net = Net(**net).to(DEVICE)
        rate = torch.tensor(0.05, device=DEVICE)
        make, options = {
            "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
            "adam": (torch.optim.AdamW, {"capturable": True}),
        }[optimizer]
        self.optimizer = make(self.net.parameters(), rate, fused=True, **options)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=7, enabled=scales)
        self.clip, self.autocast = clip, autocast
        self.step = deqfast.make_graphed_step(self._step) if graphed else self._step

    def _step(self, batch):
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
    "neumann": {"adjoint": "neumann"},
    "shine": {"adjoint": "shine", "solver": "broyden"},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.tier("full") if case else ()) for name, case in CASES.items()],
)
def test_the_steps_are_those_of_the_eager_loop(case):
    """26 steps of two layouts, with a schedule: the first two of each are eager, the others one launch each."""
    graphed, plain = Training(True, **case), Training(False, **case)
    launches = Graph.launches
    seen, expected = (training.run(26, sizes=(6, 6, 6, 4)) for training in (graphed, plain))
    close = functools.partial(torch.testing.assert_close, rtol=1e-3 if GPU else 0, atol=1e-5 if GPU else 0)
    for (loss, solutions, kind), (looped_loss, looped, _) in zip(seen, expected, strict=True):
        close(loss, looped_loss)
        for solution, other in zip(solutions, looped, strict=True):
            needed = int(other.iterations.max())
            close([solution.value, solution.iterations], [other.value, other.iterations])
            close(solution.trace[:needed], other.trace[:needed])
            assert solution.evaluations in (needed, needed + 1)
        assert kind == "mean"
    ends = ([*net.parameters(), *(p.grad for p in net.parameters())] for net in (graphed.net, plain.net))
    close(*ends)
    assert graphed.scaler.state_dict() == plain.scaler.state_dict()
    assert len(graphed.step._captured) == 2
    assert GPU or Graph.launches - launches == 22
    losses = [float(loss) for loss, *_ in seen]
    assert losses[-1] < 0.7 * losses[0]


class Masked(nn.Module):
    """A cell with dropout with a new mask in each solve."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(12, 12), deqfast.SolveDropout(0.3)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.linear(self.dropout(z)) + x)


@pytest.mark.parametrize("masks", [False, True])
def test_each_replay_draws_new_numbers_or_a_draw_is_refused(masks, as_graphs):  # noqa: F811  # the fixture
    """torch registers its generator with its own graphs only; in parts that C++ joins, draws would be repeated."""

    def training(graphed):
        made = Training(graphed, dropout=0.0 if masks else 0.5)
        if masks:
            made.net.blocks[1].cell = Masked().to(DEVICE)
        return made

    if as_graphs:
        with pytest.raises(RuntimeError, match=r"draws random numbers \(in .*\).* or use torch 2.14") as caught:
            training(True).run(2)
        assert masks or "self.dropout(self.first(x))" in str(caught.value)
        return
    losses, expected = ([loss for loss, *_ in training(mode).run(12)] for mode in (True, False))
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
        training.run(4, sizes=(6, 6, 4, 6))  # the second layout's first call comes before the capture of the first
        change(training)
    losses = [torch.stack([loss for loss, *_ in training.run(4)]) for training in trainings]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


class Small:
    """A network without solves; `step(small, batch)` is eager or in graphs."""

    def __init__(self, step, graphed=True, norm=nn.Tanh):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 2)).to(DEVICE)
        groups = [{"params": self.net.parameters()}, {"params": []}]
        self.optimizer = torch.optim.SGD(groups, torch.tensor(0.1, device=DEVICE), momentum=0.9, fused=True)
        step = functools.partial(step, self)
        self.step = deqfast.make_graphed_step(step) if graphed else step

    def learn(self, batch):
        loss = self.net(batch["x"]).square().mean()
        loss.backward()
        if batch["ends"]:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def batches(count, every=1):
    generator = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(6, 4, generator=generator).to(DEVICE), "ends": k % every == every - 1} for k in range(count)
    ]


def end_outside(small, k):
    small.optimizer.step()
    small.optimizer.zero_grad()


def check_and_end(small, k):
    assert all(p.grad is not None for p in (*small.net[0].parameters(), small.net[2].weight))
    end_outside(small, k)


def end_in_parts(small, k):
    """The last layer begins each of the first steps without gradients; later all are added to."""
    if k < 8 or k % 2:
        small.optimizer.step()
        small.optimizer.zero_grad(set_to_none=False)
        small.net[2].zero_grad(set_to_none=k < 8)


def use_functions(small, batch):
    """No module is called, and no optimiser."""
    first, last = small.net[0], small.net[2]
    loss = (nn.functional.linear(batch["x"], first.weight, first.bias).tanh() @ last.weight.T).square().mean()
    loss.backward()
    return loss.detach()


BETWEEN = {
    "the optimiser": (99, end_outside),
    "the optimiser of functions' weights": (99, check_and_end),
    "gradients of a part": (99, end_in_parts),
    "the last of four": (4, lambda small, k: None),
    "frozen weights": (1, lambda small, k: small.net[0].requires_grad_(k < 6)),
    "a rate": (1, lambda small, k: small.optimizer.param_groups[0]["lr"].fill_(0.1 / (k + 1))),
}


@pytest.mark.parametrize(("every", "between"), BETWEEN.values(), ids=BETWEEN)
def test_what_the_loop_does_between_steps(every, between):
    ends = []
    for graphed in (True, False):
        small, before = Small(use_functions if between is check_and_end else Small.learn, graphed), Graph.launches
        for k, batch in enumerate(batches(20, every)):
            before = Graph.launches if k == 16 else before
            small.step(batch)
            between(small, k)
        ends.append([p.detach() for p in small.net.parameters()])
        assert GPU or not graphed or Graph.launches == before + 4
    torch.testing.assert_close(*ends, rtol=1e-4 if GPU else 0, atol=1e-6 if GPU else 0)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.tier("full")), False])
def test_modules_are_seen_in_compiled_code_and_under_a_profiler(compiled, monkeypatch):
    """Their modes are watched. The profiler sees what comes after the watched call too."""
    if not GPU:  # within the modes of the recordings dynamo would run nothing compiled
        monkeypatch.setattr(graphed_step, "refuse_waits", lambda work, who: work())
        monkeypatch.setattr(graphed_step, "aside", lambda work, stream: work())
    losses = []
    for graphed in (True, False):
        small, profile = Small(Small.learn, graphed, lambda: nn.BatchNorm1d(8)), cProfile.Profile()
        if compiled:
            torch._dynamo.reset()
            net, forward = small.net, torch.compile(lambda x, net=small.net: net(x), backend="eager")
            small.net = forward
        profile.enable()
        for k, batch in enumerate(batches(8)):
            if k == 5:
                (net if compiled else small.net).eval()
            loss = small.step(batch)
        "after it".upper()
        profile.disable()
        losses.append(loss)
        assert any("upper" in str(entry.code) for entry in profile.getstats())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_a_start_is_not_read_while_the_step_is_watched_or_captured():
    block = deqfast.DEQBlock(LoopedFCCell(4, 12), warn=False).to(DEVICE)
    step = deqfast.make_graphed_step(lambda batch: block(batch[0], z0=batch[1], return_solution=True)[1])
    x, z0 = torch.ones(3, 4, device=DEVICE), torch.zeros(3, 12, device=DEVICE)
    statuses = [step((x, z0)).status for _ in range(4)]
    assert len(step._captured) == 1
    z0[1] = float("nan")
    statuses.append(step((x, z0)).status)
    fine, broken = int(deqfast.Status.CONVERGED), int(deqfast.Status.NONFINITE)
    assert [status.tolist() for status in statuses] == [[fine] * 3] * 4 + [[fine, broken, fine]]


@pytest.mark.parametrize("most", [4, 9, 12])
def test_states_of_a_trajectory_are_those_of_their_evaluations(most):
    """A loop of the device repeats one capture of the cell: the states come before it."""
    block = deqfast.DEQBlock(LoopedFCCell(4, 12), deqfast.Picard(1e-2, most), warn=False).to(DEVICE)

    def step(x):
        block.zero_grad()
        states = block.trajectory(x, at=[1, 3, 4])
        sum(state.square().sum() for state in states).backward()
        return states, [p.grad for p in block.parameters()]

    graphed = deqfast.make_graphed_step(step)
    for x in torch.randn(4, 3, 4, device=DEVICE):
        expected = step(x)
        torch.testing.assert_close(graphed(x), expected, rtol=1e-4 if GPU else 0, atol=1e-5 if GPU else 0)
    assert len(graphed._captured) == 1


def test_a_failed_capture_leaves_the_gradients():
    def step(small, batch):
        small.optimizer.zero_grad()
        loss = small.learn(batch)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no more")
        return loss

    small, (batch, *_) = Small(step), batches(1, 2)
    for _ in range(2):
        small.step(batch)
    for _ in range(2):  # with gradients before, and without
        before = [p.grad for p in small.net.parameters()]
        with pytest.raises(RuntimeError, match=r"cannot be captured, in .*test_graphed_step.py:.*: no more"):
            small.step(batch)
        assert all(p.grad is grad for p, grad in zip(small.net.parameters(), before, strict=True))
        small.optimizer.zero_grad()


def test_results_have_their_own_memory():
    small = Small(lambda small, batch: [small.net[0].weight, small.learn(batch)])
    results = [small.step(batch)[0] for batch in batches(5)]
    assert len({tensor.data_ptr() for tensor in (*results, small.net[0].weight)}) == 6


@pytest.mark.skipif(GPU, reason="this counts events of recordings")
def test_a_call_on_another_stream_waits_for_the_calls_before(monkeypatch):
    """Of any layout, as they share the parameters."""
    small, addresses = Small(Small.learn), iter([0, 1, 1, 1, 0, 0, 2, 2])
    monkeypatch.setattr(graphed_step, "raw_stream", lambda device: next(addresses))
    monkeypatch.setattr(Mark, "waits", 0)
    for batch in batches(8, 2):
        small.step(batch)
    assert Mark.waits == 3
    assert len(small.step._captured) == 2


@pytest.mark.skipif(GPU, reason="this has devices by name")
def test_each_device_has_its_own_stream(monkeypatch):
    def capture(works, mode, stream):
        streams.append(stream)
        works[0]()
        return [Graph()]

    devices, streams = [torch.device("cpu", k % 2) for k in range(6)], []
    upcoming = iter(devices)
    monkeypatch.setattr(graphed_step, "_device_of", lambda leaves: next(upcoming))
    monkeypatch.setattr(graphed_step, "aside", lambda work, stream: (streams.append(stream), work()))
    monkeypatch.setattr(graphed_step, "capture", capture)
    monkeypatch.setattr(graphed_step, "cuts", lambda: False)
    step = deqfast.make_graphed_step(lambda batch: batch["device"])
    for device in devices:
        step({"x": torch.zeros(2), "device": device})
    assert len(streams) == 6 and len(set(streams)) == 2 and streams[::2] == streams[:1] * 3


@pytest.mark.skipif(GPU, reason="this has streams by name")
@pytest.mark.parametrize(("stream", "loops"), [("the step's", 1), ("another thread's", 0)])
def test_a_solve_that_is_captured_on_another_stream_cuts_no_step(stream, loops, monkeypatch):
    """Autograd's threads are on the stream of the step."""
    block, present = deqfast.DEQBlock(LoopedFCCell(4, 12), warn=False), ["the step's"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: present[0])

    def solve():
        present[0] = stream
        block(torch.ones(3, 4))
        present[0] = "the step's"

    parts = graphs.capture_cut(solve, None)
    assert len(parts.loops) == loops and len(parts.graphs) == 1 + 2 * loops


VARIED = {  # what varies; calls; how many of them are kept; the warning
    "number": (
        lambda small, k: {"epoch": k},
        (70, 64),
        "the step's batch has had over 64 layouts or plain values. Numbers that vary must",
    ),
    "setting": (
        lambda small, k: small.optimizer.param_groups[0].update(weight_decay=k * 1e-3) or {},
        (30, 1),
        "captured again and again, as a setting or the state of an optimiser changes",
    ),
}


@pytest.mark.parametrize(("vary", "calls", "text"), VARIED.values(), ids=VARIED)
def test_what_always_varies_is_warned_of_once(vary, calls, text):
    small, batch = Small(Small.learn), {"x": torch.ones(2, 4, device=DEVICE), "ends": True}
    with pytest.warns(UserWarning, match=text) as shown:
        for k in range(calls[0]):
            small.step(batch | vary(small, k))
    assert len(shown) == 1 and shown[0].filename == __file__
    assert len(small.step._calls) == calls[1]


def test_what_a_call_submits():
    """A copy of the batch, the launch, and a copy of the results, however many blocks and parameters there are."""
    training, operations = Training(True), Operations()
    training.run(4)
    (captured,) = training.step._captured.values()
    captured.launch = lambda stream: operations.names.append("launch")
    batch = {"x": torch.zeros(6, 4, device=DEVICE), "y": torch.zeros(6, 3, device=DEVICE)}
    with operations:
        training.step(batch)
    assert [name for name in operations.names if name not in ("empty", "set_")] == ["_foreach_copy_", "launch", "clone"]


def extended(work):
    """A training's step that also works with the training and its result."""

    def change(training):
        def step(batch):
            result = training._step(batch)
            work(training, result)
            return result

        return step

    return change


REFUSED = {
    "a wait": (extended(lambda t, made: made["loss"].item()), "the step .*test_graphed_step.py:[0-9]+: .*item()"),
    "a schedule": (extended(lambda t, _: t.schedule.step()), "it sets the learning rate, which must be done outside"),
    "a new rate": (
        extended(lambda t, _: t.optimizer.param_groups[0].update(lr=torch.full((), 0.1, device=DEVICE))),
        "it sets the learning rate, which must be done outside",
    ),
    "a counter": (
        extended(lambda t, _: t.optimizer.param_groups[0].update(k=t.optimizer.param_groups[0].get("k", 0) + 1)),
        "it sets k of SGD, which must be done outside",
    ),
    "an object": (lambda t: lambda batch: SimpleNamespace(**t._step(batch)), "must return a tree .*got namespace"),
    "another device": (lambda t: lambda batch: torch.zeros(2, device="meta"), "it returns a tensor on meta, outside"),
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
    with pytest.raises((RuntimeError, ValueError, TypeError), match=match):
        for _ in range(3):
            training.step(batch)


def test_bad_arguments(monkeypatch):
    with pytest.raises(TypeError, match="needs a callable step, got 3"):
        deqfast.make_graphed_step(3)
    step, zeros = deqfast.make_graphed_step(lambda batch: batch), torch.zeros(2, device=DEVICE)
    for batch, error, match in (
        ({"k": 1}, ValueError, "needs a tensor in the batch, got none"),
        ({"k": np.zeros(2)}, TypeError, "needs a batch of tensors and plain values, got array"),
        (zeros.to_sparse(), ValueError, "needs dense tensors in the batch, got torch.sparse_coo"),
        (zeros.clone().requires_grad_(), ValueError, "a batch without gradient"),
    ):
        with pytest.raises(error, match=match):
            step(batch)
    monkeypatch.setattr(graphed_step, "DEVICE", "xpu")
    with pytest.raises(ValueError, match="needs a batch on one xpu device, got a tensor on"):
        step(zeros)
