"""Errors for wrong names, options and cells say what to write instead."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

import deqfast
from deqfast import Anderson, Broyden, DEQBlock, FCCell, solve
from deqfast.compat.torchdeq import get_deq


def halve(z, x):
    return 0.5 * z + x


def add(z, x):
    return z + x


FEATURES, LABELS = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
MISTAKES = {
    "a setting of the solver": (lambda: DEQBlock(halve, rtol=1e-4), TypeError, "use solver=Broyden(rtol=...)"),
    "of another solver": (lambda: DEQBlock(halve, ridge=0.0), TypeError, "use solver=Anderson(ridge=...)"),
    "of the adjoint": (lambda: DEQBlock(halve, checkpoint=True), TypeError, "use adjoint=Unrolled(checkpoint=...)"),
    "another word for it": (lambda: DEQBlock(halve, tol=1e-4), TypeError, "use solver=Broyden(rtol=...)"),
    "a misspelt option": (lambda: DEQBlock(halve, solvr="picard"), TypeError, "'solvr'; did you mean 'solver'?"),
    "an unknown option": (lambda: DEQBlock(halve, colour=1), TypeError, "DEQBlock takes no argument 'colour'"),
    "torchdeq's lam": (lambda: Anderson(lam=1e-4), TypeError, "did you mean 'ridge'?"),
    "a solver's step": (lambda: Broyden(step=1), TypeError, "did you mean 'relaxation'?"),
    "torchdeq's ift": (lambda: DEQBlock(halve, adjoint="ift"), ValueError, "got 'ift'; did you mean 'implicit'?"),
    "phantom_grad": (lambda: DEQBlock(halve, adjoint="phantom_grad"), ValueError, "did you mean 'phantom'?"),
    "fixed_point_iter": (lambda: DEQBlock(halve, "fixed_point_iter"), ValueError, "did you mean 'picard'?"),
    "a misspelt solver": (lambda: solve(torch.cos, torch.ones(1, 1), "andersen"), ValueError, "mean 'anderson'?"),
    "capitals": (lambda: DEQBlock(halve, adjoint="JFB"), ValueError, "did you mean 'jfb'?"),
    "a class": (lambda: DEQBlock(halve, Broyden), ValueError, "did you mean Broyden()?"),
    "a kernel": (lambda: DEQBlock(halve, kernel="tritn"), ValueError, "got 'tritn'; did you mean 'triton'?"),
    "of a cell": (lambda: deqfast.ResidualCell(8, kernel="fast"), ValueError, "one of 'auto', "),
    "of a metric": (lambda: deqfast.NeuralCollapse(2, kernel="cublas"), ValueError, "one of 'auto', "),
    "of its function": (lambda: deqfast.neural_collapse(FEATURES, LABELS, kernel="cublas"), ValueError, "got 'cublas'"),
    "an activation": (lambda: FCCell(3, 3, "tan"), ValueError, "got 'tan'; did you mean 'tanh'?"),
    "an option of get_deq": (lambda: get_deq(f_slover="broyden"), TypeError, "did you mean 'f_solver'?"),
    "a layer for a cell": (lambda: DEQBlock(nn.Linear(3, 3)), TypeError, "cell must accept (z, x)"),
    "a function of z": (lambda: DEQBlock(lambda z: z), TypeError, "takes (z)"),
    "another batch of z0": (lambda: DEQBlock(add)(torch.ones(4, 3), torch.ones(2, 3)), ValueError, "(2, 3) and (4, 3)"),
    "no value": (lambda: solve(lambda z: None, torch.ones(4, 3)), ValueError, "a tensor of shape (4, 3), got None"),
}


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_cells_that_take_more_hide_what_they_take_or_are_wrapped():
    @functools.wraps(torch.tanh)
    def injected(z, x):
        return torch.tanh(z) + x

    class Called(nn.Module):
        def __call__(self, z, x):
            return halve(z, x)

    cells = halve, lambda *both: halve(*both), lambda z, x, more=None: halve(z, x), torch.add, nn.Bilinear(3, 3, 3)
    for cell in (*cells, injected, Called()):
        assert DEQBlock(cell).cell is cell


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RecursionError("itself"), RuntimeError("no")])
def test_other_errors_keep_their_type_when_batches_differ(error):
    def failing(z, x):
        raise error

    with pytest.raises(type(error), match=str(error)):
        DEQBlock(failing, warn=False)(torch.ones(1, 3), torch.ones(2, 3))
