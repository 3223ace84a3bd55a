"""Fixed points as functions, for people without modules and for torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .adjoints import Adjoint
from .block import DEQBlock
from .solvers import Solver
from .torch_internals.dynamo import is_exporting, untraced


class _Spread(nn.Module):
    """f(z, *args) as a cell of x = args."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, z: Any, x: tuple[Any, ...]) -> Any:
        return self.f(z, *x)


def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: str | Solver = "broyden",
    adjoint: str | Adjoint = "implicit",
    return_solution: bool = False,
    **options: Any,
) -> Any:
    """z* = f(z*, *args), differentiable in `args` and in the parameters that f holds.

    In compiled code it runs as it is, between two graphs, which fullgraph=True refuses: a ``DEQBlock`` is part of one.

    Args:
        f: takes z and `args`, and returns a tree like z; any callable, or an ``nn.Module``.
        z0: start of the iteration, a floating-point tensor (B, ...) or a pytree of them.
        args: tensors, pytrees of them, or anything else that f takes.
        solver: of the forward solve, as for ``DEQBlock``.
        adjoint: how gradients are found, as for ``DEQBlock``.
        return_solution: return the Solution too.
        options: further ones of ``DEQBlock`` and of its call: kernel, sync_every, drop_converged, per_sample, trace,
            stop_fn, scale, warn (which then warns at every call), groups.

    Returns:
        z*, a tree like z0; with `return_solution` (z*, Solution).

    Raises:
        TypeError, ValueError, RuntimeError: as ``DEQBlock``; TypeError for an option that it does not have, or that
            means something to a block of many calls only: init, eval_solver, cuda_graph, compile.

    Examples:
        The square root of a by Newton's iteration, and its derivative:

        >>> newton = lambda z, a: (z + a / z) / 2
        >>> a = torch.tensor([[4.0], [9.0]], requires_grad=True)
        >>> root = deqfast.fixed_point(newton, torch.ones(2, 1), a, solver="picard")
        >>> (slope,) = torch.autograd.grad(root.sum(), a)
        >>> torch.allclose(root, a.sqrt(), atol=1e-3), torch.allclose(slope, 0.5 / a.sqrt(), atol=1e-3)
        (True, True)

        As a function of one sample, mapped over many:

        >>> root = lambda a: deqfast.fixed_point(newton, torch.ones(1, 1), a, solver="picard").sum()
        >>> torch.vmap(torch.func.grad(root))(torch.tensor([[[4.0]], [[16.0]]])).flatten()
        tensor([0.2500, 0.1250])
    """
    if kept := sorted(options.keys() & {"init", "eval_solver", "cuda_graph", "compile"}):
        raise TypeError(f"fixed_point takes no {kept[0]!r}, which serves many calls: make a DEQBlock")
    return untraced(_solve, f, z0, args, return_solution, options | {"solver": solver, "adjoint": adjoint})


def _solve(f: Callable[..., Any], z0: Any, x: tuple[Any, ...], return_solution: bool, options: dict[str, Any]) -> Any:
    groups = options.pop("groups", None)
    block = DEQBlock(_Spread(f), **options)
    block._changes.evaluates = False  # which every call would do again
    block.training = not is_exporting()  # an export takes none in training, and nobody else has this one
    return block(x, z0, return_solution=return_solution, groups=groups)
