"""Solvers: Picard, Anderson, Broyden, MixedAnderson, and Auto, which runs several one after the other."""

from .._checks import object_named
from .anderson import Anderson
from .auto import Auto
from .base import Solver
from .broyden import Broyden
from .mixed_anderson import MixedAnderson
from .picard import Picard

SOLVERS: tuple[type[Solver], ...] = (Broyden, Anderson, Picard, Auto)
_BY_NAME = {kind.__name__.lower(): kind for kind in SOLVERS}


def as_solver(solver: str | Solver, argument: str = "solver") -> Solver:
    """Return the solver itself, or the solver of that name with default settings.

    Raises:
        ValueError: `solver` is neither, nor "picard", "anderson", "broyden" or "auto".
    """
    return object_named(argument, solver, Solver, _BY_NAME)


__all__ = ["SOLVERS", "Anderson", "Auto", "Broyden", "MixedAnderson", "Picard", "Solver", "as_solver"]
