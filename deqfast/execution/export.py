"""Solves in an export: torch's ``while_loop``, which ends when no sample runs any more."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.steps.reference import end
from ..solvers import Solver
from ..solvers.base import State
from ..solvers.multisecant import MultisecantState
from ..state.packing import Packing
from ..torch_internals.dynamo import reason
from .code_loop import IS_NEW, KERNEL, code_options, loop_of, serves, solve_in_code

_solves = itertools.count(1)


def iterate_in_code(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State) -> Tensor | None:
    """Run a solve from its first evaluation to its end by C++ steps, and return the evaluations, () int64.

    Returns None, without any change, if the kernel is another one, if samples have several rows, or, with a warning, if
    the loop cannot contain f.
    """
    if not serves(solver) or state.kernel.name != KERNEL or packing.groups is not None:
        return None
    loop = loop_of(packing, solver, state.z)
    history = loop.new_history(packing.batch)
    try:
        # An export raises no error if z0 is not finite: its samples end as NONFINITE.
        results = solve_in_code(lambda z, _: f(z), None, loop, state.z, history, next(_solves))
    except Exception as error:
        _warn(error)
        return None
    state.best, state.status, state.iterations, *residuals, evaluations = results
    state.residual = torch.stack(residuals)
    return evaluations


def _warn(error: Exception) -> None:
    told = "deqfast: the export makes all evaluations of the solver: torch's while_loop cannot hold the cell"
    warnings.warn(f"{told}: {reason(error)}", stacklevel=3)


def iterate_in_graph(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State) -> Tensor | None:
    """As ``iterate_in_code``, by torch's own operations, for a solve after its first evaluation."""
    if not serves(solver) or state.kernel.name != "torch" or packing.groups is not None:
        return None
    of_sample = packing.resized(0)  # a loop takes no size of the batch from outside
    tensors = {each.name: getattr(state, each.name) for each in fields(state)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}

    def is_running(k: Any, *now: Tensor) -> Tensor:
        return ((k < solver.max_iter) & (dict(zip(tensors, now, strict=True))["active"] > 0)).all()

    def body(k: Any, *now: Tensor) -> tuple[Tensor, ...]:
        copies: dict[str, Any] = {name: t.clone() for name, t in zip(tensors, now, strict=True)}
        own = replace(state, **copies)
        of_batch = of_sample.resized(own.z.shape[0])
        rows = of_batch.pack_value(f(of_batch.unpack(own.z)), own.z)
        Solver.advance(solver, own, rows, k, False)
        if isinstance(own, MultisecantState):
            own.f_prev = rows.clone()
        return k + 1, *(getattr(own, name) for name in tensors)

    # Without dimensions: torch.onnx.export treats a size of 1 as variable, and nothing could be added to it.
    start = torch.full((), 1, dtype=torch.int64, device=state.z.device)
    try:
        evaluations, *ended = torch.while_loop(is_running, body, (start, *tensors.values()))
    except Exception as error:
        _warn(error)
        return None
    # Copies: the results of a loop must not be written to, and an offset that torch does not know keeps them out of the
    # next loop.
    for name, tensor in zip(tensors, ended, strict=True):
        setattr(state, name, tensor.clone())
    end(state.status, state.progress, solver.tol)
    return evaluations


def package_options() -> dict[str, Any]:
    """Options with which AOTInductor compiles an exported model correctly, and a solve by C++ steps without overhead.

    Pass them as ``torch._inductor.aoti_compile_and_package(program, inductor_configs=deqfast.package_options())``. A
    solve with ``kernel="cpp"`` then calls deqfast's steps as C functions, without torch's dispatcher. A process that
    loads such a package must import deqfast first. Before torch 2.14, other packages need these options too, because
    its inductor generates wrong code for loops.
    """
    fails = not IS_NEW and torch.backends.cpu.get_cpu_capability() == "AVX2"  # here its vectors read out of bounds
    return {**code_options(), **({"cpp.simdlen": 0} if fails else {})}
