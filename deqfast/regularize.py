"""Penalty on the Jacobian of a cell, its spectral radius, and a loss that trains the start of a solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._checks import check_count
from .state.evaluation import countable
from .state.groups import Grouping
from .state.norms import largest, lengths, unit
from .state.packing import Packing, rows_dtype
from .state.rows import per_row, rows_of, with_stand_ins
from .torch_internals import pytree
from .torch_internals.autograd import detached, in_order_of, not_leaves, vjp
from .torch_internals.dynamo import uncompiled
from .torch_internals.transforms import check_values, values

KRYLOV = 20  # products of Arnoldi's method in the spectral radius
TRUSTED = 0.1  # residual of its value, relative, up to which it counts


def jacobian_penalty(
    cell: Callable[[Any, Any], Any], z: Any, x: Any, probes: int = 1, per_sample: Any = None
) -> Tensor:
    """Hutchinson's estimate of |J|_F^2 / D, averaged over the samples; add it to a loss with a small weight.

    It costs one evaluation of the cell and `probes` products with its Jacobian in z, which can be differentiated again.
    It is unbiased, with a relative deviation of about sqrt(2 / (B D probes)). Source: Bai et al., ICML 2021, (7).

    Samples for which the cell's value is not finite do not count, and get no gradient.

    Args:
        cell: the map (z, x) -> z.
        z: the point, detached here: a tensor (B, ...) or a pytree of tensors, with D numbers per sample.
        x: the second argument of `cell`; the penalty is differentiable in it and in the parameters.
        probes: number of random vectors from torch's generator, at least 1.
        per_sample: which tensors of x have a row per row of z, see ``DEQBlock``.

    Returns:
        A differentiable scalar.

    Raises:
        TypeError, ValueError: `probes` is not such a number.

    Examples:
        >>> cell, x = deqfast.FCCell(3, 8), torch.randn(4, 3)
        >>> z = deqfast.DEQBlock(cell)(x)
        >>> (z.square().mean() + 0.1 * deqfast.regularize.jacobian_penalty(cell, z, x)).backward()
    """
    check_count("probes", probes)
    check_values("z", z)
    with torch.inference_mode(False), torch.enable_grad():
        leaves, outputs = _evaluated(cell, z, x)
        broken = ~torch.stack([torch.isfinite(rows_of(y)).all(dim=1) for y in outputs]).all(dim=0)
        if bool(values(broken).any()):
            leaves, outputs = _evaluated(cell, *with_stand_ins(cell, z, x, broken, per_sample))
        total = torch.zeros((), device=leaves[0].device, dtype=torch.float64)
        for _ in range(probes):
            pulled = vjp(outputs, leaves, [_probe(y) for y in outputs], create_graph=True)
            products = [torch.where(per_row(broken, p), 0, p) for p in pulled if p is not None]
            total = total + sum(rows_of(p).double().square().sum() for p in products)
    width = sum(rows_of(leaf).shape[1] for leaf in leaves)
    return (total / (probes * width * (~broken).sum()).clamp_min(1)).to(rows_dtype(leaves))


def _probe(like: Tensor) -> Tensor:
    """Normal numbers of variance 1; for a complex tensor, in each of its two parts."""
    return torch.randn_like(like) * 2**0.5 if like.is_complex() else torch.randn_like(like)


def internalisation(z0: Any, z: Any) -> Tensor:
    """Mean over the samples of |z0 - z*|^2 / |z*|^2: a loss that trains a start z0(x) to be near z*.

    In a small looped language model solves then took 14 and 20 % fewer evaluations. z* gets no gradient. Source of the
    name: Fein-Ashley and Rashidinejad, arXiv 2605.12466, whose training brings z0 near z* without such a loss.

    Args:
        z0: start that was given to the solve, with its graph: a tensor (B, ...) or a pytree of tensors.
        z: value of the block, a tree like z0.

    Returns:
        A differentiable scalar. A sample whose z* is zero does not count.

    Raises:
        ValueError: z0 has not the structure and shapes of z.

    Examples:
        >>> propose, block, x = torch.nn.Linear(3, 8), deqfast.DEQBlock(deqfast.FCCell(3, 8)), torch.randn(4, 3)
        >>> z = block(x, z0=(z0 := propose(x)))
        >>> (z.square().mean() + 0.1 * deqfast.regularize.internalisation(z0, z)).backward()
    """
    ends, spec = pytree.tree_flatten(detached(z))
    starts, given = pytree.tree_flatten(z0)
    shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (starts, ends)]
    if given != spec or shapes[0] != shapes[1]:
        raise ValueError(f"z0 must have the structure and shapes of z, {spec} {shapes[1]}, got {given} {shapes[0]}")
    wide = rows_dtype(ends)
    start, end = (torch.cat([rows_of(a).to(wide) for a in leaves], dim=1) for leaves in (starts, ends))
    counted, longest = end.any(dim=1), largest(end)  # over it, no square overflows, and the largest is 1
    gap, size = (part.square().sum(dim=1) for part in (start / longest - end / longest, end / longest))
    return torch.where(counted, gap / torch.where(counted, size, 1), 0).sum() / counted.sum().clamp_min(1)


@torch.no_grad()
def spectral_radius(
    cell: Callable[[Any, Any], Any], z: Any, x: Any, iterations: int = 50, groups: Grouping = None
) -> Tensor:
    """Spectral radius of the Jacobian of cell(., x) at z, one per sample. If it is below 1, plain iteration converges.

    Computed from products with the transpose, which has the same eigenvalues. Power iteration comes first. The last 20
    products are Arnoldi's method, which finds complex pairs of eigenvalues in any basis. Its largest value counts if it
    is an eigenvalue of a matrix that differs from the Jacobian by at most a tenth of that value. Else the result is the
    growth of a vector's length over the second half of the iterations. This is right within a few percent for many
    eigenvalues of nearly the same modulus, and unreliable for other Jacobians: take more iterations.

    Needs the memory of 20 states in float64.

    Args:
        cell: the map (z, x) -> z, which must treat samples independently.
        z, x: as for ``jacobian_penalty``.
        iterations: products with the Jacobian, at least 2.
        groups: for a cell that couples rows of z: the sample of each row, see ``solve``.

    Returns:
        (B,) float64.

    Raises:
        TypeError, ValueError: `iterations` or `groups` is not as above.

    Examples:
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
        >>> deqfast.regularize.spectral_radius(lambda z, x: z @ turn + x, torch.zeros(3, 2), torch.zeros(3, 2))
        tensor([0.9000, 0.9000, 0.9000], dtype=torch.float64)
    """
    check_count("iterations", iterations, 2)
    check_values("z", z)
    packing = Packing(z, groups)
    with torch.inference_mode(False), torch.enable_grad():
        leaves, outputs = _evaluated(cell, z, x)

    def product(v: Tensor) -> Tensor:
        pulled = vjp(outputs, leaves, packing.spec.flatten_up_to(packing.unpack(v.to(packing.dtype))))
        products = [torch.zeros_like(leaf) if p is None else p for p, leaf in zip(pulled, leaves, strict=True)]
        return packing.pack(pytree.tree_unflatten(products, packing.spec)).double()

    steps = min(KRYLOV, iterations)
    v = unit(packing.pack(pytree.tree_map(torch.randn_like, z)).double())
    grown = []
    for _ in range(iterations - steps):
        w = product(v)
        grown.append(lengths(w).log())
        v = unit(w)
    projected = _arnoldi(product, v, steps)
    u = torch.zeros_like(projected[:, :-1, 0])
    u[:, :1] = 1
    for _ in range(steps):  # further powers in Arnoldi's basis, without products
        w = (projected @ u[:, :, None])[:, :, 0]
        grown.append(lengths(w).log())
        u = unit(w)[:, :-1]
    growth = torch.stack(grown)[iterations // 2 :].mean(dim=0).exp()
    radius, error = _ritz(projected)
    return torch.where(error <= TRUSTED * radius, radius, growth)


def _arnoldi(product: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    """Projection (B, steps + 1, steps) of a matrix on an orthonormal basis of v (B, D) and its products."""
    basis = v.new_zeros(len(v), steps, v.shape[1])
    projected = v.new_zeros(len(v), steps + 1, steps)
    exhausted = 64 * torch.finfo(v.dtype).eps * max(1, v.shape[1]) ** 0.5  # the rest is rounding: nothing is left
    for j in range(steps):
        basis[:, j] = v
        w = product(v)
        size = lengths(w)
        for _ in range(2):  # once would leave the basis orthogonal only to the rounding of a long product
            shares = (basis[:, : j + 1] @ w[:, :, None])[:, :, 0]
            projected[:, : j + 1, j] += shares
            w = w - (shares[:, None] @ basis[:, : j + 1])[:, 0]
        rest = lengths(w)
        rest = torch.where(rest <= exhausted * size, 0, rest)
        projected[:, j + 1, j] = rest
        v = torch.where(rest[:, None] == 0, 0, unit(w))
    return projected


def _ritz(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Largest modulus (B,) of the projection's eigenvalues, and the residual of its vector; NaN if it is not finite."""
    known = projected.isfinite().flatten(1).all(dim=1)
    square = torch.where(known[:, None, None], projected[:, :-1], 0).cpu()  # a small matrix of each sample
    values, vectors = torch.linalg.eig(square)
    radius, top = values.abs().max(dim=1)
    last = vectors[:, -1].gather(1, top[:, None])[:, 0].abs().to(projected.device)
    radius = torch.where(known, radius.to(projected.device), torch.nan)
    return radius, projected[:, -1, -1] * last


def _evaluated(cell: Callable[[Any, Any], Any], z: Any, x: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves of z and of the cell's value at z, connected by an autograd graph."""
    z, x = (pytree.tree_map_only(Tensor, countable, tree) for tree in (z, x))
    z = detached(z, requires_grad=True)
    return pytree.tree_leaves(z), in_order_of(z, uncompiled(cell)(not_leaves(z), x))
