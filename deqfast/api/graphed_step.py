"""Training steps in CUDA graphs: forward pass, loss, backward pass and optimiser are one launch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _extension
from ..engine.device_loop import DEVICE, has_loops
from ..engine.runners.cuda_graph import MAX_GRAPHS, Fixed, Memory, is_settled, join
from ..engine.solve import layout_of
from ..solution import Late, Solution
from ..torch_internals import pytree
from ..torch_internals.graphs import (
    aside,
    capture,
    capture_cut,
    copy_into,
    current,
    line_in,
    line_of,
    mark,
    raw_stream,
    refuse_draws,
    refuse_waits,
)

T = TypeVar("T")
WHO = "make_graphed_step: the step"
_CALL = cast(Any, nn.Module.__call__).__code__
EAGER = 2  # calls of a layout before its capture: the first compiles, loads and allocates, the second is watched


def make_graphed_step(step: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return `step` for a GPU, where it becomes one launch: a CUDA graph of all its work, in which solves end early.

    ``step(batch)`` may have several blocks, with ``JFB``, ``Phantom`` or ``Implicit``, a loss, ``backward()``,
    autocast, ``clip_grad_norm_``, the optimiser and a ``GradScaler``. For each layout of the batch (structure, shapes,
    strides, dtypes) the first two calls run as they are. The third is captured, and each later one copies the batch
    into the graph's memory and launches it. Every call is one training step.

    Python runs in the capture only. What it reads then stays: numbers, attributes, options. Modules that the step
    calls, their modes and memory, the optimisers' settings and state, and the ambient autocast are watched: if they
    change, the step is captured again. A loop of the device ends each solve, so that no sample makes surplus passes.
    A start z0 is not checked; its sample's status is NONFINITE.

    What changes between steps must be on the device:

    - The learning rate is a tensor, which schedulers fill: ``lr=torch.tensor(0.1, device="cuda")``. SGD needs
      ``fused=True``, other optimisers ``capturable=True``.
    - Random numbers come from torch's generator, outside of cells: each replay draws new ones. Before torch 2.14 a step
      that draws is refused.
    - A ``GradScaler`` needs a fused optimiser, else it reads on the host whether gradients are finite.

    Args:
        step: takes a tree of tensors on one GPU and plain values, and returns a tree of tensors, Solutions and plain
            values. Its tensors are returned without gradient, in memory of their own; a parameter's ``grad`` is in the
            graph's memory until the next call.

    Returns:
        A callable like `step`. Calls by several threads take turns.

    Raises:
        TypeError: the step is not callable.
        ValueError: a tensor of the batch is on another device, or requires a gradient.
        RuntimeError: the step cannot be captured; the text has the line that prevents it, and why.

    Examples:
        >>> block, readout = deqfast.DEQBlock(deqfast.FCCell(3, 8)), torch.nn.Linear(8, 1)
        >>> rate, parameters = torch.tensor(0.1), [*block.parameters(), *readout.parameters()]
        >>> optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)
        >>> def step(x):
        ...     optimizer.zero_grad()
        ...     loss = readout(block(x)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> graphed = deqfast.make_graphed_step(step)  # graphed(batch) on a GPU
    """
    if not callable(step):
        raise TypeError(f"make_graphed_step needs a callable step, got {step!r}")
    return GraphedStep(step)


class GraphedStep(Generic[T]):
    """See ``make_graphed_step``."""

    def __init__(self, step: Callable[[Any], T]) -> None:
        self.step = step
        self._alone = threading.RLock()
        self._calls: dict[Any, int] = {}  # without a capture, by layout
        self._captured: dict[Any, CapturedStep] = {}
        self._stream: Any = None
        self._rates: list[Tensor] = []  # of the optimisers in the latest call without a capture

    def __call__(self, batch: Any) -> T:
        leaves, spec = pytree.tree_flatten(batch)
        device = _device_of(leaves)
        layouts = [layout_of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
        key = str(spec), *layouts, torch.is_grad_enabled()
        with self._alone, current(device):
            captured, calls = self._captured.get(key), self._calls.get(key, 0)
            if captured is not None and not captured.holds():
                self._captured.pop(key).finished.synchronize()
                captured, calls = None, EAGER - 1
            if captured is None and calls < EAGER:
                result, self._seen = self._eager(batch, device, calls > 0)
                self._calls[key] = calls + all(map(is_settled, self._seen.modules))
                return result
            if captured is None:
                while len(self._captured) >= MAX_GRAPHS:
                    self._captured.pop(next(iter(self._captured))).finished.synchronize()
                captured = CapturedStep(self.step, leaves, spec, device, self._stream, self._seen)
                self._captured[key] = captured
            return captured.replay(leaves)

    def _eager(self, batch: Any, device: torch.device, is_watched: bool) -> tuple[T, Seen]:
        """Run the step on the stream of the captures; if it `is_watched`, refuse what a graph would not repeat."""
        results: list[T] = []
        self._stream = self._stream or torch.cuda.Stream()

        def run() -> None:
            results.append(self.step(batch))

        def run_aside() -> None:
            aside(run, self._stream)

        rates = [(rate, rate._version) for rate in self._rates]
        with watched(is_watched) as seen:
            if not is_watched:
                run_aside()
            elif not cuts():  # torch's own replays draw new numbers
                refuse_waits(run_aside, WHO)
            else:
                refuse_waits(lambda: refuse_draws(device, run_aside, WHO, "draw them outside, or use torch 2.14"), WHO)
        if any(rate._version != version for rate, version in rates):
            raise RuntimeError(f"{WHO} cannot be captured: it sets the learning rate, which must be done outside")
        for optimizer in seen.optimizers:
            _check_state(optimizer)
        groups = [group for optimizer in seen.optimizers for group in optimizer.param_groups]
        self._rates = [group["lr"] for group in groups if "lr" in group]
        return swapped(results[0], Tensor, Tensor.detach), seen


class CapturedStep:
    """Captured step for one layout of the batch.

    Attributes:
        finished: event after all work in its memory, for which another stream must wait.
    """

    def __init__(
        self, step: Callable[[Any], Any], leaves: list[Any], spec: Any, device: torch.device, stream: Any, seen: Seen
    ) -> None:
        self.seen, self.device = seen, device
        self.inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        parameters = [p for optimizer in seen.optimizers for group in optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]

        def work() -> None:
            inputs = iter(self.inputs)
            batch = [next(inputs).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            values: dict[int, Tensor] = {}

            def place(tensor: Tensor) -> _Place:
                tensor = tensor.detach()
                is_dense = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                values[len(values)] = tensor if is_dense + 1 == tensor.numel() else tensor.contiguous()
                return _Place(len(values) - 1)

            self.result = swapped(step(pytree.tree_unflatten(batch, spec)), Tensor, place)
            self.memory = Memory(values, device)
            self.memory.write(values)

        torch.clear_autocast_cache()  # it could keep casts of other memory
        try:
            self.launch = self._capture(work, stream)
        except RuntimeError as error:
            raise RuntimeError(f"{WHO} cannot be captured, in {line_of(error)}: {error}") from error
        finally:
            torch.clear_autocast_cache()
        self.fixed, self.settings = [Fixed(module) for module in seen.modules], _contents(seen.optimizers)
        self.grads = [(p, grad, p.grad) for p, grad in zip(parameters, before, strict=True)]
        for parameter, grad, _ in self.grads:
            parameter.grad = grad
        self.address: int | None = None  # of the latest stream
        self.finished = mark()

    def _capture(self, work: Callable[[], None], stream: Any) -> Callable[[int], None]:
        """Return the function that launches the step on a stream."""
        if cuts():
            parts = capture_cut(work, stream)
            return join(parts.graphs, parts.loops)
        (graph,) = capture([work], "relaxed", stream)
        return lambda stream: graph.replay()

    def holds(self) -> bool:
        """Return whether all that the capture has fixed is as it was."""
        for parameter, before, after in self.grads:  # a gradient that is added to must stay where it is
            if (before is None or before is after) and parameter.grad is not before:
                return False
        now = _contents(self.seen.optimizers)
        if len(now) != len(self.settings) or not all(map(_is_same, now, self.settings)):
            return False
        return all(fixed.holds() for fixed in self.fixed)

    @torch.no_grad()
    def replay(self, leaves: list[Any]) -> Any:
        """Make a step with the values of the leaves; return its results."""
        address = raw_stream(self.device)
        if address != self.address:
            self.finished.wait()
            self.address = address
        copy_into(self.inputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self.launch(address)
        values = self.memory.of(self.memory.memory.clone())
        self.finished = mark()
        for parameter, _, grad in self.grads:
            parameter.grad = grad
        return swapped(self.result, _Place, lambda place: values[place.number])


@dataclass(frozen=True)
class _Place:
    """Place of a result in the memory of all."""

    number: int


def cuts() -> bool:
    """Return whether solves cut a capture into parts, which C++ joins, as this torch has no loops in graphs."""
    return not has_loops() and _extension.cuda_module is not None


class Seen:
    """What a step uses: the `optimizers`, and the outermost of the `modules` that it calls."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.modules: list[nn.Module] = []
        self._inner: set[nn.Module] = set()
        self._thread = threading.get_ident()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a module that is called. A hook of all modules would turn off kernels that replace them."""
        if frame.f_code is _CALL and event == "call" and (module := frame.f_locals["self"]) not in self._inner:
            self.modules.append(module)
            self._inner.update(module.modules())

    def optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Note an optimiser before its step; RuntimeError if a graph would repeat its settings."""
        if optimizer not in self.optimizers and threading.get_ident() == self._thread:
            _check_settings(optimizer)
            self.optimizers.append(optimizer)


@contextmanager
def watched(modules: bool) -> Iterator[Seen]:
    """What is used in this context; the `modules` too, if asked for."""
    seen, before = Seen(), sys.getprofile()
    hook = register_optimizer_step_pre_hook(seen.optimizer)
    if modules:
        sys.setprofile(seen.profile)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        hook.remove()


def _check_settings(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        rate, device = group.get("lr"), group["params"][0].device
        if "lr" in group and not (isinstance(rate, Tensor) and rate.device == device):
            got = f"a tensor on {rate.device}" if isinstance(rate, Tensor) else repr(rate)
            wanted = f"the lr of {name} must be a tensor on {device}, which a schedule can fill, got {got}"
        elif group.get("capturable") is False:
            wanted = f"{name} must have capturable=True, got False: it would count its steps on the host"
        else:
            continue
        raise RuntimeError(f"{WHO} cannot be captured: {wanted}, in {line_in(sys._getframe(1))}")


def _check_state(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            on_host = isinstance(value, Tensor) and value.device != parameter.device
            if on_host or isinstance(value, int | float):
                raise RuntimeError(
                    f"{WHO} cannot be captured: {type(optimizer).__name__} keeps {name} of its state on the host"
                )


def _contents(optimizers: list[Optimizer]) -> list[Any]:
    """Everything that the optimisers read."""
    contents: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            contents += [value for name, value in group.items() if name != "params"]
            for parameter in group["params"]:
                contents += [parameter, *optimizer.state.get(parameter, {}).values()]
    return contents


def _is_same(a: Any, b: Any) -> bool:
    return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)


def swapped(result: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    """The results of a step, with `swap(value)` for each value of this kind in trees, Solutions and late numbers."""

    def of_leaf(value: Any) -> Any:
        if isinstance(value, kind):
            return swap(value)
        if isinstance(value, Late):
            return Late(value.work, *map(swap, value.tensors))
        if isinstance(value, Solution):
            return value.changed(
                **{each.name: swapped(value.__dict__[each.name], kind, swap) for each in fields(value)}
            )
        return value

    return pytree.tree_map(of_leaf, result)


def _device_of(leaves: list[Any]) -> torch.device:
    """The device of a batch, whose leaves are checked."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.device.type != DEVICE or tensor.device != tensors[0].device:
            raise ValueError(f"make_graphed_step needs a batch on one {DEVICE} device, got a tensor on {tensor.device}")
        if tensor.requires_grad:
            raise ValueError("make_graphed_step needs a batch without gradient, got a tensor that requires one")
    if not tensors:
        raise ValueError("make_graphed_step needs a tensor in the batch, got none")
    return tensors[0].device
