"""Broyden's method."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._checks import check_choice, check_number
from ..kernels.constants import BROYDEN_BAD, BROYDEN_GOOD
from ..ops import Kernel
from .base import State
from .multisecant import Multisecant


@dataclass
class StepsState(State):
    """State of a solve whose history is only its steps; see ``broyden_step``."""

    steps: Tensor = field(kw_only=True)
    gram: Tensor = field(kw_only=True)
    first: Tensor = field(kw_only=True)

    def restart(self, z: Tensor) -> None:
        super().restart(z)
        self.first.zero_()


@dataclass(frozen=True)
class Broyden(Multisecant):
    """Broyden's method on f(z) - z, from the inverse Jacobian -I.

    The kernels "cpp" and "torch" can keep only the steps, which takes half the memory (``broyden_step`` in
    ``deqfast.ops.steps``). They do so if no pair leaves the window (history_size >= max_iter - 1), the kind is "good",
    the relaxation is 1, the history has the state's dtype, and the inverse is not kept. Source: Byrd, Nocedal and
    Schnabel, Math. Programming 63 (1994), for the compact form.

    Args:
        rtol, max_iter, atol, norm: see ``Solver``.
        history_size: pairs kept, which bounds the memory of a solve: at least 1, at most 32 on triton and cuda. None:
            max_iter, or 32 on triton and cuda. A full window slides, as if Broyden began at -I with its newest pairs.
        kind: "good" or "bad", Broyden's first and second update.
        relaxation: length of the step, in (0, 2].
        history_dtype: dtype of the pairs: None for the state's, or torch.bfloat16, which halves the memory.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> f = lambda z: 0.9 * torch.cos(z) + 1
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Broyden(rtol=1e-5))
        Solution(2 CONVERGED, evaluations=6)
    """

    history_size: int | None = None
    kind: str = "good"
    relaxation: float = 1.0
    history_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("good", "bad"))
        check_number("relaxation", self.relaxation, 0.0, 2.0, low_open=True)

    def method(self) -> tuple[int, float, float, float]:
        return BROYDEN_GOOD if self.kind == "good" else BROYDEN_BAD, self.relaxation, 1.0, 0.0

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        if isinstance(state, StepsState):
            return "broyden_step", (state.steps, state.gram, state.first), ()
        return super().operation(state)

    def keeps_only_steps(self, dtype: torch.dtype, kernel: Kernel) -> bool:
        """Return whether a solve needs only the steps, for a state of this dtype on this kernel."""
        whole = self.history_size is None or self.history_size >= self.max_iter - 1
        whole = whole and self.history_dtype in (None, dtype)
        return kernel.has_broyden_step and whole and self.kind == "good" and self.relaxation == 1.0

    def init(self, z: Tensor, kernel: Kernel) -> State:
        if not self.keeps_only_steps(z.dtype, kernel):
            return super().init(z, kernel)
        batch, dim = z.shape
        rows = max(self.max_iter - 1, 1)  # no step follows the last evaluation
        return StepsState.start(
            z,
            kernel,
            steps=kernel.history((batch, rows, dim), z.dtype, z.device),
            gram=kernel.products((batch, rows, rows), z.dtype, z.device),
            first=torch.zeros(batch, dtype=torch.int32, device=z.device),
        )
