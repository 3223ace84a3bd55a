"""Rows that are positions of sequences: what a step sums and judges over a position and the earlier ones."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad


class Positions:
    """Rows (B * T, .) of one causal solve of T = `length` positions: row b * T + t is position t of sequence b.

    A position that has ended stays in the sums of the later ones: with its last norms and products, and without new
    pairs. Neither its f(z) nor its history is read again.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._norms: Tensor | None = None
        self._products: Tensor | None = None

    def scan(self, numbers: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`numbers` (B * T, K) joined over the positions up to each one, in an order that depends on its place only.

        So no bit depends on what follows, on any device. (torch's cumulative sums are not deterministic on GPUs.)
        """
        numbers, step = numbers.unflatten(0, (-1, self.length)), 1
        while step < self.length:
            numbers = torch.cat([numbers[:, :step], join(numbers[:, step:], numbers[:, :-step])], dim=1)
            step *= 2
        return numbers.flatten(0, 1)

    def norms(self, own: Tensor, running: Tensor, maximum: bool) -> Tensor:
        """Norms up to each position, of the rows' `own` (B * T, K)."""
        own = own if self._norms is None else torch.where(running[:, None], own, self._norms)
        self._norms = own
        return self.scan(own, torch.maximum if maximum else _length)

    def products(self, products: list[Tensor], running: Tensor, k: int) -> list[Tensor]:
        """Products (B * T, .) up to each position in evaluation k: first L^T g, then those of the newest pair."""
        if not products:
            return products
        rows, (residual_products, *pair_products) = running[:, None], products
        before = residual_products[:, :0] if self._products is None else self._products
        kept = pad(before, (0, residual_products.shape[1] - before.shape[1]))
        kept[:, (k - 1) % residual_products.shape[1]] = 0  # the slot of the newest pair
        self._products = torch.where(rows, residual_products, kept)
        joined = torch.cat([self._products, *(torch.where(rows, product, 0) for product in pair_products)], dim=1)
        return list(self.scan(joined, torch.add).split([product.shape[1] for product in products], dim=1))

    def in_turn(self, may_end: Tensor) -> Tensor:
        """Mask (B * T,) of the positions that may end together with all earlier ones."""
        return may_end.unflatten(0, (-1, self.length)).int().cumprod(dim=1).flatten() > 0


def _length(a: Tensor, b: Tensor) -> Tensor:
    """Norm of two parts; ``hypot``, because they may differ in scale. Finite parts have a finite one."""
    length = torch.hypot(a, b)
    largest = length.clamp_max(torch.finfo(length.dtype).max)
    return torch.where(torch.isfinite(a) & torch.isfinite(b), largest, length)
