"""The ops: a package per family, with its table of arguments, reference and gradients; and the choice of kernel."""

from . import collapse, fc, norm_act, steps  # noqa: F401  (schemas come before `_extension` loads kernels)

# isort: split
from .._extension import Availability
from .choice import KERNELS, Kernel, backends, check_kernel_name, choose_kernel, kernel_name
from .fc import ACTIVATIONS
from .memory import empty_history, release_memory

__all__ = [
    "ACTIVATIONS",
    "Availability",
    "KERNELS",
    "Kernel",
    "backends",
    "check_kernel_name",
    "choose_kernel",
    "empty_history",
    "kernel_name",
    "release_memory",
]
