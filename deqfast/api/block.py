"""DEQBlock: a deep equilibrium layer for any model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import ChecksKeywords, check_cell, check_start, settings_of
from ..cells.protocol import solving
from ..engine.device_loop import is_captured
from ..engine.loop import StopFn
from ..engine.plan import Plan
from ..engine.refusals import check_served
from ..engine.runners.compiled import Compiled
from ..engine.runners.cuda_graph import Graphs
from ..engine.solve import Options, Solves
from ..gradients import ADJOINTS, Adjoint
from ..gradients.linearised import Linearised
from ..solution import Solution
from ..solvers import SOLVERS, Solver
from ..state.groups import Grouping, Groups
from ..state.packing import Packing, is_of_state
from ..torch_internals import pytree
from ..torch_internals.dynamo import is_given_up, untraced
from ..torch_internals.ranks import DTENSORS, ranks_of
from ..torch_internals.transforms import check_values, present_context, runs_only
from ..torch_internals.weights import attribute, check_loaded, hold_weights, modules_of
from ..transforms import opaque_op
from ..transforms.export import export
from ..transforms.functorch import transform
from .changes import Changes
from .notice import Notice
from .options import ASSIGNED, BlockOptions
from .refusals import REFUSED, check_together
from .trajectory import check_trajectory, differentiate_along


class DEQBlock(ChecksKeywords, nn.Module):
    """Deep equilibrium layer: solves z* = cell(z*, x), and differentiates z* in x and in the cell's parameters.

    The start z0 is the call's, else `init(x)`, else ``cell.initial_state(x)``, else zeros like x. See ``CellHooks``.

    Args:
        cell: any callable (z, x) -> z; an ``nn.Module`` is registered. See ``Cell``.
        solver: "broyden", "anderson", "picard", "auto" (rtol=1e-3, max_iter=20, "auto": 200) or a solver object.
        adjoint: "jfb", "implicit", "neumann", "phantom", "reversible", "shine", "unrolled" or an adjoint object.
        init: x -> z0; None: see above.
        groups: groups of calls that give none, see ``forward``.
        scale: the typical sizes of the tensors of z, see ``solve``.
        per_sample: which tensors of x have one row per row of z: a tree like x of True and False. `drop_converged`
            removes rows of these tensors. In the gradient, a healthy row replaces each row whose sample broke down.
            None: sparse tensors, scalars and parameters have none, and the only other tensor of x has them. If there
            are several, `drop_converged` raises an error. For the gradient, each with as many rows as z is tried in the
            cell after a sample broke down: it has rows of samples if replacing them leaves the other samples' values as
            they are. On a GPU the gradient then waits for the device, to know whether a sample broke down.
        eval_solver: solver of evaluation mode; None: `solver`.
        stop_fn: a second rule that ends samples, see ``solve``.
        kernel: "auto", "triton", "cuda", "cpp" or "torch", see ``backends``.
        drop_converged: give the cell, which couples no samples, only the rows whose samples run, see ``solve``.
        cuda_graph: capture solves in CUDA graphs, whose loops the device ends, and launch one in each call: the forward
            solve, and the backward solve of ``Implicit``. The host does not wait, unless a number of the Solution is
            read. A z0 that is not finite raises its error then, or in a later call. See ``engine.runners.cuda_graph``.
        compile: on a CPU, compile the solves: the cell, the steps and the loop around them become one graph, for each
            solver and shape of a sample. This takes seconds at the first call. Not under torch.func. True, or
            "forward" for the forward solve only, if torch.compile cannot compile the cell's gradient.
        trace: record the residual of each sample's best iterate so far, after every evaluation, in ``Solution.trace``.
        lockstep: a process group of torch.distributed whose processes end each solve together, because the cell calls
            collectives. A cell whose parameters are DTensors needs none, see the page More than one process.
        state_group: a process group whose processes have parts of each sample, such as shards of its features or
            positions: all tensors of z and their gradients are the local shards, with all samples. Norms, products and
            statuses are those of whole samples. For Picard, Anderson, Broyden and Auto.
        causal: the cell is causal along dimension 1 of each tensor of z. Then no later position of x changes an earlier
            one of z*, see ``solve``; else it does, by about the tolerance. The gradient is solved for whole samples.
        warn: warn of samples that do not converge, break down or are inconsistent, see ``Status``: once for the forward
            and once for the backward solves. Samples that the rounding of f has stalled cause no warning. On a GPU the
            warning comes one call late, so that nothing waits. The first call in training mode also checks whether the
            cell changes between calls: by its modules, else by three evaluations, in which its hooks run. It also warns
            of a cell that takes (x, z), and of one whose value gives x no gradient (not with ``Reversible``).

    Attributes:
        solver, eval_solver, adjoint, init, kernel, groups, scale, stop_fn, drop_converged, trace, lockstep: as above,
            with objects instead of names. So are state_group and causal. Assignments are checked like arguments.
        backward_solution: Solution of the backward solve, after a backward pass with ``Implicit``; else None.

    Raises:
        TypeError, ValueError: at construction, a name is unknown, a value is out of range, or options cannot be
            combined. In a call, z0 has NaN or infinity, or the cell returns another shape. The text names the argument.
        RuntimeError: in a call, if a kernel chosen by name cannot run.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(in_features=3, features=8), solver="anderson", adjoint="implicit")
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), block, torch.nn.Linear(8, 1))
        >>> model(torch.randn(16, 5)).square().mean().backward()
        >>> block(torch.randn(4, 3), return_solution=True)[1].converged.tolist()
        [True, True, True, True]
    """

    options: BlockOptions
    solver: Solver
    eval_solver: Solver | None
    adjoint: Adjoint
    init: Callable[[Any], Any] | None
    groups: Grouping
    trace: bool
    lockstep: Any
    state_group: Any
    causal: bool
    backward_solution: Solution | None
    _solving: dict[Any, Options]  # options of the forward solve, by mode
    _solves: Solves

    def __init__(
        self,
        cell: Callable[[Any, Any], Any],
        solver: str | Solver = "broyden",
        adjoint: str | Adjoint = "jfb",
        *,
        init: Callable[[Any], Any] | None = None,
        groups: Grouping = None,
        scale: Any = None,
        per_sample: Any = None,
        eval_solver: str | Solver | None = None,
        stop_fn: StopFn | None = None,
        kernel: str = "auto",
        drop_converged: bool = False,
        cuda_graph: bool = False,
        compile: bool | str = False,
        trace: bool = False,
        lockstep: Any = None,
        state_group: Any = None,
        causal: bool = False,
        warn: bool = True,
    ):
        super().__init__()
        check_cell(cell)
        self.cell = cell
        given: dict[str, Any] = dict(solver=solver, eval_solver=eval_solver, adjoint=adjoint, init=init, kernel=kernel)
        given |= dict(groups=groups, scale=scale, stop_fn=stop_fn, drop_converged=drop_converged, trace=trace)
        given |= dict(cuda_graph=cuda_graph, compile=compile, causal=causal)
        options = BlockOptions(**given, lockstep=lockstep, state_group=state_group)  # which converts names
        self.graphs = Graphs(cell) if cuda_graph else None
        self.compiled = Compiled() if compile else None
        self.linearised = Linearised() if compile and compile != "forward" else None
        for name in ASSIGNED:
            setattr(self, name, getattr(options, name))
        self._choose(options)
        self.backward_solution = None
        self.warn, self.per_sample = warn, per_sample
        self._forward_notice, self._backward_notice = Notice("forward"), Notice("backward")
        self._changes = Changes()
        self._number = opaque_op.new_number(self)

    @classmethod
    def _keywords_elsewhere(cls) -> dict[str, str]:
        """What to write instead of a setting of a solver or an adjoint."""
        settings = settings_of("adjoint", ADJOINTS) | settings_of("solver", SOLVERS)
        return {name: place for name, place in settings.items() if name != "solver"}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ASSIGNED or "options" not in self.__dict__:
            return super().__setattr__(name, value)
        chosen = replace(self.options, **{name: value})
        super().__setattr__(name, getattr(chosen, name))  # first, since torch may refuse it
        return self._choose(chosen)

    def _choose(self, options: BlockOptions) -> None:
        """Take these options, and forget what was compiled for others."""
        self.__dict__.update(options=options, _solving={}, _solves=Solves())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = opaque_op.new_number(self)  # a copy is another block

    def forward(
        self, x: Any, *more: Any, z0: Any = None, return_solution: bool = False, groups: Grouping = None
    ) -> Any:
        """Solve for x; gradients pass to x and to the cell's parameters, with ``Unrolled`` also to z0.

        Args:
            x: the cell's second argument, any pytree; `per_sample` says which of its tensors have rows of samples.
            more: an error, so that an input of the cell is not taken for a start.
            z0: start of the iteration; None: see the class.
            return_solution: return the Solution too.
            groups: if a cell couples rows, see ``solve``. Repeated calls with ``Groups`` do not wait for the device.

        Returns:
            `z*`, a tree like z0, without gradient the Solution's `value`; with `return_solution` `(z*, Solution)`.
        """
        if more:
            got = f"got {1 + len(more)}: several inputs of a cell go into x, as a tuple, and a start is z0=..."
            raise TypeError(f"a block takes one positional argument, x, {got}")
        is_given = z0 is not None
        z0, is_fresh = (z0, False) if is_given else self._start(x)
        # Tested in this frame, which runs uncompiled if dynamo gives up. is_compiling() is true for other threads too.
        if torch.compiler.is_dynamo_compiling():
            return opaque_op.solve_traced(self, x, z0, return_solution, groups)
        # Once dynamo has given up this frame, it does so for every block, and would compile the solve in parts.
        run = partial(untraced, self._run) if is_given_up() else self._run
        try:
            value, solution = run(x, z0, groups, return_solution, is_fresh)
        except RuntimeError as error:
            check_start(z0, x, is_given, error)
            raise
        return (value, solution) if return_solution else value

    def _run(
        self, x: Any, z0: Any, groups: Grouping, return_solution: bool = True, is_fresh: bool = False
    ) -> tuple[Any, Solution]:
        """Value and Solution of ``forward``, if ``torch.compile`` does not trace it."""
        if self.graphs is not None and (solution := self._replayed(x, z0, groups)) is not None:
            return solution.value, solution
        plan = self._plan(x, z0, groups, is_fresh)
        if plan.context != "eager":
            asked = self.options.given() + ["training mode"] * self.training
            asked += ["trace of a Solution"] * bool(self.trace and return_solution)
            asked += ["lockstep"] * (plan.options.lockstep is not None)
            check_served(plan.context, REFUSED[plan.context], asked)
        modules = self._prepare(plan)
        with solving(modules), hold_weights(modules) if plan.holds_weights else nullcontext():
            if plan.context == "torch.export":
                value, solution = export(plan, self.adjoint)
            elif plan.context == "torch.func":
                # Dynamo gives up this frame within a transform, and would compile the solve in parts.
                value, solution = untraced(transform, plan, self.adjoint)
            else:
                value, solution = self.adjoint(plan)
        if self._changes.looks:
            self._changes.look_at(plan, value)
        if self.warn and plan.context != "torch.export" and solution.may_include(*self._forward_notice.asked):
            self._forward_notice.look(solution)
        return value, solution

    def _prepare(self, plan: Plan) -> list[nn.Module]:
        """Modules of the cell, once it and the start are checked, at the first call in training by ``Changes``."""
        if plan.context != "torch.export":
            check_values("z0", plan.z0)
        modules = modules_of(self.cell)
        check_loaded(modules, plan.z0)
        if self.training and self.warn and not self._changes.looked and not _is_captured(plan.z0):
            self._changes.look(plan)
        return modules

    def _replayed(self, x: Any, z0: Any, groups: Any) -> Solution | None:
        """Solution of a captured solve, if the call needs nothing but its replay; else None."""
        options = self._solving.get(self.training) or self._options()
        is_watched = self._changes.looks or (self.training and self.warn and not self._changes.looked)
        if groups is not None or self.groups is not options.groups or is_watched or torch.is_grad_enabled():
            return None
        if not runs_only(x, z0):
            return None
        assert self.graphs is not None
        solution = self.graphs.replay_only(self._solves.of(options, z0), self._modules["cell"], x, z0)
        if self.warn and solution is not None:
            self._forward_notice.look(solution)
        return solution

    def trajectory(self, x: Any, at: Sequence[int], z0: Any = None, groups: Grouping = None) -> list[Any]:
        """Solve once for x; return z* and earlier states, each with a gradient, for a loss on several states.

        This runs the eager loop, without `drop_converged`, `cuda_graph`, `compile` and the cell's own ``fixed_point``.
        The gradient of each state costs as much as at z*. Source: fixed-point correction, Bai et al., CVPR 2022.

        Args:
            x: see ``forward``.
            at: ascending evaluations in this solve, from 1, which is z0. A sample that ends earlier has its z* there.
            z0: see ``forward``.
            groups: see ``forward``.

        Returns:
            len(at) + 1 trees like z0: the cell's states at these evaluations, then z*, with the adjoint's gradients.

        Raises:
            TypeError, ValueError: `at` is not as above. The adjoint is ``Unrolled``, ``Reversible`` or ``SHINE``. The
                call is within torch.func, forward-mode AD or torch.export. Else as ``forward``.

        Examples:
            >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Phantom(steps=3, relaxation=0.8))
            >>> losses = [z.square().mean() for z in block.trajectory(torch.randn(4, 3), at=[2, 4])]
            >>> (losses[2] + 0.8 * losses[1] + 0.64 * losses[0]).backward()
        """
        return untraced(self._trajectory, x, at, z0, groups)

    def _trajectory(self, x: Any, at: Sequence[int], z0: Any, groups: Grouping) -> list[Any]:
        at = check_trajectory(self.adjoint, self.current_solver, at)
        plan = self._plan(x, self._initial_state(x) if z0 is None else z0, groups)
        check_served("trajectory", REFUSED["trajectory"], [plan.context])
        modules = self._prepare(plan)
        with solving(modules), hold_weights(modules):
            states, solution = differentiate_along(plan, self.adjoint, at)
        self._changes.look_at(plan, states)
        if self.warn:
            self._forward_notice.look(solution)
        return states

    def _plan(self, x: Any, z0: Any, groups: Grouping, is_fresh: bool = False) -> Plan:
        groups = self.groups if groups is None else groups
        options: Options = self._options()
        solves: Solves | None = self._solves
        if groups is not options.groups:  # of this call only: nothing is kept for it
            check_together([*self.options.given(), "groups", "groups of a call"])
            rows = Packing(z0, groups).groups
            options, solves = self.options.solving(self.current_solver, rows, options.lockstep), None
        given: dict[str, Any] = dict(is_fresh=is_fresh, per_sample=self.per_sample, context=present_context())
        given |= dict(solves=solves, graphs=self.graphs, compiled=self.compiled, linearised=self.linearised)
        return Plan(cell=self.cell, x=x, z0=z0, options=options, on_backward=self._keep_backward_solution, **given)

    def _options(self) -> Options:
        """Options of the forward solve in this mode, the same object until an option is assigned."""
        ranks = ranks_of(modules_of(self.cell)) if DTENSORS in sys.modules and self.lockstep is None else None
        mode = self.training if ranks is None else (self.training, ranks)
        if (options := self._solving.get(mode)) is None:
            groups = self.groups if isinstance(self.groups, Groups) else None
            options = self._solving[mode] = self.options.solving(self.current_solver, groups, ranks)
        return options

    @property
    def current_solver(self) -> Solver:
        """Solver of the mode, training or evaluation, that the block is in."""
        return self.solver if self.training or self.eval_solver is None else self.eval_solver

    def _keep_backward_solution(self, solution: Solution) -> None:
        self.__dict__["backward_solution"] = solution  # no module or parameter, for which torch would look
        if self.warn and solution.may_include(*self._backward_notice.asked):
            self._backward_notice.look(solution)

    def _initial_state(self, x: Any) -> Any:
        return self._start(x)[0]

    def _start(self, x: Any) -> tuple[Any, bool]:
        """Start for x, and whether it is zeros that nobody else uses."""
        if self.init is not None:
            return self.init(x), False
        if (start := attribute(self.cell, "initial_state")) is not None:
            if not callable(start):
                raise TypeError(f"initial_state of the cell must be a method of x, got {type(start).__name__}")
            return start(x), False
        leaves = [x] if isinstance(x, Tensor) else pytree.tree_leaves(x)
        if len(leaves) == 1 and isinstance(leaves[0], Tensor) and is_of_state(leaves[0]):
            return torch.zeros_like(leaves[0]), True
        kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"no initial state: x is not a single floating-point or complex tensor, got {kind}. Pass x.float(), "
            "or z0 to the call, or init=... to DEQBlock, or give the cell a method initial_state(x)"
        )

    def extra_repr(self) -> str:
        return f"solver={self.solver}, adjoint={self.adjoint}, kernel={self.kernel!r}"


def _is_captured(z: Any) -> bool:
    return any(isinstance(leaf, Tensor) and is_captured(leaf.device) for leaf in pytree.tree_leaves(z))
