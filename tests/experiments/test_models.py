"""The example models: every arm trains and is shown; their computations, and the input that they refuse."""

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import model
import numpy as np
import pytest
import torch
from correctness import after_solve, assert_close, rounding
from models import frame, graphs, restoration, rnn, scf, sudoku, sudoku_puzzles, text
from models.frame import Run
from PIL import Image
from runs.options import StudyError, parsed
from study_helpers import EXPERIMENTS, ring_of_six

import deqfast
from deqfast import Picard, Status, fixed_point

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
        assert 0 < records[0].scores[solves_score] <= 3 and len(records[0].shown["film"]["frames"]) > 1


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
    page = (EXPERIMENTS / "README.md").read_text()
    commands = re.findall(r"^python experiments/model\.py (\w+)((?: [^#\n]+)?)", page, re.MULTILINE)
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
    np.savez("cora.npz", **ring_of_six())
    options = graphs.Graphs(data="cora", data_root=".", width=4, steps=5)
    problem = graphs.load(options, seed=1)
    assert problem.adjacency.layout == problem.features.layout == torch.sparse_csr
    assert torch.allclose(problem.adjacency.to_dense().sum(dim=1), torch.ones(6))
    assert graphs.train(Run(graphs.train, options, tmp_path, "deq", seed=0)).scores["converged"] == 1
    np.savez("cora.npz", **ring_of_six() | {"edges": np.zeros((0, 2), int)})
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


LONG = pytest.mark.tier("full")


def solved(step, x):
    start = x.new_zeros(*x.shape[:2], step.size)
    return fixed_point(
        partial(rnn.newton, step), start, x, solver=Picard(1e-6, 40), adjoint="jfb", warn=False, return_solution=True
    )


@pytest.mark.parametrize(
    ("kind", "gain", "length", "most"),
    [
        ("gru", 1.0, 256, 5),
        ("lstm", 1.0, 64, 4),
        ("diagonal", 4.0, 64, 6),
        pytest.param("gru", 1.0, 2048, 5, marks=LONG),
        pytest.param("gru", 4.0, 2048, 8, marks=LONG),
        pytest.param("lstm", 4.0, 256, 7, marks=LONG),
    ],
)
def test_few_evaluations_and_the_exact_gradient(kind, gain, length, most):
    torch.manual_seed(0)
    step = rnn.Step(kind, 4, gain)
    torch.manual_seed(1)
    x = torch.randn(2, length, 4, requires_grad=True)
    h, solution = solved(step, x)
    assert solution.converged.all() and solution.evaluations <= most
    expected = rnn.loop(step, x)
    wanted = [x, *step.cell.parameters()]
    ours, exact = (torch.autograd.grad(z.square().sum(), wanted, retain_graph=True) for z in (h, expected))
    for a, b in zip((h, *ours), (expected, *exact), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()  # the tolerance, and the sensitivity to earlier states


def test_a_chaotic_network_does_not_converge():
    for seed in range(3):
        torch.manual_seed(seed)
        step, x = rnn.Step("gru", 4, 12.0), torch.randn(4, 256, 4)
        _, solution = solved(step, x)
        assert not solution.converged.any()
        assert {*solution.status.tolist()} <= {Status.NONFINITE, Status.MAX_ITER, Status.ESCAPED}


@pytest.mark.parametrize("dense", [True, False])
def test_scan(dense):
    torch.manual_seed(0)
    b = torch.randn(2, 13, 3, dtype=torch.float64)
    a = torch.randn(2, 13, 3, 3, dtype=torch.float64) if dense else torch.randn(2, 13, 3, dtype=torch.float64)
    h, states = torch.zeros(2, 3, dtype=torch.float64), []
    for t in range(13):
        h = rnn.times(a[:, t], h) + b[:, t]
        states.append(h)
    assert_close(rnn.scan(a, b), torch.stack(states, dim=1), 1e-10)


SCF_OPTIONS = scf.Scf(molecules=6, chains=3, atoms=16, tol=1e-9, evaluations=400, repeats=1)
TIGHT = deqfast.Anderson(rtol=0.0, atol=1e-11, max_iter=400, history_size=8)


@pytest.fixture
def drawn():
    torch.manual_seed(0)
    return scf.systems(SCF_OPTIONS)


def test_two_carbons_have_the_known_orbitals():
    """One bonding orbital, filled: bond order 1, one electron each, F_12 = t - gamma_12 / 2."""
    places = torch.tensor([[[0.0, 0, 0], [1.4, 0, 0], [0, 0, 0]]], dtype=torch.float64)
    present = torch.tensor([[True, True, False]])
    bonds = torch.zeros(1, 3, 3, dtype=torch.bool)
    bonds[0, 0, 1] = bonds[0, 1, 0] = True
    atoms = scf.Atoms(places, bonds, torch.zeros_like(present), present)
    field, x = scf.Field(0.05, exchange=True), scf.integrals(atoms)
    fock = scf.solved("hook", SCF_OPTIONS, field, x).value
    density = field.electrons(fock, x).density
    expected = torch.zeros(1, 3, 3, dtype=torch.float64)
    expected[0, :2, :2] = 1
    torch.testing.assert_close(density, expected, rtol=0.0, atol=1e-10)
    repulsion = 10.06 / (1 + (1.4 * 10.06 / 14.397) ** 2) ** 0.5
    coupling = -2.539 * torch.exp(torch.tensor((1.397 - 1.4) / 0.31, dtype=torch.float64)) - repulsion / 2
    torch.testing.assert_close(fock[0, 0, 1], coupling, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("name", ["molecules", "chains"])  # stretched ones have several solutions
def test_all_ways_find_the_same_field(name, drawn):
    """By hand and by deqfast Anderson needs as many evaluations, up to one because of rounding."""
    field, atoms = drawn[name]
    x = scf.integrals(atoms)
    solutions = {arm: scf.solved(arm, SCF_OPTIONS, field, x) for arm in scf.ARMS[1:]}
    energy = field.energy(solutions["anderson"].value, atoms)
    allowed = rounding(torch.float64, 16**3)  # of N^3 operations: energies are stationary, their errors squares
    for solution in solutions.values():
        assert solution.converged.all()
        torch.testing.assert_close(field.energy(solution.value, atoms), energy, rtol=allowed, atol=0.0)
    assert torch.equal(solutions["anderson"].value, solutions["anderson-whole"].value)
    assert (solutions["by-hand"].iterations - solutions["anderson"].iterations).abs().max() <= 1


def test_gradients_equal_those_through_a_long_loop(drawn):
    """The forces also equal those with the field held constant (Hellmann and Feynman)."""
    field, atoms = drawn["molecules"]
    places = atoms.positions[:4].clone().requires_grad_()
    moved = scf.Atoms(*(part[:4] for part in atoms))._replace(positions=places)
    x = scf.integrals(moved)
    block = deqfast.DEQBlock(field, TIGHT, deqfast.Implicit(deqfast.Broyden(1e-10, 200)), init=field.start)
    looped = field.start(x)
    for _ in range(300):  # with an amplification of 8 the rest is 300 (1 - 1/8)^300 = 1e-15
        looped = field(looped, x)
    forces, charges = [], []
    for z in (block(x), looped):
        charge = field.electrons(z, x).density[:, 0, 0].sum()
        for kept, value in ((forces, field.energy(z, moved).sum()), (charges, charge)):
            kept += torch.autograd.grad(value, places, retain_graph=True)
    forces += torch.autograd.grad(field.energy(block(x).detach(), moved).sum(), places)
    for ours, exact in ((forces[0], forces[1]), (forces[2], forces[1]), charges):
        assert_close(ours, exact, after_solve(1e-10, derivatives=1))
    assert charges[0].norm() > 0.01


@pytest.mark.parametrize(("size", "clues"), [(4, 5), (6, 10), (9, 30)])
def test_generated_puzzles_have_a_unique_solution_and_the_asked_clues(size, clues):
    puzzle, solution = sudoku_puzzles.generate(size, clues, random.Random(0))
    assert size**2 - puzzle.count(0) == clues
    assert list(sudoku_puzzles.solutions(*sudoku_puzzles.candidates(puzzle, size), size)) == [solution]
    for group in sudoku_puzzles.units(size)[0]:
        assert sorted(solution[cell] for cell in group) == list(range(1, size + 1))


def test_solver_finds_all_solutions():
    boards = list(sudoku_puzzles.solutions(*sudoku_puzzles.candidates([0] * 16, 4), 4))
    assert len(boards) == len(set(map(tuple, boards))) == 288  # of 4 x 4 boards


def test_digits_and_lines_are_interchangeable_to_the_block():
    torch.manual_seed(0)
    block = sudoku.Block(6, 8)
    clues, _ = sudoku_puzzles.tensors([sudoku_puzzles.generate(6, 12, random.Random(0))], 6)
    x = sudoku_puzzles.encode(clues)
    y, z = block.start(x)
    digits, rows = torch.randperm(6), torch.tensor([1, 0, 4, 5, 2, 3])  # lines within a band, and bands
    moved, _ = block((y[:, rows][..., digits], z[:, rows][..., digits, :]), x[:, rows][..., digits, :])
    torch.testing.assert_close(moved, block((y, z), x)[0][:, rows][..., digits])


def test_least_residuals_are_the_confidence():
    residual, boards = torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([True, False, True, False])
    assert sudoku.auc(residual, boards) == 1 and sudoku.auc(-residual, boards) == 0
