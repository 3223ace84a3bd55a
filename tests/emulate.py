"""The CUDA kernels on the CPU: what their threads compute, and whether their barriers are where they must be.

``load("picard_step")`` rewrites the few places where csrc/cuda/picard_step_cuda.cu is not C++ (launches and shared
variables), compiles it against the headers in emulation/, and registers its kernels as CPU kernels of the ops
``torch.ops.deqfast_emulated``. Nothing of a GPU's timing, memory model or instruction set is emulated.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import deqfast.ops  # noqa: F401  (defines the schemas)

ROOT = Path(__file__).resolve().parents[1]
SHIMS = Path(__file__).with_name("emulation")
BUILT = ROOT / "build" / "emulated"
NAMESPACE = "deqfast_emulated"
COMPILER = shutil.which("g++")
_library = torch.library.Library(NAMESPACE, "DEF")
_defined: set[str] = set()


def translate(source: str) -> str:
    """CUDA C++ as C++."""
    # name<...><<<grid, threads, shared, stream>>>(arguments);
    launch = re.compile(r"(\w+(?:<[^;{}()]*?>)?)<<<([^;]*?)>>>\(([^;]*?)\);", re.DOTALL)

    def launched(match: re.Match[str]) -> str:
        kernel, configuration, arguments = match.groups()
        parts = _split(configuration)
        grid, threads, shared = (*parts[:2], parts[2] if len(parts) > 2 else "0")
        return f"emulation::launch({grid}, {threads}, {shared}, false, [&] {{ {kernel}({arguments}); }});"

    source = launch.sub(launched, source)
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"auto* \2 = emulation::dynamic_shared<\1>();",
        source,
    )
    source = source.replace("torch::stable::accelerator::DeviceGuard", "emulation::DeviceGuard")
    return re.sub(
        r"__shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([^;]+?) (\w+)((?:\[[^\]]+\])*);",
        r"typedef \1 \2_in_shared\3; auto& \2 = emulation::shared<\2_in_shared>(__COUNTER__);",
        source,
    ).replace("STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA", f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU")


def _split(text: str) -> list[str]:
    """The arguments of a call, at the commas outside brackets."""
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


def build(path: Path) -> ctypes.CDLL:
    """The same for any CUDA source. Built once for all processes: a file is named by all that it is made of."""
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += [f"-I{SHIMS}", f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    sources = {f"cuda/{file.name}": translate(file.read_text()) for file in (path, *(ROOT / "csrc/cuda").glob("*.cuh"))}
    used = {str(file): file.read_text() for folder in (ROOT / "csrc/common", SHIMS) for file in folder.glob("*.h")}
    made_of = [sorted((sources | used).items()), torch.__version__, COMPILER, flags]
    target = BUILT / f"{path.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    _define(sources[f"cuda/{path.name}"])
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as temporary:
            folder = Path(temporary)
            (folder / "cuda").mkdir()
            (folder / "common").symlink_to(ROOT / "csrc/common")
            for name, text in sources.items():
                (folder / name).write_text(text)
            own = folder / target.name
            source = str(folder / "cuda" / path.name)
            command = [str(COMPILER), *flags, "-x", "c++", source, "-o", str(own), *libraries]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stderr
            own.replace(target)
    return ctypes.CDLL(str(target))


ORDERS = (0, 1, 2, 3)  # in which threads are resumed: as they come, the last first, and two random orders


@contextmanager
def order(number: int) -> Iterator[None]:
    """Resume threads in this one of ORDERS, in all kernels loaded: they share one machine."""
    load("picard_step").emulation_set_order(number)
    try:
        yield
    finally:
        load("picard_step").emulation_set_order(0)


def set_device(processors: int, shared_memory: int) -> None:
    """Multiprocessors, and bytes of shared memory that a block may ask for."""
    load("picard_step").emulation_set_device(processors, shared_memory)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def launches() -> int:
    """Kernels launched so far."""
    count = load("picard_step").emulation_launches
    count.restype = ctypes.c_uint64
    return count()
