"""Training steps of the example models and of the study as graphs: without a GPU recordings, see ``recorded``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import frame, graphs, restoration, sudoku, text
from models.frame import Run
from nc_study import training
from recorded import GPU, Graph, as_graphs  # noqa: F401  # as_graphs: pytest finds the fixture by its import
from runs.options import SettingsError, StudyError
from test_study_training import trainer
from tqdm import tqdm

RESTORATION = restoration.Restoration(pretraining=4, steps=6, batch=1, patch=16, width=4)
TEXT = text.Text(steps=8, batch=2, context=16, width=16, heads=2)
SUDOKU = sudoku.Sudoku(size="4", starts=2, puzzles=8, tests=4, steps=6, evaluations=3, width=4, batch_size=2)
GRAPHS = graphs.Graphs(width=4, steps=8)
LONG = pytest.mark.tier("full")
RUNS = [
    pytest.param(restoration, RESTORATION, "deq", 6),  # both parts of the training have two steps before
    pytest.param(graphs, GRAPHS, "deq", 6, marks=LONG),
    pytest.param(text, TEXT, "deq", 6, marks=LONG),
    pytest.param(text, TEXT, "explicit-compute", 6, marks=LONG),
    pytest.param(sudoku, SUDOKU, "deq", 4, marks=LONG),
    pytest.param(sudoku, SUDOKU, "explicit-parameters", 4, marks=LONG),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(Run, "on_gpu", True)
    monkeypatch.setattr(frame.Training, "drops", False)
    monkeypatch.setattr(text, "topics", {"a": "The quick brown fox jumps over the lazy dog.\n" * 30})
    monkeypatch.setattr(text, "WRITTEN", 2)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 5))
    monkeypatch.setattr(graphs, "CHAINS", {"train": 2, "valid": 2, "test": 3})


@pytest.mark.skipif(GPU, reason="counts recorded launches")
# Torch says once per process that these tensors may still change; deepinv that its cost lacks the prior.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:No explicit prior has been given")
@pytest.mark.parametrize(("script", "options", "arm", "made"), RUNS)
def test_steps_in_graphs_have_the_bits_of_eager_ones(script, options, arm, made, tmp_path, monkeypatch, request):
    """With schedules, clipping, and two layouts of batches. The record says how they ran."""
    if "explicit" in arm and not request.getfixturevalue("as_graphs"):
        pytest.skip("a model without a solve has no loop in its graph")
    losses, ends = [], []
    stepped = Run.stepped

    def noted(run, step, *given):
        learns = stepped(run, step, *given)

        def noting(batch):
            for optimizer in given[:1]:  # a graph has float32
                optimizer.param_groups[0]["lr"] = torch.tensor(float(optimizer.param_groups[0]["lr"])).item()
            losses[-1].append(learns(batch))
            return losses[-1][-1]

        return noting

    monkeypatch.setattr(Run, "stepped", noted)
    for eager in (True, False):
        losses.append([])
        torch.manual_seed(0)
        launches, run = Graph.launches, Run(script.train, replace(options, eager=eager), tmp_path, arm, seed=0)
        ends.append([*script.train(run).model.state_dict().values()])
        assert Graph.launches - launches == (0 if eager else made)
        assert run.how == ("eager" if eager else "graphed")
    eager, graphed = (torch.stack([each if script is sudoku else each[0] for each in some]) for some in losses)
    assert torch.equal(eager, graphed) and len(eager) == made + 2 * (1 + (script is restoration))
    assert all(map(torch.equal, *ends))


def test_what_is_not_captured_says_why(tmp_path, capsys):
    run = Run(text.train, replace(TEXT, causal=True), tmp_path, "deq", seed=0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    run.stepped(lambda batch: batch, optimizer, "--causal")
    assert (
        run.how == "eager, for --causal"
        and "deq-seed0: training steps are eager, for --causal" in capsys.readouterr().out
    )
    learns = run.stepped(lambda batch: batch.sum().item(), optimizer)
    with pytest.raises(
        StudyError, match=r"waits for the device, in .*batch.sum\(\).item.*; --eager does without a graph"
    ):
        [learns(torch.ones(2)) for _ in range(2)]


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_a_gpu_that_is_absent_is_named():
    with pytest.raises(SettingsError, match="--device cuda: PyTorch sees no GPU here"):
        text.Text(device="cuda")
    assert (
        text.Text().device == "cpu" and text.Text().deciding["device"] == "cpu" and "eager" not in text.Text().deciding
    )


@pytest.mark.skipif(GPU, reason="counts recorded launches")
@pytest.mark.parametrize("adjoint", ["jfb", pytest.param("implicit", marks=pytest.mark.tier("full"))])
def test_an_epoch_in_graphs_is_that_of_the_eager_loop(adjoint, monkeypatch):
    """With the cosine schedule, and a last batch of another size. The rate is rounded to float32 in graphs."""
    lines, states = [], []
    for steps in (training.EAGER, training.GRAPHED):
        monkeypatch.setattr(training, "how_steps_run", lambda settings, steps=steps: steps)
        each = trainer(adjoint=adjoint, kernel="cpp")
        each.network.last.drop_converged = False  # as on a GPU
        launches = Graph.launches
        lines += [each.train_epoch(epoch, tqdm(disable=True)) for epoch in (1, 2)]
        states.append(each.state(2))
    made = sum(-(-len(each.data.train_images) // 16) for _ in (1, 2))
    assert Graph.launches - launches == made - 4 + (len(each.data.train_images) % 16 == 0) * 2
    for eager, graphed in zip(lines[:2], lines[2:], strict=True):
        assert graphed["loss"] == pytest.approx(eager["loss"], rel=1e-4)
        assert graphed["lr"] == eager["lr"] and graphed["train_accuracy"] == eager["train_accuracy"]
        assert graphed["train_solver"].iterations == pytest.approx(eager["train_solver"].iterations, rel=0.05)
    assert isinstance(states[1]["optimizer"]["param_groups"][0]["lr"], float)  # either way may continue it
    for name, value in states[0]["network"].items():
        torch.testing.assert_close(states[1]["network"][name], value, rtol=1e-3, atol=1e-5)


def test_where_steps_are_graphs():
    gpu = {"device": "cuda", "kernel": "triton", "eager": False, "compile": False, "adjoint": "jfb"}
    changes = [{}, {"device": "cpu"}, {"eager": True}, {"compile": True}, {"kernel": "torch"}, {"adjoint": "unrolled"}]
    ways = [training.how_steps_run(type("Settings", (), gpu | change)) for change in changes]
    assert ways == [training.GRAPHED, *[training.EAGER] * 5]
