"""Results of a solve."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ._checks import matplotlib_figure
from .torch_internals.transforms import values

FEW = 64  # samples that Python counts faster than torch


class Status(IntEnum):
    """Outcome of a sample's solve; `message` says it in a sentence.

    Attributes:
        CONVERGED: the residual met the tolerance at a fixed point, see ``Solver``.
        NONFINITE: f returned NaN or infinity.
        STALLED: the residual reached the rounding floor of an f in bfloat16, float16 or TF32, above the tolerance.
        INCONSISTENT: the residual met the tolerance in the solve, but not when f was called again at z* for the
            gradient. Then f couples the samples, see `groups` of ``solve``, or changes between calls.
        STOPPED: the caller's rule `stop_fn` ended the solve of the sample.
        MAX_ITER: f was called max_iter times, and no iterate met the tolerance.
        ESCAPED: f was called max_iter times. A residual met the tolerance only because f(z) had grown, see ``Solver``.

    Examples:
        >>> solution = deqfast.solve(torch.cos, torch.zeros(1, 3))
        >>> deqfast.Status(int(solution.status[0])).message
        'The residual met the tolerance at a fixed point.'
        >>> bool((solution.status == deqfast.Status.CONVERGED).all())
        True
    """

    CONVERGED = 1
    NONFINITE = 2
    STALLED = 3
    INCONSISTENT = 4
    STOPPED = 5
    MAX_ITER = 6
    ESCAPED = 7

    @property
    def message(self) -> str:
        """Sentence that says what the status means."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "The residual met the tolerance at a fixed point.",
    Status.NONFINITE: "f returned a value that is not finite; the best finite iterate is returned.",
    Status.STALLED: "The residual reached the rounding floor of a low-precision f above the tolerance.",
    Status.INCONSISTENT: "The residual met the tolerance in the solve, but not in another call of f at its answer.",
    Status.STOPPED: "The rule `stop_fn` ended the solve; the iterate that it was given is returned.",
    Status.MAX_ITER: "The evaluations of f ran out before the tolerance was met; the best iterate is returned.",
    Status.ESCAPED: "The iterates ran away: the residual is small only relative to them; the best iterate is returned.",
}


CODES = len(Status) + 1  # the running have code 0


def count_statuses(status: Tensor) -> list[int]:
    """Return the number of samples of each status, by its code; waits for the device."""
    codes = values(status)
    if codes.numel() > FEW:
        counts: list[int] = torch.bincount(codes.flatten(), minlength=CODES).tolist()
        return counts
    counts = [0] * CODES
    for code in codes.tolist() if codes.dim() == 1 else codes.flatten().tolist():
        counts[code] += 1
    return counts


class Arriving:
    """Integers that a device is sending to the host; here the status of each sample.

    Args:
        numbers: on the device.
        stream: torch's present stream there; None: it is looked up.
    """

    def __init__(self, numbers: Tensor, stream: Any = None) -> None:
        pinned = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        self._numbers, self._are_here = pinned.copy_(numbers, non_blocking=True), False
        self.event = (stream or torch.cuda.current_stream(numbers.device)).record_event()

    def has_arrived(self) -> bool:
        """Return whether reading would not wait."""
        self._are_here = self._are_here or self.event.query()
        return self._are_here

    def read(self) -> Tensor:
        """Return the integers, on the CPU; waits for them."""
        if not self._are_here:
            self.event.synchronize()
            self._are_here = True
        return self._numbers

    def counts(self) -> list[int]:
        """Return the number of samples of each status, by its code; waits for them."""
        return count_statuses(self.read())


@dataclass(frozen=True)
class Solution:
    """Outcome of a solve for a batch of B samples, all without gradient.

    Attributes:
        value: a tree like z0. For each sample, the iterate whose residual is reported: the converged one, else the
            finite one of least |f(z) - z| + eps |f(z)|, else z0. Up to rounding, its residual |f(z) - z| is at most
            that at z0. For STOPPED, ``Unrolled`` and ``Reversible`` it is the last iterate. An unfinished causal solve
            has the best iterate of each position, and the residual of its last position in one evaluation.
        status: (B,) int8 of ``Status``.
        iterations: (B,) int32, the evaluations of f until the sample's status was set.
        residual: (B,) what the solver judged by: residual_abs if its `rtol` is 0, else residual_rel.
        residual_rel: (B,) |f(z) - z| / (|f(z)| + atol / rtol) at `value`, in the solver's norm. The denominator is
            |f(z)| if atol or rtol is 0. Infinite if f was never finite.
        residual_abs: (B,) |f(z) - z| at `value`, or infinite likewise. `scale` divides z for all residuals.
        evaluations: calls of f in the solve, without the gradient's. Reading it waits for a captured solve to end.
        sample_evaluations: samples (if causal, positions) in all these calls; fewer with `drop_converged`.
        trace: (evaluations, B) residual of the best iterate after every evaluation; None if it was not recorded.
        trace_rel: the trace of ``residual_rel``, or None.
        trace_abs: the trace of ``residual_abs``, or None.
        position_iterations: (B, T) int32 of a causal solve, not compiled: the `iterations` of each position.

    Examples:
        >>> slope = torch.tensor([[0.5], [1.0]])
        >>> solution = deqfast.solve(lambda z: slope * z + 1, torch.zeros(2, 3), deqfast.Picard(max_iter=15))
        >>> solution
        Solution(1 CONVERGED, 1 MAX_ITER, evaluations=15)
        >>> solution.converged.tolist(), solution.iterations.tolist()
        ([True, False], [10, 15])
    """

    value: Any
    status: Tensor
    iterations: Tensor
    residual: Tensor
    residual_rel: Tensor
    residual_abs: Tensor
    evaluations: int
    sample_evaluations: int
    trace: Tensor | None = None
    trace_rel: Tensor | None = None
    trace_abs: Tensor | None = None
    position_iterations: Tensor | None = None
    arriving: Arriving | None = field(default=None, repr=False, compare=False)  # the counts of these statuses
    inverse: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)  # of a solve that keeps it

    def changed(self, **changes: Any) -> Solution:
        """Return this solution with other fields. Unlike ``dataclasses.replace`` it waits for nothing."""
        return type(self)(**{each.name: self.__dict__[each.name] for each in fields(self)} | changes)

    @functools.cached_property
    def counts(self) -> list[int] | None:
        """Number of samples of each status, by its code; None unless on a CPU, as reading them would wait."""
        return count_statuses(self.status) if self.status.device.type == "cpu" else None

    def may_include(self, *statuses: Status) -> bool:
        """Return whether a sample has one of these statuses; True if reading that would wait for a GPU."""
        counts = self.counts
        return counts is None or any([counts[status] for status in statuses])

    @property
    def converged(self) -> Tensor:
        """Samples with the status CONVERGED, (B,) bool."""
        return self.status == Status.CONVERGED

    def plot(self) -> Any:
        """Return a matplotlib figure of the trace: the residual of each sample's best iterate after every evaluation.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the solve had no trace.
        """
        if self.trace is None:
            raise ValueError("plot needs a trace, got trace=None: pass trace=True to the block or to solve")
        figure = matplotlib_figure("Solution.plot", 6, 3.4)
        axes = figure.subplots()
        axes.semilogy(range(1, len(self.trace) + 1), self.trace.cpu())
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="evaluation", ylabel="residual of the best iterate", title="a line per sample")
        return figure

    def __repr__(self) -> str:
        ended = self.status.tolist()
        counts = ", ".join(f"{ended.count(status)} {status.name}" for status in Status if status in ended)
        return f"Solution({counts or 'empty batch'}, evaluations={self.evaluations})"


class Late:
    """Value of a field that is work(*tensors) when it is first read, which may wait."""

    def __init__(self, work: Callable[..., Any], *tensors: Tensor) -> None:
        self.work, self.tensors = work, tensors

    def __call__(self) -> Any:
        return self.work(*self.tensors)

    def then(self, work: Callable[..., Any], *tensors: Tensor) -> Late:
        """The late work(*tensors, this value)."""
        first = len(tensors)
        return Late(lambda *given: work(*given[:first], self.work(*given[first:])), *tensors, *self.tensors)


class _LateField:
    """Field that may be given as a ``Late``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, solution: Solution, owner: type) -> Any:
        value = solution.__dict__[self.name]
        if isinstance(value, Late):
            value = solution.__dict__[self.name] = value()
        return value

    def __set__(self, solution: Solution, value: Any) -> None:
        solution.__dict__[self.name] = value


class LateSolution(Solution):
    """Solution whose numbers a device still computes: each is a ``Late`` until it is read."""

    evaluations: Any = _LateField()
    sample_evaluations: Any = _LateField()
    trace: Any = _LateField()
    trace_rel: Any = _LateField()
    trace_abs: Any = _LateField()

    def __getstate__(self) -> dict[str, Any]:
        """State with the numbers, for which this waits."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"arriving": None}
