"""Cases of the library's options: each with and without on what the option is good for, exact counts first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deqfast
from deqfast.testing import PROBLEMS, relative_error

from .collapse import CollapseCase, clusters, exact_of
from .counters import count, memory
from .entry import Case, Contender, check
from .maps import NEVER, Contraction
from .problems import suite
from .record import Row
from .training import EXACT, Setup, TrainingCase, exact_gradient, flat

Make = Callable[["OptionCase", str, str], Contender]


@dataclass(frozen=True, kw_only=True)
class OptionCase(Case):
    """An option beside its absence or its alternatives, the peers. make: (case, provider, device) -> contender."""

    section = "options"
    label: str
    batch: int
    dim: int
    providers: tuple[str, ...]  # type: ignore[misc]  # a field here, of the class in the other cases
    peers: tuple[str, ...]  # type: ignore[misc]  # the same
    make: Make

    @property
    def name(self) -> str:
        return self.label

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"}

    def contender(self, provider: str, device: str) -> Contender:
        return self.make(self, provider, device)


def counted(solution: deqfast.Solution) -> Row:
    """The columns that a Solution counts exactly."""
    return {"evaluations": solution.evaluations, "sample_evaluations": solution.sample_evaluations}


def compact(case: OptionCase, provider: str, device: str, rates: tuple[float, float]) -> Contender:
    """f(z) = c + rate Q z, Q orthogonal, which costs; `rates`: the contraction of most samples, and of each eighth."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(case.dim, case.dim, generator=generator))[0].to(device)
    c = torch.randn(case.batch, case.dim, generator=generator).to(device)
    rate = torch.full((case.batch, 1), rates[0], device=device)
    rate[::8] = rates[1]

    def f(z: Tensor, rows: Tensor | None = None) -> Tensor:
        here, scale = (c, rate) if rows is None else (c[rows], rate[rows])
        return torch.addmm(here, z * scale, q.T)

    def solve() -> deqfast.Solution:
        return deqfast.solve(f, torch.zeros_like(c), deqfast.Anderson(1e-4, 60), compact=provider == "compact")

    solution = solve()
    check("share of samples that did not converge", 1 - float(solution.converged.float().mean()), 0.0)
    return Contender(solve, counted(solution) | {"residual": float(solution.residual_rel.max())})


def compact_case(batch: int, dim: int, rates: tuple[float, float] = (0.3, 0.8)) -> OptionCase:
    label = f"compact-{batch}x{dim}-rates-{rates[0]:g}-{rates[1]:g}"
    providers = ("compact", "whole-batch")
    make = partial(compact, rates=rates)
    return OptionCase(label=label, batch=batch, dim=dim, providers=providers, peers=providers[1:], make=make)


def eval_solver(case: OptionCase, provider: str, device: str) -> Contender:
    """Evaluation mode: a looser solver than the training's, where a gradient needs more than a prediction."""
    torch.manual_seed(0)
    cell = deqfast.FCCell(case.dim, case.dim).to(device)
    x = torch.randn(case.batch, case.dim).to(device)
    looser = deqfast.Anderson(1e-2, 60) if provider == "eval-solver" else None
    block = deqfast.DEQBlock(cell, deqfast.Anderson(1e-4, 60), eval_solver=looser).eval()

    @torch.no_grad()
    def predict() -> tuple[Tensor, deqfast.Solution]:
        return block(x, return_solution=True)

    value, solution = predict()
    cell.double()
    exact = deqfast.solve(lambda z: cell(z, x.double()), value.double(), deqfast.Anderson(EXACT, 200), "torch").value
    cell.float()
    error = relative_error(value, exact)
    check("relative error", error, 0.1)
    return Contender(predict, counted(solution) | {"error": error, "allowed": 0.1})


def trace(case: OptionCase, provider: str, device: str, iterations: int = 20) -> Contender:
    """The residual of every sample after every evaluation, beside a solve that keeps the last alone."""
    f, z0 = Contraction(case.batch, case.dim, device), torch.zeros(case.batch, case.dim, device=device)
    solver, traced = deqfast.Anderson(NEVER, iterations), provider == "trace"

    def solve(g: Any = f) -> deqfast.Solution:
        return deqfast.solve(g, z0, solver, trace=traced)

    solution = solve()
    kept = 0 if solution.trace is None else len(solution.trace)
    check("evaluations that the trace lacks", abs(kept - iterations * traced), 0)
    counters = count(solve, f)
    facts = {"launches": counters.operations / iterations, "peak_bytes": counters.peak_bytes}
    return Contender(solve, counted(solution) | facts)


ADJOINTS = {
    "jfb": deqfast.JFB(),
    "phantom": deqfast.Phantom(),
    "shine": deqfast.SHINE(),
    "implicit": deqfast.Implicit(),
}


def gradient(case: OptionCase, provider: str, device: str, layer: TrainingCase) -> Contender:
    """The gradients of `layer` by their error against the exact implicit one, which is its adjoint."""
    setup = Setup(layer, "auto", device)
    block = deqfast.DEQBlock(setup.cell, layer.solver, ADJOINTS[provider])

    def step() -> tuple[list[Tensor], Tensor]:
        return setup.step(lambda x, z0: block(x, z0=z0))

    found, exact = flat(step()[0]), flat(exact_gradient(layer, False)[0])
    cosine = float(found @ exact / found.norm() / exact.norm())
    check("distance of the gradient's cosine from 1", 1 - cosine, 0.5)
    facts = {"error": float((found - exact).norm() / exact.norm()), "cosine": cosine, "peak_bytes": memory(step)[1]}
    facts["evaluations"] = setup.calls(lambda x, z0: block(x, z0=z0))
    if block.backward_solution is not None:
        facts["backward_evaluations"] = block.backward_solution.evaluations
    return Contender(step, facts)


def gradient_case(**given: Any) -> OptionCase:
    layer = TrainingCase(adjoint="implicit", **given)
    size = layer.size()
    return OptionCase(
        label=f"gradient-{layer.name.replace('-implicit', '')}",
        batch=size["batch"],
        dim=size["dim"],
        providers=tuple(ADJOINTS),
        peers=("implicit", "jfb"),
        make=partial(gradient, layer=layer),
    )


KINDS: dict[str, Any] = {
    "anderson-I": deqfast.Anderson(1e-5, 60, kind="I"),
    "anderson-II": deqfast.Anderson(1e-5, 60),
    "broyden-bad": deqfast.Broyden(1e-5, 60, kind="bad"),
    "broyden-good": deqfast.Broyden(1e-5, 60),
}


def kind(case: OptionCase, provider: str, device: str, problem: str) -> Contender:
    """A kind of Anderson or Broyden on a problem of ``deqfast.testing`` or of the residual suite, by evaluations."""
    if problem in PROBLEMS:
        given: Any = PROBLEMS[problem](batch=case.batch, dim=case.dim, device=device)
    else:
        given = next(one for one in suite(problem.partition(",")[0], case.batch) if one.name == problem)

    def solve() -> deqfast.Solution:
        return deqfast.solve(given.f, given.z0, KINDS[provider])

    solution = solve()
    check("samples that broke down", float((solution.status == deqfast.Status.NONFINITE).sum()), 0)
    facts = counted(solution) | {"mean_evaluations": float(solution.iterations.float().mean())}
    facts |= {"residual": float(solution.residual_rel.max()), "samples_missed": int((~solution.converged).sum())}
    return Contender(solve, facts | {"dim": given.z0.shape[1]})


def kind_case(problem: str, batch: int = 32, dim: int = 64) -> OptionCase:
    return OptionCase(
        label=f"kinds-{problem.replace(' ', '-').replace(',', '')}",
        batch=batch,
        dim=dim,
        providers=tuple(KINDS),
        peers=("anderson-II", "broyden-good"),
        make=partial(kind, problem=problem),
        devices=("cpu", "cuda") if problem in PROBLEMS else ("cpu",),  # the residual suite is of the CPU
    )


def streaming(case: OptionCase, provider: str, device: str, classes: int = 10, piece: int = 500) -> Contender:
    """``NeuralCollapse`` over `batch` features in pieces: memory without their number."""
    features, labels, _ = clusters(case.batch, case.dim, classes)
    pieces = list(zip(features.to(device).split(piece), labels.to(device).split(piece), strict=True))
    options: dict[str, Any] = {"streaming": True, "num_features": case.dim} if provider == "streaming" else {}

    def measure() -> float:
        metric = deqfast.NeuralCollapse(classes, **options).to(device)
        for part in pieces:
            metric.update(*part)
        return metric.compute().nc1

    exact = exact_of(CollapseCase(samples=case.batch, dim=case.dim, classes=classes))
    error = abs(measure() - exact) / exact
    check("relative error of NC1", error, 1e-5)
    return Contender(measure, {"error": error, "allowed": 1e-5, "peak_bytes": memory(measure)[1]})


def simple(make: Make, option: str, absence: str, batch: int, dim: int) -> OptionCase:
    """An option that is given or not."""
    label = f"{option}-{batch}x{dim}"
    return OptionCase(label=label, batch=batch, dim=dim, providers=(option, absence), peers=(absence,), make=make)


OPTIONS = [
    compact_case(256, 1024),
    compact_case(256, 1024, rates=(0.8, 0.8)),
    simple(eval_solver, "eval-solver", "solver", 128, 256),
    simple(trace, "trace", "no-trace", 128, 8192),
    gradient_case(cell="fc", shape=(128, 256), solver=deqfast.Broyden(1e-4, 60)),
    gradient_case(cell="linear", shape=(128, 256), solver=deqfast.Broyden(1e-4, 60)),
    gradient_case(cell="residual", shape=(8, 32, 8, 8), solver=deqfast.Broyden(1e-4, 60)),
    gradient_case(cell="residual", shape=(8, 32, 8, 8), solver=deqfast.Anderson(1e-4, 60)),
    *(kind_case(problem) for problem in ("linear-0.9", "non-normal", "tanh")),
    kind_case("sawtooth", dim=12),
    *(
        kind_case(f"{problem}, b 1", dim=0)
        for problem in ("gaussian 0.7", "decaying 0.99", "outliers outside", "tanh decaying 0.99")
    ),
    simple(streaming, "streaming", "features", 50_000, 512),
]
SMALL_OPTIONS = [
    compact_case(16, 32),
    simple(eval_solver, "eval-solver", "solver", 4, 16),
    simple(trace, "trace", "no-trace", 2, 64),
    gradient_case(cell="fc", shape=(3, 16), solver=deqfast.Broyden(1e-4, 60)),
    kind_case("linear-0.9", 2, 16),
    simple(streaming, "streaming", "features", 100, 9),
]
