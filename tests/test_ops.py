"""The registered ops: that they are proper ops, what they refuse, and which there are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import deqfast
from deqfast import _extension
from deqfast.ops import KERNELS, choose_kernel
from deqfast.ops.steps.loops import PARTS, STEPS
from deqfast.testing.norm_states import NORM_OPS
from deqfast.testing.states import Case, StepsCase, make_state, moved, same_bits

OPS = ["picard_step", "multisecant_step", "broyden_step"]
# In test_shine.py, test_neural_collapse_ops.py and test_fc.py.
CHECKED_ELSEWHERE = ["multisecant_transposed", "class_means", "within_class_scatter", "fc_fixed_point", "fc_vjp"]
NOT_ON_A_GPU = {"broyden_step"}
# See tests/test_compile.py and, of the mark of a compiled gradient, tests/test_compiled.py.
WHOLE_SOLVES = {f"deqfast::{op}" for op in ("solve_block", "pull_block", "solve_fc", "differentiated")}
SHORT = {"history_dtype": torch.bfloat16}
DTYPES = {"fp32": {}, "fp64": {"dtype": torch.float64}, "bf16 history": SHORT}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


registered_ops = pytest.mark.parametrize("implementation", ["cpp", "triton", "cuda"], indirect=True)


def op_of(op: str, implementation):
    if op in NOT_ON_A_GPU and implementation.name != "cpp":
        pytest.skip(f"{op} is of the CPU alone")
    return implementation.op(op)


def arguments(case: Case, device: str) -> tuple:
    state = make_state(case, device)
    return (*(torch.nan_to_num(state[name]) for name in case.names), *case.scalars())


class TestRegistration:
    CASES = {
        "picard_step": Case(None, size=17, k=1, damping=0.7),
        "multisecant_step": Case("good", size=17, k=2),
        "broyden_step": StepsCase(size=17, k=2),
    }

    def test_every_op_is_checked_here(self):
        registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("deqfast::")}
        ops = {*OPS, *NORM_OPS, *CHECKED_ELSEWHERE}
        on_triton = {f"deqfast::{op}_triton" for op in ops - NOT_ON_A_GPU}
        loops = {f"deqfast::{name}" for name in ("loop_begin", "loop_end", *STEPS)}
        assert registered == {f"deqfast::{op}" for op in ops} | on_triton | loops | WHOLE_SOLVES

    @registered_ops
    @pytest.mark.parametrize("op", OPS)
    @every_dtype
    def test_opcheck(self, op, dtype, implementation):
        if op != "multisecant_step" and "history" in dtype:
            pytest.skip(f"{op} has no history in another dtype")
        case = replace(self.CASES[op], **DTYPES[dtype])
        results = torch.library.opcheck(op_of(op, implementation).default, arguments(case, implementation.device))
        assert set(results.values()) == {"SUCCESS"} and len(results) >= 4

    @registered_ops
    @pytest.mark.parametrize("op", OPS)
    def test_it_compiles_without_a_graph_break(self, op, implementation):
        run = op_of(op, implementation)
        eager, compiled = (arguments(self.CASES[op], implementation.device) for _ in range(2))

        def step(*args):
            run(*args)
            return args[0] + 1

        moved = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
        run(*eager)
        assert same_bits(moved, eager[0] + 1)
        for a, b in zip(eager, compiled, strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b


def in_loop(op: str, tensors: dict[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    """The tensors of a step as those of its loop, see ``deqfast.ops.steps.loops``; z is read from `values`."""
    parts, joined = PARTS[op], {}
    for name, own in {"values": ("z", "best", "residual", "progress"), "counts": ("active", "iterations")}.items():
        joined[name] = torch.cat([tensors[part].flatten() for part in (*own, *getattr(parts, name))])
    joined["counts"] = torch.cat([torch.tensor([k], dtype=torch.int32), joined["counts"]])
    history = [tensors[name] for name in parts.history]
    return {**joined, "status": tensors["status"], "history": torch.stack(history) if history else torch.empty(0)}


@pytest.mark.skipif(not deqfast.backends()["cpp"], reason=str(deqfast.backends()["cpp"]))
class TestLoops:
    """The steps of compiled loops do what the steps of the eager loop do, bit by bit."""

    CASES = {**TestRegistration.CASES, "short": replace(TestRegistration.CASES["multisecant_step"], **SHORT)}

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("size", [1, 63, 777])
    def test_the_step(self, case, last, size):
        op = "multisecant_step" if case == "short" else case
        case = replace(self.CASES[case], size=size, last=last)
        stepped = arguments(case, "cpu")
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

    def test_what_is_no_loop_is_named(self):
        case = self.CASES["picard_step"]
        given = dict(zip(case.names, arguments(case, "cpu"), strict=False))
        tensors = in_loop("picard_step", given, 0)
        tensors["values"] = tensors["values"][:-1]
        with pytest.raises(RuntimeError, match="picard_loop: `values` must have shape"):
            torch.ops.deqfast.picard_loop(*tensors.values(), given["fz"], 5, [0.0] * 6)
        with pytest.raises(RuntimeError, match="`numbers` must hold 6, got 5"):
            torch.ops.deqfast.picard_loop(*in_loop("picard_step", given, 0).values(), given["fz"], 5, [0.0] * 5)

    @pytest.mark.parametrize(
        ("op", "wrong", "message"),
        [
            ("picard_step", {"evaluations": 5}, "from 0 and below `max_iter` 5, got 5"),
            ("picard_step", {"evaluations": -1}, "got -1"),
            ("multisecant_step", {"history": lambda t: t[:1].contiguous()}, r"must have shape \(2, 2, 4, 17\)"),
            ("multisecant_step", {"history": lambda t: t[:, :, :0]}, r"must have shape \(2, 2, 1, 17\), got \(2, 2, 0"),
            ("multisecant_step", {"history": lambda t: t.half()}, "`history` must have dtype Float, got Half"),
            ("multisecant_step", {"method": 7.0}, "`method` must be 0 to 3, got 7"),
            ("broyden_step", {"history": lambda t: t.bfloat16()}, "`history` must have dtype Float, got BFloat16"),
            ("broyden_step", {"evaluations": 4, "max_iter": 9}, "`history` must have room for step 4, got 4 rows"),
        ],
    )
    def test_what_would_leave_the_memory_is_refused(self, op, wrong, message):
        case = self.CASES[op]
        given = dict(zip(case.names, arguments(case, "cpu"), strict=False))
        tensors = in_loop(op, given, wrong.get("evaluations", 0))
        tensors["history"] = wrong.get("history", lambda t: t)(tensors["history"])
        more = {"picard_step": 1, "multisecant_step": 4, "broyden_step": 0}[op]
        numbers = [1e-3, 0.0, 0.0, 0.0, 0.0, *[wrong.get("method", 0.0), 1.0, 1.0, 1e-6][:more]]
        with pytest.raises(RuntimeError, match=message):
            getattr(torch.ops.deqfast, op.replace("step", "loop"))(
                *tensors.values(), given["fz"], wrong.get("max_iter", 5), numbers
            )

    @pytest.mark.parametrize(
        ("z0", "elements", "integers", "message"),
        [
            (torch.zeros(2, 3).T, 40, 9, "`z0` must be contiguous"),
            (torch.zeros(2, 3).half(), 40, 9, "`z0` must be float32 or float64, got Half"),
            (torch.zeros(6), 40, 9, r"`z0` must have shape \(B, D\), got \(6"),
            (torch.zeros(2, 3), 27, 9, "`elements` must be at least 28, got 27"),
            (torch.zeros(2, 3), 28, 3, "`integers` must be at least 4, got 3"),
        ],
    )
    def test_a_beginning_that_does_not_fit(self, z0, elements, integers, message):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.deqfast.loop_begin(z0, elements, integers)

    def test_an_end_that_does_not_fit(self):
        values, counts, status, running = torch.ops.deqfast.loop_begin(torch.zeros(2, 3), 28, 4)
        for batch, dim, message in (
            (3, 3, r"`values` must have shape \(42"),
            (2, 4, r"`values` must have shape \(32"),
            (-1, 3, "must be at least 0, got -1 and 3"),
            (1, 3, r"`status` must have shape \(1"),
        ):
            with pytest.raises(RuntimeError, match=f"loop_end: .*{message}"):
                torch.ops.deqfast.loop_end(values, counts, status, running, batch, dim)

    def test_begin_and_end(self):
        z0 = torch.randn(3, 5)
        values, counts, status, running = torch.ops.deqfast.loop_begin(z0, 2 * 15 + 8 * 3, 2 + 3)
        assert same_bits(values[:30].view(2, 3, 5), torch.stack([z0, z0])) and torch.isinf(values[30:]).all()
        assert counts.tolist() == [0, 3, 0, 0, 0] and not status.any() and bool(running)
        value, *_, relative, absolute, evaluations = torch.ops.deqfast.loop_end(values, counts, status, running, 3, 5)
        assert same_bits(value, z0) and torch.isinf(relative).all() and torch.isinf(absolute).all() and not evaluations
        z0[1, 2] = float("nan")
        assert not torch.ops.deqfast.loop_begin(z0, 2 * 15 + 8 * 3, 2 + 3)[-1]


class TestArguments:
    """A wrong tensor is named, with what it must be and what it is."""

    SIZES = {"batch": 2, "size": 7, "history": 4}
    CASES = {
        "picard_step": Case(**SIZES),
        "multisecant_step": Case("good", **SIZES),
        "broyden_step": StepsCase(k=1, **SIZES),
    }
    OF_MONITOR = {
        "fz": "(2, 7)",
        "best": "(2, 7)",
        "status": "(2)",
        "iterations": "(2)",
        "residual": "(2, 2)",
        "progress": "(6, 2)",
        "active": "(1)",
    }
    SHAPES = {
        "picard_step": OF_MONITOR,
        "multisecant_step": {"f_prev": "(2, 7)", "df": "(2, 4, 7)", "gram": "(2, 6, 4)"},
        "broyden_step": {**OF_MONITOR, "steps": "(2, 4, 7)", "gram": "(2, 4, 4)", "first": "(2)"},
    }
    every_tensor = pytest.mark.parametrize(
        ("op", "name"), [(op, name) for op, names in SHAPES.items() for name in names]
    )

    @pytest.fixture
    def refuses(self, implementation):
        def refuse(op, name, *fragments, scalars=(), **tensors):
            case, step, device = self.CASES[op], op_of(op, implementation), implementation.device
            good = make_state(case, device)  # first: what was right once is not asked again
            step(*(good[name] for name in case.names), *case.scalars())
            state = make_state(case, device) | {name: moved(tensor, device) for name, tensor in tensors.items()}
            # The checks of the kernels launched from Python raise ValueError, those in C++ RuntimeError.
            with pytest.raises((ValueError, RuntimeError)) as error:
                step(*(state[name] for name in case.names), *scalars, *case.scalars()[len(scalars) :])
            message = str(error.value).replace(",)", ")")
            for fragment in (f"`{name}` must", *fragments):
                assert fragment in message, message

        return refuse

    def good(self, op, name):
        return make_state(self.CASES[op])[name]

    @every_tensor
    def test_shape(self, op, name, refuses):
        wrong = torch.cat([self.good(op, name)] * 2, dim=-1)
        refuses(op, name, self.SHAPES[op][name], f"got ({', '.join(map(str, wrong.shape))})", **{name: wrong})

    @every_tensor
    def test_number_of_dimensions(self, op, name, refuses):
        refuses(op, name, "got (1, ", **{name: self.good(op, name)[None]})

    @every_tensor
    def test_dtype(self, op, name, refuses):
        refuses(op, name, **{name: self.good(op, name).double()})

    CONTIGUOUS = [
        *(("picard_step", name) for name in ("fz", "best", "residual")),
        *(("multisecant_step", name) for name in ("f_prev", "left", "df", "gram")),
        *(("broyden_step", name) for name in ("fz", "best", "residual", "steps", "gram", "first")),
    ]

    @pytest.mark.parametrize(("op", "name"), CONTIGUOUS)
    def test_contiguity(self, op, name, refuses):
        refuses(op, name, "contiguous", **{name: torch.stack([self.good(op, name)] * 2, dim=-1)[..., 0]})

    @pytest.mark.parametrize("op", ["picard_step", "broyden_step"])
    @pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(2, 3, 4), torch.zeros(2, 7, dtype=torch.bfloat16)])
    def test_state(self, wrong, op, refuses):
        refuses(op, "z", z=wrong)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_history_dtype(self, dtype, refuses):
        left = self.good("multisecant_step", "left").to(dtype)
        refuses("multisecant_step", "left", "bfloat16 beside float32", left=left)

    def test_a_short_history_of_steps(self, refuses):
        refuses("broyden_step", "steps", "Float", steps=self.good("broyden_step", "steps").bfloat16())

    @pytest.mark.parametrize("history", [0, 33])
    def test_history_length(self, history, implementation, refuses):
        if implementation.name == "cpp" and history:
            pytest.skip("the CPU kernels take windows of any length")
        left, gram = torch.zeros(2, history, 7), torch.zeros(2, history + 2, history)
        refuses("multisecant_step", "left", "1 to ", left=left, df=left.clone(), gram=gram)

    def test_room_for_no_step(self, refuses):
        steps, gram = torch.zeros(2, 0, 7), torch.zeros(2, 0, 0)
        refuses("broyden_step", "steps", "one step or more", steps=steps, gram=gram)

    @pytest.mark.parametrize(("k", "last"), [(-1, False), (-1, True), (4, False), (5, True)])
    def test_k_of_steps(self, k, last, refuses):
        refuses("broyden_step", "k", "the 4 steps there is room for", f"got {k}", scalars=(k, last))

    def test_method_and_k(self):
        case = self.CASES["multisecant_step"]
        state = make_state(case)
        tensors = [state[name] for name in case.names]
        scalars = list(case.scalars())
        with pytest.raises(RuntimeError, match="`method` must be 0 to 3, got 4"):
            torch.ops.deqfast.multisecant_step(*tensors, *scalars[:7], 4, *scalars[8:])
        with pytest.raises(RuntimeError, match="`k` must not be negative, got -1"):
            torch.ops.deqfast.multisecant_step(*tensors, -1, *scalars[1:])


class TestBackends:
    def test_they_tell_why_they_are_not_available(self):
        backends = deqfast.backends()
        assert {"auto", *backends} == set(KERNELS)
        assert backends["torch"] and backends["torch"].reason == ""
        for availability in backends.values():
            assert bool(availability) == (availability.reason == "")
            assert str(availability) == (availability.reason or "available")

    def test_an_extension_that_does_not_load(self, monkeypatch):
        def fail(name):
            raise ImportError("libtorch_cuda.so: cannot open shared object file")

        monkeypatch.setattr(importlib, "import_module", fail)
        assert _extension._load("_C_cuda") == (
            None,
            "deqfast._C_cuda does not load: libtorch_cuda.so: cannot open shared object file",
        )

    def test_a_process_without_extensions(self):
        code = """
import sys
for name in ("_C_cpu", "_C_cpu_avx512", "_C_cuda"):
    sys.modules[f"deqfast.{name}"] = None
import torch, deqfast
for name in ("cpp", "cuda"):
    print(name, "|", deqfast.backends()[name].reason)
z = deqfast.solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3)).value
print(torch.allclose(z, torch.full((2, 3), 2.0), rtol=1e-2))
print(torch.equal(z, deqfast.solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3), kernel="torch").value))
try:
    deqfast.solve(lambda z: z, z, kernel="cpp")
except RuntimeError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        cpp, cuda, close, equal, error = done.stdout.strip().splitlines()
        assert cpp.startswith("cpp | deqfast._C_cpu was not built") and "_C_cuda was not built" in cuda
        assert (close, equal) == ("True", "True")
        assert error.startswith("kernel='cpp' is not available: deqfast._C_cpu was not built")

    def test_the_module_tells_how_it_was_built(self):
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
