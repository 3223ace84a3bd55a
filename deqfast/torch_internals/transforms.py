"""Tensors under torch.func, vmaps and forward-mode AD. Only this module unwraps them.

torch has no public function for whether a tensor belongs to a transform, hence the names of ``torch._C``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, profiler
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import pytree
from .dynamo import is_exporting, is_tracing


def in_torch_func() -> bool:
    """Return whether a transform of torch.func runs."""
    return bool(torch._C._are_functorch_transforms_active())  # type: ignore[attr-defined]  # it has no stub


def in_forward_mode() -> bool:
    """Return whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def in_reverse_mode() -> bool:
    """Return whether a transform of torch.func runs that differentiates in reverse mode."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() == _functorch.TransformType.Grad for level in stack)


def in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform of torch.func holds the tensor."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Return whether forward-mode AD differentiates in the tensor."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def without_tangent(tensor: Tensor) -> Tensor:
    """Tensor without the tangent of the innermost level of forward-mode AD."""
    return forward_ad.unpack_dual(tensor).primal if has_tangent(tensor) else tensor


def forward_mode() -> AbstractContextManager[None]:
    """Context in which all open levels of forward-mode AD record tangents."""
    return forward_ad._set_fwd_grad_enabled(True)


Context = Literal["eager", "torch.func", "torch.export"]


def present_context() -> Context:
    """Return where this call runs; "torch.func" stands for forward-mode AD too.

    ``torch.compile`` does not count: it runs a block as one op, and that op runs eagerly.
    """
    if is_exporting():
        return "torch.export"
    return "torch.func" if in_torch_func() or forward_ad._current_level >= 0 else "eager"


def runs_only(a: Tensor, b: Tensor) -> bool:
    """Return whether an op on these tensors, which needs no gradient, would run its kernel and nothing else.

    Reasons for more are a trace, a transform, a mode, the profiler, a subclass of Tensor, values of b that
    are not in its memory, or two devices. (A mode of torch functions only sees the first step of a solve.)
    """
    if is_tracing() or in_torch_func() or forward_ad._current_level >= 0:
        return False
    if is_in_torch_dispatch_mode() or profiler._is_profiler_enabled:
        return False
    return type(a) is Tensor and type(b) is Tensor and a.device == b.device and not (b.is_neg() or b._is_zerotensor())


def check_values(name: str, tree: Any) -> None:
    """Raise ValueError if the first tensor has no numbers, and RuntimeError if torch.jit.trace or make_fx record.

    Not in a trace by torch.compile or torch.export, which need neither.
    """
    if get_proxy_mode() is not None:
        raise RuntimeError(
            "deqfast: torch.func.linearize and make_fx would fix the number of evaluations, which depends on values: "
            "use torch.func.jvp or vjp"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            "deqfast: torch.jit.trace would fix the number of evaluations, which depends on values: use torch.export "
            "or torch.compile, and torch.onnx.export with dynamo=True"
        )
    tensor = tree if isinstance(tree, Tensor) else next(filter(torch.is_tensor, pytree.tree_leaves(tree)), None)
    if tensor is not None and (tensor.is_meta or isinstance(tensor, FakeTensor)):
        kind = "tensors on the device meta" if tensor.is_meta else "fake tensors (FakeTensorMode)"
        raise ValueError(f"{name} must hold values, which a solve reads, got {kind}")


def values(tensor: Tensor) -> Tensor:
    """Numbers of the tensor under all transforms, those of all members of a vmap."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def constant(tensor: Tensor) -> Tensor:
    """Tensor of the same shape outside of all transforms and graphs, with the numbers of a vmap's first member."""
    while is_wrapped(tensor):
        dim = _functorch.maybe_get_bdim(tensor) if _functorch.is_batchedtensor(tensor) else None
        tensor = _functorch.get_unwrapped(tensor)
        tensor = tensor if dim is None else tensor.select(dim, 0)
    return forward_ad.unpack_dual(tensor).primal.detach()


def is_transformed(tensor: Tensor) -> bool:
    """Return whether the tensor differs between members of a vmap, or anything differentiates in it."""
    while not (tensor.requires_grad or has_tangent(tensor) or _functorch.is_batchedtensor(tensor)):
        if not is_wrapped(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)  # every operation inside of a gradient's transform wraps its result
    return True


def check_plain(name: str, tree: Any) -> None:
    """Raise RuntimeError if a tensor of `tree`, an argument of `name`, belongs to a transform."""
    if any(isinstance(leaf, Tensor) and (is_wrapped(leaf) or has_tangent(leaf)) for leaf in pytree.tree_leaves(tree)):
        raise RuntimeError(
            f"deqfast: {name} does not run under torch.func and in forward-mode AD: use a DEQBlock, which does"
        )


def over_members(function: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
    """Apply `function` to gradients or tangents, or to each of a batch of them, see ``Members``."""
    members = Members.of(tensors)
    if members is None:
        return function(tensors)
    return [members.wrap(t) for t in torch.vmap(function)([members.unwrap(t) for t in tensors])]


class Members:
    """Batch of gradients or tangents that is_grads_batched=True or vectorize=True sends through a derivative.

    torch.autograd uses an older vmap for this, which is not torch.func's. `batched` is one of the tensors.
    """

    def __init__(self, batched: Tensor) -> None:
        # torch does not return the level. Removing another level leaves the tensor batched.
        for self.level in range(1, 64):
            plain = torch._remove_batch_dim(batched, self.level, 1, 0)
            if not _functorch.is_legacy_batchedtensor(plain):
                self.count = len(plain)
                return
        raise RuntimeError("deqfast: a gradient that is batched twice by is_grads_batched is not supported")

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Members | None:
        """Batch that these tensors belong to, or None."""
        return next((cls(tensor) for tensor in tensors if _functorch.is_legacy_batchedtensor(tensor)), None)

    def unwrap(self, grad: Tensor) -> Tensor:
        """Gradients of all members (V, ...)."""
        return torch._remove_batch_dim(grad, self.level, self.count, 0)

    def wrap(self, grads: Tensor) -> Tensor:
        """Batched gradient: the inverse of ``unwrap``."""
        return torch._add_batch_dim(grads, 0, self.level)
