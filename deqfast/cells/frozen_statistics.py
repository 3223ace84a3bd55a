"""Batch norm that does not change during a solve."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenStatisticsBatchNorm2d(nn.Module):
    """Batch norm that normalises with its running statistics always, so that it is one function during a solve.

    In training mode, evaluations that are differentiated (the adjoint's, after the solve) measure the batch; when the
    solve is over the running statistics take up the mean of these measurements. Only during the first solve of all do
    they follow every evaluation: with the initial variance of 1, a cell that grows has no fixed point. State as
    nn.BatchNorm2d's, whose `num_batches_tracked` counts solves here.

    Args:
        channels: C of the images (B, C, H, W).
        eps: added to the variance.
        momentum: share of a new measurement in the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self._started = False  # a solve is known to be over: asking the buffer waits for a GPU
        self._measured: tuple[Tensor, int] | None = None  # sum of (mean, variance), and number of measurements

    def _has_started(self) -> bool:
        self._started = self._started or bool(self.num_batches_tracked)
        return self._started

    def has_settled(self) -> bool:
        """Answer whether solves to come leave the statistics alone: a captured solve could not follow them."""
        return not self.training or self._has_started()

    def _follow(self, statistics: Tensor, momentum: float) -> None:
        with torch.no_grad():
            self.running_mean.lerp_(statistics[0], momentum)
            self.running_var.lerp_(statistics[1], momentum)

    def _measure(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[1]:
            raise ValueError(f"batch norm in training needs more than one value per channel, got {tuple(x.shape)}")
        var, mean = torch.var_mean(x.detach().to(self.running_mean.dtype), dim=(0, 2, 3))
        return torch.stack([mean, var])

    def end_solve(self) -> None:
        """Take up what the differentiated evaluations of this solve have measured; called by DEQBlock."""
        if not self.training:
            return
        if self._has_started() and self._measured is not None:
            self._follow(self._measured[0] / self._measured[1], self.momentum)
        self._measured = None
        self.num_batches_tracked.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, H, W); ValueError in training where a channel has one value only."""
        if self.training and not self._has_started():
            self._follow(self._measure(x), 1.0)
        elif self.training and torch.is_grad_enabled():
            total, count = self._measured or (0, 0)
            self._measured = total + self._measure(x), count + 1
        # Copies, because the statistics change before the backward pass reads them.
        mean, var = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
