"""Cases of the library's options: each with and without the option on a suitable problem, exact counts first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from correctness import PROBLEMS, relative_error
from torch import Tensor, nn

import deqfast

from .collapse import clusters, exact_of
from .counters import memory
from .entry import Case, Contender, check
from .problems import suite
from .record import Row
from .training import EXACT, Layer, Setup, exact_gradient, flat


def option(
    name: str,
    providers: tuple[str, ...],
    contender: Callable[[str, str], Contender],
    peers: tuple[str, ...] = (),
    **given: Any,
) -> Case:
    """Option compared with its absence or alternatives, the peers (default: all `providers` except the first)."""
    return Case("options", name, providers, peers or providers[1:], contender, **given)


def counted(solution: deqfast.Solution) -> Row:
    """Columns that a Solution counts exactly."""
    return {"evaluations": solution.evaluations, "sample_evaluations": solution.sample_evaluations}


def compact(batch: int, dim: int, rates: tuple[float, float] = (0.3, 0.8)) -> Case:
    """f(z) = c + rate Q z, Q orthogonal, which is costly. `rates`: of most samples, and of every eighth one."""

    def contender(provider: str, device: str) -> Contender:
        generator = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0].to(device)
        c = torch.randn(batch, dim, generator=generator).to(device)
        rate = torch.full((batch, 1), rates[0], device=device)
        rate[::8] = rates[1]

        def f(z: Tensor, rows: Tensor | None = None) -> Tensor:
            here, scale = (c, rate) if rows is None else (c[rows], rate[rows])
            return torch.addmm(here, z * scale, q.T)

        def solve() -> deqfast.Solution:
            return deqfast.solve(
                f, torch.zeros_like(c), deqfast.Anderson(1e-4, 60), drop_converged=provider == "compact"
            )

        solution = solve()
        check("share of samples that did not converge", 1 - float(solution.converged.float().mean()), 0.0)
        return Contender(solve, counted(solution) | {"residual": float(solution.residual_rel.max())})

    name = f"compact-{batch}x{dim}-rates-{rates[0]:g}-{rates[1]:g}"
    return option(name, ("compact", "whole-batch"), contender)


def eval_solver(batch: int, dim: int) -> Case:
    """Evaluation mode with a looser solver than in training, since a gradient needs more than a prediction."""

    def contender(provider: str, device: str) -> Contender:
        torch.manual_seed(0)
        cell = deqfast.FCCell(dim, dim).to(device)
        x = torch.randn(batch, dim).to(device)
        looser = deqfast.Anderson(1e-2, 60) if provider == "eval-solver" else None
        block = deqfast.DEQBlock(cell, deqfast.Anderson(1e-4, 60), eval_solver=looser).eval()

        @torch.no_grad()
        def predict() -> tuple[Tensor, deqfast.Solution]:
            return block(x, return_solution=True)

        value, solution = predict()
        cell.double()
        wide = x.double(), value.double()
        exact = deqfast.solve(lambda z: cell(z, wide[0]), wide[1], deqfast.Anderson(EXACT, 200), "torch").value
        cell.float()
        error = relative_error(value, exact)
        check("relative error", error, 0.1)
        return Contender(predict, counted(solution) | {"error": error})

    return option(f"eval-solver-{batch}x{dim}", ("eval-solver", "solver"), contender)


ADJOINTS = {
    "jfb": deqfast.JFB(),
    "phantom": deqfast.Phantom(relaxation=1.0),
    "neumann": deqfast.Neumann(),
    "shine": deqfast.SHINE(),
    "implicit": deqfast.Implicit(),
    "gmres": deqfast.Implicit(deqfast.Anderson(1e-6, 100, history_size=32)),  # in exact arithmetic
    "unrolled": deqfast.Unrolled(40),
    "checkpoint": deqfast.Unrolled(40, checkpoint=True),
    "reversible": deqfast.Reversible(12),
}


def gradient(cell: str, shape: tuple[int, ...], solver: Any) -> Case:
    """Gradients of a layer, by their error relative to the exact implicit one."""
    layer = Layer(cell, shape, "implicit", solver)

    def contender(provider: str, device: str) -> Contender:
        setup = Setup(layer, "auto", device)
        block = deqfast.DEQBlock(setup.cell, solver, ADJOINTS[provider])

        def step() -> Any:
            return setup.step(block)

        found, exact = flat(step()[0]), exact_gradient(layer)[0]
        cosine = float(found @ exact / found.norm() / exact.norm())
        check("distance of the gradient's cosine from 1", 1 - cosine, 0.5)
        facts = {"error": float((found - exact).norm() / exact.norm()), "cosine": cosine}
        facts |= {"peak_bytes": memory(step, device)[1], "evaluations": setup.calls(block)}
        if block.backward_solution is not None:
            facts["backward_evaluations"] = block.backward_solution.evaluations
        return Contender(step, facts)

    name = f"gradient-{layer.name.replace('-implicit', '')}"
    return option(name, tuple(ADJOINTS), contender, peers=("implicit", "jfb"))


class Gated(nn.Module):
    """Cell of one matrix product and many small operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.scale, self.slope = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))
        with torch.no_grad():
            self.linear.weight.mul_(0.3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        h = self.linear(z) + x
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        gate = torch.sigmoid(h * self.slope)
        return 0.5 * z * (1 - gate) + 0.5 * gate * torch.clamp(h, -1, 1) + 0.1 * torch.relu(x - z)


def compiled(batch: int, dim: int, adjoint: str) -> Case:
    """Training step of a model that ``torch.compile`` compiles whole, with its cell, compared with eager mode."""

    def contender(provider: str, device: str) -> Contender:
        torch.manual_seed(0)
        cell = Gated(dim)
        block = deqfast.DEQBlock(cell, deqfast.Anderson(1e-3, 40), adjoint)
        model = nn.Sequential(nn.Linear(16, dim), block, nn.Linear(dim, 4)).to(device)
        x = torch.randn(batch, 16, device=device)

        def step() -> Tensor:
            grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            return torch.cat([grad.flatten() for grad in grads])

        eager = step()
        if provider == "compiled":
            cell.compile(dynamic=True)
            model.compile(fullgraph=True, dynamic=True)
        error = relative_error(step(), eager.double())
        check("relative error of the gradient", error, 1e-3)
        return Contender(step, {"error": error})

    return option(f"compiled-{adjoint}-{batch}x{dim}", ("compiled", "eager"), contender)


def compiled_solve(batch: int, dim: int, solver: Any, trains: bool = False) -> Case:
    """Prediction with the cell of ``compiled``, or an exact gradient: solves in one graph, compared with eager mode."""

    def contender(provider: str, device: str) -> Contender:
        torch.manual_seed(0)
        cell, x = Gated(dim), torch.randn(batch, dim)

        def run(solver: Any, cell: nn.Module, x: Tensor, **options: Any) -> Callable[[], tuple[Tensor, Any]]:
            block = deqfast.DEQBlock(cell, solver, deqfast.Implicit(solver), **options)

            def predict() -> tuple[Tensor, deqfast.Solution]:
                with torch.set_grad_enabled(trains):
                    value, solution = block(x, return_solution=True)
                    if trains:
                        value = flat(torch.autograd.grad(value.square().mean(), list(cell.parameters())))
                return value, solution

            return predict

        predict = run(solver, cell, x, compile=provider == "compile")
        value, solution = predict()
        exact = run(deqfast.Anderson(1e-9, 200), copy.deepcopy(cell).double(), x.double(), kernel="torch")()[0]
        error = relative_error(value, exact)
        check("relative error", error, 1e-3)
        return Contender(predict, counted(solution) | {"error": error})

    name = f"compile-{'implicit' if trains else type(solver).__name__.lower()}-{batch}x{dim}"
    return option(name, ("compile", "eager"), contender, devices=("cpu",))


KINDS: dict[str, Any] = {
    "anderson-I": deqfast.Anderson(1e-5, 60, kind="I"),
    "anderson-II": deqfast.Anderson(1e-5, 60),
    "broyden-bad": deqfast.Broyden(1e-5, 60, kind="bad"),
    "broyden-good": deqfast.Broyden(1e-5, 60),
}


def kinds(problem: str, batch: int = 32, dim: int = 64) -> Case:
    """Kinds of Anderson and Broyden, by evaluations.

    problem: of ``correctness``, or of the residual suite, which runs on the CPU with its own `dim`.
    """
    shared = problem in PROBLEMS

    def contender(provider: str, device: str) -> Contender:
        if shared:
            given: Any = PROBLEMS[problem](batch=batch, dim=dim, device=device)
        else:
            given = next(one for one in suite(problem.partition(",")[0], batch) if one.name == problem)

        def solve() -> deqfast.Solution:
            return deqfast.solve(given.f, given.z0, KINDS[provider])

        solution = solve()
        check("samples that broke down", float((solution.status == deqfast.Status.NONFINITE).sum()), 0)
        facts = counted(solution) | {"mean_evaluations": float(solution.iterations.float().mean())}
        facts |= {"residual": float(solution.residual_rel.max()), "samples_missed": int((~solution.converged).sum())}
        return Contender(solve, facts)

    name = f"kinds-{problem.replace(' ', '-').replace(',', '')}"
    peers = ("anderson-II", "broyden-good")
    devices = ("cpu", "cuda") if shared else ("cpu",)
    return option(name, tuple(KINDS), contender, peers, devices=devices)


def streaming(batch: int, dim: int, classes: int = 10, piece: int = 500) -> Case:
    """``NeuralCollapse`` over `batch` features in pieces: memory that does not depend on their number."""

    def contender(provider: str, device: str) -> Contender:
        features, labels, _ = clusters(batch, dim, classes)
        pieces = list(zip(features.to(device).split(piece), labels.to(device).split(piece), strict=True))
        options: dict[str, Any] = {"streaming": True, "num_features": dim} if provider == "streaming" else {}

        def measure() -> float:
            metric = deqfast.NeuralCollapse(classes, **options).to(device)
            for part in pieces:
                metric.update(*part)
            return metric.compute().nc1

        exact = exact_of(batch, dim, classes)
        error = abs(measure() - exact) / exact
        check("relative error of NC1", error, 1e-5)
        return Contender(measure, {"error": error, "peak_bytes": memory(measure, device)[1]})

    return option(f"streaming-{batch}x{dim}", ("streaming", "features"), contender)
