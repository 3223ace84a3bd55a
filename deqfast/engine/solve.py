"""A solve of z = f(z), compiled once for a layout of z0 and a set of options into begin, body and end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..ops import Kernel, choose_kernel
from ..ops.steps import StopRule
from ..ops.steps.positions import Positions
from ..solution import Arriving, Late, LateSolution, Solution
from ..solvers import Auto, Solver
from ..solvers.base import State
from ..solvers.multisecant import Multisecant
from ..state.floors import PRECISIONS
from ..state.packing import Packing
from ..state.rows import all_finite
from ..torch_internals import pytree
from ..torch_internals.graphs import unread
from ..torch_internals.ranks import InStep, Ranks
from ..torch_internals.weights import NOTHING
from .device_loop import DEVICE, DeviceLoop, advance_in_capture, check_device_loop
from .loop import CommonWatch, Compaction, Evaluation, Front, StopFn, iterate, stop, watch_of, whole
from .refusals import Option, asked, check_ops

Inverse = Callable[[Any], Any]
"""v -> (I - J^T)^-1 v, an estimate for v like z0, with J the Jacobian of f at the value of a solve."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a solve is asked for, apart from f and z0; see ``deqfast.solve``. A key by identity.

    keeps_inverse: keep the history of Anderson or Broyden, for the estimate of the inverse. counted: at least this
    number of first evaluations are calls of f in a CUDA graph too.
    lockstep: processes that end the solve together. state_group: processes that have parts of each sample.
    """

    solver: Solver
    kernel: str = "auto"
    groups: Any = None
    scale: Any = None
    stop_fn: StopFn | None = None
    drop_converged: bool = False
    trace: bool = False
    lockstep: Ranks | None = None
    state_group: Ranks | None = None
    causal: bool = False
    keeps_inverse: bool = False
    counted: int = 0
    _linear: dict[Solver, tuple[Options, Options]] = field(init=False, repr=False, default_factory=dict)

    def given(self) -> list[Option]:
        """Names of the options that are given."""
        return asked(self, GIVEN)

    @cached_property
    def keeping(self) -> Options:
        """These options, with the history kept."""
        return replace(self, keeps_inverse=True)

    @cached_property
    def whole(self) -> Options:
        """These options, with all samples in each evaluation."""
        return replace(self, drop_converged=False) if self.drop_converged else self

    def linear(self, solver: Solver) -> tuple[Options, Options]:
        """Options of a solve with the Jacobian of f, and with its transpose, whose states have the inverse scale.

        The transpose couples positions in the other direction, and needs no order: it is in no value.
        """
        if solver not in self._linear:
            options = replace(self, solver=solver, stop_fn=None, drop_converged=False, trace=False, keeps_inverse=False)
            options = replace(options, causal=False, counted=0)
            inverse = None if self.scale is None else pytree.tree_map(lambda number: 1 / number, self.scale)
            self._linear[solver] = options, replace(options, scale=inverse)
        return self._linear[solver]


GIVEN = ("groups", "scale", "stop_fn", "drop_converged", "trace", "lockstep", "state_group", "causal")


class Solve:
    """Solve for every z0 with the layout of this one.

    Raises:
        TypeError, ValueError: z0, `groups` or `scale` are not as ``deqfast.solve`` takes them.
        RuntimeError: the kernel of this name cannot run.
    """

    def __init__(self, z0: Any, options: Options) -> None:
        self.options, self.solver = options, options.solver
        self.packing = Packing(z0, options.groups, options.scale, options.causal)
        self.kernel = kernel_of(options, self.packing.device)
        evaluates = self.packing.batch or options.lockstep is not None  # as often as the others
        self.max_iter = self.solver.max_iter if evaluates else 0
        self._init = init_of(options)
        self._rules: dict[Any, StopRule] = {}

    def __call__(self, f: Callable[..., Any], z0: Any, is_fresh: bool = False) -> Solution:
        """Solve from z0 without gradient.

        is_fresh: z0 is finite, and nobody else uses its memory. While a CUDA graph is captured, nobody knows whether z0
        is finite.
        """
        device, together, parts = self.packing.device, self.options.lockstep, self.options.state_group
        if self.max_iter and device.type == DEVICE and torch.cuda.is_current_stream_capturing():
            with torch.no_grad():
                state = self.begin(z0, is_fresh, checks=False)
                return self._end(state, advance_in_capture(self.device_loop(f, state, "a CUDA graph")))
        with torch.no_grad(), InStep(together, device, parts) if together else NOTHING as ranks:
            state = self.begin(z0, is_fresh, checks=not unread.is_on)
            watch = watch_of(state.active) if ranks is None else CommonWatch(state.active, ranks)
            f = self.solver.wrap(f, self.packing, state)
            part: Compaction | Front | None = None  # evaluations of a part of the batch
            if self.options.drop_converged:
                part = Compaction(f, self.packing, state, watch, self.options.stop_fn is not None)
            elif self.options.causal and hasattr(f, "from_position"):
                part = Front(f, self.packing, state)
            advance = self.body(part or whole(f, self.packing, state), state)

            def resume(k: int) -> int:
                if isinstance(part, Compaction):
                    part.take_all()
                return self.solver.resume(state, k, self.max_iter)

            made = iterate(advance, self.max_iter, watch, self.solver.patience, resume)
            return self._end(state, made, None if part is None else part.samples)

    def begin(self, z0: Any, is_fresh: bool = False, checks: bool = True) -> State:
        """State before the first evaluation; ValueError if z0 is not finite and this `checks`."""
        if torch.is_inference_mode_enabled():  # in which torch does not count in-place operations of f
            with torch.inference_mode(False):
                return self.begin(z0, is_fresh, checks)
        if is_fresh and self.packing.is_rows and z0.is_contiguous() and not z0.is_inference():
            rows = z0
        else:
            rows = self.packing.pack(z0)
            if checks and not is_fresh:
                length = self.packing.length
                check_finite(
                    rows if length is None else rows.unflatten(0, (-1, length)).flatten(1), self.options.state_group
                )
        return self.start(rows)

    def start(self, rows: Tensor) -> State:
        """State before the first evaluation, which owns the rows (B, D) of z0."""
        length = self.packing.length
        kernel = self.kernel if length is None else replace(self.kernel, parts=Positions(length))
        state = self._init(rows, kernel)
        if self.options.trace:
            state.trace = state.z.new_empty(self.solver.max_iter, 2, self.packing.batch)
        return state

    def body(self, evaluate: Evaluation, state: State) -> Callable[[int, int], int | None]:
        """Function that runs the iterations `first` ... `until` - 1; it returns the last step's result."""
        last, iteration = self.solver.max_iter - 1, self.iteration(evaluate, state)
        lines = None if state.trace is None else iter(state.trace)  # a solver may skip numbers of evaluations

        def advance(first: int, until: int) -> int | None:
            running = None
            for k in range(first, until):
                running = iteration(k, k == last)
                if lines is not None:
                    next(lines).copy_(state.residual)
            return running

        return advance

    def iteration(self, evaluate: Evaluation, state: State) -> Callable[[int, bool], int | None]:
        """Function that runs iteration k, which may be the last, and returns its step's result.

        The step is bound when f has returned its first value, on whose dtypes the rule depends.
        """
        stop_fn, step = self.options.stop_fn, None

        def run(k: int, last: bool) -> int | None:
            nonlocal step
            value, rows = evaluate()
            if step is None:
                state.rule = self.rule(value)
                step = self.solver.bind(state)
            if stop_fn is not None:
                rows = stop(stop_fn, self.packing, state, value, rows, k)
            return step(rows, k, last)

        return run

    def device_loop(self, f: Callable[..., Any], state: State, way: str) -> DeviceLoop:
        """The evaluations of f for a CUDA graph; ``check_device_loop`` says what is refused."""
        check_device_loop(way, self.solver, self.kernel, self.options.given())
        iteration = self.iteration(whole(f, self.packing, state), state)
        return DeviceLoop(iteration, state, self.solver.max_iter, self.options.counted)

    def rule(self, value: Any) -> StopRule:
        """Stop rule for an f that has returned this value."""
        dtypes = value.dtype if isinstance(value, Tensor) else tuple(t.dtype for t in pytree.tree_leaves(value))
        if (rule := self._rules.get(dtypes)) is None:
            rule = self._rules[dtypes] = self.solver.rule(self.packing.stall_floor(value))
        return rule

    def _end(self, state: State, evaluations: Any, sample_evaluations: int | None = None) -> Solution:
        """Solution of a solve that ended in `state`, see ``solution_of``.

        The last position of a causal solve speaks for its sequence.
        """
        inverse = inverse_of(self.packing, self.solver, state) if self.options.keeps_inverse else None
        value = state.best if self.packing.is_rows else self.packing.unpack(state.best)
        (status, iterations, residual, trace), own = (state.status, state.iterations, state.residual, state.trace), None
        if (length := self.packing.length) is not None:
            last, own = slice(length - 1, None, length), iterations.view(-1, length)
            status, iterations, residual = (t[..., last].clone() for t in (status, iterations, residual))
            trace = None if trace is None else trace[..., last]
        ended = status, iterations, residual.unbind()
        more: dict[str, Any] = dict(trace=trace, position_iterations=own, inverse=inverse)
        return solution_of(self.packing, self.solver, value, *ended, evaluations, sample_evaluations, **more)


def solution_of(
    packing: Packing,
    solver: Solver,
    value: Any,
    status: Tensor,
    iterations: Tensor,
    residuals: Sequence[Tensor],
    evaluations: Any,
    sample_evaluations: Any = None,
    trace: Tensor | None = None,
    arriving: Arriving | None = None,
    position_iterations: Tensor | None = None,
    inverse: Inverse | None = None,
) -> Solution:
    """Solution of a solve with these results.

    residuals: the relative and the absolute ones. evaluations: the number of calls of f, or a function that returns it.
    trace: (max_iter, 2, B).
    """
    measure, kind, samples = int(solver.is_absolute), Solution, sample_evaluations
    traces: Any = (None, None)
    if isinstance(evaluations, Late):
        batch = packing.batch
        kind, samples = LateSolution, evaluations.then(lambda made: made * batch)
        if trace is not None:
            traces = [evaluations.then(lambda trace, made, i=i: trace[:made, i], trace) for i in range(2)]
    else:
        samples = evaluations * packing.batch if samples is None else samples
        if trace is not None:
            traces = trace[:evaluations].unbind(1)
    solution = object.__new__(kind)
    solution.__dict__.update(  # at once: a frozen dataclass sets its fields one by one
        value=value,
        status=status,
        iterations=iterations,
        residual=residuals[measure],
        residual_rel=residuals[0],
        residual_abs=residuals[1],
        evaluations=evaluations,
        sample_evaluations=samples,
        trace=traces[measure],
        trace_rel=traces[0],
        trace_abs=traces[1],
        position_iterations=position_iterations,
        arriving=arriving,
        inverse=inverse,
    )
    return solution


def kernel_of(options: Options, device: torch.device) -> Kernel:
    """Kernel of a solve; ValueError if its steps cannot sum over positions, or over processes."""
    parts = options.state_group
    if options.causal:
        check_ops("causal", options.solver)
    elif parts is not None and type(options.solver) is not Auto:
        check_ops("state_group", options.solver)
    kernel = choose_kernel(options.kernel, device)
    return kernel if parts is None else replace(kernel, parts=parts)


def check_finite(rows: Tensor, parts: Ranks | None = None) -> Tensor:
    """Return the rows (B, D) of a z0; ValueError if any are not finite, on each process that has a part of them."""
    # A finite sum has finite terms only; a sum that is not finite may have overflowed.
    if parts is not None or not math.isfinite(rows.sum()):
        finite = all_finite([rows], parts)
        if not bool(finite.all()):
            raise not_finite(finite)
    return rows


def not_finite(finite: Tensor) -> ValueError:
    """Error for a z0 whose samples are finite as the mask (B,) says."""
    broken = (~finite).nonzero().flatten().tolist()
    shown = ", ".join(map(str, broken[:8])) + (", ..." if len(broken) > 8 else "")
    return ValueError(f"z0 must be finite; it is not in {len(broken)} of {len(finite)} samples: {shown}")


def init_of(options: Options) -> Callable[[Tensor, Kernel], State]:
    """Function that makes the state of a solve from its rows."""
    solver = options.solver
    return solver.init_pairs if options.keeps_inverse and isinstance(solver, Multisecant) else solver.init


def inverse_of(packing: Packing, solver: Solver, state: State) -> Inverse:
    """Map from v like z0 to an estimate of (I - J^T)^-1 v, from the history of a solve that ended in `state`."""
    assert isinstance(solver, Multisecant)
    gradients = packing.transposed()
    return lambda v: gradients.unpack(solver.transposed_inverse(state, gradients.pack(v)))


_PRECISION = attrgetter("fp32_precision")
MOST = 64  # solves that a block keeps; a training run has a few


def layout_of(z: Any) -> Any:
    """Key of shapes, strides, dtypes, devices and settings of torch that change rounding; None for other tensors."""
    if type(z) is Tensor:
        if z.layout is not torch.strided or z.is_nested:
            return None
        device = z.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return z.shape, z.stride(), z.dtype, device, autocast, *map(_PRECISION, PRECISIONS[device.type])
    leaves, spec = pytree.tree_flatten(z)
    if not leaves or not all(isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested for t in leaves):
        return None
    return spec, tuple([layout_of(leaf.as_subclass(Tensor)) for leaf in leaves])


class Solves:
    """Compiled solves of a block, by their options and layouts."""

    def __init__(self) -> None:
        self._kept: dict[Any, Solve] = {}
        self._lock = threading.Lock()

    def of(self, options: Options, z0: Any) -> Solve:
        """Solve from z0 with these options, which is compiled if none is kept."""
        if (layout := layout_of(z0)) is None:
            return Solve(z0, options)
        if (solve := self._kept.get((options, layout))) is not None:
            return solve
        solve = Solve(z0, options)
        with self._lock:
            if len(self._kept) >= MOST:
                self._kept.clear()
            return self._kept.setdefault((options, layout), solve)

    def __reduce__(self) -> tuple[type[Solves], tuple[()]]:
        """A copy has none of the solves: it compiles its own."""
        return Solves, ()
