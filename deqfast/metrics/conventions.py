"""NC1 to NC4 as four papers define them, by the table and in the notation of ``neural_collapse``.

argmax_k (W h + b)_k of agreeing samples is the class of the nearest mean. Both centres are equal for equal classes.

"papyan" has two more parts of NC2: the standard deviations of the lengths, over their mean, and of the cosines. All
three parts are measured of the rows of M, and of the rows of W, which are not centred.

Against the authors' code, which for "zhu" is the same (tding1/Neural-Collapse):
    "papyan" (neuralcollapse/neuralcollapse, figures 2 to 7 of the paper): The code has no 1/K in NC1, which the paper
        has. It divides the variance of the lengths by K - 1, as here. It does not measure the deviation of the cosines.
    "kothapalli" (kvignesh1420/gnn_collapse): Its classes are balanced, and NC2 is centred by the mean of all samples
        there. It has no NC4: this is the rule of Papyan et al., counted as a share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import cosines, simplex, unit


class VectorSpread(NamedTuple):
    """NC2 of Papyan et al. for K vectors, one per class. All are 0 at the simplex, and NaN if K is 1.

    Attributes:
        equinorm: sample standard deviation (over K - 1) of the lengths, over their mean. Figure 2 of the paper.
        equiangular: standard deviation of the cosines over all pairs. Figure 3.
        maximal_angle: mean of |cos + 1 / (K - 1)| over all pairs. Figure 4.
    """

    equinorm: float
    equiangular: float
    maximal_angle: float


def nc2(convention: str, means: Tensor, centred: Tensor, weight: Tensor | None) -> Tensor:
    """NC2 of H, M and W (K, D), each over its norm. NaN if it is of a classifier that is not given."""
    if convention == "papyan":
        return spread(centred)[2]
    vectors = {"sun": means, "kothapalli": centred, "zhu": weight}[convention]
    return means.new_tensor(torch.nan) if vectors is None else simplex_distance(vectors @ vectors.T)


def nc3(convention: str, means: Tensor, centred: Tensor, weight: Tensor) -> Tensor:
    """NC3 of H, M and W (K, D), each over its norm."""
    if convention == "sun":
        return torch.linalg.vector_norm(weight - means)
    if convention == "papyan":
        return torch.linalg.vector_norm(weight - centred).square()
    return simplex_distance(weight @ centred.T)


def spread(vectors: Tensor) -> Tensor:
    """The numbers of ``VectorSpread`` (3,) of vectors (K, D)."""
    count = len(vectors)
    if count == 1:
        return vectors.new_full((3,), torch.nan)
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    first, second = torch.triu_indices(count, count, offset=1, device=vectors.device)
    angles = cosines(vectors)[first, second]
    excess = (angles + 1 / (count - 1)).abs().mean()
    return torch.stack([lengths.std() / lengths.mean(), angles.std(correction=0), excess])


def simplex_distance(product: Tensor, power: int = 1) -> Tensor:
    """||^P - s (I - 11^T / K)||_F of a product P (K, K) and s = 1 / sqrt(K - 1) to the `power`. NaN if K is 1.

    The factors of P have norm 1; otherwise fourth powers of their norm could overflow or underflow.
    """
    scale = (len(product) - 1) ** (-power / 2) if len(product) > 1 else torch.nan
    return torch.linalg.vector_norm(unit(product) - scale * simplex(product))
