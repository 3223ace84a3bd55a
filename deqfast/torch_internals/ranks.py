"""Processes that solve together: their groups, and the numbers that they exchange."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DTENSORS = "torch.distributed.tensor"  # the module without which no DTensor exists
_FAILED = 1 << 30  # above all numbers that are exchanged; a rank that has failed adds its own number


@dataclass(frozen=True)
class Ranks:
    """Processes that call a cell equally often, or that have parts of each sample.

    groups: their process groups, one for each dimension of a mesh: a maximum over one after the other is over all.
    """

    groups: tuple[Any, ...]

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a process group cannot be copied

    def most(self, numbers: Tensor) -> Tensor:
        """Replace these numbers by the largest of all ranks, infinite for NaN, and return them."""
        if numbers.is_floating_point():  # the maximum of NaN and a number depends on the backend
            numbers.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def sum(self, numbers: Tensor) -> Tensor:
        """Replace these numbers by their sums over all ranks, and return them."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def _reduced(self, numbers: Tensor, by: Any) -> Tensor:
        for group in self.groups:
            dist.all_reduce(numbers, by, group=group)
        return numbers


def as_ranks(name: str, group: Any) -> Ranks | None:
    """The processes of a group; None for None.

    Raises:
        TypeError: `group` is not a process group.
    """
    if group is None or isinstance(group, Ranks):
        return group
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"{name} must be a process group, such as torch.distributed.group.WORLD, got {group!r}")
    return Ranks((group,))


def ranks_of(modules: Iterable[nn.Module]) -> Ranks | None:
    """Processes that share the weights of these modules by DTensors; None if there are no others."""
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for module in modules for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
    groups = dict.fromkeys(group for mesh in dict.fromkeys(meshes) for group in mesh.get_all_groups())
    shared = tuple(group for group in groups if group.size() > 1)
    return Ranks(shared) if shared else None


class InStep:
    """A solve that all ranks end together, as a context in which they exchange numbers.

    If a rank raises an error in it, the others raise one at their next exchange, the last of which ends the context.
    An error within collectives of f is not among these: torch ends the others after the timeout of their group. Nor is
    any error if ranks have `parts` of samples: the others wait in the exchange of a step.
    """

    def __init__(self, ranks: Ranks, device: torch.device, parts: Ranks | None = None) -> None:
        self.ranks, self.device, self.tells = ranks, device, parts is None
        self._is_over = False  # this rank takes part in no more exchanges

    def most(self, number: int | Tensor) -> int:
        """Largest of the ranks' numbers, each an integer or a tensor (1,) int32.

        Raises:
            RuntimeError: another rank has failed.
        """
        self._is_over = True  # if interrupted: a signal that arrives in an exchange is handled after it
        numbers = torch.tensor([number], dtype=torch.int32, device=self.device) if isinstance(number, int) else number
        largest = int(self.ranks.most(numbers.clone()))
        if largest >= _FAILED:
            raise RuntimeError(
                f"deqfast: the solve has ended because rank {largest - _FAILED} has raised an error, which its own "
                "output shows"
            )
        self._is_over = False
        return largest

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is true."""
        return self.most(int(flag)) > 0

    def __enter__(self) -> InStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.most(0)
        elif self.tells and not self._is_over:
            self._is_over, rank = True, dist.get_rank()
            # At once: if the others wait in a collective of f, torch may end this process in the exchange.
            print(f"deqfast: rank {rank} ends the solve: {error!r}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):  # this rank's own error says more
                self.ranks.most(torch.tensor([_FAILED + rank], dtype=torch.int32, device=self.device))
