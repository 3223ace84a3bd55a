"""Auto: several solvers, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.constants import NONFINITE, RUNNING, STALL_GAIN
from ..ops import Kernel
from ..ops.steps import PROGRESS
from .anderson import Anderson
from .base import Solver, State
from .broyden import Broyden

FIRST, START, LEAST, GAIN_ITERATION = map(PROGRESS.index, ("first", "start", "least", "gain_iteration"))
OF_THE_SOLVE = [FIRST, START, LEAST]  # progress of the whole solve, which a new stage must not reset


@dataclass
class Cohort:
    """Samples that began the same stage at the same evaluation.

    Attributes:
        stage: index of the stage, from 0.
        start: evaluations before this stage.
        state: state of the stage's solver; it shares z, best, residual and progress with the whole solve.
        members: mask (B,).
        begun: rows OF_THE_SOLVE of the progress before this stage, (3, B).
        used: evaluations of each sample before this stage, (B,) int32.
    """

    stage: int
    start: int
    state: State
    members: Tensor
    begun: Tensor
    used: Tensor


@dataclass
class AutoState(State):
    """State of a solve by stages.

    Attributes:
        only: state of the first stage while all samples are in it, else None.
        cohorts: the samples by stage, once some have left the first one.
        seen: absolute residuals (B,) at the last check of progress.
    """

    only: State | None = field(kw_only=True)
    seen: Tensor = field(kw_only=True)
    cohorts: list[Cohort] = field(default_factory=list)

    def iterations_at(self, k: int) -> Tensor | int:
        if self.only is not None:
            return super().iterations_at(k)
        found = self.iterations
        for cohort in self.cohorts:
            found = torch.where(cohort.members, cohort.used + (k - cohort.start + 1), found)
        return found


@dataclass(frozen=True)
class Auto(Solver):
    """Three solvers, one after the other, for unknown maps: each continues with the samples that are not yet solved.

    1. ``Broyden()``;
    2. ``Anderson(relaxation=0.1)``;
    3. ``Broyden(relaxation=0.1, history_size=20)``, until the evaluations run out.

    All share one budget of `max_iter` evaluations. After every 30 evaluations, samples without progress move to the
    next stage and start from their best iterate. A sample makes no progress if f has returned a value that is not
    finite, or if neither its relative nor its absolute residual has fallen by 5 %. A sample never moves earlier, so its
    answer does not depend on the others. A sample that converges in the first stage is solved as by ``Broyden``, bit
    for bit. Stages depend on values, so exports, CUDA graphs and compiled solves refuse this solver. Source of the
    idea: the polyalgorithms of NonlinearSolve.jl (arXiv 2403.16341).

    Args:
        rtol: relative tolerance, in [0, 1). The tolerance is met if |f(z) - z| <= atol + rtol |f(z)|; see ``Solver``.
        max_iter: calls of f, at least 1.
        atol: absolute tolerance, see ``Solver``; positive if rtol is 0.
        norm: the norm |.|, see ``Solver``.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        Broyden's method takes steps to points at which f is not finite. ``Auto`` recovers:

        >>> f = lambda z: torch.where(z.abs() > 3, torch.nan, -2 * z**3 + z - 1)
        >>> deqfast.solve(f, torch.tensor([[-2.0], [0.5], [2.0]]), deqfast.Broyden(rtol=1e-4, max_iter=200))
        Solution(1 CONVERGED, 2 NONFINITE, evaluations=6)
        >>> deqfast.solve(f, torch.tensor([[-2.0], [0.5], [2.0]]), deqfast.Auto(rtol=1e-4))
        Solution(3 CONVERGED, evaluations=83)
    """

    max_iter: int = 200

    PATIENCE: ClassVar[int] = 30  # with 10 and 20, maps that Broyden's method solves slowly leave its stage too early
    SHORT_STEP: ClassVar[float] = 0.1
    HISTORY: ClassVar[int] = 20

    @property
    def patience(self) -> int:
        return self.PATIENCE

    @cached_property
    def stages(self) -> list[Solver]:
        """Solvers of the stages, in their order."""
        common: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Solver)}
        short = common | {"relaxation": self.SHORT_STEP}
        return [Broyden(**common), Anderson(**short), Broyden(**short, history_size=self.HISTORY)]

    def init(self, z: Tensor, kernel: Kernel) -> AutoState:
        only = self.stages[0].init(z, kernel)
        shared = {each.name: getattr(only, each.name) for each in fields(State)}
        return AutoState(**shared, only=only, seen=only.residual[1].clone())

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        assert isinstance(state, AutoState)
        rule = state.rule or self.rule()
        if state.only is not None:
            state.only.rule = rule
            self.stages[0].advance(state.only, fz, k, last)
            return
        running = state.running
        for cohort in state.cohorts:
            own, stage, local = cohort.members & running, cohort.state, k - cohort.start
            # The solve has judged this iterate before; the stage's own state does not know that yet.
            stage.rule = rule if local else rule.undecided()
            stage.status = torch.where(own, RUNNING, NONFINITE).to(torch.int8)
            self.stages[cohort.stage].advance(stage, fz, local, last)
            state.status.copy_(torch.where(own, stage.status, state.status))
            state.iterations.copy_(torch.where(own, stage.iterations + cohort.used, state.iterations))
            if not local:
                of_solve = torch.where(cohort.members, cohort.begun, state.progress[OF_THE_SOLVE])
                state.progress[OF_THE_SOLVE] = of_solve
        state.active.copy_(state.running.sum())

    def resume(self, state: State, k: int, max_iter: int) -> int:
        assert isinstance(state, AutoState)
        at = -(-k // self.PATIENCE) * self.PATIENCE  # the next multiple of PATIENCE, at which samples change stage
        if at < max_iter:
            self._regroup(state, at)
        return at if at < max_iter and bool(state.running.any()) else max_iter

    def _regroup(self, state: AutoState, k: int) -> None:
        """Move the samples without progress to their next stage, at evaluation k."""
        cohorts = state.cohorts if state.only is None else [self._first_cohort(state, state.only)]
        last = len(self.stages) - 1
        broken = (state.status == NONFINITE) & torch.isfinite(state.residual[1])
        before = torch.minimum(state.seen, state.progress[FIRST])
        still = state.running & (state.residual[1] > STALL_GAIN * before)
        state.seen.copy_(state.residual[1])
        begun = []
        for cohort in cohorts:
            stuck = still & (k - cohort.start - state.progress[GAIN_ITERATION] >= self.PATIENCE)
            leaves = cohort.members & (stuck | broken)
            if cohort.stage < last and bool(leaves.any()):
                cohort.members &= ~leaves
                begun.append(self._cohort(state, cohort.stage + 1, k, leaves))
        if not begun:
            return
        state.only = None
        state.cohorts = [each for each in cohorts if bool((each.members & state.running).any())] + begun
        for cohort in begun:
            state.z.copy_(torch.where(cohort.members[:, None], state.best, state.z))
            state.status.masked_fill_(cohort.members, RUNNING)
        state.active.copy_(state.running.sum())

    def _first_cohort(self, state: AutoState, only: State) -> Cohort:
        own = replace(only, iterations=only.iterations.clone(), active=only.active.clone())
        begun, used = state.progress[OF_THE_SOLVE], torch.zeros_like(state.iterations)
        return Cohort(stage=0, start=0, state=own, members=torch.ones_like(state.running), begun=begun, used=used)

    def _cohort(self, state: AutoState, stage: int, k: int, members: Tensor) -> Cohort:
        shared = {name: getattr(state, name) for name in ("best", "residual", "progress")}
        return Cohort(
            stage=stage,
            start=k,
            state=replace(self.stages[stage].init(state.z, state.kernel), **shared),
            members=members,
            begun=state.progress[OF_THE_SOLVE],
            used=state.iterations.clone(),
        )
