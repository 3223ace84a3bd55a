"""Steps of all methods, every implementation compared with the reference in float64. Its error is at most twice the
error of plain torch in the same dtype, see benchmarks/correctness/states.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from correctness import assert_close
from correctness.states import (
    METHODS,
    RULES,
    Case,
    State,
    StepsCase,
    advance,
    check_run,
    check_step,
    make_state,
    same_bits,
    start_state,
    start_steps,
    value_of_f,
)
from deqfast.kernels.constants import ADVANCES, BROKEN, IMPROVED
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreter import INTERPRETED
from op_calls import OPTIONS, SHORT_HISTORY, check_bits, examples, share_rows
from solutions import assert_same_solution
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import deqfast
from deqfast import Broyden, Status
from deqfast.ops import Kernel, choose_kernel
from deqfast.ops.registry import OPS
from deqfast.solvers.broyden import StepsState
from deqfast.solvers.multisecant import MultisecantState

DTYPES = OPTIONS | {"bf16 history": SHORT_HISTORY}
STATUS = {"nan": 2, "inf": 2, "converged": 1, "zero": 1, "fallen": 1, "stalled": 3}  # 0 of the others that ran
EVENTS = ("run", "done", "overflow", "tiny", "runaway", *STATUS, "degenerate")
STEPS = "steps"  # Broyden's good method from its steps only, by a kernel of the CPU
MADE = [*product(["cpp", "triton", "cuda", "emulated"], [None, *METHODS]), ("cpp", STEPS)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_method = pytest.mark.parametrize("method", METHODS)


def made_by(names: str, values: list[tuple]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, values, indirect=["implementation"], ids=lambda value: str(value))


every_step = made_by("implementation, method", MADE)
WITH_DTYPES = [(*made, dtype) for made, dtype in product(MADE, DTYPES) if made[1] in METHODS or "bf16" not in dtype]
every_step_and_dtype = made_by("implementation, method, dtype", WITH_DTYPES)
every_history_and_dtype = made_by("implementation, method, dtype", [made for made in WITH_DTYPES if made[1]])


def step_case(method: str | None, **options) -> Case:
    """A case; where steps are kept, with just the room for them."""
    if method != STEPS:
        return Case(method, **options)
    return StepsCase(**options | {"history": options["k"] + (not options.get("last"))})


def step_for(case: Case, implementation) -> Callable[..., None]:
    if isinstance(case, StepsCase):
        return implementation.op("broyden_step")
    return implementation.op("picard_step" if case.method is None else "multisecant_step")


def compare(check: Callable[..., State], case: Case, implementation) -> State:
    """``check_step`` or ``check_run``."""
    if case.history_dtype is not None and implementation.name == "triton" and INTERPRETED:
        # The interpreter truncates where a GPU rounds to nearest: each of two conversions may be an ulp off.
        case = replace(case, history_slack=2**-6)
    return check(step_for(case, implementation), case, implementation.device)


def befallen(method: str | None, **options) -> Case:
    # Of Picard nine samples run: an odd number is shared by threads.
    rows = {None: (*EVENTS[:-1], "run"), STEPS: (*EVENTS, "singular", "forgotten")}.get(method, EVENTS)
    return step_case(method, **{"batch": len(rows), "size": 70, "history": 3, "k": 6, "rows": rows, **options})


@pytest.fixture(params=["even", "odd"])
def shared_size(request, implementation, set_threads, monkeypatch) -> Iterator[int]:
    """The length of a sample that several threads, blocks or programs share, or one thread reads chunk by chunk."""
    odd = request.param == "odd"
    if implementation.name == "cpp":  # see csrc/cpu/samples.h: threads share odd batches of this length
        set_threads(4 if odd else 1)
        yield 11 * 4096 + 777 if odd else 2 * 4096
    elif implementation.name == "cuda":
        yield 8192 + 777 * odd
    elif implementation.name == "emulated":
        request.getfixturevalue("large_device")
        yield 12305 if odd else 8192
    else:  # of 777 elements in blocks of 128 each of three programs has some, of 64 in blocks of 16 the third has none
        share_rows(monkeypatch, programs=3, block=128 if odd else 16)
        yield 777 if odd else 64


@pytest.mark.covering(2)
@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("size", [1, 7, 16, 63, 64, 777, 1025, 1028, 4100, 9000])
def test_a_run_of_picard(size, dtype, damping, implementation):
    compare(check_run, Case(None, batch=3, size=size, k=2, damping=damping, **DTYPES[dtype]), implementation)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1, 7, 16, 63, 776, 777])
@every_history_and_dtype
def test_a_run_through_filling_and_eviction(method, dtype, size, implementation):
    case = step_case(method, size=size, history=1 if size == 1 else 3, k=6, **DTYPES[dtype])
    compare(check_run, case, implementation)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("check", "k", "wobble"),
    [(check_run, 3, 0.0), (check_step, 10, 0.5), (check_step, 18, 0.5)],
    ids=["run", "window of 9", "of 17"],
)
@every_step_and_dtype
def test_samples_that_are_shared(method, dtype, check, k, wobble, shared_size, implementation):
    if shared_size > 11 * 4096 and method is not None and check is check_step:
        shared_size = 3 * 4096 + 777  # a long window: threads share it from fewer elements of a sample on
    case = step_case(
        method, batch=3, size=shared_size, history=k - 1, k=k, damping=0.7, beta=0.8, wobble=wobble, **DTYPES[dtype]
    )
    compare(check, case, implementation)


ALONE = [made for made in WITH_DTYPES if made[0] in ("cuda", "emulated") and made[1]]


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [8200, 8193])
@pytest.mark.parametrize("k", [3, 10, 18])
@made_by("implementation, method, dtype", ALONE)
def test_long_samples_that_are_alone_on_a_multiprocessor(method, dtype, k, size, implementation):
    """Such a sample has a block of 512 threads. An H100 has 132 multiprocessors, the emulated GPU four."""
    rows = ("run", "nan", "overflow", "converged")
    batch = 100 if implementation.name == "cuda" else 4
    case = Case(method, batch, size, history=k - 1, k=k, beta=0.8, wobble=0.5, rows=rows, **DTYPES[dtype])
    compare(check_step, case, implementation)


@pytest.mark.covering(1)
@every_method
@every_dtype
def test_step_mixing_and_ridge(method, dtype, implementation):
    case = Case(method, size=130, history=3, k=5, alpha=0.7, beta=0.5, ridge=2.0**-10, **DTYPES[dtype])
    compare(check_run, case, implementation)


LONG = [(*made, *window) for made in WITH_DTYPES if made[1] for window in ((6, 8), (10, 12), (20, 20), (32, 33))]
LONG += [("cpp", method, "fp64", 40, 43) for method in METHODS]  # longer than a GPU kernel takes


@pytest.mark.covering(2)
@made_by("implementation, method, dtype, history, k", LONG)
def test_long_windows(method, dtype, history, k, implementation):
    case = step_case(method, size=640, history=history, k=k, batch=1, wobble=0.5, **DTYPES[dtype])
    compare(check_step, case, implementation)


@pytest.mark.covering(2)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rule", RULES)
@every_step
def test_what_can_befall_a_sample(method, rule, last, implementation):
    case = befallen(method, last=last, stall_floor=1e-3, **RULES[rule])
    after = compare(check_step, case, implementation)
    ran = [row for row, event in enumerate(case.rows) if event != "done"]
    expected = STATUS | ({} if rule == "rel" else {"tiny": 1})  # nothing, compared with an absolute tolerance
    if last:
        expected = dict.fromkeys(case.rows, Status.MAX_ITER) | {"runaway": Status.ESCAPED} | expected
    assert after["status"][ran].tolist() == [expected.get(case.rows[row], 0) for row in ran]
    assert after["iterations"][ran].tolist() == [case.k + 1] * len(ran)
    assert after["active"].item() == case.batch - sum(bool(expected.get(case.rows[row], 0)) for row in ran)


@pytest.mark.covering(1)
@pytest.mark.parametrize("last", [False, True])
@every_step
def test_what_can_befall_a_sample_that_is_shared(method, last, shared_size, implementation):
    case = befallen(method, last=last, stall_floor=1e-3, size=shared_size, history=2)
    compare(check_step, case, implementation)


@pytest.mark.covering(1)
@pytest.mark.parametrize("k", [1, 2, 5])
@every_method
def test_without_a_ridge_a_degenerate_pair_leaves_a_picard_step(method, k, implementation):
    """s = y = 0: the pair and all older ones are dropped."""
    case = Case(method, size=31, k=k, history=3, rows=("degenerate",), ridge=0.0)
    after = compare(check_step, case, implementation)
    torch.testing.assert_close(after["z"][0], after["fz"][0])


def check_case_bits(case: Case, implementation, set_threads) -> None:
    if implementation.name == "triton" and INTERPRETED:  # which takes seconds with more of them
        rows = ("run", "done", "nan", "converged", "runaway")
        case = replace(case, batch=len(rows), rows=rows)
    state = make_state(case, implementation.device)
    values = [*(state[name] for name in case.names), *case.scalars()]
    check_bits(step_for(case, implementation), values, implementation, set_threads, case.batch)


@pytest.mark.covering(2)
@pytest.mark.parametrize("last", [False, True])
@every_step
def test_the_bits_depend_on_nothing_but_the_sample(method, last, implementation, set_threads):
    check_case_bits(befallen(method, size=203, last=last), implementation, set_threads)


@pytest.mark.covering(1)
@pytest.mark.parametrize("last", [False, True])
@every_step
def test_the_bits_of_a_sample_that_is_shared(method, last, shared_size, implementation, set_threads):
    check_case_bits(befallen(method, size=shared_size, history=2, last=last), implementation, set_threads)


def assert_the_device_counts(method, size, max_iter, implementation, **options):
    """A run whose steps know k equals, bit for bit, a run whose steps know only max_iter, in bodies of two."""
    case = step_case(method, **{"batch": 3, "size": size, "history": 3, "k": max_iter, "tol": 0.1, **options})
    step, ended, start = step_for(case, implementation), [], start_steps if method == STEPS else start_state
    given, own = (start(case, implementation.device) for _ in range(2))
    for state in (given, own):  # samples that end at different evaluations
        state["z"].mul_(torch.tensor([[1e-3], [1.0], [30.0]], device=implementation.device, dtype=case.dtype))
        state["fz"].copy_(value_of_f(state["z"]))
    for k in range(max_iter + max_iter % 2):  # a body of two may make an evaluation in which no sample runs
        now = replace(case, k=min(k, max_iter - 1), last=k >= max_iter - 1)
        advance(now, step, given)
        advance(replace(now, k=-max_iter, last=False) if k else now, step, own)
        ended.append(given["active"].item())
        if implementation.name == "triton" and k >= max_iter - 1:
            # With k it is Picard's kernel that judges last, in another order of summation, and leaves the window.
            for name in ("status", "iterations", "active"):
                assert torch.equal(given[name], own[name]), (name, k)
            torch.testing.assert_close(own["residual"], given["residual"])
            return
        for name in case.names:
            assert given[name].nan_to_num(7).equal(own[name].nan_to_num(7)), (name, k)
    assert {1, 2} & {*ended} and ended[-1] == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_iter", [5, 8])
@every_step_and_dtype
def test_the_device_counts(method, dtype, max_iter, implementation):
    assert_the_device_counts(method, 70, max_iter, implementation, **DTYPES[dtype])


@pytest.mark.covering(1)
@every_step
def test_the_device_counts_for_a_sample_that_is_shared(method, shared_size, implementation):
    assert_the_device_counts(method, shared_size, 5, implementation)


@every_step
def test_an_empty_batch(method, implementation):
    case = step_case(method, batch=0, size=5, k=0)
    state = make_state(case, implementation.device)
    case.call(step_for(case, implementation), state)
    assert state["active"].item() == 0


@pytest.mark.parametrize("implementation", ["cpp", "cuda"], indirect=True)
@settings(examples, max_examples=60)
@given(
    method=st.sampled_from([None, *METHODS, STEPS]),
    dtype=st.sampled_from(list(DTYPES)),
    batch=st.integers(1, 5),
    size=st.integers(16, 600),
    history=st.integers(2, 7),
    k=st.integers(0, 9),
    events=st.lists(st.sampled_from([*EVENTS, "singular", "forgotten"]), max_size=5),
)
def test_any_state(method, dtype, batch, size, history, k, events, implementation):
    assume(method != STEPS or (implementation.name == "cpp" and k))
    options = DTYPES[dtype] if method in METHODS or dtype != "bf16 history" else {}
    rows = tuple(event for event in events if method == STEPS or event in EVENTS[:-1])[:batch]
    case = replace(befallen(method, k=k), batch=batch, size=size, rows=rows, **options)
    compare(check_step, replace(case, history=history + k * (method == STEPS)), implementation)


HALVES = {
    "picard": Case(None, batch=6, damping=0.7, dtype=torch.float64),
    **{name: Case(name, batch=6, beta=0.8, alpha=0.9, dtype=torch.float64) for name in METHODS},
    STEPS: StepsCase(batch=6, dtype=torch.float64),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("k", [0, 3, 9])  # before the first pair, and with a window that is not full, and that is
@pytest.mark.parametrize("size", [1, 63, 777, 8192 + 4])
@pytest.mark.parametrize("name", HALVES)
def test_sums_and_steps_of_rows_that_are_parts(implementation, name, size, k, monkeypatch, large_device):
    history = 12 if name == STEPS else min(4, size)  # more pairs than columns: a singular system
    case = replace(HALVES[name], size=size, k=k, history=history)
    first = {"picard": "picard", STEPS: "broyden"}.get(name, "multisecant")
    if first == "broyden" and implementation.name != "cpp":
        pytest.skip("this kernel has no such halves")
    values: dict[str, Any] = {key: torch.nan_to_num(value) for key, value in make_state(case, "cpu").items()}
    values |= {key: getattr(case, key) for key in ("damping", "alpha", "beta", "ridge")}
    values["method"] = METHODS.get(case.method)
    width = {"picard": 2, "broyden": 2 + 2 * k}.get(first) or 4 + min(k, history) * (
        3 if name in ("good", "and1") else 2
    )
    values |= {"k": k, "sums": torch.full((6, width), 7.0, dtype=torch.float64)}
    values["status"] = torch.tensor([0, 0, 1, 0, 0, 2], dtype=torch.int8)
    verdicts = IMPROVED | ADVANCES, ADVANCES, 0, IMPROVED, BROKEN, ADVANCES
    values["verdict"] = torch.tensor(verdicts, dtype=torch.int8)
    if implementation.name == "triton":
        # Each has some of 777 columns in its blocks, and of 8196 in blocks that are not many to interpret.
        share_rows(monkeypatch, programs=3 if size > 63 else 1, block=128 if size < 8192 else 1024)
    for op in (f"{first}_sums", f"{first}_apply"):
        if k == 0 and op in ("multisecant_sums", "broyden_sums"):
            continue
        names = list(OPS[op].arguments.__dataclass_fields__)
        expected = [value.clone() if torch.is_tensor(value := values[key]) else value for key in names]
        moved = [value.to(implementation.device, copy=True) if torch.is_tensor(value) else value for value in expected]
        Kernel("torch").op(op)(*expected)
        implementation.op(op)(*moved)
        for key, value, right in zip(names, moved, expected, strict=True):
            if torch.is_tensor(right):
                assert_close(value.cpu(), right, 1e-11, f"{op}: {key}")
        values |= dict(zip(names, expected, strict=True))
    assert torch.equal(values["z"][2], make_state(case, "cpu")["z"][2])  # the verdict 0 leaves a row as it is


ONLY_STEPS = [
    Broyden(),
    Broyden(max_iter=1),
    Broyden(max_iter=30, history_size=30),
    Broyden(history_size=19),  # as many as steps
    Broyden(history_dtype=torch.float32),
    Broyden(max_iter=22),
]
PAIRS = [
    Broyden(max_iter=22, history_size=20),
    Broyden(history_size=18),
    Broyden(kind="bad"),
    Broyden(relaxation=0.7),
    Broyden(history_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("solver", [*ONLY_STEPS, *PAIRS], ids=str)
def test_when_only_steps_are_kept(solver, kernel, device):
    on_cpu, kernel, z = kernel in ("torch", "cpp"), choose_kernel(kernel, torch.device(device)), torch.zeros(2, 5)
    state = solver.init(z.to(device), kernel)
    assert type(state) is (StepsState if solver in ONLY_STEPS and on_cpu else MultisecantState)
    assert type(solver.init_pairs(z.to(device), kernel)) is MultisecantState
    if type(state) is StepsState:  # one less than evaluations
        assert state.steps.shape == (2, max(1, solver.max_iter - 1), 5) and state.steps.dtype == z.dtype


# Histories of more than 2^31 elements: one sample is running, and the memory of the others is never touched.
LONG_HISTORY = 32


def last_of_many(state, batch, device):
    """The state of one sample as the last of `batch`, of which no other is running."""
    many = {}
    for name, tensor in state.items():
        if name == "active":
            many[name] = tensor.clone().to(device)
        elif name in ("residual", "progress"):
            many[name] = torch.zeros(len(tensor), batch, dtype=tensor.dtype, device=device)
            many[name][:, -1] = tensor[:, 0]
        else:
            many[name] = torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            if name in ("status", "iterations"):
                many[name].fill_(1)
            many[name][-1] = tensor[0]
    return many


@pytest.mark.covering(0)
@every_method
def test_the_last_of_many_samples(method, implementation, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which touches all of it
    step, device, size = implementation.op("multisecant_step"), implementation.device, 4096
    if implementation.name == "triton":  # few samples, since the interpreter runs their programs one by one
        from deqfast.kernels import multisecant_step, picard_step

        size = 65536
        for module in (multisecant_step, picard_step):
            monkeypatch.setattr(module, "programs_per_sample", lambda batch, size, device: 1)
    case = Case(method, batch=1, size=size, history=LONG_HISTORY, k=2, history_dtype=torch.bfloat16)
    alone = make_state(case, device)
    try:
        many = last_of_many(alone, 2**31 // (LONG_HISTORY * size) + 1, device)
    except RuntimeError as error:
        pytest.skip(f"not enough memory: {error}")
    case.call(step, alone)
    case.call(step, many)
    assert many["active"].item() == alone["active"].item()
    for name in ("z", "best", "status", "iterations", "left", "df", "gram"):
        assert same_bits(many[name][-1], alone[name][0]), name
    for name in ("residual", "progress"):
        assert same_bits(many[name][:, -1], alone[name][:, 0]), name


@pytest.mark.usefixtures("cpp_kernels")
class TestBoundSteps:
    """On a CPU, steps of a solve run without the op; torch must still see them where it looks."""

    @pytest.mark.parametrize("solver", [deqfast.Picard(1e-6, 30, relaxation=0.7), deqfast.Broyden(1e-6, 30)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_same_bits_as_the_op(self, solver, dtype, monkeypatch):
        x, weight = torch.randn(5, 63, dtype=dtype), torch.randn(63, 63, dtype=dtype) / 20

        def solution():
            return deqfast.solve(lambda z: torch.tanh(z @ weight + x), torch.zeros_like(x), solver, kernel="cpp")

        bound = solution()
        monkeypatch.setattr("deqfast.ops.choice.runs_only", lambda *tensors: False)
        assert_same_solution(bound, solution())
        assert bound.converged.all()

    def test_the_profiler_sees_the_op(self):
        with torch.profiler.profile() as profile:
            deqfast.solve(torch.cos, torch.zeros(2, 3), deqfast.Picard(), kernel="cpp")
        assert "deqfast::picard_step" in {event.key for event in profile.key_averages()}

    @pytest.mark.parametrize("solver", [deqfast.Picard(1e-6, 40), deqfast.Broyden(1e-6, 30)])
    def test_values_whose_numbers_are_not_in_their_memory(self, solver):
        """A lazy negative, and a subclass without memory of its own, as collectives of a cell return."""
        for f in (lambda z: torch._neg_view(1 - 0.5 * z), lambda z: AsyncCollectiveTensor(0.5 * z - 1)):
            solution = deqfast.solve(f, torch.zeros(2, 3), solver, kernel="cpp")
            assert solution.converged.all()
            torch.testing.assert_close(solution.value, torch.full((2, 3), -2.0), rtol=3e-6, atol=0)

    def test_wrong_values_and_numbers_of_steps_raise(self):
        solver, kernel = deqfast.Broyden(1e-6, 3), deqfast.ops.choose_kernel("cpp", torch.device("cpu"))
        step = solver.bind(solver.init(torch.zeros(2, 8), kernel))
        assert step(torch.randn(2, 8), 0, False) == 2
        with pytest.raises(RuntimeError, match="`k` must be at least 0 and below the 2 steps"):
            step(torch.randn(2, 8), 2, False)
        for wrong in (torch.randn(2, 7), torch.randn(8, 2).mT, torch.randn(2, 8).double()):
            with pytest.raises(RuntimeError, match="`fz` must"):
                step(wrong, 1, False)
