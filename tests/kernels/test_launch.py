"""Launches of Triton's kernels: they resolve their arguments once, on programs and a device that fit.

Stand-ins for the kernels record the calls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from correctness.states import Case, check_step, make_state
from op_calls import Operations, good, unaligned
from solutions import SOLVERS

import deqfast
from deqfast.ops import Kernel, backends
from deqfast.ops.registry import OPS, Op

if not (available := backends()["triton"]):
    pytest.skip(available.reason, allow_module_level=True)

from deqfast.kernels import config, multisecant_step, neural_collapse, norm_act, norm_act_residual, picard_step


class Recorder:
    """Jit function that computes nothing. A call of it returns the compiled kernel, as triton's does."""

    calls: Counter[str] = Counter()

    def __init__(self, kernel, by="triton"):
        self.kernel, self.arg_names, self.by = kernel, kernel.arg_names, by

    def __getitem__(self, grid):
        assert len(grid) == 3
        Recorder.grid = grid
        return self.call

    def call(self, *values, **options):
        Recorder.calls[self.by] += 1
        assert len(values) == len(self.arg_names) and bool(options) == (self.by == "triton")
        Recorder.arguments = dict(zip(self.arg_names, values, strict=True))
        return Recorder(self.kernel, by="compiled") if self.by == "triton" else None


@pytest.fixture
def calls(monkeypatch):
    for module in (picard_step, multisecant_step):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
        monkeypatch.setattr(module._PLANS, "_plans", {})
    monkeypatch.setattr(multisecant_step._TRANSPOSED_PLANS, "_plans", {})
    monkeypatch.setattr(Recorder, "calls", Counter())
    return Recorder.calls


def slow(z):
    return 0.5 * z + 1


def solve(name, size=16, **options):
    solver = SOLVERS[name](rtol=1e-30, max_iter=8)
    return deqfast.solve(slow, torch.zeros(2, size), solver, "triton", **options)


@pytest.mark.parametrize("name", ["picard", "broyden", "anderson"])
def test_a_solve_checks_its_arguments_once_and_knows_its_kernels(name, calls, monkeypatch):
    checks, sizes = [], Op._sizes
    monkeypatch.setattr(Op, "_sizes", lambda *args: checks.append(1) or sizes(*args))
    assert solve(name).evaluations == 8
    asked = calls["triton"]
    assert len(checks) == 1
    solve(name)
    assert len(checks) == 2 and calls["triton"] == asked  # nothing of the second solve is new
    solve(name, size=17)
    assert calls["triton"] == 2 * asked


def test_kernels_get_the_arguments_of_their_step(calls):
    case = Case(k=1, tol=0.25, absolute=True, stall_floor=0.125, offset=0.5, damping=0.75)
    states = [make_state(case) for _ in range(2)]
    for state in states:
        case.call(Kernel("triton").op("picard_step"), state)
        tensors = {name.removeprefix("p_"): value for name, value in Recorder.arguments.items() if name[:2] == "p_"}
        assert tensors and all(value is state[name] for name, value in tensors.items())
        numbers = {name: value for name, value in Recorder.arguments.items() if name[:2] != "p_"}
        expected = {"B": 2, "D": 63, "k": 1, "hold": 0, "last": 0, "tol": 0.25, "absolute": 1, "stall_floor": 0.125}
        assert numbers == {**expected, "offset": 0.5, "maximum": 0, "damping": 0.75, "ON_CHIP": 1, "BLK": 64}
    assert calls == {"triton": 1, "compiled": 1}


@pytest.mark.parametrize(("size", "parts"), [(16, 1), (8192, 8), (2**20, 64)])
def test_the_transposed_product_has_a_plan_and_programs_by_length_only(size, parts, calls):
    product = Kernel("triton").op("multisecant_transposed")
    for batch in (1, 3):
        arguments = good("multisecant_transposed")
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor):
                shape = (batch, *tensor.shape[1:-1], size if name in ("v", "left", "df") else tensor.shape[-1])
                arguments[name] = tensor.new_zeros(shape[: tensor.dim()] if tensor.dim() > 1 else (batch,))
        for _ in range(2):
            out = product(*arguments.values())
            assert Recorder.arguments["p_out"] is out and Recorder.grid == (batch, parts, 1)
    assert calls == {"triton": 6, "compiled": 6}


def test_what_triton_compiles_apart_is_kept_apart(calls):
    """Addresses that are not multiples of 16, dtypes, sizes, the last step, and each place in the window."""
    step, asked = Kernel("triton").op("multisecant_step"), []
    window = Case("good", batch=2, size=16, history=2, k=3)
    others = {"dtype": torch.float64}, {"history_dtype": torch.bfloat16}, {"method": "bad"}, {"k": 4}, {"last": True}
    for case in (window, *(replace(window, **other) for other in others)):
        state = make_state(case)
        for _ in range(2):
            before = calls["triton"]
            case.call(step, state)
            case.call(step, state | {"fz": unaligned(state["fz"])})
        assert calls["triton"] == before
        asked.append(before)
    assert asked == [4, 8, 12, 16, 20, 22]  # two kernels each, one in the last step


def test_modes_and_the_profiler_see_each_step_as_an_op(calls):
    with Operations() as operations:
        solve("picard")
    assert operations.names.count("picard_step_triton") == 8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        solve("picard")
    assert [event.name for event in profile.events()].count("deqfast::picard_step_triton") == 8


@pytest.mark.parametrize("op", ["norm_act", "norm_act_backward", "norm_act_residual", "norm_act_residual_backward"])
def test_samples_whose_offsets_exceed_int32_are_refused(op):
    """As by the CUDA kernels."""
    y = torch.empty(1).expand(1, 2, 2**15, 2**15)
    with pytest.raises(RuntimeError, match=f"^{op}: `y` has too large samples: 2147483648 elements"):
        getattr(norm_act if op in vars(norm_act) else norm_act_residual, op)(OPS[op].arguments(**good(op) | {"y": y}))


def test_columns_beyond_the_grid_are_refused():
    wide = torch.empty(1, 1).expand(1, 2**24)
    grouped = {"rows": torch.zeros(1, dtype=torch.int64), "offsets": torch.tensor([0, 1])}
    for op, results, given, match in (
        ("class_means", 2, {"features": wide}, "`features` has too many columns: 16777216"),
        ("within_class_scatter", 1, {"features": wide[:, :1], "directions": wide}, "`directions` has too many columns"),
        (
            "within_class_scatter",
            1,
            {"features": wide, "directions": wide.T.expand(-1, 128)},
            "`directions` .* entries",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"{op}: {match}"):
            getattr(neural_collapse, op)(SimpleNamespace(**grouped, **given), *[None] * results)


def test_programs_share_long_samples_where_the_batch_leaves_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda device: 132)
    device, long = torch.device("cuda"), 65536
    assert [config.programs_per_sample(batch, long, device) for batch in (1, 32, 88, 89, 500)] == [16, 8, 3, 1, 1]
    assert [config.programs_per_sample(1, size, device) for size in (1, 8192, 12288, 2**24)] == [1, 1, 3, 64]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("method", [None, "good", "and2"], ids=str)
def test_triton_on_a_device_that_is_not_current(method):
    step = Kernel("triton").op("multisecant_step" if method else "picard_step")
    check_step(step, Case(method, size=31, k=3), "cuda:1")
    assert torch.cuda.current_device() == 0
