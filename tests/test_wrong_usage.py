"""What beginners write wrongly: each error or warning names the argument, and what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deqfast
from deqfast import Anderson, Broyden, DEQBlock, FCCell, Picard, neural_collapse, root, solve

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A cell that ignores x."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(self.linear(z))


class Swapped(Layer):
    def forward(self, x, z):
        return 0.3 * torch.tanh(z) + x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)

    def forward(self, z, x):
        return 0.1 * self.attention(z, z, z)[0] + x


def cell(z, x):
    return 0.5 * torch.tanh(z) + x


def cosine(z):
    return 0.5 * torch.cos(z)


def block(*arguments: Any, **options: Any) -> DEQBlock:
    return DEQBlock(cell, *arguments, **options)


USAGES: list[tuple[Callable[[], Any], str]] = [
    # the cell
    (lambda: DEQBlock(Swapped())(X), "called x and z.*: swap or rename"),
    (lambda: DEQBlock(Layer())(X.clone().requires_grad_()), "no gradient .* to x.*: use the cell's second argument"),
    (lambda: DEQBlock(Layer(8))(X), r"start, a tensor of torch.float32 \(3, 4\): .*init="),
    (lambda: DEQBlock(Attention())(X), "attention .*dropout=0"),
    (lambda: DEQBlock(lambda z, x, mask: z), "cell must accept .*several inputs go into x, as a tuple"),
    (lambda: DEQBlock(None), "cell must be a module or another function"),
    (lambda: DEQBlock(FCCell), "cell must be a module or another function"),
    (lambda: DEQBlock(FCCell(4, 4).to("meta"))(X), "weight on meta"),
    # x
    (lambda: DEQBlock(FCCell(4, 4))(X.double()), "torch.float64 .*give x the cell's dtype"),
    (lambda: DEQBlock(FCCell(4, 4))(X.numpy()), "x must be a floating-point tensor, got ndarray"),
    (lambda: DEQBlock(FCCell(4, 4))(X.tolist()), "x must be a floating-point tensor, got list"),
    (lambda: DEQBlock(FCCell(5, 4))(X), r"x must have shape \(B, 5\)"),
    (lambda: block()(X.long()), "no initial state: .*init="),
    (lambda: block()((X, X)), "no initial state: .*init="),
    (lambda: block()(X, X, X), "return_solution must be True or False, .*several inputs of a cell go into x"),
    # f and z0
    (lambda: solve(X, cosine), r"f must be callable, got a tensor of torch.float32 \(3, 4\)$"),
    (lambda: solve(lambda z: z[:, :2], X), r"f must return the shape .*\(3, 2\)"),
    (lambda: solve(lambda z: (z,), X), "f must return a tensor .*got tuple"),
    (lambda: solve(lambda z: None, X), "f must return a tensor .*got None"),
    (lambda: solve(lambda z: np.cos(z.numpy()), X), "f must return a tensor .*got ndarray"),
    (lambda: solve(lambda z: {"b": z["a"]}, {"a": X}), "f must return the structure"),
    (lambda: solve(lambda z: z.mul_(0.5), X), r"f must not modify .*z.mul\(2\)"),
    (lambda: solve(cosine, X.int()), "z0 must hold floating-point"),
    (lambda: solve(cosine, torch.tensor(1.0)), "z0 must have the batch as its first dimension"),
    (lambda: solve(cosine, 1.0), "z0 must hold floating-point .*got float"),
    (lambda: block()(X, z0=torch.zeros(2, 4)), r"z0 and x .*\(2, 4\) and \(3, 4\)"),
    (lambda: block()(X, z0=X.log()), "z0 must be finite"),
    (lambda: block(init=X), r"init must be callable, got a tensor of torch.float32 \(3, 4\)$"),
    (lambda: deqfast.diagnose(X, block()), r"cell must be .*got a tensor of torch.float32 \(3, 4\)$"),
    # choices
    (lambda: block("broydn"), "solver must be .*did you mean 'broyden'"),
    (lambda: block(Broyden), r"solver must be .*did you mean Broyden\(\)"),
    (lambda: block(deqfast.JFB()), r"solver must be .*got JFB\(\)"),
    (lambda: block(eval_solver="fast"), "eval_solver must be .*'broyden'"),
    (lambda: block(adjoint="imlicit"), "adjoint must be .*did you mean 'implicit'"),
    (lambda: block(adjoint=True), "adjoint must be .*got True"),
    (lambda: block(kernel="cpu"), "kernel must be one of .*did you mean 'cpp'"),
    (lambda: block(kernel="gpu"), "kernel must be one of .*did you mean 'cuda'"),
    (lambda: block(compile="yes"), "compile must be one of .*'forward'"),
    (lambda: block(cuda_graph=True), "cuda_graph needs a cell that is an nn.Module"),
    (lambda: block("picard", "shine")(X.clone().requires_grad_()), "SHINE needs .*Anderson or Broyden"),
    # keywords of other libraries
    (lambda: block(callback=print), "takes no argument 'callback'; did you mean 'stop_fn'"),
    (lambda: block(return_solution=True), "takes no argument 'return_solution'"),
    (lambda: Broyden(f_tol=1e-3), "did you mean 'rtol'"),
    (lambda: Broyden(tol=1e-3), "did you mean 'rtol'"),
    (lambda: Anderson(m=6), "did you mean 'history_size'"),
    (lambda: Anderson(beta=0.5), "did you mean 'relaxation'"),
    # numbers
    (lambda: Broyden(rtol=-1), "rtol must be finite and at least 0, got -1"),
    (lambda: Broyden(rtol="1e-3"), "rtol must be a number, got '1e-3'"),
    (lambda: Broyden(rtol=0), "rtol and atol must not both be 0"),
    (lambda: Broyden(max_iter=0), "max_iter must be at least 1, got 0"),
    (lambda: Broyden(max_iter=20.5), "max_iter must be an integer, got 20.5"),
    (lambda: Picard(relaxation=3), "relaxation must be .*at most 2, got 3"),
    (lambda: Picard(norm="inf"), "norm must be one of .*'max'"),
    (lambda: Anderson(kind=2), "kind must be one of 'I', 'II', got 2"),
    (lambda: Anderson(history_dtype="bf16"), "history_dtype must be .*torch.bfloat16, got 'bf16'"),
    (lambda: deqfast.Neumann(0), "steps must be at least 1, got 0"),
    (lambda: deqfast.SolveDropout(1.5), "p must be .*at most 1, got 1.5"),
    (lambda: root(cosine, X, sign=2), "sign must be 1, -1 or None, got 2"),
    # groups, scale, stop rules, traces
    (lambda: block()(X, groups=torch.tensor([0, 0])), r"groups must have shape \(3,\)"),
    (lambda: block()(X, groups=torch.ones(3)), "groups must be .*a tensor of integers, got a tensor of torch.float32"),
    (lambda: block()(X, groups="all"), "groups must be .*'batch' .*got 'all'"),
    (lambda: solve(cosine, X, scale=-1.0), "scale must be .*got -1.0"),
    (lambda: block(stop_fn=lambda z, value, k: True)(X), r"stop_fn must return a mask \(3,\) torch.bool"),
    (
        lambda: DEQBlock(lambda z, x: z / 2 + x[0], drop_converged=True, init=lambda x: X)((X, X)),
        r"per_sample must say .*per_sample=\(True, True\)",
    ),
    (lambda: solve(cosine, X).plot(), "plot needs a trace, .*trace=True"),
    # neural collapse, carry
    (lambda: neural_collapse(X, torch.tensor([0, 1])), r"labels has shape \(2,\); it must be \(3,\)"),
    (lambda: neural_collapse(X, torch.rand(3)), "labels has dtype torch.float32; it must be one of"),
    (lambda: deqfast.NeuralCollapse(num_classes=0, num_features=3), "num_classes must be at least 1, got 0"),
    (lambda: deqfast.Carry(block(), [(X, X)], size=0), "size must be at least 1, got 0"),
]


@pytest.mark.parametrize(("usage", "message"), USAGES, ids=[message[:30] for _, message in USAGES])
def test_the_message_names_argument_and_remedy(usage, message) -> None:
    with warnings.catch_warnings(), pytest.raises((TypeError, ValueError, RuntimeError, UserWarning), match=message):
        warnings.simplefilter("error", UserWarning)
        usage()
