"""Dropout with one draw per solve."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_count, check_number
from ..torch_internals.transforms import in_backward


class _Local(threading.local):
    def __init__(self) -> None:
        self.solves: list[list[Tensor]] = []  # the mask of each running solve, empty until drawn; innermost last

    def __reduce__(self) -> Any:
        """A copy has no masks: running solves belong to a thread."""
        return _Local, ()


class SolveDropout(nn.Module):
    """Dropout with one mask for all evaluations of a forward pass of a ``DEQBlock``, and for its gradient.

    In training, entries are zeroed with probability p and divided by 1 - p otherwise. torch's generator draws the mask
    at the first call in a solve, in the shape of its input. A block inside of a cell keeps the mask of the outer solve;
    outside of a solve every call draws its own, as in ``nn.Dropout``. In evaluation mode it is the identity.

    A module has one mask: use a separate module in each place of a cell. In training these raise: ``drop_converged``,
    ``compile``, ``Reversible``, ``Unrolled(checkpoint=True)``, an activation checkpoint inside of the cell (one around
    the block works), second derivatives, and gradients of torch.func. A block with ``cuda_graph`` refuses it.
    Source: Gal and Ghahramani, NeurIPS 2016, in recurrent networks.

    Args:
        p: probability, from 0 to 1.
        dims: dimensions, from 0 on, along which entries share a draw: (2, 3) for whole channels of (B, C, H, W), (1,)
            for features of (B, T, D) at all positions.

    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: a call in a solve has another shape than the one before, or comes from a backward pass later.

    Examples:
        >>> class Cell(torch.nn.Sequential):
        ...     def forward(self, z, x):
        ...         return torch.tanh(0.5 * super().forward(z) + x)
        >>> cell = Cell(deqfast.SolveDropout(0.2), torch.nn.Linear(8, 8))
        >>> z, solution = deqfast.DEQBlock(cell)(torch.randn(4, 8), return_solution=True)
        >>> bool(solution.converged.all())
        True
    """

    def __init__(self, p: float = 0.5, dims: tuple[int, ...] = ()):
        super().__init__()
        check_number("p", p, 0, 1)
        self.p, self.dims = p, tuple(dims)
        for dim in self.dims:
            check_count("dims", dim, 0)
        self._scale = 1 / (1 - p) if p < 1 else 0.0
        self._local = _Local()
        self._has_solved = False

    def begin_solve(self) -> None:
        """Start without a mask, unless a solve around this one holds one."""
        self._has_solved = True
        self._local.solves.append(self._local.solves[-1] if self._local.solves else [])

    def end_solve(self) -> None:
        """Drop the mask, unless a solve around this one holds it."""
        self._local.solves.pop()

    cancel_solve = end_solve

    def forward(self, z: Tensor) -> Tensor:
        """Tensor like z (B, ...), with entries dropped in training."""
        if not self.training or self.p == 0:
            return z
        return (z * self._scale).masked_fill_(self._dropped(z), 0)  # in place, which keeps the memory order

    def _dropped(self, z: Tensor) -> Tensor:
        """Mask that broadcasts to z."""
        if any(dim >= z.dim() for dim in self.dims):
            raise ValueError(f"dims must be dimensions of the input, which has {z.dim()}, got {self.dims}")
        for dim in self.dims:
            z = z.narrow(dim, 0, min(1, z.shape[dim]))
        if not self._local.solves:
            if self._has_solved and in_backward():
                raise RuntimeError(
                    "SolveDropout was called in a backward pass, when its mask was gone. It does not work with "
                    "Reversible, Unrolled(checkpoint=True), second derivatives, torch.func, or an activation "
                    "checkpoint inside of the cell (put it around the block)"
                )
            return self._draw(z)
        drawn = self._local.solves[-1]
        if not drawn:
            drawn.append(self._draw(z))
        if drawn[0].shape != z.shape:
            why = f"a mask {tuple(drawn[0].shape)} in this solve, which does not fit {tuple(z.shape)}"
            use = "use a separate module in each place of a cell, and drop_converged=False"
            raise RuntimeError(f"SolveDropout drew {why}: {use}")
        return drawn[0]

    def _draw(self, z: Tensor) -> Tensor:
        return torch.rand_like(z, dtype=torch.float32, requires_grad=False) < self.p

    def extra_repr(self) -> str:
        return f"p={self.p}, dims={self.dims}"
