"""Common part of Broyden and Anderson: a window of secant pairs in the pair form of the multisecant family.

z <- z + alpha (beta g - DF gamma), N gamma = L^T g with g = f(z) - z, DF the differences of f and L the steps or the
differences of g. Broyden's product of rank-one updates in this form: Byrd, Nocedal and Schnabel, Math. Programming 63
(1994); Anderson as a multisecant method: Fang and Saad, Numer. Linear Algebra Appl. 16 (2009).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._checks import check_count
from ..ops import Kernel, empty_history, empty_products
from ..torch_internals.dynamo import is_exporting
from .base import Solver, State

HISTORY_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class MultisecantState(State):
    """State of a solve with a window of pairs; see ``multisecant_step`` in ``deqfast.ops`` for its tensors."""

    f_prev: Tensor = field(kw_only=True)  # f at the previous iterate
    left: Tensor = field(kw_only=True)
    df: Tensor = field(kw_only=True)
    gram: Tensor = field(kw_only=True)
    raw: Tensor | None = None  # what f returned last, held so that its memory is not handed out again
    reuses_buffer: bool = False  # f writes all its values to one buffer

    def restart(self, z: Tensor) -> None:
        super().restart(z)
        self.raw, self.reuses_buffer = None, False

    def keep(self, fz: Tensor, k: int) -> None:
        """Keep f's value for the next step: without a copy, unless f overwrites it."""
        self.raw = fz
        self.f_prev = fz.clone() if k == 0 or self.reuses_buffer else fz

    def check_buffer(self, fz: Tensor, k: int) -> None:
        """Notice an f that returns its previous value's memory; the first value was copied for this case."""
        if is_exporting():  # values of a graph have memory of their own
            return
        if self.raw is None or fz.data_ptr() != self.raw.data_ptr() or self.reuses_buffer:
            return
        if k > 1:
            raise RuntimeError(f"f returned, at call {k + 1}, the memory of its previous value; return a fresh tensor")
        self.reuses_buffer = True


class Multisecant(Solver):
    """Base of Broyden and Anderson, which hold the fields."""

    history: int | None
    history_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history is not None:
            check_count("history", self.history)
        if self.history_dtype not in (None, *HISTORY_DTYPES):
            allowed = ", ".join(map(str, HISTORY_DTYPES))
            raise ValueError(f"history_dtype must be None or one of {allowed}, got {self.history_dtype!r}")

    def method(self) -> tuple[int, float, float, float]:
        """Arguments (method, alpha, beta, ridge) of the op."""
        raise NotImplementedError

    def init(self, z: Tensor, kernel: Kernel, keep_inverse: bool = False) -> State:
        history = self.history or min(self.max_iter, kernel.max_history or self.max_iter)
        if kernel.max_history is not None and history > kernel.max_history:
            raise ValueError(f"history must be at most {kernel.max_history} on kernel={kernel.name!r}, got {history}")
        history = min(history, self.max_iter)  # more slots than iterations would stay empty
        dtype = self.history_dtype or z.dtype
        if dtype not in (z.dtype, torch.bfloat16) or (dtype == torch.bfloat16 and z.dtype != torch.float32):
            raise ValueError(
                f"history_dtype must be the state's ({z.dtype}), or torch.bfloat16 beside torch.float32, got {dtype}"
            )
        batch, dim = z.shape
        return MultisecantState.start(
            z,
            kernel,
            f_prev=z,
            left=empty_history((batch, history, dim), dtype, z.device),
            df=empty_history((batch, history, dim), dtype, z.device),
            gram=empty_products((batch, history + 2, history), z.dtype, z.device),
        )

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        if not isinstance(state, MultisecantState):
            return super().advance(state, fz, k, last)
        state.check_buffer(fz, k)
        super().advance(state, fz, k, last)
        state.keep(fz, k)

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        assert isinstance(state, MultisecantState)
        return "multisecant_step", (state.f_prev, state.left, state.df, state.gram), self.method()

    def transposed_inverse(self, state: State, v: Tensor) -> Tensor:
        """Estimate of (I - J^T)^-1 v for v (B, D), J the Jacobian of f at the solution, from a solve that is over.

        That is -H^T v, where the secant equations make H the inverse of the Jacobian of f(z) - z, whatever the length
        of the step. A sample's last value of f was judged without a step, so that its last step belongs to no pair, but
        lies in the slot of the oldest.
        """
        assert isinstance(state, MultisecantState)
        count = (state.iterations - 2).clamp(0, state.left.shape[1] - 1)
        method, _, beta, ridge = self.method()
        product = state.kernel.op("multisecant_transposed")
        return product(v, state.left, state.df, state.gram, state.iterations - 3, count, method, 1.0, beta, ridge)
