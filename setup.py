"""The extensions, and nothing else: metadata is in pyproject.toml.

DEQFAST_BUILD = auto | cpu | cuda | none. `auto` builds the CPU objects. It also builds the CUDA object if torch was
built for CUDA, an nvcc of the same major version exists, and a GPU is visible or TORCH_CUDA_ARCH_LIST is set. `cuda`
builds it without a GPU too, and fails if it cannot. `deqfast.backends()` shows what was built.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

MODE = os.environ.get("DEQFAST_BUILD", "auto")
SOURCES = (
    "norm_act_residual",
    "multisecant_step",
    "norm_act",
    "fc_fixed_point",
    "neural_collapse",
    "picard_step",
    "fc_vjp",
)
CPU_ONLY = ("broyden_step", "loop", "norm_act_residual_backward")
# Commands that need only the metadata, before the build: they do not import torch.
METADATA = {"egg_info", "dist_info"}
# The stable ABI of torch 2.11: one object works with every later torch.
MACROS = [("TORCH_TARGET_VERSION", "0x020b000000000000")]
# One pass of the compiler serves sm_80 and sm_86, a third less to compile.
ARCHITECTURES = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_80,code=sm_86",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
]
# Without gcse, which takes a third of the compile time and finds next to nothing in vector code unrolled by hand.
# Products and sums are fused across expressions: gcc does so by default, clang with this flag.
CXX_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-gcse", "-fno-gcse-after-reload", "-g0"]
CXX_FLAGS += ["-fvisibility=hidden", "-Wno-psabi"]
# Two CPU objects, for AVX2 and for AVX-512; deqfast/_extension.py loads the one that the processor can run.
X86 = platform.machine() in ("x86_64", "AMD64")
INSTRUCTIONS = {"_C_cpu": ["-march=x86-64-v3"], "_C_cpu_avx512": ["-march=x86-64-v4"]} if X86 else {"_C_cpu": []}
NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr"]
# Compile the architectures in parallel: else one core compiles the longest source when the others are done.
NVCC_THREADS = "--threads=0"
CSRC = Path(__file__).resolve().parent / "csrc"
GENERATED = CSRC.parent / "build" / "csrc"


def digest(device: str) -> str:
    """Hash of the sources and flags of the extension for "cpu" or "cuda"; the extension's `build_info` returns it."""
    folders = [*(CSRC / "common").iterdir(), *(CSRC / device).iterdir()]
    files = [file for file in folders if file.suffix in (".h", ".cpp", ".cuh", ".cu")]
    content = hashlib.sha256(repr((MACROS, CXX_FLAGS, INSTRUCTIONS, NVCC_FLAGS)).encode())
    for file in sorted([*files, CSRC / f"bindings_{device}.cpp"]):
        content.update(f"{file.relative_to(CSRC).as_posix()}\0".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def write_build_facts(without_cuda: str | None) -> None:
    """Write the headers that only the bindings include; unchanged ones keep their time, else ninja would recompile."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    for device in ("cpu", "cuda"):
        header, text = GENERATED / f"sources_{device}.h", f'#define DEQFAST_SOURCES "{digest(device)}"\n'
        if device == "cpu":
            text += f"#define DEQFAST_WITHOUT_CUDA {json.dumps(without_cuda or '')}\n"
        if not header.is_file() or header.read_text() != text:
            header.write_text(text)


def find_cuda_home() -> Path | None:
    """The toolkit that really holds the CUDA runtime: an nvcc on the PATH may be a wrapper outside it."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for candidate in [*candidates, "/usr/local/cuda"]:
        if candidate and Path(candidate, "bin/nvcc").is_file() and list(Path(candidate).glob("lib*/libcudart.so*")):
            return Path(candidate)
    return None


def why_not_cuda(cuda_home: Path | None) -> str | None:
    """Reason to leave the CUDA kernels out; None if they are built."""
    import torch

    if MODE == "cpu":
        return "DEQFAST_BUILD=cpu"
    if torch.version.cuda is None:
        return "the installed torch was built without CUDA"
    if cuda_home is None:
        return "no CUDA toolkit was found (set CUDA_HOME)"
    text = subprocess.run([cuda_home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is not None and (int(match[1]), int(match[2])) < (12, 4):
        return f"{cuda_home}/bin/nvcc is of CUDA {match[1]}.{match[2]}, and graphs with loops need 12.4"
    if match is None or match.group(1) != torch.version.cuda.split(".")[0]:
        return f"{cuda_home}/bin/nvcc is not of CUDA {torch.version.cuda.split('.')[0]}, for which torch was built"
    if MODE == "auto" and not (torch.cuda.is_available() or os.environ.get("TORCH_CUDA_ARCH_LIST")):
        return "no GPU is visible (DEQFAST_BUILD=cuda builds them without one)"
    return None


def extensions() -> dict:
    if MODE not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"DEQFAST_BUILD must be auto, cpu, cuda or none, got {MODE!r}")
    if MODE == "none" or METADATA & set(sys.argv):
        return {}
    cuda_home = find_cuda_home()
    if cuda_home is not None:
        os.environ["CUDA_HOME"] = str(cuda_home)  # read by torch's build code when it is imported
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise SystemExit(f"deqfast: the C++ compiler {compiler} was not found: install one, or set DEQFAST_BUILD=none")
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    # One object for every Python from 3.10 on; free-threaded Pythons have no limited API.
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    cpp_extension.min_supported_cpython = "0x030A0000"

    reason = why_not_cuda(cuda_home)
    if reason is not None and MODE == "cuda":
        raise SystemExit(f"DEQFAST_BUILD=cuda cannot be met: {reason}")

    class Build(BuildExtension):
        def build_extensions(self) -> None:
            write_build_facts(reason)
            self.parallel = None  # one extension after the other: they share build_temp, and ninja uses all cores
            super().build_extensions()

        def build_extension(self, ext: Extension) -> None:
            # One folder for editable installs, wheels and --inplace: ninja compiles what has changed since any of them.
            self.build_temp = str(GENERATED.parent / "objects" / ext.name)
            super().build_extension(ext)

    shared = {"include_dirs": [str(GENERATED)], "py_limited_api": limited}
    cpu_sources = [*(f"csrc/cpu/{name}.cpp" for name in (*SOURCES, *CPU_ONLY)), "csrc/bindings_cpu.cpp"]
    modules = [
        CppExtension(
            f"deqfast.{name}",
            cpu_sources,
            define_macros=MACROS,
            extra_compile_args={"cxx": [*CXX_FLAGS, *flags]},
            **shared,
        )
        for name, flags in INSTRUCTIONS.items()
    ]
    if reason is None:
        architectures = [] if os.environ.get("TORCH_CUDA_ARCH_LIST") else ARCHITECTURES
        cuda_sources = ["csrc/bindings_cuda.cpp", "csrc/cuda/while_graph.cu"]
        cuda_sources += [f"csrc/cuda/{name}_cuda.cu" for name in SOURCES]
        args = {"cxx": CXX_FLAGS, "nvcc": [*NVCC_FLAGS, NVCC_THREADS, *architectures]}
        macros = [*MACROS, ("USE_CUDA", None)]
        modules.append(
            CUDAExtension("deqfast._C_cuda", cuda_sources, define_macros=macros, extra_compile_args=args, **shared)
        )
    else:
        print(f"deqfast: building without the CUDA kernels: {reason}")
    options = {"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {}
    return {"ext_modules": modules, "cmdclass": {"build_ext": Build}, "options": options}


if __name__ == "__main__":
    setup(**extensions())
