"""Solvers: frozen hyper-parameters, whose state ``init`` makes and ``advance`` updates in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .._checks import ChecksKeywords, check_choice, check_count, check_number
from ..kernels.constants import MAX_ITERATIONS, RUNNING
from ..ops import Kernel
from ..ops.steps import StopRule
from ..ops.steps.loops import state_begin
from ..state.packing import Packing

Step = Callable[[Tensor, int, bool], int | None]
"""Step from f(z), k and last; it returns the number of samples that still run, if the host knows it."""
# With atol / rtol above this, float32 could not represent the residuals.
MAX_ATOL = 1e20


@dataclass
class State:
    """Tensors of a running solve; see ``deqfast.ops`` for their shapes and meaning."""

    kernel: Kernel
    z: Tensor
    best: Tensor
    status: Tensor
    iterations: Tensor
    residual: Tensor
    progress: Tensor
    active: Tensor
    rule: StopRule | None = None  # known once f has returned its first value
    trace: Tensor | None = None  # (max_iter, 2, B): `residual` after every evaluation, if recorded

    @classmethod
    def start(cls, z: Tensor, kernel: Kernel, **more: Any) -> State:
        """State before the first value of f; `more` are the fields that a subclass adds."""
        # One op: six take as long as a short solve.
        is_op = kernel.name == "cpp" and not kernel.in_graph
        return cls(kernel, z, *(torch.ops.deqfast.state_begin.default if is_op else state_begin)(z), **more)

    @property
    def running(self) -> Tensor:
        """Mask (B,) of the samples that have not ended."""
        return self.status.eq(RUNNING)

    def iterations_at(self, k: int) -> Tensor | int:
        """Evaluations that the running samples have used with evaluation k."""
        return k + 1

    def restart(self, z: Tensor) -> None:
        """Start again from `z` (B, D), in the same memory."""
        self.z.copy_(z)
        self.best.copy_(z)
        self.status.zero_()
        self.iterations.zero_()
        self.residual.fill_(math.inf)
        self.progress.fill_(math.inf)
        self.active.fill_(z.shape[0])

    def carry(self) -> None:
        """Move what the next step reads to the same memory after each pass of a loop on the device."""

    def monitor(self) -> tuple[Tensor, ...]:
        """Tensors by which every step op judges its samples, in the order of its arguments."""
        return self.best, self.status, self.iterations, self.residual, self.progress, self.active


@dataclass(frozen=True)
class Solver(ChecksKeywords):
    """Base of the solvers, your own too: a frozen dataclass of hyper-parameters with ``init`` and ``advance``.

    With g = f(z) - z and g0 = f(z0) - z0, a sample has converged if |g| <= atol + rtol |f(z)| and it has not run away,
    which means one of these:

    - |f(z)| <= 2 max(|f(z0)|, |g0|) and |g| <= |g0|;
    - |g| + eps |f(z)| <= max(atol, c |g0|), with c = min(0.1, 100 rtol), or min(0.1, 100 atol) if rtol is 0.

    eps is the unit of f's rounding. The residual is |g| / (|f(z)| + atol / rtol), or |g| if rtol is 0. The page
    Concepts has reasons and limits of this rule, under Stopping.

    deqfast does the loop, stopping, packing of pytrees and gradients. A solver of your own overrides:

    - ``init(z, kernel)``: returns the state of a solve, which owns z from then on: ``State.start(z, kernel)`` of
      ``deqfast.solvers.base``, or of a subclass with more tensors. z is (B, D), float32 or float64, a row per sample.
    - ``advance(state, fz, k, last)``: judges fz = f(z), (B, D), the value number k from 0, and steps `state.z` in
      place. Unless `last`, f is called next with `state.z`. The op ``picard_step`` judges: it updates residuals, status
      and best iterates, and steps to z + r (fz - z) for its last argument r. Rows of samples that do not run must
      stay as they are. f may reuse the memory of fz later.
    - ``bind(state)``, also, to do once what is the same in all steps.
    - ``operation(state)``, instead of ``advance``, if a step is one op of the kernels.
    - ``wrap(f, packing, state)``, if a step needs more of f's value than its rows.
    - ``patience`` and ``resume``, if samples that are done may run again.

    No more is needed for the options of ``solve``, most adjoints, ``torch.func`` and ``torch.compile``. Other features
    need this:

    - `drop_converged`: no running row may depend on rows of fz whose samples are done, which are undefined.
    - `compile`, `cuda_graph` and ``torch.export`` serve only ``Picard``, ``Anderson`` and ``Broyden``. ``SHINE`` serves
      only the last two.

    Args:
        rtol: relative tolerance, at least 0 and less than 1.
        max_iter: calls of f, at least 1 and at most 2^31 - 1.
        atol: absolute tolerance, for fixed points at or near zero. If rtol is 0, it is positive, else at least 0 and at
            most 1e20 rtol.
        norm: |.| of a sample: "euclidean", or "max", the largest magnitude of its elements.

    Raises:
        TypeError, ValueError: an argument is not as above. The text names it.

    Examples:
        Steps that shrink:

        >>> class Shrinking(deqfast.Solver):
        ...     def init(self, z, kernel):
        ...         return deqfast.solvers.base.State.start(z, kernel)
        ...
        ...     def advance(self, state, fz, k, last):
        ...         step = state.kernel.op("picard_step")
        ...         step(state.z, fz, *state.monitor(), k, last, *state.rule, 1 / (1 + 0.1 * k))
        >>> deqfast.solve(torch.cos, torch.zeros(2, 3), Shrinking(rtol=1e-4))
        Solution(2 CONVERGED, evaluations=8)
    """

    rtol: float = 1e-3
    max_iter: int = 20
    atol: float = field(default=0.0, kw_only=True)
    norm: str = field(default="euclidean", kw_only=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Real) and not isinstance(value, (int, float)):  # numpy's numbers, which no op takes
                object.__setattr__(self, each.name, int(value) if isinstance(value, Integral) else float(value))
        check_number("rtol", self.rtol, 0.0)
        if self.rtol >= 1:
            raise ValueError(f"rtol must be less than 1, or z = 0 would have converged, got {self.rtol!r}")
        check_count("max_iter", self.max_iter, high=MAX_ITERATIONS)
        check_number("atol", self.atol, 0.0, math.inf if self.is_absolute else MAX_ATOL * self.rtol)
        if not self.tol:
            raise ValueError("rtol and atol must not both be 0, or only an exact fixed point would converge")
        check_choice("norm", self.norm, ("euclidean", "max"))

    @property
    def tol(self) -> float:
        """Bound on the residual: rtol, or atol if rtol is 0."""
        return self.atol if self.is_absolute else self.rtol

    @property
    def is_absolute(self) -> bool:
        """True if rtol is 0: the residual is then |f(z) - z|."""
        return self.rtol == 0

    @property
    def offset(self) -> float:
        """Summand of |f(z)| in the relative residual."""
        return 0.0 if self.is_absolute else self.atol / self.rtol

    def init(self, z: Tensor, kernel: Kernel) -> State:
        """State of a solve from `z` (B, D), which the state owns from now on."""
        raise NotImplementedError(f"{type(self).__name__} must define init(z, kernel), as State.start(z, kernel)")

    def wrap(self, f: Callable[..., Any], packing: Packing, state: State) -> Callable[..., Any]:
        """Return what the loop calls in place of f, as f(z), or as f(z, rows) with `drop_converged`."""
        return f

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        """Judge f(z) = `fz` (B, D), the value number `k` from 0, and step; `fz` is kept until the next step."""
        self.launcher(state)(fz, k, last)

    def bind(self, state: State) -> Step:
        """``advance`` for one state, as a function of fz, k and last: what is the same in all steps is done once."""
        is_own = type(self).advance is not Solver.advance
        return partial(self.advance, state) if is_own else self.launcher(state)

    def launcher(self, state: State) -> Step:
        """Step by the solver's op."""
        name, tensors, numbers = self.operation(state)
        return state.kernel.bind(name, state.z, state.monitor() + tensors, state.rule or self.rule(), *numbers)

    @property
    def patience(self) -> int:
        """Evaluations between two checks whether to ``resume`` samples; 0: no checks."""
        return 0

    def resume(self, state: State, k: int, max_iter: int) -> int:
        """Let samples run again after k evaluations; return the number of the next one, max_iter if there is none."""
        return max_iter

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        """Name of the step op, its tensors after the monitor's, and its numbers after the rule's."""
        raise NotImplementedError(f"{type(self).__name__} must define advance(state, fz, k, last), or operation(state)")

    def rule(self, stall_floor: float = 0.0) -> StopRule:
        """Return the numbers by which every step op judges its samples; stall_floor: see ``StopRule``."""
        return StopRule(self.tol, self.is_absolute, stall_floor, self.offset, self.norm == "max")
