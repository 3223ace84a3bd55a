"""The self-consistent fields: known densities, equal answers of the methods, and derivatives."""

from __future__ import annotations

import pytest
import torch
from correctness import after_solve, assert_close, rounding
from models import scf

import deqfast

OPTIONS = scf.Scf(molecules=6, chains=3, atoms=16, tol=1e-9, evaluations=400, repeats=1)
TIGHT = deqfast.Anderson(rtol=0.0, atol=1e-11, max_iter=400, history_size=8)


@pytest.fixture
def drawn():
    torch.manual_seed(0)
    return scf.systems(OPTIONS)


def test_two_carbons_have_the_known_orbitals():
    """One bonding orbital, filled: bond order 1, one electron each, F_12 = t - gamma_12 / 2."""
    places = torch.tensor([[[0.0, 0, 0], [1.4, 0, 0], [0, 0, 0]]], dtype=torch.float64)
    present = torch.tensor([[True, True, False]])
    bonds = torch.zeros(1, 3, 3, dtype=torch.bool)
    bonds[0, 0, 1] = bonds[0, 1, 0] = True
    atoms = scf.Atoms(places, bonds, torch.zeros_like(present), present)
    field, x = scf.Field(0.05, exchange=True), scf.integrals(atoms)
    fock = scf.solved("hook", OPTIONS, field, x).value
    density = field.electrons(fock, x).density
    expected = torch.zeros(1, 3, 3, dtype=torch.float64)
    expected[0, :2, :2] = 1
    torch.testing.assert_close(density, expected, rtol=0.0, atol=1e-10)
    repulsion = 10.06 / (1 + (1.4 * 10.06 / 14.397) ** 2) ** 0.5
    coupling = -2.539 * torch.exp(torch.tensor((1.397 - 1.4) / 0.31, dtype=torch.float64)) - repulsion / 2
    torch.testing.assert_close(fock[0, 0, 1], coupling, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("name", ["molecules", "chains"])  # stretched ones have several solutions
def test_all_ways_find_one_field(name, drawn):
    """By hand and by deqfast Anderson needs as many evaluations, up to one because of rounding."""
    field, atoms = drawn[name]
    x = scf.integrals(atoms)
    solutions = {arm: scf.solved(arm, OPTIONS, field, x) for arm in scf.ARMS[1:]}
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
