"""Fixed points and roots as functions, without a module; they also work under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adjoints import Adjoint
from .block import DEQBlock
from .solvers import Auto, Solver
from .state.packing import Packing
from .state.rows import per_row, rows_of
from .torch_internals import pytree
from .torch_internals.dynamo import is_exporting, untraced

ROOTS = Auto(rtol=0, atol=1e-6)  # xitorch too bounds |g| by 1e-6
TINY = 1e-30  # least divisor


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
    """Fixed point z* = f(z*, *args), differentiable in `args` and in the parameters of f.

    torch.compile runs it uncompiled between two graphs, and refuses it with fullgraph=True. A ``DEQBlock`` is part of a
    graph.

    Args:
        f: takes z and `args`, and returns a tree like z; any callable, or an ``nn.Module``.
        z0: start of the iteration, a floating-point tensor (B, ...) or a pytree of them.
        args: tensors, pytrees of them, or anything else that f takes.
        solver: of the forward solve, as for ``DEQBlock``.
        adjoint: how gradients are found, as for ``DEQBlock``.
        return_solution: return the Solution too.
        options: further ones of ``DEQBlock`` and of its call: kernel, sync_every, drop_converged, per_sample, trace,
            stop_fn, scale, warn, groups. The warning comes at every call.

    Returns:
        `z*`, a tree like z0; with `return_solution` `(z*, Solution)`.

    Raises:
        TypeError, ValueError, RuntimeError: as ``DEQBlock``. TypeError for an unknown option, or for one that concerns
            several calls of a block: init, eval_solver, cuda_graph, compile.

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
    _check_options("fixed_point", options)
    options |= {"solver": solver, "adjoint": adjoint}
    return untraced(_solve, _Spread(f), z0, args, return_solution, options)


def _check_options(function: str, options: dict[str, Any]) -> None:
    if kept := sorted(options.keys() & {"init", "eval_solver", "cuda_graph", "compile"}):
        raise TypeError(f"{function} takes no {kept[0]!r}, which serves many calls: make a DEQBlock")


class _Signed(nn.Module):
    """z + sign g(z, *args), whose fixed points are the roots of g, as a cell of x = (args, sign of each row)."""

    def __init__(self, g: Callable[..., Any]) -> None:
        super().__init__()
        self.g = g

    def forward(self, z: Any, x: tuple[tuple[Any, ...], Tensor]) -> Any:
        args, sign = x
        value = self.g(z, *args)
        states, spec = pytree.tree_flatten(z)
        values = pytree.tree_leaves(value)
        if [v.shape for v in values] != [z.shape for z in states]:
            return value  # the solve refuses this value; a sum would broadcast it
        signed = [z + per_row(sign, z).to(z.dtype) * v for z, v in zip(states, values, strict=True)]
        return pytree.tree_unflatten(signed, spec)


def root(
    g: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: str | Solver = ROOTS,
    adjoint: str | Adjoint = "implicit",
    sign: float | None = None,
    return_solution: bool = False,
    **options: Any,
) -> Any:
    """Root z* of g(z*, *args) = 0, differentiable in `args` and in the parameters of g.

    It is the fixed point of f(z) = z + sign g(z), whose residual f(z) - z is sign g(z). The right sign depends on g.
    Plain iteration needs the sign for which a step along sign g reduces |g|. Broyden and Anderson need it less.

    Args:
        g: takes z and `args`, and returns a tree like z; any callable, or an ``nn.Module``.
        z0: start of the iteration, a floating-point tensor (B, ...) or a pytree of them.
        args: tensors, pytrees of them, or anything else that g takes.
        solver: of the forward solve, as for ``DEQBlock``; choose an absolute tolerance, which bounds |g|.
        adjoint: how gradients are found, as for ``DEQBlock``.
        sign: 1 or -1; None: found for each row of z0 by a trial, which costs two evaluations of g.
        return_solution: return the Solution too, whose residual is |g| if the tolerance is absolute.
        options: as for ``fixed_point``.

    Returns:
        `z*`, a tree like z0; with `return_solution` `(z*, Solution)`.

    Raises:
        TypeError, ValueError, RuntimeError: as ``fixed_point``; ValueError if `sign` is not as above.

    Examples:
        >>> a = torch.tensor([[2.0], [5.0]], dtype=torch.float64, requires_grad=True)
        >>> z = deqfast.root(lambda z, a: z**3 - a, torch.ones(2, 1, dtype=torch.float64), a)
        >>> (slope,) = torch.autograd.grad(z.sum(), a)
        >>> torch.allclose(z**3, a, atol=1e-5), torch.allclose(slope, 1 / (3 * z**2), atol=1e-5)
        (True, True)
    """
    signs = (None, 1, -1)
    if sign not in signs:
        raise ValueError(f"sign must be 1, -1 or None, got {sign!r}")
    _check_options("root", options)
    options |= {"solver": solver, "adjoint": adjoint}
    return untraced(_solve_root, g, z0, args, sign, return_solution, options)


def _solve_root(
    g: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    sign: float | None,
    return_solution: bool,
    options: dict[str, Any],
) -> Any:
    leaf = pytree.tree_leaves(z0)[0]
    signs = _falling(g, z0, args) if sign is None else torch.full((len(leaf),), float(sign), device=leaf.device)
    return _solve(_Signed(g), z0, (args, signs), return_solution, options)


@torch.no_grad()
def _falling(g: Callable[..., Any], z0: Any, args: tuple[Any, ...]) -> Tensor:
    """Sign (N,) with which a step along g reduces each row's |g|, by a finite difference at z0."""
    states, spec = pytree.tree_flatten(z0)
    values = Packing(z0).check_value(g(z0, *args))
    size = _dots(states, states).sqrt()
    step = torch.finfo(size.dtype).eps ** 0.5 * (1 + size) / _dots(values, values).sqrt().clamp_min(TINY)
    moved = [z + per_row(step, value) * value for z, value in zip(states, values, strict=True)]
    changed = pytree.tree_leaves(g(pytree.tree_unflatten(moved, spec), *args))
    slope = _dots([new - value for new, value in zip(changed, values, strict=True)], values)
    return torch.where(slope > 0, -1.0, 1.0)


def _dots(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Real inner products (N,) of the rows of two lists of tensors."""
    return torch.stack([(rows_of(x) * rows_of(y)).sum(dim=1) for x, y in zip(a, b, strict=True)]).sum(dim=0)


def _solve(cell: nn.Module, z0: Any, x: tuple[Any, ...], return_solution: bool, options: dict[str, Any]) -> Any:
    groups = options.pop("groups", None)
    block = DEQBlock(cell, **options)
    block._changes.evaluates = False  # every call would repeat its evaluations
    block.training = not is_exporting()  # torch.export refuses a block in training; nobody else uses this one
    return block(x, z0, return_solution=return_solution, groups=groups)
