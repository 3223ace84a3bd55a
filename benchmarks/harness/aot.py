"""Compile the Triton kernels ahead of time, without a GPU, and tabulate the resources of their code.

    PYTHONPATH=benchmarks python -m harness.aot [--arch {80,86,90}] [--kernels NAME ...] [--json FILE]

There is one row per case of benchmarks/aot.csv and architecture: registers, stack (which shows spills), shared memory;
barriers and 16-byte global loads in PTX. A row also counts multiples of the batch's size in 32 bits. Every case has a
row of sm_90, and alternately one of sm_80 or sm_86. The exit status is 1 if a row exceeds a limit. Must run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import csv
import importlib
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
from typing import Any, TypeAlias

import torch
import triton
from correctness.states import METHODS
from deqfast.kernels import config, multisecant_step, neural_collapse
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deqfast.ops import ACTIVATIONS
from harness import cuobjdump

MAX_BARRIERS = 320  # in the code: each of three sums of 32 pairs has two or three after the loop over the columns
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
TWINS = (80, 86)  # their codes differ in the order of instructions and in a few registers
BARRIER = re.compile(r"\bbar\.sync")
# Multiples of a number of samples, or of their channels or features. They exceed int32 before the number does.
SHORT_PRODUCT = re.compile(r"arith\.muli (?=.*%(?:B|plane|N)\b).*: i32")
# A load into registers, or a copy into shared memory, of 16 bytes.
WIDE_LOAD = re.compile(r"ld\.global[.\w:]*\.(?:v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
# Types of arguments that do not have the dtype of the state.
POINTERS = {
    **dict.fromkeys(("p_status", "p_verdict"), "i8"),
    **dict.fromkeys(("p_iterations", "p_active", "p_newest", "p_count"), "i32"),
    **dict.fromkeys(("p_rows", "p_offsets", "p_classes", "p_labels"), "i64"),
    **dict.fromkeys(("p_local", "p_shift"), "fp64"),
}
INTEGERS = {"plane", "pixels", "B", "D", "M", "N", "R", "k", "n", "newest", "new", "hold", "last", "absolute", "count"}
INTEGERS |= {"S", "W", "stride", "max_iter", "maximum"}
Launch: TypeAlias = config.LaunchConfig | config.TileConfig


def read(name: str) -> list[dict[str, str]]:
    """Rows of a file next to the results."""
    with open(Path(__file__).parents[1] / name) as file:
        return list(csv.DictReader(file))


# Name of a kernel -> module and function; loads: "scalar" if they need not be wide, as in a program per sample;
# status: "verdict" if the statuses are those of ``common.take_verdict``.
KERNELS = {row["name"]: row for row in read("aot_kernels.csv")}


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

    @property
    def module(self) -> str:
        return KERNELS[self.kernel]["module"]

    @property
    def has_scalar_loads(self) -> bool:
        return KERNELS[self.kernel]["loads"] == "scalar"

    def fits(self, arch: int) -> bool:
        """Return whether `deqfast` would launch this on the architecture."""
        return self.kernel != "fc" or self.size <= config.fc_features(DTYPES[self.history], SHARED_LIMIT[arch])


def table() -> list[Case]:
    """Cases of benchmarks/aot.csv.

    The default windows of the solvers, and the hardest of each padded window (4, 8, 16, 32). Sizes that are not
    aligned. Norms too large for the chip, with the dtypes of autocast, and of rows that are not aligned.
    """
    kinds: dict[str, Any] = {"window": int, "size": int, "warps": int}
    return [Case(**{name: kinds.get(name, str)(text) for name, text in row.items() if text}) for row in read("aot.csv")]


def jobs(only: int | None = None, kernels: Collection[str] = ()) -> list[tuple[Case, int]]:
    """Compilations: every case for sm_90; for the twins, the cases of each kernel alternately.

    only: restricts them to this architecture; kernels: restricts them to these, if any.
    """
    turns: Counter[str] = Counter()
    chosen = []
    for case in table():
        twin = TWINS[turns[case.kernel] % 2]
        turns[case.kernel] += 1
        chosen += [(case, 90), (case, twin if case.fits(twin) else 80)]
    return [(case, arch) for case, arch in chosen if only in (None, arch) and (not kernels or case.kernel in kernels)]


def settings(case: Case) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
    """Launch configuration, values of constexpr arguments, and options of the compiler."""
    dtype = DTYPES[case.state]
    if case.module in ("multisecant_step", "picard_step"):
        return step_settings(case)
    limited = {"maxnreg": config.MAX_REGISTERS}
    if case.module == "fc_fixed_point":
        launch = config.fc_config(case.size) if case.kernel == "fc" else config.picard_config(case.size, dtype)
        tile = {"ACTIVATION": ACTIVATIONS.index(case.method), "INTERPRETED": False, "maximum": 0}
        return launch, tile | {"ROWS": config.FC_ROWS, "DP": launch.block, "BLK": launch.block}, limited
    if case.kernel == "scatter":
        tile = config.scatter_config(case.window, dtype, aligned=case.size % 16 == 0)
        sizes = {"BM": tile.rows, "BK": tile.columns, "BR": tile.directions}
        stages = {"num_stages": neural_collapse.SCATTER_STAGES}
        return config.LaunchConfig(tile.columns, tile.num_warps), sizes, stages
    if case.module == "neural_collapse":
        tile = config.class_sums_config(case.size, dtype)
        sizes = {"CHUNK": neural_collapse.CHUNK_ROWS, "BD": tile.columns, "BR": tile.rows}
        return config.LaunchConfig(tile.columns, tile.num_warps), sizes, {}
    group = case.window // 8
    launch = config.norm_config(case.size, group, dtype)
    sizes = {"P": case.size, "C": case.window, "CG": group, "BR": launch.rows, "BC": launch.columns}
    return launch, sizes, {"maxnreg": config.NORM_REGISTERS}


def step_settings(case: Case) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
    """As ``settings``, for the steps of the solvers."""
    dtype, half = DTYPES[case.state], case.kernel.endswith("/half")
    launch: config.LaunchConfig = config.picard_config(case.size, dtype)
    constants: dict[str, Any] = {
        "ON_CHIP": case.size <= launch.block,
        "SHARED": case.kernel.endswith(("/shared", "/half")),
    }
    registers = {"picard": config.picard_registers(dtype, whole=True), "picard/sums": config.sums_registers(dtype)}
    limit = registers.get(case.kernel)
    if case.has_scalar_loads:
        launch = config.JUDGE_CONFIG
    if case.module == "multisecant_step":
        padded = config.padded_window(case.window)
        constants |= {"MP": padded, "SOLVE": padded <= config.MAX_INLINE_WINDOW, "METHOD": METHODS.get(case.method)}
        constants |= {"p_iterations": None} if half else {}
        constants |= multisecant_step.UNJUDGED if case.kernel == "left/half" else {}
        if case.kernel in ("dots", "product"):
            launch, _ = config.transposed_config(case.size, case.window, dtype, DTYPES[case.history])
        elif not case.has_scalar_loads:
            held = (3 if case.method == "and1" else 2) if case.kernel.startswith("left") else 1.5
            launch = config.sweep_config(case.size, case.window, held, dtype, DTYPES[case.history], case.warps)
    if isinstance(launch, config.SweepConfig):
        constants |= launch.arguments()
        limit = launch.registers
    elif limit is None and case.kernel.startswith(("judge", "row", "picard/", "totals", "enter")):
        limit = config.MAX_REGISTERS
    return launch, constants | {"BLK": launch.block}, {} if limit is None else {"maxnreg": limit}


def type_of(name: str, case: Case) -> str:
    """Type of an argument of a kernel that is not a constant."""
    if not name.startswith("p_"):
        return "i32" if name in INTEGERS else "fp64"
    if name == "p_status" and KERNELS[case.kernel]["status"]:
        return "*" + case.state
    if case.module.startswith("norm_act"):
        return "*" + norm_dtype(case, name)
    if case.module == "neural_collapse" and name != "p_features" and name not in POINTERS:
        return "*fp64" if case.state == "fp64" else "*fp32"
    return "*" + POINTERS.get(name, case.history if name in ("p_left", "p_df", "p_w") else case.state)


def norm_dtype(case: Case, name: str) -> str:
    if name in ("p_x", "p_z", "p_grad_sum", "p_grad_z"):
        return case.method
    in_y = name in ("p_y", "p_out", "p_grad_y") or (name == "p_grad" and case.kernel == "act'")
    return case.history if in_y else case.state


def specialised(case: Case) -> tuple[ASTSource, dict[str, Any], Launch]:
    """Source of a kernel with its types and constants, options of the compiler, and the launch configuration.

    Triton makes an argument that is 1 a constant of the code.
    """
    kernel = getattr(importlib.import_module(f"deqfast.kernels.{case.module}"), KERNELS[case.kernel]["function"])
    launch, values, options = settings(case)
    values |= {"D": 1} if case.size == 1 else {}
    constants = {name: values[name] for name in kernel.arg_names if name in values}
    signature = {name: "constexpr" if name in constants else type_of(name, case) for name in kernel.arg_names}
    multiples = {"R", "D", "N", "stride"} if case.size % 16 == 0 else {"R"}
    divisible = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in multiples]
    aligned = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return source, {"num_warps": launch.num_warps, "enable_fp_fusion": False, **options}, launch


def compile_case(case: Case, arch: int) -> dict[str, Any]:
    """Row of a case: its fields, the resources of its code, and its faults."""
    source, options, launch = specialised(case)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        ((registers, stack, _),) = cuobjdump.resources(file.name).values()
    row = asdict(case) | {
        "arch": arch,
        "block": launch.block if isinstance(launch, config.LaunchConfig) else launch.rows,
        "warps": launch.num_warps,
        "given_warps": case.warps,
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "barriers": len(BARRIER.findall(compiled.asm["ptx"])),
        "wide_loads": len(WIDE_LOAD.findall(compiled.asm["ptx"])),
        "short_products": len(SHORT_PRODUCT.findall(compiled.asm["ttir"])),
    }
    return row | {"faults": faults(case, row)}


def faults(case: Case, row: dict[str, Any]) -> list[str]:
    """Sentences on the limits that a row exceeds."""
    alike = TWINS if row["arch"] in TWINS else (row["arch"],)
    limit = min(SHARED_LIMIT[arch] for arch in alike if case.fits(arch))
    exceeded = {
        f"spills: {row['stack']} bytes of stack": row["stack"],
        f"shared memory {row['shared']} exceeds {limit}": row["shared"] > limit,
        f"more than {MAX_BARRIERS} barriers": row["barriers"] > MAX_BARRIERS,
        "a multiple of the batch in 32 bits": row["short_products"],
        "no 16-byte global loads": case.size % 16 == 0 and not case.has_scalar_loads and not row["wide_loads"],
    }
    return [text for text, is_true in exceeded.items() if is_true]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=sorted(SHARED_LIMIT), help="only this architecture's rows")
    names = sorted(KERNELS)
    about = f"of {', '.join(names)}"
    parser.add_argument("--kernels", nargs="+", choices=names, metavar="NAME", default=(), help=about)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(compile_case, *zip(*jobs(options.arch, options.kernels), strict=True)))
    shown = [row | {"arch": f"sm_{row['arch']}", "faults": "; ".join(row["faults"])} for row in rows]
    print(f"triton {triton.__version__}\n{tabulate(shown, headers='keys', tablefmt='plain')}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return any(row["faults"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
