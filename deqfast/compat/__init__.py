"""Interfaces of other libraries: this module has all names of torchdeq; ``deepinv`` takes deepinv's algorithms.

deqfast implements the part of torchdeq that solves and differentiates: ``get_deq``, its layers and ``register_deq``.
The other names, such as ``reset_deq``, ``apply_norm`` or ``mem_gc``, come from an installed torchdeq. torchdeq is
imported when one of them is used. Each submodule of torchdeq has a counterpart here, such as ``deqfast.compat.norm``.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .torchdeq import DEQ, DEQIndexing, DEQSliced, get_deq, import_torchdeq, register_deq

__all__ = ["DEQ", "DEQIndexing", "DEQSliced", "get_deq", "register_deq"]

_LAYERS = {**{name: globals()[name] for name in __all__}, "DEQBase": DEQ}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _counterpart(getattr(import_torchdeq(f"{__name__}.{name} belongs to torchdeq"), name))


class _Counterparts(MetaPathFinder, Loader):
    """Makes a submodule for each in torchdeq, with all its names, private ones too; deqfast's layers replace its."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        import_torchdeq(f"{fullname} belongs to torchdeq")
        spec = find_spec(_in_torchdeq(fullname))
        return spec and ModuleSpec(fullname, self, is_package=spec.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        theirs = vars(import_module(_in_torchdeq(module.__name__)))
        names = {"__all__", "__doc__", *(name for name in theirs if name[:2] != "__")} & theirs.keys()
        vars(module).update({name: _LAYERS.get(name, _counterpart(theirs[name])) for name in names})


def _in_torchdeq(fullname: str) -> str:
    """Name of the module of torchdeq whose counterpart has this name."""
    return fullname.replace(__name__, "torchdeq", 1)


def _counterpart(value: Any) -> Any:
    """The counterpart of a submodule of torchdeq; any other value unchanged."""
    if isinstance(value, ModuleType) and value.__name__.startswith("torchdeq."):
        return import_module(value.__name__.replace("torchdeq", __name__, 1))
    return value


sys.meta_path.append(_Counterparts())
