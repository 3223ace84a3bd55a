"""Fixtures of all tests: kernels, devices, poisoned memory; and a header with the tested versions and kernels."""

import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that wait leave the core to other workers

from interpreter import INTERPRETED

# isort: split
import emulate
import pytest
import torch

import deqfast
from deqfast import _extension
from deqfast.ops import choose_kernel

pytest_plugins = ["tiers"]

REQUIRED = list(filter(None, os.environ.get("DEQFAST_REQUIRE", "").split(",")))  # kernels without which nothing runs

# Nearly all tensors here are tiny: a second thread would only wait for the first, and for long if cores are shared.
# Tests that depend on the number of threads set it.
torch.set_num_threads(int(os.environ.get("DEQFAST_TEST_THREADS", "1")))

# Set by tests/perturbed.py: another seed also shifts the seeds that tests name.
if SEED := int(os.environ.get("DEQFAST_TEST_SEED", "0")):
    seed_of_torch = torch.manual_seed
    torch.manual_seed = lambda seed: seed_of_torch(seed + 1000 * SEED)
if "DEQFAST_TEST_PRODUCTS" in os.environ:
    import products  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the suite in two processes if no tests are named; -n, --pdb and --trace decide otherwise.

    Not in `addopts`: benchmarks must have the machine for themselves, and for a few tests the workers cost more than
    they save.
    """
    option = config.option
    whole = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    parallel = config.pluginmanager.hasplugin("xdist") and option.numprocesses is None
    if whole and parallel and not (option.usepdb or option.trace):
        option.numprocesses, option.dist = 2, "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes both sides of a select in numpy, which warns about the side that is not taken.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    config.addinivalue_line("filterwarnings", "ignore:.* encountered in reduce:RuntimeWarning:numpy")


def pytest_sessionstart() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of commands in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for tests of Ctrl-C, and their processes
    absent = {name: deqfast.backends().get(name, "no such kernel") for name in REQUIRED}
    if absent := {name: str(state) for name, state in absent.items() if not state or isinstance(state, str)}:
        pytest.exit(f"DEQFAST_REQUIRE={','.join(REQUIRED)}: not available: {absent}", returncode=4)
    if not deqfast.backends()["cpp"]:  # a warning that comes once comes here, so that no test gets it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choose_kernel("auto", torch.device("cpu"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let inductor precompile both headers of a compiled solve, not only the first: a third less time for each code.

    Only in the workers of xdist, which run many tests: the import takes seconds.
    """
    if hasattr(session.config, "workerinput"):
        from torch._inductor import codecache

        first = codecache._get_cpp_wrapper_header

        def both(device: str, aot_mode: bool = False) -> str:
            header = first(device, aot_mode)
            return header if aot_mode else f"{header}>\n#include <torch/csrc/inductor/cpp_prefix.h"

        codecache._get_cpp_wrapper_header = both


def _version(name: str) -> str:
    try:
        return __import__(name).__version__
    except ImportError as error:
        return f"absent ({error})"


def pytest_report_header() -> list[str]:
    extensions = {"_C_cpu": _extension.cpp_module, "_C_cuda": _extension.cuda_module}
    loaded = [Path(module.__file__).name for module in extensions.values() if module is not None]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    package = Path(deqfast.__file__).parent
    return [
        f"deqfast {deqfast.__version__} from {package}; extensions: {', '.join(loaded) or 'none'}",
        "kernels: " + "; ".join(f"{name}: {state}" for name, state in deqfast.backends().items()),
        f"triton {_version('triton')} {'interpreted' if INTERPRETED else 'compiled'}; torch {torch.__version__}; "
        f"numpy {_version('numpy')}; device {device}; {torch.get_num_threads()} threads",
    ]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set convolutions on a GPU to float32; torch's default is TF32. Tests of TF32 enable it again."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads for this test only."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def skip_unless(kernel: str) -> None:
    available = deqfast.backends()[kernel]
    if not available:
        pytest.skip(f"kernel {kernel}: {available.reason}")


def device_of(kernel: str) -> str:
    return "cuda" if kernel == "cuda" or (kernel == "triton" and not INTERPRETED) else "cpu"


@pytest.fixture(params=["torch", "cpp", "triton", "cuda"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Every kernel; one that is not available skips with its reason. Parametrise indirectly for some of them."""
    skip_unless(request.param)
    return request.param


@pytest.fixture
def cpp_kernels() -> None:
    """For tests that name the CPU kernels: skip with the reason if there are none."""
    skip_unless("cpp")


@pytest.fixture
def device(kernel: str) -> str:
    """Device on which `kernel` runs."""
    return device_of(kernel)


@dataclass(frozen=True)
class Implementation:
    """Implementation of the registered ops: `device`, and its form of an op."""

    name: str
    device: str

    def op(self, op: str):
        if self.name == "emulated":
            return emulate.op(op)
        return getattr(torch.ops.deqfast, f"{op}_triton" if self.name == "triton" else op)


@pytest.fixture(params=["cpp", "triton", "cuda", "emulated"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Every implementation of the registered ops, the CUDA kernels also under emulation."""
    if request.param != "emulated":
        skip_unless(request.param)
    elif emulate.COMPILER is None:
        pytest.skip("no g++ was found")
    return Implementation(request.param, device_of(request.param))


@pytest.fixture
def large_device() -> Iterator[None]:
    """An emulated GPU on which several blocks share a long row."""
    if emulate.COMPILER is not None:
        emulate.set_device(processors=132, shared_memory=227 * 1024)
    yield
    if emulate.COMPILER is not None:
        emulate.set_device(processors=4, shared_memory=99 * 1024)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed each test, so that its numbers do not depend on the tests before it, which differ between workers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Reset dynamo, so that compilation does not depend on the tests before, which differ between workers.

    If dynamo gave up a function once, it stays uncompiled in this process. Dynamo does so for a module's forward within
    a transform with any backend except "eager". ``fullgraph=True`` of another block then fails.
    """
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import would take seconds
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill memory that is allocated without a value with NaN, or the largest integers, so that reading it shows.

    Not for tests of compiled code, for which torch would generate other code.
    """
    # Memory kept from an earlier history would hold numbers.
    monkeypatch.setattr(deqfast.ops.memory, "SMALLEST", sys.maxsize)
    before = torch.are_deterministic_algorithms_enabled()
    if request.path.name not in ("test_compile.py", "test_compiled.py"):
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
