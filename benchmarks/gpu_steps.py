"""Sections of the GPU benchmark: the machine's rates, the solvers' kernels, whole solves, the one-launch FC solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_measure import Bench, check_error, compare, judge, judge_share
from harness import traffic
from harness.entry import Skipped, require_fc_kernel
from harness.maps import FC_RADIUS, NEVER, Contraction, relative_residual
from harness.ops import STILL
from harness.solves import APPROACHED, solve_by
from torch import Tensor
from torch.nn import functional as F

import deqfast
from deqfast.ops import ACTIVATIONS, choose_kernel
from deqfast.solve import CHECK_EVERY_ON_GPU
from deqfast.testing.states import Case, clone, make_state

ROWS_CHECKED = 8


def rates(bench: Bench) -> None:
    """The two ceilings: copy and matrix product."""
    plan, clock = bench.plan, bench.clock
    with bench.row("rates", "copy", "torch") as row:
        source = torch.randn(plan.copy_elements, device=plan.device)
        target = torch.empty_like(source)
        row["bytes"] = 2 * source.nbytes
        row["ms"] = clock.device([lambda: target.copy_(source)])
        row["note"] = f"{row['bytes'] / row['ms'] / 1e6:.0f} GB/s read and written"
    with bench.row("rates", f"bf16 product {plan.gemm_size}^3", "torch") as row:
        a, b = (torch.randn(plan.gemm_size, plan.gemm_size, device=plan.device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        row["ms"] = clock.device([lambda: torch.mm(a, b, out=out)])
        row["flop"] = 2 * plan.gemm_size**3
        row["note"] = f"{row['flop'] / row['ms'] / 1e9:.1f} TFLOP/s"


def step_cases(bench: Bench, batch: int, size: int) -> dict[str, Case]:
    """The steps to time, each with its window full."""
    anderson, broyden, default = bench.plan.windows
    shape: dict[str, Any] = {"batch": batch, "size": size, "tol": 0.0, "wobble": 0.5}
    cases = {
        "picard": Case(damping=0.5, k=1, **shape),
        f"anderson m={anderson}": Case("and2", history=anderson, k=anderson, **shape),
        f"anderson m={anderson} bf16": Case(
            "and2", history=anderson, k=anderson, history_dtype=torch.bfloat16, **shape
        ),
        f"broyden n={broyden}": Case("good", history=broyden, k=broyden, **shape),
    }
    if (batch, size) == bench.plan.solve_shape or not bench.clock.cuda:
        cases[f"broyden n={default}"] = Case("good", history=default, k=default, **shape)
    return cases


def steps(bench: Bench) -> None:
    """Every kernel of a solver's step: rotated among buffers that the cache cannot hold, and in place."""
    for batch, size in bench.plan.step_shapes:
        for name, case in step_cases(bench, batch, size).items():
            state = make_state(case, bench.plan.device)
            for kernel in bench.plan.kernels:
                with bench.row("step", f"{name} ({batch}, {size})", kernel) as row:
                    time_step(bench, row, case, state, kernel)
                    judge_step(bench, row, name, batch, size)


def step_op(case: Case, kernel: str, device: str) -> Callable[..., None]:
    name = "picard_step" if case.method is None else "multisecant_step"
    return choose_kernel(kernel, torch.device(device)).op(name)


def time_step(bench: Bench, row: dict[str, Any], case: Case, state: dict[str, Tensor], kernel: str) -> None:
    op = step_op(case, kernel, bench.plan.device)
    check_step_error(row, op, case, state)
    passes: float = traffic.PICARD_PASSES
    if case.method is not None:
        passes = traffic.multisecant_passes(min(case.k, case.history), traffic.width(case.history_dtype))
    row["bytes"] = passes * state["z"].nbytes
    row["passes"] = passes
    still = replace(case, damping=STILL, alpha=STILL)
    start = clone(state)
    for record in ("residual", "gain"):
        start[record].zero_()  # no iterate is better, so that none is copied to `best`
    copies = [clone(start) for _ in range(bench.clock.copies(int(row["bytes"])))]
    row["ms"] = bench.clock.device([partial(still.call, op, s) for s in copies])
    row["in_place_ms"] = bench.clock.device([partial(still.call, op, start)])
    row["buffers"] = len(copies)
    for used in (start, *copies):
        if used["status"].any() or not used["z"].isfinite().all():
            del row["ms"], row["in_place_ms"]
            raise AssertionError("samples ended while the step was timed: the time is no time of a full step")


def check_step_error(row: dict[str, Any], op: Callable[..., None], case: Case, state: dict[str, Tensor]) -> None:
    """One step of all samples; some of them, spread over the batch, against float64 on the CPU."""
    after = clone(state)
    case.call(op, after)
    if not after["z"].isfinite().all():
        raise AssertionError("wrong: the next iterate is not finite; not timed")
    batch = state["z"].shape[0]
    rows = torch.linspace(0, batch - 1, min(batch, ROWS_CHECKED)).long().to(state["z"].device)
    part = {name: pick(name, tensor, rows) for name, tensor in state.items()}
    plain, exact = clone(part), clone(part, torch.float64)
    case.call(case.reference, plain)
    case.call(case.reference, exact)
    check_error(row, after["z"][rows], plain["z"], exact["z"])


def pick(name: str, tensor: Tensor, rows: Tensor) -> Tensor:
    if name == "active":
        return torch.tensor([len(rows)], dtype=tensor.dtype)
    dim = 1 if name in ("residual", "gain") else 0
    return tensor.index_select(dim, rows).cpu()


def judge_step(bench: Bench, row: dict[str, Any], name: str, batch: int, size: int) -> None:
    targets = {
        ("anderson m=6 bf16", 128, 8192): "anderson step",
        ("broyden n=18", 128, 8192): "broyden step",
        ("anderson m=6 bf16", 32, 65536): "anderson step, large",
    }
    target = targets.get((name, batch, size))
    if target is not None:
        judge(row, target, 1e3 * row["ms"])
    if size >= 8192:
        judge_share(bench, row)


def solvers(iterations: int) -> dict[str, Any]:
    return {
        "picard": deqfast.Picard(NEVER, iterations),
        "anderson m=6": deqfast.Anderson(NEVER, iterations),
        "anderson m=6 bf16 history": deqfast.Anderson(NEVER, iterations, history_dtype=torch.bfloat16),
        f"broyden n={iterations}": deqfast.Broyden(NEVER, iterations),
    }


def peer_of(name: str) -> str:
    """The case whose torchdeq time a case is compared with."""
    return name.removesuffix(" bf16 history")


def solves(bench: Bench) -> None:
    """Whole solves of an element-wise f, which is subtracted, beside torchdeq: same f, same iterations."""
    plan = bench.plan
    batch, dim = plan.solve_shape
    f, z0 = Contraction(batch, dim, plan.device), torch.zeros(batch, dim, device=plan.device)
    for name, solver in solvers(plan.iterations).items():
        if peer_of(name) == name:
            with bench.row("solve", name, "torchdeq") as row:
                time_solve(bench, row, f, z0, solve_by("torchdeq", solver, plan.device), solver, foreign=True)
        for kernel in ("torch", *plan.kernels):
            with bench.row("solve", name, kernel) as row:
                time_solve(bench, row, f, z0, solve_by(kernel, solver, plan.device), solver)
                judge_solve(bench, row, name)
        for kernel in plan.kernels:
            with bench.row("solve", name, f"{kernel} graph") as row:
                if not bench.clock.cuda:
                    raise Skipped("CUDA graphs need a GPU")
                block = deqfast.DEQBlock(f, solver, kernel=kernel, cuda_graph=True)
                time_solve(bench, row, f, z0, partial(graph_solve, block), solver, graph=True)
                judge_solve(bench, row, name)


def graph_solve(block: deqfast.DEQBlock, f: Contraction, z0: Tensor) -> Tensor:
    with torch.no_grad():
        value, solution = block(f.c, z0=z0, return_solution=True)
    f.calls += solution.evaluations  # a replay does not pass through Python
    return value


def time_solve(
    bench: Bench, row: dict[str, Any], f: Contraction, z0: Tensor, solve: Callable[..., Tensor], solver: Any,
    graph: bool = False, foreign: bool = False,
) -> None:  # fmt: skip
    """Time per evaluation without f, and the bytes of `solver`'s algorithm where it is ours."""
    clock, rounds = bench.clock, bench.plan.rounds
    solve(f, z0)
    f.calls = 0
    value = solve(f, z0)
    evaluations = row["evaluations"] = f.calls
    row["residual"] = f.residual(value)
    if not row["residual"] < APPROACHED[type(solver)]:
        raise AssertionError(f"wrong: relative residual {row['residual']:.1e} at the end; not timed")

    def calls_of_f() -> None:
        z = z0
        for _ in range(evaluations):
            z = f(z)

    whole = clock.wall(lambda: solve(f, z0), rounds)
    alone = evaluations * clock.device([lambda: f(z0)]) if graph else clock.wall(calls_of_f, rounds)
    row["solve_ms"], row["f_ms"] = whole, alone / evaluations
    row["ms"] = (whole - alone) / evaluations
    if not foreign:
        row["bytes"] = traffic.solve_passes(solver, evaluations, row["provider"].split()[0]) * z0.nbytes / evaluations
    row["peak_bytes"] = clock.peak_bytes(lambda: solve(f, z0))
    seen = clock.traffic(lambda: solve(f, z0))
    if seen is not None:
        row["launches"], row["waits"] = seen
        per_step = row["launches"] if graph else row["launches"] / evaluations - 1
        row["note"] = f"{per_step:.1f} launches/{'solve' if graph else 'step'}, {row['waits']} waits"


def judge_solve(bench: Bench, row: dict[str, Any], name: str) -> None:
    peer = peer_of(name)
    if row["provider"] == "torch":  # the baseline has no target
        compare(row, bench.find("solve", peer, "torchdeq"))
        return
    method = name.split()[0]
    compare(row, bench.find("solve", peer, "torchdeq"), None if method == "picard" else f"{method} solve")
    if "graph" in row["provider"]:
        return
    if "waits" in row:
        judge(row, "waits", row["waits"] - bench.plan.iterations // CHECK_EVERY_ON_GPU)
    theirs, own = bench.find("solve", peer, "torchdeq", "peak_bytes"), row["peak_bytes"]
    if own and theirs and (name.endswith("bf16 history") or method == "broyden"):
        judge(row, f"{method} memory", own / theirs)


def fully_connected(bench: Bench) -> None:
    """z = tanh(W z + c) by `fc_fixed_point` in one launch, beside the eager loop and torchdeq."""
    plan = bench.plan
    for dim in plan.fc_sizes:
        for dtype in (torch.float32, torch.bfloat16):
            case = f"D={dim} B={plan.fc_batch} {str(dtype)[6:]} weights"
            generator = torch.Generator().manual_seed(dim)
            weight = (FC_RADIUS * torch.randn(dim, dim, generator=generator) / dim**0.5).to(dtype)
            c = torch.randn(plan.fc_batch, dim, generator=generator)
            for provider in ("torchdeq", "eager loop", *plan.kernels):
                with bench.row("fc", case, provider) as row:
                    solve = fc_solve(provider, weight.to(plan.device), c.to(plan.device), plan.fc_iterations)
                    value, row["evaluations"] = solve()
                    check_error(row, value, *fc_expected(provider in plan.kernels, weight, c, plan.fc_iterations))
                    row["residual"] = fc_residual(weight.double(), c.double(), value.double().cpu())
                    row["ms"] = bench.clock.wall(solve, plan.rounds)
                    if provider in plan.kernels:
                        op_ms = fc_op_ms(bench, provider, weight.to(plan.device), c.to(plan.device))
                        row["op_ms"], row["note"] = op_ms, f"the op alone {1e3 * op_ms:.1f} us"
                        judge_fc(bench, row, case, dim, dtype)


def fc_iterates(weight: Tensor, c: Tensor, iterations: int) -> Tensor:
    z = torch.zeros_like(c)
    for _ in range(iterations):
        z = torch.tanh(F.linear(z, weight) + c)
    return z


def fc_expected(best: bool, weight: Tensor, c: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """In the dtype of c and in float64: the last iterate, or the `best`, which deqfast returns."""
    values = []
    for dtype in (c.dtype, torch.float64):
        wide, shift = weight.to(dtype), c.to(dtype)
        solver = deqfast.Picard(NEVER, iterations)
        values.append(
            deqfast.fc_fixed_point(wide, shift, solver=solver, kernel="torch")[0]
            if best
            else fc_iterates(wide, shift, iterations)
        )
    return values[0], values[1]


def fc_op_ms(bench: Bench, kernel: str, weight: Tensor, c: Tensor) -> float:
    """The launch without the checks and the wait of `deqfast.fc_fixed_point`."""
    op, z0 = choose_kernel(kernel, c.device).op("fc_fixed_point"), torch.zeros_like(c)
    tanh = ACTIVATIONS.index("tanh")
    return bench.clock.device([lambda: op(weight, c, z0, tanh, NEVER, False, bench.plan.fc_iterations, 0.0)])


def fc_residual(weight: Tensor, c: Tensor, z: Tensor) -> float:
    return relative_residual(torch.tanh(F.linear(z, weight) + c), z)


def fc_solve(provider: str, weight: Tensor, c: Tensor, iterations: int) -> Callable[[], tuple[Tensor, int]]:
    """A solve from zeros: the value, and how often f was evaluated. The loops multiply in the dtype of c."""
    wide = weight.to(c.dtype)
    if provider == "eager loop":
        return lambda: (fc_iterates(wide, c, iterations), iterations)
    if provider == "torchdeq":
        run = solve_by("torchdeq", deqfast.Picard(NEVER, iterations), weight.device.type)
        return lambda: (run(lambda z: torch.tanh(F.linear(z, wide) + c), torch.zeros_like(c)), iterations)
    require_fc_kernel(choose_kernel(provider, weight.device), weight, c.dtype)
    solver = deqfast.Picard(NEVER, iterations)

    def ours() -> tuple[Tensor, int]:
        value, solution = deqfast.fc_fixed_point(weight, c, solver=solver, kernel=provider)
        return value, solution.evaluations

    return ours


def judge_fc(bench: Bench, row: dict[str, Any], case: str, dim: int, dtype: torch.dtype) -> None:
    wanted = (dim, bench.plan.fc_batch, dtype) == (256, 128, torch.bfloat16)
    compare(row, bench.find("fc", case, "torchdeq"), "fc gain" if wanted else None)
    if wanted:
        judge(row, "fc", 1e3 * row["ms"])
