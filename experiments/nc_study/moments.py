"""Moments from which all metrics of neural collapse follow, saved with every measurement: a run's moments.npz.

Arrays by name, the measurements along the first dimension; of K classes and D features:

- epoch (E,): the epoch before the measurement
- counts (E, K): training images of each class, those with a feature that is not finite left out; a class without
  any has means of 0, no part in M, and an undefined variance
- means (E, K, D): class means of the features, mu_k
- traces (E, K): within-class variance of each class, the mean of |h_i - mu_k|^2
- scatter (E, K, K): P^T Sigma_W P, where P (D, K) is the pseudo-inverse of the centred class means M (K, D) and Sigma_W
  the within-class covariance, (1/N) sum_i (h_i - mu_{y_i})(h_i - mu_{y_i})^T. Its trace is NC1, and M^T scatter M is
  Sigma_W in the span of the centred class means. Unlike singular vectors, P has no sign to choose.
- weight (E, K, D): the classifier's weight; it has no bias

All but epoch and counts are float32, rounded from float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from runs.files import read_arrays, reading
from torch import Tensor

from deqfast.metrics.statistics import Samples, between_classes, class_means, default_rtol
from deqfast.ops import choose_kernel

Arrays = Mapping[str, np.ndarray]


@torch.no_grad()
def moments(features: Tensor, labels: Tensor, weight: Tensor) -> Arrays:
    """Entries of one measurement, without its epoch, for features (N, D), labels (N,) and a classifier (K, D)."""
    kernel = choose_kernel("auto", features.device)
    samples, stats = class_means(Samples.grouped(features, labels, len(weight)), kernel)
    seen, inverse = stats.counts > 0, torch.zeros_like(stats.means.T)
    if len(samples.rows):
        present = stats._replace(counts=stats.counts[seen], local=stats.local[seen])
        between = between_classes(present, "class-means", default_rtol(features.dtype))
        inverse[:, seen] = between.whitening @ (between.whitening.T @ between.centred.T)
    squares, index = torch.zeros_like(stats.counts), torch.arange(len(weight), device=weight.device)
    scatter = squares.new_zeros(len(weight), len(weight))
    for block, classes in samples.blocks():
        deviations = block.sub_(stats.means.index_select(0, classes))
        squares += (classes == index[:, None]).double() @ deviations.square().sum(1)
        projected = deviations @ inverse
        scatter.addmm_(projected.T, projected)
    floats = {"means": stats.means, "traces": squares / stats.counts, "scatter": scatter / len(samples.rows)}
    floats["weight"] = weight
    return {
        "counts": stats.counts.long().cpu().numpy(),
        **{name: array.float().cpu().numpy() for name, array in floats.items()},
    }


def read(path: Path) -> Arrays:
    """Read the measurements of a run. Raises Unreadable if they are damaged."""
    saved = read_arrays(path)
    with reading(path):
        epochs = saved["epoch"]
        if epochs.ndim != 1 or epochs.dtype.kind not in "iu":
            raise ValueError("epoch must be a vector of whole numbers")
        if any(array.shape[:1] != epochs.shape for array in saved.values()):
            raise ValueError(f"each array must have {len(epochs)} measurements")
    return saved


def joined(before: Arrays | None, epoch: int, entries: Arrays) -> Arrays:
    """Append one measurement to those saved before (None if there are none)."""
    added = {name: array[None] for name, array in ({"epoch": np.array(epoch)} | dict(entries)).items()}
    return {name: np.concatenate([before[name], array]) for name, array in added.items()} if before else added
