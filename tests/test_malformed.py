"""Malformed arguments of the CPU ops: each call raises RuntimeError or stays within the memory of its arguments.

The calls are random, and their memory ends at a page without access: a process that leaves it dies. So they are made in
a process of their own. With another seed, from the root of the repository:

    PYTHONPATH=tests:benchmarks python -c "import test_malformed; test_malformed.run(120, 2)"
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from op_calls import LOOPS, good, good_loop
from torch import Tensor

from deqfast.ops.registry import OPS

PAGE = mmap.PAGESIZE
PROTECT: Any = ctypes.CDLL(None, use_errno=True).mprotect
PROTECT.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
HUGE = [2**15, 2**16, 2**31, 2**32, 2**33, 2**61, 2**62, 2**63 - 1]
SIZES = [0, 1, 2, 3, 5, 16, 17]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64, torch.bool]
MOST = 1 << 20  # elements with memory of their own


def guarded(tensor: Tensor) -> Tensor:
    """A copy, of the same strides, whose last byte lies in front of a page without access."""
    if not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = span * tensor.element_size()
    room = -(-length // PAGE) * PAGE
    memory = mmap.mmap(-1, room + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert PROTECT(address + room, PAGE, 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=span, offset=room - length)
    flat.copy_(tensor.as_strided((span,), (1,)))
    return flat.as_strided(tensor.shape, tensor.stride())


def in_shape(tensor: Tensor, shape: list[int]) -> Tensor:
    """A tensor of another shape; one number in place of all of them if they are many."""
    count = math.prod(shape)
    if count > MOST:
        return tensor.new_zeros(1).expand(shape)
    strides = [min(math.prod(max(size, 1) for size in shape[d + 1 :]), 2**62) for d in range(len(shape))]
    flat = tensor.flatten()
    flat = flat.repeat(-(-count // len(flat)))[:count] if len(flat) else tensor.new_zeros(count)
    return flat.as_strided(shape, strides)


def reshaped(values: dict[str, Any], names: list[str]) -> None:
    """Give one size another value, in one tensor or wherever it occurs, perhaps in numbers too."""
    old = random.choice([size for name in names for size in values[name].shape] or [1])
    new = random.choice(SIZES if random.random() < 0.7 else HUGE)
    for name in names if random.random() < 0.5 else [random.choice(names)]:
        shape = [new if size == old else size for size in values[name].shape]
        if shape and new in HUGE and random.random() < 0.7:  # only an empty tensor can be as large
            shape[random.randrange(len(shape))] = 0
        if math.prod(max(size, 1) for size in shape) > 2**60:  # torch multiplies the sizes in their order
            shape[0] = 0
        values[name] = in_shape(values[name], shape)


def relaid(values: dict[str, Any], names: list[str]) -> None:
    name = random.choice(names)
    tensor = values[name]
    ways: list[Callable[[], Tensor]] = [
        lambda: tensor[None],
        lambda: tensor.flatten(),
        lambda: tensor.flatten()[:-1],
        lambda: tensor.transpose(0, -1) if tensor.dim() and tensor.numel() else tensor,
        lambda: torch.stack([tensor, tensor], -1)[..., 0],
        lambda: tensor[:1].expand(tensor.shape) if tensor.dim() else tensor,
        lambda: tensor.to(random.choice(DTYPES)),
        lambda: tensor.new_empty(1, 1, 2**32, 0),
        lambda: tensor.new_zeros(()),
    ]
    values[name] = random.choice(ways)()


NUMBERS = {
    torch.int8: [0, 1, 2, 6],
    torch.bool: [0, 1],
    torch.int32: [-(2**31), -5, -1, 0, 1, 3, 99, 2**31 - 1],
    torch.int64: [-(2**62), -1, 0, 1, 2, 4, 5, 2**32, 2**62],
}


def revalued(values: dict[str, Any], names: list[str]) -> None:
    """Other numbers in a tensor of integers, or NaN among others."""
    name = random.choice(names)
    tensor = values[name].clone()
    if tensor.numel():
        number = random.choice(NUMBERS.get(tensor.dtype, [float("nan"), float("inf"), 0.0]))
        tensor[tuple(map(random.randrange, tensor.shape))] = number
    values[name] = tensor


def renumbered(op: str, values: dict[str, Any], numbers: list[str]) -> None:
    name = random.choice(numbers)
    huge = HUGE if op != "loop_begin" else HUGE[-3:]  # which would write to gigabytes
    others = {
        list: lambda old: [old[:-1], [*old, 1.0], [float("nan")] * len(old)],
        float: lambda old: [-1.0, 0.0, 1e300, float("nan"), float("inf")],
    }
    number = others.get(type(values[name]), lambda old: [-(2**63), -(2**32), -1, 0, 1, 2, 3, 4, 7, 16, *huge])
    values[name] = random.choice(number(values[name]))


def malformed(op: str) -> dict[str, Any]:
    dtype = random.choice(("fp32", "fp64"))
    values = good(op, dtype=dtype) if op in OPS else good_loop(op, dtype, random.choice((0, 2)))
    numbers = [name for name, value in values.items() if not isinstance(value, Tensor)]
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        names = [name for name in values if name not in numbers and values[name].numel() <= MOST]
        if not names:
            break
        kind = random.choice(("shape", "shape", "layout", "values", "numbers"))
        if kind != "numbers":
            {"shape": reshaped, "layout": relaid, "values": revalued}[kind](values, names)
        elif numbers:
            renumbered(op, values, numbers)
    return values


def overflowing() -> list[tuple[str, list[Any]]]:
    """Calls whose sizes multiply to small numbers, or to negative ones, in 64 or 32 bits."""
    counts, status = torch.tensor([5, 1, 0, 0], dtype=torch.int32), torch.zeros(1, dtype=torch.int8)
    none, rule = torch.zeros(0), [-1.0, 0.0, 0.0, 0.0, 0.0]
    secant, ended = [*rule, 0.0, 1.0, 1.0, 0.0], [torch.zeros(32), counts, status, torch.zeros((), dtype=torch.bool)]
    calls: list[tuple[str, list[Any]]] = []
    for pairs in (2**15 + 1, 2**16, 2**31, 2**32, 2**61, 2**62):
        for history, fz, values in (
            (none.new_empty(1, 1, pairs, 0), none.new_empty(1, 0), torch.zeros(8)),
            (none.new_empty(1, 0, pairs, 1), none.new_empty(0, 1), none),
        ):
            batch = len(fz)
            state = [counts[: 2 + 2 * batch], status[:batch], history, fz, 100]
            calls.append(("broyden_loop", [values, *state, rule]))
            state = [counts[: 2 + batch], status[:batch], history.expand(2, *history.shape[1:]).clone(), fz, 100]
            calls.append(("multisecant_loop", [values, *state, secant]))
        calls.append(("loop_begin", [none.new_empty(pairs, 0), 0, 2**63 - 1, 0]))
        calls += [("loop_end", [*ended, batch, pairs]) for batch in (1, 2, 4, pairs)]
        calls.append(
            ("norm_act", [none.as_strided((0, 8, pairs, pairs), (1, 1, 1, 1)), torch.zeros(8), torch.zeros(8), 8, 1e-5])
        )
    return calls


def run(count: int, seed: int) -> None:
    """Make the calls, `count` of each op, and print as JSON how many of them each op accepted and refused."""
    random.seed(seed)
    torch.manual_seed(seed)
    ops = [*OPS, *LOOPS, "state_begin", "loop_begin", "loop_end"]
    outcomes = {op: [0, 0] for op in ops}
    calls = [(op, [*malformed(op).values()]) for op in ops for _ in range(count)]
    for i, (op, values) in enumerate(calls + overflowing()):
        torch.set_num_threads(1 + i % 2)
        values = [guarded(value) if isinstance(value, Tensor) else value for value in values]
        try:
            getattr(torch.ops.deqfast, op)(*values)
            outcomes[op][0] += 1
        except RuntimeError:
            outcomes[op][1] += 1
    print(json.dumps(outcomes))


@pytest.mark.usefixtures("cpp_kernels")
def test_no_call_leaves_its_memory():
    command = [sys.executable, "-X", "faulthandler", "-c", "import test_malformed; test_malformed.run(120, 1)"]
    path = os.pathsep.join(["tests", "benchmarks", os.environ.get("PYTHONPATH", "")])
    options: dict = {"cwd": Path(__file__).parents[1], "env": {**os.environ, "PYTHONPATH": path}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    assert sum(map(sum, outcomes.values())) >= 2000
    for op, (accepted, refused) in outcomes.items():
        assert accepted >= 10 and refused >= 10, (op, accepted, refused)
