"""Protocol of a cell: what a DEQBlock calls, and the hooks that it looks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn

from ..solution import Solution
from ..solvers import Solver
from ..torch_internals.weights import NOTHING, modules_of

_EVENTS = {"begin_solve", "end_solve", "cancel_solve"}


class Cell(Protocol):
    """Map f(z, x) whose fixed point z = f(z, x) a DEQBlock finds: any callable. With weights, it is an ``nn.Module``.

    The methods of ``CellHooks`` are optional: each is found by its name, and is called only if it exists.

    Examples:
        A custom cell, with a start and a dropout mask that stays the same during a solve:

        >>> class MaskedCell(torch.nn.Linear):
        ...     def forward(self, z, x):
        ...         return (0.3 * torch.tanh(super().forward(z)) + x) * self.mask
        ...
        ...     def initial_state(self, x):
        ...         return x.clone()
        ...
        ...     def begin_solve(self):
        ...         self.mask = (torch.rand(self.out_features) > 0.1) / 0.9 if self.training else 1.0
        >>> block = deqfast.DEQBlock(MaskedCell(8, 8))
        >>> block(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __call__(self, z: Any, x: Any, /) -> Any:
        """Evaluate f for a batch.

        Called once per iteration without gradient, and once or more with gradient at the solution. The caller's
        autocast state applies. The first training call of a block first makes three more calls, without gradient.

        Args:
            z: the state, a tensor (B, ...) or a pytree of tensors, in the dtypes and memory order of z0. It lies in the
                solver's memory: do not modify it, nor keep it beyond the call.
            x: the block's input.

        Returns:
            f(z, x): structure and shapes of z, in memory that does not hold an earlier value.
        """


class CellHooks(Protocol):
    """Optional methods of a cell, each independent of the others.

    ``initial_state`` and ``fixed_point`` are called on the cell itself. ``begin_solve``, ``end_solve``,
    ``cancel_solve`` and ``has_settled`` are called on the cell and on all its submodules, if it is an ``nn.Module``.
    This class is for reading and type checking, not for inheritance: an inherited method would count as defined.
    """

    def initial_state(self, x: Any) -> Any:
        """Start z0 of the iteration for the input x, with the batch of x as dimension 0.

        Called once per forward pass of the block, unless the call passes z0 or the block has an `init`.
        """

    def begin_solve(self) -> None:
        """Prepare a forward pass: for example, draw a mask that must not change between evaluations.

        Called once per forward pass, after z0 is known and before the first evaluation. A block with cuda_graph refuses
        a cell with this method, because a replayed graph would not run it.
        """

    def end_solve(self) -> None:
        """Finish a forward pass: for example, update statistics with what the differentiated evaluations measured.

        Called once per forward pass, after the solve and the evaluations that its gradient needs. It runs before the
        value is returned, long before the backward pass, and without ``cancel_solve`` also if the forward pass raises.
        """

    def cancel_solve(self) -> None:
        """Finish a forward pass that raises an error: for example, drop what a failed batch has measured.

        Called in place of ``end_solve``, before the error reaches the caller. The first training call of a block also
        calls it, after checking the cell, unless a module has ``end_solve`` but lacks this method.
        """

    def fixed_point(self, x: Any, z0: Any, solver: Solver, kernel: str) -> Solution | None:
        """Solve z = f(z, x) by the cell's own method; return None if the ordinary loop has to solve it.

        Called once per forward pass under ``torch.no_grad`` in place of ``deqfast.solve``. It is not called with
        trace=True, `stop_fn`, `groups`, `scale`, ``Unrolled``, ``Reversible`` or, if gradients are recorded, ``SHINE``.
        Nor is it called in ``trajectory``, or under torch.func or torch.export.

        Args:
            x: the block's input.
            z0: start of the iteration.
            solver: the block's solver, whose tolerance and max_iter the Solution must respect.
            kernel: the block's choice, "auto", "triton", "cuda", "cpp" or "torch".
        """

    def from_position(self, z: Any, x: Any, first: int, value: Any) -> Any:
        """Value of f at the positions from `first` on, (B, T - first, ...) for each tensor of z.

        A block with causal=True calls it in place of the cell once the positions before have ended in all sequences.
        They take part only in what the others read. Not called for gradients, in ``trajectory`` or under torch.func.

        Args:
            z: the state at all positions.
            x: the block's input.
            first: the first of the positions, at least 1.
            value: f at the positions before, (B, first, ...): as they have ended, it is what f returned there last.
        """

    def has_settled(self) -> bool:
        """Return whether the module stays the same function in all later solves, up to its parameters and buffers.

        Called before every solve of a block with cuda_graph. While a module returns False, the block runs the ordinary
        loop: a capture fixes what the module's Python code does.
        """


def solving(modules: Sequence[nn.Module], cancelled: bool = False) -> AbstractContextManager[None]:
    """Notify the modules of a cell when a solve begins and ends; `cancelled`: end it as after an error."""
    kinds: Any = map(type, modules)
    hooked = [m for m, kind in zip(modules, kinds, strict=True) if _takes_part(kind) or _EVENTS & m.__dict__.keys()]
    return _solving(hooked, cancelled) if hooked else NOTHING


@functools.cache
def _takes_part(kind: Any) -> bool:
    """Return whether modules of this class have an event of a solve."""
    return any(hasattr(kind, event) for event in _EVENTS)


@contextmanager
def _solving(modules: Sequence[nn.Module], cancelled: bool) -> Iterator[None]:
    begun: list[nn.Module] = []
    try:
        for module in modules:
            _notify([module], "begin_solve")
            begun.append(module)
        yield
    except BaseException:
        _notify(begun, "cancel_solve", "end_solve")
        raise
    _notify(modules, *(["cancel_solve"] if cancelled else []), "end_solve")


def can_cancel(cell: Callable[..., Any]) -> bool:
    """Return whether every module of the cell with ``end_solve`` also has ``cancel_solve``."""
    modules = modules_of(cell)
    return all(_has(module, "cancel_solve") for module in modules if _has(module, "end_solve"))


def _has(module: nn.Module, event: str) -> bool:
    """Return whether the module has this hook itself, not through a module that it wraps."""
    return hasattr(type(module), event) or event in module.__dict__


def _notify(modules: Sequence[nn.Module], *events: str) -> None:
    """Call the first of these hooks that each module has; the first of their errors is raised after all calls."""
    failed: BaseException | None = None
    for module in modules:
        if event := next((event for event in events if _has(module, event)), None):
            try:
                getattr(module, event)()
            except BaseException as error:
                failed = failed or error
    if failed is not None:
        raise failed
