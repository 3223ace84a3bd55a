"""Adjoints: gradients through a solve, one module per adjoint."""

from __future__ import annotations

from .._checks import object_named
from .base import Adjoint
from .implicit import Implicit
from .jfb import JFB
from .neumann import Neumann
from .phantom import Phantom
from .reversible import Reversible
from .shine import SHINE
from .unrolled import Unrolled

ADJOINTS: tuple[type[Adjoint], ...] = (JFB, Implicit, Neumann, Phantom, Reversible, SHINE, Unrolled)
_BY_NAME = {kind.__name__.lower(): kind for kind in ADJOINTS}


def as_adjoint(adjoint: str | Adjoint) -> Adjoint:
    """Return the adjoint itself, or the adjoint of that name with default settings.

    Raises:
        ValueError: `adjoint` is neither, nor the name of an adjoint class in small letters.
    """
    return object_named("adjoint", adjoint, Adjoint, _BY_NAME)
