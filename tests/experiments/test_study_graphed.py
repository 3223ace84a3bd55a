"""The study's training steps as graphs, which are recordings without a GPU: see ``recorded``."""

import pytest
import torch
from nc_study import training
from recorded import GPU, Graph, as_graphs  # noqa: F401  # as_graphs: pytest finds the fixture by its import
from test_study_training import trainer
from tqdm import tqdm


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
