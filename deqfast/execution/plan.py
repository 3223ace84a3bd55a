"""Which options go together: the only table of what a way of running a solve does not serve."""

from __future__ import annotations

from collections.abc import Iterable

_NO_SOLVER = dict.fromkeys(("compact", "trace", "halt", "cuda_graph", "compile"), "it runs no solver")
_REPLAYS = "a graph replays the same work"
_ONE_CODE = "its code is one loop for whole batches"
REFUSED: dict[str, dict[str, str]] = {
    "cuda_graph": {
        "compact": _REPLAYS,
        "trace": _REPLAYS,
        "halt": _REPLAYS,
        "groups": "groups may change from call to call, and a graph replays the same work",
        "scale": "it is not captured",
        "SHINE": "a replay overwrites the history that it needs",
    },
    "compile": {
        "compact": _ONE_CODE,
        "trace": _ONE_CODE,
        "halt": _ONE_CODE,
        "groups": _ONE_CODE,
        "scale": _ONE_CODE,
        "check_every": "its loop looks after every evaluation",
        "cuda_graph": "it serves CPUs",
    },
    "compact": {"groups": "f could not tell which rows are left"},
    "Unrolled": _NO_SOLVER,
    "Reversible": _NO_SOLVER,
    "trajectory": {
        "SHINE": "it has the history of the end of a solve only",
        "Unrolled": "it runs no solver",
        "Reversible": "it runs no solver",
    },
    "torch.func": {
        "compact": "all members of a vmap are one batch",
        "trace": "its length would differ between the members of a vmap",
        "halt": "the rule would see all members of a vmap as one batch",
        "compile": "the compiled solve has no transforms",
        "cuda_graph": "the captured solve has no transforms",
    },
    "torch.export": {
        "halt": "an exported program calls no Python",
        "trace of a Solution": "its length is that of the solve, which an export does not know",
        "training mode": "an export serves inference: call eval() before",
    },
    "torch.compile": {"trace of a Solution": "a graph cannot know its length: compile without it"},
}
"""{way of running: {option: why it is refused}}; a block's options are ways too."""


def kinds(adjoint: object) -> list[str]:
    """Names of the classes of an adjoint, by which the table knows it."""
    return [kind.__name__ for kind in type(adjoint).__mro__]


def check_served(way: str, options: Iterable[str]) -> None:
    """Raise ValueError naming the first of the options that this way of running a solve does not serve."""
    refused = REFUSED.get(way, {})
    for option in options:
        if option in refused:
            raise ValueError(f"{way} cannot be combined with {option}: {refused[option]}")


def check_together(options: Iterable[str]) -> None:
    """Raise ValueError if one of the options does not serve another."""
    options = list(options)
    for option in options:
        check_served(option, options)
