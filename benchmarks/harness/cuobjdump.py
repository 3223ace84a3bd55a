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
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from deqfast import _extension


def find_cuobjdump() -> Path | None:
    """Path of the tool; None if this triton does not include it."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return tool if tool and tool.is_file() else None


CUOBJDUMP = find_cuobjdump()
THREADS = 256  # of a block of the steps
STEPS = ("picard_", "multisecant_")  # kernels whose order of loads is examined


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


@dataclass(frozen=True, order=True)
class CompiledKernel:
    """A kernel of the extension on one architecture.

    registers: per thread. stack: bytes per thread, which include spilled registers. shared: bytes per block. barriers:
    instructions in its code. wide_loads, wide_stores: instructions for 16 bytes of global memory. short_stores: those
    for two bytes. flights, for steps of the solvers: bytes per thread of loads from global memory that are under
    way at the same time. They are in the order of the code, and one load of each has 16 bytes.
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
    flights: list[int]

    @property
    def in_flight(self) -> list[int]:
        """Bytes of each flight per multiprocessor of sm_90: 65536 registers, 2048 threads, 227 KiB of shared memory.

        If blocks of 512 threads fit, a single one has as many as two of 256.
        """
        registers = -(-self.registers // 8) * 8 * THREADS  # allocated in units of eight
        blocks = min(65536 // registers, 2048 // THREADS, 227 * 1024 // (self.shared + 1024))
        return [blocks * THREADS * flight for flight in self.flights]


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
    found = read_once(path.read_bytes(), lambda: [astuple(kernel) for kernel in _disassemble(str(path))])
    return [CompiledKernel(*kernel) for kernel in found]


def _disassemble(path: str) -> list[CompiledKernel]:
    usage, (instructions, flights) = resources(path), _instructions(path)
    names = demangle(sorted({name for name, _ in usage}))
    if len(set(names.values())) < len(names):
        raise RuntimeError("two kernels of the CUDA extension have one name")
    found = []
    for key, (registers, stack, shared) in usage.items():
        barriers, loads, stores, short_stores = (of_kind[key] for of_kind in instructions)
        counts = registers, stack, shared, barriers, loads, stores, short_stores
        found.append(CompiledKernel(names[key[0]], key[1], *counts, flights[key]))
    return sorted(found)


def resources(path: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(mangled name, "sm_90") -> registers, stack, shared memory."""
    usage, architecture, name = {}, "", ""
    for line in _dump("--dump-resource-usage", path):
        if line.startswith("arch = "):
            architecture = line.split()[-1]
        elif match := re.match(r" Function (\w+):", line):
            name = match.group(1)
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            usage[name, architecture] = registers, stack, shared
    return usage


def _instructions(path: str) -> tuple[list[Counter[tuple[str, str]]], dict[tuple[str, str], list[int]]]:
    """Number of each kind of instruction of ``CompiledKernel``, and flights, by mangled name and architecture."""
    kinds = ("BAR.SYNC", r"LDG\.E[.\w]*\.128|LDGSTS[.\w]*\.128", r"STG\.E[.\w]*\.128", r"STG\.E[.\w]*\.U16")
    patterns = [re.compile(kind) for kind in kinds]
    counts: list[Counter[tuple[str, str]]] = [Counter() for _ in kinds]
    architecture, name = "", ""
    flights: dict[tuple[str, str], list[int]] = {}
    reader: Loads | None = None
    for line in _dump("-sass", path):
        if reader is not None and (reader.loading or "LDG" in line):
            reader.see(line)
        if "BAR.SYNC" in line or ".128" in line or ".U16" in line:
            for pattern, count in zip(patterns, counts, strict=True):
                count[name, architecture] += bool(pattern.search(line))
        elif line.startswith("arch = "):
            architecture = line.split()[-1]
        elif "Function : " in line:
            name = line.split()[-1]
            reader = Loads() if any(step in name for step in STEPS) else None
            flights[name, architecture] = reader.flights if reader else []
    return counts, flights


class Loads:
    """Loads from global memory under way, at each line of a kernel's code, regardless of branches.

    An instruction that names a register of a load waits for it, and for those issued before it. When none is left, a
    flight has ended.
    """

    def __init__(self) -> None:
        self.loading: list[tuple[range, int]] = []  # registers and bytes of each load, in the order of issue
        self.flights: list[int] = []
        self.most = 0

    def see(self, line: str) -> None:
        """Read the next line."""
        code, load = line.partition(";")[0], _LOAD.search(line)
        named = {int(register) for register in _REGISTER.findall(code[load.end() :] if load else code)}
        for i in reversed(range(len(self.loading))):
            if not named.isdisjoint(self.loading[i][0]):
                del self.loading[: i + 1]
                break
        if load:
            size, first = {"U8": 1, "U16": 2, "64": 8, "128": 16}.get(load[1], 4), int(load[2])
            self.loading.append((range(first, first + max(1, size // 4)), size))
            if any(size == 16 for _, size in self.loading):
                self.most = max(self.most, sum(size for _, size in self.loading))
        elif self.most and not self.loading:
            self.flights.append(self.most)
            self.most = 0


_LOAD = re.compile(r"LDG\.E(?:\.\w+)*?(?:\.(U8|U16|64|128))?(?:\.CONSTANT)? R(\d+),")
_REGISTER = re.compile(r"\bR(\d+)\b")


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
    rows = [asdict(one) | {"flights": f"{max(one.in_flight, default=0) / 1024:.0f} KB in flight"} for one in kernels]
    print(tabulate(rows, headers="keys", tablefmt="plain"))


if __name__ == "__main__":
    main()
