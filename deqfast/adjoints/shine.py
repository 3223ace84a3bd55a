"""Gradients by the inverse that the forward solve has built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..solution import Solution
from .attach import Attachment, detached, without_broken
from .base import Adjoint, Problem


@dataclass(frozen=True)
class SHINE(Adjoint):
    """Sharing of the inverse estimate: as ``JFB``, with (I - J^T)^-1 taken from the history of the forward solve.

    The history is kept until the backward pass. One more small kernel than JFB, no solve. Source: Ramzi et al., ICLR
    2022, here for the whole multisecant family.

    Raises:
        ValueError: at a differentiated call of the block, if the forward solver is not Anderson or Broyden.

    Examples:
        >>> solver = deqfast.Broyden(tol=1e-5, max_iter=30)
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), solver, deqfast.SHINE())
        >>> block(torch.randn(4, 3)).sum().backward()
    """

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        if torch.is_grad_enabled():
            problem.forward_options = {**problem.forward_options, "keep_inverse": True}
        value, solution = super().__call__(problem)
        return value, replace(solution, transposed_inverse=None)  # or the history would live as long as the Solution

    def differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = without_broken(problem.x, solution)
        return _Shared("SHINE", problem.cell, detached(z), x, broken, solution).attach(solution.value)


class _Shared(Attachment):
    """Attachment whose gradients pass the inverse of the forward solve."""

    def __init__(self, name: str, evaluate: Any, z: Any, x: Any, broken: Tensor, solution: Solution) -> None:
        super().__init__(name, evaluate, z, x, broken)
        assert solution.transposed_inverse is not None
        self.inverse = solution.transposed_inverse

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        return pytree.tree_leaves(self.inverse(pytree.tree_unflatten(grads, pytree.tree_structure(self.z))))
