"""Fixed points as functions: the gradients of blocks, in arguments, in modules and under torch.func."""

import inspect

import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, assert_close
from own_sums import Linear
from torch import nn

from deqfast import JFB, Broyden, DEQBlock, Implicit, LinearCell, Status, Unrolled, fixed_point, root

TIGHT = Broyden(rtol=1e-12, max_iter=60)
IMPLICIT = Implicit(TIGHT)


def mix(z, w, x):
    return {"a": 0.4 * torch.tanh(z["b"] @ w) + x["shift"], "b": 0.5 * torch.sin(z["a"])}


def test_gradients_in_all_arguments():
    w, shift = (torch.randn(size, 4, dtype=torch.float64, requires_grad=True) for size in (4, 3))
    z0 = {name: torch.zeros(3, 4, dtype=torch.float64) for name in "ab"}

    def value(w, shift):
        return fixed_point(mix, z0, w, {"shift": shift}, solver=TIGHT, adjoint=IMPLICIT)["a"]

    assert torch.autograd.gradcheck(value, (w, shift), **FINITE_DIFFERENCES)


def test_a_module_and_options():
    cell, x = LinearCell(4).double(), torch.randn(3, 4, dtype=torch.float64)
    value, solution = fixed_point(cell, torch.zeros_like(x), x, adjoint=JFB(), return_solution=True, groups="batch")
    assert solution.status.tolist() == [Status.CONVERGED] and torch.equal(value, solution.value)
    value.sum().backward()
    assert cell.weight.grad.any()


def test_options_are_those_of_a_block():
    """All but those that serve many calls, with the same defaults."""

    def options(f):
        return {name: p.default for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}

    of_calls = {"init", "eval_solver", "cuda_graph", "compile"}
    expected = {name: value for name, value in options(DEQBlock.__init__).items() if name not in of_calls}
    own = {"solver", "adjoint", "return_solution", "sign"}
    for f, missing in ((fixed_point, set()), (root, {"causal"})):  # root's steps are those of whole samples
        assert {name: value for name, value in options(f).items() if name not in own} == {
            name: value for name, value in expected.items() if name not in missing
        }


def test_transforms():
    """Per-sample gradients by vmap of grad, and a checkpoint, which torch.func takes none of."""
    x = torch.randn(5, 1, 3, dtype=torch.float64)
    w = 0.3 * torch.randn(3, 3, dtype=torch.float64)

    def loss(w, x):
        options = {"solver": TIGHT, "adjoint": IMPLICIT}
        return fixed_point(lambda z, w, x: torch.tanh(z @ w + x), torch.zeros_like(x), w, x, **options).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    assert_close(found, torch.stack([torch.func.grad(loss)(w, one) for one in x]), GRADIENT)

    def iterated(w, adjoint):
        return fixed_point(lambda z, w: torch.tanh(z @ w + x[0]), x[0], w, adjoint=adjoint).sum()

    checkpointed, plain = (torch.func.grad(iterated)(w, Unrolled(9, checkpoint)) for checkpoint in (True, False))
    assert_close(checkpointed, plain, GRADIENT)


def test_in_compiled_and_exported_models():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(4, 4)

        def forward(self, x):
            c, z0 = self.linear(x), torch.zeros_like(x)
            return fixed_point(lambda z, c: torch.tanh(0.5 * z + c), z0, c, solver="picard").sin()

    layer, x = Layer().double(), torch.randn(3, 4, dtype=torch.float64)
    fast = torch.compile(layer, backend="eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            gradients = [torch.autograd.grad(f(x).sum(), layer.linear.weight)[0] for f in (layer, fast)]
        assert torch.equal(*gradients)
    assert_close(torch.export.export(layer, (x,)).module()(x), layer(x), GRADIENT)
