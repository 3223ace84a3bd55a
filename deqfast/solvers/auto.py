"""Auto: several solvers, one after the other."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.constants import NONFINITE, RUNNING, STALL_GAIN
from ..ops import Kernel
from ..ops.steps import PROGRESS
from .anderson import Anderson
from .base import Solver, State, Step
from .broyden import Broyden

FIRST, GAIN_ITERATION = map(PROGRESS.index, ("first", "gain_iteration"))
# Progress of the whole solve, which a new stage must not reset.
WHOLE_SOLVE = list(map(PROGRESS.index, ("first", "start", "least")))


@dataclass
class AutoState(State):
    """State of a solve by stages."""

    stage: Tensor = field(kw_only=True)  # number of each sample's stage, from 0, (B,) int32
    begin: Tensor = field(kw_only=True)  # evaluations before this stage, (B,) int32
    skipped: Tensor = field(kw_only=True)  # those of them in which the sample did not run, (B,) int32
    seen: Tensor = field(kw_only=True)  # absolute residuals (B,) at the last check of progress
    first: State | None = field(kw_only=True)  # state of the first stage before its first step, else None
    # Bound step of each pair (stage, begin) of a running sample. All work on the tensors of this state.
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)

    def iterations_at(self, k: int) -> Tensor | int:
        return k + 1 - self.skipped


@dataclass(frozen=True)
class Auto(Solver):
    """Three solvers, one after the other, for unknown maps: each continues with the samples that are not yet solved.

    1. ``Broyden()``;
    2. ``Anderson(relaxation=0.1)``;
    3. ``Broyden(relaxation=0.1, history_size=20)``, until the evaluations run out.

    All share one budget of `max_iter` evaluations. After every 30 evaluations, samples without progress move to the
    next stage and start from their best iterate. If no sample runs until then, the evaluations left are spent without a
    call of f: a solve may end as MAX_ITER after fewer calls, and the k of `stop_fn` counts them. A sample makes no
    progress if f has returned a value that is not finite, or if neither its relative nor its absolute residual has
    fallen by 5 %. A sample moves only then, even if all others are done, so its answer does not depend on them. A
    sample that converges in the first stage is solved as by ``Broyden``, bit for bit. Stages depend on values, so
    exports, CUDA graphs and compiled solves refuse this solver. Source of the idea: the polyalgorithms of
    NonlinearSolve.jl (arXiv 2403.16341).

    Args:
        rtol, max_iter, atol, norm: see ``Solver``.

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

    SHORT_STEP: ClassVar[float] = 0.1
    HISTORY: ClassVar[int] = 20

    @property
    def patience(self) -> int:
        return 30  # with 10 and 20, maps that Broyden's method solves slowly leave its stage too early

    @cached_property
    def stages(self) -> list[Solver]:
        """Solvers of the stages, in their order."""
        common: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Solver)}
        short = common | {"relaxation": self.SHORT_STEP}
        return [Broyden(**common), Anderson(**short), Broyden(**short, history_size=self.HISTORY)]

    def init(self, z: Tensor, kernel: Kernel) -> AutoState:
        first = self.stages[0].init(z, kernel)
        stage, begin, skipped = torch.zeros(3, len(z), dtype=torch.int32, device=z.device)
        seen = first.residual[1].clone()
        return AutoState(**_monitor(first), stage=stage, begin=begin, skipped=skipped, seen=seen, first=first)

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        assert isinstance(state, AutoState)
        if state.first is not None:
            state.rule = state.first.rule = state.rule or self.rule()
            state.steps[0, 0], state.first = self.stages[0].bind(state.first), None
        if len(state.steps) == 1:
            next(iter(state.steps.values()))(fz, k, last)
            return
        running, status = state.running, state.status.clone()
        for (stage, begin), step in state.steps.items():
            own = running & (state.stage == stage) & (state.begin == begin)
            state.status.copy_(~own)  # a step leaves out rows that do not run
            step(fz, k, last)
            status = torch.where(own, state.status, status)
        state.status.copy_(status)
        state.active.copy_(state.running.sum())

    def resume(self, state: State, k: int, max_iter: int) -> int:
        assert isinstance(state, AutoState)
        at = -(-k // self.patience) * self.patience  # the next multiple, at which samples change stage
        if at < max_iter:
            self._change_stages(state, at)
        return at if at < max_iter and bool(state.running.any()) else max_iter

    def _change_stages(self, state: AutoState, k: int) -> None:
        """Move the samples without progress to their next stage, at evaluation k."""
        broken = (state.status == NONFINITE) & torch.isfinite(state.residual[1])
        before = torch.minimum(state.seen, state.progress[FIRST])
        still = state.running & (state.residual[1] > STALL_GAIN * before)
        stuck = still & (k - state.begin - state.progress[GAIN_ITERATION] >= self.patience)
        state.seen.copy_(state.residual[1])
        leaves = (state.stage < len(self.stages) - 1) & (stuck | broken)
        if not bool(leaves.any()):
            return
        state.stage += leaves
        state.begin.masked_fill_(leaves, k)
        state.progress[GAIN_ITERATION].masked_fill_(leaves, 0)  # counted from the beginning of a stage
        state.skipped.copy_(torch.where(leaves, k - state.iterations, state.skipped))
        state.z.copy_(torch.where(leaves[:, None], state.best, state.z))
        state.status.masked_fill_(leaves, RUNNING)
        state.active.copy_(state.running.sum())
        pairs = torch.stack([state.stage, state.begin], dim=1)[state.running].unique(dim=0).tolist()
        state.steps = {(s, b): state.steps.get((s, b)) or self._step(state, s, b) for s, b in pairs}

    def _step(self, state: AutoState, stage: int, begin: int) -> Step:
        """Step of a later stage, which begins now."""
        assert state.rule is not None
        solver = self.stages[stage]
        own = replace(solver.init(state.z, state.kernel), **_monitor(state))
        step = solver.bind(own)
        own.rule = state.rule.undecided()
        first = solver.bind(own)

        def advance(fz: Tensor, k: int, last: bool) -> None:
            running = state.running
            if k > begin:
                step(fz, k - begin, last)
            else:  # the whole solve has judged this iterate before
                before = state.progress[WHOLE_SOLVE]
                first(fz, 0, last)
                state.progress[WHOLE_SOLVE] = torch.where(running, before, state.progress[WHOLE_SOLVE])
            state.iterations.copy_(torch.where(running, state.iterations_at(k), state.iterations))

        return advance


def _monitor(state: State) -> dict[str, Any]:
    """Fields that a solve and its stages share."""
    return {each.name: getattr(state, each.name) for each in fields(State)}
