"""The two passes of neural collapse over the features: ``class_means`` and ``within_class_scatter``.

Both read rows of `features` class after class, and leave out the rows that are not listed:

==========  ================  =================================================================================
features    (N, D)            float16, bfloat16, float32 or float64; the elements of a row lie side by side
rows        (M,) int64        row numbers, grouped by class, in the order in which sums are formed
offsets     (K+1,) int64      class k has rows[offsets[k]:offsets[k + 1]]; offsets[0] = 0 and offsets[K] = M
means       (K, D) float64    the class means
directions  (D, R) float64    what deviations from the class means are projected on
==========  ================  =================================================================================

``class_means(features, rows, offsets) -> (local (K, D), shift (D,))``, float64: shift is the first row listed, and
local + shift are the class means, zero for a class without rows. Sums are of differences to the first row of the class,
so that an offset common to its rows costs no digits. Where a feature is not finite, the mean of its class is not, and
those of other classes need not be.

``within_class_scatter(features, rows, offsets, means, directions) -> within (R,)``, float64:
within_j = sum_i (directions_j . (h_i - mu_{y_i}))^2.

torch and cpp compute in float64. triton and cuda compute in float64 for float64 features and else in float32: sums of
256 rows at most, differences h - mu with mu as a pair of float32, and projections; the rest is float64. `rows` and
`offsets` that are out of range raise RuntimeError with cpp and are undefined behaviour on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import register

_FEATURES = "Tensor features, Tensor rows, Tensor offsets"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_grouped(op: str, features: Tensor, rows: Tensor, offsets: Tensor) -> None:
    """The checks of csrc/common/grouped.h, for the kernels that are launched from Python."""
    if features.dim() != 2 or features.shape[1] == 0:
        raise ValueError(f"{op}: `features` must have shape (N, D), D at least 1, got {tuple(features.shape)}")
    if features.dtype not in _DTYPES:
        raise ValueError(f"{op}: `features` must be float16, bfloat16, float32 or float64, got {features.dtype}")
    if features.shape[1] > 1 and features.stride(1) != 1:
        raise ValueError(f"{op}: `features` must have rows without gaps, got strides {features.stride()}")
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(f"{op}: `offsets` must have shape (K + 1), K at least 1, got {tuple(offsets.shape)}")
    _check("rows", op, rows, (rows.shape[0] if rows.dim() == 1 else -1,), torch.int64, features)
    _check("offsets", op, offsets, (offsets.shape[0],), torch.int64, features)


def _check(name: str, op: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, features: Tensor) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{op}: `{name}` must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.device != features.device:
        raise ValueError(f"{op}: `{name}` must be contiguous and on the device of `features` ({features.device})")


def _class_means_fake(features: Tensor, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    dim = features.shape[1]
    local = features.new_empty((offsets.shape[0] - 1, dim), dtype=torch.float64)
    return local, features.new_empty((dim,), dtype=torch.float64)


def _within_class_scatter_fake(
    features: Tensor, rows: Tensor, offsets: Tensor, means: Tensor, directions: Tensor
) -> Tensor:
    return features.new_empty((directions.shape[1],), dtype=torch.float64)


def _class_means_triton(features: Tensor, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    from ..kernels.neural_collapse import class_means

    _check_grouped("class_means_triton", features, rows, offsets)
    return class_means(features, rows, offsets)


def _within_class_scatter_triton(
    features: Tensor, rows: Tensor, offsets: Tensor, means: Tensor, directions: Tensor
) -> Tensor:
    from ..kernels.neural_collapse import within_class_scatter

    op, dim = "within_class_scatter_triton", features.shape[-1]
    _check_grouped(op, features, rows, offsets)
    _check("means", op, means, (offsets.shape[0] - 1, dim), torch.float64, features)
    count = directions.shape[1] if directions.dim() == 2 else -1
    _check("directions", op, directions, (dim, count), torch.float64, features)
    return within_class_scatter(features, rows, offsets, means, directions)


register("class_means", f"({_FEATURES}) -> (Tensor, Tensor)", _class_means_fake, _class_means_triton)
register(
    "within_class_scatter",
    f"({_FEATURES}, Tensor means, Tensor directions) -> Tensor",
    _within_class_scatter_fake,
    _within_class_scatter_triton,
)
