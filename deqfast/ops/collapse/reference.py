"""The passes of neural collapse in plain torch, in float64: the specification of their kernels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import ClassMeans, WithinClassScatter

# Elements of a block of rows: they fit into the cache of a CPU, or are enough work per launch on a GPU.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
_MIN_BLOCK_ROWS = 64  # matrix products of fewer rows are slow


def row_blocks(features: Tensor, rows: Tensor, labels: Tensor, width: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (features, labels) of blocks of `rows`, split only by the shapes and the kind of device.

    labels are the labels of `rows`; `width` is the width of the widest other result per row. The features are a float64
    copy, which the caller may overwrite.
    """
    budget = _BLOCK_ELEMENTS.get(features.device.type, _BLOCK_ELEMENTS["cpu"])
    step = max(_MIN_BLOCK_ROWS, budget // max(features.shape[1], width))
    for chosen, chosen_labels in zip(rows.split(step), labels.split(step), strict=True):
        yield features.index_select(0, chosen).to(torch.float64), chosen_labels  # several times faster than [chosen]


def labels_of(offsets: Tensor, count: int) -> Tensor:
    """Return the class of each of `count` grouped rows."""
    return torch.searchsorted(offsets, torch.arange(count, device=offsets.device), right=True) - 1


def class_means(a: ClassMeans) -> tuple[Tensor, Tensor]:
    """Class means as local (K, D) + shift (D,), float64.

    Class sums are one-hot matrix products, not scattered additions: the same inputs give the same bits. Blocks are
    converted to float64: this costs little, and makes autocast and the float32 matmul settings irrelevant.
    """
    num_classes, dim = len(a.offsets) - 1, a.features.shape[1]
    sums = torch.zeros((num_classes, dim), dtype=torch.float64, device=a.features.device)
    if len(a.rows) == 0:
        return sums, sums.new_zeros(dim)
    first = a.features[a.rows[a.offsets[:-1].clamp_max(len(a.rows) - 1)]].to(torch.float64)
    classes = torch.arange(num_classes, device=a.features.device)[:, None]
    for block, labels in row_blocks(a.features, a.rows, labels_of(a.offsets, len(a.rows)), num_classes):
        sums.addmm_((labels == classes).to(torch.float64), block.sub_(first.index_select(0, labels)))
    counts = a.offsets.diff()[:, None]
    shift = a.features[a.rows[0]].to(torch.float64)
    return torch.where(counts > 0, sums / counts.clamp_min(1) + (first - shift), -shift), shift


def within_class_scatter(a: WithinClassScatter) -> Tensor:
    """sum_i (R_j . (h_i - mu_{y_i}))^2 of each direction R_j, float64."""
    within = a.means.new_zeros(a.directions.shape[1])
    for block, labels in row_blocks(a.features, a.rows, labels_of(a.offsets, len(a.rows)), a.directions.shape[1]):
        within += (block.sub_(a.means.index_select(0, labels)) @ a.directions).square_().sum(0)
    return within
