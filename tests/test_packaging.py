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
TOP_LEVEL = FOLDERS | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CITATION.cff"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is under version control, so that no build touches the checkout."""
    target = tmp_path_factory.mktemp("source") / "deqfast"
    for name in TOP_LEVEL:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, target / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(path, target / name)
    return target


def run(*command, cwd=None, **environment):
    environment = os.environ | environment
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(*pip, source, DEQFAST_BUILD="none")
    return next(out.glob("*.whl"))


def modules(folder, package):
    return {f"{package}/{path.name}" for path in folder.glob("*.py")}


def test_wheel_contains_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"deqfast/py.typed"}
    for folder in [ROOT / "deqfast", *(p for p in (ROOT / "deqfast").rglob("*") if p.is_dir())]:
        expected |= modules(folder, folder.relative_to(ROOT).as_posix())
    expected |= modules(ROOT / "kernels", "deqfast/kernels")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert len(expected) > 15
    assert expected <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"deqfast"}


def test_sdist_contains_the_sources(source, tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, DEQFAST_BUILD="none")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    inside = {name.split("/", 1)[1] for name in names if "/" in name}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert len(sources) > 5
    assert sources | {"kernels/__init__.py", "LICENSE", "setup.py"} <= inside


def test_works_without_the_extension(wheel, tmp_path):
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, wheel)
    script = (
        # An editable install of the checkout would lend its extension to this copy.
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
        "import torch, deqfast, pathlib\n"
        "assert 'torchmetrics' not in sys.modules and deqfast.NeuralCollapse and 'torchmetrics' in sys.modules\n"
        "assert pathlib.Path(deqfast.__file__).is_relative_to(sys.argv[1]), deqfast.__file__\n"
        "import deqfast.kernels\n"
        "print(deqfast.backends()['cpp'].reason, deqfast.backends()['cuda'].reason, sep='\\n')\n"
        "x = torch.randn(4, 8)\n"
        "_, solution = deqfast.DEQBlock(deqfast.LinearCell(8))(x, return_solution=True)\n"
        "assert bool(solution.converged.all())\n"
        "try:\n"
        "    deqfast.DEQBlock(deqfast.LinearCell(8), kernel='cpp')(x)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    printed = run(sys.executable, "-c", script, str(tmp_path), cwd=tmp_path, PYTHONPATH=str(tmp_path)).splitlines()
    for reason, name in zip(printed, ("_C_cpu", "_C_cuda"), strict=False):
        assert reason.startswith(f"deqfast.{name} was not built") and "DEQFAST_BUILD=none" in reason
    assert len(printed) == 3 and "kernel='cpp' is not available" in printed[2] and printed[0] in printed[2]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DEQFAST_BUILD": "gpu"}, "DEQFAST_BUILD must be auto, cpu, cuda or none, got 'gpu'"),
        ({"DEQFAST_BUILD": "cpu", "CXX": "no-such-compiler"}, "no-such-compiler was not found: .* DEQFAST_BUILD=none"),
    ],
)
def test_a_build_that_cannot_be_is_an_error(source, variables, message):
    command, environment = [sys.executable, "setup.py", "--version"], os.environ | variables
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode != 0 and re.search(message, result.stderr)


def test_the_import_does_not_take_the_compiler_along():
    """torch._dynamo, which takes seconds."""
    assert run(sys.executable, "-c", "import sys, deqfast; print('torch._dynamo' in sys.modules)").strip() == "False"


@pytest.mark.parametrize(
    ("mode", "gpu", "architectures", "reason"),
    [
        ("auto", False, "", "no GPU is visible (DEQFAST_BUILD=cuda builds them without one)"),
        ("auto", False, "9.0", None),
        ("auto", True, "", None),
        ("cuda", False, "", None),
        ("cpu", True, "9.0", "DEQFAST_BUILD=cpu"),
    ],
)
def test_cuda_kernels_are_built_where_they_will_be_used(monkeypatch, tmp_path, mode, gpu, architectures, reason):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("DEQFAST_BUILD", mode)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    assert setup["why_not_cuda"](tmp_path) == reason
    monkeypatch.setattr(torch.version, "cuda", None)
    assert setup["why_not_cuda"](tmp_path) == (
        reason if mode == "cpu" else "the installed torch was built without CUDA"
    )


@pytest.mark.tier("full")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only on x86-64 the kernels ask for AVX2")
def test_a_processor_without_avx2_is_served_by_torch():
    script = (
        "import torch, deqfast\n"
        "print(deqfast.backends()['cpp'].reason)\n"
        "solution = deqfast.solve(lambda z: torch.cos(z), torch.zeros(2, 3))\n"
        "assert solution.converged.all()\n"
    )
    printed = run(sys.executable, "-c", script, ATEN_CPU_CAPABILITY="default")
    assert printed.strip() == "deqfast._C_cpu needs a processor with AVX2, and torch finds 'DEFAULT' here"


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("capability", "absent", "name"),
    [("avx2", "", "_C_cpu"), ("avx512", "", "_C_cpu_avx512"), ("avx512", "_C_cpu_avx512", "_C_cpu")],
)
def test_the_cpu_object_is_that_of_the_instructions(capability, absent, name):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("needs a processor with AVX-512")
    script = (
        "import sys\n"
        f"sys.modules['deqfast.{absent}'] = None\n"
        "import torch, deqfast\n"
        "from deqfast import _extension\n"
        "solution = deqfast.solve(torch.cos, torch.zeros(2, 33, dtype=torch.float64), kernel='cpp')\n"
        "print(_extension.cpp_module.__name__, solution.converged.all().item())\n"
    )
    assert run(sys.executable, "-c", script, ATEN_CPU_CAPABILITY=capability).split() == [f"deqfast.{name}", "True"]


def test_top_level_is_the_fixed_one():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL
