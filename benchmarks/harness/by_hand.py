"""Solves written by hand in plain torch, without a stop rule: f and the update, for every sample by itself.

On a GPU the whole loop is one CUDA graph: the least that a user without a library would reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deqfast

from . import traffic

Map = Callable[[Tensor], Tensor]


def picard(f: Map, z: Tensor, evaluations: int, window: int) -> Tensor:
    """z (B, D) after this many evaluations of plain iteration."""
    for _ in range(evaluations):
        z = f(z)
    return z


def anderson(f: Map, z: Tensor, evaluations: int, window: int, ridge: float = 1e-6) -> Tensor:
    """Anderson acceleration of type II with the last `window` differences (Walker and Ni, 2011); see ``picard``."""
    values, steps = (z.new_empty(len(z), window, z.shape[1]) for _ in range(2))  # of f, and of f(z) - z
    eye = torch.eye(window, dtype=z.dtype, device=z.device)
    before = after = z
    for k in range(evaluations):
        value = f(z)
        step = value - z
        if k:
            pairs, row = min(k, window), (k - 1) % window
            torch.sub(value, before, out=values[:, row])
            torch.sub(step, after, out=steps[:, row])
            kept = steps[:, :pairs]
            gram = kept @ kept.mT
            trace = gram.diagonal(dim1=1, dim2=2).sum(1)
            gram = gram + (ridge * trace)[:, None, None] * eye[:pairs, :pairs]
            weights = torch.linalg.solve_ex(gram, kept @ step[:, :, None])[0]
            z = torch.baddbmm(value[:, None], weights.mT, values[:, :pairs], alpha=-1)[:, 0]
        else:
            z = value
        before, after = value, step
    return z


def broyden(f: Map, z: Tensor, evaluations: int, window: int) -> Tensor:
    """Broyden's good method from the identity, whose inverse is I + left^T right; see ``picard``."""
    left, right = (z.new_empty(len(z), window, z.shape[1]) for _ in range(2))
    step = f(z) - z
    for k in range(evaluations - 1):
        z = z + step
        residual = z - f(z)
        own, other = left[:, :k], right[:, :k]
        moved = residual[:, None] + (other @ residual[:, :, None]).mT @ own if k else residual[:, None]
        moved = moved[:, 0]  # the inverse times the residual
        square, product = (step * step).sum(1, keepdim=True), (step * moved).sum(1, keepdim=True)
        total = square + product
        if k < window:
            right[:, k] = step + ((own @ step[:, :, None]).mT @ other)[:, 0] if k else step
            torch.div(-moved, total, out=left[:, k])
        step = -moved * (square / total)
    return z + step


LOOPS: dict[type, Callable[..., Tensor]] = {
    deqfast.Picard: picard,
    deqfast.Anderson: anderson,
    deqfast.Broyden: broyden,
}


def loop_of(solver: Any) -> Callable[[Map, Tensor], Tensor]:
    """(f, z0) -> z by the loop of the solver's method, with its evaluations and its window."""
    window = 0 if isinstance(solver, deqfast.Picard) else traffic.window(solver)
    return lambda f, z: LOOPS[type(solver)](f, z, solver.max_iter, window)
