"""The cells: their formulas, starts and hooks, and the only fixed point of MonotoneCell and SubhomogeneousCell."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from correctness import FINITE_DIFFERENCES, GRADIENT, after_solve, amplification, assert_close, rounding
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_modules
from torch.nn.utils import prune

from deqfast import (
    Anderson,
    Broyden,
    CellHooks,
    DEQBlock,
    FCCell,
    Implicit,
    LinearCell,
    MonotoneCell,
    Picard,
    ResidualCell,
    SubhomogeneousCell,
    Unrolled,
    solve,
)
from deqfast.cells.monotone import SPLITTINGS, norm_bound
from deqfast.engine.runners import single_launch

EPS, EPS64 = rounding(torch.float32), rounding(torch.float64)


def test_linear_cell():
    cell, z, x = LinearCell(5), torch.randn(3, 5), torch.randn(3, 5)
    assert_close(cell(z, x), z @ cell.weight.T + x, EPS)
    fixed_point = torch.linalg.solve(torch.eye(5) - cell.weight, x.T).T
    condition = amplification(lambda z: cell(z, x), fixed_point)
    assert_close(DEQBlock(cell, Broyden(rtol=1e-6))(x), fixed_point, after_solve(1e-6 + EPS, condition))


@pytest.mark.parametrize(
    ("activation", "function"),
    [("identity", lambda t: t), ("relu", torch.relu), ("tanh", torch.tanh), ("gelu", F.gelu)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_fc_cell(activation, function, bias):
    cell, z, x = FCCell(4, 6, activation, bias), torch.randn(3, 6), torch.randn(3, 4)
    assert (cell.injection.bias is not None) == bias and repr(activation) in repr(cell)
    assert_close(cell(z, x), function(z @ cell.weight.T + cell.injection(x)), EPS)
    start = cell.initial_state(x.double())
    assert start.shape == (3, 6) and start.dtype == torch.float64 and (start == 0).all()


def residual(cell, z, x):
    """The formula of ResidualCell."""
    hidden = F.conv2d(torch.relu(cell.norm1(F.conv2d(z, cell.conv1.weight, padding=1))), cell.conv2.weight, padding=1)
    return cell.norm3(torch.relu(z + cell.norm2(hidden + x)))


def test_residual_cell():
    cell, z, x = ResidualCell(6, groups=3), torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4, 5)
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 3
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    assert_close(cell(z, x), residual(cell, z, x), EPS)
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
    made = cell()
    torch.manual_seed(0)
    assert_close([*cell(device="cpu").parameters()], [*made.parameters()], 0.0)


class HookedCell(LinearCell):
    """Logs which of its hooks are called; `solves`: it solves by itself."""

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

    def calls(self, solves, adjoint="jfb", z0=None, **options):
        cell = HookedCell(solves)
        DEQBlock(cell, Broyden(max_iter=3), adjoint, warn=False, **options)(torch.randn(2, 4), z0=z0)
        return cell.log

    @pytest.mark.parametrize("solves", [False, True])
    def test_a_solve(self, solves):
        begun, ended = ["initial_state", "begin_solve", "fixed_point"], ["gradient", "end_solve"]
        assert self.calls(solves) == [*begun, *["forward"] * (0 if solves else 3), *ended]

    def test_a_start_that_is_given(self):
        for options in ({"z0": torch.ones(2, 4)}, {"init": torch.ones_like}):
            assert "initial_state" not in self.calls(solves=True, **options)

    @pytest.mark.parametrize("options", [{"adjoint": "shine"}, {"adjoint": "unrolled"}, {"trace": True}])
    def test_where_a_solve_of_its_own_would_not_do(self, options):
        assert "fixed_point" not in self.calls(solves=True, **options)

    def test_the_protocol_names_them(self):
        named = {name for name in vars(CellHooks) if not name.startswith("_")}
        assert named == {name for name in vars(HookedCell) if not name.startswith("_")} - {"forward"}


def offload(module, monkeypatch):
    """Load parameters for the call, by a forward of the instance, and leave them on meta, as accelerate does."""
    kept, own = copy.deepcopy(module), module.forward
    module.to("meta")

    def forward(*args):
        return functional_call(kept, {name: p.detach() for name, p in kept.named_parameters()}, args)

    module.forward, module.kept = forward, own


def patch(module, monkeypatch):
    own = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, *args: 2 * own(self, *args))


def without_weights(norm, monkeypatch):
    norm.affine, norm.weight, norm.bias = False, None, None


# What runs with the call of a module: {name: function of the module that attaches it}.
ATTACHED = {
    "hook": lambda m, _: m.register_forward_hook(lambda m, args, y: 2 * y),
    "pre-hook": lambda m, _: m.register_forward_pre_hook(lambda m, args: tuple(a + 1 for a in args)),
    "backward hook": lambda m, _: m.register_full_backward_hook(lambda m, grads, _: tuple(2 * g for g in grads)),
    "backward pre-hook": lambda m, _: m.register_full_backward_pre_hook(lambda m, grads: (2 * grads[0],)),
    "hook of all modules": lambda m, _: torch_modules.register_module_forward_hook(
        lambda other, args, y: 2 * y if other is m else None
    ),
    "own forward": lambda m, _: setattr(m, "forward", lambda *args: 2 * type(m).forward(m, *args)),
    "forward of the class": patch,
    "offload": offload,
}
ON_NORMS = {
    **ATTACHED,
    "another class": lambda m, _: setattr(m, "__class__", nn.Identity),
    "no weights": without_weights,
    "pruning": lambda m, _: prune.l1_unstructured(m, "weight", 4),
    "parametrisation": lambda m, _: nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh()),
}


MUST_AGREE = {"groups": lambda m, _: setattr(m, "num_groups", 2), "eps": lambda m, _: setattr(m, "eps", 0.1)}


@pytest.mark.usefixtures("cpp_kernels")
@pytest.mark.parametrize(
    ("attach", "name"),
    [*product(ON_NORMS.values(), ["norm1", "norm2", "norm3"]), *product(MUST_AGREE.values(), ["norm3"])],
)
def test_a_changed_normalisation_takes_part(attach, name, monkeypatch):
    both, (z, x) = [], torch.randn(2, 2, 8, 3, 3, dtype=torch.float64)
    for kernel in ("auto", "torch"):
        torch.manual_seed(0)
        cell, leaves = ResidualCell(8, groups=4, kernel=kernel).double(), [t.clone().requires_grad_() for t in (z, x)]
        nn.init.normal_(getattr(cell, name).weight)
        with monkeypatch.context() as patches:
            handle = attach(getattr(cell, name), patches)
            value = cell(*leaves)
            both.append([value, *torch.autograd.grad(value.pow(3).sum(), leaves)])
            cell.kernel = "cpp"
            with pytest.raises(ValueError, match="kernel='cpp' needs norm1, norm2 and norm3 .* without hooks"):
                cell(z, x)
        if hasattr(handle, "remove"):
            handle.remove()
    assert_close(*both, GRADIENT)


@pytest.mark.parametrize(
    "make", [partial(FCCell, 4, 4), partial(LinearCell, 4), partial(MonotoneCell, 4, 4, "forward-backward")]
)
@pytest.mark.parametrize("attach", ATTACHED.values(), ids=ATTACHED)
def test_a_cell_with_something_attached_is_called(attach, make, monkeypatch):
    """It is not solved in one launch, which would not call it."""
    launches, launch = [], single_launch.launch
    monkeypatch.setattr(single_launch, "launch", lambda *args: launches.append(args) or launch(*args))
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


TIGHT = Broyden(1e-12, 400)
SMALL = {
    **{f"{s}, {alpha}": partial(MonotoneCell, 2, 3, s, alpha=alpha) for s in SPLITTINGS for alpha in (None, 0.1)},
    "connected": partial(SubhomogeneousCell, 2, 2),
    "convolutional": partial(SubhomogeneousCell, 2, 2, 3),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Unrolled(60)], ids=str)
def test_gradients_of_the_only_fixed_point_against_finite_differences(make, adjoint):
    """In x and all parameters; the default alpha moves with A and B."""
    block = DEQBlock(make(dtype=torch.float64), TIGHT, adjoint, warn=False)
    names, parameters = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, 2, *([2, 1] if getattr(block.cell, "padding", None) else []), dtype=torch.float64)

    def value(x, *parameters):
        return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert value(x, *parameters).any()
    assert torch.autograd.gradcheck(value, (x.requires_grad_(), *parameters), **FINITE_DIFFERENCES)


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_copies_half_precision_and_empty_batches(make):
    block = DEQBlock(make(), Picard(1e-4, 400)).eval()
    x = torch.randn(4, 2, *([4, 5] if getattr(block.cell, "padding", None) else []))
    z = block(x)
    for duplicate in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert_close(duplicate(x), z, EPS)
    assert block(x[:0]).shape == z[:0].shape
    half = DEQBlock(block.cell.bfloat16(), Picard(1e-2, 400))(x.bfloat16())
    assert half.dtype == torch.bfloat16 and half.isfinite().all()


class TestMonotone:
    """Both splittings and all solvers find its only fixed point."""

    EYE = torch.eye(12, dtype=torch.float64)
    every_splitting = pytest.mark.parametrize("splitting", SPLITTINGS)

    @staticmethod
    def cell(splitting="peaceman-rachford", scale=1.0, **options):
        """Cell in float64 whose A and B are `scale` times those that a cell begins with."""
        cell = MonotoneCell(3, 12, splitting, dtype=torch.float64, **options)
        with torch.no_grad():
            cell.A.mul_(scale)
            cell.B.mul_(scale)
        return cell

    @staticmethod
    def inputs(batch=5):
        return torch.randn(batch, 3, dtype=torch.float64)

    @every_splitting
    @pytest.mark.parametrize(
        "solver", [Picard(1e-12, 4000), Anderson(1e-12, 400), TIGHT], ids=lambda solver: type(solver).__name__
    )
    def test_all_find_the_fixed_point_from_anywhere(self, splitting, solver):
        cell, x = self.cell(splitting, scale=2.0), self.inputs()
        other = MonotoneCell(3, 12, next(s for s in SPLITTINGS if s != splitting), dtype=torch.float64)
        other.load_state_dict(cell.state_dict())
        expected = DEQBlock(other, TIGHT)(x)
        assert expected.any()
        condition = max(amplification(lambda z, f=f: f(z, x), expected) for f in (cell, other))
        for z0 in (None, *(10 * torch.randn(3, 5, 12, dtype=torch.float64))):
            z = DEQBlock(cell, solver)(x, z0=z0)
            assert_close(z, expected, after_solve(1e-12, condition))
            steepest = float(torch.linalg.matrix_norm(cell.weight.detach(), 2))
            step = torch.relu(z @ cell.weight.T + cell.injection(x))
            assert_close(step, z, after_solve(1e-12, condition) * (1 + steepest))

    def test_the_weight_of_the_paper_and_its_direct_solution(self):
        cell = self.cell(margin=0.3)
        assert_close(cell.weight, 0.7 * self.EYE - cell.A.T @ cell.A + cell.B - cell.B.T, EPS64)
        assert cell.weight.requires_grad
        for splitting, solver in (("peaceman-rachford", TIGHT), ("forward-backward", Picard(1e-12, 4000))):
            cell, x = self.cell(splitting, activation="identity", bias=False), self.inputs()  # and in one launch
            expected = torch.linalg.solve(self.EYE - cell.weight, cell.injection(x).T).T
            assert_close(DEQBlock(cell, solver)(x), expected, GRADIENT)

    @every_splitting
    def test_alpha_is_the_step(self, splitting):
        """From zeros it gives relu(alpha c), or V (2 relu(alpha c)). Unless given it depends on W, without gradient."""
        assert not self.cell(splitting).matrices()[-1].requires_grad
        cell, x = self.cell(splitting, alpha=0.1), self.inputs()
        value = cell(torch.zeros(5, 12, dtype=torch.float64), x)
        if splitting == "peaceman-rachford":
            value = value @ (self.EYE + 0.1 * (self.EYE - cell.weight)).T / 2
        assert_close(value, torch.relu(0.1 * cell.injection(x)), EPS64)

    @every_splitting
    @pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
    def test_contracts_at_the_documented_rate(self, splitting, scale):
        cell, margin = self.cell(splitting, scale, margin=0.5), 0.5
        operator = (self.EYE - cell.weight).detach()
        bound, x = norm_bound(operator).item(), self.inputs(1).expand(200, 3)
        a, b = torch.randn(2, 200, 12, dtype=torch.float64)
        before, after = a - b, cell(a, x) - cell(b, x)
        rate = (1 - (margin / bound) ** 2) ** 0.5
        if splitting == "peaceman-rachford":  # in the norm of V^-1 z
            before, after = (d @ (self.EYE + operator / bound).T for d in (before, after))
            rate = ((bound - margin) / (bound + margin)) ** 0.5
        assert (after.norm(dim=1) <= (rate + 1e-9) * before.norm(dim=1)).all()

    @pytest.mark.parametrize("features", [1, 2, 64])
    @pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
    def test_norm_bound(self, features, factor):
        matrix = factor * torch.randn(features, features)
        ratio = float(norm_bound(matrix) / torch.linalg.matrix_norm(matrix, 2))
        assert 1 / (1 + EPS) <= ratio <= features ** (1 / 64) * (1 + EPS)

    @pytest.mark.usefixtures("cpp_kernels")
    def test_matrices_are_computed_once_per_call_and_exported_solve(self, monkeypatch):
        block = DEQBlock(self.cell(), Picard(1e-6, 20), "implicit", kernel="cpp", warn=False)
        calls, x = [], self.inputs()
        program = torch.export.export(copy.deepcopy(block).eval(), (x,))
        assert sum(node.target is torch.ops.aten.linalg_inv_ex.default for node in program.graph.nodes) == 1
        assert_close(program.module()(x), block(x), EPS64)
        compute = block.cell.matrices.compute
        monkeypatch.setattr(block.cell.matrices, "compute", lambda: calls.append(1) or compute())
        block(x).sum().backward()
        assert len(calls) == 1


class TestSubhomogeneous:
    """Plain iteration reaches its only fixed point at the documented rate, whatever the weights are."""

    DEGREE = 0.9
    every_kind = pytest.mark.parametrize("kernel_size", [None, 3], ids=["connected", "convolutional"])

    @staticmethod
    def cell(kernel_size, weights="initial", dtype=torch.float64, degree=DEGREE):
        cell, top = SubhomogeneousCell(3, 5, kernel_size, degree, dtype=dtype), 0.1 * torch.finfo(dtype).max
        factor = {"zero": 0.0, "large": 1e3, "tiny": 1e-30}.get(weights, 1.0)
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.mul_(10.0 ** torch.randint(-6, 7, parameter.shape) if weights == "any scale" else factor)
            if weights == "huge":  # products overflow, every second row is zero, and c is zero
                cell.A.copy_(top * cell.A.sign())[::2] = 0
                cell.injection.bias.fill_(-top)
        return cell

    @staticmethod
    def inputs(kernel_size, dtype=torch.float64):
        return 3 * torch.randn(2, 3, *([4, 5] if kernel_size else []), dtype=dtype)

    @torch.no_grad()
    def check_rate(self, cell, x, starts):
        """Check both documented bounds from each of the starts."""

        def distance(y, z):
            return float((y.log() - z.log()).abs().max())

        expected, most = cell.initial_state(x), math.log1p(math.exp(cell.shift))
        for _ in range(500):
            expected = cell(expected, x)
        for z in starts:
            for k in range(400):
                before, z = z, cell(z, x)
                assert distance(z, expected) <= cell.degree**k * most + EPS64
                assert k == 0 or distance(cell(z, x), z) <= cell.degree * distance(z, before) + EPS64

    @every_kind
    @pytest.mark.parametrize("degree", [0.05, DEGREE])
    @pytest.mark.parametrize("weights", ["initial", "zero", "tiny", "large", "huge", "any scale"])
    def test_all_starts_lead_to_the_fixed_point_at_the_documented_rate(self, kernel_size, degree, weights):
        cell, x = self.cell(kernel_size, weights, degree=degree), self.inputs(kernel_size)
        zeros = cell.initial_state(x)
        starts = [zeros, zeros - 1e300, *(scale * torch.randn_like(zeros) for scale in (1e-300, 1.0, 1e6))]
        self.check_rate(cell, x, starts)

    @every_kind
    def test_weights_that_ascend_the_residual_keep_the_rate(self, kernel_size):
        cell, x, rates = self.cell(kernel_size), self.inputs(kernel_size), []
        optimizer = torch.optim.Adam(cell.parameters(), lr=0.1, maximize=True)
        for _ in range(150):
            z = [torch.ones_like(cell.initial_state(x))]
            for _ in range(6):
                z.append(cell(z[-1], x))
            early, late = ((z[k].log() - z[k - 1].log()).abs().max() for k in (2, 6))
            optimizer.zero_grad()
            (late / early).log().backward()
            optimizer.step()
            rates.append((late / early).item() ** 0.25)  # per evaluation
        assert rates[0] < 0.6 < 0.8 < max(rates) <= self.DEGREE
        self.check_rate(cell, x, [torch.zeros_like(z[0]), 10 * torch.randn_like(z[0])])

    def test_the_degree_is_reached(self):
        cell = SubhomogeneousCell(1, 1, degree=self.DEGREE, dtype=torch.float64)
        with torch.no_grad():
            cell.A.fill_((1 + self.DEGREE) ** 2)
            cell.injection.bias.fill_(-1e3)
        x, z = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 1 / (1 + self.DEGREE), dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda z: cell(z, x), z)
        assert_close(cell(z, x), z, EPS64)
        assert_close(jacobian, torch.full_like(jacobian, self.DEGREE), EPS64)

    @every_kind
    @pytest.mark.parametrize("weights", ["initial", "large", "any scale"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_solves_end_within_the_documented_evaluations(self, kernel_size, weights, dtype):
        cell, x = self.cell(kernel_size, weights, dtype), self.inputs(kernel_size, dtype=dtype)
        block = DEQBlock(cell, Picard(1e-3, 74), Implicit(Picard(1e-3, 400)))
        z, solution = block(x, return_solution=True)
        z.sum().backward()
        assert solution.converged.all() and block.backward_solution.converged.all()
        assert all(parameter.grad.isfinite().all() for parameter in cell.parameters())
