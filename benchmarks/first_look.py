"""Every kernel once, on small odd shapes, compared with the reference in float64. Prints one verdict per line.

    PYTHONPATH=.:tests python benchmarks/first_look.py [--kernel {cuda,triton,emulated,cpp,torch}] [--only WORD] [--few]

It runs without pytest, so that compute-sanitizer can watch it. The reference runs on the CPU, so that only deqfast's
kernels are watched. On a machine without a GPU Triton's kernels are interpreted, which takes over ten minutes: give
`--few`. There `emulated` runs the CUDA kernels as threads of a CPU, by tests/emulate.py. The exit status is 1 if a
verdict is wrong, 2 if the kernel is not available.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

# Set before triton is imported, which deqfast does.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from correctness import assert_accurate, relative_error, rounding
from correctness.fc_states import FCCase, check_solve
from correctness.norm_states import NORM_DTYPES, NORM_OPS, NormCase, check_norm
from correctness.states import METHODS, Case, check_step, make_state
from torch import Tensor

import deqfast
from deqfast.ops import ACTIVATIONS, Kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = ("cuda", "triton", "emulated", "cpp", "torch")
TORCH = Kernel("torch")
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {"dtype": torch.float64},
    "bf16-history": {"history_dtype": torch.bfloat16},
}
EVENTS = ("run", "done", "nan", "overflow", "converged", "run")
# (B, C, H, W) and groups: for few threads, few packs per block, the most packs, too many packs, unaligned channels.
IMAGES = (((2, 32, 5, 3), 4), ((1, 32, 10, 13), 2), ((1, 16, 31, 32), 2), ((1, 16, 32, 48), 2), ((3, 6, 5, 3), 3))
FEATURES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Check = Callable[[Callable[[str, str], Callable[..., Any]]], None]  # takes (op, source) -> the op of the kernel


def op_of(kernel: str) -> Callable[[str, str], Callable[..., Any]]:
    """(op, source) -> the op on tensors of the CPU, which runs on the kernel's device and copies its arguments back."""
    if kernel == "emulated":
        import emulate

        def emulated(op: str, source: str) -> Callable[..., Any]:
            emulate.load(source)
            return getattr(torch.ops.deqfast_emulated, op)

        return emulated
    device = "cuda" if kernel == "cuda" or (kernel == "triton" and not INTERPRETED) else "cpu"

    def moved(op: str, source: str) -> Callable[..., Any]:
        function = Kernel(kernel).op(op)
        return partial(_on_device, function) if device == "cuda" else function

    return moved


def _on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    there = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
    result = function(*there)
    for own, other in zip(arguments, there, strict=True):
        if isinstance(own, Tensor):
            own.copy_(other)
    if isinstance(result, Tensor):
        return result.cpu()
    return tuple(tensor.cpu() for tensor in result) if result is not None else None


def steps(kernel: str) -> Iterator[tuple[str, Check]]:
    """Samples that fit a block, are read twice or share blocks; windows of the sizes that kernels are compiled for.

    A hundred samples of 8200 elements have a multiprocessor of an H100 each, and four an emulated one each.
    """

    def check(op: str, case: Case, op_of: Callable[[str, str], Callable[..., Any]]) -> None:
        if kernel == "triton" and INTERPRETED and case.history_dtype is not None:
            case = replace(case, history_slack=2**-6)  # a GPU rounds to nearest, this truncates
        check_step(op_of(op, op), case)

    def named(op: str, case: Case, dtype: str) -> tuple[str, Check]:
        method = f" {case.method} m={case.history} k={case.k}" if case.method else ""
        return f"{op}{method} {dtype} {case.batch}x{case.size}", partial(check, op, case)

    for dtype in ("fp32", "fp64"):
        for batch, size in ((6, 63), (6, 516), (6, 4100), (6, 8188), (100, 9000), (1, 9001), (2, 24580)):
            case = Case(batch=batch, size=size, k=3, damping=0.6, rows=EVENTS[:batch], **STATES[dtype])
            yield named("picard_step", case, dtype)
    alone = 100 if kernel == "cuda" else 4
    for method in METHODS:
        for dtype, given in STATES.items():
            for history, k in ((5, 7), (11, 12), (20, 20)):
                if history > 5 and method in ("bad", "and2"):
                    continue
                for batch, size in ((6, 72), (6, 71), (1, 12304), (1, 8193), (alone, 8200)):
                    if (size % 8 and history > 5) or (batch == alone and history == 11):
                        continue
                    rows = EVENTS[:batch]
                    case = Case(method, batch, size, history, k, rows=rows, wobble=0.5, beta=0.8, **given)
                    yield named("multisecant_step", case, dtype)


def compare(op: str, source: str, given: list[Any], op_of: Callable[[str, str], Callable[..., Any]]) -> None:
    """Assert the accuracy of an op's results."""
    exact = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given]
    results = [op_of(op, source)(*given), TORCH.op(op)(*given), TORCH.op(op)(*exact)]
    for values in zip(*(one if isinstance(one, tuple) else (one,) for one in results), strict=True):
        assert_accurate(*values)


def transposed(kernel: str) -> Iterator[tuple[str, Check]]:
    def check(case: Case, op_of: Callable[[str, str], Callable[..., Any]]) -> None:
        state = make_state(case)
        newest = torch.full((case.batch,), case.k - 2, dtype=torch.int32)
        count = (torch.arange(case.batch, dtype=torch.int32) * 2).clamp_max(min(case.k, case.history) - 1)
        tensors = [*(state[name] for name in ("z", "left", "df", "gram")), newest, count]
        for name in (1, 2, 3):  # arguments that no step has written
            tensors[name] = tensors[name].nan_to_num(nan=0.0)
        scalars = (METHODS[str(case.method)], 0.7, 0.8, case.ridge)
        compare("multisecant_transposed", "multisecant_step", [*tensors, *scalars], op_of)

    for method in ("good", "and1"):
        for dtype, given in STATES.items():
            for history, size in ((6, 8208), (5, 72), (5, 71), (19, 72)):
                # Blocks share the longest samples. Their sums need a reference in a higher precision.
                if size > 72 and dtype == "fp64":
                    continue
                case = Case(method, 5, size, history, history, wobble=0.5, **given)
                yield f"multisecant_transposed {method} m={history} {dtype} 5x{size}", partial(check, case)


def norms(kernel: str) -> Iterator[tuple[str, Check]]:
    def check(case: NormCase, op_of: Callable[[str, str], Callable[..., Any]]) -> None:
        check_norm(op_of(case.op, case.op.removesuffix("_backward")), case)

    for op in NORM_OPS:
        for dtypes in NORM_DTYPES:
            for shape, groups in IMAGES:
                name = f"{op} {dtypes} {'x'.join(map(str, shape))} in {groups}"
                yield name, partial(check, NormCase(op, shape, groups, dtypes))


def cells(kernel: str) -> Iterator[tuple[str, Check]]:
    dtypes: dict[str, dict[str, Any]] = {"fp32": {}, "bf16-weight": {"weight_dtype": torch.bfloat16}}
    if kernel != "triton":
        dtypes["fp64"] = {"dtype": torch.float64}

    def check(case: FCCase, op_of: Callable[[str, str], Callable[..., Any]]) -> None:
        check_solve(op_of("fc_fixed_point", "fc_fixed_point"), case)

    def check_vjp(dtype: torch.dtype, code: int, op_of: Callable[[str, str], Callable[..., Any]]) -> None:
        generator = torch.Generator().manual_seed(code)
        pre, grad = (torch.randn(3, 77, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        compare("fc_vjp", "fc_vjp", [pre, grad, code], op_of)

    for dtype, given in dtypes.items():
        for activation in ACTIVATIONS:
            case = FCCase(17, 5, activation, max_iter=9, warm=True, rows=("run", "nan"), **given)
            yield f"fc_fixed_point {activation} {dtype} 5x17", partial(check, case)
        for size, batch in ((1, 1), (63, 19), (128, 3)):
            case = FCCase(size, batch, max_iter=6, warm=True, **given)
            yield f"fc_fixed_point tanh {dtype} {batch}x{size}", partial(check, case)
    for name, of in (("fp32", torch.float32), ("fp64", torch.float64)):
        for code, activation in enumerate(ACTIVATIONS):
            yield f"fc_vjp {activation} {name} 3x77", partial(check_vjp, of, code)


def collapse(kernel: str) -> Iterator[tuple[str, Check]]:
    def check(op: str, dtype: torch.dtype, dim: int, directions: int, op_of: Callable[[str, str], Any]) -> None:
        generator = torch.Generator().manual_seed(dim + directions)
        count, classes = 301, 7
        labels = torch.randint(classes - 1, (count,), generator=generator)  # the last class has no rows
        ordered, rows = torch.sort(labels, stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(classes + 1))
        centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, dim, generator=generator, dtype=torch.float64)
        tensors = [(centres[labels] + 0.3 * noise).to(dtype), rows, offsets]
        if op == "within_class_scatter":
            local, shift = TORCH.op("class_means")(*tensors)
            projection = torch.randn(dim, directions, generator=generator, dtype=torch.float64)
            tensors += [local + shift, projection]
        actual, exact = op_of(op, "neural_collapse")(*tensors), TORCH.op(op)(*tensors)
        allowed = rounding(torch.float64 if dtype == torch.float64 or kernel in ("cpp", "torch") else torch.float32)
        for a, e in zip(actual, exact, strict=True) if isinstance(actual, tuple) else ((actual, exact),):
            error = relative_error(a, e)
            assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"

    for dtype in FEATURES:
        for dim in (72, 37):
            what = f"{str(dtype).removeprefix('torch.')} 301x{dim}"
            yield f"class_means {what}", partial(check, "class_means", dtype, dim, 0)
            for directions in (6, 40, 99):
                name = f"within_class_scatter {what} R={directions}"
                yield name, partial(check, "within_class_scatter", dtype, dim, directions)


FAMILIES = (steps, transposed, norms, cells, collapse)


def few(kernel: str, names: list[str]) -> set[str]:
    """Every fourth of them, and the first of each op, for slow machines."""
    seen: set[str] = set()
    chosen = set(names[::4])
    for name in names:
        if (op := name.split()[0]) not in seen:
            seen.add(op)
            chosen.add(name)
    return chosen


def look(kernel: str, only: str, brief: bool) -> list[str]:
    """Print a verdict for each case; return the names of the wrong ones."""
    get, wrong, started = op_of(kernel), [], time.monotonic()
    cases = [case for family in FAMILIES for case in family(kernel)]
    chosen = few(kernel, [name for name, _ in cases]) if brief else {name for name, _ in cases}
    cases = [(name, check) for name, check in cases if name in chosen and only in name]
    if not cases:
        wrong.append(f"{kernel}: no case has {only!r} in its name")
    for name, check in cases:
        begun, fault = time.monotonic(), ""
        try:
            check(get)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            wrong.append(f"{kernel} {name}")
        print(f"{'WRONG' if fault else 'ok   '} {kernel} {name}  {time.monotonic() - begun:.2f} s  {fault}", flush=True)
    seconds = time.monotonic() - started
    print(f"{kernel}: {max(0, len(cases) - len(wrong))} of {len(cases)} right, {seconds:.0f} s", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="may be given several times (cuda, triton)")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this in it")
    parser.add_argument("--few", action="store_true", help="every fourth case, and one of every op")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = options.kernel or ["cuda", "triton"]
    states = {name: deqfast.backends()[name] for name in kernels if name != "emulated"}
    if absent := [f"{name} is not available: {state.reason}" for name, state in states.items() if not state]:
        print("; ".join(absent))
        return 2
    wrong = [name for kernel in kernels for name in look(kernel, options.only, options.few)]
    for name in wrong:
        print(f"WRONG {name}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
