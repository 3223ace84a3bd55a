"""Cases of the library's options: each with and without on what the option is good for, exact counts first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deqfast
from deqfast.testing import PROBLEMS, FixedPoint, relative_error

from .collapse import CollapseCase, clusters, exact_of
from .counters import count, memory
from .entry import Case, Contender, check
from .maps import NEVER, Contraction
from .problems import suite
from .record import Row
from .training import EXACT, Problem, TrainingCase, exact_gradient, flat

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class OptionCase(Case):
    """An option, the one provider, beside its absence or its alternatives, the others."""

    section = "options"
    batch: int
    dim: int

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"}


@dataclass(frozen=True, kw_only=True)
class CompactCase(OptionCase):
    """``compact=True`` where an eighth of the samples is hard and f costs: f(z) = c + rate Q z, Q orthogonal.

    rates: contraction of the easy and of the hard samples.
    """

    providers = ("compact", "whole-batch")
    peers = ("whole-batch",)
    rates: tuple[float, float] = (0.3, 0.8)

    @property
    def name(self) -> str:
        return f"compact-{self.batch}x{self.dim}-rates-{self.rates[0]:g}-{self.rates[1]:g}"

    def contender(self, provider: str, device: str) -> Contender:
        generator = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator))[0].to(device)
        c = torch.randn(self.batch, self.dim, generator=generator).to(device)
        rate = torch.full((self.batch, 1), self.rates[0], device=device)
        rate[::8] = self.rates[1]

        def f(z: Tensor, rows: Tensor | None = None) -> Tensor:
            here, scale = (c, rate) if rows is None else (c[rows], rate[rows])
            return torch.addmm(here, z * scale, q.T)

        def solve() -> deqfast.Solution:
            return deqfast.solve(f, torch.zeros_like(c), deqfast.Anderson(1e-4, 60), compact=provider == "compact")

        solution = solve()
        check("share of samples that did not converge", 1 - float(solution.converged.float().mean()), 0.0)
        return Contender(solve, counted(solution) | {"residual": float(solution.residual_rel.max())})


def counted(solution: deqfast.Solution) -> Row:
    """The columns that a Solution counts exactly."""
    return {"evaluations": solution.evaluations, "sample_evaluations": solution.sample_evaluations}


@dataclass(frozen=True, kw_only=True)
class EvalSolverCase(OptionCase):
    """``eval_solver`` in evaluation mode: looser than the training's, where a gradient needs more than a prediction."""

    providers = ("eval-solver", "solver")
    peers = ("solver",)

    @property
    def name(self) -> str:
        return f"eval-solver-{self.batch}x{self.dim}"

    def contender(self, provider: str, device: str) -> Contender:
        torch.manual_seed(0)
        cell = deqfast.FCCell(self.dim, self.dim).to(device)
        x = torch.randn(self.batch, self.dim).to(device)
        looser = deqfast.Anderson(1e-2, 60) if provider == "eval-solver" else None
        block = deqfast.DEQBlock(cell, deqfast.Anderson(1e-4, 60), eval_solver=looser).eval()

        @torch.no_grad()
        def predict() -> tuple[Tensor, deqfast.Solution]:
            return block(x, return_solution=True)

        value, solution = predict()
        exact = deqfast.solve(
            lambda z: cell.double()(z, x.double()), value.double(), deqfast.Anderson(EXACT, 200), "torch"
        ).value
        cell.float()
        error = relative_error(value, exact)
        check("relative error", error, 0.1)
        return Contender(predict, counted(solution) | {"error": error, "allowed": 0.1})


@dataclass(frozen=True, kw_only=True)
class TraceCase(OptionCase):
    """``trace=True``: the residual of every sample after every evaluation, beside a solve that keeps the last alone."""

    providers = ("trace", "no-trace")
    peers = ("no-trace",)
    iterations: int = 20

    @property
    def name(self) -> str:
        return f"trace-{self.batch}x{self.dim}"

    def contender(self, provider: str, device: str) -> Contender:
        f, z0 = Contraction(self.batch, self.dim, device), torch.zeros(self.batch, self.dim, device=device)
        solver, trace = deqfast.Anderson(NEVER, self.iterations), provider == "trace"

        def solve(g: Any = f) -> deqfast.Solution:
            return deqfast.solve(g, z0, solver, trace=trace)

        solution = solve()
        kept = 0 if solution.trace is None else len(solution.trace)
        check("evaluations that the trace lacks", abs(kept - self.iterations * trace), 0)
        counters = count(solve, f)
        facts = {"launches": counters.operations / self.iterations, "peak_bytes": counters.peak_bytes}
        return Contender(solve, counted(solution) | facts)


ADJOINTS = {
    "jfb": deqfast.JFB(),
    "phantom": deqfast.Phantom(),
    "shine": deqfast.SHINE(),
    "implicit": deqfast.Implicit(),
}


@dataclass(frozen=True, kw_only=True)
class AdjointCase(OptionCase):
    """The gradients by their error against the exact implicit one: SHINE beside JFB, Phantom and Implicit.

    training: the layer; its `adjoint` has no say.
    """

    providers = tuple(ADJOINTS)
    peers = ("implicit", "jfb")
    training: TrainingCase

    @property
    def name(self) -> str:
        return f"gradient-{self.training.name.replace('-implicit', '')}"

    def contender(self, provider: str, device: str) -> Contender:
        problem = Problem(self.training, "auto", device)
        block = deqfast.DEQBlock(problem.cell, self.training.solver, ADJOINTS[provider])

        def layer(x: Tensor, z0: Tensor) -> Tensor:
            return block(x, z0=z0)

        gradient, exact = flat(problem.step(layer)[0]), flat(exact_gradient(self.training, False)[0])
        cosine = float(gradient @ exact / gradient.norm() / exact.norm())
        check("distance of the gradient's cosine from 1", 1 - cosine, 0.5)
        facts = {"error": float((gradient - exact).norm() / exact.norm()), "cosine": cosine}
        facts["evaluations"] = problem.calls(layer)
        facts["peak_bytes"] = memory(lambda: problem.step(layer))[1]
        if block.backward_solution is not None:
            facts["backward_evaluations"] = block.backward_solution.evaluations
        return Contender(lambda: problem.step(layer), facts)


KINDS: dict[str, Any] = {
    "anderson-I": deqfast.Anderson(1e-5, 60, kind="I"),
    "anderson-II": deqfast.Anderson(1e-5, 60),
    "broyden-bad": deqfast.Broyden(1e-5, 60, kind="bad"),
    "broyden-good": deqfast.Broyden(1e-5, 60),
}


@dataclass(frozen=True, kw_only=True)
class KindCase(OptionCase):
    """The kinds of Anderson and Broyden on a problem of ``deqfast.testing`` or the residual suite, by evaluations."""

    providers = tuple(KINDS)
    peers = ("anderson-II", "broyden-good")
    problem: str

    @property
    def name(self) -> str:
        return f"kinds-{self.problem.replace(' ', '-').replace(',', '')}"

    def contender(self, provider: str, device: str) -> Contender:
        f, z0 = problem_of(self.problem, self.batch, self.dim, device)
        solver = KINDS[provider]

        def solve() -> deqfast.Solution:
            return deqfast.solve(f, z0, solver)

        solution = solve()
        facts = counted(solution) | {"mean_evaluations": float(solution.iterations.float().mean())}
        facts |= {"residual": float(solution.residual_rel.max()), "samples_missed": int((~solution.converged).sum())}
        check("samples that broke down", float((solution.status == deqfast.Status.NONFINITE).sum()), 0)
        return Contender(solve, facts | {"dim": z0.shape[1]})


def problem_of(name: str, batch: int, dim: int, device: str) -> tuple[Any, Tensor]:
    """f and z0 by name: of ``PROBLEMS``, or of a problem of the residual suite, which is of the CPU."""
    if name in PROBLEMS:
        problem: FixedPoint = PROBLEMS[name](batch=batch, dim=dim, device=device)
        return problem.f, problem.z0
    found = {problem.name: problem for problem in suite([name.partition(",")[0]], batch)}[name]
    return found.f, found.z0


@dataclass(frozen=True, kw_only=True)
class StreamingCase(OptionCase):
    """``NeuralCollapse(streaming=True)`` over N = `batch` features in pieces: memory without N."""

    providers = ("streaming", "features")
    peers = ("features",)
    classes: int = 10
    piece: int = 500

    @property
    def name(self) -> str:
        return f"streaming-{self.batch}x{self.dim}"

    def contender(self, provider: str, device: str) -> Contender:
        features, labels, _ = clusters(self.batch, self.dim, self.classes)
        pieces = list(zip(features.to(device).split(self.piece), labels.to(device).split(self.piece), strict=True))
        streaming: dict[str, Any] = {"streaming": True, "num_features": self.dim} if provider == "streaming" else {}

        def measure() -> float:
            metric = deqfast.NeuralCollapse(self.classes, **streaming).to(device)
            for part in pieces:
                metric.update(*part)
            return metric.compute().nc1

        exact = exact_of(CollapseCase(samples=self.batch, dim=self.dim, classes=self.classes))
        error = abs(measure() - exact) / exact
        check("relative error of NC1", error, 1e-5)
        return Contender(measure, {"error": error, "allowed": 1e-5, "peak_bytes": memory(measure)[1]})


_LAYERS = [
    TrainingCase(cell="fc", shape=(128, 256), adjoint="implicit", solver=deqfast.Broyden(1e-4, 60)),
    TrainingCase(cell="residual", shape=(8, 32, 8, 8), adjoint="implicit", solver=deqfast.Broyden(1e-4, 60)),
    TrainingCase(cell="residual", shape=(8, 32, 8, 8), adjoint="implicit", solver=deqfast.Anderson(1e-4, 60)),
]
OPTIONS: list[OptionCase] = [
    CompactCase(batch=256, dim=1024),
    CompactCase(batch=256, dim=1024, rates=(0.8, 0.8)),
    EvalSolverCase(batch=128, dim=256),
    TraceCase(batch=128, dim=8192),
    *(AdjointCase(batch=layer.shape[0], dim=layer.size()["dim"], training=layer) for layer in _LAYERS),
    *(KindCase(problem=problem, batch=32, dim=64) for problem in ("linear-0.9", "non-normal", "tanh")),
    KindCase(problem="sawtooth", batch=32, dim=12),
    *(
        KindCase(problem=f"{problem}, b 1", batch=32, dim=0, devices=("cpu",))
        for problem in ("gaussian 0.7", "decaying 0.99", "outliers outside", "tanh decaying 0.99")
    ),
    StreamingCase(batch=50_000, dim=512),
]
_SMALL_LAYER = TrainingCase(cell="fc", shape=(3, 16), adjoint="implicit", solver=deqfast.Broyden(1e-4, 60))
SMALL_OPTIONS: list[OptionCase] = [
    CompactCase(batch=16, dim=32),
    EvalSolverCase(batch=4, dim=16),
    TraceCase(batch=2, dim=64),
    AdjointCase(batch=3, dim=16, training=_SMALL_LAYER),
    KindCase(problem="linear-0.9", batch=2, dim=16),
    StreamingCase(batch=100, dim=9, classes=3),
]
