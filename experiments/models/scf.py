"""Self-consistent fields of a batch of molecules, each of which stops by itself; forces by the implicit gradient.

molecules: chains, rings and acenes of carbon and nitrogen, distorted at random; pi electrons by Hartree and Fock in the
Pariser-Parr-Pople model; the state is the Fock matrix. stretched: the same with longer bonds, and so with small gaps.
chains: long chains without exchange (tight binding with charges); the state is the potential of each atom.
plain: damped mixing, with the damping that is best for the set. anderson, broyden: deqfast's. hook: Anderson with the
commutator as its error (CDIIS), for chains with a preconditioner (Kerker's idea). These leave done molecules out of the
batch; anderson-whole does not. by-hand: a loop of Anderson's method that drops molecules that are done at every step.
Times are CPU times. Nothing is trained.
Sources: U and t: Bursill, Castleton and Barford, Chem. Phys. Lett. 294 (1998); nitrogen: Van-Catledge, J. Org. Chem. 45
(1980); decay with bond length, sigma bonds: Longuet-Higgins and Salem, Proc. R. Soc. A 251 (1959); Ohno, Theor. Chim.
Acta 2 (1964); CDIIS: Pulay, J. Comput. Chem. 3 (1982).
"""

from __future__ import annotations

import math
import time
from cmath import rect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from runs import style
from runs.options import option
from torch import Tensor, nn

import deqfast

from .frame import Example, Options, Outcome, Record, Run

ARMS = ("plain", "anderson", "broyden", "hook", "anderson-whole", "by-hand")
DIFFERENTIATED = ARMS[1:4]
SETS = {  # titles in the figure
    "molecules": "molecules (Fock matrix)",
    "stretched": "stretched molecules (Fock matrix)",
    "chains": "long chains (charges)",
}
HOPPING, REPULSION = 2.539, 10.06  # t and U in eV
LENGTH, DECAY = 1.397, 0.31  # bond of benzene and decay of t, in Angstrom
NITROGEN, TO_NITROGEN = 0.51, 1.02  # site energy in units of t, factor of t
COULOMB = 14.397  # e^2 / (4 pi eps0) in eV Angstrom
SINGLE, PER_ORDER = 1.50, 0.15  # length of a bond is SINGLE - PER_ORDER p for pi bond order p
FAR = 100.0  # levels of absent atoms in eV, all different, so that derivatives of eigenvectors exist
SUSCEPTIBILITY = 0.1  # of an atom of a chain, 1/eV; about 1 / (pi t)
DAMPINGS = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
STEP = 3e-5  # of finite differences, in Angstrom
OTHER = 1e-3  # of energies of one solution, in eV


@dataclass(frozen=True, kw_only=True)
class Scf(Options):
    """Options of the model."""

    all_arms = ARMS

    molecules: int = option("model", "molecules of a batch", 48, minimum=1)
    chains: int = option("model", "chains of a batch", 12, minimum=1)
    atoms: int = option("model", "atoms of the longest chain", 80, minimum=4)
    stretch: float = option("model", "factor of the stretched bonds", 1.3, above=0.0)
    temperature: float = option("model", "of the electrons, in eV", 0.05, above=0.0)
    tol: float = option("solver", "of |f(z) - z|, in eV", 1e-6, above=0.0)
    evaluations: int = option("solver", "at most", 200, minimum=1)
    history: int = option("solver", "pairs of Anderson", 8, minimum=1)
    repeats: int = option("solver", "measurements of a time, of which the median counts", 5, minimum=1)


class Atoms(NamedTuple):
    """Batch of B molecules, padded to N atoms."""

    positions: Tensor
    """(B, N, 3) in Angstrom."""
    bonds: Tensor
    """(B, N, N) bool."""
    nitrogen: Tensor
    """(B, N) bool; the others are carbon."""
    present: Tensor
    """(B, N) bool; False for padding."""


class Integrals(NamedTuple):
    """What the field needs of a batch of molecules."""

    core: Tensor
    """(B, N, N), hopping and site energies."""
    repulsion: Tensor
    """(B, N, N), by Ohno's formula."""
    present: Tensor
    """(B, N) bool."""


class Electrons(NamedTuple):
    """Electrons in the levels of a Fock matrix."""

    density: Tensor
    """(B, N, N), the density matrix of both spins."""
    entropy: Tensor
    """(B,) in units of Boltzmann's constant."""


def distances(atoms: Atoms) -> Tensor:
    """Distances (B, N, N); 1 on the diagonal, and from and to absent atoms."""
    present = atoms.present
    pairs = present[:, :, None] & present[:, None] & ~torch.eye(present.shape[1], dtype=torch.bool)
    squares = (atoms.positions[:, :, None] - atoms.positions[:, None]).square().sum(-1)
    return torch.where(pairs, squares, 1.0).sqrt()


def hopping(r: Tensor) -> Tensor:
    """Hopping between two carbons at distance r."""
    return -HOPPING * torch.exp((LENGTH - r) / DECAY)


def integrals(atoms: Atoms) -> Integrals:
    """Integrals of the molecules, differentiable in the positions."""
    r, nitrogen, present = distances(atoms), atoms.nitrogen, atoms.present
    factor = torch.where(nitrogen[:, :, None] | nitrogen[:, None], TO_NITROGEN, 1.0)
    core = torch.where(atoms.bonds, factor * hopping(r), 0.0)
    core = core - torch.diag_embed(NITROGEN * HOPPING * nitrogen.to(r.dtype))
    apart = r * (1 - torch.eye(r.shape[1], dtype=r.dtype))
    repulsion = REPULSION / (1 + (apart * REPULSION / COULOMB).square()).sqrt()
    return Integrals(core, torch.where(present[:, :, None] & present[:, None], repulsion, 0.0), present)


class Field(nn.Module):
    """Map from a field to the field of the electrons in its levels, a cell of x = ``Integrals``.

    With exchange the field is a Fock matrix (B, N, N), without it the potential (B, N) of the atoms. Each atom has one
    electron.
    """

    def __init__(self, temperature: float, exchange: bool) -> None:
        super().__init__()
        self.temperature, self.exchange = temperature, exchange
        self.last: Tensor = torch.empty(0)
        """Density matrices of the last call."""

    def forward(self, z: Tensor, x: Integrals) -> Tensor:
        density = self.electrons(z, x).density
        self.last = density.detach()
        return self.from_density(density, x)

    def start(self, x: Integrals) -> Tensor:
        """Field without interaction."""
        return x.core if self.exchange else torch.zeros_like(x.core[:, 0])

    def from_density(self, density: Tensor, x: Integrals) -> Tensor:
        """Field of a density."""
        change = density - torch.diag_embed(x.present.to(density.dtype))
        potential = (x.repulsion @ change.diagonal(dim1=1, dim2=2)[:, :, None])[:, :, 0]
        if not self.exchange:
            return potential
        return x.core + torch.diag_embed(potential) - x.repulsion * change / 2

    def electrons(self, z: Tensor, x: Integrals) -> Electrons:
        """Electrons by Fermi's distribution; their number fixes the chemical potential."""
        matrix = z if self.exchange else x.core + torch.diag_embed(z)
        absent = torch.where(x.present, 0.0, FAR + torch.arange(x.present.shape[1], dtype=z.dtype))
        levels, orbitals = torch.linalg.eigh(matrix + torch.diag_embed(absent))
        wanted = x.present.sum(1, keepdim=True).to(z.dtype)
        chemical = self._chemical(levels.detach(), wanted)
        for _ in range(2):  # two steps of Newton's method give the first two derivatives
            occupied = torch.sigmoid((chemical - levels) / self.temperature)
            slope = (occupied * (1 - occupied)).sum(1, keepdim=True) * 2 / self.temperature
            gap = slope < 1e-12  # then nothing depends on the chemical potential
            missing = torch.where(gap, 0.0, wanted - 2 * occupied.sum(1, keepdim=True))
            chemical = chemical + missing / torch.where(gap, 1.0, slope)
        scaled = (chemical - levels) / self.temperature
        occupied = torch.sigmoid(scaled)
        entropy = 2 * (nn.functional.softplus(scaled) - scaled * occupied).sum(1)
        return Electrons(2 * (orbitals * occupied[:, None]) @ orbitals.mT, entropy)

    def _chemical(self, levels: Tensor, wanted: Tensor) -> Tensor:
        """Chemical potential (B, 1) to a thousandth of the temperature, by finer and finer grids."""
        low, high = levels[:, :1] - 1, torch.where(levels < FAR / 2, levels, -FAR).amax(1, keepdim=True) + 1
        grid = torch.linspace(0, 1, 65, dtype=levels.dtype)
        while float((high - low).max()) > 1e-3 * self.temperature:
            points = low + (high - low) * grid
            counts = 2 * torch.sigmoid((points[:, :, None] - levels[:, None]) / self.temperature).sum(2)
            at = (counts < wanted).sum(1, keepdim=True).clamp(1, 64)
            low, high = points.gather(1, at - 1), points.gather(1, at)
        return (low + high) / 2

    def energy(self, z: Tensor, atoms: Atoms) -> Tensor:
        """Free energies (B,) of molecules in eV, stationary at the self-consistent field; with the sigma bonds."""
        x = integrals(atoms)
        electrons = self.electrons(z, x)
        change = electrons.density - torch.diag_embed(x.present.to(z.dtype))
        fields = self.from_density(electrons.density, x)
        mean = fields - x.core if self.exchange else torch.diag_embed(fields)
        r = distances(atoms)
        sigma = torch.where(atoms.bonds, hopping(r) * (r - SINGLE + DECAY), 0.0).sum((1, 2)) / PER_ORDER
        interacting = (electrons.density * x.core).sum((1, 2)) + (change * mean).sum((1, 2)) / 2
        return interacting + sigma - self.temperature * electrons.entropy

    def commutator(self, z: Tensor, fz: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[F, P], which vanishes if the Fock matrix F and its density have the same eigenvectors; and F."""
        product = fz @ self.last  # of the same molecules: f has just been called with them
        return product - product.mT, fz


def preconditioned(x: Integrals) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mixing that expects every atom to answer a potential with the same change of charge, of sum zero per molecule."""
    here = x.present.to(x.core.dtype)
    projection = torch.diag_embed(here) - here[:, :, None] * here[:, None] / here.sum(1)[:, None, None]
    unit = torch.eye(here.shape[1], dtype=here.dtype)
    inverse = torch.linalg.inv(unit + SUSCEPTIBILITY * x.repulsion @ projection)

    def mixing(z: Tensor, fz: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own = inverse if rows is None else inverse[rows]
        return fz - z, z + (own @ (fz - z)[:, :, None])[:, :, 0]

    return mixing


def skeletons(longest: int) -> dict[str, list[list[complex]]]:
    """Flat molecules of each kind, as positions of their atoms in units of the bond length."""
    step = [complex(math.cos(math.pi / 6), (-1) ** i * math.sin(math.pi / 6)) for i in range(longest)]
    chains = {n: [sum(step[:i], 0j) for i in range(n)] for n in range(4, longest + 1, 2)}
    rings = [[rect(1, math.tau * k / n) / (2 * math.sin(math.pi / n)) for k in range(n)] for n in (4, 6, 8, 10)]
    acenes = []
    for n in (2, 3):
        every = [math.sqrt(3) * ring + 1j * rect(1, math.tau * k / 6) for ring in range(n) for k in range(6)]
        acenes.append([atom for i, atom in enumerate(every) if all(abs(atom - other) > 0.1 for other in every[:i])])
    return {"molecules": [*(chains[n] for n in chains if n <= 12), *rings, *acenes], "chains": list(chains.values())}


def draw_atoms(kinds: Sequence[Sequence[complex]], batch: int, stretch: float = 1.0) -> Atoms:
    """Draw molecules, replace a fifth of the atoms by nitrogen, and move all by about 0.03 Angstrom."""
    chosen = [kinds[int(torch.randint(len(kinds), ()))] for _ in range(batch)]
    size = max(map(len, chosen))
    present = torch.tensor([[i < len(atoms) for i in range(size)] for atoms in chosen])
    flat = torch.tensor([[*atoms, *[0j] * (size - len(atoms))] for atoms in chosen], dtype=torch.complex128)
    near = (flat[:, :, None] - flat[:, None]).abs() < 1.1
    bonds = near & ~torch.eye(size, dtype=torch.bool) & present[:, :, None] & present[:, None]
    places = torch.stack([flat.real, flat.imag, torch.zeros_like(flat.real)], 2) * LENGTH * stretch
    places = places + 0.03 * torch.randn_like(places) * present[:, :, None]
    return Atoms(places, bonds, present & (torch.rand(batch, size) < 0.2), present)


def systems(options: Scf) -> dict[str, tuple[Field, Atoms]]:
    """Draw the sets of molecules, with the field of each."""
    kinds = skeletons(max(12, options.atoms))
    long = [chain for chain in kinds["chains"] if options.atoms // 4 <= len(chain) <= options.atoms]
    with_exchange, without = (Field(options.temperature, exchange) for exchange in (True, False))
    return {
        "molecules": (with_exchange, draw_atoms(kinds["molecules"], options.molecules)),
        "stretched": (with_exchange, draw_atoms(kinds["molecules"], options.molecules, options.stretch)),
        "chains": (without, draw_atoms(long, options.chains)),
    }


def solver_of(arm: str, options: Scf, field: Field, x: Integrals, damping: float = 1.0) -> deqfast.Solver:
    """Solver of an arm."""
    rule: dict[str, Any] = {"rtol": 0.0, "atol": options.tol, "max_iter": options.evaluations}
    if arm == "plain":
        return deqfast.Picard(relaxation=damping, **rule)
    if arm == "broyden":
        return deqfast.Broyden(**rule)
    rule["history_size"] = options.history
    if arm != "hook":
        return deqfast.Anderson(**rule)
    return deqfast.MixedAnderson(mixing_fn=field.commutator if field.exchange else preconditioned(x), **rule)


def solved(arm: str, options: Scf, field: Field, x: Integrals, damping: float = 1.0, trace: bool = False) -> Any:
    """Solution of all molecules by an arm."""
    if arm == "by-hand":
        return by_hand(field, x, options)
    solver, dropping = solver_of(arm, options, field, x, damping), arm != "anderson-whole"

    def f(z: Tensor, rows: Tensor | None = None) -> Tensor:
        return field(z, x if rows is None else Integrals(*(part[rows] for part in x)))

    return deqfast.solve(f, field.start(x), solver, drop_converged=dropping, trace=trace)


class Culled(NamedTuple):
    """Result of ``by_hand``: fields, evaluations (B,) of each molecule and whether each has converged."""

    value: Tensor
    iterations: Tensor
    converged: Tensor


def by_hand(field: Field, x: Integrals, options: Scf) -> Culled:
    """Anderson's method in a plain loop whose batch loses the molecules that are done, after every evaluation."""
    value = field.start(x)
    iterations = torch.full((len(value),), options.evaluations)
    converged = torch.zeros(len(value), dtype=torch.bool)
    rows, z = torch.arange(len(value)), value
    old: list[tuple[Tensor, Tensor]] = []  # values of f and residuals, the newest last
    for k in range(1, options.evaluations + 1):
        fz = field(z, x)
        g = (fz - z).flatten(1)
        done = g.norm(dim=1) <= options.tol
        value = value.index_copy(0, rows, z)
        iterations[rows[done]] = k
        converged[rows[done]] = True
        left = ~done
        if not left.any():
            break
        rows, fz, g, x = rows[left], fz[left], g[left], Integrals(*(part[left] for part in x))
        old = [(values[left], residuals[left]) for values, residuals in old][-options.history :] + [(fz, g)]
        z = fz
        if len(old) > 1:
            differences = torch.stack([b[1] - a[1] for a, b in zip(old, old[1:], strict=False)], 2)
            gram = differences.mT @ differences
            scale = gram.diagonal(dim1=1, dim2=2).clamp_min(1e-300).rsqrt()
            gram = gram * scale[:, :, None] * scale[:, None] + 1e-6 * torch.eye(len(old) - 1, dtype=g.dtype)
            weights = torch.linalg.solve(gram, (differences.mT @ g[:, :, None])[:, :, 0] * scale) * scale
            for i, (a, b) in enumerate(zip(old, old[1:], strict=False)):
                z = z - weights[:, i].view(-1, *[1] * (z.dim() - 1)) * (b[0] - a[0])
    return Culled(value, iterations, converged)


def best_damping(options: Scf, field: Field, x: Integrals) -> float:
    """Damping with which most molecules converge, and then the one of fewest evaluations."""

    def rank(damping: float) -> tuple[int, int]:
        solution = solved("plain", options, field, x, damping)
        return -int(solution.converged.sum()), int(solution.iterations.sum())

    return min(DAMPINGS, key=rank)


def seconds(*works: Callable[[], Any], repeats: int) -> list[float]:
    """Medians of the CPU times of some works, which take turns."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, times in zip(works, taken, strict=True):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
    return [median(times) for times in taken]


def derivative_errors(solver: deqfast.Solver, field: Field, atoms: Atoms) -> tuple[float, float]:
    """Relative errors of forces and of a product with the Hessian, compared with central differences."""
    block = deqfast.DEQBlock(field, solver, deqfast.Implicit(deqfast.Broyden(1e-10, 200)), init=field.start)
    direction = torch.randn_like(atoms.positions) * atoms.present[:, :, None]

    def energy(positions: Tensor) -> Tensor:
        moved = atoms._replace(positions=positions)
        return field.energy(block(integrals(moved)), moved).sum()

    def gradient(positions: Tensor) -> Tensor:
        return torch.autograd.grad(energy(positions), positions, create_graph=True)[0]

    def difference(function: Callable[[Tensor], Tensor]) -> Tensor:
        moved = [(atoms.positions + sign * STEP * direction).requires_grad_() for sign in (1, -1)]
        ahead, behind = (function(positions).detach() for positions in moved)
        return (ahead - behind) / (2 * STEP)

    positions = atoms.positions.clone().requires_grad_()
    along = (gradient(positions) * direction).sum()
    (second,) = torch.autograd.grad(along, positions)
    slope, curve = difference(energy), difference(gradient)
    return float((along - slope).detach().abs() / slope.abs()), float((second - curve).norm() / curve.norm())


def measured(arm: str, options: Scf, field: Field, atoms: Atoms) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores of a set and what the figure shows of it."""
    x = integrals(atoms)
    damping = best_damping(options, field, x) if arm == "plain" else 1.0
    works = [partial(solved, name, options, field, x, damping) for name in (arm, "anderson")]
    solution, reference = (work() for work in works)
    own, reference_time = seconds(*works, repeats=options.repeats)
    gap = (field.energy(solution.value, atoms) - field.energy(reference.value, atoms)).abs()
    other = solution.converged & reference.converged & (gap > OTHER)
    scores = {
        "converged, %": 100 * float(solution.converged.double().mean()),
        "evaluations": float(solution.iterations.double().mean()),
        "ms each": 1e3 * own / len(gap),
        "time / anderson's": own / reference_time,
        "other solutions": int(other.sum()),
    }
    trace = None if arm == "by-hand" else solved(arm, options, field, x, damping, trace=True).trace
    residual = [] if trace is None else trace.median(dim=1).values.tolist()
    return scores, {"damping": damping, "most": int(solution.iterations.max()), "residual": residual}


def train(run: Run) -> Outcome:
    """Solve the sets of the run's seed by the run's arm."""
    options, arm = run.options, run.arm
    begun = time.perf_counter()
    scores: dict[str, float] = {}
    shown: dict[str, Any] = {}
    drawn = systems(options)
    for name, (field, atoms) in drawn.items():
        own, shown[name] = measured(arm, options, field, atoms)
        scores |= {f"{name}: {score}": value for score, value in own.items()}
    if arm in DIFFERENTIATED:
        field, atoms = drawn["molecules"]
        few = Atoms(*(part[:4] for part in atoms))
        solver = solver_of(arm, options, field, integrals(few))
        errors = derivative_errors(replace(solver, atol=1e-5 * options.tol, max_iter=1000), field, few)
        scores |= dict(zip(("force error", "Hessian error"), errors, strict=True))
    run.minutes += (time.perf_counter() - begun) / 60
    data = f"{options.molecules} molecules, {options.chains} chains of {options.atoms // 4} to {options.atoms} atoms"
    return Outcome(field, data, scores, shown)


def draw(records: Sequence[Record]) -> Figure:
    """Median residuals of the sets under the first seed, against evaluations."""
    first = [record for record in records if record.seed == records[0].seed and record.arm in ARMS[:4]]
    figure = style.page(7, style.NARROW)
    axes = figure.subplots(len(SETS), 1, sharex=True, sharey=True)
    for axis, (name, title) in zip(axes, SETS.items(), strict=True):
        for record in first:
            own = record.shown[name]
            hook = f"mixing_fn: {'commutator' if name != 'chains' else 'preconditioner'}"
            label = {"plain": f"plain, damping {own['damping']:g}", "hook": hook}.get(record.arm, record.arm)
            steps = range(1, len(own["residual"]) + 1)
            axis.semilogy(steps, own["residual"], label=label, color=style.look(record.arm)["color"])
        axis.set(title=title, ylabel="|f(z) - z|, eV", xlim=(0, 60))
        axis.legend()
    axes[-1].set_xlabel("evaluations of the field, median molecule")
    return figure


EXAMPLE = Example(Scf, train, draw)
