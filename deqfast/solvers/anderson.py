"""Anderson acceleration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._checks import check_choice, check_number
from ..kernels.constants import ANDERSON_I, ANDERSON_II
from ..ops import Kernel
from .base import MixingFn, State
from .multisecant import Multisecant


@dataclass
class MixedState(State):
    """State of a solve with a `mixing_fn`.

    The target of an iterate is the next one without a history. `joint` (B, E + D) is the error and the target of the
    last iterate. Pair i, in slot i mod M of `pairs` (B, M, E + D), is the change of both from iterate i to the next.
    `gram` has the products of their errors, as in ``multisecant_step``. Errors are in a `unit` (B, 1) of each sample,
    so that their squares are in the range of the dtype: a power of two, which changes no bits of the weights.
    """

    slots: int = field(kw_only=True)  # M
    joint: Tensor | None = None  # None, as the other three, until the first evaluation shows E
    unit: Tensor | None = None
    pairs: Tensor | None = None
    gram: Tensor | None = None

    def mix(self, error: Tensor, target: Tensor, k: int, ridge: float) -> Tensor:
        """Iterate k + 1 (B, D): the target, less the changes of targets whose errors make up most of the error.

        Raises:
            ValueError: the error has another number of elements than the first one.
        """
        width, before = error.shape[1], self.joint
        if before is None or self.unit is None or self.pairs is None or self.gram is None:
            largest = error.abs().amax(dim=1, keepdim=True)
            unit = largest / torch.frexp(largest).mantissa
            self.unit = torch.where((unit > 0) & (unit < math.inf), unit, 1)
            shape = len(target), self.slots, width + target.shape[1]
            self.pairs = self.kernel.history(shape, target.dtype, target.device)
            self.gram = self.kernel.products((len(target), self.slots + 2, self.slots), target.dtype, target.device)
        elif before.shape[1] != width + target.shape[1]:
            first = before.shape[1] - target.shape[1]
            raise ValueError(f"mixing_fn's error must keep its {first} numbers per sample, got {width} at call {k + 1}")
        error = error / self.unit
        self.joint = torch.cat([error, target], dim=1)
        if before is not None:
            self._append(self.pairs, self.gram, self.joint - before, k, width)
        newest, count = (torch.full_like(self.iterations, number) for number in (k - 1, min(k, self.slots)))
        vector = torch.cat([error, torch.zeros_like(target)], dim=1)  # its products are those of the errors
        product = self.kernel.op("multisecant_transposed")
        rest = product(vector, self.pairs, self.pairs, self.gram, newest, count, ANDERSON_II, 1.0, 1.0, ridge)
        return target + rest[:, width:]

    def _append(self, pairs: Tensor, gram: Tensor, pair: Tensor, k: int, width: int) -> None:
        """Append pair k - 1 and its products with the others. No op reads slots without a pair, which are undefined."""
        slot, count = (k - 1) % self.slots, min(k, self.slots)
        pairs[:, slot] = pair
        # The order of summation must not depend on the batch: no matrix product, and no sum to a single number.
        products = (pairs[:, : max(count, 2), :width] * pair[:, None, :width]).sum(dim=2)[:, :count]
        gram[:, slot, :count] = products
        gram[:, :count, slot] = products
        gram[:, self.slots :, slot] = products[:, slot, None]


@dataclass(frozen=True)
class Anderson(Multisecant):
    """Anderson acceleration of type II (least squares on the residuals) or I (on the steps).

    Source: Fang and Saad, Numer. Linear Algebra Appl. 16 (2009).

    Args:
        rtol: relative tolerance, in [0, 1[. The tolerance is met if |f(z) - z| <= atol + rtol |f(z)|; see ``Solver``.
        max_iter: calls of f, at least 1.
        atol: absolute tolerance, see ``Solver``; positive if rtol is 0.
        norm: the norm |.|, see ``Solver``.
        min_iter: first call of f at which a sample can converge, from 1 to max_iter; see ``Solver``.
        history_size: pairs kept, at least 1, at most 32 on triton and cuda; None: as for ``Broyden``.
        kind: "II" or "I".
        relaxation: weight of the residual in the step, in ]0, 2].
        ridge: added to the diagonal of the window matrix scaled to unit columns, so that the solve does not depend on
            the scale of z; in [0, 1].
        history_dtype: dtype of the pairs: None for the state's, or torch.bfloat16, which halves the memory.
        mixing_fn: (error, proposal) = mixing_fn(z, fz), called after every evaluation but the last of max_iter, without
            gradient. The error e, a tensor (N, ...) with as many rows as z, takes the place of f(z) - z; its rows have
            the same shape in all calls, and it is cast to the dtype of the solve. The proposal p, a tree like z, takes
            the place of f(z). The next iterate is sum c_i p_i, where the weights c_i of sum 1 minimise |sum c_i e_i|.
            With `relaxation` r, z_i + r (p_i - z_i) replaces p_i. A commutator as e gives CDIIS (Pulay, J. Comput.
            Chem. 3 (1982)). For a preconditioner P, p is z + P (fz - z). Samples still stop by f(z) - z. z and fz are
            the solver's memory: the function must neither modify them nor keep them. Only for kind "II" and
            history_dtype None. With `drop_converged` it is called as mixing_fn(z, fz, rows), as f is. `trajectory` and
            `diagnose` do not pass rows: give `rows` the default None.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> f = lambda z: 0.9 * torch.cos(z) + 1
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5, history_size=4))
        Solution(2 CONVERGED, evaluations=7)

        Elements of very different stiffness, with a preconditioner of one number each:

        >>> slope = torch.tensor([-1.0, -10.0, -100.0])
        >>> f = lambda z: slope * torch.tanh(z) + 1
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5, history_size=1))
        Solution(2 MAX_ITER, evaluations=20)
        >>> newton = lambda z, fz: (fz - z, z + (fz - z) / (1 - slope))
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5, history_size=1, mixing_fn=newton))
        Solution(2 CONVERGED, evaluations=5)
    """

    history_size: int | None = 6
    kind: str = "II"
    relaxation: float = 1.0
    ridge: float = 1e-6
    history_dtype: torch.dtype | None = None
    mixing_fn: MixingFn | None = None  # type: ignore[misc]  # None in the base

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("I", "II"))
        check_number("relaxation", self.relaxation, 0.0, 2.0, low_open=True)
        check_number("ridge", self.ridge, 0.0, 1.0)
        if self.mixing_fn is not None:
            if not callable(self.mixing_fn):
                raise TypeError(f"mixing_fn must be callable, got {self.mixing_fn!r}")
            if self.kind != "II" or self.history_dtype is not None:
                raise ValueError(
                    f"mixing_fn needs kind='II' and history_dtype=None, got {self.kind!r}, {self.history_dtype}"
                )

    def method(self) -> tuple[int, float, float, float]:
        return ANDERSON_I if self.kind == "I" else ANDERSON_II, 1.0, self.relaxation, self.ridge

    def init(self, z: Tensor, kernel: Kernel, keep_inverse: bool = False) -> State:
        if self.mixing_fn is None:
            return super().init(z, kernel, keep_inverse)
        return MixedState.start(z, kernel, slots=self.slots(kernel))

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        if not isinstance(state, MixedState):
            super().advance(state, fz, k, last)
            return
        judge = state.kernel.step("picard_step", state.rule or self.rule(), 0.0)
        judge(state.z, fz, *state.monitor(), k, last)  # z stays as it is
        if last:
            return
        error, proposal = state.mixed
        target = proposal if self.relaxation == 1 else state.z + self.relaxation * (proposal - state.z)
        with torch.autocast(target.device.type, enabled=False):
            z_next = state.mix(error, target, k, self.ridge)
        state.z.copy_(torch.where(state.running[:, None], z_next, state.z))
