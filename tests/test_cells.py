"""The cells: their formulas, starts, errors and hooks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from correctness import GRADIENT, after_solve, amplification, assert_close, rounding
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.nn.utils import prune

from deqfast import (
    Broyden,
    CellHooks,
    DEQBlock,
    FCCell,
    LinearCell,
    MonotoneCell,
    Picard,
    ResidualCell,
    SubhomogeneousCell,
    solve,
)
from deqfast.engine.runners import one_launch

EPS = rounding(torch.float32)


def test_linear_cell():
    cell, z, x = LinearCell(5), torch.randn(3, 5), torch.randn(3, 5)
    assert_close(cell(z, x), z @ cell.weight.T + x, EPS)
    fixed_point = torch.linalg.solve(torch.eye(5) - cell.weight, x.T).T
    assert_close(
        DEQBlock(cell, Broyden(rtol=1e-6))(x),
        fixed_point,
        after_solve(1e-6 + EPS, amplification(lambda z: cell(z, x), fixed_point)),
    )


@pytest.mark.parametrize(
    ("activation", "function"),
    [("identity", lambda t: t), ("relu", torch.relu), ("tanh", torch.tanh), ("gelu", F.gelu)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_fc_cell(activation, function, bias):
    cell, z, x = FCCell(4, 6, activation, bias), torch.randn(3, 6), torch.randn(3, 4)
    offset = cell.injection.bias if bias else 0
    assert (cell.injection.bias is not None) == bias
    assert_close(cell(z, x), function(z @ cell.weight.T + x @ cell.injection.weight.T + offset), EPS)
    start = cell.initial_state(x.double())
    assert start.shape == (3, 6) and start.dtype == torch.float64 and (start == 0).all()
    assert repr(activation) in repr(cell)


def test_residual_cell():
    cell, z, x = ResidualCell(6, groups=3), torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4, 5)
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 3
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    hidden = F.conv2d(torch.relu(cell.norm1(F.conv2d(z, cell.conv1.weight, padding=1))), cell.conv2.weight, padding=1)
    expected = cell.norm3(torch.relu(z + cell.norm2(hidden + x)))
    assert_close(cell(z, x), expected, EPS)
    assert cell.conv1.bias is None and cell.conv2.bias is None


@pytest.mark.parametrize(
    "cell",
    [
        partial(LinearCell, 8),
        partial(FCCell, 8, 8),
        partial(ResidualCell, 8),
        partial(MonotoneCell, 8, 8),
        partial(SubhomogeneousCell, 8, 8),
        partial(SubhomogeneousCell, 8, 8, 3),
    ],
)
def test_parameters_are_made_where_and_as_asked(cell):
    assert {parameter.dtype for parameter in cell(dtype=torch.float64).parameters()} == {torch.float64}
    assert all(parameter.is_meta for parameter in cell(device="meta").parameters())
    for dtype in (torch.int32, torch.complex64, "float32"):
        with pytest.raises(TypeError, match="dtype must be a floating-point type or None, got"):
            cell(dtype=dtype)
    torch.manual_seed(0)
    plain = cell()
    torch.manual_seed(0)
    assert_close([*cell(device="cpu").parameters()], [*plain.parameters()], 0.0)


class HookedCell(LinearCell):
    """Tells which of its hooks are called; `solves`: it solves by itself."""

    def __init__(self, solves: bool):
        super().__init__(4)
        self.solves, self.log = solves, []

    def forward(self, z, x):
        self.log.append("gradient" if torch.is_grad_enabled() else "forward")
        return super().forward(z, x)

    def initial_state(self, x):
        self.log.append("initial_state")
        return torch.ones_like(x)

    def begin_solve(self):
        self.log.append("begin_solve")

    def end_solve(self):
        self.log.append("end_solve")

    def cancel_solve(self):
        raise AssertionError("called only if a forward pass raises")

    def fixed_point(self, x, z0, solver, kernel):
        assert isinstance(solver, Broyden) and kernel == "auto" and (z0 == 1).all() and not torch.is_grad_enabled()
        self.log.append("fixed_point")
        return solve(lambda z: LinearCell.forward(self, z, x), z0, solver) if self.solves else None

    def from_position(self, z, x, first, value):
        raise AssertionError("called only by blocks with causal=True")

    def has_settled(self):
        raise AssertionError("called only by blocks with cuda_graph")


class TestHooks:
    """The hooks of ``CellHooks`` are called when, and as often as, it says."""

    def calls(self, cell, adjoint="jfb", z0=None, **options):
        DEQBlock(cell, Broyden(max_iter=3), adjoint, warn=False, **options)(torch.randn(2, 4), z0)
        return cell.log

    @pytest.mark.parametrize("solves", [False, True])
    def test_a_solve(self, solves):
        begun, ended = ["initial_state", "begin_solve", "fixed_point"], ["gradient", "end_solve"]
        assert self.calls(HookedCell(solves)) == [*begun, *["forward"] * (0 if solves else 3), *ended]

    def test_a_start_that_is_given(self):
        assert "initial_state" not in self.calls(HookedCell(solves=True), z0=torch.ones(2, 4))
        assert "initial_state" not in self.calls(HookedCell(solves=True), init=torch.ones_like)

    @pytest.mark.parametrize("options", [{"adjoint": "shine"}, {"adjoint": "unrolled"}, {"trace": True}])
    def test_where_a_solve_of_its_own_would_not_do(self, options):
        assert "fixed_point" not in self.calls(HookedCell(solves=True), **options)

    def test_the_protocol_names_them(self):
        named = {name for name in vars(CellHooks) if not name.startswith("_")}
        assert named == {name for name in vars(HookedCell) if not name.startswith("_")} - {"forward"}


@pytest.mark.parametrize("change", ["groups", "eps", "identity", "affine"])
def test_changed_normalisations_are_not_fused(change):
    cell = ResidualCell(8, groups=4)
    if change == "eps":
        cell.norm3.eps = 0.1
    else:
        new = {"groups": nn.GroupNorm(2, 8), "identity": nn.Identity(), "affine": nn.GroupNorm(4, 8, affine=False)}
        cell.norm3 = new[change]
    z, x = torch.randn(2, 2, 8, 3, 3)
    with torch.no_grad():
        expected = cell.norm3(torch.relu(z + cell.norm2(cell.conv2(torch.relu(cell.norm1(cell.conv1(z)))) + x)))
        assert_close(cell(z, x), expected, rounding(torch.float32))
    cell.kernel = "cpp"
    with pytest.raises(ValueError, match="kernel='cpp' needs norm1, norm2 and norm3 to be"):
        cell(z, x)


def offloaded(module):
    """Forward of the instance that loads its parameters for the call, which lie on meta otherwise, as accelerate's."""
    kept, own = copy.deepcopy(module), module.forward
    module.to("meta")

    def forward(*args):
        given = {name: p.detach() for name, p in kept.named_parameters()}
        return torch.func.functional_call(kept, given, args)

    module.forward, module.kept = forward, own


def patch(module, monkeypatch):
    own = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, *args: 2 * own(self, *args))


# What runs with the call of a module: {name: function of the module that attaches it}.
ATTACHED = {
    "hook": lambda m, _: m.register_forward_hook(lambda m, args, y: 2 * y),
    "pre-hook": lambda m, _: m.register_forward_pre_hook(lambda m, args: tuple(a + 1 for a in args)),
    "backward hook": lambda m, _: m.register_full_backward_hook(lambda m, grads, _: tuple(2 * g for g in grads)),
    "backward pre-hook": lambda m, _: m.register_full_backward_pre_hook(lambda m, grads: (2 * grads[0],)),
    "hook of all modules": lambda m, _: of_all_modules.register_module_forward_hook(
        lambda other, args, y: 2 * y if other is m else None
    ),
    "own forward": lambda m, _: setattr(m, "forward", lambda *args: 2 * type(m).forward(m, *args)),
    "forward of the class": patch,
    "offload": lambda m, _: offloaded(m),
}
ON_NORMS = {
    **ATTACHED,
    "pruning": lambda m, _: prune.l1_unstructured(m, "weight", 4),
    "parametrisation": lambda m, _: nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh()),
}


@pytest.mark.usefixtures("cpp_kernels")
@pytest.mark.parametrize("name", ["norm1", "norm2", "norm3"])
@pytest.mark.parametrize("attach", ON_NORMS.values(), ids=ON_NORMS)
def test_what_is_attached_to_a_normalisation_takes_part(attach, name, monkeypatch):
    found, (z, x) = [], torch.randn(2, 2, 8, 3, 3, dtype=torch.float64)
    for kernel in ("auto", "torch"):
        torch.manual_seed(0)
        cell, leaves = ResidualCell(8, groups=4, kernel=kernel).double(), [t.clone().requires_grad_() for t in (z, x)]
        nn.init.normal_(getattr(cell, name).weight)
        with monkeypatch.context() as patches:
            handle = attach(getattr(cell, name), patches)
            value = cell(*leaves)
            found.append([value, *torch.autograd.grad(value.pow(3).sum(), leaves)])
            cell.kernel = "cpp"
            with pytest.raises(ValueError, match="kernel='cpp' needs norm1, norm2 and norm3 .* without hooks"):
                cell(z, x)
        if hasattr(handle, "remove"):
            handle.remove()
    assert_close(*found, GRADIENT)


@pytest.mark.parametrize(
    "make", [partial(FCCell, 4, 4), partial(LinearCell, 4), partial(MonotoneCell, 4, 4, "forward-backward")]
)
@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
def test_a_cell_with_something_attached_is_called(attach, make, monkeypatch):
    """It is not solved in one launch, which would not call it."""
    launches, launch = [], one_launch.launch
    monkeypatch.setattr(one_launch, "launch", lambda *args: launches.append(args) or launch(*args))
    cell, x = make(), torch.randn(3, 4)
    block = DEQBlock(cell, Picard(max_iter=2), warn=False, init=torch.zeros_like, kernel="cpp").eval()
    with torch.no_grad():
        block(x)
        assert launches
        launches.clear()
        handle = attach(cell, monkeypatch)
        block(x)
    if hasattr(handle, "remove"):
        handle.remove()
    assert not launches
