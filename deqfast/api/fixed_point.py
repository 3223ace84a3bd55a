"""Fixed points and roots as functions, without a module; they also work under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.loop import StopFn
from ..gradients import Adjoint
from ..solvers import Auto, Solver
from ..state.groups import Grouping
from ..state.norms import lengths, unit
from ..state.packing import LARGEST_SCALE, Packing
from ..state.rows import dropped_samples, mark_samples, per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import in_order_of
from ..torch_internals.dynamo import is_exporting, untraced
from .block import DEQBlock

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
    groups: Grouping = None,
    scale: Any = None,
    per_sample: Any = None,
    stop_fn: StopFn | None = None,
    kernel: str = "auto",
    drop_converged: bool = False,
    trace: bool = False,
    lockstep: Any = None,
    state_group: Any = None,
    causal: bool = False,
    warn: bool = True,
    return_solution: bool = False,
) -> Any:
    """Fixed point z* = f(z*, *args), differentiable in `args` and in the parameters of f.

    torch.compile runs it uncompiled, and refuses it with fullgraph=True. A ``DEQBlock`` is part of a graph.

    Arguments that are not listed here are those of ``DEQBlock``, with f as the cell and `args` as its x.

    Args:
        f: takes z and `args`, and returns a tree like z; any callable, or an ``nn.Module``.
        z0: start of the iteration, a floating-point tensor (B, ...) or a pytree of them.
        args: tensors, pytrees of them, or anything else that f takes.
        per_sample: which tensors of `args` have one row per row of z: a tuple like `args`.
        warn: warn at every call.
        return_solution: return the Solution too.

    Returns:
        `z*`, a tree like z0; with `return_solution` `(z*, Solution)`.

    Raises:
        TypeError, ValueError, RuntimeError: as ``DEQBlock``.

    Examples:
        The square root of a by Newton's iteration, and its derivative:

        >>> newton = lambda z, a: (z + a / z) / 2
        >>> a = torch.tensor([[4.0], [9.0]], requires_grad=True)
        >>> root = deqfast.fixed_point(newton, torch.ones(2, 1), a, solver="picard")
        >>> (slope,) = torch.autograd.grad(root.sum(), a)
        >>> torch.allclose(root, a.sqrt(), atol=1e-3), torch.allclose(slope, 0.5 / a.sqrt(), atol=1e-3)
        (True, True)
        >>> root = lambda a: deqfast.fixed_point(newton, torch.ones(1, 1), a, solver="picard").sum()
        >>> torch.vmap(torch.func.grad(root))(torch.tensor([[[4.0]], [[16.0]]])).flatten()
        tensor([0.2500, 0.1250])
    """
    options: dict[str, Any] = dict(solver=solver, adjoint=adjoint, scale=scale, per_sample=per_sample, stop_fn=stop_fn)
    options |= dict(kernel=kernel, drop_converged=drop_converged, trace=trace, causal=causal, warn=warn)
    options |= dict(lockstep=lockstep, state_group=state_group)
    return untraced(_solve, _Spread(f), z0, args, groups, return_solution, options)


class _Stepped(nn.Module):
    """u + sign g(size u, *args), whose fixed points are roots over their sizes, as a cell of x = (args, signs, sizes).

    Signs and sizes (N,) are those of the rows' steps; sizes may be None, for 1. The residual is |g|, whatever the size.
    """

    def __init__(self, g: Callable[..., Any]) -> None:
        super().__init__()
        self.g = g

    def forward(self, u: Any, x: tuple[tuple[Any, ...], Tensor, Tensor | None]) -> Any:
        args, signs, sizes = x
        value = self.g(_times(sizes, u), *args)
        states, values = pytree.tree_leaves(u), in_order_of(u, value)
        if [v.shape for v in values] != [u.shape for u in states]:
            return value  # the solve refuses this value; a sum would broadcast it
        stepped = [u + per_row(signs, u).to(u.dtype) * v for u, v in zip(states, values, strict=True)]
        return pytree.tree_unflatten(stepped, pytree.tree_structure(u))


def _times(numbers: Tensor | None, tree: Any) -> Any:
    """The tree with each row times its number (N,), None for 1."""
    if numbers is None:
        return tree
    return pytree.tree_map(lambda leaf: leaf * per_row(numbers, leaf).to(leaf.dtype), tree)


def root(
    g: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: str | Solver = ROOTS,
    adjoint: str | Adjoint = "implicit",
    sign: float | None = None,
    groups: Grouping = None,
    scale: Any = None,
    per_sample: Any = None,
    stop_fn: StopFn | None = None,
    kernel: str = "auto",
    drop_converged: bool = False,
    trace: bool = False,
    lockstep: Any = None,
    state_group: Any = None,
    warn: bool = True,
    return_solution: bool = False,
) -> Any:
    """Root z* of g(z*, *args) = 0, differentiable in `args` and in the parameters of g.

    It is the fixed point of f(z) = z + s g(z), with a step s of each row. The right sign and size of s depend on g:
    plain iteration needs the sign for which a step reduces |g|, and a size near the inverse of g's slope. A factor of g
    between 2^-60 and 2^60 changes neither iterates nor evaluations, for a tolerance with the same factor.

    The solver works on z / |s|, so that its residual is |g|. Its other tolerance, `rtol`, is relative to z / |s|.

    Arguments that are not listed here are those of ``fixed_point``. `stop_fn` is given z and z + s g(z).

    Args:
        g: takes z and `args`, and returns a tree like z; any callable, or an ``nn.Module``.
        z0: start of the iteration, a floating-point tensor (B, ...) or a pytree of them.
        args: tensors, pytrees of them, or anything else that g takes.
        solver: of the forward solve; choose an absolute tolerance, which bounds |g|.
        sign: s, 1 or -1; None: sign and size are found for each row of z0, or for each of the `groups`. This costs
            three evaluations of g: at z0, near z0, and about as far from z0 as z0 is long, plus 1 for each number. If
            the last is not finite, the second decides. With `state_group` it must be given.
        return_solution: return the Solution too, whose residual is |g| if the tolerance is absolute.

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
    if sign not in (None, 1, -1):
        raise ValueError(f"sign must be 1, -1 or None, got {sign!r}")
    if sign is None and state_group is not None:
        raise ValueError("sign must be 1 or -1 with state_group: a process sees g of its own parts only, got None")
    options: dict[str, Any] = dict(solver=solver, adjoint=adjoint, scale=scale, per_sample=per_sample, stop_fn=stop_fn)
    options |= dict(kernel=kernel, drop_converged=drop_converged, trace=trace, warn=warn)
    options |= dict(lockstep=lockstep, state_group=state_group)
    return untraced(_solve_root, g, z0, args, sign, groups, return_solution, options)


def _solve_root(
    g: Callable[..., Any], z0: Any, args: Any, sign: float | None, groups: Grouping, returns: bool, options: Any
) -> Any:
    packing = Packing(z0, groups)
    rows = packing.leaves[0].shape[0]
    if sign is None:
        steps = _tried(g, z0, args, packing)
        signs, sizes = steps.sign(), steps.abs()
    else:
        signs, sizes = torch.full((rows,), float(sign), device=packing.device), None
    marks = (dropped_samples if options["drop_converged"] else mark_samples)(args, rows, options["per_sample"])
    if None not in marks:  # else x, which has the steps too, is judged like args
        options["per_sample"] = pytree.tree_unflatten(marks, pytree.tree_structure(args)), True, sizes is not None
    if callable(stop_fn := options["stop_fn"]):
        options["stop_fn"] = lambda u, value, k: stop_fn(_times(sizes, u), _times(sizes, value), k)
    start = z0 if sizes is None else _times(1 / sizes, z0)
    u, solution = _solve(_Stepped(g), start, (args, signs, sizes), groups, True, options)
    z = _times(sizes, u)
    return (z, replace(solution, value=_times(sizes, solution.value))) if returns else z


@torch.no_grad()
def _tried(g: Callable[..., Any], z0: Any, args: tuple[Any, ...], packing: Packing) -> Tensor:
    """Steps (N,) along g that reduce |g|, from g at two points near z0.

    The first point gives the sign: it lies along g, as near as rounding allows. The other is as far as z0 is long, plus
    1 for each number, with signs in no order. So it also finds stiff directions, and a slope that is zero at z0 only.
    """

    def evaluated(z: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        leaves = packing.check_value(g(pytree.tree_unflatten(z, packing.spec), *args))
        return leaves, packing.pack(pytree.tree_unflatten(leaves, packing.spec)).double()

    def by_row(numbers: Tensor) -> Tensor:
        return numbers if packing.groups is None else packing.groups.per_row(numbers)

    def change(distance: Tensor, directions: list[Tensor]) -> Tensor:
        """Change of g, over the distance."""
        share = by_row(distance / length.clamp_min(TINY))
        moved = [(z + per_row(share, d) * d).to(z.dtype) for z, d in zip(starts, directions, strict=True)]
        return (evaluated(moved)[1] - value) / distance[:, None]

    starts = packing.spec.flatten_up_to(z0)
    along, value = evaluated(starts)
    length, size = lengths(value), lengths(packing.pack(z0).double())
    eps = max(torch.finfo(leaf.dtype).eps for leaf in starts)
    nearby = eps**0.5 * (1 + size)
    near = change(nearby, along)
    sign = torch.where((unit(near) * unit(value)).sum(dim=1) > 0, -1.0, 1.0)
    far = change(value.shape[1] ** 0.5 + size, [d * (per_row(by_row(sign), d) * _signs(d)).to(d.dtype) for d in along])
    slope = torch.fmax((lengths(near) - 2 * eps * length / nearby).clamp_min(0), lengths(far))  # without rounding
    known = (slope > 0) & torch.isfinite(slope) & all(leaf.dtype != torch.float16 for leaf in starts)
    step = torch.where(known, 1 / slope, 1.0).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    return by_row(sign * step).detach()


def _signs(like: Tensor) -> Tensor:
    """Signs in no order for the numbers of a row, without a random generator, which torch.vmap refuses."""
    numbers = torch.arange(like.shape[1:].numel(), dtype=torch.float64, device=like.device)
    return numbers.square().cos().sign().view(like.shape[1:])


def _solve(cell: nn.Module, z0: Any, x: Any, groups: Grouping, returns: bool, options: dict[str, Any]) -> Any:
    block = DEQBlock(cell, **options)
    block._changes.evaluates = False  # every call would repeat its evaluations
    block.training = not is_exporting()  # torch.export refuses a block in training; nobody else uses this one
    return block(x, z0=z0, return_solution=returns, groups=groups)
