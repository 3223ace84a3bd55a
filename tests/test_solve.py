"""The contract of ``deqfast.solve``: counting, freezing, best iterates, bad samples, layouts, dtypes, errors."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from correctness import after_solve, assert_close, bounds, linear, rounding, tanh
from solutions import SOLVERS, Recorder, assert_same_solution, every_solver, in_process, on_cpu, some_solvers

import deqfast
from deqfast import Broyden, Picard, Solution, Status, _extension, solve
from deqfast.engine.loop import LateWatch, Watch
from deqfast.ops.choice import _warn_of_fallback


# The default on a GPU is to look less often.
@pytest.fixture(autouse=True)
def looks_after_every_evaluation(monkeypatch):
    monkeypatch.setattr(LateWatch, "every", 1)


FLOATS = [torch.float32, torch.float64]


def ring(bias: torch.Tensor, weight: float | torch.Tensor = 0.8):
    """An f of elementwise operations only, which gives a sample the same bits in every batch."""

    def f(z):
        shifted = z.roll(1, -1)
        return bias + weight * shifted / (1 + 0.1 * shifted * shifted)

    return f


def ring_bias(batch: int, dim: int = 12, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device, dtype)


def assert_same_rows(actual: Solution, expected: Solution, rows: list[int]) -> None:
    for name in ("value", "status", "iterations", "residual", "residual_rel", "residual_abs"):
        assert torch.equal(getattr(actual, name)[rows], getattr(expected, name)[rows]), name


def looked(iterations: int, device: str) -> int:
    """Evaluations of a solve whose slowest sample takes `iterations`: on a GPU the host learns of its end one late."""
    return iterations + (device == "cuda")


def norms(recorder: Recorder) -> tuple[torch.Tensor, torch.Tensor]:
    """(|f(z) - z|, |f(z)|) of every call and sample, in float64."""
    z, fz = torch.stack(recorder.arguments).double(), torch.stack(recorder.values).double()
    return (fz - z).norm(dim=-1), fz.norm(dim=-1)


@pytest.mark.covering(1)
@every_solver
@pytest.mark.parametrize("absolute", [False, True])
def test_a_sample_uses_its_own_evaluations_and_is_frozen_when_done(name, absolute, kernel, device):
    weight = torch.tensor([0.1, 0.8, 0.0], device=device)[:, None]
    f = Recorder(ring(ring_bias(3, device=device), weight))
    tol = 1e-2
    solution = solve(f, torch.zeros(3, 12, device=device), SOLVERS[name](**bounds(tol, absolute)), kernel)
    assert solution.status.tolist() == [Status.CONVERGED] * 3
    assert solution.evaluations == len(f) == looked(max(solution.iterations.tolist()), device)
    assert len(set(solution.iterations.tolist())) == 3
    gap, value = norms(f)
    reached = (gap if absolute else gap / value) <= tol
    assert solution.iterations.tolist() == (reached.int().argmax(dim=0) + 1).tolist()
    for sample, used in enumerate(solution.iterations.tolist()):
        for argument in f.arguments[used - 1 :]:
            assert torch.equal(argument[sample], solution.value[sample])


@pytest.mark.covering(1)
@every_solver
@pytest.mark.parametrize("absolute", [False, True])
def test_the_best_iterate_is_returned_with_its_residual(name, absolute, kernel, device):
    # Expansive, and started near its fixed point: residuals of all solvers rise, some fall again.
    problem = linear(batch=2, device=device, rho=4.0)
    f = Recorder(problem.f)
    solver = SOLVERS[name](**bounds(1e-6, absolute), max_iter=6)
    solution = solve(f, problem.solution.to(device, torch.float32) + 0.1, solver, kernel)
    assert solution.status.tolist() == [Status.MAX_ITER] * 2
    assert solution.iterations.tolist() == [6, 6] and solution.evaluations == len(f) == 6
    gap, value = norms(f)
    measure = gap if absolute else gap / value
    best = measure.argmin(dim=0).tolist()
    assert min(best) < 5
    eps = rounding(torch.float32)
    for sample, call in enumerate(best):
        assert torch.equal(solution.value[sample], f.arguments[call][sample])
        assert_close(solution.residual_abs[sample], gap[call, sample], eps)
        assert_close(solution.residual_rel[sample], (gap / value)[call, sample], eps)
    assert torch.equal(solution.residual, solution.residual_abs if absolute else solution.residual_rel)


@some_solvers
@in_process
@pytest.mark.parametrize("every", [2, 3, 50])
def test_rarer_looks_only_add_evaluations(name, every, kernel, device, monkeypatch):
    f = ring(ring_bias(4, device=device))
    z0 = torch.zeros(4, 12, device=device)
    solver = SOLVERS[name](rtol=1e-2)
    often = solve(f, z0, solver, kernel)
    for watch in (Watch, LateWatch):
        monkeypatch.setattr(watch, "every", every)
    seldom = solve(f, z0, solver, kernel)
    assert_same_solution(seldom, often, but=("evaluations", "sample_evaluations"))
    needed, late = max(often.iterations.tolist()), int(device == "cuda")  # a GPU's count comes one look late
    for solution, looks in ((often, 1), (seldom, every)):
        assert solution.evaluations == min(20, (math.ceil(needed / looks) + late) * looks)
        assert solution.sample_evaluations == 4 * solution.evaluations


@pytest.mark.covering(1)
@every_solver
@pytest.mark.parametrize(("bad", "first_call"), [(math.nan, 2), (math.inf, 2), (-math.inf, 0), (math.nan, 0)])
def test_a_sample_that_breaks_goes_back_to_its_best_iterate(name, bad, first_call, kernel, device):
    bias = ring_bias(3, device=device)

    def breaking(z):
        value = ring(bias)(z)
        if len(f) - 1 >= first_call:
            value[1, 5] = bad
        return value

    f = Recorder(breaking)
    z0 = torch.zeros_like(bias)
    solver = SOLVERS[name](rtol=1e-3, max_iter=4)
    broken, healthy = solve(f, z0, solver, kernel), solve(ring(bias), z0, solver, kernel)
    assert all(torch.isfinite(z).all() for z in f.arguments)
    assert all(torch.equal(z[1], broken.value[1]) for z in f.arguments[first_call + 1 :])
    assert_same_rows(broken, healthy, [0, 2])
    assert broken.status[1] == Status.NONFINITE and broken.iterations[1] == first_call + 1
    if first_call == 0:
        assert torch.equal(broken.value[1], z0[1])
        assert broken.residual.tolist()[1] == broken.residual_abs.tolist()[1] == math.inf
    else:
        absolute, value = norms(f)
        best = int((absolute / value)[:first_call, 1].argmin())
        assert torch.equal(broken.value[1], f.arguments[best][1])
        assert_close(broken.residual_abs[1], absolute[best, 1], rounding(torch.float32))


class TestStall:
    """STALLED exists for an f that ran in low precision, and for no other."""

    TOL = 1e-6

    def solve(self, f, z0, kernel, **settings):
        return solve(f, z0, Picard(rtol=self.TOL, max_iter=40, **settings), kernel)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_never_in_full_precision(self, dtype, kernel, device):
        """Neither at the rounding floor of f's own dtype, nor at the floor of a bfloat16 that f hides."""
        problem = tanh(device=device, dtype=dtype)
        solution = self.solve(lambda z: problem.f(z).bfloat16().to(dtype), problem.z0, kernel)
        assert Status.MAX_ITER in solution.status.tolist() and Status.STALLED not in solution.status.tolist()
        unit, calls = torch.finfo(dtype).eps, iter(range(10))
        z0 = torch.ones(1, 2, dtype=dtype, device=device)

        def flutter(z):
            return torch.full_like(z0, 1 + (2 + 2 * (next(calls) % 2)) * unit)

        solution = solve(flutter, z0, Picard(unit / 4, 10), kernel)
        assert solution.status.tolist() == [Status.MAX_ITER] and (solution.residual < 8 * unit).all()

    def test_five_iterations_without_a_gain(self, kernel, device):
        # In units of float16's rounding the residuals are 4, 2, 2, 2, ...; the second sample's fall again later.
        unit = torch.finfo(torch.float16).eps
        script = torch.tensor([[4, 2] * 6, [4, 2, 4, 2, 4, 3, 4, 3, 4, 3, 4, 3]], device=device) * unit + 1
        calls = iter(range(12))
        z0 = torch.ones(2, 1, device=device)
        solution = solve(lambda z: script[:, next(calls)][:, None].half(), z0, Picard(1e-6, 12), kernel)
        assert solution.status.tolist() == [Status.STALLED] * 2
        assert solution.iterations.tolist() == [7, 11] and solution.evaluations == looked(11, device)


@pytest.mark.parametrize("shape", [(0, 12), (0,), (0, 3, 2, 2)])
@some_solvers
def test_an_empty_batch_calls_nothing(name, shape, kernel, device):
    f = Recorder(lambda z: z)
    solution = solve(f, torch.zeros(shape, device=device), SOLVERS[name](), kernel)
    assert solution.value.shape == shape and solution.evaluations == len(f) == 0
    assert solution.status.shape == solution.iterations.shape == solution.residual.shape == (0,)
    assert "empty batch" in repr(solution)


@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16 float32", "float32"), ("float32 float64", "float64")],
)
def test_dtypes_are_kept_and_the_widest_is_solved_in(dtypes, widest, kernel, device):
    """See test_properties.py for the answer of several leaves, which equals the answer of the concatenated ones."""
    if (kernel, widest) == ("triton", "float64"):
        pytest.skip("the Triton kernels have no float64")
    dtypes = [getattr(torch, dtype) for dtype in dtypes.split()]
    problem = tanh(device=device, dtype=torch.float32)
    f = Recorder(lambda z: [problem.f(leaf.float()).to(leaf.dtype) for leaf in z])
    solution = solve(f, [problem.z0.to(dtype) for dtype in dtypes], Broyden(rtol=2e-2), kernel)
    for z in (*f.arguments, solution.value):
        assert [leaf.dtype for leaf in z] == dtypes
    assert solution.residual.dtype == solution.residual_abs.dtype == getattr(torch, widest)
    assert solution.converged.all()
    for leaf in solution.value:
        assert_close(leaf, problem.solution, after_solve(len(dtypes) * 2e-2, problem.amplification))


class TestBuffers:
    """f may return what it likes, as long as it does not touch its earlier values."""

    BIAS = ring_bias(3)

    def solved(self, f, name, kernel="auto"):
        return solve(f, torch.zeros_like(self.BIAS), SOLVERS[name](1e-5, 12), kernel)

    def reusing(self, count, fresh=0):
        """The ring, with values in `count` buffers in turn after `fresh` calls that return new memory."""
        buffers, calls = [torch.empty_like(self.BIAS) for _ in range(count)], iter(range(20))

        def f(z):
            value, call = ring(self.BIAS)(z), next(calls)
            return value if call < fresh else buffers[call % count].copy_(value)

        return f

    @pytest.mark.parametrize(
        ("name", "count", "fresh"),
        # In turn from the first call on; and later, of those who keep no value.
        [*product(SOLVERS, [1, 2], [0]), ("picard", 1, 2), ("broyden", 1, 2)],
    )
    @on_cpu
    def test_values_in_buffers(self, name, count, fresh, kernel):
        expected = self.solved(ring(self.BIAS), name, kernel)
        assert_same_solution(self.solved(self.reusing(count, fresh), name, kernel), expected)

    @pytest.mark.parametrize("name", [name for name in SOLVERS if name not in ("picard", "broyden")])
    def test_a_buffer_that_is_reused_later_is_an_error_where_pairs_are_kept(self, name):
        with pytest.raises(RuntimeError, match="at call 4, the memory of its previous value"):
            self.solved(self.reusing(1, fresh=2), name)

    @every_solver
    def test_the_argument_itself(self, name, kernel, device):
        z0 = self.BIAS.to(device)
        solution = solve(lambda z: z, z0, SOLVERS[name](), kernel)
        assert torch.equal(solution.value, z0) and solution.residual.tolist() == [0.0] * 3
        assert solution.evaluations == looked(1, device)


class TestKernels:
    def test_an_absent_extension_raises_with_its_reason(self, monkeypatch):
        monkeypatch.setattr(_extension, "cpp_module", None)
        monkeypatch.setattr(_extension, "cpp_reason", "it fell off")
        start = torch.zeros(2, 12)
        with pytest.raises(RuntimeError, match="kernel='cpp' is not available: it fell off"):
            solve(torch.cos, start, kernel="cpp")
        _warn_of_fallback.cache_clear()
        with pytest.warns(UserWarning, match="'auto' falls back to the slower torch: cpp: it fell off"):
            automatic = solve(torch.cos, start, kernel="auto")
        assert_same_solution(automatic, solve(torch.cos, start, kernel="torch"))

    @pytest.mark.parametrize(("name", "advice"), [("triton", "no CUDA device .*TRITON_INTERPRET=1"), ("cuda", "")])
    def test_without_a_device_a_gpu_kernel_raises_with_its_reason(self, name, advice, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        reason = deqfast.backends()[name].reason
        with pytest.raises(RuntimeError, match=f"kernel='{name}' is not available: {advice}") as error:
            solve(lambda z: z, torch.zeros(1, 1), kernel=name)
        assert reason and reason in str(error.value)


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("drop_converged", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_an_f_that_works_in_place_on_its_argument_is_refused(leaves, drop_converged, inference):
    if inference and leaves == 2:
        pytest.skip("inference mode counts no writes to the copies that leaves are")

    def f(z, rows=None):
        return z.mul_(0.5).add_(1) if leaves == 1 else [torch.nn.functional.relu_(z[0]), z[1]]

    z0, message = torch.rand(4, 3), r"f must not modify its argument z, .*z.mul\(2\) .*z\.clone\(\)"
    with torch.inference_mode(inference), pytest.raises(ValueError, match=message):
        solve(f, z0 if leaves == 1 else [z0, z0.clone()], drop_converged=drop_converged)


def test_a_solution_counts_its_samples_by_status():
    slope = torch.tensor([[0.5], [torch.nan], [1.0]])
    solution = solve(lambda z: z * slope + 1, torch.zeros(3, 2), Picard(max_iter=15))
    assert repr(solution) == "Solution(1 CONVERGED, 1 NONFINITE, 1 MAX_ITER, evaluations=15)"
    assert solution.converged.tolist() == [True, False, False]
    assert [int(status) for status in Status] == list(range(1, 8))  # 0 is a running sample's
    assert solution.status.dtype == torch.int8 and solution.iterations.dtype == torch.int32
    for copies in (1, 50):  # Python counts few, torch many
        many = solution.changed(status=solution.status.repeat(copies))
        assert [status for status in Status if many.may_include(status)] == sorted(solution.status.tolist())
    assert solution.changed(status=solution.status.to("meta")).may_include(Status.STALLED)  # reading it would wait


def test_plot_draws_the_trace_of_each_sample() -> None:
    """A line per sample and a point per evaluation; without a trace an error names the remedy."""
    z0 = torch.zeros(3, 2)
    solution = deqfast.solve(lambda z: 0.5 * z + 1, z0, deqfast.Picard(max_iter=20), trace=True)
    (axes,) = solution.plot().axes
    drawn = torch.tensor(np.stack([line.get_ydata() for line in axes.lines], axis=1))
    assert torch.equal(drawn, solution.trace)
    with pytest.raises(ValueError, match="trace=True"):
        deqfast.solve(torch.cos, z0, "picard").plot()
