"""Norms of the samples of a state."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_internals.ranks import Ranks
from .groups import Groups
from .rows import rows_of


def sample_norms(
    leaves: Sequence[Tensor],
    groups: Groups | None,
    maximum: bool = False,
    factors: list[float] | None = None,
    parts: Ranks | None = None,
) -> Tensor:
    """Norms of the samples, (B,) in float64, in which no square of a float32 overflows or underflows.

    `maximum`: norms are the largest magnitudes. `factors`: divisors of the leaves, see ``factors_of``. `parts`: the
    processes that have parts of each sample.
    """
    if parts is not None:
        own = sample_norms(leaves, groups, maximum, factors)
        return parts.most(own.clone()) if maximum else parts.sum(own.square()).sqrt()
    if maximum:
        norms = [_magnitudes(rows_of(leaf)).double() for leaf in leaves]
    else:
        norms = [torch.linalg.vector_norm(rows_of(leaf), dim=1, dtype=torch.float64) for leaf in leaves]
    if factors is not None:
        norms = [norm / factor for norm, factor in zip(norms, factors, strict=True)]
    if maximum:
        row_norms = norms[0] if len(norms) == 1 else torch.stack(norms).amax(dim=0)
        return row_norms if groups is None else groups.gather(row_norms[:, None]).amax(dim=1)
    if groups is not None:
        return groups.sums(torch.stack(norms).square().sum(dim=0)).sqrt()
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _magnitudes(rows: Tensor) -> Tensor:
    """Largest magnitudes over the last dimension; 0 for rows without numbers."""
    if not rows.shape[-1]:
        return rows.new_zeros(rows.shape[:-1])
    norms: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=-1)
    return norms


def lengths(rows: Tensor) -> Tensor:
    """Norms over the last dimension, in which no square overflows or underflows, whatever the numbers are."""
    sizes = largest(rows)
    scaled: Tensor = torch.linalg.vector_norm(rows / sizes, dim=-1)
    return scaled * sizes[..., 0]


def unit(rows: Tensor) -> Tensor:
    """Rows over their ``lengths``; zeros stay zeros."""
    scaled = rows / largest(rows)
    norms = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(norms == 0, 1, norms)


def largest(rows: Tensor) -> Tensor:
    """Largest magnitudes over the last dimension (..., 1); 1 for zeros and for rows without numbers."""
    magnitudes = _magnitudes(rows)[..., None]
    return torch.where(magnitudes == 0, 1, magnitudes)
