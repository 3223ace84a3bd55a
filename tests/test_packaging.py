"""What the wheel and the sdist hold, and a life without a compiler."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"csrc", "deqfast", "kernels", "benchmarks", "experiments", "tests", "docs"}
FILES = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
TOP_LEVEL = FOLDERS | FILES
full = pytest.mark.tier("full")


def run(*command, status=0, cwd=None, **environment):
    """Output of a command, or its errors if its status is to be another than 0."""
    environment = os.environ | environment
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stderr if status else result.stdout


def python(script, *arguments, **given):
    return run(sys.executable, "-c", script, *arguments, **given)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is under version control, so that no build touches the checkout."""
    target = tmp_path_factory.mktemp("source")
    for name in TOP_LEVEL - FOLDERS:
        shutil.copy(ROOT / name, target / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return target


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(*pip, source, DEQFAST_BUILD="none")
    return next(out.glob("*.whl"))


def test_wheel_contains_every_module_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deqfast").rglob("*.py")}
    kernels = {f"deqfast/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert wheel.name.endswith("-py3-none-any.whl") and package | kernels | {"deqfast/py.typed"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"deqfast"}


def test_sdist_contains_the_sources(source, tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, DEQFAST_BUILD="none")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources | {"kernels/__init__.py", "LICENSE", "setup.py"} <= inside


def test_works_without_the_extension(wheel, tmp_path):
    """The import does not take torch's compiler along, which would take seconds."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = """
import sys  # an editable install of the checkout would lend its extension to this copy
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import torch, deqfast
assert "torch._dynamo" not in sys.modules
import deqfast.kernels, pathlib
assert "torchmetrics" not in sys.modules and deqfast.NeuralCollapse and "torchmetrics" in sys.modules
assert pathlib.Path(deqfast.__file__).is_relative_to(sys.argv[1]), deqfast.__file__
print(deqfast.backends()["cpp"].reason, deqfast.backends()["cuda"].reason, sep="\\n")
_, solution = deqfast.DEQBlock(deqfast.LinearCell(8))(torch.randn(4, 8), return_solution=True)
assert bool(solution.converged.all())
try:
    deqfast.DEQBlock(deqfast.LinearCell(8), kernel="cpp")(torch.randn(4, 8))
except RuntimeError as error:
    print(error)
"""
    cpp, cuda, error = python(script, str(tmp_path), cwd=tmp_path, PYTHONPATH=str(tmp_path)).splitlines()
    for reason, name in ((cpp, "_C_cpu"), (cuda, "_C_cuda")):
        assert reason.startswith(f"deqfast.{name} was not built") and "DEQFAST_BUILD=none" in reason
    assert "kernel='cpp' is not available" in error and cpp in error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DEQFAST_BUILD": "gpu"}, "DEQFAST_BUILD must be auto, cpu, cuda or none, got 'gpu'"),
        ({"DEQFAST_BUILD": "cpu", "CXX": "no-such-compiler"}, "no-such-compiler was not found: .* DEQFAST_BUILD=none"),
    ],
)
def test_a_build_that_cannot_be_is_an_error(source, variables, message):
    assert re.search(message, run(sys.executable, "setup.py", "--version", cwd=source, status=1, **variables))


@pytest.mark.parametrize(
    ("mode", "gpu", "architectures", "cuda", "reason"),
    [
        ("auto", False, "", "13.2", "no GPU is visible (DEQFAST_BUILD=cuda builds them without one)"),
        ("auto", False, "9.0", "13.2", None),
        ("auto", True, "", "13.2", None),
        ("cuda", False, "", "13.2", None),
        ("cuda", False, "", None, "the installed torch was built without CUDA"),
        ("cpu", True, "9.0", "13.2", "DEQFAST_BUILD=cpu"),
    ],
)
def test_cuda_kernels_are_built_where_they_will_be_used(monkeypatch, tmp_path, mode, gpu, architectures, cuda, reason):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("DEQFAST_BUILD", mode)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert runpy.run_path(str(ROOT / "setup.py"))["why_not_cuda"](tmp_path) == reason


@full
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only on x86-64 the kernels ask for AVX2")
@pytest.mark.parametrize(
    ("capability", "absent", "printed"),
    [
        ("default", "", "deqfast._C_cpu needs a processor with AVX2, and torch finds 'DEFAULT' here"),
        ("avx2", "", "deqfast._C_cpu"),
        ("avx512", "", "deqfast._C_cpu_avx512"),
        ("avx512", "_C_cpu_avx512", "deqfast._C_cpu"),
    ],
)
def test_the_cpu_object_is_that_of_the_instructions(capability, absent, printed):
    """Without AVX2 there is none, and torch solves."""
    if capability != "default" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("needs a processor with AVX-512")
    script = (
        f"import sys\nsys.modules['deqfast.{absent}'] = None\n"
        "import torch, deqfast\nfrom deqfast import _extension\n"
        "module = _extension.cpp_module\n"
        "print(module.__name__ if module else deqfast.backends()['cpp'].reason)\n"
        "kernel = 'cpp' if module else 'auto'\n"
        "assert deqfast.solve(torch.cos, torch.zeros(2, 33, dtype=torch.float64), kernel=kernel).converged.all()\n"
    )
    assert python(script, ATEN_CPU_CAPABILITY=capability).strip() == printed


def test_top_level_is_fixed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in run("git", "ls-files", cwd=ROOT).splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL
