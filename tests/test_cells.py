"""The cells: their formulas, starts and errors; batch norm with frozen statistics."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deqfast import Broyden, DEQBlock, FCCell, LinearCell, ResidualCell, solve
from deqfast.cells import FrozenStatisticsBatchNorm2d, residual
from deqfast.ops import choice
from deqfast.testing import assert_close, rounding, solved

EPS = rounding(torch.float32)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def contractive(cell: ResidualCell) -> ResidualCell:
    """Untrained convolutions need not contract, nor does batch norm before it has measured anything."""
    for convolution in (cell.conv1, cell.conv2):
        convolution.weight.data.mul_(0.3)
    if isinstance(cell.norm3, FrozenStatisticsBatchNorm2d):
        cell.norm3.running_var.fill_(9.0)
        for norm in (cell.norm1, cell.norm2, cell.norm3):
            norm.num_batches_tracked.add_(1)
    return cell


def test_linear_cell():
    cell, z, x = LinearCell(5), torch.randn(3, 5), torch.randn(3, 5)
    assert_close(cell(z, x), z @ cell.weight.T + x, EPS)
    fixed_point = torch.linalg.solve(torch.eye(5) - cell.weight, x.T).T
    assert_close(DEQBlock(cell, Broyden(tol=1e-6))(x), fixed_point, solved(1e-6))


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


@pytest.mark.parametrize("cell", [LinearCell(300), FCCell(3, 300)])
def test_recurrent_weights_start_contractive_and_not_trivial(cell):
    radius = torch.linalg.eigvals(cell.weight).abs().max()
    assert 0.4 < radius < 0.6


def test_residual_cell():
    cell, z, x = ResidualCell(6, groups=3), torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4, 5)
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 3
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)

    def group_norm(t, norm):
        groups = t.reshape(2, 3, -1)
        flat = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return flat.reshape(t.shape) * norm.weight[:, None, None] + norm.bias[:, None, None]

    hidden = torch.relu(group_norm(F.conv2d(z, cell.conv1.weight, padding=1), cell.norm1))
    hidden = F.conv2d(hidden, cell.conv2.weight, padding=1)
    expected = group_norm(torch.relu(z + group_norm(hidden + x, cell.norm2)), cell.norm3)
    assert_close(cell(z, x), expected, EPS)
    assert cell.conv1.bias is None and cell.conv2.bias is None


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_residual_cell_has_a_fixed_point_and_keeps_the_memory_format(norm):
    cell = contractive(ResidualCell(8, groups=4, norm=norm)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    z, solution = DEQBlock(cell, Broyden(tol=1e-4, max_iter=60))(x, return_solution=True)
    assert solution.converged.all()
    assert z.is_contiguous(memory_format=torch.channels_last) and not z.is_contiguous()
    z.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and (p.grad != 0).any() for p in cell.parameters())


BAD_ARGUMENTS = [
    (LinearCell, {"features": 0}, ValueError, "features must be at least 1, got 0"),
    (LinearCell, {"features": 2.0}, TypeError, "features must be an integer, got 2.0"),
    (FCCell, {"in_features": 0, "features": 3}, ValueError, "in_features must be at least 1, got 0"),
    (FCCell, {"in_features": 3, "features": "8"}, TypeError, "features must be an integer, got '8'"),
    (FCCell, {"in_features": 3, "features": 3, "activation": "sine"}, ValueError, "activation must be .*, got 'sine'"),
    (FCCell, {"in_features": 3, "features": 3, "activation": torch.tanh}, ValueError, "activation must be one of"),
    (ResidualCell, {"channels": 0}, ValueError, "channels must be at least 1, got 0"),
    (ResidualCell, {"channels": 8, "groups": 0}, ValueError, "groups must be at least 1, got 0"),
    (ResidualCell, {"channels": 8, "groups": 3}, ValueError, r"groups must divide channels \(8\), got 3"),
    (ResidualCell, {"channels": 8, "norm": "layer"}, ValueError, "norm must be one of 'group', 'batch', got 'layer'"),
]


@pytest.mark.parametrize(("cell", "arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(cell, arguments, error, message):
    with pytest.raises(error, match=message):
        cell(**arguments)


@pytest.mark.parametrize(
    ("cell", "z", "x", "message"),
    [
        (LinearCell(4), (2, 4), (2, 5), r"x must have shape \(B, 4\), got \(2, 5\)"),
        (LinearCell(4), (2, 4), (2, 1, 4), r"x must have shape \(B, 4\), got \(2, 1, 4\)"),
        (FCCell(3, 4), (2, 4), (2, 4), r"x must have shape \(B, 3\), got \(2, 4\)"),
        (ResidualCell(8), (2, 8, 4, 4), (2, 4, 4, 4), r"x must have shape \(B, 8, H, W\), got \(2, 4, 4, 4\)"),
        (ResidualCell(8), (2, 8, 4, 4), (8, 4, 4), r"x must have shape \(B, 8, H, W\), got \(8, 4, 4\)"),
    ],
)
def test_an_injection_of_another_shape_is_named(cell, z, x, message):
    with pytest.raises(ValueError, match=message):
        cell(torch.zeros(z), torch.zeros(x))


class TestFrozenStatistics:
    """Normalises with its running statistics always; differentiated evaluations are measured."""

    def norm(self):
        norm = FrozenStatisticsBatchNorm2d(3, momentum=0.25)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.num_batches_tracked.add_(1)
        return norm

    def same_as(self, norm):
        peer = nn.BatchNorm2d(3, momentum=0.25)
        peer.load_state_dict(norm.state_dict(), strict=False)
        return peer

    @pytest.mark.parametrize("training", [True, False])
    def test_it_is_batch_norm_in_evaluation(self, training):
        norm, x = self.norm().train(training), torch.randn(4, 3, 5, 5)
        assert_close(norm(x), self.same_as(norm).eval()(x), EPS)

    def test_its_state_is_that_of_batch_norm(self):
        assert set(nn.BatchNorm2d(3).state_dict()) == set(self.norm().state_dict())

    def test_the_end_of_a_solve_takes_up_what_the_gradient_calls_measured(self):
        norm, x = self.norm(), 2 * torch.randn(4, 3, 5, 5) + 1
        peer = self.same_as(norm)
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
        norm(x)
        norm(x)  # Phantom's several calls count as one measurement
        assert torch.equal(norm.running_mean, mean) and torch.equal(norm.running_var, var)
        norm.end_solve()
        peer(x)
        assert_close(norm.running_mean, peer.running_mean, EPS)
        assert_close(norm.running_var, peer.running_var, EPS)
        norm.end_solve()
        assert_close(norm.running_mean, peer.running_mean, EPS)

    def test_the_first_solve_of_all_sets_the_statistics(self):
        norm, x = FrozenStatisticsBatchNorm2d(3), 50 * torch.randn(4, 3, 5, 5) + 7
        with torch.no_grad():
            norm(torch.zeros_like(x))
            assert_close(norm(x), nn.BatchNorm2d(3)(x), 1e-2)  # biased and unbiased variance differ by 1 %
        norm.end_solve()
        assert_close(norm.running_mean, x.mean((0, 2, 3)), EPS)
        norm = pickle.loads(pickle.dumps(norm))
        with torch.no_grad():
            norm(x + 1)
        assert_close(norm.running_mean, x.mean((0, 2, 3)), EPS)

    def test_an_untrained_cell_has_a_fixed_point_after_one_batch(self):
        block, x = DEQBlock(ResidualCell(8, norm="batch"), Broyden(max_iter=40)), torch.randn(16, 8, 6, 6)
        for _ in range(3):
            _, solution = block(x, return_solution=True)
        assert solution.converged.all(), solution

    def test_nothing_else_is_measured(self):
        norm, x = self.norm(), torch.randn(4, 3, 5, 5)
        before = copy.deepcopy(norm.state_dict())
        with torch.no_grad():
            norm(x)
        norm.eval()(x)
        norm.end_solve()
        for name, tensor in norm.state_dict().items():
            assert torch.equal(tensor, before[name])

    def test_one_value_per_channel_cannot_be_measured(self):
        with pytest.raises(ValueError, match=r"more than one value per channel, got \(1, 3, 1, 1\)"):
            self.norm()(torch.zeros(1, 3, 1, 1))
        self.norm().eval()(torch.zeros(1, 3, 1, 1))

    @pytest.mark.parametrize("adjoint", ["jfb", "implicit"])
    def test_a_training_step_measures_the_solution_once(self, adjoint):
        """f is one function during a solve; the statistics move once per training step, towards the batch at z*."""
        cell = contractive(ResidualCell(4, norm="batch"))
        block, x = DEQBlock(cell, Broyden(tol=1e-5, max_iter=60), adjoint), torch.randn(8, 4, 5, 5)
        mean, var = cell.norm1.running_mean.clone(), cell.norm1.running_var.clone()
        z, solution = block(x, return_solution=True)
        assert solution.converged.all()
        z.sum().backward()
        with torch.no_grad():
            first = cell.conv1(z)
        assert_close(cell.norm1.running_mean, mean.lerp(first.mean((0, 2, 3)), 0.1), EPS)
        assert_close(cell.norm1.running_var, var.lerp(first.var((0, 2, 3)), 0.1), EPS)

    def test_evaluation_is_one_function_of_the_sample(self):
        block = DEQBlock(contractive(ResidualCell(4, norm="batch"))).eval()
        x = torch.randn(3, 4, 5, 5)
        with torch.no_grad():
            together = block(x)
            assert_close(block(x[1:2]), together[1:2], solved(1e-3))
            assert torch.equal(block(x), together)

    def test_it_can_be_copied_and_pickled(self):
        norm, x = self.norm(), torch.randn(4, 3, 5, 5)
        norm(x)
        for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
            copied.end_solve()
            assert not torch.equal(copied.running_mean, norm.running_mean)


def test_cells_work_without_a_block():
    cell = FCCell(3, 5)
    x = torch.randn(2, 3)
    with torch.no_grad():
        solution = solve(lambda z: cell(z, x), cell.initial_state(x))
        assert_close(cell(solution.value, x), solution.value, solved(1e-3))
    assert solution.converged.all()


def test_the_kernel_is_looked_up_once_not_at_every_evaluation(monkeypatch):
    """The look-up asks what is available: it may import triton and ask for CUDA."""
    lookups, look_up = [], choice._availability
    monkeypatch.setattr(choice, "_availability", lambda kernel: lookups.append(kernel) or look_up(kernel))
    monkeypatch.setattr(residual, "_KERNELS", {})
    block = DEQBlock(ResidualCell(8), Broyden(tol=1e-30, max_iter=30))
    for most in (2, 1):  # of the solve, and, the first time only, of the cell
        lookups.clear()
        _, solution = block(torch.randn(2, 8, 4, 4), return_solution=True)
        assert solution.evaluations == 30 and 1 <= len(lookups) <= most


@pytest.mark.parametrize("change", ["groups", "eps", "identity", "affine"])
def test_changed_normalisations_are_not_fused(change):
    torch.manual_seed(0)
    cell = ResidualCell(8, groups=4)
    if change == "eps":
        cell.norm3.eps = 0.1
    else:
        new = {"groups": nn.GroupNorm(2, 8), "identity": nn.Identity(), "affine": nn.GroupNorm(4, 8, affine=False)}
        cell.norm3 = new[change]
    z, x = torch.randn(2, 2, 8, 3, 3)
    with torch.no_grad():
        expected = cell.norm3(torch.relu(z + cell.norm2(cell.conv2(torch.relu(cell.norm1(cell.conv1(z)))) + x)))
        assert torch.equal(cell(z, x), expected)
    cell.kernel = "cpp"
    with pytest.raises(ValueError, match="kernel='cpp' needs norm1, norm2 and norm3 to be"):
        cell(z, x)
