"""Several solvers in turn."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.constants import NONFINITE, RUNNING
from ..ops import Kernel
from ..ops.steps import PROGRESS
from .anderson import Anderson
from .base import Solver, State
from .broyden import Broyden

GAIN_ITERATION, FIRST, START, LEAST = map(PROGRESS.index, ("gain_iteration", "first", "start", "least"))


@dataclass
class AutoState(State):
    """State of a solve by stages. All stages judge the samples in its tensors, and `iterations` counts through.

    Attributes:
        stage: the state of the present stage.
        number: of the stage, from 0.
        before: evaluations before this stage.
        taken: mask (B,) of the samples that this stage works on; None in the first one: all.
        begun: rows `first`, `start` and `least` of the samples' progress before this stage; None in the first one.
    """

    stage: State = field(kw_only=True)
    number: int = 0
    before: int = 0
    taken: Tensor | None = None
    begun: Tensor | None = None


@dataclass(frozen=True)
class Auto(Solver):
    """Solvers in turn, for maps of which little is known: each restarts the samples that the one before has left.

    1. ``Broyden``, as it comes;
    2. ``Broyden`` with short steps;
    3. ``Anderson``, with a new history as often as it is stuck.

    All share one budget of `max_iter` evaluations. A stage is over when each sample has ended, or has been stuck for
    `PATIENCE` evaluations, without a residual 5 % less. The next stage takes the samples that have not ended, or have
    met a value of f that is not finite. It takes each from its best iterate. A sample that converges in the first stage
    costs nothing more. Not for exports and CUDA graphs, whose work is fixed. Source of the idea: NonlinearSolve.jl
    (arXiv 2403.16341).

    Args:
        rtol: relative tolerance, in [0, 1[. The tolerance is met if |f(z) - z| <= atol + rtol |f(z)|; see ``Solver``.
        max_iter: calls of f, at least 1.
        atol: absolute tolerance, see ``Solver``; positive if rtol is 0.
        norm: the norm |.|, see ``Solver``.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> f = lambda z: 3 * torch.cos(z) + z  # plain iteration does not converge
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Auto(rtol=1e-5, max_iter=100))
        Solution(2 CONVERGED, evaluations=6)
    """

    PATIENCE: ClassVar[int] = 10
    SHORT_STEP: ClassVar[float] = 0.1
    HISTORY: ClassVar[int] = 20

    @property
    def patience(self) -> int:
        return self.PATIENCE

    def stages(self) -> list[Solver]:
        """The solvers, in turn."""
        common = {each.name: getattr(self, each.name) for each in fields(Solver)}
        short = Broyden(**common, history_size=self.HISTORY, relaxation=self.SHORT_STEP)
        return [Broyden(**common), short, Anderson(**common)]

    def init(self, z: Tensor, kernel: Kernel, keep_inverse: bool = False) -> AutoState:
        stage = self.stages()[0].init(z, kernel)
        return AutoState(**{each.name: getattr(stage, each.name) for each in fields(State)}, stage=stage)

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        assert isinstance(state, AutoState)
        k -= state.before
        rule = state.rule or self.rule()
        # A stage begins at an iterate that has been judged, by the start of the solve, which it does not know yet.
        state.stage.rule = rule._replace(tol=-1.0) if k == 0 and state.number else rule
        self.stages()[state.number].advance(state.stage, fz, k, last)
        if state.taken is None or state.begun is None:
            return
        counted = state.stage.iterations + state.before
        state.iterations.copy_(torch.where(state.taken, counted, state.iterations))
        if k == 0:
            begun = torch.stack([state.begun[0], state.begun[1], torch.minimum(state.progress[LEAST], state.begun[2])])
            rows = [FIRST, START, LEAST]
            state.progress[rows] = torch.where(state.taken, begun, state.progress[rows])

    def resume(self, state: State, k: int) -> bool:
        assert isinstance(state, AutoState)
        running = state.status == RUNNING
        if bool((running & (k - state.before - state.progress[GAIN_ITERATION] < self.PATIENCE)).any()):
            return False
        taken = running | ((state.status == NONFINITE) & torch.isfinite(state.residual[1]))
        left = int(taken.sum())
        if not left:
            return False
        stages = self.stages()
        state.number, state.before, state.taken = min(state.number + 1, len(stages) - 1), k, taken
        state.begun = state.progress[[FIRST, START, LEAST]]
        state.z.copy_(torch.where(taken[:, None], state.best, state.z))
        state.status.masked_fill_(taken, RUNNING)
        state.active.fill_(left)
        shared = {name: getattr(state, name) for name in ("best", "status", "residual", "progress", "active")}
        state.stage = replace(stages[state.number].init(state.z, state.kernel), **shared)
        return True
