"""The CUDA kernels of the solver steps, run by an emulation on the CPU, against the reference; see emulate.py."""

from __future__ import annotations

from dataclasses import replace

import emulate
import pytest
import torch

from deqfast.testing.states import METHODS, RULES, Case, check_run, check_step, clone, make_state, same_bits

SHORT = {"history_dtype": torch.bfloat16}
DTYPES = {"fp32": {}, "fp64": {"dtype": torch.float64}, "bf16 history": SHORT}
EVENTS = ("run", "done", "nan", "inf", "overflow", "tiny", "converged", "zero", "stalled", "degenerate")
every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")


@pytest.fixture(params=emulate.ORDERS)
def order(request):
    """The order in which threads are resumed: no result may depend on it."""
    with emulate.order(request.param):
        yield request.param


def step_of(case: Case):
    name = "picard_step" if case.method is None else "multisecant_step"
    emulate.load(name)
    return getattr(torch.ops.deqfast_emulated, name)


def befallen(method, **settings) -> Case:
    rows = tuple(event for event in EVENTS if method or event != "degenerate")
    return Case(method, batch=len(rows), size=70, history=3, k=6, stall_floor=1e-3, rows=rows, **settings)


class TestEmulation:
    """It finds a barrier that is missing."""

    SOURCE = """
#include <cuda_runtime.h>
__global__ void reverse(int* data) {
  __shared__ int buffer[64];
  buffer[threadIdx.x] = data[threadIdx.x];
  BARRIER
  data[threadIdx.x] = buffer[63 - threadIdx.x];
}
extern "C" void run(int* data) { reverse<<<1, 64, 0, nullptr>>>(data); }
"""

    @pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
    def test_a_missing_barrier_shows(self, barrier, tmp_path):
        path = tmp_path / "reverse.cu"
        path.write_text(self.SOURCE.replace("BARRIER", barrier))
        run, right = emulate.build(path).run, []
        for order in emulate.ORDERS:
            data = torch.arange(64, dtype=torch.int32)
            with emulate.order(order):
                run(emulate.address(data))
            right.append(data.tolist() == list(range(63, -1, -1)))
        assert all(right) if barrier else not any(right)


class TestPicard:
    @pytest.mark.parametrize("damping", [1.0, 0.6])
    @pytest.mark.parametrize("dtype", ["fp32", "fp64"])
    @pytest.mark.parametrize("size", [1, 63, 64, 777, 1028, 20000])
    def test_run(self, size, dtype, damping):
        case = Case(None, batch=3, size=size, k=2, damping=damping, **DTYPES[dtype])
        check_run(step_of(case), case)

    @pytest.mark.parametrize("last", [False, True])
    def test_what_can_befall_a_sample(self, last, order):
        check_step(step_of(Case(None)), befallen(None, last=last))


class TestMultisecant:
    @every_method
    @every_dtype
    @pytest.mark.parametrize("size", [1, 63, 64, 776, 777])
    def test_run_through_filling_and_eviction(self, size, method, dtype):
        case = Case(method, size=size, history=1 if size == 1 else 3, k=5, **DTYPES[dtype])
        check_run(step_of(case), case)

    @every_method
    @every_dtype
    def test_step_and_mixing(self, method, dtype):
        case = Case(method, size=130, history=3, k=5, alpha=0.7, beta=0.5, **DTYPES[dtype])
        check_step(step_of(case), case)

    @every_method
    @pytest.mark.parametrize(("history", "k"), [(6, 8), (10, 12), (20, 20), (32, 33)])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16 history"])
    def test_long_windows(self, method, history, k, dtype):
        case = Case(method, size=640, history=history, k=k, batch=1, wobble=0.5, **DTYPES[dtype])
        check_step(step_of(case), case)

    @every_method
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_what_can_befall_a_sample(self, method, rule, last, order):
        check_step(step_of(Case(method)), befallen(method, last=last, **rule))


class TestSeveralBlocksPerSample:
    """On a GPU that the samples do not fill."""

    @pytest.fixture(autouse=True)
    def large_gpu(self):
        emulate.set_device(processors=132, shared_memory=227 * 1024)
        yield
        emulate.set_device(processors=4, shared_memory=99 * 1024)

    @pytest.mark.parametrize("size", [8192, 12305])
    @pytest.mark.parametrize("method", [None, *METHODS])
    @every_dtype
    def test_run(self, method, size, dtype):
        if method is None and "history" in dtype:
            pytest.skip("picard_step has no history")
        case = Case(method, batch=2, size=size, history=2, k=3, damping=0.7, beta=0.8, **DTYPES[dtype])
        before = emulate.launches()
        check_run(step_of(case), case)
        assert emulate.launches() - before == 2 * (case.k + 1)

    @pytest.mark.parametrize("method", [None, *METHODS])
    @pytest.mark.parametrize("last", [False, True])
    def test_what_can_befall_a_sample(self, method, last, order):
        case = replace(befallen(method, last=last), size=8192)
        before = emulate.launches()
        check_step(step_of(case), case)
        assert emulate.launches() - before == 2


@pytest.mark.parametrize("method", [None, *METHODS])
def test_the_bits_depend_on_nothing_but_the_sample(method):
    """Neither on the order of the threads nor on the batch mates."""
    case = Case(method, batch=3, size=777, history=4, k=6)
    before = make_state(case)
    results = []
    for order in emulate.ORDERS:
        state = clone(before)
        with emulate.order(order):
            case.call(step_of(case), state)
        results.append(state)
    assert all(same_bits(state[name], results[0][name]) for state in results for name in case.names)
    alone = {name: tensor[1:2].clone() if tensor.shape[0] == 3 else tensor.clone() for name, tensor in before.items()}
    for name in ("residual", "gain"):
        alone[name] = before[name][:, 1:2].contiguous()
    replace(case, batch=1).call(step_of(case), alone)
    assert same_bits(alone["z"], results[0]["z"][1:2])


@pytest.mark.parametrize("method", [None, *METHODS])
def test_one_launch_per_step(method):
    case = Case(method, size=64, history=3, k=4)
    state, before = make_state(case), emulate.launches()
    case.call(step_of(case), state)
    assert emulate.launches() - before == 1
