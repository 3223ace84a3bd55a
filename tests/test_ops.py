"""The registered ops: that they are proper ops, what they refuse, and which there are."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import emulate
import pytest
import torch
from correctness import assert_close, rounding
from correctness.norm_states import NORM_OPS
from correctness.states import same_bits
from op_calls import SHORT, SHORT_HISTORY, STEPS, good, good_loop, in_loop, outcome, step_values, tensors, unaligned

import deqfast
from deqfast import _extension
from deqfast.ops import KERNELS, choose_kernel
from deqfast.ops.registry import OPS
from deqfast.ops.steps.loops import STEPS as LOOPS

# See tests/test_compile.py and, of the mark of a compiled gradient, tests/test_compiled.py.
WHOLE_SOLVES = {f"deqfast::{op}" for op in ("solve_block", "pull_block", "solve_fc", "differentiated")}
CHECKED = [
    (made, op, dtype)
    for made, op, dtype in product(("cpp", "triton", "cuda"), OPS, ("fp32", "fp64", "short"))
    if (dtype != "short" or op in SHORT) and (made, op, dtype) != ("triton", "fc_fixed_point", "fp64")
]
every_op = pytest.mark.parametrize("op", OPS)


def made_op(op: str, implementation):
    on_cuda = op in emulate.sources()
    if not {"cpp": True, "triton": OPS[op].triton is not None}.get(implementation.name, on_cuda):
        pytest.skip(f"{implementation.name} has no {op}")
    return implementation.op(op)


class TestRegistration:
    def test_every_op_is_checked_here(self):
        registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("deqfast::")}
        on_triton = {f"deqfast::{op}_triton" for op in OPS if OPS[op].triton}
        loops = {f"deqfast::{name}" for name in ("state_begin", "loop_begin", "loop_end", *LOOPS)}
        loops |= {f"deqfast::{op}_bind" for op in OPS if OPS[op].binds}
        assert registered == {f"deqfast::{op}" for op in OPS} | on_triton | loops | WHOLE_SOLVES

    @pytest.mark.covering(1)
    @pytest.mark.parametrize(("implementation", "op", "dtype"), CHECKED, indirect=["implementation"])
    def test_opcheck(self, op, dtype, implementation):
        arguments = tuple(good(op, implementation.device, dtype).values())
        # Autograd and compilation do not look at the dtype.
        every_check = dtype == "fp32"
        checks = {} if every_check else {"test_utils": ("test_schema", "test_faketensor")}
        results = torch.library.opcheck(made_op(op, implementation).default, arguments, **checks)
        assert set(results.values()) == {"SUCCESS"} and len(results) >= (4 if every_check else 2)


@every_op
def test_pointers_that_are_not_aligned(op, implementation):
    """Rows have lengths that would allow wide accesses, which add in another order."""
    run, values = made_op(op, implementation), [*good(op, implementation.device).values()]
    for a, b in zip(outcome(run, values), outcome(run, values, copy=unaligned), strict=True):
        assert_close(a, b, rounding(torch.float32) if a.is_floating_point() else 0.0)


@pytest.mark.skipif(not deqfast.backends()["cpp"], reason=str(deqfast.backends()["cpp"]))
class TestLoops:
    """The steps of compiled loops do what the steps of the eager loop do, bit by bit."""

    CASES = {**STEPS, "short": replace(STEPS["multisecant_step"], **SHORT_HISTORY)}

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("size", [1, 63, 777])
    def test_the_step(self, case, last, size):
        op = "multisecant_step" if case == "short" else case
        case = replace(self.CASES[case], size=size, last=last)
        stepped = step_values(case)
        given, (_, _, *numbers) = dict(zip(case.names, stepped, strict=False)), stepped[len(case.names) :]
        tensors = {name: tensor.clone() for name, tensor in in_loop(op, given, case.k).items()}
        getattr(torch.ops.deqfast, op)(*stepped)
        run = getattr(torch.ops.deqfast, op.replace("step", "loop"))
        max_iter = case.k + 1 if last else case.k + 2
        running = run(*tensors.values(), given["fz"], max_iter, [float(number) for number in numbers])
        if "f_prev" in given:
            given["f_prev"] = given["fz"]
        for name, expected in in_loop(op, given, case.k + 1).items():
            assert same_bits(tensors[name], expected), name
        assert bool(running) == (not last and bool(given["active"]))

    @pytest.mark.parametrize(
        ("op", "wrong", "message"),
        [
            ("picard_loop", {"values": lambda t: t[:-1]}, "`values` must have shape"),
            ("picard_loop", {"numbers": lambda numbers: numbers[1:]}, "`numbers` must hold 6, got 5"),
            ("picard_loop", {"evaluations": 5}, "from 0 and below `max_iter` 5, got 5"),
            ("picard_loop", {"evaluations": -1}, "got -1"),
            ("picard_loop", {"max_iter": 2**31}, "`max_iter` must be 1 to 2147483647, got 2147483648"),
            ("multisecant_loop", {"history": lambda t: t[:1].contiguous()}, r"must have shape \(2, 2, 4, 16\)"),
            ("multisecant_loop", {"history": lambda t: t[:, :, :0]}, r"have shape \(2, 2, 1, 16\), got \(2, 2, 0"),
            ("multisecant_loop", {"history": torch.Tensor.half}, "`history` must have dtype Float, got Half"),
            ("multisecant_loop", {"numbers": lambda n: [*n[:5], 7.0, *n[6:]]}, "`method` must be 0 to 3, got 7"),
            ("broyden_loop", {"history": torch.Tensor.bfloat16}, "`history` must have dtype Float, got BFloat16"),
            ("broyden_loop", {"evaluations": 4, "max_iter": 9}, "`history` must have room for step 4, got 4 rows"),
            ("state_begin", {"z": lambda t: t.flip(0).T}, "`z` must be contiguous"),
            ("state_begin", {"z": torch.Tensor.half}, "`z` must be float32 or float64, got Half"),
            ("loop_begin", {"z0": lambda t: t.T}, "`z0` must be contiguous"),
            ("loop_begin", {"z0": torch.Tensor.half}, "`z0` must be float32 or float64, got Half"),
            ("loop_begin", {"z0": torch.Tensor.flatten}, r"`z0` must have shape \(B, D\), got \(32"),
            ("loop_begin", {"elements": 79}, "`elements` must be at least 80, got 79"),
            ("loop_begin", {"integers": 3}, "`integers` must be at least 4, got 3"),
            ("loop_end", {"batch": 3}, r"`values` must have shape \(120"),
            ("loop_end", {"dim": 17}, r"`values` must have shape \(84"),
            ("loop_end", {"batch": -1}, "must be at least 0, got -1 and 16"),
            ("loop_end", {"status": lambda t: t[:1]}, r"`status` must have shape \(2"),
        ],
    )
    def test_what_is_no_loop_or_would_leave_the_memory_is_named(self, op, wrong, message):
        call = good_loop(op, evaluations=wrong.get("evaluations", 0))
        wrong = {name: change for name, change in wrong.items() if name in call}
        call |= {name: change(call[name]) if callable(change) else change for name, change in wrong.items()}
        with pytest.raises(RuntimeError, match=f"{op}: .*{message}"):
            getattr(torch.ops.deqfast, op)(*call.values())

    def test_begin_and_end(self):
        z0 = torch.randn(3, 5)
        values, counts, status, running = torch.ops.deqfast.loop_begin(z0, 2 * 15 + 8 * 3, 2 + 3, 0)
        assert same_bits(values[:30].view(2, 3, 5), torch.stack([z0, z0])) and torch.isinf(values[30:]).all()
        assert counts.tolist() == [0, 3, 0, 0, 0] and not status.any() and bool(running)
        value, *_, relative, absolute, evaluations = torch.ops.deqfast.loop_end(values, counts, status, running, 3, 5)
        assert same_bits(value, z0) and torch.isinf(relative).all() and torch.isinf(absolute).all() and not evaluations
        z0[1, 2] = float("nan")
        assert not torch.ops.deqfast.loop_begin(z0, 2 * 15 + 8 * 3, 2 + 3, 0)[-1]


def histories(length, *names):
    """Windows or steps with room for this number."""
    rows = length if "steps" in names else length + 2
    sizes = dict.fromkeys(("left", "df", "steps"), (2, length, 16)) | {"gram": (2, rows, length)}
    return {name: torch.zeros(sizes[name]) for name in names}


def contiguous(tensor):
    return tensor.contiguous()


STEPS = ["picard_step", "multisecant_step", "broyden_step"]
COLLAPSE = ["class_means", "within_class_scatter"]
WINDOW = "left", "df", "gram"
# (op, the argument that is named, what replaces valid arguments, what the message says)
MISTAKES = [
    ("multisecant_step", "left", {"left": torch.Tensor.half}, ["bfloat16 with float32"]),
    ("multisecant_step", "left", histories(0, *WINDOW), ["1 to "]),
    ("multisecant_step", "method", {"method": 4}, ["0 to 3, got 4"]),
    *((op, "k", {"k": -(2**31)}, ["-2147483647 to 2147483646, got -2147483648"]) for op in STEPS),
    ("broyden_step", "steps", {"steps": torch.Tensor.bfloat16}, ["Float"]),
    ("broyden_step", "steps", histories(0, "steps", "gram"), ["one step or more"]),
    *(
        ("broyden_step", "k", {"k": k, "last": last}, ["the 4 steps there is room for", f"got {k}"])
        for k, last in ((4, False), (5, True))
    ),
    ("fc_fixed_point", "activation", {"activation": 4}, ["0 to 3, got 4"]),
    ("fc_fixed_point", "max_iter", {"max_iter": 0}, ["1 to 2147483647, got 0"]),
    ("fc_fixed_point", "max_iter", {"max_iter": 2**31}, ["1 to 2147483647, got 2147483648"]),
    ("picard_step", "k", {"k": 2**31 - 1}, ["-2147483647 to 2147483646, got 2147483647"]),
    ("fc_vjp", "activation", {"activation": -1}, ["0 to 3, got -1"]),
    *((op, "y", {"y": torch.Tensor.half}, ["float32, bfloat16 or float64"]) for op in NORM_OPS),
    *((op, "y", {"y": lambda t: t[:, :, :0]}, ["(B, C, H, W)", "got (2, 16, 0, 5)"]) for op in NORM_OPS),
    *(
        (op, "groups", {"groups": groups}, ["divide the 16 channels", f"got {groups}"])
        for op in NORM_OPS
        for groups in (0, 3, -4)
    ),
    ("norm_act_residual", "z", {"z": torch.Tensor.bfloat16}, ["dtype"]),
    ("norm_act_residual", "z", {"z": contiguous}, ["memory format channels_last"]),
    *((op, "features", {"features": lambda t: t[0]}, ["(N, D)", "got (4)"]) for op in COLLAPSE),
    *((op, "features", {"features": lambda t: t[:, :0]}, ["(N, D)", "got (5, 0)"]) for op in COLLAPSE),
    *((op, "features", {"features": torch.Tensor.int}, ["bfloat16, float32 or float64", "nt"]) for op in COLLAPSE),
    *((op, "features", {"features": lambda t: t[:, ::2]}, ["without gaps", "got strides (4, 2)"]) for op in COLLAPSE),
    *((op, "offsets", {"offsets": lambda t: t[:1]}, ["(K + 1)", "got (1)"]) for op in COLLAPSE),
    ("within_class_scatter", "means", {"means": lambda t: t[:2]}, ["(3, 4)", "got (2, 4)"]),
    ("within_class_scatter", "directions", {"directions": lambda t: t[:3]}, ["got (3, 3)"]),
]
MISTAKES_ON_THE_CPU = [
    *(
        (op, "rows", {"rows": torch.tensor([0, 1, 2, 3, row])}, ["[0, 5)", f"got {row}"])
        for op in COLLAPSE
        for row in (5, -1)
    ),
    *(
        (op, "offsets", {"offsets": torch.tensor(offsets)}, ["grow from 0 to 5"])
        for op in COLLAPSE
        for offsets in ([0, 2, 1, 5], [1, 2, 3, 5], [0, 2, 3, 4])
    ),
]
MISTAKES_ON_A_GPU = [  # the CPU kernels take windows of any length, and both formats
    ("multisecant_step", "left", histories(33, *WINDOW), ["1 to "]),
    ("norm_act", "y", {"y": contiguous}, ["memory format channels_last"]),
]


class TestArguments:
    """A wrong argument is named, with what it must be and what it is."""

    # The checks are those of csrc/common: on emulated and interpreted kernels each op and each name once.
    @pytest.fixture
    def refuses(self, implementation):
        def refuse(op, name, changes, *fragments):
            given, run = good(op, implementation.device), made_op(op, implementation)
            if name not in tensors(op):  # valid tensors are not checked again, only numbers
                run(*given.values())
                given = good(op, implementation.device)
            for changed, change in changes.items():
                wrong = change(given[changed]) if callable(change) else change
                given[changed] = wrong.to(implementation.device) if change is wrong and name in tensors(op) else wrong
            # The checks of the kernels launched from Python raise ValueError, those in C++ RuntimeError.
            with pytest.raises((ValueError, RuntimeError)) as error:
                run(*given.values())
            message = str(error.value).replace(",)", ")")
            for fragment in (f"`{name}` must", *fragments):
                assert fragment in message, message

        return refuse

    @pytest.mark.covering(1)
    @pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in tensors(op)])
    def test_shape_dtype_and_contiguity(self, op, name, refuses):
        """Of the first tensor and of some others the last dimension may have any size."""
        valid, is_anchor = good(op)[name], name == OPS[op].anchor
        shape, dtype = str(list(valid.shape))[1:-1], torch.float32 if valid.dtype == torch.float64 else torch.float64
        refuses(op, name, {name: lambda t: t[None]}, "got (1, ")
        if not is_anchor and name not in ("rows", "offsets", "directions"):
            wider = str([*valid.shape[:-1], 2 * valid.shape[-1]])[1:-1]
            expected = [] if name in ("left", "steps") else [shape]
            refuses(op, name, {name: lambda t: torch.cat([t, t], dim=-1)}, *expected, f"got ({wider})")
        if is_anchor:
            dtype = torch.int32 if name == "features" else torch.float16
        refuses(op, name, {name: lambda t: t.to(dtype)})
        if valid.numel() > 1:
            layout = "without gaps" if name == "features" else "contiguous"
            refuses(op, name, {name: lambda t: torch.stack([t, t], dim=-1)[..., 0]}, layout)

    @pytest.mark.parametrize(
        ("implementation", "op", "name", "changes", "fragments"),
        [
            (implementation, *mistake)
            for implementation in ("cpp", "triton", "cuda", "emulated")
            for mistake in MISTAKES + (MISTAKES_ON_THE_CPU if implementation == "cpp" else MISTAKES_ON_A_GPU)
        ],
        indirect=["implementation"],
    )
    def test_mistakes(self, implementation, op, name, changes, fragments, refuses):
        refuses(op, name, changes, *fragments)


def test_backends_tell_why_they_are_not_available(monkeypatch):
    backends = deqfast.backends()
    assert {"auto", *backends} == set(KERNELS) and backends["torch"]
    for availability in backends.values():
        assert bool(availability) == (availability.reason == "")
        assert str(availability) == (availability.reason or "available")

    def fail(name):
        raise ImportError("libtorch_cuda.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    reason = "deqfast._C_cuda does not load: libtorch_cuda.so: cannot open shared object file"
    assert _extension._load("_C_cuda") == (None, reason)
    info = _extension.cpp_module.build_info()
    assert info["torch_target_version"] == 0x020B000000000000 and info["compiler"]


def test_a_choice_asks_only_for_the_kernels_that_it_may_take(monkeypatch):
    """A cell may choose at every evaluation: what would ask for a GPU, or import triton, stays out of it."""

    def asked():
        raise AssertionError("a CUDA device was asked for")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert choose_kernel("torch", torch.device("cpu")).name == "torch"
    if _extension.cpp_module is not None:
        assert choose_kernel("auto", torch.device("cpu")).name == "cpp"
