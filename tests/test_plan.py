"""The table of what does not go together: each entry is an error that names both, with the reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from deqfast import DEQBlock, Implicit, MixedAnderson, Picard
from deqfast.api.refusals import REFUSED
from deqfast.engine.refusals import name_of
from deqfast.torch_internals.ranks import Ranks

OPTIONS = {
    "drop_converged": {"drop_converged": True},
    "trace": {"trace": True},
    "trace of a Solution": {"trace": True},
    "stop_fn": {"stop_fn": lambda z, value, k: torch.zeros(len(z), dtype=torch.bool)},
    "scale": {"scale": 2.0},
    "cuda_graph": {"cuda_graph": True},
    "compile": {"compile": True},
    "Auto": {"solver": "auto"},
    "MixedAnderson": {"solver": MixedAnderson(mixing_fn=lambda z, fz: (fz - z, fz))},
    "SHINE": {"adjoint": "shine"},
    "Unrolled": {"adjoint": "unrolled"},
    "Reversible": {"adjoint": "reversible"},
    "lockstep": {"lockstep": Ranks(())},
    "state_group": {"state_group": Ranks(())},
    "causal": {"causal": True},
}
WAYS = {
    "torch.func": lambda call, x: torch.func.vmap(call)(x[:, None]),
    "torch.export": lambda call, x: torch.export.export(Model(call), (x,)),
    "torch.compile": lambda call, x: torch.compile(Model(call), backend="eager", fullgraph=True)(x),
    "a gradient of torch.func": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
}


class Cell(nn.Module):
    def forward(self, z, x):
        return 0.5 * torch.tanh(z) + x


class Prepared(Cell):
    def begin_solve(self):
        pass


class Model(nn.Module):
    """A model that makes this call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("way", "option"), [(name_of(way), name_of(option)) for way in REFUSED for option in REFUSED[way]]
)
def test_refused(way, option):
    def run():
        cell = Prepared() if option == "begin_solve" else Cell()
        block, x = DEQBlock(cell, **OPTIONS.get(way, {}) | OPTIONS.get(option, {})), torch.ones(2, 3)
        block.train(option == "training mode")

        def call(x):
            if way == "trajectory":
                return block.trajectory(x, [1])
            if option in ("groups", "groups of a call"):
                return block(x, groups="batch")
            return block(x, return_solution=True)[0]

        # A context may be the option as well as the way.
        inner = partial(WAYS[option], call) if option in WAYS else call
        return WAYS[way](inner, x) if way in WAYS else inner(x)

    # In a trace the error is dynamo's own.
    with pytest.raises(Exception, match=f"{way} cannot be combined with {option}( of .*)?: ") as caught:
        run()
    assert way.startswith("torch.") or type(caught.value) is ValueError


def test_a_compiled_backward_solve_refuses_what_the_forward_solve_does():
    adjoint = Implicit("auto")
    block, said = DEQBlock(Cell(), compile=True), "Auto of the adjoint's solver, Auto.*: its stages depend on values"
    for wrong in (lambda: DEQBlock(Cell(), adjoint=adjoint, compile=True), lambda: setattr(block, "adjoint", adjoint)):
        with pytest.raises(ValueError, match=said):
            wrong()
    DEQBlock(Cell(), adjoint=adjoint, compile="forward")  # its backward solve is the ordinary loop


class OwnSolver(Picard):
    """A user's solver, whose step is not deqfast's."""

    def advance(self, state, fz, k, last):
        super().advance(state, fz, k, last)


def test_refusals_go_by_type_not_by_name():
    own = type("Auto", (OwnSolver,), {})(max_iter=5)
    block = DEQBlock(Cell(), own, warn=False)
    assert len(block.trajectory(torch.ones(2, 3), [1])) == 2


@pytest.mark.parametrize("solvers", [{"solver": OwnSolver()}, {"eval_solver": OwnSolver()}])
def test_compiled_code_and_exports_refuse_a_step_in_python(solvers):
    said = "serves Picard, Anderson and Broyden, whose steps are ops, got OwnSolver"
    with pytest.raises(ValueError, match=f"compile=True {said}"):
        DEQBlock(Cell(), compile=True, **solvers)
    with pytest.raises(ValueError, match=f"torch.export {said}"):
        torch.export.export(Model(DEQBlock(Cell(), **solvers).eval()), (torch.ones(2, 3),))


def test_the_table_is_whole():
    """An entry that is dropped would be served silently, and takes its test with it."""
    assert {name_of(way): len(options) for way, options in REFUSED.items()} == {
        "cuda_graph": 9,
        "compile": 9,
        "SHINE": 1,
        "drop_converged": 1,
        "state_group": 8,
        "causal": 8,
        "Unrolled": 7,
        "Reversible": 7,
        "trajectory": 6,
        "torch.func": 9,
        "torch.export": 8,
        "torch.compile": 2,
    }
