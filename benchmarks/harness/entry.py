"""A case of the benchmarks, and what its providers return to be timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from correctness import accuracy
from torch import Tensor

from deqfast.ops import Kernel, choose_kernel

from .record import Row

KERNELS = ("torch", "cpp", "triton", "cuda")
GRAPHS = ("triton-graph", "cuda-graph")  # whole solves, captured in CUDA graphs
# Not run on that device. "graph" and "packaged" are of section "rivals".
ABSENT = {"cpu": ("triton", "cuda", *GRAPHS, "graph"), "cuda": ("cpp", "packaged", "silva-networks")}
# Code of others: if its answer is wrong, this is a result about it, and no failure of deqfast.
FOREIGN = ("torchdeq", "torchdeq-compiled", "silva-networks", "pinv", "jaxopt", "optimistix")


class Skipped(Exception):
    """Raised if there is nothing to measure here, for a reason that is not a fault."""


class Wrong(AssertionError):
    """Raised if the answer is wrong, so that its time says nothing."""


def fault(error: Exception) -> Row:
    """Column of an error: why a row has no time."""
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    return {"fault": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


@dataclass
class Contender:
    """Provider of a case whose answer has been checked.

    call: the timed call. f: as many calls of f as `call` makes; their time is subtracted. None: nothing is. facts:
    columns of its row that are known before timing. verify: raises ``Wrong`` if timing has left the state in which
    `call` does its full work. another: makes the same call on other tensors, if the call needs no host, so that a GPU
    is timed without one.
    """

    call: Callable[[], Any]
    facts: Row = field(default_factory=dict)
    f: Callable[[], Any] | None = None
    verify: Callable[[], None] = lambda: None
    another: Callable[[], Callable[[], Any]] | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """A case, measured for every provider.

    name: unique in its section and usable with ``pytest -k``. peers: the providers that gains are relative to.
    contender: (provider, device) -> the provider on "cpu" or "cuda"; raises ``Skipped`` or ``Wrong``. full: with
    ``--full`` only. devices: where it is measured.
    """

    section: str
    name: str
    providers: tuple[str, ...]
    peers: tuple[str, ...]
    contender: Callable[[str, str], Contender]
    full: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")

    def providers_on(self, device: str) -> list[str]:
        return [provider for provider in self.providers if provider not in ABSENT[device]]


def crossed(shape: Sequence[int]) -> str:
    """Sizes joined by "x", such as "128x512x4x4"."""
    return "x".join(map(str, shape))


def kernel_of(provider: str, device: str) -> Kernel:
    """Kernel of that name for tensors on `device`; raises ``Skipped`` with the reason if it is not available."""
    if provider == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        raise Skipped("triton is interpreted: no time of use")
    try:
        return choose_kernel(provider, torch.device(device))
    except RuntimeError as error:
        raise Skipped(str(error)) from None


def short(dtype: torch.dtype) -> str:
    """Short name of a dtype, such as "bf16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def check(what: str, reached: float, allowed: float) -> None:
    """Raise ``Wrong`` unless reached <= allowed; NaN is wrong too."""
    if not reached <= allowed:
        raise Wrong(f"wrong: {what} {reached:.2e}, allowed {allowed:.2e}; not timed")


def check_results(actual: Any, plain: Any, exact: Any) -> Row:
    """Column `error` of the worst of several results, by the policy of ``correctness``."""
    judged = [accuracy(*results) for results in zip(actual, plain, exact, strict=True)]
    for error, allowed in judged:
        check("relative error", error, allowed)
    return {"error": max(error for error, _ in judged)}


def on(device: str, tensors: Any) -> list[Any]:
    """Arguments of an op, with its tensors moved to `device`."""
    return [value.to(device) if isinstance(value, Tensor) else value for value in tensors]
