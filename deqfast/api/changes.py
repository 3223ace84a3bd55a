"""Warnings in the first training call: of cells that change between calls, take (x, z), or ignore x."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from .._checks import signature_of
from ..cells.protocol import can_cancel, solving
from ..engine.plan import Plan
from ..gradients.base import leads_to
from ..state.evaluation import evaluate
from ..state.floors import float32_products_eps, residual_floor
from ..state.norms import sample_norms
from ..state.packing import Packing
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, requiring_grad
from ..torch_internals.weights import hold_weights, is_cached, modules_of, undone
from .notice import warn

HELP = "use GroupNorm or frozen statistics, dropout=0 or deqfast.SolveDropout, and noise drawn outside and given in x"


class Changes:
    """One check of a cell: whether it changes between calls, takes its arguments in the wrong order, or ignores x."""

    def __init__(self) -> None:
        self.evaluates = True  # evaluate a cell none of whose modules is known to change, and check its arguments
        self.looked, self.looks = False, False  # whether ``look`` has been called, and whether ``look_at`` comes next

    def look(self, plan: Plan) -> None:
        """Check the cell of a forward pass in training mode, and warn if it changes between calls."""
        self.looked = self.looks = True
        if changing := changing_modules(plan.cell):
            _warn(f"it contains {', '.join(changing)}")
        elif not self.evaluates or plan.context == "torch.func" or plan.options.lockstep is not None:
            return  # in lockstep an error in these evaluations would not end the other processes
        elif (gap := difference(plan) or 0) > 0:
            _warn(f"two evaluations at one state differ by {gap:.1g} of its length")

    def look_at(self, plan: Plan, value: Any) -> None:
        """Check the value of the forward pass that ``look`` has seen, and warn if the cell misuses its arguments."""
        looks, self.looks = self.looks and self.evaluates, False
        if not looks:
            return
        wanted = requiring_grad(plan.x) if plan.context == "eager" and torch.is_grad_enabled() else []
        if is_swapped(plan.cell):
            what = "deqfast: the cell's first parameters are called x and z, but a block calls cell(z, x)"
            warn(f"{what}: swap or rename them")
        elif wanted and not leads_to(pytree.tree_leaves(value), wanted):
            what = "deqfast: no gradient leads from the cell's value to x, which requires one"
            warn(f"{what}: use the cell's second argument, or detach x if it needs no gradient")


def is_swapped(cell: Any) -> bool:
    """Return whether the first parameters of the cell are called x and z, in this order."""
    signature = signature_of(cell)
    return signature is not None and list(signature.parameters)[:2] == ["x", "z"]


def changing_modules(cell: Any) -> list[str]:
    """Names and classes of the cell's modules that, in training, change between calls."""
    modules = cell.named_modules(prefix="cell") if isinstance(cell, nn.Module) else ()
    return [f"{name} ({type(m).__name__})" for name, m in modules if m.training and _changes_with_calls(m)]


def _warn(why: str) -> None:
    changes = "deqfast: in training mode the cell changes between calls and lacks a fixed point"
    warn(f"{changes}: {why}; {HELP}. deqfast.diagnose(block, x) says more")


def _changes_with_calls(module: nn.Module) -> bool:
    """Return whether the module, in training, changes between calls."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


@torch.no_grad()
def difference(plan: Plan) -> float | None:
    """Largest difference between two evaluations at f(z0), relative to a sample's value; 0 if rounding explains it.

    The point is f(z0): dropout keeps zeros. None if the cell cannot be evaluated, or no value is finite.
    """
    if not can_cancel(plan.cell) or is_cached(plan.cell):
        return None
    cell, x, packing = plan.cell, plan.x, Packing(plan.z0, plan.groups, plan.options.scale)
    if not packing.batch:
        return 0.0

    def values_at(z: Any) -> list[Tensor]:
        return [leaf.clone() for leaf in packing.check_value(evaluate(cell, z, x))]

    modules = modules_of(cell)
    with undone(modules, packing.device), solving(modules, cancelled=True), hold_weights(modules):
        first, leaves = values_at(detached(plan.z0)), pytree.tree_leaves(plan.z0)
        z = pytree.tree_unflatten([v.to(leaf.dtype) for v, leaf in zip(first, leaves, strict=True)], packing.spec)
        once, again = values_at(z), values_at(z)
    norms = partial(sample_norms, groups=packing.groups, factors=packing.factors)
    size = torch.maximum(norms(once), norms(again))
    gaps = torch.where(size == 0, 0.0, norms([a - b for a, b in zip(once, again, strict=True)]) / size)
    gaps = gaps[gaps.isfinite()]
    if not len(gaps):
        return None
    gap = float(gaps.max())
    floor = residual_floor(once, leaves, packing.device, float32_products_eps(packing.device))
    return gap if gap > floor else 0.0
