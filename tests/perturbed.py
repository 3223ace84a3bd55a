#!/usr/bin/env python
"""The tests as other processors compute: under other kernels of torch, oneDNN and MKL, threads and random numbers.

Rounding differs from processor to processor, and a tolerance that was read off one of them fails on another. Each
perturbation is a run of pytest with other environment variables; what this processor does not have is skipped, and
said to be. A table ends the output: what failed, and under which perturbation. The exit status is 1 if anything did.

    python tests/perturbed.py                        # the suite but for emulated and interpreted kernels
    python tests/perturbed.py --only mkl seed -- tests/test_solve.py -k broyden
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
REST = ["tests", "-k", "not emulated and not triton and not of_the_cuda_kernels"]
MKL = torch.backends.mkl.is_available()
ONEDNN = torch.backends.mkldnn.is_available()


@dataclass(frozen=True)
class Perturbation:
    """Environment of a run.

    needs: the instructions that the processor must have; above: those without which nothing changes, being what the
    setting leaves out; absent: why it cannot be had at all.
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    above: str = ""
    absent: str = ""

    def reason_to_skip(self, instructions: set[str]) -> str:
        if self.absent:
            return self.absent
        if self.needs not in {"", *instructions}:
            return f"this processor has no {self.needs}"
        return f"without {self.above} it is as it comes" if self.above not in {"", *instructions} else ""


def every_perturbation() -> list[Perturbation]:
    """One setting moved at a time; the first is none."""
    no_mkl, no_onednn = "" if MKL else "torch was built without MKL", "" if ONEDNN else "torch was built without oneDNN"
    found = [Perturbation("as it comes")]
    for value, needs, above in (("default", "", ""), ("avx2", "avx2", "avx512f"), ("avx512", "avx512f", "")):
        found.append(Perturbation(f"aten {value}", {"ATEN_CPU_CAPABILITY": value}, needs, above))
    for value, needs, above in (
        ("SSE41", "", ""),
        ("AVX2", "avx2", "avx512f"),
        ("AVX512_CORE", "avx512bw", "avx512_bf16"),
        ("AVX512_CORE_AMX", "amx_tile", ""),
    ):
        found.append(Perturbation(f"onednn {value}", {"ONEDNN_MAX_CPU_ISA": value}, needs, above, no_onednn))
    for value, needs in (("COMPATIBLE", ""), ("AVX2", "avx2"), ("AVX512", "avx512f")):
        found.append(Perturbation(f"mkl {value}", {"MKL_CBWR": value}, needs, absent=no_mkl))
    one_core = "" if (os.cpu_count() or 1) > 1 else "this machine has one core"
    found.append(Perturbation("threads 2", {"DEQFAST_TEST_THREADS": "2"}, absent=one_core))
    found += [Perturbation(f"seed {seed}", {"DEQFAST_TEST_SEED": str(seed)}) for seed in (1, 2, 3)]
    return found


def instructions() -> set[str]:
    """Names of the extensions of this processor, as Linux spells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def run(perturbation: Perturbation, selection: list[str], report: Path) -> tuple[set[str], str]:
    """The tests that failed, and what the run says of itself at its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *selection]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | perturbation.environment, text=True, capture_output=True, check=False
    )
    if done.returncode > 1 or not report.exists():
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    cases = ElementTree.parse(report).iter("testcase")
    bad = {f"{c.get('classname')}::{c.get('name')}" for c in cases if {child.tag for child in c} & {"failure", "error"}}
    return bad, done.stdout.strip().splitlines()[-1].strip("= ")


def main() -> int:
    chosen, runs = (
        every_perturbation(),
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter),
    )
    names = [each.name for each in chosen]
    runs.add_argument("--only", nargs="+", default=[""], metavar="NAME", help=f"of {', '.join(names)}, or their starts")
    runs.add_argument("selection", nargs="*", default=REST, help="what pytest is given, behind a --")
    given = runs.parse_args()
    chosen = [each for each in chosen if each.name.startswith(tuple(given.only))]
    if not chosen:
        runs.error(f"--only must be among {', '.join(names)}, got {' '.join(given.only)}")
    failures, has = defaultdict(list), instructions()
    with tempfile.TemporaryDirectory() as folder:
        for i, each in enumerate(chosen):
            label = f"[{i + 1}/{len(chosen)}] {each.name}"
            if reason := each.reason_to_skip(has):
                print(f"{label}: skipped, {reason}", flush=True)
                continue
            print(f"{label}: ...", flush=True)
            bad, told = run(each, given.selection, Path(folder) / f"{i}.xml")
            print(f"{label}: {told}", *sorted(bad), sep="\n    ", flush=True)
            for test in bad:
                failures[test].append(each.name)
    for test, under in sorted(failures.items()):
        print(f"| {test} | {', '.join(under)} |")
    print(f"{len(failures)} tests failed under some perturbation" if failures else "nothing failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
