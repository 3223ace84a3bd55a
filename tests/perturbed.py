#!/usr/bin/env python
"""The tests with the rounding of other processors: other kernels of torch, oneDNN and MKL, threads and random numbers.

Rounding differs between processors, and a tolerance that was read off one of them fails on another. Each perturbation
is a run of pytest with other environment variables. Perturbations that this processor does not support are skipped and
reported. A table at the end lists the failures and their perturbations. The exit status is 1 if there are any.

    python tests/perturbed.py                        # the suite without emulated and interpreted kernels
    python tests/perturbed.py --only mkl seed -- tests/test_solve.py -k broyden
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
REST = ["tests", "-k", "not emulated and not triton"]


def every_perturbation(instructions: set[str]) -> list[tuple[str, dict[str, str], str]]:
    """Name, environment of the run, and the reason to skip it, if any. Each changes one setting; the first changes
    none.

    A setting needs instructions of the processor, or changes nothing if the processor lacks those that it leaves out.
    """
    no_mkl = "" if torch.backends.mkl.is_available() else "torch was built without MKL"
    no_onednn = "" if torch.backends.mkldnn.is_available() else "torch was built without oneDNN"
    one_core = "" if (os.cpu_count() or 1) > 1 else "this machine has one core"
    chosen: list[tuple[str, dict[str, str], str]] = [("as it comes", {}, "")]
    for name, variable, absent, value, needs, leaves_out in (
        ("aten", "ATEN_CPU_CAPABILITY", "", "default", "", ""),
        ("aten", "ATEN_CPU_CAPABILITY", "", "avx2", "avx2", "avx512f"),
        ("aten", "ATEN_CPU_CAPABILITY", "", "avx512", "avx512f", ""),
        ("onednn", "ONEDNN_MAX_CPU_ISA", no_onednn, "SSE41", "", ""),
        ("onednn", "ONEDNN_MAX_CPU_ISA", no_onednn, "AVX2", "avx2", "avx512f"),
        ("onednn", "ONEDNN_MAX_CPU_ISA", no_onednn, "AVX512_CORE", "avx512bw", "avx512_bf16"),
        ("onednn", "ONEDNN_MAX_CPU_ISA", no_onednn, "AVX512_CORE_AMX", "amx_tile", ""),
        ("mkl", "MKL_CBWR", no_mkl, "COMPATIBLE", "", ""),
        ("mkl", "MKL_CBWR", no_mkl, "AVX2", "avx2", ""),
        ("mkl", "MKL_CBWR", no_mkl, "AVX512", "avx512f", ""),
        ("products", "DEQFAST_TEST_PRODUCTS", "", "1", "", ""),
        ("threads", "DEQFAST_TEST_THREADS", one_core, "2", "", ""),
        *(("seed", "DEQFAST_TEST_SEED", "", str(seed), "", "") for seed in (1, 2, 3)),
    ):
        if needs not in {"", *instructions}:
            absent = absent or f"this processor has no {needs}"
        if leaves_out not in {"", *instructions}:
            absent = absent or f"without {leaves_out} it is as it comes"
        chosen.append((f"{name} {value}", {variable: value}, absent))
    return chosen


def instructions() -> set[str]:
    """Names of the extensions of this processor, as Linux spells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def run(environment: dict[str, str], selection: list[str]) -> tuple[set[str], str]:
    """Run pytest; return the failed tests, and the summary at its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *selection]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, capture_output=True, check=False)
    if done.returncode > 1:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    *lines, last = done.stdout.strip().splitlines()
    bad = {line.partition(" - ")[0].partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))}
    return bad, last.strip("= ")


def main() -> int:
    runs = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = every_perturbation(instructions())
    names = ", ".join(name for name, *_ in chosen)
    runs.add_argument("--only", nargs="+", default=[""], metavar="NAME", help=f"of {names}, or their starts")
    runs.add_argument("selection", nargs="*", default=REST, help="arguments of pytest, after a --")
    given = runs.parse_args()
    chosen = [each for each in chosen if each[0].startswith(tuple(given.only))]
    if not chosen:
        runs.error(f"--only must be among {names}, got {' '.join(given.only)}")
    failures = defaultdict(list)
    for i, (name, environment, absent) in enumerate(chosen):
        label = f"[{i + 1}/{len(chosen)}] {name}"
        if absent:
            print(f"{label}: skipped, {absent}", flush=True)
            continue
        print(f"{label}: ...", flush=True)
        bad, summary = run(environment, given.selection)
        print(f"{label}: {summary}", *sorted(bad), sep="\n    ", flush=True)
        for test in bad:
            failures[test].append(name)
    for test, under in sorted(failures.items()):
        print(f"| {test} | {', '.join(under)} |")
    print(f"{len(failures)} tests failed under some perturbation" if failures else "nothing failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
