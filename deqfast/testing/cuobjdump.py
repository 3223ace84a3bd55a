"""Names of compiled CUDA kernels, and the disassembler that comes with triton."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path


def find_cuobjdump():
    """Path of the tool; None where this triton does not bring it."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec else None
    return tool if tool and tool.is_file() else None


CUOBJDUMP = find_cuobjdump()


def demangle(names):
    """{name: as it is written in the source, without namespaces and parameters}; as it is without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None:
        return dict(zip(names, names, strict=True))
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    noise = r"^void |deqfast::|\(anonymous namespace\)::|\(bool\)|\([^()]*Params.*"
    return dict(zip(names, (re.sub(noise, "", line) for line in text.splitlines()), strict=True))
