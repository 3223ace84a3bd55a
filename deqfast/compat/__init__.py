"""Interfaces of other libraries: this module has all names of torchdeq; ``deepinv`` takes deepinv's algorithms.

deqfast implements the part of torchdeq that solves and differentiates: ``get_deq``, its layers and ``register_deq``.
The other names, such as ``reset_deq``, ``apply_norm`` or ``mem_gc``, come from an installed torchdeq. torchdeq is
imported when one of them is used.
"""

from typing import Any

from .torchdeq import DEQ, DEQIndexing, DEQSliced, get_deq, register_deq

__all__ = ["DEQ", "DEQIndexing", "DEQSliced", "get_deq", "register_deq"]

_TORCHDEQS = {"add_deq_args", "get_solver", "mem_gc", "mixed_init", "register_solver", "reset_deq"}
_TORCHDEQS |= {"solver_stat_from_final_step", "fp_correction", "jac_reg", "power_method", "register_weight_func"}
_TORCHDEQS |= {"apply_norm", "register_norm", "register_norm_module", "remove_norm", "reset_norm"}
_TORCHDEQS |= {"reset_dropout", "VariationalDropout", "VariationalDropout1d", "VariationalDropout2d"}
_TORCHDEQS |= {"VariationalDropout3d", "VariationalDropToken1d", "VariationalDropToken2d", "VariationalDropToken3d"}


def __getattr__(name: str) -> Any:
    if name not in _TORCHDEQS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torchdeq
    except ImportError as error:
        raise ImportError(f"deqfast.compat.{name} belongs to torchdeq: pip install torchdeq") from error
    return getattr(torchdeq, name)
