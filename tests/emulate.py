"""CUDA kernels on the CPU: their results, and whether a barrier, fence or wait is missing.

``load("picard_step")`` rewrites the few places in csrc/cuda/picard_step_cuda.cu that are not C++: launches, shared
variables, assembly. It compiles the result with the headers in emulation/, and registers its kernels as CPU kernels of
the ops ``torch.ops.deqfast_emulated``. They run on emulation/machine.cpp, which describes the emulation.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import deqfast.ops  # noqa: F401  (defines the schemas)

ROOT = Path(__file__).resolve().parents[1]
SHIMS = Path(__file__).with_name("emulation")
BUILT = ROOT / "build" / "emulated"
TORCH = Path(torch.__file__).parent
HOOKS = ("distinguish-volatile=1", "instrument-func-entry-exit=0")  # which calls the compiler inserts
NAMESPACE = "deqfast_emulated"
COMPILER = shutil.which("g++")
_library = torch.library.Library(NAMESPACE, "DEF")
_defined: set[str] = set()


def translate(source: str) -> str:
    """Translate CUDA C++ to C++."""
    # name<...><<<grid, threads, shared, stream>>>(arguments);
    launch = re.compile(r"(\w+(?:<[^;{}()]*?>)?)<<<([^;]*?)>>>\(([^;]*?)\);", re.DOTALL)

    def launched(match: re.Match[str]) -> str:
        kernel, configuration, arguments = match.groups()
        parts = _split(configuration)
        grid, threads, shared = (*parts[:2], parts[2] if len(parts) > 2 else "0")
        body = f"[&] UNCHECKED {{ {kernel}({arguments}); }}"
        return f'emulation::launch("{kernel}", {grid}, {threads}, {shared}, false, {body});'

    source = launch.sub(launched, source)
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"auto* \2 = static_cast<\1*>(emulation::dynamic_shared());",
        source,
    )
    # asm("instruction" : : "constraint"(operand), ... : "memory");
    assembly = re.compile(r'\basm(?: volatile)?\(\s*("[^"]*")\s*(?:::|:\s*:)\s*([^;]*?):\s*"memory"\s*\);')

    def instruction(match: re.Match[str]) -> str:
        operands = [re.sub(r'^"\w+"', "uint64_t", part) for part in _split(match[2]) if part]
        return f"emulation::ptx({match[1]}, {{{', '.join(operands)}}});"

    source = assembly.sub(instruction, source)
    source = source.replace("reinterpret_cast<", "checked_cast<")
    source = source.replace("torch::stable::accelerator::DeviceGuard", "emulation::DeviceGuard")
    return re.sub(
        r"__shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([^;]+?) (\w+)((?:\[[^\]]+\])*);",
        r"typedef \1 \2_in_shared\3; static const char \2_key = 0; "
        r"auto& \2 = *static_cast<\2_in_shared*>(emulation::shared(&\2_key, sizeof(\2_in_shared)));",
        source,
    ).replace("STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA", f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU")


def _split(text: str) -> list[str]:
    """Split the arguments of a call at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _define(source: str) -> None:
    for op in re.findall(r'm\.impl\("(\w+)"', source):
        if op not in _defined:
            schema = str(getattr(torch.ops.deqfast, op).default._schema)
            _library.define(schema.partition("::")[2])
            _defined.add(op)


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Build and register the kernels of csrc/cuda/`name`_cuda.cu."""
    return build(ROOT / f"csrc/cuda/{name}_cuda.cu")


@functools.cache
def sources() -> dict[str, str]:
    """Stem of the CUDA source of each op."""
    files = [(file.name.removesuffix("_cuda.cu"), file.read_text()) for file in (ROOT / "csrc/cuda").glob("*_cuda.cu")]
    return {op: name for name, text in files for op in re.findall(r'm\.impl\("(\w+)"', text)}


def op(name: str) -> Callable[..., Any]:
    """The emulated form of an op."""
    load(sources()[name])
    return getattr(torch.ops.deqfast_emulated, name)


def build(path: Path) -> ctypes.CDLL:
    """Build and register the kernels of any CUDA source."""
    machine()  # the kernels call its functions
    sources = {f"cuda/{file.name}": translate(file.read_text()) for file in (path, *(ROOT / "csrc/cuda").glob("*.cuh"))}
    _define(sources[f"cuda/{path.name}"])
    flags = ["-O1", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{TORCH / 'include'}"]
    flags += ["-fsanitize=thread", *(f"--param=tsan-{name}" for name in HOOKS)]
    return ctypes.CDLL(str(_built(f"cuda/{path.name}", sources, flags)))


@functools.cache
def machine() -> ctypes.CDLL:
    """Library of the emulated GPU, on which all kernels run."""
    library = _built("machine.cpp", {"machine.cpp": (SHIMS / "machine.cpp").read_text()}, ["-O2"])
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _built(name: str, sources: dict[str, str], flags: list[str]) -> Path:
    """Library of a source, built once for all processes: the file's name is a hash of everything it is made of."""
    flags = ["-std=c++17", "-w", "-fPIC", f"-I{SHIMS}", *flags]
    folders = (ROOT / "csrc/common", SHIMS)
    used = {str(file): file.read_text() for folder in folders for file in folder.glob("*.h")}
    made_of = [name, sorted((sources | used).items()), torch.__version__, COMPILER, flags]
    target = BUILT / f"{Path(name).stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as temporary:
            folder = Path(temporary)
            (folder / "cuda").mkdir()
            (folder / "common").symlink_to(ROOT / "csrc/common")
            for file, text in sources.items():
                (folder / file).write_text(text)
            code, own = folder / "code.o", folder / target.name
            _run([*flags, "-c", "-x", "c++", str(folder / name), "-o", str(code)])
            _run(["-shared", str(code), "-o", str(own), f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"])
            own.replace(target)
    return target


def _run(arguments: list[str]) -> None:
    result = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


ORDERS = (0, 1, 2, 3)  # order in which threads resume: first come first, last come first, and two random orders


@contextmanager
def order(number: int) -> Iterator[None]:
    """Resume threads in this order of ORDERS, in all loaded kernels, which share one machine."""
    machine().emulation_set_order(number)
    try:
        yield
    finally:
        machine().emulation_set_order(0)


def set_device(processors: int, shared_memory: int) -> None:
    """Set the number of multiprocessors, and the most bytes of shared memory per block."""
    machine().emulation_set_device(processors, shared_memory)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def launches() -> int:
    """Number of kernels launched so far."""
    count = machine().emulation_launches
    count.restype = ctypes.c_uint64
    return count()
