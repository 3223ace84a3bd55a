"""Sections of the GPU benchmark: the convolutional cell, training steps, neural-collapse metrics."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import training_step
from gpu_measure import Bench, check_error, compare, judge
from harness.collapse import clusters, exact_nc1
from harness.entry import Skipped
from harness.maps import NEVER, relative_residual
from harness.solves import solve_by
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import deqfast
from deqfast.ops import choose_kernel
from deqfast.testing.norm_states import NormCase, exactly

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "experiments"))
from nc_study.config import settings_from  # noqa: E402  (found through the path above)
from nc_study.models import build  # noqa: E402  (found through the path above)

PRECISIONS = ("fp32", "tf32", "bf16")
CHECKED = 4  # samples computed in float64 on the CPU
# Convolutions in tf32 or bf16 err by their own roundings of the operands; relative to the largest entry.
CELL_ERROR = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}
NC_ERROR = 1e-5  # the GPU kernels compute in float32


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """fp32 with or without tf32 products, or bfloat16 autocast."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def kernels(bench: Bench) -> tuple[str, ...]:
    return ("torch", *bench.plan.kernels)


def conv_cell(bench: Bench) -> None:
    """f of ResNet's last block, and a solve of it: the solver's share, and torchdeq's time for the same."""
    device, shape = bench.plan.device, bench.plan.cell_shape
    torch.manual_seed(0)
    cell = deqfast.ResidualCell(shape[1]).to(memory_format=torch.channels_last).to(device)
    z, x = (torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last) for _ in range(2))
    with torch.no_grad():
        exact = exact_cell(cell, z, x)
        for name in PRECISIONS:
            for kernel in kernels(bench):
                with bench.row("cell", f"f {shape} {name}", kernel) as row, precision(name, device):
                    cell.kernel = kernel
                    time_cell(bench, row, cell, z, x, exact, name)
        fused_norms(bench)
        for kernel in bench.plan.kernels:
            cell.kernel = kernel
            solve_cell(bench, cell, z, x, kernel)


def fused_norms(bench: Bench) -> None:
    """What surrounds the convolutions, in bfloat16 beside a float32 state, rotated among buffers as the steps are."""
    plan = bench.plan
    batch, channels, height, width = plan.cell_shape
    for op in ("norm_act", "norm_act_residual"):
        case = NormCase(op, (batch, channels, height, width), 8, "bf16 beside fp32")
        arguments = list(case.arguments().values())
        plain, exact = case.reference(*arguments)[0], case.reference(*exactly(case.arguments()))[0]
        for kernel in plan.kernels:
            with bench.row("cell", f"{op} bf16", kernel) as row:
                time_norm(bench, row, kernel, op, [arguments, plain, exact])
                if op == "norm_act_residual" and plan.cell_shape == (128, 512, 4, 4):
                    judge(row, "norm", 1e3 * row["ms"])


def time_norm(bench: Bench, row: dict[str, Any], kernel: str, op: str, case: list[Any]) -> None:
    arguments, plain, exact = case
    run = choose_kernel(kernel, torch.device(bench.plan.device)).op(op)

    def on_device() -> list[Any]:
        return [a.to(bench.plan.device) if isinstance(a, Tensor) else a for a in arguments]

    value = run(*on_device())[0]
    check_error(row, value, plain, exact, units=4)
    row["bytes"] = value.nbytes + sum(a.nbytes for a in arguments if isinstance(a, Tensor))
    copies = [[a.clone() if isinstance(a, Tensor) else a for a in on_device()] for _ in
              range(bench.clock.copies(row["bytes"]))]  # fmt: skip
    row["ms"] = bench.clock.device([partial(run, *c) for c in copies])
    row["in_place_ms"] = bench.clock.device([partial(run, *copies[0])])


def exact_cell(cell: deqfast.ResidualCell, z: Tensor, x: Tensor) -> Tensor:
    """f of the first samples, in float64."""
    double = copy.deepcopy(cell).cpu().double()
    double.kernel = "torch"
    return double(z[:CHECKED].cpu().double(), x[:CHECKED].cpu().double())


def time_cell(
    bench: Bench, row: dict[str, Any], cell: deqfast.ResidualCell, z: Tensor, x: Tensor, exact: Tensor, name: str
) -> None:
    value = cell(z, x)[:CHECKED].cpu().double()
    row["error"] = float((value - exact).abs().max() / exact.abs().max())
    if not row["error"] <= CELL_ERROR[name]:
        raise AssertionError(f"wrong: relative error {row['error']:.1e}, allowed {CELL_ERROR[name]:.0e}; not timed")
    row["ms"] = bench.clock.device([lambda: cell(z, x)])
    plain = bench.find("cell", row["case"], "torch")
    if plain and row["provider"] != "torch":
        row["note"] = f"{plain / row['ms']:.2f}x torch"


def solve_cell(bench: Bench, cell: deqfast.ResidualCell, z: Tensor, x: Tensor, kernel: str) -> None:
    """20 iterations in bf16: time in a CUDA graph beside that of f alone, and eagerly beside torchdeq."""
    plan = bench.plan
    history = torch.bfloat16
    cases = {
        "anderson m=6 bf16 history": deqfast.Anderson(NEVER, plan.iterations, history_dtype=history),
        "broyden": deqfast.Broyden(NEVER, plan.iterations),
    }
    z0 = torch.zeros_like(z)
    for name, solver in cases.items():
        case = f"solve bf16, {name}"
        if bench.find("cell", case, "torchdeq") is None:
            with bench.row("cell", case, "torchdeq") as row, precision("bf16", plan.device):
                time_peer(bench, row, solver, cell, z0, x)
        for graph in (False, True):
            with bench.row("cell", case, f"{kernel} graph" if graph else kernel) as row:
                if graph and not bench.clock.cuda:
                    raise Skipped("CUDA graphs need a GPU")
                with precision("bf16", plan.device):
                    block = deqfast.DEQBlock(cell, solver, kernel=kernel, cuda_graph=graph)
                    time_block(bench, row, block, z0, x)
                    compare(row, bench.find("cell", case, "torchdeq"), "cell solve")
                    if graph:
                        judge_share_of_f(bench, row, lambda: cell(z, x))


def time_peer(
    bench: Bench, row: dict[str, Any], solver: Any, cell: deqfast.ResidualCell, z0: Tensor, x: Tensor
) -> None:
    """torchdeq keeps its state in the dtype and layout that f returns."""
    run, calls = solve_by("torchdeq", solver, bench.plan.device), 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cell(z.contiguous(memory_format=torch.channels_last), x).float()

    value = run(f, z0)
    row["evaluations"], row["residual"] = calls, residual_of(cell, value, x)
    row["ms"] = bench.clock.wall(lambda: run(f, z0), bench.plan.rounds)


def time_block(bench: Bench, row: dict[str, Any], block: deqfast.DEQBlock, z0: Tensor, x: Tensor) -> None:
    value, solution = block(x, z0=z0, return_solution=True)
    row["evaluations"], row["residual"] = solution.evaluations, residual_of(block.cell, value, x)
    row["ms"] = bench.clock.wall(lambda: block(x, z0=z0), bench.plan.rounds)


def residual_of(cell: Callable[..., Tensor], z: Tensor, x: Tensor) -> float:
    """Largest relative residual, f computed as in the solve."""
    return relative_residual(cell(z.contiguous(memory_format=torch.channels_last), x).float(), z.float())


def judge_share_of_f(bench: Bench, row: dict[str, Any], f: Callable[[], Tensor]) -> None:
    """A captured solve casts the weights at every evaluation, so f is timed with that."""
    with torch.autocast(bench.plan.device, torch.bfloat16, cache_enabled=False):
        row["f_ms"] = bench.clock.device([f])
    share = row["solver_share_of_f"] = row["ms"] / (row["evaluations"] * row["f_ms"]) - 1
    judge(row, "solver share", share)
    row["note"] = f"solver {share:.0%} of f"


def training(bench: Bench) -> None:
    """A step of SGD of the explicit ResNet-18 and of the DEQ (JFB) on the same random images."""
    for name in ("fp32", "bf16"):
        case = f"ResNet-18 w={bench.plan.width} B={bench.plan.train_batch} {name}"
        for model, kernel in (("explicit", "torch"), *(("deq", kernel) for kernel in kernels(bench))):
            provider = model if model == "explicit" else f"deq {kernel}"
            with bench.row("training", case, provider) as row, precision(name, bench.plan.device):
                time_training(bench, row, model, kernel, name)
                if model == "deq":
                    judge_training(bench, row, case)


def time_training(bench: Bench, row: dict[str, Any], model: str, kernel: str, name: str) -> None:
    plan, clock = bench.plan, bench.clock
    settings = settings_from(
        "gpu", preset="quick", device=plan.device, dataset="shapes", width=plan.width, kernel=kernel, solver="broyden"
    )
    network = build(model, settings).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(plan.train_batch, 3, 32, 32, generator=generator).to(plan.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(settings.classes, (plan.train_batch,), generator=generator).to(plan.device)
    solution = None

    def step() -> Tensor:
        nonlocal solution
        with torch.autocast(plan.device, torch.bfloat16, enabled=name == "bf16"):
            logits, _, solution = network(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with FlopCounterMode(display=False) as counter:
        loss = step()
    if not loss.isfinite():
        raise AssertionError(f"wrong: the loss is {loss.item()}; not timed")
    row["ms"] = clock.wall(step, plan.rounds)
    row["flop"] = counter.get_total_flops()
    row["peak_bytes"] = clock.peak_bytes(step)
    if solution is not None:
        row["evaluations"], row["residual"] = solution.evaluations, float(solution.residual_rel.max())


def step_parts(bench: Bench) -> None:
    """Where the study's own step goes, in the precisions it offers; neural collapse as a share of an epoch; and what
    the paper would take."""
    plan = bench.plan
    for name in ("fp32", "bf16"):
        case = f"study's step w={plan.width} B={plan.train_batch} {name}"
        record: dict[str, Any] = {}
        for model in training_step.MODELS:
            with bench.row("parts", case, model) as row:
                if not record:
                    steps = max(plan.rounds, training_step.FEWEST_STEPS)
                    record = training_step.measure(
                        plan.width, plan.train_batch, steps, 15, device=plan.device, precision=name
                    )
                describe_parts(row, record, model)


def describe_parts(row: dict[str, Any], record: dict[str, Any], model: str) -> None:
    row |= record["models"][model]
    parts = [f"{part} {ms:.2f}" for part, ms in row["parts"].items() if ms]
    hours = record["paper"]["hours"][model]
    row["note"] = f"ms: {', '.join(parts)}; {record['paper']['note']}: {hours:.1f} h"
    if model == "explicit":
        row["metrics"] = record["metrics"]
        judge(row, "nc share", record["metrics"]["nc_share"])
    else:
        row["paper"] = record["paper"]
        row["times_explicit"], row["flop_ratio"] = record["times_explicit"], record["flop_ratio"]
        judge(row, "training step", record["over_flop"])
        judge(row, "paper", sum(record["paper"]["hours"].values()))


def judge_training(bench: Bench, row: dict[str, Any], case: str) -> None:
    explicit, flop = (bench.find("training", case, "explicit", key) for key in ("ms", "flop"))
    if explicit and flop:
        row["times_explicit"], row["flop_ratio"] = row["ms"] / explicit, row["flop"] / flop
        row["note"] = f"{row['times_explicit']:.2f}x explicit, FLOPs {row['flop_ratio']:.2f}x"
        judge(row, "training step", row["times_explicit"] / row["flop_ratio"])


def neural_collapse(bench: Bench) -> None:
    """NC1-NC4, the error of NC1 against a pseudo-inverse through the singular vectors in float64."""
    plan = bench.plan
    for samples, dim, classes in plan.nc_shapes:
        features, labels, _ = clusters(samples, dim, classes)
        exact = exact_nc1(features.double(), labels, classes)
        on_device = features.to(plan.device), labels.to(plan.device)
        for kernel in kernels(bench):
            with bench.row("NC", f"N={samples} D={dim} K={classes} fp32", kernel) as row:
                time_nc(bench, row, on_device, exact, kernel)
                if (samples, dim, classes) == (50_000, 512, 10) and kernel != "torch":
                    judge(row, "nc", 1e3 * row["ms"])


def time_nc(bench: Bench, row: dict[str, Any], samples: tuple[Tensor, Tensor], exact: float, kernel: str) -> None:
    def measure() -> float:
        return deqfast.neural_collapse(*samples, kernel=kernel).nc1

    row["error"] = abs(measure() - exact) / exact
    if not row["error"] <= NC_ERROR:
        raise AssertionError(f"wrong: relative error {row['error']:.1e}, allowed {NC_ERROR:.0e}; not timed")
    row["ms"] = bench.clock.wall(measure, bench.plan.rounds)
    row["bytes"] = 2 * samples[0].nbytes  # a pass for the means, one for the scatter
    row["peak_bytes"] = bench.clock.peak_bytes(measure)
