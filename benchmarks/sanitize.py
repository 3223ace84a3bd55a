"""Run every op of the C++ or CUDA extension at tiny shapes, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py

Results are not compared here; the tests do that. An op that is registered and not run here is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from harness.maps import NEVER

import deqfast
from deqfast.ops import ACTIVATIONS
from deqfast.testing.fc_states import FCCase
from deqfast.testing.norm_states import NORM_DTYPES, NORM_OPS, NormCase
from deqfast.testing.states import METHODS, WINDOW, Case, start_state

# Odd, with vectors, with several blocks per sample (odd and with vectors).
SIZES = (63, 256, 2 * 4096 + 1, 3 * 4096)
DTYPES = ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.float64, None))


def picard(device: str) -> Iterator[str]:
    for size, (dtype, _) in product(SIZES, DTYPES[::2]):
        case = Case(size=size, dtype=dtype)
        case.call(torch.ops.deqfast.picard_step, start_state(case, device))
        yield f"picard_step {size} {dtype}"


def multisecant(device: str) -> Iterator[str]:
    """The steps from the first to one past a full window, for every kernel that the window's length selects."""
    for method, size, (dtype, history_dtype) in product(METHODS, SIZES, DTYPES):
        for history, ks in ((3, range(5)), (12, (12,)), (20, (20,))):
            case = Case(method, size=size, dtype=dtype, history_dtype=history_dtype, history=history, wobble=0.5)
            run_steps(case, ks, device)
            yield f"multisecant_step {method} {size} {dtype} {history_dtype} {history}"


def run_steps(case: Case, ks: Iterable[int], device: str) -> None:
    state = start_state(case, device)
    for name in WINDOW:  # a step in the midst of a solve reads what earlier ones wrote
        state[name] = torch.rand(state[name].shape, device=device).to(state[name].dtype)
    for k in ks:
        replace(case, k=k).call(torch.ops.deqfast.multisecant_step, state)
    *_, method, alpha, beta, ridge = case.scalars()
    newest, count = (torch.full((case.batch,), n, dtype=torch.int32, device=device) for n in (k, case.history))
    window = state["left"], state["df"], state["gram"]
    transposed = torch.ops.deqfast.multisecant_transposed
    transposed(state["z"], *window, newest, count, method, alpha, beta, ridge)


def broyden(device: str) -> Iterator[str]:
    """A solve of which all steps are kept: the op is the CPU's alone."""
    for size, (dtype, _) in product(SIZES if device == "cpu" else (), DTYPES[::2]):
        c = torch.rand(3, size, dtype=dtype)
        deqfast.solve(lambda z, c=c: c + 0.9 * torch.sin(z), c, deqfast.Broyden(NEVER, 21), kernel="cpp")
        yield f"broyden_step {size} {dtype}"


def norms(device: str) -> Iterator[str]:
    # One group per program, vectors or not; and a group larger than what a block holds.
    shapes = [((2, 32, 4, 4), 4), ((3, 6, 5, 3), 3), ((1, 64, 20, 12), 1)]
    for op, dtypes, (shape, groups) in product(NORM_OPS, NORM_DTYPES, shapes):
        case = NormCase(op, shape, groups, dtypes)
        getattr(torch.ops.deqfast, op)(*case.arguments(device).values())
        yield f"{op} {shape} {dtypes}"


def fully_connected(device: str) -> Iterator[str]:
    dtypes = ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.float64, None))
    for batch, size, (dtype, weight_dtype) in product((1, 9), (5, 64, 256), dtypes):
        for activation in ACTIVATIONS:
            case = FCCase(size, batch, activation, dtype, weight_dtype, max_iter=6)
            weight, c, z0 = case.make(device)
            torch.ops.deqfast.fc_fixed_point(weight, c, z0, *case.scalars())
            torch.ops.deqfast.fc_vjp(c, c, case.scalars()[0])
        yield f"fc_fixed_point, fc_vjp {batch} {size} {dtype} {weight_dtype}"


def neural_collapse(device: str) -> Iterator[str]:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dim, dtype in product((5, 64, 600), dtypes):
        features, rows = torch.randn(50, dim).to(device, dtype), torch.randperm(50, device=device)
        offsets = torch.tensor([0, 1, 20, 20, 49], device=device)  # one row, no row, a row left out
        rows = rows[:49].contiguous()
        local, shift = torch.ops.deqfast.class_means(features, rows, offsets)
        directions = torch.randn(dim, 3, dtype=torch.float64).to(device)
        torch.ops.deqfast.within_class_scatter(features, rows, offsets, local + shift, directions)
        yield f"class_means, within_class_scatter {dim} {dtype}"


RUNS = {
    picard: ("picard_step",),
    multisecant: ("multisecant_step", "multisecant_transposed"),
    broyden: ("broyden_step",),
    norms: NORM_OPS,
    fully_connected: ("fc_fixed_point", "fc_vjp"),
    neural_collapse: ("class_means", "within_class_scatter"),
}


def registered_ops(device: str) -> set[str]:
    """The ops of the extension that have a kernel for the device."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ours = {name.removeprefix("deqfast::") for name in names if name.startswith("deqfast::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in ours if not name.endswith("_triton") and has_kernel(f"deqfast::{name}", device.upper())}


def finish(title: str) -> None:
    """Wait for the device, so that an error names what ran."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.exit(f"{title}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = parser.parse_args().device
    kernel = deqfast.backends()["cuda" if device == "cuda" else "cpp"]
    if not kernel:
        sys.exit(f"the ops do not run on {device}: {kernel.reason}")
    forgotten = registered_ops(device) - {op for ops in RUNS.values() for op in ops}
    if forgotten:
        sys.exit(f"not run here: {', '.join(sorted(forgotten))}")
    done = 0
    for run in RUNS:
        for title in run(device):
            if device == "cuda":
                finish(title)
            done += 1
        print(f"{', '.join(RUNS[run])}: {done} runs so far", flush=True)


if __name__ == "__main__":
    main()
