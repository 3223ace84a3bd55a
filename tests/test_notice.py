"""One warning, forward and backward each, of samples that have no answer."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from deqfast import Broyden, DEQBlock, Implicit, LinearCell, Picard


def block(**options):
    torch.manual_seed(0)
    return DEQBlock(LinearCell(6), **options)


class TestForward:
    def test_of_samples_that_do_not_converge_once(self):
        layer, x = block(solver=Picard(tol=1e-6, max_iter=2)), torch.randn(5, 6)
        with pytest.warns(UserWarning, match=r"in a forward solve, 5 samples MAX_ITER: give .*warn=False silences"):
            layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)
            copy.deepcopy(layer)(x)
            pickle.loads(pickle.dumps(layer))(x)

    def test_of_samples_that_break(self):
        x = torch.randn(5, 6)
        x[1:3] = torch.nan
        with pytest.warns(UserWarning, match="2 samples NONFINITE: look for NaN"):
            block(solver=Picard(tol=0.1))(x, z0=torch.zeros(5, 6))

    def test_not_where_all_is_well_or_silence_is_wanted(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            block()(torch.randn(5, 6))
            block()(torch.zeros(0, 6))
            block(solver=Picard(tol=1e-6, max_iter=2), warn=False)(torch.randn(5, 6))


class TestBackward:
    def test_once(self):
        layer, x = block(adjoint=Implicit(Picard(tol=1e-6, max_iter=2))), torch.randn(5, 6)
        with pytest.warns(UserWarning, match="in a backward solve, 5 samples MAX_ITER"):
            layer(x).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x).sum().backward()

    def test_silence(self):
        layer = block(adjoint=Implicit(Broyden(tol=1e-6, max_iter=1)), warn=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(torch.randn(5, 6)).sum().backward()
