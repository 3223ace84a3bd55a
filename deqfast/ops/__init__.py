"""The ops: one module per family, holding schema, meaning and argument checks; and the choice of kernel."""

from . import fc, neural_collapse, norm_act, steps  # noqa: F401  (schemas come before `_extension` loads kernels)

# isort: split
from .._extension import Availability
from .choice import KERNELS, Kernel, backends, check_kernel_name, choose_kernel
from .fc import ACTIVATIONS
from .memory import empty_history, release_memory
from .steps import MAX_GPU_HISTORY

__all__ = [
    "ACTIVATIONS",
    "Availability",
    "KERNELS",
    "Kernel",
    "MAX_GPU_HISTORY",
    "backends",
    "check_kernel_name",
    "choose_kernel",
    "empty_history",
    "release_memory",
]
