"""Solves in an export: torch's ``while_loop``, which ends when no sample runs any more."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import Plan
from ..engine.refusals import Refusals, check_ops, check_served, kinds
from ..engine.runners.code_loop import IS_NEW, KERNEL, code_options, loop_of, solve_in_code
from ..engine.solve import Options, solution_of
from ..gradients import Adjoint
from ..gradients.unrolled import Iterated
from ..ops import choose_kernel
from ..ops.steps.reference import end
from ..solution import Solution
from ..solvers import Auto, MixedAnderson, Solver
from ..solvers.base import State
from ..solvers.multisecant import MultisecantState
from ..state.evaluation import evaluate
from ..state.packing import Packing
from ..torch_internals.autograd import detached
from ..torch_internals.dynamo import reason

_solves = itertools.count(1)
REFUSES: Refusals = {
    "stop_fn": "an exported program calls no Python",
    "lockstep": "an exported program asks no other process",
    "state_group": "an exported program asks no other process",
    "causal": "its loop has no sums over positions",
    MixedAnderson: "an exported program calls no Python",
    Auto: "its stages depend on values",
    "trace of a Solution": "its length is known only after the solve, and an export needs it before",
    "training mode": "an export serves inference: call eval() before",
}


def export(plan: Plan, adjoint: Adjoint) -> tuple[Any, Solution]:
    """Value and Solution of a plan in the exported program, which keeps all samples in the batch and no trace."""
    if isinstance(adjoint, Iterated):
        return adjoint(plan)
    solution = solve_in_export(lambda z: plan.cell(z, plan.x), plan.z0, plan.options)
    return detached(solution.value), solution  # an export serves inference


def solve_in_export(f: Callable[[Any], Any], z0: Any, options: Options) -> Solution:
    """Solve in an exported program, by a loop that keeps all samples in the batch.

    The kernel "auto" is torch, so that the program runs without deqfast. If the loop cannot hold f, if samples have
    several rows, or on the kernels triton and cuda, the program makes all evaluations. An export raises no error if z0
    is not finite: its samples end as NONFINITE.

    Raises:
        ValueError: the solver is in ``REFUSES``, or not one of deqfast's: Python cannot be part of the program.
    """
    solver, name = options.solver, "torch" if options.kernel == "auto" else options.kernel
    check_served("torch.export", REFUSES, kinds(solver))
    check_ops("torch.export", solver)
    packing = Packing(z0, options.groups, options.scale)
    kernel, z = replace(choose_kernel(name, packing.device), in_graph=True), packing.pack(z0)
    if packing.groups is None and kernel.name == KERNEL:
        loop = loop_of(packing, options, z, kernel)
        try:
            results = solve_in_code(lambda z, _: f(z), None, loop, z, loop.new_history(packing.batch), next(_solves))
        except Exception as error:
            _warn(error)
        else:
            best, status, iterations, *residuals, evaluations = results
            return solution_of(packing, solver, packing.unpack(best), status, iterations, residuals, evaluations)
    state = solver.init(z, kernel)
    evaluations = _iterate(f, packing, solver, state)
    ended = packing.unpack(state.best), state.status, state.iterations, state.residual.unbind()
    return solution_of(packing, solver, *ended, evaluations)


def _warn(error: Exception) -> None:
    what = "deqfast: the export makes all evaluations of the solver: torch's while_loop cannot hold the solve"
    warnings.warn(f"{what}: {reason(error)}", stacklevel=4)


def _iterate(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State) -> Any:
    """Make the first evaluation, then all others in a loop; return their number, a tensor if the loop counts them."""
    value = evaluate(f, packing.unpack(state.z))
    state.rule, last = solver.rule(packing.stall_floor(value)), solver.max_iter - 1
    _step(solver, state, packing.rows_of_value(value), 0, last == 0)
    if state.kernel.name == "torch" and packing.groups is None:
        try:
            return _loop(f, packing, solver, state)
        except Exception as error:
            _warn(error)
    for k in range(1, solver.max_iter):
        packing.round_(state.z)
        _step(solver, state, packing.rows_of_value(evaluate(f, packing.unpack(state.z))), k, k == last)
    return solver.max_iter


def _step(solver: Solver, state: State, rows: Tensor, k: Any, last: bool) -> None:
    """Step of a graph, whose values all have memory of their own."""
    name, tensors, numbers = solver.operation(state)
    fz, rule = rows.clone(), state.rule or solver.rule()
    state.kernel.step(name, rule, *numbers)(state.z, fz, *state.monitor(), *tensors, k, last)
    if isinstance(state, MultisecantState):
        state.f_prev = fz


def _loop(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State) -> Tensor:
    """All evaluations but the first, in torch's ``while_loop``; return the number of all, () int64."""
    single = packing.resized(0)  # a loop takes no size of the batch from outside
    tensors = {each.name: getattr(state, each.name) for each in fields(state)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}

    def is_running(k: Any, *now: Tensor) -> Tensor:
        return ((k < solver.max_iter) & (dict(zip(tensors, now, strict=True))["active"] > 0)).all()

    def body(k: Any, *now: Tensor) -> tuple[Tensor, ...]:
        copies: dict[str, Any] = {name: t.clone() for name, t in zip(tensors, now, strict=True)}
        own = replace(state, **copies)
        batch = single.resized(own.z.shape[0])
        batch.round_(own.z)
        _step(solver, own, batch.rows_of_value(f(batch.unpack(own.z))), k, False)
        return k + 1, *(getattr(own, name) for name in tensors)

    # Without dimensions: torch.onnx.export treats a size of 1 as variable, and nothing could be added to it.
    start = torch.full((), 1, dtype=torch.int64, device=state.z.device)
    evaluations, *ended = torch.while_loop(is_running, body, (start, *tensors.values()))
    # Copies: results of a loop may not be written to, and with an unknown offset do not enter the next loop.
    for name, tensor in zip(tensors, ended, strict=True):
        setattr(state, name, tensor.clone())
    end(state.status, state.progress, solver.tol)
    return evaluations


def package_options() -> dict[str, Any]:
    """Options with which AOTInductor compiles an exported model correctly, and a solve by C++ steps without overhead.

    Pass them as ``torch._inductor.aoti_compile_and_package(program, inductor_configs=deqfast.package_options())``. A
    solve with ``kernel="cpp"`` then calls deqfast's steps as C functions, without torch's dispatcher. A process that
    loads such a package must import deqfast first. Before torch 2.14 all packages with loops need these options.
    """
    fails = not IS_NEW and torch.backends.cpu.get_cpu_capability() == "AVX2"  # here its vectors read out of bounds
    return {**code_options(), **({"cpp.simdlen": 0} if fails else {})}
