"""Peers of deqfast: torchdeq as it ships, the D x D pseudo-inverse of neural collapse, the cell applied once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deqfast

from . import traffic
from .entry import Skipped

Solve = Callable[[Any, Tensor], Tensor]  # (f, z0) -> z

BACKWARD_TOL = 1e-6  # relative, as deqfast's own
TORCHDEQ = {deqfast.Picard: "fixed_point_iter", deqfast.Anderson: "anderson", deqfast.Broyden: "broyden"}
_WINDOWS = {deqfast.Anderson: "m", deqfast.Broyden: "LBFGS_thres"}


def torchdeq_method(solver: Any) -> tuple[functools.partial[Any], int]:
    """torchdeq's function of the method, with the window of `solver`, and its max_iter for the same calls of f.

    Raises ``Skipped`` if torchdeq is missing.
    """
    try:
        from torchdeq.solver import get_solver
    except ImportError as error:
        raise Skipped(f"torchdeq cannot be imported: {error}") from None
    kind = type(solver)
    options = {_WINDOWS[kind]: traffic.window(solver)} if kind in _WINDOWS else {}
    first = kind is deqfast.Broyden  # torchdeq does not count its first evaluation
    return functools.partial(get_solver(TORCHDEQ[kind]), **options), solver.max_iter - first


def _stop_mode(solver: Any) -> str:
    """torchdeq's name of the residual by which the solver judges."""
    return "abs" if solver.is_absolute else "rel"


def torchdeq_solve(solver: Any, **options: float) -> Solve:
    """Solve by torchdeq, with its history in the dtype of the state; with its defaults, unless `options` are given."""
    run, max_iter = torchdeq_method(solver)
    return lambda f, z0: run(f, z0, max_iter=max_iter, tol=solver.tol, stop_mode=_stop_mode(solver), **options)[0]


def silva_solve(solver: Any) -> Solve:
    """All iterations of a solve by silva-networks, Anderson per sample. Raises ``Skipped`` if it is missing."""
    try:
        from silva_networks.solvers import SolverConfig, fixed_point
    except ImportError as error:
        raise Skipped(f"silva-networks cannot be imported: {error}") from None
    options: dict[str, Any] = {"history": traffic.window(solver)} if type(solver) in _WINDOWS else {}
    options |= {"ridge": solver.ridge, "anderson_batch_dims": 1} if isinstance(solver, deqfast.Anderson) else {}
    name = type(solver).__name__.lower()
    config = SolverConfig(name, solver.max_iter, 1e-30, track_residuals=False, reengage=False, **options)
    return lambda f, z0: fixed_point(f, z0, config).z


def torchdeq_layer(cell: nn.Module, solver: Any, adjoint: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with gradient, by ``torchdeq.get_deq``: one step at z* for "jfb", "ift" for "implicit".

    Its backward tolerance is absolute and its default solver plain iteration; both are set to deqfast's.
    """
    run, max_iter = torchdeq_method(solver)  # first: raises Skipped if torchdeq is missing
    from torchdeq import get_deq
    from torchdeq.solver import register_solver

    name = f"{TORCHDEQ[type(solver)]} {run.keywords}"
    register_solver(name, run)  # the backward solve takes a window in no other way
    return layer_by(get_deq, cell, solver, adjoint, name, max_iter)


def layer_by(
    get_deq: Callable[..., Any], cell: nn.Module, solver: Any, adjoint: str, name: str, max_iter: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with gradient, by a ``get_deq``, from torchdeq or deqfast. name: what torchdeq calls the solver."""
    settings = {"f_solver": name, "f_max_iter": max_iter, "f_tol": solver.tol, "f_stop_mode": _stop_mode(solver)}
    if adjoint == "implicit":
        settings |= {"ift": True, "b_solver": name, "b_max_iter": max_iter, "b_tol": BACKWARD_TOL, "b_stop_mode": "rel"}
    layer = get_deq(**settings)
    return lambda x, z0: layer(lambda z: cell(z, x), z0)[0][-1]


def block_layer(block: deqfast.DEQBlock) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> z with gradient, by this block."""
    return lambda x, z0: block(x, z0=z0)


def explicit_layer(cell: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, z0) -> the cell applied once: the cost of a layer without a solve."""
    return lambda x, z0: cell(z0, x)


def pinv_collapse(features: Tensor, labels: Tensor, weight: Tensor | None) -> dict[str, float]:
    """NC1, and with a classifier's weight NC2 to NC4, as they are usually written: D x D covariances and a
    pseudo-inverse, in the dtype of the features. The suite gives it float64."""
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
