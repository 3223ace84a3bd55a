"""graphs.py: chains and files of graphs, what crosses a chain, and input that it refuses."""

import graphs
import numpy as np
import pytest
import torch
from runs import Run, StudyError

OPTIONS = graphs.Graphs(width=4, steps=5, layers=6)


@pytest.fixture(autouse=True)
def few_chains(monkeypatch):
    monkeypatch.setattr(graphs, "LENGTHS", (2, 5))
    monkeypatch.setattr(graphs, "CHAINS", {"train": 2, "valid": 2, "test": 3})


def write_graph(folder, **changed):
    """A ring of six nodes, as --data-root has graphs."""
    nodes = np.arange(6)
    ring = np.stack([nodes, (nodes + 1) % 6], axis=1)
    content = {"x_data": np.ones(6), "x_indices": nodes % 3, "x_indptr": np.arange(7), "x_shape": np.array([6, 3])}
    content |= {"y": nodes % 2, "edges": np.concatenate([ring, ring[:, ::-1]])}
    content |= {f"{split}_mask_{k}": nodes % 3 == i for i, split in enumerate(("train", "val", "test")) for k in (0, 1)}
    np.savez(folder / "cora.npz", **{key: value for key, value in (content | changed).items() if value is not None})


@pytest.mark.parametrize("arm", graphs.ARMS)
def test_an_arm_trains(tmp_path, arm):
    outcome = graphs.train(Run(OPTIONS, tmp_path, arm, seed=0))
    assert 0 <= outcome.scores["accuracy"] <= 100 and len(outcome.shown["by length"]) == 2
    assert ("evaluations" in outcome.scores) == (arm == "deq")


def test_graphs_of_a_batch_are_solved_apart_and_as_they_would_be_alone():
    problem = graphs.chains(0)
    torch.manual_seed(0)
    model = graphs.Network("deq", graphs.Graphs(width=4, tol=1e-6), 4, 4).eval()
    logits, solution = model(problem)
    assert solution.converged.all() and len(solution.status) == 14
    short, long = (solution.iterations[torch.bincount(problem.graph) == length].max() for length in (2, 5))
    assert short < long
    last = problem.graph == 13
    nodes = int(last.sum())
    alone = problem._replace(
        adjacency=graphs.adjacency(torch.arange(1, nodes), torch.arange(nodes - 1), nodes),
        features=problem.features.to_dense()[last].to_sparse_csr(),
        graph=torch.zeros(nodes, dtype=torch.long),
    )
    assert torch.allclose(model(alone)[0], logits[last], atol=1e-4)


def test_the_perceptron_alone_sees_no_edge():
    problem = graphs.chains(0)
    nodes = torch.arange(len(problem.graph))
    cut = problem._replace(adjacency=graphs.adjacency(nodes, nodes, len(nodes)))
    for arm in graphs.ARMS:
        model = graphs.Network(arm, graphs.Graphs(width=4, layers=6), 4, 4).eval()
        assert torch.equal(model(problem)[0], model(cut)[0]) == (arm == "perceptron")


def test_the_rows_of_the_weight_are_bounded():
    cell = graphs.Cell(5, kappa=0.5)
    cell.linear.parametrizations.weight.original.data.normal_()
    assert cell.linear.weight.abs().sum(dim=1).max() <= 0.5 + 1e-6


def test_files_are_read_and_checked(tmp_path):
    options = graphs.Graphs(data="cora", data_root=str(tmp_path), width=4, steps=5)
    with pytest.raises(StudyError, match="no such .npz file"):
        graphs.load(options)
    write_graph(tmp_path)
    problem = graphs.load(options, seed=1)
    assert problem.adjacency.layout == problem.features.layout == torch.sparse_csr
    assert torch.allclose(problem.adjacency.to_dense().sum(dim=1), torch.ones(6))
    assert graphs.train(Run(options, tmp_path, "deq", seed=0)).scores["converged"] == 1
    write_graph(tmp_path, y=None)
    with pytest.raises(StudyError, match="y is not"):
        graphs.load(options)
    write_graph(tmp_path, edges=np.zeros((0, 2), int))
    with pytest.raises(StudyError, match=r"edges must be \(E, 2\) with E > 0"):
        graphs.load(options)
    write_graph(tmp_path, edges=np.array([[0, 99]]))
    with pytest.raises(StudyError, match="edges must join nodes from 0 to 5, not 0 and 99"):
        graphs.load(options)
    for given in ({"data": "cora"}, {"data_root": "."}):
        with pytest.raises(StudyError, match="--data-root, chains are made without it"):
            graphs.load(graphs.Graphs(**given))
