"""Cases of single ops: one call by every kernel, its results compared with the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from correctness import norm_states, states
from torch import Tensor

from deqfast.ops import ACTIVATIONS, Kernel

from . import traffic
from .counters import count_call
from .entry import KERNELS, Case, Contender, Skipped, Wrong, check_results, crossed, kernel_of, on
from .record import Row

TORCH = Kernel("torch")
STILL = 2.0**-20  # damping of a step that leaves z unchanged, so that every call does the same work
SHRINKING = 2.0**-14  # of Picard's step: f is closer after every call, so that each keeps its iterate
LABELS = {"and2": "anderson-m", "good": "broyden-n"}


def counted(call: Any, device: str, moved: float, facts: Row, another: Any, **more: Any) -> Contender:
    """Contender with the counters of one call. A call that waits for the host cannot be part of a graph.

    moved: bytes that a call must move.
    """
    counters = count_call(call, device)
    facts |= {"bytes": round(moved), **counters.columns}
    return Contender(call, facts, another=None if counters.host_waits else another, **more)


def function_case(name: str, op: str, moved: float, arguments: Callable[[str], list[Any]]) -> Case:
    """An op that returns its results and changes none of its arguments, which are `arguments(device)`."""

    def contender(provider: str, device: str) -> Contender:
        function, reference, given = kernel_of(provider, device).op(op), TORCH.op(op), arguments(device)
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given]
        results = [r if isinstance(r, tuple) else (r,) for r in (function(*given), reference(*given), reference(*wide))]

        def another() -> Callable[[], Any]:
            return partial(function, *[a.clone() if isinstance(a, Tensor) else a for a in given])

        return counted(partial(function, *given), device, moved, check_results(*results), another)

    return Case("ops", name, KERNELS, ("torch",), contender)


def full_window(method: str | None, batch: int, dim: int, history: int, **dtypes: Any) -> states.Case:
    """Step of Picard (method None) or of a multisecant method whose window is full."""
    damping = 0.5 if method is None else 1.0
    return states.Case(method, batch, dim, history, k=history, damping=damping, tol=0.0, wobble=0.5, **dtypes)


def step_case(
    method: str | None,
    batch: int,
    dim: int,
    history: int = 1,
    history_dtype: torch.dtype | None = None,
    **given: Any,
) -> Case:
    """Step of Picard (method None) or of a multisecant method whose window of `history` pairs is full.

    Every call of Picard's step copies its iterate, the best so far. No other step finds a best iterate.
    """
    step = full_window(method, batch, dim, history, history_dtype=history_dtype)
    kind, op, passes = "picard", "picard_step", float(traffic.PICARD_PASSES)
    if method is not None:
        kind, op = f"{LABELS[method]}{history}", "multisecant_step"
        passes = traffic.multisecant_passes(history, traffic.width(history_dtype))
    name = f"{kind}{'-bf16' if history_dtype else ''}-step-{batch}x{dim}"
    contender = partial(step_contender, op, step, passes)
    return Case("ops", name, KERNELS, ("torch",), contender, **given)


def broyden_step_case(batch: int, dim: int, evaluations: int = 20) -> Case:
    """Last step of a solve by Broyden's method with this many evaluations, computed from the steps before it only."""
    step = states.StepsCase(None, batch, dim, evaluations, k=evaluations - 1, tol=0.0, wobble=0.5)
    contender = partial(step_contender, "broyden_step", step, traffic.steps_passes(step.k))
    name = f"broyden-steps{step.k}-step-{batch}x{dim}"
    return Case("ops", name, KERNELS, ("torch",), contender)


def step_contender(op: str, step: states.Case, passes: float, provider: str, device: str) -> Contender:
    """Contender that checks `step`, and times a step that hardly changes z."""
    kernel = kernel_of(provider, device)
    if op == "broyden_step" and not kernel.has_broyden_step:
        raise Skipped(f"{provider} has no broyden_step: its solves keep pairs")
    function, state = kernel.op(op), states.make_state(step, device)
    after, plain, exact = (states.clone(state, dtype) for dtype in (None, None, torch.float64))
    for step_of, of in ((function, after), (step.reference, plain), (step.reference, exact)):
        step.call(step_of, of)
    facts = check_results(*([of["z"]] for of in (after, plain, exact)))
    still, keeps = step, op == "picard_step"
    if op == "broyden_step":  # c_{k-1} grows as 1 / |s_{k-1}|: if the newest step is short, the next is as short
        state["steps"][:, step.k - 1] = STILL * (state["fz"] - state["z"])
    else:
        still = replace(step, damping=SHRINKING if keeps else STILL, alpha=STILL)
    for record in ("residual", "progress"):
        state[record].fill_(math.inf if keeps else 0)  # with 0, no iterate is better, so none is copied to `best`

    call = partial(still.call, function, state)

    def verify() -> None:
        if state["status"].any() or not state["z"].isfinite().all():
            raise Wrong("samples ended while the step was timed, which is therefore not a full step")
        before = state["z"].clone()
        call()
        if torch.equal(state["best"], before) != keeps:
            raise Wrong("the step's bytes differ from those of its row: they include the copy of a best iterate or not")

    def another() -> Callable[[], Any]:
        return partial(still.call, function, states.clone(state))

    return counted(call, device, passes * state["z"].nbytes, facts, another, verify=verify)


def transposed_case(batch: int, dim: int, history: int = 20) -> Case:
    """Product of v with the transposed inverse of Broyden's method: the start of SHINE's backward pass."""

    def arguments(device: str) -> list[Any]:
        step = full_window("good", batch, dim, history)
        state = states.make_state(step, device)
        newest = torch.full((batch,), history - 2, dtype=torch.int32, device=device)
        pairs = torch.full_like(newest, history - 1)  # the pair of the last step has no df yet
        return [*(state[name] for name in ("z", "left", "df", "gram")), newest, pairs, *step.scalars()[-4:]]

    moved = (3 + 2 * history) * batch * dim * 4  # reads v twice and both halves of the history, writes the product
    name = f"broyden-n{history}-transposed-{batch}x{dim}"
    return function_case(name, "multisecant_transposed", moved, arguments)


def norm_case(op: str, shape: tuple[int, int, int, int], dtypes: str = "fp32") -> Case:
    """Ops between the convolutions of the residual cell, channels_last. dtypes: of ``norm_states.NORM_DTYPES``."""
    y, z = norm_states.NORM_DTYPES[dtypes]
    moved = traffic.norm_bytes(op, math.prod(shape), y.itemsize, z.itemsize)

    def arguments(device: str) -> list[Any]:
        return on(device, norm_states.NormCase(op, shape, 8, dtypes).arguments().values())

    name = "-".join([op, crossed(shape), dtypes.replace(" with ", "-")])
    return function_case(name, op, moved, arguments)


def fc_vjp_case(batch: int, dim: int) -> Case:
    """The gradient of tanh(W z + c) before the products with W."""

    def arguments(device: str) -> list[Any]:
        generator = torch.Generator().manual_seed(dim)
        tensors = [torch.randn(batch, dim, generator=generator) for _ in range(2)]
        return [*on(device, tensors), ACTIVATIONS.index("tanh")]

    moved = 3 * batch * dim * 4  # reads the argument of the activation and the gradient, writes a gradient
    return function_case(f"fc_vjp-{batch}x{dim}", "fc_vjp", moved, arguments)
