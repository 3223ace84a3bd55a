"""Training steps in CUDA graphs: forward pass, loss, backward pass and optimiser are one launch."""

from __future__ import annotations

import enum
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from .. import _extension
from ..engine.device_loop import DEVICE, has_loops
from ..engine.runners.cuda_graph import MAX_GRAPHS, Memory, Snapshot, is_settled, join
from ..engine.solve import layout_of
from ..solution import Late, Solution
from ..torch_internals import pytree
from ..torch_internals.dynamo import uncompiled
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
from .notice import warn

T = TypeVar("T")
WHO = "make_graphed_step: the step"
_CALL = cast(Any, nn.Module.__call__).__code__
EAGER = 2  # calls of a layout before its capture: the first compiles, loads and allocates, the second is watched
MOST = 64  # layouts that are remembered; a training run has a few
PLAIN = type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size


def make_graphed_step(step: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return `step` for a GPU, where it becomes one launch: a CUDA graph of all its work, in which solves end early.

    ``step(batch)`` may have several blocks, with ``JFB``, ``Phantom`` or ``Implicit``, a loss, ``backward()``,
    autocast, ``clip_grad_norm_``, the optimiser and a ``GradScaler``. For each layout of the batch (structure, shapes,
    strides, dtypes, plain values) the first call runs as it is, and the second uncompiled. The third is captured. Each
    later one copies the batch into the graph's memory and launches it. Every call is one training step.

    Python runs in the capture only. What it reads then stays: numbers, attributes, options. Modules that the step
    calls, their modes and memory, the optimisers' settings and state, and the ambient autocast are watched: if they
    change, the step is captured again. Tensors that it reads elsewhere must stay at their addresses. A loop of the
    device ends each solve, so that no sample makes surplus passes. From the second call on, a start z0 is not checked;
    the status of its sample is NONFINITE.

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
        TypeError: the step is not callable; the batch has a leaf that cannot be a key; the step returns another object.
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
        self._calls: dict[Any, tuple[int, Seen]] = {}  # without a capture, by layout; and what the last of them used
        self._captured: dict[Any, CapturedStep] = {}  # by layout, and whether there are gradients before
        self._streams: dict[torch.device, Any] = defaultdict(lambda: torch.cuda.Stream())  # of the captures, by device
        self._latest: Any = None  # the stream of the latest call
        self._finished: Any = None  # event after all its work, for which another stream must wait
        self._changes = 0  # that have ended young captures, one after another
        self._is_full = False  # more than MOST layouts have come

    def __call__(self, batch: Any) -> T:
        leaves, spec = pytree.tree_flatten(batch)
        device = _device_of(leaves)
        layouts = [layout_of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
        key = str(spec), *layouts, torch.is_grad_enabled()
        with self._alone, current(device):
            address = raw_stream(device)
            if self._finished is not None and self._latest != (device, address):
                self._finished.wait()
            self._latest = device, address
            captured = self._capture_of(key, leaves, spec, device)
            result = self._eager(key, batch, device) if captured is None else captured.replay(leaves, address)
            self._finished = mark()
            return result

    def _capture_of(self, key: Any, leaves: list[Any], spec: Any, device: torch.device) -> CapturedStep | None:
        """Return the capture that serves this call, a new one if need be; None if the call cannot have one yet."""
        self._calls[key] = calls, seen = self._calls.pop(key, (0, Seen()))  # the latest at the end
        if len(self._calls) > MOST:
            self._calls.pop(next(iter(self._calls)))
            if not self._is_full:
                warn(f"{WHO}'s batch has had over {MOST} layouts or plain values. Numbers that vary must be in tensors")
            self._is_full = True
        place = *key, any(p.grad is not None for p in seen.parameters)
        captured = self._captured.get(place)
        if captured is not None and (change := captured.change()):
            self._finished.synchronize()
            del self._captured[place]
            self._changes = self._changes + 1 if captured.replays < MAX_GRAPHS else 0
            if self._changes == MAX_GRAPHS:
                warn(f"{WHO} is captured again and again, as {change} changes so often")
            captured, calls = None, EAGER - 1
            self._calls[key] = calls, seen
        if captured is None and calls >= EAGER:
            while len(self._captured) >= MAX_GRAPHS:
                self._finished.synchronize()
                del self._captured[next(iter(self._captured))]
            stream = self._streams[device]
            captured = self._captured[place] = CapturedStep(self.step, leaves, spec, device, stream, seen)
        return captured

    def _eager(self, key: Any, batch: Any, device: torch.device) -> T:
        """Run the step on the stream of the captures. A layout's second call is refused what a graph cannot repeat."""
        results: list[T] = []
        calls, before = self._calls[key]

        def run() -> None:
            aside(lambda: results.append(self.step(batch)), self._streams[device])

        with watched(calls > 0, before.optimizers) as seen:
            if not calls:
                run()
            elif not cuts():  # torch's own replays draw new numbers
                refuse_waits(uncompiled(run), WHO)
            else:
                refuse_waits(lambda: refuse_draws(device, run, WHO, "draw them outside, or use torch 2.14"), WHO)
        if calls:
            seen.check_settings()
        _check_state(seen.optimizers)
        _check_results(results[0], device)
        self._calls[key] = calls + all(map(is_settled, seen.modules)), seen
        return swapped(results[0], Tensor, lambda tensor: tensor.detach().clone())


class CapturedStep:
    """Captured step for one layout of the batch, and the number of its `replays`."""

    def __init__(
        self, step: Callable[[Any], Any], leaves: list[Any], spec: Any, device: torch.device, stream: Any, seen: Seen
    ) -> None:
        self.seen, self.replays = seen, 0
        self.inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        before = [p.grad for p in seen.parameters]

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
            self.grads = [(p, grad, p.grad, p.requires_grad) for p, grad in zip(seen.parameters, before, strict=True)]
            for parameter, grad, *_ in self.grads:
                parameter.grad = grad
        self.snapshots, self.settings = [Snapshot(module) for module in seen.modules], _contents(seen.optimizers)

    def _capture(self, work: Callable[[], None], stream: Any) -> Callable[[int], None]:
        """Return the function that launches the step on a stream."""
        if cuts():
            parts = capture_cut(work, stream)
            return join(parts.graphs, parts.loops)
        (graph,) = capture([work], "relaxed", stream)
        return lambda stream: graph.replay()

    def change(self) -> str:
        """Name what the capture has fixed and is no longer as it was; empty if all is."""
        for parameter, before, after, is_learnt in self.grads:
            if parameter.requires_grad is not is_learnt:
                return "requires_grad of a parameter"
            if (before is None or before is after) and parameter.grad is not before:
                return "the memory of a gradient"  # that is added to
        now = _contents(self.seen.optimizers)
        if len(now) != len(self.settings) or not all(map(_is_same, now, self.settings)):
            return "a setting or the state of an optimiser"
        return "" if all(each.holds() for each in self.snapshots) else "a module's mode or memory"

    @torch.no_grad()
    def replay(self, leaves: list[Any], address: int) -> Any:
        """Make a step with the values of the leaves on the stream of this address; return its results."""
        self.replays += 1
        copy_into(self.inputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self.launch(address)
        values = self.memory.of(self.memory.memory.clone())
        for parameter, _, grad, _ in self.grads:
            parameter.grad = grad
        return swapped(self.result, _Place, lambda place: values[place.number])


@dataclass(frozen=True)
class _Place:
    """Place of a result in the memory of all."""

    number: int


def cuts() -> bool:
    """Return whether solves cut a capture into parts, which C++ joins, as this torch has no loops in graphs."""
    return not has_loops() and _extension.cuda_module is not None


class Leaves(TorchFunctionMode):
    """Notes the leaves of autograd that functions are given, such as a weight of a module that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[Tensor, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.leaves |= dict.fromkeys(leaf for leaf in given if leaf.is_leaf and leaf.requires_grad)
        return func(*args, **(kwargs or {}))


class Seen:
    """What a step uses: the `optimizers`, the outermost of the `modules` that it calls, and `leaves` with a gradient.

    The settings of `known` optimisers are compared from now on, those of others from their step on.
    """

    def __init__(self, known: Sequence[Optimizer] = ()) -> None:
        self.optimizers: list[Optimizer] = []
        self.modules: list[nn.Module] = []
        self.leaves: list[Tensor] = []
        self._settings = {optimizer: _settings(optimizer) for optimizer in known}
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
            self._settings.setdefault(optimizer, _settings(optimizer))

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Each parameter of the optimisers and modules and each leaf, to be asked for when the step has ended."""
        owned = [module.parameters() for module in self.modules]
        return list(dict.fromkeys(itertools.chain(*map(_parameters, self.optimizers), *owned, self.leaves)))

    def check_settings(self) -> None:
        """RuntimeError if the step has changed a setting: a graph would repeat the old value."""
        for optimizer, settings in self._settings.items():
            for (name, value, writes), (_, now, all_writes) in zip(settings, _settings(optimizer), strict=False):
                if not _is_same(now, value) or all_writes != writes:
                    what = "the learning rate" if name == "lr" else f"{name} of {type(optimizer).__name__}"
                    raise RuntimeError(f"{WHO} cannot be captured: it sets {what}, which must be done outside")


@contextmanager
def watched(modules: bool, known: Sequence[Optimizer]) -> Iterator[Seen]:
    """What is used in this context; the `modules` too, if asked for."""
    seen, before, used = Seen(known), sys.getprofile(), Leaves()
    hook = register_optimizer_step_pre_hook(seen.optimizer)
    if modules:
        sys.setprofile(seen.profile)
    try:
        with used if modules else nullcontext():
            yield seen
    finally:
        hook.remove()
        # A leaf that the step makes and leaves behind has no gradient.
        seen.leaves = [leaf for leaf in used.leaves if isinstance(leaf, nn.Parameter) or leaf.grad is not None]
        if modules:  # cProfile cannot be called from Python
            getattr(before, "enable", lambda: sys.setprofile(before))()


def _settings(optimizer: Optimizer) -> list[tuple[str, Any, int]]:
    """Names and values of the settings, and how often a learning rate was written to."""
    items = [item for group in optimizer.param_groups for item in group.items() if item[0] != "params"]
    return [(name, value, getattr(value, "_version", 0) if name == "lr" else 0) for name, value in items]


def _check_settings(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for group in [group for group in optimizer.param_groups if group["params"]]:
        rate, device = group.get("lr"), group["params"][0].device
        if "lr" in group and not (isinstance(rate, Tensor) and rate.device == device):
            got = f"a tensor on {rate.device}" if isinstance(rate, Tensor) else repr(rate)
            wanted = f"the lr of {name} must be a tensor on {device}, which a schedule can fill, got {got}"
        elif group.get("capturable") is False:
            wanted = f"{name} must have capturable=True, got False: it would count its steps on the host"
        else:
            continue
        raise RuntimeError(f"{WHO} cannot be captured: {wanted}, in {line_in(sys._getframe(1))}")


def _check_state(optimizers: list[Optimizer]) -> None:
    items = [(optimizer, *item) for optimizer in optimizers for item in optimizer.state.items()]
    for optimizer, parameter, state in items:
        for name, value in state.items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device != parameter.device):
                what = f"{type(optimizer).__name__} keeps {name} of its state on the host"
                raise RuntimeError(f"{WHO} cannot be captured: {what}")


def _check_results(result: Any, device: torch.device) -> None:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.device != device:
            raise RuntimeError(f"{WHO} cannot be captured: it returns a tensor on {leaf.device}, outside of the graph")
        if not isinstance(leaf, (Tensor, Solution, Late, *PLAIN)):
            raise TypeError(f"{WHO} must return a tree of tensors, Solutions and plain values, got {leaf!r}")


def _contents(optimizers: list[Optimizer]) -> list[Any]:
    """Everything that the optimisers read."""
    contents: list[Any] = []
    for optimizer in optimizers:
        contents += [value for _, value, _ in _settings(optimizer)]
        for parameter in _parameters(optimizer):
            contents += [parameter, *optimizer.state.get(parameter, {}).values()]
    return contents


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)


def swapped(result: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    """The results of a step, with `swap(value)` for each value of this kind in trees, Solutions and late numbers."""

    def swap_leaf(value: Any) -> Any:
        if isinstance(value, kind):
            return swap(value)
        if isinstance(value, Late):
            return Late(value.work, *map(swap, value.tensors))
        if isinstance(value, Solution):
            return value.changed(
                **{each.name: swapped(value.__dict__[each.name], kind, swap) for each in fields(value)}
            )
        return value

    return pytree.tree_map(swap_leaf, result)


def _device_of(leaves: list[Any]) -> torch.device:
    """The device of a batch, whose leaves are checked."""
    if others := [leaf for leaf in leaves if not isinstance(leaf, Tensor | Hashable)]:
        raise TypeError(f"make_graphed_step needs a batch of tensors and plain values, got {others[0]!r}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.device.type != DEVICE or tensor.device != tensors[0].device:
            raise ValueError(f"make_graphed_step needs a batch on one {DEVICE} device, got a tensor on {tensor.device}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(f"make_graphed_step needs dense tensors in the batch, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError("make_graphed_step needs a batch without gradient, got a tensor that requires one")
    if not tensors:
        raise ValueError("make_graphed_step needs a tensor in the batch, got none")
    return tensors[0].device
