"""Protocol of a cell: what a DEQBlock calls, and the hooks that it looks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from ..solution import Solution
from ..solvers import Solver
from ..torch_internals.weights import modules_of


class Cell(Protocol):
    """Map f(z, x) whose fixed point z = f(z, x) a DEQBlock finds: any callable, an ``nn.Module`` where it has weights.

    The methods of ``CellHooks`` are optional: each is found by its name, and is called only where it exists.

    Examples:
        A cell of one's own, with a start and a dropout mask that stays the same during a solve:

        >>> class MaskedCell(torch.nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(features, features)
        ...         self.mask = None
        ...
        ...     def forward(self, z, x):
        ...         y = 0.3 * torch.tanh(self.linear(z)) + x
        ...         return y if self.mask is None else y * self.mask
        ...
        ...     def initial_state(self, x):
        ...         return x.clone()
        ...
        ...     def begin_solve(self):
        ...         keep = torch.rand(self.linear.out_features) > 0.1
        ...         self.mask = keep / 0.9 if self.training else None
        ...
        ...     def end_solve(self):
        ...         self.mask = None
        >>> block = deqfast.DEQBlock(MaskedCell(8))
        >>> block(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __call__(self, z: Any, x: Any, /) -> Any:
        """Evaluate f for a batch.

        Called once per iteration without gradient, and once or more with gradient at the solution; under the caller's
        autocast state. The first training call of a block makes three more calls before, without gradient.

        Args:
            z: the state, a tensor (B, ...) or a pytree of them, in the dtypes and memory order of z0. The solver's own
                memory: it may neither be modified nor kept beyond the call.
            x: what the block was called with.

        Returns:
            f(z, x): structure and shapes of z, in memory that no earlier value lies in.
        """


class CellHooks(Protocol):
    """Optional methods of a cell, none of which needs another.

    ``initial_state`` and ``fixed_point`` are looked for in the cell itself; ``begin_solve``, ``end_solve``,
    ``cancel_solve`` and ``has_settled`` in every submodule of a cell that is an ``nn.Module``, the cell included. A
    description to read and to type against, not a base class: a method inherited from here would count as one that the
    cell has.
    """

    def initial_state(self, x: Any) -> Any:
        """Start z0 of the iteration for the input x, with the batch of x as dimension 0.

        Called once per forward pass of the block, unless that was given z0 or the block has an `init`.
        """

    def begin_solve(self) -> None:
        """Prepare a forward pass: draw a mask, say, that must not change from one evaluation to the next.

        Called once per forward pass, after z0 is known and before the first evaluation. A block with cuda_graph refuses
        a cell that has it, because a replayed graph would not run it.
        """

    def end_solve(self) -> None:
        """Finish a forward pass: let statistics take up, say, what the differentiated evaluations have measured.

        Called once per forward pass, after the solve and the evaluations that its gradient needs, before the value is
        returned and long before the backward pass; if the forward pass raises, by a module without ``cancel_solve``.
        """

    def cancel_solve(self) -> None:
        """Finish a forward pass that raises an error: drop, say, what a failed batch has measured.

        Called in the place of ``end_solve``, before the error reaches the caller; also in the first training call of a
        block, after its look for cells that change from call to call. A cell with ``end_solve`` and without this is not
        looked at.
        """

    def fixed_point(self, x: Any, z0: Any, solver: Solver, kernel: str) -> Solution | None:
        """Solve z = f(z, x) by a way of the cell's own; None where the ordinary loop must serve.

        Called once per forward pass under ``torch.no_grad`` in place of ``deqfast.solve``; but not with trace=True,
        `stop_fn`, `groups`, `scale` or ``SHINE``, in ``trajectory``, under torch.func or torch.export, nor by
        ``Unrolled`` and ``Reversible``.

        Args:
            x: what the block was called with.
            z0: start of the iteration.
            solver: the block's solver, whose tolerance and max_iter the Solution must respect.
            kernel: the block's choice, "auto", "triton", "cuda", "cpp" or "torch".
        """

    def has_settled(self) -> bool:
        """Return whether the module is the same function in all solves to come, but for its parameters and buffers.

        Called before every solve of a block with cuda_graph. While one module says False, the block runs the ordinary
        loop, because what a module does in Python is fixed when its solve is captured.
        """


@contextmanager
def solving(modules: Sequence[nn.Module], cancelled: bool = False) -> Iterator[None]:
    """Tell the modules of a cell when a solve begins, and how it ends; `cancelled`: as after an error."""
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
    """Return whether every module of the cell that finishes solves can also drop one."""
    modules = modules_of(cell)
    return all(_has(module, "cancel_solve") for module in modules if _has(module, "end_solve"))


def _has(module: nn.Module, event: str) -> bool:
    """Return whether the module has this hook itself, not through a module that it wraps."""
    return hasattr(type(module), event) or event in module.__dict__


def _notify(modules: Sequence[nn.Module], *events: str) -> None:
    """Call the first of these hooks that each module has."""
    for module in modules:
        if event := next((event for event in events if _has(module, event)), None):
            getattr(module, event)()
