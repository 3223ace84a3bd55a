"""All combinations that are refused: those that each way of running a solve declares, and those of options."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.refusals import Option, Refusals, check_served
from ..engine.runners import compiled, cuda_graph
from ..gradients import SHINE, Reversible, Unrolled
from ..solvers import Auto, MixedAnderson
from ..transforms import export, functorch, opaque_op
from . import trajectory

_NO_SOLVER: Refusals = dict.fromkeys(
    ("drop_converged", "trace", "stop_fn", "cuda_graph", "compile", "causal", MixedAnderson), "it runs no solver"
)
REFUSED: dict[Option, Refusals] = {
    "cuda_graph": {**cuda_graph.REFUSES, SHINE: "a replay overwrites the history that it needs"},
    "compile": compiled.REFUSES,
    SHINE: {MixedAnderson: "its history is of errors, and gives no inverse of the Jacobian"},
    "drop_converged": {"groups": "f could not tell which rows are left"},
    "state_group": {
        "drop_converged": "f works on parts of samples, and its collectives need all of them",
        "groups": "a process would need to know which rows of others belong to its samples",
        "stop_fn": "each process would ask its own rule",
        "compile": "its loop asks no other process",
        MixedAnderson: "the products of its errors are those of one process",
        **dict.fromkeys((Unrolled, Reversible), "it judges samples by one process"),
    },
    "causal": {
        "groups": "a group has no order of positions",
        "drop_converged": "positions of one sequence end one after the other: give the cell from_position",
        "stop_fn": "a rule for whole samples would end positions by what follows them",
        "state_group": "its sums would have to wait for the processes with earlier positions",
        "compile": "its loop has no sums over positions",
        Auto: "its stages would change whole samples by their last positions",
        MixedAnderson: "the products of its errors are sums over whole samples",
        SHINE: "each position has its own estimate of the inverse",
    },
    **dict.fromkeys((Unrolled, Reversible), _NO_SOLVER),
    "trajectory": trajectory.REFUSES,
    "torch.func": functorch.REFUSES,
    "torch.export": export.REFUSES,
    "torch.compile": opaque_op.REFUSES,
}
"""{way of running: what it refuses}; options and adjoints of a block are among the ways."""


def check_together(options: Iterable[Option]) -> None:
    """Raise ValueError if one of the options refuses another."""
    options = list(options)
    for option in options:
        check_served(option, REFUSED.get(option, {}), options)
