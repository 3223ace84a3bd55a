"""Bytes that an algorithm must move, each tensor read or written once per use. The floors are computed from them.

Any implementation needs at least these, unless data stay in a cache. Counted in passes over the state (B, D), or in
bytes.
"""

from __future__ import annotations

from typing import Any

import torch

import deqfast
from deqfast.ops import Kernel

JUDGED_PASSES = 2  # of an evaluation without a step: reads z and f
KEPT_PASSES = 1  # of an evaluation whose iterate is the best so far: writes it to `best`
PICARD_PASSES = 3 + KEPT_PASSES  # reads z and f, writes z; on a contraction each iterate is the best so far


def width(history_dtype: torch.dtype | None) -> float:
    """Width of an element of the history, in elements of the state, which is float32."""
    return (history_dtype or torch.float32).itemsize / torch.float32.itemsize


def window(solver: Any, kernel: str = "torch") -> int:
    """Most pairs that Anderson or Broyden keeps."""
    return min(solver.history_size or Kernel(kernel).max_history or solver.max_iter, solver.max_iter)


def multisecant_passes(pairs: int, width: float) -> float:
    """Passes of one step with a window of `pairs`, whose iterate need not be the best so far.

    Both sweeps read f and z. One also reads f at the last iterate, the other writes z. Each reads one half of the
    history and writes a row of it.
    """
    return 6 + 2 * width + 2 * width * pairs


def steps_passes(steps: int) -> int:
    """Passes of one step of Broyden's method from `steps` steps only: f and z twice; z, a step, and all steps once."""
    return 6 + steps


def solve_passes(solver: Any, evaluations: int, kernel: str) -> float:
    """Passes of a whole solve without f. The last evaluation is judged, and no step follows.

    kernel: a kernel's name, or "torchdeq", whose history has the dtype of the state.
    """
    steps = range(evaluations - 1)
    if isinstance(solver, deqfast.Picard):
        return PICARD_PASSES * len(steps) + JUDGED_PASSES + KEPT_PASSES
    if isinstance(solver, deqfast.Broyden) and solver.keeps_only_steps(torch.float32, Kernel(kernel)):
        return sum(map(steps_passes, steps)) + JUDGED_PASSES
    wide = width(None if kernel == "torchdeq" else solver.history_dtype)
    return sum(multisecant_passes(min(k, window(solver, kernel)), wide) for k in steps) + JUDGED_PASSES


def norm_bytes(op: str, elements: int, y: int, z: int) -> int:
    """Bytes of a norm_act op on images of `elements`; the convolution's have `y` bytes each, the state's `z` bytes.

    One read is enough for the statistics of both normalisations.
    """
    accumulation = max(y, 4)
    per_element = {
        "norm_act": 2 * y,  # reads y, writes out
        "norm_act_backward": 3 * y,  # reads grad and y, writes grad_y
        "norm_act_residual": y + 2 * z + accumulation,  # reads y, x, z, writes f
        "norm_act_residual_backward": accumulation + y + 4 * z,  # reads grad, y, x, z, writes grad_sum and grad_z
    }
    return elements * per_element[op]


def collapse_bytes(samples: int, dim: int, classes: int, item: int, classifier: bool) -> int:
    """Bytes of three passes: over the features for the means, for the scatter, and for a classifier's decisions.

    The first two also read row numbers of 8 bytes. The first writes the means in float64. The second reads the means,
    and directions, one fewer than the means.
    """
    features = samples * dim * item
    return 2 * (features + 8 * samples) + 8 * dim * (3 * classes - 1) + classifier * features
