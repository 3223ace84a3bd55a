"""Every CUDA kernel compiled for the supported architectures: registers, stack, spills, shared memory, and its code.

python tests/csrc/test_cuda_compile.py    prints the table
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from deqfast.testing.cuobjdump import CUOBJDUMP, demangle

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("80", "86", "90")
STATIC_SHARED_LIMIT = 48 * 1024  # bytes that a kernel gets without asking, on every architecture
REGISTERS_OF_A_BLOCK = 65536
THREADS = 256
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
MAX_BARRIERS = 32


class Kernel(NamedTuple):
    name: str
    architecture: str
    registers: int
    stack: int
    spills: int
    shared: int
    barriers: int  # in the code; -1 where no disassembler is there
    wide_loads: int  # of 16 bytes from global memory, likewise


def find_nvcc():
    """The compiler inside its toolkit: one on the PATH may be a wrapper that hides the headers beside it."""
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path).resolve()] if on_path else []
    for nvcc in [*candidates, Path("/usr/local/cuda/bin/nvcc")]:
        if nvcc.is_file() and (nvcc.parent.parent / "include" / "cuda_runtime.h").is_file():
            return nvcc
    return None


def compile_kernels(nvcc, source, target):
    """Compile a source for all architectures at once and read what ptxas says of each kernel."""
    include = Path(torch.__file__).parent / "include"
    command = [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--threads", "2", "-c", source, "-o", target]
    command += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{include}", "-Xptxas", "-v"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    pattern = (
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?"
        r"Used (\d+) registers(.*?)\n"
    )
    found = re.findall(pattern, result.stderr, flags=re.DOTALL)
    names = demangle([name for name, *_ in found])
    code = disassemble(target)
    rows = []
    for name, architecture, stack, spills, registers, rest in found:
        shared = re.search(r"(\d+) bytes smem", rest)
        size = int(shared.group(1)) if shared else 0
        counts = code.get((name, architecture), (-1, -1))
        rows.append(Kernel(names[name], architecture, int(registers), int(stack), int(spills), size, *counts))
    return rows


def disassemble(target):
    """(kernel, architecture) -> its barriers and 16-byte loads; by the tool that comes with triton."""
    if CUOBJDUMP is None:
        return {}
    text = subprocess.run([CUOBJDUMP, "-sass", target], capture_output=True, text=True, check=True).stdout
    code = {}
    for part in re.split(r"\n\s*arch = ", text)[1:]:
        architecture = re.match(r"sm_(\d+)", part).group(1)
        for function in part.split("Function : ")[1:]:
            name = function.split(maxsplit=1)[0]
            loads = re.findall(r"LDG\.E[.\w]*\.128|LDGSTS[.\w]*\.128", function)
            code[name, architecture] = function.count("BAR.SYNC"), len(loads)
    return code


def moves_rows(name):
    """Whether a kernel of the solver steps is the one for aligned rows, and a disassembler has been there."""
    step = re.match(r"picard_\w+<\w+, (\d+)|multisecant_\w+<.*?(\d+)>", name)
    return CUOBJDUMP is not None and step is not None and int(step.group(1) or step.group(2)) > 1


def print_table(rows):
    print(f"{'kernel':<64}{'sm':>4}{'registers':>11}{'stack':>7}{'spills':>8}{'shared':>8}{'BAR':>5}{'LDG.128':>9}")
    for row in sorted(rows):
        print(f"{row.name:<64}{row.architecture:>4}{row.registers:>11}{row.stack:>7}{row.spills:>8}{row.shared:>8}"
              f"{row.barriers:>5}{row.wide_loads:>9}")  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_without_spills(source, tmp_path):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no CUDA toolkit was found")
    rows = compile_kernels(nvcc, source, tmp_path / "kernel.o")
    print_table(rows)
    assert {row.architecture for row in rows} == set(ARCHITECTURES)
    assert len(rows) >= 4 * len(ARCHITECTURES)  # two dtypes, with and without aligned rows
    for row in rows:
        assert row.stack == row.spills == 0, row
        assert row.shared <= STATIC_SHARED_LIMIT, row
        assert row.registers * THREADS <= REGISTERS_OF_A_BLOCK, row
        assert row.barriers <= MAX_BARRIERS, row
        if moves_rows(row.name):
            assert row.wide_loads, row


if __name__ == "__main__":
    compiler = find_nvcc() or sys.exit("no CUDA toolkit was found")
    with tempfile.TemporaryDirectory() as folder:
        print_table([row for source in SOURCES for row in compile_kernels(compiler, source, Path(folder, "kernel.o"))])
