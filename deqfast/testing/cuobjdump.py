"""The code of the compiled CUDA kernels: what each asks of a GPU, read with the disassembler that comes with triton.

python -m deqfast.testing.cuobjdump    prints a table of the built extension
"""

from __future__ import annotations

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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from .. import _extension


def find_cuobjdump() -> Path | None:
    """Path of the tool; None where this triton does not bring it."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return tool if tool and tool.is_file() else None


CUOBJDUMP = find_cuobjdump()


class Unavailable(Exception):
    """No compiled kernels can be looked at here, for the reason given."""


def read_once(code: bytes, read: Callable[[], Any]) -> Any:
    """What `read` finds in this compiled code, as JSON holds it: code that several processes look at is read once.

    It is kept in the folder that DEQFAST_DISASSEMBLED names, under the hash of the code and the tools; without one it
    is not kept.
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

    registers: per thread; stack: bytes per thread, in which spilled registers lie; shared: bytes per block; barriers,
    wide_loads, wide_stores, short_stores: instructions in its code, of the latter those that load or store 16 bytes of
    global memory, and those that store two.
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
    """{name: as it is written in the source, without namespaces and parameters}; as it is without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None:
        return dict(zip(names, names, strict=True))
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    noise = r"^void |deqfast::|\(anonymous namespace\)::|\(bool\)|\([^()]*Params.*"
    return dict(zip(names, (re.sub(noise, "", line) for line in text.splitlines()), strict=True))


def cuda_kernels() -> list[CompiledKernel]:
    """The kernels of the built extension, for every architecture it was built for; takes 30 s. Raises Unavailable."""
    if _extension.cuda_module is None:
        raise Unavailable(f"no CUDA kernels: {_extension.cuda_reason}")
    if CUOBJDUMP is None or shutil.which("c++filt") is None:
        raise Unavailable("no cuobjdump of triton's, or no c++filt")
    path = Path(str(_extension.cuda_module.__file__))
    found = read_once(path.read_bytes(), lambda: [astuple(kernel) for kernel in _disassemble(str(path))])
    return [CompiledKernel(*kernel) for kernel in found]


def _disassemble(path: str) -> list[CompiledKernel]:
    usage, instructions = _resources(path), _instructions(path)
    names = demangle(sorted({name for name, _ in usage}))
    if len(set(names.values())) < len(names):
        raise RuntimeError("two kernels of the CUDA extension have one name")
    return sorted(
        CompiledKernel(names[name], architecture, *values, *(of_kind[name, architecture] for of_kind in instructions))
        for (name, architecture), values in usage.items()
    )


def _resources(path: str) -> dict[tuple[str, str], tuple[int, int, int]]:
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


def _instructions(path: str) -> list[Counter[tuple[str, str]]]:
    """Instructions in the code by mangled name and architecture: for each kind of ``CompiledKernel`` a count."""
    kinds = ("BAR.SYNC", r"LDG\.E[.\w]*\.128|LDGSTS[.\w]*\.128", r"STG\.E[.\w]*\.128", r"STG\.E[.\w]*\.U16")
    patterns = [re.compile(kind) for kind in kinds]
    counts: list[Counter[tuple[str, str]]] = [Counter() for _ in kinds]
    architecture, name = "", ""
    for line in _dump("-sass", path):
        if "BAR.SYNC" in line or ".128" in line or ".U16" in line:
            for pattern, count in zip(patterns, counts, strict=True):
                count[name, architecture] += bool(pattern.search(line))
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
    try:
        kernels = cuda_kernels()
    except Unavailable as reason:
        sys.exit(str(reason))
    print(
        f"{'kernel':<64}{'on':>6}{'registers':>11}{'stack':>7}{'shared':>8}{'BAR':>5}{'LDG.128':>9}{'STG.128':>9}{'STG.U16':>9}"
    )
    for kernel in kernels:
        print(
            f"{kernel.name:<64}{kernel.architecture:>6}{kernel.registers:>11}{kernel.stack:>7}{kernel.shared:>8}"
            f"{kernel.barriers:>5}{kernel.wide_loads:>9}{kernel.wide_stores:>9}{kernel.short_stores:>9}"
        )


if __name__ == "__main__":
    main()
