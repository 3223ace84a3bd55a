"""find_fixed_points: every point once, with its eigenvalues, in known and in random problems."""

import math

import pytest
import torch

import deqfast

FP64 = torch.float64


def cubic(z):
    """Fixed points -1, 0 and 1 of each number, with slopes 0, 1.5 and 0."""
    return 1.5 * z - 0.5 * z**3


def grid(width, steps=9, dtype=FP64):
    axis = torch.linspace(-1.3, 1.3, steps, dtype=dtype)
    return torch.cartesian_prod(*[axis] * width).reshape(-1, width)


@pytest.mark.parametrize("dtype", [FP64, torch.float32])
def test_each_point_of_a_product_map_is_returned_once(dtype):
    points = deqfast.find_fixed_points(cubic, grid(2, dtype=dtype))
    # Slopes at the points are at most 1.5, so |z - z*| <= |f(z) - z| / |1 - 1.5|: twice the tolerance.
    tolerance = 2 * (1e-8 if dtype == FP64 else 1e-5) * 1.3 * math.sqrt(2)
    expected = grid(2, 3, dtype).sign()
    gaps = torch.cdist(points.value, expected, compute_mode="donot_use_mm_for_euclid_dist")
    assert points.value.dtype == dtype and len(points.value) == 9
    assert sorted(gaps.argmin(dim=1).tolist()) == list(range(9)) and float(gaps.min(dim=1).values.max()) < tolerance
    zeros = (points.value.abs() < 0.5).sum(dim=1)
    assert torch.equal(points.unstable_directions, zeros) and torch.equal(points.stable, zeros == 0)
    assert int(points.starts.sum()) == int(points.solution.converged.sum())
    assert points.starts.tolist() == sorted(points.starts.tolist(), reverse=True)


def test_eigenvalues_are_those_of_the_jacobian():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=generator, dtype=FP64) * 0.3
    offset = torch.randn(6, generator=generator, dtype=FP64)

    def f(z):  # (B, 2, 3), and the numbers of a sample are coupled
        return torch.tanh(z.flatten(1) @ weight.T + offset).view_as(z)

    points = deqfast.find_fixed_points(f, torch.randn(5, 2, 3, generator=generator, dtype=FP64))
    jacobian = torch.autograd.functional.jacobian(lambda z: f(z[None])[0].flatten(), points.value[0]).reshape(6, 6)
    expected = torch.linalg.eigvals(jacobian)
    assert points.value.shape == (1, 2, 3) and points.eigenvalues.shape == (1, 6)
    modulus = points.eigenvalues[0].abs()
    assert torch.equal(modulus, modulus.sort(descending=True).values)
    # A simple eigenvalue moves by its condition times a rounding of the Jacobian; both sides round it on their own.
    vectors = torch.linalg.eig(jacobian).eigenvectors
    allowed = 100 * torch.finfo(FP64).eps * float(torch.linalg.cond(vectors)) * float(torch.linalg.norm(jacobian, 2))
    assert float((points.eigenvalues[0][:, None] - expected).abs().min(dim=1).values.max()) < allowed


def test_starts_that_do_not_converge_are_counted_and_left_out():
    start, f = torch.tensor([[0.0], [3.0]]), lambda z: torch.where(z > 2, z + 1, z / 2 + 0.5)
    points = deqfast.find_fixed_points(f, start, eigenvalues=False)
    assert points.value.shape == (1, 1) and points.starts.tolist() == [1] and points.eigenvalues is None
    assert not bool(points.solution.converged[1]) and "1 of 2 starts converged" in repr(points)
    with pytest.raises(ValueError, match="eigenvalues=True"):
        _ = points.stable


def test_distance_decides_what_is_the_same_point():
    starts = grid(1, 21)
    assert len(deqfast.find_fixed_points(cubic, starts).value) == 3
    assert len(deqfast.find_fixed_points(cubic, starts, distance=1.5).value) == 1  # 0 is nearest to all, 1 is not
    for order in ([[1.0], [0.6]], [[0.6], [1.0]]):  # the longer of two points decides, whichever comes first
        steps = deqfast.find_fixed_points(lambda z: torch.where(z > 0.8, 1.0, 0.6), torch.tensor(order), distance=0.5)
        assert steps.starts.tolist() == [2]


@pytest.mark.parametrize("dtype", [FP64, torch.float32])
@pytest.mark.parametrize("kind", ["tanh", "half", "matrix"])
def test_all_starts_lead_to_zero(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(100, 20, dtype=dtype, generator=generator)
    starts[0], starts[1] = 0, 1e9
    weight = torch.linalg.qr(torch.randn(20, 20, dtype=dtype, generator=generator)).Q / 2
    decays = {"tanh": lambda z: 0.5 * z.tanh(), "half": lambda z: 0.5 * z, "matrix": lambda z: (z @ weight).tanh()}
    points = deqfast.find_fixed_points(decays[kind], starts)
    assert points.value.shape == (1, 20) and not points.value.any() and not points.residual.any()
    assert points.starts.tolist() == [100] and bool(points.stable) and points.solution.converged.all()
    assert not len(points.slow)


def test_no_start_depends_on_another():
    starts = torch.linspace(-2, 2, 9, dtype=FP64)[:, None]
    far = torch.tensor([[1e9], [-1e30], [1e-300]], dtype=FP64)
    for f in (torch.cos, cubic, lambda z: 0.5 * z, lambda z: 0.5 * z + 1):
        own = deqfast.find_fixed_points(f, starts).solution
        points = deqfast.find_fixed_points(f, torch.cat([starts, far]))
        assert torch.equal(points.solution.value[:9], own.value) and torch.equal(points.solution.status[:9], own.status)
        gaps = (f(points.value) - points.value).abs()
        assert (gaps <= 1e-8 * f(points.value).abs()).all() and (points.residual <= 1e-8).all()


def test_points_of_different_size_stay_apart():
    """A point far away says nothing about the distance of others."""
    f = lambda z: z - 0.1 * torch.tanh(z * (z - 1) * (z - 2) * (1000 - z) / 1000)  # noqa: E731
    starts = torch.cat([torch.linspace(-0.5, 2.5, 31), torch.linspace(900, 1100, 11)]).to(FP64)[:, None]
    points = deqfast.find_fixed_points(f, starts)
    points = {round(z, 3): bool(stable) for z, stable in zip(points.value[:, 0].tolist(), points.stable, strict=True)}
    assert points == {0.0: True, 1.0: False, 2.0: True, 1000.0: False}


def test_slow_points_are_apart():
    """f moves by at least 1e-10: it has no fixed point, and near 0 it is slow."""
    points = deqfast.find_fixed_points(lambda z: z + 1e-10 + z**2, torch.tensor([[0.1], [0.2]], dtype=FP64))
    assert len(points.value) == 0 and len(points.slow) == 1 and ", 1 slow" in repr(points)
    assert points.starts.shape == (0,) and not points.solution.converged.any()
    drift = deqfast.find_fixed_points(lambda z: z + 0.3, torch.rand(4, 2))
    assert len(drift.value) == 0 and len(drift.slow) == 0
