"""Anderson acceleration with the caller's own errors and proposals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._checks import check_callable, check_count, check_number
from ..kernels.constants import ANDERSON_II
from ..ops import Kernel
from ..state.evaluation import countable, evaluate, versions
from ..state.packing import Packing
from ..torch_internals import pytree
from .base import Solver, State
from .multisecant import slots

MixingFn = Callable[..., tuple[Tensor, Any]]


@dataclass
class _Pairs:
    """Pairs of a solve, made when the first evaluation shows the error's E numbers per sample.

    The target of an iterate is the next one without a history. `joint` (B, E + D) is the error and the target of the
    last iterate. Pair i, in slot i mod M of `pairs` (B, M, E + D), is the change of both from iterate i to the next.
    `gram` has the products of their errors, as in ``multisecant_step``. Errors are in a `unit` (B, 1) of each sample,
    so that their squares are in the range of the dtype: a power of two, which changes no bits of the weights.
    """

    joint: Tensor
    unit: Tensor
    pairs: Tensor
    gram: Tensor

    @classmethod
    def start(cls, error: Tensor, target: Tensor, slots: int, kernel: Kernel) -> _Pairs:
        largest = error.abs().amax(dim=1, keepdim=True)
        unit = largest / torch.frexp(largest).mantissa
        unit = torch.where((unit > 0) & (unit < math.inf), unit, 1)
        joint = torch.cat([error / unit, target], dim=1)
        pairs = kernel.history((len(joint), slots, joint.shape[1]), joint.dtype, joint.device)
        return cls(joint, unit, pairs, kernel.products((len(joint), slots + 2, slots), joint.dtype, joint.device))

    def append(self, error: Tensor, target: Tensor, k: int) -> None:
        """Append pair k - 1 and its products with the others. No op reads slots without a pair, which are undefined."""
        width, first, slots = error.shape[1], self.joint.shape[1] - target.shape[1], self.pairs.shape[1]
        if width != first:
            raise ValueError(f"mixing_fn's error must keep its {first} numbers per sample, got {width} at call {k + 1}")
        before, self.joint = self.joint, torch.cat([error / self.unit, target], dim=1)
        pair, slot, count = self.joint - before, (k - 1) % slots, min(k, slots)
        self.pairs[:, slot] = pair
        # The order of summation must not depend on the batch: no matrix product, and no sum to a single number.
        products = (self.pairs[:, : max(count, 2), :width] * pair[:, None, :width]).sum(dim=2)[:, :count]
        self.gram[:, slot, :count] = products
        self.gram[:, :count, slot] = products
        self.gram[:, slots:, slot] = products[:, slot, None]


@dataclass
class MixedState(State):
    """State of a solve."""

    slots: int = field(kw_only=True)  # M
    history: _Pairs | None = None  # known once `mixing_fn` has returned its first error
    calls: int = 0  # of f
    mixed: tuple[Tensor, Tensor] | None = None  # rows of error (B, E) and proposal (B, D) at the present iterate

    def mix(self, error: Tensor, target: Tensor, k: int, ridge: float) -> Tensor:
        """Iterate k + 1 (B, D): the target, less the changes of targets whose errors make up most of the error.

        Raises:
            ValueError: the error has another number of elements than the first one.
        """
        if self.history is None:
            self.history = _Pairs.start(error, target, self.slots, self.kernel)
        else:
            self.history.append(error, target, k)
        width, pairs, gram = error.shape[1], self.history.pairs, self.history.gram
        newest, count = (torch.full_like(self.iterations, number) for number in (k - 1, min(k, self.slots)))
        # Its products are those of the errors.
        vector = torch.cat([self.history.joint[:, :width], torch.zeros_like(target)], dim=1)
        rest: Tensor = self.kernel.op("multisecant_transposed")(
            vector, pairs, pairs, gram, newest, count, ANDERSON_II, 1.0, 1.0, ridge
        )
        return target + rest[:, width:]


@dataclass(frozen=True)
class MixedAnderson(Solver):
    """Anderson acceleration of type II with your own errors and proposals: CDIIS, or with a preconditioner.

    Source: Pulay, J. Comput. Chem. 3 (1982). Exports, CUDA graphs, compiled solves, torch.func and ``SHINE`` refuse
    this solver.

    Args:
        rtol, max_iter, atol, norm: see ``Solver``.
        history_size: pairs kept, at least 1, at most 32 on triton and cuda; None: as for ``Broyden``.
        relaxation: weight r of the proposal: z_i + r (p_i - z_i) replaces p_i. In (0, 2].
        ridge: added to the diagonal of the window matrix scaled to unit columns, so that the solve does not depend on
            the scale of the errors; in [0, 1].
        mixing_fn: (error, proposal) = mixing_fn(z, fz), called after every evaluation but the last of max_iter, without
            gradient. The error e, a tensor (N, ...) with as many rows as z, takes the place of f(z) - z; its rows have
            the same shape in all calls, and it is cast to the dtype of the solve. The proposal p, a tree like z, takes
            the place of f(z). The next iterate is sum c_i p_i, where the weights c_i of sum 1 minimise |sum c_i e_i|.
            A commutator as e gives CDIIS. For a preconditioner P, p is z + P (fz - z). Samples still stop by f(z) - z.
            z and fz are the solver's memory: the function must neither modify them nor keep them. With
            `drop_converged` it is called as mixing_fn(z, fz, rows), as f is. `trajectory` and `diagnose` do not pass
            rows: give `rows` the default None.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        Elements of very different stiffness, with a preconditioner of one number each:

        >>> slope = torch.tensor([-1.0, -10.0, -100.0])
        >>> f = lambda z: slope * torch.tanh(z) + 1
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5, history_size=1))
        Solution(2 MAX_ITER, evaluations=20)
        >>> newton = lambda z, fz: (fz - z, z + (fz - z) / (1 - slope))
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.MixedAnderson(rtol=1e-5, history_size=1, mixing_fn=newton))
        Solution(2 CONVERGED, evaluations=5)
    """

    history_size: int | None = 6
    relaxation: float = 1.0
    ridge: float = 1e-6
    mixing_fn: MixingFn = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history_size is not None:
            check_count("history_size", self.history_size)
        check_number("relaxation", self.relaxation, 0.0, 2.0, low_open=True)
        check_number("ridge", self.ridge, 0.0, 1.0)
        check_callable("mixing_fn", self.mixing_fn)

    def init(self, z: Tensor, kernel: Kernel) -> State:
        return MixedState.start(z, kernel, slots=slots(self.history_size, self.max_iter, kernel))

    def wrap(self, f: Callable[..., Any], packing: Packing, state: State) -> Callable[..., Any]:
        assert isinstance(state, MixedState)

        def wrapped(z: Any, *rows: Tensor | None) -> Any:
            value = evaluate(f, z, *rows)
            state.calls += 1
            if state.calls < self.max_iter:
                state.mixed = self._mixed(packing, z, value, *rows)
            return value

        return wrapped

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        assert isinstance(state, MixedState)
        judge = state.kernel.step("picard_step", state.rule or self.rule(), 0.0)
        judge(state.z, fz, *state.monitor(), k, last)  # z stays as it is
        if last:
            return
        assert state.mixed is not None
        error, proposal = state.mixed
        target = proposal if self.relaxation == 1 else state.z + self.relaxation * (proposal - state.z)
        with torch.autocast(target.device.type, enabled=False):
            z_next = state.mix(error, target, k, self.ridge)
        state.z.copy_(torch.where(state.running[:, None], z_next, state.z))

    def _mixed(self, packing: Packing, z: Any, value: Any, *which: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows (B, E) of the error and (B, D) of the proposal at z, in memory of their own; undefined if left out.

        Raises:
            TypeError, ValueError: `mixing_fn` writes to its arguments or returns another pair.
        """
        rows = which[0] if which else None
        part = packing if rows is None else packing.resized(len(rows))
        part.check_value(value)
        shown = pytree.tree_map_only(Tensor, countable, value)
        before = versions((z, shown))
        returned = self.mixing_fn(z, shown, *which)
        if versions((z, shown)) != before:
            raise ValueError("mixing_fn must not modify its arguments, got one that works in place on z or f(z)")
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"mixing_fn must return a tuple (error, proposal), got {type(returned).__name__}")
        error = part.pack_numbers("mixing_fn's error", returned[0]).clone()
        try:
            proposal = part.rows_of_value(returned[1]).clone()
        except (TypeError, ValueError) as wrong:
            raise type(wrong)(f"mixing_fn's proposal must be as f's value, whose place it takes: {wrong}") from None
        if rows is None:
            return error, proposal
        error, proposal = (t.new_empty(packing.batch, t.shape[1]).index_copy_(0, rows, t) for t in (error, proposal))
        return error, proposal
