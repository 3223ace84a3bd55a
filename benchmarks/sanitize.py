"""Run every op of the C++ or CUDA extension at tiny shapes, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py

Results are not compared here; the tests do that. An op that is registered and not run here is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from harness.entry import on

import deqfast
from deqfast.ops import ACTIVATIONS
from deqfast.testing.fc_states import FCCase
from deqfast.testing.norm_states import NORM_DTYPES, NORM_OPS, NormCase
from deqfast.testing.states import METHODS, WINDOW, Case, State, StepsCase, clone, start_state, start_steps

# Odd, with vectors, with several blocks per sample (odd and with vectors).
SIZES = (63, 256, 2 * 4096 + 1, 3 * 4096)
DTYPES = ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.float64, None))
Call = tuple[str, list[Any]]  # an op and its arguments


def steps(device: str) -> Iterator[Call]:
    """The steps from the first to one past a full window, for every kernel that the window's length selects."""
    for size, (dtype, history_dtype) in product(SIZES, DTYPES):
        if history_dtype is None:
            picard = Case(size=size, dtype=dtype)
            yield step("picard_step", picard, state_of(picard, device))
            broyden = StepsCase(size=size, dtype=dtype, history=20)
            state = state_of(broyden, device)
            yield from (step("broyden_step", replace(broyden, k=k), clone(state)) for k in (0, 1, 19))
        for method, (history, ks) in product(METHODS, ((3, range(5)), (12, (12,)), (20, (20,)))):
            case = Case(method, size=size, dtype=dtype, history_dtype=history_dtype, history=history)
            state = state_of(case, device)
            yield from (step("multisecant_step", replace(case, k=k), clone(state)) for k in ks)
            z, left, df, gram = (state[name] for name in ("z", "left", "df", "gram"))
            newest, count = (torch.full_like(z[:, 0], n, dtype=torch.int32) for n in (history - 1, history))
            yield "multisecant_transposed", [z, left, df, gram, newest, count, *case.scalars()[-4:]]


def step(op: str, case: Case, state: State) -> Call:
    return op, [*(state[name] for name in case.names), *case.scalars()]


def state_of(case: Case, device: str) -> State:
    """In the midst of a solve: what earlier steps would have written holds random numbers."""
    state = start_steps(case) if isinstance(case, StepsCase) else start_state(case)
    for name in {*WINDOW, "steps"} & state.keys():
        state[name] = torch.rand(state[name].shape).to(state[name].dtype)
    return {name: tensor.to(device) for name, tensor in state.items()}


def norms(device: str) -> Iterator[Call]:
    # One group per program, vectors or not; and a group larger than what a block holds.
    shapes = [((2, 32, 4, 4), 4), ((3, 6, 5, 3), 3), ((1, 64, 20, 12), 1)]
    for op, dtypes, (shape, groups) in product(NORM_OPS, NORM_DTYPES, shapes):
        yield op, list(NormCase(op, shape, groups, dtypes).arguments(device).values())


def fully_connected(device: str) -> Iterator[Call]:
    for batch, size, (dtype, weight_dtype), activation in product((1, 9), (5, 64, 256), DTYPES, ACTIVATIONS):
        case = FCCase(size, batch, activation, dtype, weight_dtype, max_iter=6)
        weight, c, z0 = case.make(device)
        yield "fc_fixed_point", [weight, c, z0, *case.scalars()]
        yield "fc_vjp", [c, c, case.scalars()[0]]


def neural_collapse(device: str) -> Iterator[Call]:
    for dim, dtype in product((5, 64, 600), (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        rows, offsets = torch.randperm(50)[:49], torch.tensor([0, 1, 20, 20, 49])  # one row, no row, a row left out
        given = on(device, [torch.randn(50, dim).to(dtype), rows, offsets])
        yield "class_means", given
        means, directions = on(device, [torch.randn(4, dim).double(), torch.randn(dim, 3).double()])
        yield "within_class_scatter", [*given, means, directions]


def registered_ops(device: str) -> set[str]:
    """The ops of the extension that have a kernel for the device."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ours = {name.removeprefix("deqfast::") for name in names if name.startswith("deqfast::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in ours if not name.endswith("_triton") and has_kernel(f"deqfast::{name}", device.upper())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = parser.parse_args().device
    kernel = deqfast.backends()["cuda" if device == "cuda" else "cpp"]
    if not kernel:
        sys.exit(f"the ops do not run on {device}: {kernel.reason}")
    ops, done = registered_ops(device), dict[str, int]()
    for source in (steps, norms, fully_connected, neural_collapse):
        for op, arguments in source(device):
            if op not in ops:  # broyden_step is the CPU's alone
                continue
            getattr(torch.ops.deqfast, op)(*arguments)
            done[op] = done.get(op, 0) + 1
            try:
                if device == "cuda":
                    torch.cuda.synchronize()  # so that an error names what ran
            except RuntimeError as error:
                shapes = [f"{a.dtype} {tuple(a.shape)}" if isinstance(a, torch.Tensor) else a for a in arguments]
                sys.exit(f"{op} {shapes}: {error}")
    if forgotten := ops - done.keys():
        sys.exit(f"not run here: {', '.join(sorted(forgotten))}")
    print(", ".join(f"{op}: {count} runs" for op, count in done.items()))


if __name__ == "__main__":
    main()
