"""The options of a block: one frozen record, which checks them by themselves and together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .._checks import check_callable, check_choice, check_flag
from ..engine.loop import StopFn
from ..engine.refusals import Option, asked, check_ops, check_served, kinds
from ..engine.runners import cuda_graph
from ..engine.runners.compiled import check_solver
from ..engine.solve import Options
from ..gradients import Adjoint, as_adjoint
from ..ops import check_kernel_name
from ..solvers import Solver, as_solver
from ..state.groups import Grouping, Groups
from ..state.packing import check_scale
from ..torch_internals.ranks import Ranks, as_ranks
from .refusals import check_together


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockOptions:
    """Options of a ``DEQBlock``, which documents them.

    Raises:
        TypeError, ValueError: an option is not as documented, or cannot be combined with another.
    """

    solver: Solver
    adjoint: Adjoint
    init: Callable[[Any], Any] | None
    groups: Grouping
    scale: Any
    eval_solver: Solver | None
    stop_fn: StopFn | None
    kernel: str
    drop_converged: bool
    cuda_graph: bool
    compile: bool | str
    trace: bool
    lockstep: Any
    state_group: Any
    causal: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", as_solver(self.solver))
        if self.eval_solver is not None:
            object.__setattr__(self, "eval_solver", as_solver(self.eval_solver, "eval_solver"))
        object.__setattr__(self, "adjoint", as_adjoint(self.adjoint))
        check_kernel_name(self.kernel)
        object.__setattr__(self, "scale", check_scale(self.scale))
        for name in ("cuda_graph", "causal", "drop_converged", "trace"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        check_choice("compile", self.compile, (False, True, "forward"))
        object.__setattr__(self, "compile", self.compile if self.compile == "forward" else bool(self.compile))
        for name in ("init", "stop_fn"):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        for name in ("lockstep", "state_group"):
            object.__setattr__(self, name, as_ranks(name, getattr(self, name)))
        check_together(self.given())
        for solver in (self.solver, self.eval_solver or self.solver):
            if self.causal:
                check_ops("causal", solver)
            if self.compile:
                check_solver(solver)
        own = getattr(self.adjoint, "solver", None)
        if self.cuda_graph and isinstance(own, Solver):
            check_served("cuda_graph", cuda_graph.REFUSES, kinds(own), f" of the adjoint's solver, {own}")
        if self.compile is True and isinstance(own, Solver):
            check_solver(own, f" of the adjoint's solver, {own}")

    def given(self) -> list[Option]:
        """Names of the options that are given, and the classes of the solvers and the adjoint."""
        return [*asked(self, NAMED), *kinds(self.solver), *kinds(self.eval_solver), *kinds(self.adjoint)]

    def solving(self, solver: Solver, groups: Groups | None, ranks: Ranks | None = None) -> Options:
        """Options of a forward solve; `ranks` are the processes that share the cell's weights, if any."""
        if ranks is not None:
            check_together([*self.given(), "lockstep"])
        shared = {each.name: getattr(self, each.name) for each in fields(Options) if hasattr(self, each.name)}
        return Options(**shared | {"solver": solver, "groups": groups, "lockstep": self.lockstep or ranks})


_NAMES = [each.name for each in fields(BlockOptions)]
NAMED = [name for name in _NAMES if name not in ("solver", "eval_solver", "adjoint", "init", "kernel")]
ASSIGNED = [name for name in _NAMES if name not in ("cuda_graph", "compile")]
"""Options that a block has as attributes, which may be assigned."""
