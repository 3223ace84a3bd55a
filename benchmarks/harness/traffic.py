"""The bytes that an algorithm must move, each tensor read or written once per use: what the floors are made of.

Whatever computes the same needs no less unless data stay in a cache. In passes over the state (B, D), or in bytes.
"""

from __future__ import annotations

from typing import Any

import torch

import deqfast

PICARD_PASSES = 3  # reads z and f, writes z


def width(history_dtype: torch.dtype | None, state: torch.dtype = torch.float32) -> float:
    """Of an element of the history, in elements of the state."""
    return (history_dtype or state).itemsize / state.itemsize


def multisecant_passes(pairs: int, width: float) -> float:
    """Of one step with a window of `pairs`.

    Both sweeps read f and z, one f at the last iterate, the other writes z; each reads a half of the history and writes
    a row of it.
    """
    return 6 + 2 * width + 2 * width * pairs


def transposed_passes(pairs: int, width: float) -> float:
    """Of a product with the transposed inverse: reads v twice and both halves of the history, writes the product."""
    return 3 + 2 * width * pairs


def solve_passes(solver: Any, evaluations: int) -> float:
    """Of a whole solve without f: the step after the last evaluation is not made."""
    if isinstance(solver, deqfast.Picard):
        return PICARD_PASSES * evaluations
    sizes = [min(k, solver.history or solver.max_iter) for k in range(evaluations - 1)]
    return sum(multisecant_passes(pairs, width(solver.history_dtype)) for pairs in sizes)


def norm_bytes(op: str, elements: int, y: int, z: int) -> int:
    """Of a norm_act op on images of `elements`, those of the convolution `y` and of the state `z` bytes wide.

    The statistics of both normalisations can be taken from what is read once.
    """
    accumulation = max(y, 4)
    per_element = {
        "norm_act": 2 * y,  # reads y, writes out
        "norm_act_backward": 3 * y,  # reads grad and y, writes grad_y
        "norm_act_residual": y + 2 * z + accumulation,  # reads y, x, z, writes f
        "norm_act_residual_backward": accumulation + y + 4 * z,  # reads grad, y, x, z, writes grad_sum and grad_z
    }
    return elements * per_element[op]


def fc_vjp_bytes(batch: int, dim: int) -> int:
    """Reads the argument of the activation and the gradient, writes a gradient."""
    return 3 * batch * dim * 4


def class_means_bytes(samples: int, dim: int, classes: int, item: int) -> int:
    """Reads the features and their row numbers, writes the means in float64."""
    return samples * (dim * item + 8) + 8 * classes * dim


def scatter_bytes(samples: int, dim: int, classes: int, directions: int, item: int) -> int:
    """Reads the features, their row numbers, the means and the directions."""
    return samples * (dim * item + 8) + 8 * dim * (classes + directions)


def collapse_bytes(samples: int, dim: int, classes: int, item: int) -> int:
    """NC1 to NC4: one pass over the features for the means, one for the scatter, one for the classifier's decisions."""
    directions = classes - 1
    passes = class_means_bytes(samples, dim, classes, item) + scatter_bytes(samples, dim, classes, directions, item)
    return passes + samples * dim * item
