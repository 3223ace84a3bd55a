"""What deqfast is compared with: torchdeq as it ships, the same algorithms in plain tensor operations, the D x D
pseudo-inverse of neural collapse, and the explicit network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import deqfast
from deqfast.ops.memory import empty_history

from . import traffic

Map = Callable[[Any], Tensor]
Solve = Callable[[Any, Tensor], Tensor]  # (f, z0) -> z

_TORCHDEQ = {deqfast.Picard: "fixed_point_iter", deqfast.Anderson: "anderson", deqfast.Broyden: "broyden"}
_WINDOWS = {deqfast.Anderson: "m", deqfast.Broyden: "LBFGS_thres"}


def torchdeq_method(solver: Any) -> tuple[functools.partial[Any], int]:
    """torchdeq's function of the method, with the window of `solver`, and the max_iter for as many calls of f."""
    from torchdeq.solver import get_solver

    kind = type(solver)
    options = {_WINDOWS[kind]: traffic.window(solver)} if kind in _WINDOWS else {}
    first = kind is deqfast.Broyden  # which torchdeq does not count
    return functools.partial(get_solver(_TORCHDEQ[kind]), **options), solver.max_iter - first


def torchdeq_solve(solver: Any, **options: float) -> Solve:
    """A solve by torchdeq, its history in the dtype of the state; as it ships, without `options` of its function.

    Raises ImportError where it is missing.
    """
    run, max_iter = torchdeq_method(solver)
    return lambda f, z0: run(f, z0, max_iter=max_iter, tol=solver.tol, stop_mode=solver.stop, **options)[0]


def torchdeq_layer(cell: nn.Module, solver: Any, adjoint: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with gradient, by ``torchdeq.get_deq``: one step at z* for "jfb", "ift" for "implicit".

    Its backward tolerance is absolute and its default solver plain iteration; both are set to what deqfast does.
    """
    from torchdeq import get_deq
    from torchdeq.solver import register_solver

    run, max_iter = torchdeq_method(solver)
    name = f"{_TORCHDEQ[type(solver)]} {run.keywords}"
    register_solver(name, run)  # the backward solve takes a window in no other way
    settings = {"f_solver": name, "f_max_iter": max_iter, "f_tol": solver.tol, "f_stop_mode": solver.stop}
    if adjoint == "implicit":
        settings |= {"ift": True, "b_solver": name, "b_max_iter": max_iter, "b_tol": 1e-6, "b_stop_mode": "rel"}
    layer = get_deq(**settings)
    return lambda x, z0: layer(lambda z: cell(z, x), z0)[0][-1]


class _Best:
    """The iterate of least residual of every sample, without a copy as long as all of them gain."""

    def __init__(self, z0: Tensor) -> None:
        self.z, self.residual = z0, z0.new_full((len(z0),), torch.inf)

    def judge(self, z: Tensor, fz: Tensor, g: Tensor, tol: float) -> bool:
        """Take up z, of which f is fz and g = fz - z; whether all samples have converged. One wait for the device."""
        residual = torch.linalg.vector_norm(g, dim=1) / torch.linalg.vector_norm(fz, dim=1)
        better = residual < self.residual
        self.residual = torch.minimum(residual, self.residual)
        all_better, done = torch.stack([better.all(), (self.residual <= tol).all()]).tolist()
        self.z = z if all_better else torch.where(better[:, None], z, self.z)
        return done


def eager_solve(solver: Any) -> Solve:
    """The algorithm of `solver` in plain tensor operations, with the memory of its history kept as deqfast keeps its
    own."""

    def solve(f: Map, z0: Tensor) -> Tensor:
        method = {deqfast.Picard: _picard, deqfast.Anderson: _anderson, deqfast.Broyden: _broyden}[type(solver)]
        return _rows(method, f, z0, solver)

    return solve


def _rows(solve: Callable[..., Tensor], f: Map, z0: Tensor, solver: Any) -> Tensor:
    """`solve` on the state as (B, D): of images the view of a channels_last tensor."""
    rows = z0.movedim(1, -1)

    def image(z: Tensor) -> Tensor:
        return z.view(rows.shape).movedim(-1, 1)

    def flat(z: Tensor) -> Tensor:
        return z.movedim(1, -1).flatten(1).to(z0.dtype)

    return image(solve(lambda z: flat(f(image(z))), flat(z0), solver))


def _picard(f: Map, z0: Tensor, solver: Any) -> Tensor:
    z, best, g = z0, _Best(z0), torch.empty_like(z0)
    for _ in range(solver.max_iter):
        fz = f(z)
        if best.judge(z, fz, torch.sub(fz, z, out=g), solver.tol):
            break
        z = fz
    return best.z


def _broyden(f: Map, z0: Tensor, solver: Any) -> Tensor:
    """Broyden's method from all its steps, whatever the solver's window: ``broyden_step`` in ``deqfast.ops.steps``.

    N c = S g with N lower triangular: N_jj = |s_j|^2, N_ji = -s_j . s_{i+1}. Row k of the steps holds g first, so that
    one product with the history serves both the newest step and g, and another makes the next step.
    """
    batch, dim = z0.shape
    steps = empty_history((batch, solver.max_iter, dim), z0.dtype, z0.device)
    matrix = z0.new_empty(batch, solver.max_iter, solver.max_iter)
    buffers = [torch.empty_like(z0) for _ in range(3)]
    z, best, step = z0, _Best(z0), z0.new_empty(batch, 1, dim)
    for k in range(solver.max_iter):
        fz, g = f(z), steps[:, k]
        if best.judge(z, fz, torch.sub(fz, z, out=g), solver.tol) or k + 1 == solver.max_iter:
            break
        if k:
            dots = steps[:, :k] @ steps[:, k - 1 : k + 1].mT  # with s_{k-1} and g
            matrix[:, k - 1, : k - 1] = -dots[:, 1:, 0]
            matrix[:, k - 1, k - 1] = dots[:, -1, 0]
            c = torch.linalg.solve_triangular(matrix[:, :k, :k], dots[:, :, 1:], upper=False)
            weights = torch.cat([c[:, :-1], torch.ones_like(c[:, :1])], dim=1) / (1 - c[:, -1:])
            g.copy_(torch.bmm(weights.mT, steps[:, 1 : k + 1], out=step).squeeze(1))
        z_next = next(buffer for buffer in buffers if buffer is not z and buffer is not best.z)
        z = torch.add(z, g, out=z_next)
    return best.z


def _anderson(f: Map, z0: Tensor, solver: Any) -> Tensor:
    """Anderson II: z <- z + g - DF gamma with L L^T gamma = L g, L the differences of g.

    The system is scaled to a unit diagonal and solved without the wait of ``torch.linalg.solve`` for its own check.
    """
    batch, dim = z0.shape
    window = traffic.window(solver)
    left, df = (empty_history((batch, window, dim), solver.history_dtype or z0.dtype, z0.device) for _ in range(2))
    matrix = z0.new_zeros(batch, window, window)
    buffers = [torch.empty_like(z0) for _ in range(3)]
    pair = z0.new_empty(batch, 2, dim)  # y and g, so that one product with L serves both
    y, g = pair.unbind(dim=1)
    z, f_prev, best = z0, z0, _Best(z0)
    for k in range(solver.max_iter):
        fz = f(z)
        if best.judge(z, fz, torch.sub(fz, z, out=g), solver.tol) or k + 1 == solver.max_iter:
            break
        n, newest = min(k, window), (k - 1) % window
        z_next = next(buffer for buffer in buffers if buffer is not z and buffer is not best.z)
        torch.add(z, g, out=z_next)
        if n:
            torch.sub(fz, f_prev, out=y)
            df[:, newest] = y
            y.sub_(left[:, newest])
            left[:, newest] = y
            dots = left[:, :n].to(z0.dtype) @ pair.mT
            matrix[:, :n, newest] = matrix[:, newest, :n] = dots[:, :, 0]
            scale = matrix[:, :n, :n].diagonal(dim1=1, dim2=2).rsqrt()
            scaled = matrix[:, :n, :n] * scale[:, :, None] * scale[:, None, :]
            scaled.diagonal(dim1=1, dim2=2).mul_(1 + solver.ridge)
            gamma = torch.linalg.solve_ex(scaled, dots[:, :, 1] * scale)[0] * scale
            z_next.unsqueeze(1).baddbmm_(gamma.unsqueeze(1), df[:, :n].to(z0.dtype), alpha=-1)
        left[:, k % window] = torch.sub(z_next, z, out=y)
        z, f_prev = z_next, fz
    return best.z


def eager_layer(cell: nn.Module, solver: Any, adjoint: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with the gradient of "jfb" or "implicit", the solves by ``eager_solve``."""
    solve = eager_solve(solver)
    backward = eager_solve(replace(solver, tol=1e-6, stop="rel"))

    def layer(x: Tensor, z0: Tensor) -> Tensor:
        with torch.no_grad():
            z = solve(lambda z: cell(z, x), z0)
        if adjoint == "jfb":
            return cell(z.detach(), x)
        z = z.detach().requires_grad_()
        evaluation = cell(z, x)

        def solved(grad: Tensor) -> Tensor:
            def product(u: Tensor) -> Tensor:
                return torch.autograd.grad(evaluation, z, u.to(evaluation.dtype), retain_graph=True)[0] + grad

            return backward(product, grad.to(z.dtype)).to(evaluation.dtype)

        value = evaluation.clone()  # whose hook the products do not meet
        value.register_hook(solved)
        return value

    return layer


def explicit_layer(cell: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> the cell applied once: what a layer costs that solves nothing."""
    return lambda x, z0: cell(z0, x)


def pinv_collapse(features: Tensor, labels: Tensor, weight: Tensor | None) -> dict[str, float]:
    """NC1, and with a classifier's weight NC2 to NC4, as they are usually written: D x D covariances and a
    pseudo-inverse, in the dtype of the features."""
    counts = torch.bincount(labels)
    classes, samples = len(counts), len(features)
    means = features.new_zeros(classes, features.shape[1]).index_add_(0, labels, features) / counts[:, None]
    deviations, centred = features - means[labels], means - means.mean(0)
    within, between = deviations.T @ deviations / samples, centred.T @ centred / classes
    nc1 = torch.trace(within @ torch.linalg.pinv(between, hermitian=True)) / classes
    if weight is None:
        return {"nc1": float(nc1)}
    simplex = (torch.eye(classes, dtype=means.dtype) - 1 / classes).to(means) / (classes - 1) ** 0.5
    gram = means @ means.T
    nc2 = torch.linalg.norm(gram / torch.linalg.norm(gram) - simplex)
    nc3 = torch.linalg.norm(weight / torch.linalg.norm(weight) - means / torch.linalg.norm(means))
    nearest = torch.cdist(features, means).argmin(1)
    nc4 = ((features @ weight.T).argmax(1) == nearest).float().mean()
    return {"nc1": float(nc1), "nc2": float(nc2), "nc3": float(nc3), "nc4": float(nc4)}
