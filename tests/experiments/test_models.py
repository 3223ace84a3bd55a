"""The example models: every arm trains and is shown, what they compute, and input that they refuse."""

from __future__ import annotations

from dataclasses import replace

import graphs
import images
import numpy as np
import pytest
import restoration
import runs
import sudoku
import text
import torch
from PIL import Image
from runs import Run, SettingsError, StudyError

from deqfast.testing import after_solve, rounding

GRAPHS = graphs.Graphs(width=4, steps=5, layers=6)
TEXT = text.Text(steps=3, batch=2, context=16, width=16, heads=2)
SUDOKU = {"puzzles": 8, "tests": 4, "steps": 2, "evaluations": 3, "starts": 2, "width": 4, "batch_size": 2}
RESTORATION = restoration.Restoration(pretraining=2, steps=2, batch=1, patch=16, width=4)
SCRIPTS = {  # with small options, a score and what it may be, and a score that only solves have
    "graphs": (graphs, GRAPHS, ("accuracy", 0, 100), "converged"),
    "images": (images, images.Images(epochs=2, images=16, batch=8, width=4), ("accuracy", 0, 100), "spectral radius"),
    "restoration": (restoration, RESTORATION, ("PSNR", 5, 50), "converged"),
    "sudoku": (sudoku, sudoku.Sudoku(size="4", **SUDOKU), ("boards, any start, %", 0, 100), "evaluations a solve"),
    "text": (text, TEXT, ("loss, test", 2, 5), "converged"),
}


@pytest.fixture(autouse=True)
def few_data(monkeypatch):
    monkeypatch.setattr(graphs, "LENGTHS", (2, 5))
    monkeypatch.setattr(graphs, "CHAINS", {"train": 2, "valid": 2, "test": 3})
    monkeypatch.setattr(images, "SHAPES", {"train": 40, "test": 20})
    monkeypatch.setattr(text, "topics", {"a": "The quick brown fox jumps over the lazy dog.\n" * 30})
    monkeypatch.setattr(text, "WRITTEN", 20)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_arm_trains_and_is_shown(name, tmp_path, capsys):
    script, options, (score, least, most), of_solves = SCRIPTS[name]
    made = [Run(options, tmp_path, arm, seed=0) for arm in script.ARMS]
    for run in made:
        runs.measure(script.train, run)
    records = [runs.read(run) for run in made]
    assert all(least <= record.scores[score] <= most for record in records)
    solved = ("deq", "deq-regularised", *["explicit-parameters"] * (name == "sudoku"))
    assert all((of_solves in record.scores) == (record.arm in solved) for record in records)
    runs.show(name, records, script.draw, tmp_path)
    shown = capsys.readouterr().out
    assert all(f"| {arm} " in shown for arm in script.ARMS)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    if name == "sudoku":
        assert 0 < records[0].scores[of_solves] <= 3 and Image.open(tmp_path / "deq-seed0.gif").n_frames > 1


@pytest.mark.parametrize(("name", "given"), [("images", {"images": 32}), ("restoration", {"steps": 3})])
def test_a_run_that_was_cut_off_counts_all_evaluations(name, given, tmp_path, cut_off):
    script, options, *_ = SCRIPTS[name]
    options = replace(options, tol=0.02, **given)  # with evaluations that differ from step to step

    def train():
        torch.manual_seed(0)
        return script.train(Run(options, tmp_path, "deq", seed=0)).scores["evaluations, training"]

    whole = train()
    cut_off(train)
    assert (tmp_path / "deq-seed0.ckpt").exists() and train() == pytest.approx(whole)


def test_twins_have_as_many_parameters():
    deq = images.Classifier("deq", images.Images(width=16))
    assert runs.count_parameters(images.ResNet(deq)) == pytest.approx(runs.count_parameters(deq), rel=0.1)
    written = [text.Language(arm, text.Text(), 65) for arm in ("deq", "explicit-parameters")]
    assert runs.count_parameters(written[1]) == pytest.approx(runs.count_parameters(written[0]), rel=0.05)


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


def test_the_perceptron_alone_sees_no_edge_and_the_rows_of_the_weight_are_bounded():
    problem = graphs.chains(0)
    nodes = torch.arange(len(problem.graph))
    cut = problem._replace(adjacency=graphs.adjacency(nodes, nodes, len(nodes)))
    for arm in graphs.ARMS:
        model = graphs.Network(arm, GRAPHS, 4, 4).eval()
        assert torch.equal(model(problem)[0], model(cut)[0]) == (arm == "perceptron")
    cell = graphs.Cell(5, kappa=0.5)
    cell.linear.parametrizations.weight.original.data.normal_()
    assert cell.linear.weight.abs().sum(dim=1).max() <= 0.5 + 1e-6


def write_graph(folder, **changed):
    """A ring of six nodes, as --data-root has graphs."""
    nodes = np.arange(6)
    ring = np.stack([nodes, (nodes + 1) % 6], axis=1)
    content = {"x_data": np.ones(6), "x_indices": nodes % 3, "x_indptr": np.arange(7), "x_shape": np.array([6, 3])}
    content |= {"y": nodes % 2, "edges": np.concatenate([ring, ring[:, ::-1]])}
    content |= {f"{split}_mask_{k}": nodes % 3 == i for i, split in enumerate(("train", "val", "test")) for k in (0, 1)}
    np.savez(folder / "cora.npz", **{key: value for key, value in (content | changed).items() if value is not None})


def test_files_of_graphs_are_read_and_checked(tmp_path):
    options = graphs.Graphs(data="cora", data_root=str(tmp_path), width=4, steps=5)
    with pytest.raises(StudyError, match="no such .npz file"):
        graphs.load(options)
    write_graph(tmp_path)
    problem = graphs.load(options, seed=1)
    assert problem.adjacency.layout == problem.features.layout == torch.sparse_csr
    assert torch.allclose(problem.adjacency.to_dense().sum(dim=1), torch.ones(6))
    assert graphs.train(Run(options, tmp_path, "deq", seed=0)).scores["converged"] == 1
    for changed, said in (
        ({"y": None}, "y is not"),
        ({"edges": np.zeros((0, 2), int)}, r"edges must be \(E, 2\) with E > 0"),
        ({"edges": np.array([[0, 99]])}, "edges must join nodes from 0 to 5, not 0 and 99"),
    ):
        write_graph(tmp_path, **changed)
        with pytest.raises(StudyError, match=said):
            graphs.load(options)
    for given in ({"data": "cora"}, {"data_root": "."}):
        with pytest.raises(StudyError, match="--data-root, chains are made without it"):
            graphs.load(graphs.Graphs(**given))


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_first_solves_of_images_converge(scales):
    torch.manual_seed(0)
    found = images.Classifier("deq", images.Images(scales=scales, max_iter=30))(torch.randn(4, 3, 32, 32))
    assert found.logits.shape == (4, 10) and len(found.z) == scales and found.solution.converged.all()


def test_augmentation_moves_and_mirrors_images_by_themselves():
    torch.manual_seed(0)
    given = torch.arange(3 * 32 * 32.0).reshape(1, 3, 32, 32).repeat(20, 1, 1, 1) + 1
    moved = images.augment(given)
    assert moved.shape == given.shape and len(moved.flatten(1).unique(dim=0)) > 10
    assert bool(((moved == 0) | torch.isin(moved, given)).all())


def test_images_that_are_not_there(tmp_path):
    with pytest.raises(StudyError, match="cifar-10-batches-py"):
        images.load(images.Images(data_root=str(tmp_path)))
    with pytest.raises(StudyError, match="--images 37: there are 36"):
        images.load(images.Images(images=37))


@pytest.mark.parametrize("task", ["deblur", "inpaint"])
def test_the_measurement_and_its_adjoint(task):
    torch.manual_seed(0)
    known = restoration.measure(task, torch.rand(2, 1, 16, 18))
    x, y = torch.randn(2, 2, 1, 16, 18, dtype=torch.float64)
    known = restoration.Measurement(known.y.double(), known.transfer.to(torch.complex128), known.mask.double())
    assert torch.isclose((known.forward(x) * y).sum(), (x * known.adjoint(y)).sum())


def test_folders_of_images_are_read_and_checked(tmp_path):
    def load(patch=16):
        return restoration.load(restoration.Restoration(data_root=str(tmp_path), patch=patch))

    with pytest.raises(StudyError, match="Train400"):
        load()
    for name in restoration.FOLDERS.values():
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((20, 24), np.uint8)).save(tmp_path / name / "a.png")
    name, data = load()
    assert name == "Train400 (1), Set12 (1), BSD68 (1)" and data["train"][0].shape == (20, 24)
    with pytest.raises(StudyError, match="--patch 21: at most 20"):
        load(21)
    (tmp_path / "Set12/a.png").write_bytes(b"no image")
    with pytest.raises(StudyError, match="Set12/a.png"):
        load()


@pytest.mark.parametrize("arm", text.ARMS)
def test_no_character_is_told_by_those_after_it(arm):
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"ten chars.", "10 characters; at least 340"),
        (b"\x89PNG\xff\xfe" * 1000, "UTF-8"),
        (b"a\0" * 1000, "zero byte"),
    ],
)
def test_a_text_that_cannot_serve(tmp_path, content, said):
    path = tmp_path / "it.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=said) as error:
        text.load(text.Text(data_root=str(path), context=16))
    assert "--data-root" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_texts_and_a_width_that_heads_do_not_divide(tmp_path):
    with pytest.raises(StudyError, match="0 characters"):
        text.load(text.Text(data_root=str(tmp_path)))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    corpus = text.load(text.Text(data_root=str(tmp_path)))
    assert corpus.characters == "ab" and [len(part) for part in corpus[2:]] == [1800, 100, 100]
    with pytest.raises(SettingsError, match="--width 100"):
        text.Text(width=100)
