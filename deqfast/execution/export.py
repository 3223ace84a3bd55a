"""Solves in an export: one iteration in torch's ``while_loop``, which ends when no sample is running any more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.steps.reference import end
from ..solvers import Anderson, Broyden, Picard, Solver
from ..solvers.base import State
from ..solvers.multisecant import MultisecantState
from ..state.packing import Packing
from ..torch_internals.dynamo import reason


def iterate_in_graph(f: Callable[[Any], Any], packing: Packing, solver: Solver, state: State) -> Tensor | None:
    """Advance a solve from behind its first evaluation to its end; the evaluations, () int64.

    None, and nothing done: the export is to hold one evaluation after the other, since the samples are groups, the
    steps are not torch's own operations or, with a warning, the loop cannot hold f.
    """
    if type(solver) not in (Picard, Anderson, Broyden) or state.kernel.name != "torch" or packing.groups is not None:
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

    # Without dimensions: torch.onnx.export lets a size of 1 vary, which nothing could be added to.
    start = torch.ones((), dtype=torch.int64, device=state.z.device)
    try:
        evaluations, *ended = torch.while_loop(is_running, body, (start, *tensors.values()))
    except Exception as error:
        told = "deqfast: the export makes all evaluations of the solver: torch's while_loop cannot hold the cell"
        warnings.warn(f"{told}: {reason(error)}", stacklevel=2)
        return None
    for name, tensor in zip(tensors, ended, strict=True):
        setattr(state, name, tensor)
    state.status = state.status.clone()  # what a loop returns is not to be written to
    end(state.status, state.progress, solver.tol)
    return evaluations
