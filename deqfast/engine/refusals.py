"""What does not go together: how each way of running a solve declares what it refuses, and the error."""

from collections.abc import Iterable, Mapping

from ..solvers import Anderson, Broyden, Picard, Solver

Option = str | type
"""Name of an option, or the class of a solver or an adjoint."""
Refusals = Mapping[Option, str]
"""{option: why it is refused}."""


def name_of(option: Option) -> str:
    """Name of an option, as users write it."""
    return option if isinstance(option, str) else option.__name__


def kinds(part: object) -> list[Option]:
    """Classes of a solver or an adjoint."""
    return [*type(part).__mro__]


def asked(options: object, names: Iterable[str]) -> list[Option]:
    """Those of the named options that are asked for: neither None nor False."""
    values = [(name, getattr(options, name)) for name in names]
    return [name for name, value in values if value is not None and value is not False]


def check_served(way: Option, refused: Refusals, options: Iterable[Option], owner: str = "") -> None:
    """Raise ValueError if this way of running a solve refuses an option; `owner` says whose option it is."""
    for option in options:
        if option in refused:
            raise ValueError(f"{name_of(way)} cannot be combined with {name_of(option)}{owner}: {refused[option]}")


def has_ops(solver: Solver) -> bool:
    """Return whether all of this solver's step is an op; a subclass may do more in a step."""
    return type(solver) in (Picard, Anderson, Broyden)


def check_ops(way: str, solver: Solver, owner: str = "") -> None:
    """Raise ValueError unless the step of the solver is an op, as this way of running a solve needs it."""
    if not has_ops(solver):
        raise ValueError(f"{way} serves Picard, Anderson and Broyden, whose steps are ops, got {solver}{owner}")
