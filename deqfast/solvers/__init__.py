"""Solvers: Picard, Anderson, Broyden."""

from __future__ import annotations

from .anderson import Anderson
from .base import Solver
from .broyden import Broyden
from .picard import Picard

_BY_NAME: dict[str, type[Solver]] = {"picard": Picard, "anderson": Anderson, "broyden": Broyden}


def as_solver(solver: str | Solver) -> Solver:
    """Return the solver itself, or the default-constructed one that a name stands for.

    Names are "picard", "anderson" and "broyden"; ValueError for anything else.
    """
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, str) and solver in _BY_NAME:
        return _BY_NAME[solver]()
    raise ValueError(f"solver must be a deqfast solver or one of {', '.join(map(repr, _BY_NAME))}, got {solver!r}")


__all__ = ["Anderson", "Broyden", "Picard", "Solver", "as_solver"]
