"""Samples of several rows, which are judged, accelerated and frozen together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.int16, torch.int32, torch.int64, torch.uint8, torch.int8)


class Groups:
    """Map between the rows of a batch and its samples; made once and used in many calls.

    A call that gets a tensor instead makes the map again, and waits for the device three times. The solvers get one row
    per sample, as long as the longest sample; shorter ones are padded with zeros, which stay zero.

    Args:
        groups: (N,) integers, the sample that each row belongs to, from 0; or "batch" for one sample of all rows.
        rows: N; None: the length of `groups`.
        device: device of the batch; None: the device of `groups`, or the CPU.

    Raises:
        TypeError, ValueError: `groups` is not as above; in a call, z0 has another number of rows or device.

    Examples:
        >>> groups = deqfast.Groups(torch.tensor([0, 0, 1]))
        >>> block = deqfast.DEQBlock(lambda z, x: 0.5 * torch.cos(z) + x)
        >>> for x in torch.randn(2, 3, 4):
        ...     print(block(x, groups=groups, return_solution=True)[1].status.shape)
        torch.Size([2])
        torch.Size([2])
    """

    def __init__(self, groups: Tensor | str, rows: int | None = None, device: torch.device | str | None = None) -> None:
        if rows is None:
            if not isinstance(groups, Tensor) or groups.dim() != 1:
                raise ValueError(f"rows must be given unless groups is a tensor (N,), got {groups!r}")
            rows = len(groups)
        given = groups.device if isinstance(groups, Tensor) else "cpu"
        device = torch.empty(0, device=device or given).device  # "cuda" has no index, "cuda:0" does
        self.index = _checked(groups, rows, device)
        self.rows, self.count = rows, 0
        if isinstance(groups, str):  # one sample, known without reading from the device
            self.count, self.size, self.slots, self.is_whole = min(rows, 1), max(rows, 1), self.index, True
            return
        if rows:
            low, high = torch.stack(self.index.aminmax()).tolist()
            if low < 0 or high >= rows:
                wrong = low if low < 0 else high
                raise ValueError(f"groups must hold sample numbers from 0 to below its length {rows}, got {wrong}")
            self.count = high + 1
        sizes = self.index.bincount(minlength=self.count)
        self.size = int(sizes.max()) if self.count else 1
        order = self.index.argsort(stable=True)
        within = torch.arange(rows, device=device) - (sizes.cumsum(0) - sizes)[self.index[order]]
        # Position of row i among the rows of all samples, each padded to `size` rows.
        self.slots = torch.empty_like(order).index_copy_(0, order, self.index[order] * self.size + within)
        self.is_whole = self.count * self.size == rows and bool((order == torch.arange(rows, device=device)).all())

    def check(self, rows: int, device: torch.device) -> None:
        """Raise ValueError unless these are the number of rows and the device."""
        if (rows, device) != (self.rows, self.index.device):
            raise ValueError(
                f"groups of {self.rows} rows on {self.index.device} cannot serve a z0 of {rows} rows on {device}"
            )

    def gather(self, rows: Tensor) -> Tensor:
        """Samples (B, size * D) of rows (N, D); a view if all are equally long and in order."""
        if not self.is_whole:
            rows = rows.new_zeros(self.count * self.size, rows.shape[1]).index_copy_(0, self.slots, rows)
        return rows.reshape(self.count, self.size * rows.shape[1])

    def scatter(self, samples: Tensor) -> Tensor:
        """Rows (N, D) of samples (B, size * D): the inverse of ``gather``."""
        rows = samples.reshape(self.count * self.size, samples.shape[1] // self.size)
        return rows if self.is_whole else rows.index_select(0, self.slots)

    def repeated(self, times: int) -> Groups:
        """Groups of a batch that repeats the rows of this one; each repetition has samples of its own."""
        shifts = self.count * torch.arange(times, device=self.index.device)
        return Groups((self.index + shifts[:, None]).flatten(), times * self.rows, self.index.device)

    def per_row(self, values: Tensor) -> Tensor:
        """Values (N,) of each row's sample, from values of the samples (B,)."""
        return values.index_select(0, self.index)


def _checked(groups: Any, rows: int, device: torch.device) -> Tensor:
    if isinstance(groups, str) and groups == "batch":
        return torch.zeros(rows, dtype=torch.int64, device=device)
    if not isinstance(groups, Tensor) or groups.dtype not in _DTYPES:
        got = f"a tensor of {groups.dtype}" if isinstance(groups, Tensor) else repr(groups)
        raise TypeError(f"groups must be None, 'batch' or a tensor of integers, got {got}")
    if groups.shape != (rows,) or groups.device != device:
        raise ValueError(
            f"groups must have shape ({rows},) on {device}, as z0 has, got {tuple(groups.shape)} on {groups.device}"
        )
    return groups.to(torch.int64, copy=True)  # the caller may use the memory again


Grouping = Groups | Tensor | str | None
"""Groups of rows as calls take them, see ``solve``."""
