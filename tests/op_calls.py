"""Calls of every registered op: valid arguments, and circumstances that must not change a bit of the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import emulate
import torch
from correctness.fc_states import FCCase
from correctness.norm_states import NormCase
from correctness.states import METHODS, Case, StepsCase, make_state, same_bits
from deqfast.kernels.constants import ADVANCES, IMPROVED
from hypothesis import HealthCheck, settings
from interpreter import INTERPRETED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deqfast.ops.steps.loops import PARTS

# The same examples on every machine. The fixture that poisons memory is the same for all examples.
examples = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
STEPS: dict[str, Case] = {
    "picard_step": Case(None, size=16, k=1, damping=0.7),
    "multisecant_step": Case("good", size=16, k=2),
    "broyden_step": StepsCase(size=16, k=2),
}
SHORT_HISTORY: dict[str, Any] = {"history_dtype": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {"fp32": {}, "fp64": {"dtype": torch.float64}}
# Ops in which some tensors may have a shorter dtype than the state.
SHORT: dict[str, Any] = {
    "multisecant_step": SHORT_HISTORY,
    **dict.fromkeys(("multisecant_transposed", "multisecant_sums", "multisecant_apply"), SHORT_HISTORY),
    "fc_fixed_point": {"weight_dtype": torch.bfloat16},
    **dict.fromkeys(("norm_act_residual", "norm_act_residual_backward"), "bf16 with fp32"),
    **dict.fromkeys(("norm_act", "norm_act_backward"), "bf16"),
    **dict.fromkeys(("class_means", "within_class_scatter"), torch.bfloat16),
}


def tensors(op: str) -> list[str]:
    """Names of the arguments that are tensors; these come first."""
    return [argument.name for argument in arguments_of(op) if str(argument.type) == "Tensor"]


def arguments_of(op: str) -> list[Any]:
    return getattr(torch.ops.deqfast, op).default._schema.arguments


def good(op: str, device: str = "cpu", dtype: str = "fp32") -> dict[str, Any]:
    """Valid arguments in the order of the schema. dtype: "fp32", "fp64", or "short", see SHORT."""
    options: Any = SHORT[op] if dtype == "short" else OPTIONS[dtype]
    values: list[Any]
    if op in STEPS:
        values = step_values(replace(STEPS[op], **options), device)
    elif op.endswith(("_sums", "_apply")):
        step = f"{op.split('_')[0]}_step"
        names, given = arguments_of(step), step_values(replace(STEPS[step], **options), device)
        known = {argument.name: value for argument, value in zip(names, given, strict=True)}
        width = {"picard_step": 2, "broyden_step": 6, "multisecant_step": 10}[step]  # of two pairs or steps
        known["sums"] = known["z"].new_ones(2, width)
        known["verdict"] = torch.full((2,), IMPROVED | ADVANCES, dtype=torch.int8, device=device)
        values = [known[argument.name] for argument in arguments_of(op)]
    elif op == "multisecant_transposed":
        case = Case("and2", size=16, k=4, **options)
        state = {name: tensor.nan_to_num() for name, tensor in make_state(case, device).items()}
        newest = torch.full((2,), 3, dtype=torch.int32, device=device)
        values = [state["z"], state["left"], state["df"], state["gram"], newest, newest - 1]
        values += [METHODS["and2"], 1.0, 1.0, case.ridge]
    elif op == "fc_fixed_point":
        solve = FCCase(size=4, batch=3, max_iter=3, **options)
        values = [*solve.make(device), *solve.scalars()]
    elif op == "fc_vjp":
        pre = torch.randn(3, 8, dtype=options.get("dtype")).to(device)
        values = [pre, pre + 1, 2]
    elif op.startswith("norm_act"):
        values = [*NormCase(op, dtypes=options if dtype == "short" else dtype).arguments(device).values()]
    else:
        features = torch.randn(5, 4).to(options if dtype == "short" else options.get("dtype", torch.float32))
        means, directions = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
        values = [features, torch.tensor([0, 3, 1, 4, 2]), torch.tensor([0, 2, 4, 5]), means, directions]
        values = [tensor.to(device) for tensor in values]
    return dict(zip((argument.name for argument in arguments_of(op)), values, strict=False))


def step_values(case: Case, device: str = "cpu") -> list[Any]:
    """The arguments of a step, without NaN where nothing was written."""
    state = make_state(case, device)
    return [*(torch.nan_to_num(state[name]) for name in case.names), *case.scalars()]


def in_loop(op: str, tensors: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    """The tensors of a step as those of its loop, see ``deqfast.ops.steps.loops``; z is read from `values`."""
    parts, joined = PARTS[op], {}
    for name, own in {"values": ("z", "best", "residual", "progress"), "counts": ("active", "iterations")}.items():
        joined[name] = torch.cat([tensors[part].flatten() for part in (*own, *getattr(parts, name))])
    joined["counts"] = torch.cat([torch.tensor([k], dtype=torch.int32), joined["counts"]])
    history = [tensors[name] for name in parts.history]
    return {**joined, "status": tensors["status"], "history": torch.stack(history) if history else torch.empty(0)}


def share_rows(monkeypatch: Any, programs: int, block: int) -> None:
    """Let several of Triton's programs share a row, in blocks of so few columns."""
    from deqfast.kernels import multisecant_step, picard_step

    for module, config in ((picard_step, "picard_config"), (multisecant_step, "sweep_config")):
        made = getattr(module, config)
        monkeypatch.setattr(module, "programs_per_sample", lambda batch, size, device: programs)
        monkeypatch.setattr(module._PLANS, "_plans", {})
        monkeypatch.setattr(module, config, lambda *a, made=made: replace(made(*a), block=block, num_warps=1))


class Operations(TorchDispatchMode):
    """Names of the operations that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


LOOPS = {step.replace("step", "loop"): step for step in STEPS}


def good_loop(op: str, dtype: str = "fp32", evaluations: int = 0) -> dict[str, Any]:
    """Valid arguments of a loop's beginning, step or end, see ``deqfast.ops.steps.loops``."""
    if op in LOOPS:
        given = good(LOOPS[op], dtype=dtype)
        numbers = [float(number) for number in [*given.values()][len(tensors(LOOPS[op])) + 2 :]]
        return in_loop(LOOPS[op], given, evaluations) | {"fz": given["fz"], "max_iter": 5, "numbers": numbers}
    z = good("picard_step", dtype=dtype)["z"]
    if op == "state_begin":
        return {"z": z}
    begin = {"z0": z, "elements": 2 * z.numel() + 8 * len(z), "integers": 2 + len(z), "solve": 0}
    if op == "loop_begin":
        return begin
    begun = torch.ops.deqfast.loop_begin(*begin.values())
    return dict(zip(("values", "counts", "status", "running"), begun, strict=True)) | {"batch": 2, "dim": 16}


def unaligned(tensor: Tensor) -> Tensor:
    """A copy that starts one element into a buffer."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def outcome(op: Callable[..., Any], values: list[Any], copy: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
    """Return the op's results, and copies of its arguments after the call."""
    values = [copy(value) if isinstance(value, Tensor) else value for value in values]
    results = op(*values)
    results = [results] if isinstance(results, Tensor) else results or []
    return [*results, *(value for value in values if isinstance(value, Tensor))]


def circumstances(implementation, set_threads) -> Iterator[None]:
    """Circumstances that must not matter: the threads of the CPU, the order of a GPU's threads, or only the time."""
    if implementation.name == "cpp":
        for threads in (1, 2, 3, 4):
            yield set_threads(threads)
    elif implementation.name == "emulated":
        for order in emulate.ORDERS:
            with emulate.order(order):
                yield
    else:
        yield from [None] * (1 if INTERPRETED else 9)


def sample_part(tensor: Any, row: int, batch: int) -> Any:
    """Part of one sample. The batch is the first dimension of that size; a tensor without one belongs to all
    samples."""
    sizes = tensor.shape[:2] if isinstance(tensor, Tensor) else ()
    return tensor.narrow(sizes.index(batch), row, 1).clone() if batch in sizes else tensor


def check_bits(op: Callable[..., Any], values: list[Any], implementation, set_threads, batch: int = 0) -> None:
    """Neither the circumstances nor the other samples of a batch change a bit. No other size may be `batch`."""
    together = outcome(op, values)
    for _ in circumstances(implementation, set_threads):
        assert all(map(same_bits, outcome(op, values), together))
    for row in {0, 1, batch // 2, batch - 1} & {*range(batch)}:
        alone = outcome(op, [sample_part(value, row, batch) for value in values])
        for i, tensor in enumerate(together):
            part = sample_part(tensor, row, batch)
            assert part is tensor or same_bits(alone[i], part), (row, i)
