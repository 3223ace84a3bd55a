"""The example models: every arm trains and is shown; their computations, and the input that they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import model
import numpy as np
import pytest
import torch
from correctness import after_solve, rounding
from models import frame, graphs, restoration, rnn, scf, sudoku, text
from models.frame import Run
from PIL import Image
from runs.options import StudyError, parsed
from study_helpers import EXPERIMENTS

GRAPHS = graphs.Graphs(width=4, steps=5, layers=6)
TEXT = text.Text(steps=3, batch=2, context=16, width=16, heads=2)
SUDOKU = sudoku.Sudoku(size="4", starts=2, puzzles=8, tests=4, steps=2, evaluations=3, width=4, batch_size=2)
RNN = rnn.Rnn(length=20)
SCF = scf.Scf(molecules=3, chains=2, atoms=8, evaluations=40, repeats=1)
RESTORATION = restoration.Restoration(pretraining=2, steps=2, batch=1, patch=16, width=4)
SCRIPTS = {  # with small options, a score and its range, and a score that only solves have
    "graphs": (graphs, GRAPHS, ("accuracy", 0, 100), "converged"),
    "restoration": (restoration, RESTORATION, ("PSNR", 5, 50), "converged"),
    "rnn": (rnn, RNN, ("1: evaluations", 2, 6), "1: converged"),
    "scf": (scf, SCF, ("molecules: evaluations", 1, 40), "molecules: converged, %"),
    "sudoku": (sudoku, SUDOKU, ("boards, any start, %", 0, 100), "evaluations a solve"),
    "text": (text, TEXT, ("loss, test", 2, 5), "converged"),
}


@pytest.fixture(autouse=True)
def few_data(monkeypatch):
    monkeypatch.setattr(graphs, "LENGTHS", (2, 5))
    monkeypatch.setattr(graphs, "CHAINS", {"train": 2, "valid": 2, "test": 3})
    monkeypatch.setattr(text, "topics", {"a": "The quick brown fox jumps over the lazy dog.\n" * 30})
    monkeypatch.setattr(text, "WRITTEN", 20)


# Torch says once per process that these tensors may still change; deepinv that its cost lacks the prior.
@pytest.mark.tier("full")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:No explicit prior has been given")
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_arm_trains_and_is_shown(name, tmp_path, capsys):
    script, options, (score, least, most), solves_score = SCRIPTS[name]
    made = [Run(script.train, options, tmp_path, arm, seed=0) for arm in script.ARMS]
    for run in made:
        run.measure()
    records = [run.record for run in made]
    assert all(least <= record.scores[score] <= most for record in records)
    solved = ("deq", *rnn.ARMS, *scf.ARMS, *["explicit-parameters"] * (name == "sudoku"))
    assert all((solves_score in record.scores) == (record.arm in solved) for record in records)
    frame.show(name, records, frame.png(script.EXAMPLE.draw(records)), tmp_path)
    shown = capsys.readouterr().out
    assert all(f"| {arm} " in shown for arm in script.ARMS)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    if name == "sudoku":
        assert 0 < records[0].scores[solves_score] <= 3 and Image.open(tmp_path / "deq-seed0.gif").n_frames > 1


@pytest.mark.filterwarnings("ignore:No explicit prior has been given")
def test_a_run_that_was_cut_off_counts_all_evaluations(tmp_path, cut_off):
    options = replace(RESTORATION, tol=0.02, steps=3)  # so that evaluations differ between steps

    def train():
        torch.manual_seed(0)
        run = Run(restoration.train, options, tmp_path, "deq", seed=0)
        return restoration.train(run).scores["evaluations, training"]

    whole = train()
    cut_off(train)
    assert (tmp_path / "deq-seed0.ckpt").exists() and train() == pytest.approx(whole)


def test_the_commands_of_the_pages_are_understood():
    pages = "".join(page.read_text() for page in (EXPERIMENTS.parent / "docs" / "pages").glob("*.md"))
    commands = re.findall(r"^python experiments/model\.py (\w+)((?: [^#\n]+)?)", pages, re.MULTILINE)
    for name, words in commands:
        assert parsed(SCRIPTS[name][0].EXAMPLE.options, None, [], words.split())
    assert {name for name, _ in commands} == {*SCRIPTS} == {*model.MODELS}


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


def test_data_of_ones_own_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = np.arange(6)
    ring = np.stack([nodes, (nodes + 1) % 6], axis=1)
    arrays = {"x_data": np.ones(6), "x_indices": nodes % 3, "x_indptr": np.arange(7), "x_shape": np.array([6, 3])}
    arrays |= {"y": nodes % 2, "edges": np.concatenate([ring, ring[:, ::-1]])}
    arrays |= {f"{split}_mask_{k}": nodes % 3 == i for i, split in enumerate(("train", "val", "test")) for k in (0, 1)}
    np.savez("cora.npz", **arrays)
    options = graphs.Graphs(data="cora", data_root=".", width=4, steps=5)
    problem = graphs.load(options, seed=1)
    assert problem.adjacency.layout == problem.features.layout == torch.sparse_csr
    assert torch.allclose(problem.adjacency.to_dense().sum(dim=1), torch.ones(6))
    assert graphs.train(Run(graphs.train, options, tmp_path, "deq", seed=0)).scores["converged"] == 1
    np.savez("cora.npz", **arrays | {"edges": np.zeros((0, 2), int)})
    with pytest.raises(StudyError, match=r"edges must be \(E, 2\) with E > 0"):
        graphs.load(options, seed=1)
    for name in restoration.FOLDERS.values():
        Path(name).mkdir()
        Image.fromarray(np.zeros((20, 24), np.uint8)).save(f"{name}/a.png")
    name, data = restoration.load(restoration.Restoration(data_root=".", patch=16))
    assert name == "Train400 (1), Set12 (1), BSD68 (1)" and data["train"][0].shape == (20, 24)
    for name in "ab":
        Path(f"{name}.txt").write_text(1000 * name)
    corpus = text.load(text.Text(data_root="."))
    assert corpus.characters == "ab" and [len(part) for part in corpus[2:]] == [1800, 100, 100]


@pytest.mark.parametrize("task", ["deblur", "inpaint"])
def test_the_measurement_and_its_adjoint(task):
    torch.manual_seed(0)
    known = restoration.measure(task, torch.rand(2, 1, 16, 18))
    x, y = torch.randn(2, 2, 1, 16, 18, dtype=torch.float64)
    known = restoration.Measurement(known.y.double(), known.transfer.to(torch.complex128), known.mask.double())
    assert torch.isclose((known.forward(x) * y).sum(), (x * known.adjoint(y)).sum())


@pytest.mark.parametrize("arm", text.ARMS)
def test_no_character_depends_on_those_after_it(arm):
    torch.manual_seed(0)
    model = text.Language(arm, TEXT, 10).eval()
    if model.equilibrium is not None:
        model.equilibrium.eval_solver = text.deqfast.Picard(1e-6, 100)
    first = torch.randint(10, (1, 16))
    second = first.clone()
    second[0, 8:] = (second[0, 8:] + 1) % 10
    with torch.no_grad():
        a, b = model(first)[0][0], model(second)[0][0]
    allowed = after_solve(1e-6 + rounding(torch.float32))
    torch.testing.assert_close(a[:8], b[:8], atol=allowed, rtol=allowed)
    assert not torch.allclose(a[8:], b[8:], atol=1e-2)
