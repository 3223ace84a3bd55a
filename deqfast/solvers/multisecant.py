"""Common part of Broyden and Anderson: a window of secant pairs in the pair form of the multisecant family.

z <- z + alpha (beta g - DF gamma), N gamma = L^T g. Here g = f(z) - z, DF holds the differences of f, and L holds the
steps or the differences of g. Broyden's product of rank-one updates in this form: Byrd, Nocedal and Schnabel, Math.
Programming 63 (1994); Anderson as a multisecant method: Fang and Saad, Numer. Linear Algebra Appl. 16 (2009).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._checks import check_count
from ..ops import Kernel
from .base import Solver, State, Step

HISTORY_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class MultisecantState(State):
    """State of a solve with a window of pairs; see ``multisecant_step`` in ``deqfast.ops`` for its tensors."""

    f_prev: Tensor = field(kw_only=True)  # f at the previous iterate
    left: Tensor = field(kw_only=True)
    df: Tensor = field(kw_only=True)
    gram: Tensor = field(kw_only=True)
    first_value: Tensor | None = None  # as f returned it, until the second one
    is_overwritten: bool | None = None  # whether f writes all its values to one buffer; None: not known yet
    carried: Tensor | None = None  # memory of `f_prev` between the passes of a loop on the device

    def restart(self, z: Tensor) -> None:
        super().restart(z)
        self.f_prev, self.first_value = self.z, None

    def carry(self) -> None:
        if self.carried is None:
            self.carried = torch.empty_like(self.z)
        self.f_prev = self.carried.copy_(self.f_prev)


def slots(history_size: int | None, max_iter: int, kernel: Kernel) -> int:
    """Pairs that a window has room for; raises ValueError if they are too many for the kernel."""
    history = history_size or min(max_iter, kernel.max_history or max_iter)
    if kernel.max_history is not None and history > kernel.max_history:
        raise ValueError(f"history_size must be at most {kernel.max_history} on kernel={kernel.name!r}, got {history}")
    return min(history, max_iter)  # more slots than iterations would stay empty


class Multisecant(Solver):
    """Base of Broyden and Anderson, which define the fields."""

    history_size: int | None
    history_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history_size is not None:
            check_count("history_size", self.history_size)
        if self.history_dtype not in (None, *HISTORY_DTYPES):
            allowed = ", ".join(map(str, HISTORY_DTYPES))
            raise ValueError(f"history_dtype must be None or one of {allowed}, got {self.history_dtype!r}")

    def method(self) -> tuple[int, float, float, float]:
        """Arguments (method, alpha, beta, ridge) of ``multisecant_step``."""
        raise NotImplementedError

    def init(self, z: Tensor, kernel: Kernel) -> State:
        return self.init_pairs(z, kernel)

    def init_pairs(self, z: Tensor, kernel: Kernel) -> State:
        """State with a window of pairs, which ``transposed_inverse`` needs."""
        history = slots(self.history_size, self.max_iter, kernel)
        dtype = self.history_dtype or z.dtype
        if dtype not in (z.dtype, torch.bfloat16) or (dtype == torch.bfloat16 and z.dtype != torch.float32):
            raise ValueError(
                f"history_dtype must be the state's ({z.dtype}), or torch.bfloat16 with torch.float32, got {dtype}"
            )
        batch, dim = z.shape
        return MultisecantState.start(
            z,
            kernel,
            f_prev=z,
            left=kernel.history((batch, history, dim), dtype, z.device),
            df=kernel.history((batch, history, dim), dtype, z.device),
            gram=kernel.products((batch, history + 2, history), z.dtype, z.device),
        )

    def launcher(self, state: State) -> Step:
        if not isinstance(state, MultisecantState):
            return super().launcher(state)
        name, (_, *pairs), numbers = self.operation(state)
        step, z, monitor = state.kernel.step(name, state.rule or self.rule(), *numbers), state.z, state.monitor()

        def advance(fz: Tensor, k: int, last: bool) -> None:
            if state.first_value is not None:
                state.is_overwritten, state.first_value = fz.data_ptr() == state.first_value.data_ptr(), None
            elif state.is_overwritten is False and fz.data_ptr() == state.f_prev.data_ptr():
                call = f"call {k + 1}" if k >= 0 else "a later call"  # k is negative in a loop on the device
                raise RuntimeError(f"f returned, at {call}, the memory of its previous value; return a fresh tensor")
            step(z, fz, *monitor, state.f_prev, *pairs, k, last)
            if state.is_overwritten is None:
                state.first_value = fz  # its memory stays in use, which the second value then cannot have by chance
            state.f_prev = fz if state.is_overwritten is False else fz.clone()

        return advance

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        assert isinstance(state, MultisecantState)
        return "multisecant_step", (state.f_prev, state.left, state.df, state.gram), self.method()

    def transposed_inverse(self, state: State, v: Tensor) -> Tensor:
        """Estimate of (I - J^T)^-1 v for v (B, D), where J is the Jacobian of f at the solution of a finished solve.

        The estimate is -H^T v. By the secant equations H is the inverse of the Jacobian of f(z) - z, whatever the
        length of the step. A sample takes no step after its last value of f. Its last step therefore belongs to no
        pair, but occupies the slot of the oldest pair.
        """
        assert isinstance(state, MultisecantState)
        pairs = state.iterations - 2  # of values of f that a step followed
        newest, count = pairs - 1, pairs.clamp(0, state.left.shape[1] - 1)
        method, _, beta, ridge = self.method()
        product: Callable[..., Tensor] = state.kernel.op("multisecant_transposed")
        return product(v, state.left, state.df, state.gram, newest, count, method, 1.0, beta, ridge)
