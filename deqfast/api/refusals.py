"""Combinations of options that are refused, with the reasons: the only such table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_NO_SOLVER = dict.fromkeys(
    ("drop_converged", "trace", "stop_fn", "cuda_graph", "compile", "MixedAnderson"), "it runs no solver"
)
_REPLAYS = "a graph replays the same work"
_ONE_CODE = "its code is one loop for whole batches"
_BY_VALUES = "its stages depend on values"
_OF_ERRORS = "its history is of errors, and gives no inverse of the Jacobian"
REFUSED: dict[str, dict[str, str]] = {
    "cuda_graph": {
        "drop_converged": _REPLAYS,
        "trace": _REPLAYS,
        "stop_fn": _REPLAYS,
        "groups": "groups may change from call to call, and a graph replays the same work",
        "scale": "it is not captured",
        "MixedAnderson": "its mixing_fn is not captured",
        "SHINE": "a replay overwrites the history that it needs",
        "Auto": _BY_VALUES,
        "begin_solve": "it prepares every solve in Python, and a replay would not run it",
    },
    "compile": {
        "drop_converged": _ONE_CODE,
        "trace": _ONE_CODE,
        "stop_fn": _ONE_CODE,
        "groups": _ONE_CODE,
        "scale": _ONE_CODE,
        "MixedAnderson": "its loop calls no Python",
        "cuda_graph": "it serves CPUs",
        "Auto": _BY_VALUES,
    },
    "SHINE": {"MixedAnderson": _OF_ERRORS},
    "drop_converged": {"groups": "f could not tell which rows are left"},
    "Unrolled": _NO_SOLVER,
    "Reversible": _NO_SOLVER,
    "trajectory": {
        "SHINE": "its history exists only at the end of a solve",
        "Auto": "a sample may wait, and the states would not be those of its own evaluations",
        "Unrolled": "it runs no solver",
        "Reversible": "it runs no solver",
        "torch.func": "its states get their gradients from torch.autograd, and none in forward-mode AD either",
        "torch.export": "it counts the evaluations in Python",
    },
    "torch.func": {
        "drop_converged": "all members of a vmap are one batch",
        "trace": "its length would differ between the members of a vmap",
        "stop_fn": "the rule would see all members of a vmap as one batch",
        "MixedAnderson": "its mixing_fn would see all members of a vmap as one batch",
        "compile": "the compiled solve has no transforms",
        "cuda_graph": "the captured solve has no transforms",
        "Reversible": "it has no derivative there, nor in forward-mode AD: use Unrolled",
    },
    "torch.export": {
        "stop_fn": "an exported program calls no Python",
        "MixedAnderson": "an exported program calls no Python",
        "Auto": _BY_VALUES,
        "trace of a Solution": "its length is known only after the solve, and an export needs it before",
        "training mode": "an export serves inference: call eval() before",
    },
    "torch.compile": {
        "trace of a Solution": "a graph cannot know its length: compile without it",
        "a gradient of torch.func": "it would miss the block's part: leave the gradient out of compiled code, as "
        "torch.compiler.disable(torch.func.grad(f))",
    },
}
"""{way of running: {option: why it is refused}}; a block's options are among the ways."""

# Name of an option in the table: the attribute of a block or a plan, which is None or False if it is not given.
_ATTRIBUTES = {
    "drop_converged": "drop_converged",
    "trace": "trace",
    "stop_fn": "stop_fn",
    "groups": "groups",
    "scale": "scale",
    "cuda_graph": "graphs",
    "compile": "compiled",
}


def given(options: Any, adjoint: object) -> list[str]:
    """Names in the table of what a block or a plan is given, and of the classes of its solvers and its adjoint."""
    values = {name: getattr(options, attribute) for name, attribute in _ATTRIBUTES.items()}
    names = [name for name, value in values.items() if value is not None and value is not False]
    return [*names, *kinds(options.solver), *kinds(getattr(options, "eval_solver", None)), *kinds(adjoint)]


def kinds(part: object) -> list[str]:
    """Names of the classes of a solver or an adjoint, as in the table."""
    return [kind.__name__ for kind in type(part).__mro__]


def check_served(way: str, options: Iterable[str], of: str = "") -> None:
    """Raise ValueError if this way of running a solve refuses an option; `of` says whose option it is."""
    refused = REFUSED.get(way, {})
    for option in options:
        if option in refused:
            raise ValueError(f"{way} cannot be combined with {option}{of}: {refused[option]}")


def check_together(options: Iterable[str]) -> None:
    """Raise ValueError if one of the options refuses another."""
    options = list(options)
    for option in options:
        check_served(option, options)
