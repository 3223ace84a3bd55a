"""Modules that a kernel may replace, because a call runs only their forward."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

Forward = TypeVar("Forward", bound=Callable[..., Any])

_forwards: set[Any] = set()


def fusible(forward: Forward) -> Forward:
    """Decorator of a module's forward that a kernel may replace."""
    _forwards.add(forward)
    return forward


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of `module` runs a `fusible` forward and nothing else, so that a kernel may replace it.

    Hooks load weights, prune, observe and change values. Other libraries replace the forward of an instance or a class.
    """
    return (
        type(module).forward in _forwards
        and type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not (module._forward_pre_hooks or module._forward_hooks)
        and not (module._backward_pre_hooks or module._backward_hooks or _has_any_global_hook())
    )
