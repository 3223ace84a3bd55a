"""Adjoints: how gradients pass a solve, one module per gradient."""

from __future__ import annotations

from .base import Adjoint, Problem
from .implicit import Implicit
from .jfb import JFB
from .neumann import Neumann
from .phantom import Phantom
from .reversible import Reversible
from .shine import SHINE
from .unrolled import Iterated, Unrolled

_BY_NAME: dict[str, type[Adjoint]] = {
    "jfb": JFB,
    "implicit": Implicit,
    "neumann": Neumann,
    "phantom": Phantom,
    "reversible": Reversible,
    "shine": SHINE,
    "unrolled": Unrolled,
}


def as_adjoint(adjoint: str | Adjoint) -> Adjoint:
    """Return the adjoint itself, or the default-constructed one that a name stands for.

    Names are those of the classes in small letters; ValueError for anything else.
    """
    if isinstance(adjoint, Adjoint):
        return adjoint
    if isinstance(adjoint, str) and adjoint in _BY_NAME:
        return _BY_NAME[adjoint]()
    raise ValueError(f"adjoint must be a deqfast adjoint or one of {', '.join(map(repr, _BY_NAME))}, got {adjoint!r}")


__all__ = [
    "Adjoint",
    "Implicit",
    "Iterated",
    "JFB",
    "Neumann",
    "Phantom",
    "Problem",
    "Reversible",
    "SHINE",
    "Unrolled",
    "as_adjoint",
]
