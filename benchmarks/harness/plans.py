"""Phases of the runs on a GPU, in their order. A new one is a line here and a function of ``phases``, or a command."""

from __future__ import annotations

import os
from importlib.util import find_spec

from .session import Phase

Words = tuple[str, ...]
OPS: Words = tuple(f"tests/test_{name}.py" for name in ("steps", "fc", "norm_act", "shine", "neural_collapse_ops"))
OPS += ("tests/kernels/test_launch.py",)
# On the device: not emulated, and without what needs no GPU.
ELSEWHERE = ("csrc", "kernels/test_aot.py", "experiments", "benchmarks", "test_packaging.py", "test_gpu_script.py")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
EXTENSION = Phase("extension", 170, "whether the kernels are those of this csrc", "harness.phases:extension", True)


def required_tests(small: bool) -> Words:
    """Beginning of a command of tests, which fail where they would be skipped without a GPU."""
    required = "DEQFAST_REQUIRE=" + ("" if small else "cuda,triton")
    return ("env", required, "python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider")


def short(small: bool) -> tuple[Phase, ...]:
    """What has never run on a GPU, and decides most, comes first."""
    study: Words = ("python", "experiments/cifar_lt.py", "--dataset", "shapes", "--preset", "quick", "--model", "deq")
    study += ("--out", "runs/gpu-study", "--resume", "--kernel")
    study += ("torch", "--device", "cpu") if small else ("triton",)
    if small:
        study += ("--width", "2", "--epochs", "1", "--n-majority", "10", "--test-images", "10")
    bits = (*required_tests(small), "tests/test_captured_calls.py", "-k", "bits")
    return (
        EXTENSION,
        Phase("probe", 40, "what launches, graphs and passes of a loop cost: the design", "harness.phases:probe"),
        Phase("bits", 40, "go or no-go of the loop on the device: bits of the eager loop", bits),
        Phase("loops", 60, "the targets of a solve in one launch", "harness.phases:loops"),
        Phase("whole", 80, "the targets of a training step in one launch", "harness.phases:whole_steps"),
        Phase("together", 80, "the target of sixteen studies on one GPU", "harness.phases:together"),
        Phase("triton", 90, "whether the study runs on Triton to its end", study),
        Phase("rivals", 90, "claims about a loop by hand and JAX", "harness.phases:rivals"),
        Phase("models", 90, "claims about published models", "harness.phases:published"),
    )


def kernels(small: bool) -> tuple[Phase, ...]:
    """After `short`."""
    return (
        EXTENSION,
        Phase("profile", 40, "kernels of a training step, and when the device is busy", "harness.phases:profile"),
        Phase("missing", 60, "limits: rows of fc and of cells", "harness.phases:sections:fc:cells"),
        Phase("floors", 60, "which step is far from its bytes", "harness.phases:sections:ops"),
        Phase("solves", 120, "the other solves", "harness.phases:sections:solves"),
        Phase("options", 120, "options, calls and metrics", "harness.phases:sections:options:calls:nc"),
    )


def layers(small: bool) -> tuple[Phase, ...]:
    """Last: what changes least since the latest records."""
    return (
        EXTENSION,
        Phase("study", 60, "the target of the study's step", "harness.phases:study"),
        Phase("compiled", 90, "claims about torchdeq under torch.compile", "harness.phases:compiled_peer"),
        Phase("training", 120, "layers compared with torchdeq", "harness.phases:sections:training"),
    )


def checks(small: bool) -> tuple[Phase, ...]:
    """The second run: tests and sanitizers."""
    pytest = required_tests(small)
    pytest += ("-n", str(min(os.cpu_count() or 1, 12))) if find_spec("xdist") and not small else ()
    chosen, ignored = "(cuda or triton) and not emulated", tuple(f"--ignore=tests/{path}" for path in ELSEWHERE)
    smoke: Words = ("env", "DEQFAST_SMOKE=1", *pytest, *OPS, "-k", chosen)
    every: Words = (*pytest, "tests", "-k", chosen.replace("triton", "triton or graphs"), *ignored)
    # Without a memory pool, so that every tensor has its own bounds.
    watch: Words = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "99")
    watch += ("--report-api-errors", "no", "--tool")
    watched: Words = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fast", *OPS)
    watched += ("-k", "cuda and not emulated")
    if small:
        smoke = every = (*pytest, "tests/test_packing.py")
        watch, watched = ("env", "-u"), smoke[2:]  # -u takes a name, as --tool does
    sanitized = {tool: (*watch, tool, *watched) for tool in SANITIZERS}
    return (
        EXTENSION,
        Phase("smoke", 90, "whether every kernel agrees with the reference", smoke),
        Phase("memcheck", 90, "whether kernels stay within their memory", sanitized["memcheck"]),
        Phase("tests", 330, "whether the tests of a GPU pass", every),
        *(Phase(tool, 80, "whether threads use shared memory rightly", sanitized[tool]) for tool in SANITIZERS[1:]),
    )


PLANS = {"short": short, "kernels": kernels, "layers": layers, "checks": checks}
