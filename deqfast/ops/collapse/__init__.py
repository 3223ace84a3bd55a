"""Ops of neural collapse, the two passes over the features: ``class_means`` and ``within_class_scatter``.

Both read rows of `features` class after class, and leave out the rows that are not listed. torch and cpp compute in
float64, and so do triton and cuda for float64 features. Otherwise triton and cuda compute these in float32: sums of up
to 256 rows, differences h - mu with mu as a pair of float32, and projections. The rest is float64. `rows` and `offsets`
that are out of range raise RuntimeError with cpp and are undefined behaviour on a GPU.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from ..registry import Range, Result, Shaped, anchored, register

FEATURES = anchored(torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ClassMeans:
    """Return `local` (K, D) and `shift` (D,): shift is the first row listed, and local + shift are the class means.

    The mean of a class without rows is zero. Sums are of differences to the first row of the class, so that an offset
    common to its rows costs no digits. If a feature is not finite, the mean of its class is not finite, and means of
    other classes may not be finite.
    """

    features: Annotated[Tensor, Shaped("N, D", FEATURES, layout="rows")]
    rows: Annotated[Tensor, Shaped("M", torch.int64)]  # row numbers, grouped by class, in the order of summation
    # Class k has rows[offsets[k]:offsets[k + 1]]; offsets[0] = 0 and offsets[K] = M.
    offsets: Annotated[Tensor, Shaped("K + 1", torch.int64)]


@dataclass(frozen=True)
class WithinClassScatter(ClassMeans):
    """Return `within` (R,), within_j = sum_i (directions_j . (h_i - mu_{y_i}))^2."""

    means: Annotated[Tensor, Shaped("K, D", torch.float64)]  # the class means
    directions: Annotated[Tensor, Shaped("D, R", torch.float64)]


_passes: Any = {"limits": {"D": Range(1), "K": Range(1)}, "triton": "neural_collapse"}
_MEANS = Result("local", torch.float64, shape="K, D"), Result("shift", torch.float64, shape="D")
register("class_means", ClassMeans, "features", *_MEANS, **_passes)
_WITHIN = Result("within", torch.float64, shape="R")
register("within_class_scatter", WithinClassScatter, "features", _WITHIN, **_passes)
