"""The Triton kernels of the solver steps against the reference: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from deqfast.ops import Kernel, backends
from deqfast.testing.states import (
    METHODS,
    RULES,
    Case,
    State,
    check_run,
    check_step,
    clone,
    make_state,
    same_bits,
)

if not (available := backends()["triton"]):
    pytest.skip(available.reason, allow_module_level=True)

from deqfast.kernels import config, multisecant_step, picard_step
from deqfast.kernels.config import LaunchConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter truncates to bfloat16 where a GPU rounds to nearest: each of two conversions may be an ulp off.
SHORT = {"history_dtype": torch.bfloat16, "history_slack": 2**-6 if INTERPRETED else 0.0}
DTYPES = {"fp32": {}, "bf16": SHORT, "fp64": {"dtype": torch.float64}}
PLAIN = [Case(None, size=31, k=1), Case("good", size=31, k=3), Case("and2", size=31, k=3)]


@pytest.fixture(params=[1, 3], ids=["alone", "shared"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per sample; or three and short blocks, which leave nothing for the third where there are four."""
    if request.param > 1:

        def short(size, *_):
            return LaunchConfig(16 if size < 100 else 128, 1)

        for module in (picard_step, multisecant_step):
            monkeypatch.setattr(module, "programs_per_sample", lambda batch, size, device: request.param)
        monkeypatch.setattr(picard_step, "picard_config", short)
        for sweep in ("sweep_config", "tile_config"):
            monkeypatch.setattr(multisecant_step, sweep, short)


one_and_three_programs = pytest.mark.usefixtures("programs")


def step_of(case: Case):
    return Kernel("triton").op("picard_step" if case.method is None else "multisecant_step")


def label(case: Case) -> str:
    return case.method or "picard"


def check(case: Case) -> State:
    return check_step(step_of(case), case, DEVICE)


def after_step(case: Case, state: State) -> State:
    state = clone(state)
    case.call(step_of(case), state)
    return state


def test_programs_share_long_samples_where_the_batch_leaves_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda device: 132)
    device, long = torch.device("cuda"), 65536
    assert [config.programs_per_sample(batch, long, device) for batch in (1, 32, 88, 89, 500)] == [16, 8, 3, 1, 1]
    assert [config.programs_per_sample(1, size, device) for size in (1, 8192, 12288, 2**24)] == [1, 1, 3, 64]


@one_and_three_programs
@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("size", [1, 63, 777, 9000])
def test_picard_run(size, dtype, damping):
    case = Case(None, size=size, k=2, damping=damping, **DTYPES[dtype])
    check_run(step_of(case), case, DEVICE)


@one_and_three_programs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_run_through_filling_and_eviction(method, dtype):
    case = Case(method, batch=1, history=3, k=6, **DTYPES[dtype])
    check_run(step_of(case), case, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "beta"), [("good", 1.0), ("bad", 1.0), ("and1", 0.8), ("and2", 0.8)])
def test_mixing_step_and_ridge(method, beta, dtype):
    case = Case(method, history=3, alpha=0.7, beta=beta, ridge=2.0**-10, **DTYPES[dtype])
    for k in (0, 2, 4):
        check(replace(case, k=k))


@one_and_three_programs
@pytest.mark.parametrize("size", [1, 777])
@pytest.mark.parametrize("method", METHODS)
def test_odd_sizes(method, size):
    check(Case(method, size=size, history=1 if size == 1 else 3, k=4, batch=1))


@one_and_three_programs
@pytest.mark.parametrize(("history", "k"), [(6, 8), (10, 12), (20, 20), (32, 33)])
@pytest.mark.parametrize("method", METHODS)
def test_every_padded_window(method, history, k):
    check(Case(method, history=history, k=k, batch=1, wobble=0.5))


@one_and_three_programs
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", PLAIN, ids=label)
def test_what_befalls_single_samples(case, last, rule):
    rows = ("done", "nan", "inf", "overflow", "converged", "zero", "stalled", "run", "tiny")
    case = replace(case, batch=len(rows), rows=rows, last=last, k=case.k + 6, tol=1e-9, stall_floor=1e-3, **rule)
    after, tiny = check(case), int(bool(rule))  # too small to count beside an absolute tolerance
    assert after["status"].tolist() == [1, 2, 2, 0, 1, 1, 3, 0, tiny]
    assert after["iterations"].tolist() == [case.k] + [case.k + 1] * 8
    assert after["active"].item() == len(rows) - 5 - tiny


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_degenerate_history(method, k):
    """s = y = 0: without a ridge the pair and all older ones are dropped, which leaves a Picard step."""
    case = Case(method, size=31, k=k, history=3, rows=("degenerate",))
    assert torch.isfinite(check(case)["z"]).all()
    after = check(replace(case, ridge=0.0))
    torch.testing.assert_close(after["z"][0], after["fz"][0])


@one_and_three_programs
@pytest.mark.parametrize("case", PLAIN, ids=label)
def test_bits_depend_neither_on_the_run_nor_on_the_batch(case):
    case = replace(case, batch=3, k=4, size=200)
    before = make_state(case, DEVICE)
    together = after_step(case, before)
    for _ in range(9 if DEVICE == "cuda" else 1):
        again = after_step(case, before)
        assert all(same_bits(together[name], again[name]) for name in case.names)
    columns = ("residual", "gain")
    for row in range(3):
        alone = {
            name: before[name][:, row : row + 1] if name in columns else before[name][row : row + 1]
            for name in case.names
        }
        alone["active"] = before["active"]
        alone = after_step(case, {name: tensor.contiguous() for name, tensor in alone.items()})
        for name in case.names:
            if name != "active":
                mine = together[name][:, row : row + 1] if name in columns else together[name][row : row + 1]
                assert same_bits(mine, alone[name]), name


@pytest.mark.parametrize("case", PLAIN, ids=label)
def test_pointers_that_are_not_aligned(case):
    """Tensors that start one element into a buffer, with a row length that would allow wide accesses."""
    case = replace(case, size=64)
    before = make_state(case, DEVICE)
    shifted = {}
    for name, tensor in before.items():
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        shifted[name] = buffer[1:].view(tensor.shape).copy_(tensor)
    case.call(step_of(case), shifted)
    after = after_step(case, before)
    assert all(same_bits(shifted[name], after[name]) for name in ("status", "best", "residual"))
    torch.testing.assert_close(shifted["z"], after["z"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("case", PLAIN, ids=label)
def test_a_device_that_is_not_the_current_one(case):
    check_step(step_of(case), case, "cuda:1")
    assert torch.cuda.current_device() == 0
