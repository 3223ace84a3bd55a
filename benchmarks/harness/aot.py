"""Compile the Triton kernels ahead of time, without a GPU, and tabulate the resources of their code.

    PYTHONPATH=benchmarks python -m harness.aot [--arch {80,86,90}] [--kernels NAME ...] [--json FILE]

There is one row per kernel, dtypes, window and architecture: registers, stack (which shows spills), shared memory;
barriers and 16-byte global loads in PTX. Every case has a row of sm_90, and alternately one of sm_80 or sm_86. The exit
status is 1 if a row exceeds a limit. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from correctness.states import METHODS
from deqfast.kernels import (
    config,
    fc_fixed_point,
    multisecant_step,
    neural_collapse,
    norm_act,
    norm_act_residual,
    picard_step,
)
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deqfast.ops import ACTIVATIONS
from harness import cuobjdump

MAX_BARRIERS = 320  # in the code: each of three sums of 32 pairs has two or three after the loop over the columns
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
TWINS = (80, 86)  # their codes differ in the order of instructions and in a few registers
BARRIER = re.compile(r"\bbar\.sync")
# A load into registers, or a copy into shared memory, of 16 bytes.
WIDE_LOAD = re.compile(r"ld\.global[.\w:]*\.(?:v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
INT8, INT32 = {"p_status", "p_verdict"}, {"p_iterations", "p_active", "p_newest", "p_count"}
INT64 = {"p_rows", "p_offsets", "p_classes", "p_labels"}
# Kernels of a program per sample, whose loads need not be wide.
SCALAR_LOADS = ["solve", "means", "row", "picard/judge", "judge", "gamma", "picard/totals", "totals"]
SCALAR_LOADS += ["picard/verdict", "enter", "solve/half", "row/half"]
# Kernels whose statuses are those of ``common.take_verdict``.
JUDGED = ("picard/verdict", "enter", "solve/half", "right/half", "row/half")
STEP_KERNELS = {
    "picard/sums": picard_step._picard_sums_kernel,
    "picard/judge": picard_step._picard_judge_kernel,
    "picard/step": picard_step._picard_step_kernel,
    "picard/totals": picard_step._picard_totals_kernel,
    "picard/verdict": picard_step._picard_verdict_kernel,
    "left": multisecant_step._multisecant_left_kernel,
    "left/shared": multisecant_step._multisecant_left_kernel,
    "judge": multisecant_step._multisecant_judge_kernel,
    "left/half": multisecant_step._multisecant_left_kernel,
    "totals": multisecant_step._multisecant_totals_kernel,
    "enter": multisecant_step._multisecant_enter_kernel,
    "right/half": multisecant_step._multisecant_right_kernel,
    "solve/half": multisecant_step._multisecant_solve_kernel,
    "row/half": multisecant_step._multisecant_row_kernel,
    "solve": multisecant_step._multisecant_solve_kernel,
    "right": multisecant_step._multisecant_right_kernel,
    "right/shared": multisecant_step._multisecant_right_kernel,
    "row": multisecant_step._multisecant_row_kernel,
    "dots": multisecant_step._transposed_dots_kernel,
    "gamma": multisecant_step._transposed_gamma_kernel,
    "product": multisecant_step._transposed_product_kernel,
}
NORM_KERNELS = {
    "act": norm_act._norm_act_kernel,
    "act'": norm_act._norm_act_backward_kernel,
    "resid": norm_act_residual._norm_act_residual_kernel,
    "resid'": norm_act_residual._norm_act_residual_backward_kernel,
}
INTEGERS = {"plane", "pixels", "B", "D", "M", "N", "R", "k", "n", "newest", "new", "hold", "last", "absolute", "count"}
INTEGERS |= {"S", "W", "stride", "max_iter", "maximum"}


@dataclass(frozen=True)
class Case:
    """A kernel specialised as a launcher would: `size` columns of dtype `state`, `window` pairs of dtype `history`.

    For the fully connected kernels, `method` is the activation and `history` the dtype of the weight. For the kernels
    of neural collapse, there are `size` columns of features of dtype `state` and `window` directions. For the norm
    kernels, there are `size` pixels of `window` channels in 8 groups, accumulated in `state`; y has the dtype
    `history`, x and z the dtype named by `method`. warps: of a sweep, 0 for its configuration.
    """

    kernel: str
    state: str
    history: str = ""
    window: int = 0
    method: str = ""
    size: int = 8192
    warps: int = 0


@dataclass(frozen=True)
class Row:
    case: Case
    arch: int
    block: int
    warps: int
    registers: int
    stack: int
    shared: int
    barriers: int
    wide_loads: int

    def faults(self) -> list[str]:
        found = []
        if self.stack:
            found.append(f"spills: {self.stack} bytes of stack")
        alike = TWINS if self.arch in TWINS else (self.arch,)
        limit = min(SHARED_LIMIT[arch] for arch in alike if fits(self.case, arch))
        if self.shared > limit:
            found.append(f"shared memory {self.shared} exceeds {limit}")
        if self.barriers > MAX_BARRIERS:
            found.append(f"more than {MAX_BARRIERS} barriers")
        if self.case.size % 16 == 0 and self.case.kernel not in SCALAR_LOADS and not self.wide_loads:
            found.append("no 16-byte global loads")
        return found


def table() -> list[Case]:
    """Cases of benchmarks/aot.csv.

    The default windows of the solvers, and the hardest of each padded window (4, 8, 16, 32). Sizes that are not
    aligned. Norms too large for the chip, with the dtypes of autocast, and of rows that are not aligned.
    """
    kinds: dict[str, Any] = {"window": int, "size": int, "warps": int}
    with open(Path(__file__).parents[1] / "aot.csv") as file:
        rows = list(csv.DictReader(file))
    return [Case(**{name: kinds.get(name, str)(text) for name, text in row.items() if text}) for row in rows]


def fits(case: Case, arch: int) -> bool:
    """Return whether `deqfast` would launch this on the architecture."""
    if case.kernel != "fc":
        return True
    return case.size <= config.fc_features(DTYPES[case.history], SHARED_LIMIT[arch])


def jobs(only: int | None = None, kernels: Collection[str] = ()) -> list[tuple[Case, int]]:
    """Compilations: every case for sm_90; for the twins, the cases of each kernel alternately.

    only: restricts them to this architecture; kernels: restricts them to these, if any.
    """
    turns: Counter[str] = Counter()
    chosen = []
    for case in table():
        twin = TWINS[turns[case.kernel] % 2]
        turns[case.kernel] += 1
        chosen += [(case, 90), (case, twin if fits(case, twin) else 80)]
    return [(case, arch) for case, arch in chosen if only in (None, arch) and (not kernels or case.kernel in kernels)]


def specialise_collapse(case: Case) -> tuple[triton.JITFunction, dict[str, object], config.LaunchConfig]:
    """As ``specialise``, for the kernels of neural collapse."""
    dtype = DTYPES[case.state]
    if case.kernel == "scatter":
        tile = config.scatter_config(case.window, dtype, aligned=case.size % 16 == 0)
        launch = config.LaunchConfig(tile.columns, tile.num_warps)
        constants = {"BM": tile.rows, "BK": tile.columns, "BR": tile.directions}
        return neural_collapse._scatter_kernel, constants, launch
    tile = config.class_sums_config(case.size, dtype)
    launch = config.LaunchConfig(tile.columns, tile.num_warps)
    chunk = {"CHUNK": neural_collapse.CHUNK_ROWS, "BD": tile.columns}
    if case.kernel == "means":
        return neural_collapse._class_means_kernel, chunk, launch
    return neural_collapse._class_sums_kernel, {**chunk, "BR": tile.rows}, launch


def specialise(case: Case) -> tuple[triton.JITFunction, dict[str, object], config.LaunchConfig | config.TileConfig]:
    """Jit function of a case, the values of its constexpr arguments, and its launch configuration."""
    dtype = DTYPES[case.state]
    if case.kernel in ("sums", "means", "scatter"):
        return specialise_collapse(case)
    if case.kernel == "fc_vjp":
        launch = config.picard_config(case.size, dtype)
        return (
            fc_fixed_point._fc_vjp_kernel,
            {"ACTIVATION": ACTIVATIONS.index(case.method), "BLK": launch.block},
            launch,
        )
    if case.kernel == "fc":
        launch = config.fc_config(case.size)
        tile = {"ACTIVATION": ACTIVATIONS.index(case.method), "INTERPRETED": False}
        tile |= {"maximum": 0, "ROWS": config.FC_ROWS, "DP": launch.block}
        return fc_fixed_point._fc_fixed_point_kernel, {**tile, **one(case)}, launch
    if case.kernel in NORM_KERNELS:
        launch = config.norm_config(case.size, case.window // 8, dtype)
        group = {"P": case.size, "C": case.window, "CG": case.window // 8, "BR": launch.rows, "BC": launch.columns}
        return NORM_KERNELS[case.kernel], group, launch
    return specialise_step(case)


def specialise_step(case: Case) -> tuple[triton.JITFunction, dict[str, object], config.LaunchConfig]:
    """As ``specialise``, for the steps of the solvers."""
    dtype = DTYPES[case.state]
    launch: config.LaunchConfig = config.picard_config(case.size, dtype)
    if case.kernel == "picard":
        on_chip = {"ON_CHIP": case.size <= launch.block, "BLK": launch.block}
        return picard_step._picard_kernel, {**on_chip, **one(case)}, launch
    kernel, padded = STEP_KERNELS[case.kernel], config.padded_window(case.window)
    constants: dict[str, object] = {**one(case), "MP": padded, "SHARED": case.kernel.endswith(("/shared", "/half"))}
    if case.kernel.endswith("/half"):
        constants["p_iterations"] = None
        constants |= multisecant_step.UNJUDGED if case.kernel == "left/half" else {}
    constants |= {"SOLVE": padded <= config.MAX_INLINE_WINDOW, "METHOD": METHODS.get(case.method)}
    if case.kernel in SCALAR_LOADS:
        launch = config.JUDGE_CONFIG
    elif case.kernel in ("dots", "product"):
        launch, _ = config.transposed_config(case.size, case.window, dtype, DTYPES[case.history])
    elif not case.kernel.startswith("picard"):
        held = (3 if case.method == "and1" else 2) if case.kernel.startswith("left") else 1.5
        launch = config.sweep_config(case.size, case.window, held, dtype, DTYPES[case.history], case.warps)
    if isinstance(launch, config.SweepConfig):
        constants |= launch.arguments()
    constants["BLK"] = launch.block
    return kernel, {name: value for name, value in constants.items() if name in kernel.arg_names}, launch


def one(case: Case) -> dict[str, object]:
    """Argument D, which triton makes a constant of the code if it is 1."""
    return {"D": 1} if case.size == 1 else {}


def signature_of(case: Case, names: list[str], constants: dict[str, object]) -> dict[str, str]:
    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if not name.startswith("p_"):
            return "i32" if name in INTEGERS else "fp64"
        if name == "p_status" and case.kernel in JUDGED:
            return "*" + case.state
        if name in INT8 | INT32:
            return "*i8" if name in INT8 else "*i32"
        if case.kernel in NORM_KERNELS:
            return "*" + norm_dtype(case, name)
        if name in INT64 or name in ("p_local", "p_shift"):
            return "*i64" if name in INT64 else "*fp64"
        if case.kernel in ("sums", "means", "scatter") and name != "p_features":
            return "*fp64" if case.state == "fp64" else "*fp32"
        return "*" + (case.history if name in ("p_left", "p_df", "p_w") else case.state)

    return {name: type_of(name) for name in names}


def norm_dtype(case: Case, name: str) -> str:
    if name in ("p_x", "p_z", "p_grad_sum", "p_grad_z"):
        return case.method
    in_y = name in ("p_y", "p_out", "p_grad_y") or (name == "p_grad" and case.kernel == "act'")
    return case.history if in_y else case.state


def compile_case(case: Case, arch: int) -> Row:
    kernel, constants, launch = specialise(case)
    signature = signature_of(case, kernel.arg_names, constants)
    multiples = {"R", "D", "N", "stride"} if case.size % 16 == 0 else {"R"}
    divisible = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in multiples]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in divisible}
    )
    options: dict[str, object] = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    if (limit := most_registers(case, launch)) is not None:
        options["maxnreg"] = limit
    if case.kernel == "scatter":
        options["num_stages"] = neural_collapse.SCATTER_STAGES
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        ((registers, stack, _),) = cuobjdump.resources(file.name).values()
    return Row(
        case,
        arch,
        launch.block if isinstance(launch, config.LaunchConfig) else launch.rows,
        launch.num_warps,
        registers,
        stack,
        compiled.metadata.shared,
        len(BARRIER.findall(compiled.asm["ptx"])),
        len(WIDE_LOAD.findall(compiled.asm["ptx"])),
    )


def most_registers(case: Case, launch: config.LaunchConfig | config.TileConfig) -> int | None:
    """Registers of a thread to which the launcher limits a kernel."""
    if case.kernel == "picard":
        return config.picard_registers(DTYPES[case.state], whole=True)
    if case.kernel == "picard/sums":
        return config.sums_registers(DTYPES[case.state])
    if isinstance(launch, config.SweepConfig):
        return launch.registers
    if case.kernel in NORM_KERNELS:
        return config.NORM_REGISTERS
    return (
        config.MAX_REGISTERS if case.kernel.startswith(("judge", "row", "picard/", "totals", "enter", "fc")) else None
    )


def compile_job(job: tuple[Case, int]) -> Row:
    return compile_case(*job)


def as_entries(row: Row) -> dict[str, object]:
    entries = {**asdict(row.case), **asdict(row), "arch": f"sm_{row.arch}", "faults": "; ".join(row.faults())}
    return {name: entries[name] for name in entries if name != "case"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=sorted(SHARED_LIMIT), help="only this architecture's rows")
    names = sorted({case.kernel for case in table()})
    parser.add_argument(
        "--kernels", nargs="+", choices=names, metavar="NAME", default=(), help=f"of {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(compile_job, jobs(options.arch, options.kernels)))
    print(f"triton {triton.__version__}\n{tabulate(map(as_entries, rows), headers='keys', tablefmt='plain')}")
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "faults": row.faults()} for row in rows], indent=1))
    return any(row.faults() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
