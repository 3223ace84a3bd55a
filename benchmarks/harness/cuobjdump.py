"""Code of the compiled CUDA kernels: their resources on a GPU, read with the disassembler that comes with triton.

    PYTHONPATH=benchmarks python -m harness.cuobjdump

The table has a row for every kernel and architecture of the built extension.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from deqfast import _extension

# Kinds of instructions that ``CompiledKernel`` counts, in the order of its fields.
INSTRUCTIONS = ("BAR.SYNC", r"LDG\.E[.\w]*\.128|LDGSTS[.\w]*\.128", r"STG\.E[.\w]*\.128", r"STG\.E[.\w]*\.U16")
USAGE = re.compile(r"arch = (\S+)| Function (\w+):|  REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def cuobjdump() -> Path | None:
    """Path of the tool; None if this triton does not include it."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return tool if tool and tool.is_file() else None


CUOBJDUMP = cuobjdump()


class Unavailable(Exception):
    """Raised if no compiled kernels can be examined here, with the reason."""


def read_once(code: bytes, read: Callable[[], Any]) -> Any:
    """Result of `read` for this compiled code, as JSON stores it. Several processes read the same code only once.

    It is kept in the folder that DEQFAST_DISASSEMBLED names, under the hash of the code and the tools. Without the
    variable it is not kept.
    """
    folder = os.environ.get("DEQFAST_DISASSEMBLED")
    if not folder:
        return read()
    path = Path(folder, hashlib.sha256(str(CUOBJDUMP).encode() + code).hexdigest())
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(read()))
        own.replace(path)
    return json.loads(path.read_text())


class CompiledKernel(NamedTuple):
    """A kernel of the extension on one architecture.

    registers: per thread. stack: bytes per thread, which include spilled registers. shared: bytes per block. barriers:
    instructions in its code. wide_loads, wide_stores: instructions for 16 bytes of global memory. short_stores: those
    for two bytes.
    """

    name: str
    architecture: str
    registers: int
    stack: int
    shared: int
    barriers: int
    wide_loads: int
    wide_stores: int
    short_stores: int


def demangle(names: list[str]) -> dict[str, str]:
    """{name: its form in the source, without namespaces and parameters}; the name itself without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None:
        return dict(zip(names, names, strict=True))
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    noise = r"^void |deqfast::|\(anonymous namespace\)::|\(bool\)|\([^()]*Params.*"
    return dict(zip(names, (re.sub(noise, "", line) for line in text.splitlines()), strict=True))


def cuda_kernels() -> list[CompiledKernel]:
    """Kernels of the built extension, for every architecture it was built for; takes 30 s. Raises Unavailable."""
    if _extension.cuda_module is None:
        raise Unavailable(f"no CUDA kernels: {_extension.cuda_reason}")
    if CUOBJDUMP is None or shutil.which("c++filt") is None:
        raise Unavailable("triton's cuobjdump or c++filt is missing")
    path = Path(str(_extension.cuda_module.__file__))
    rows = read_once(path.read_bytes(), lambda: _disassemble(str(path)))
    return [CompiledKernel(*row) for row in rows]


def _disassemble(path: str) -> list[CompiledKernel]:
    usage, counts = resources(path), _instructions(path)
    names = demangle(sorted({name for name, _ in usage}))
    if len(set(names.values())) < len(names):
        raise RuntimeError("two kernels of the CUDA extension have one name")
    return sorted(
        CompiledKernel(names[name], arch, *numbers, *(counts[kind, name, arch] for kind in INSTRUCTIONS))
        for (name, arch), numbers in usage.items()
    )


def resources(path: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(mangled name, "sm_90") -> registers, stack, shared memory."""
    usage, architecture, name = {}, "", ""
    for match in filter(None, map(USAGE.match, _dump("--dump-resource-usage", path))):
        architecture, name = match[1] or architecture, match[2] or name
        if match[3]:
            registers, stack, shared = map(int, match.groups()[2:])
            usage[name, architecture] = registers, stack, shared
    return usage


def _instructions(path: str) -> Counter[tuple[str, str, str]]:
    """Number of instructions of each kind, by mangled name and architecture."""
    counts: Counter[tuple[str, str, str]] = Counter()
    architecture, name = "", ""
    for line in _dump("-sass", path):
        if "BAR.SYNC" in line or ".128" in line or ".U16" in line:
            for kind in INSTRUCTIONS:
                counts[kind, name, architecture] += bool(re.search(kind, line))
        elif line.startswith("arch = "):
            architecture = line.split()[-1]
        elif "Function : " in line:
            name = line.split()[-1]
    return counts


def _dump(option: str, path: str) -> Iterator[str]:
    """The lines that cuobjdump prints, one by one: the assembly is 350 MB."""
    command = [str(CUOBJDUMP), option, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        kernels = cuda_kernels()
    except Unavailable as reason:
        sys.exit(str(reason))
    print(tabulate([kernel._asdict() for kernel in kernels], headers="keys", tablefmt="plain"))


if __name__ == "__main__":
    main()
