"""Phases of limited time on a GPU, in calls that continue one another.

    bash benchmarks/gpu.sh bring
    bash benchmarks/gpu.sh short --seconds 500
    bash benchmarks/gpu.sh kernels
    bash benchmarks/gpu.sh layers
    bash benchmarks/gpu.sh checks

`bring` builds what to take along, on a machine with nvcc and a package registry. `short` measures on the GPU what has
not run there and decides most, `kernels` and `layers` the rest. A machine for 15 minutes suffices for each of them. A
plan is called until all its phases are finished. `checks` has tests and sanitizers.

A phase that is stopped continues after its rows in a later call. A call without --out continues runs/gpu. The archive
there has every record, log and decision; $OUT, if set, gets a copy. To continue on another machine, unpack it into
runs/gpu. benchmarks/report.py reports the records that are copied to benchmarks/results. DEQFAST_MODELS names a folder
with the clones of the published models (build/gpu/models), DEQFAST_COMMIT the commit if git's data are absent.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.plans import PLANS
from harness.session import FEWEST_SECONDS, MOST_SECONDS, RESERVE, ROOT, Session, bring, work


def main(argv: Sequence[str] | None = None) -> int:
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__, epilog=listed(), formatter_class=lines)
    parser.add_argument("plan", nargs="?", choices=(*PLANS, "bring"), help="bring: build for sm_90, without a GPU")
    parser.add_argument("only", nargs="*", metavar="PHASE", help="only these phases, finished or not")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help=f"of this call, at most {MOST_SECONDS}")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of all calls (runs/gpu)")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on the CPU, to test the phases")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args(argv)
    if given.work:
        work(given.work, given.record, given.dry_run)
        return 0
    if given.plan == "bring":
        bring()
        return 0
    if given.plan is None:
        parser.error(f"name a plan: {', '.join(PLANS)} or bring")
    phases = PLANS[given.plan](given.dry_run)
    if unknown := set(given.only) - {phase.name for phase in phases}:
        parser.error(f"{', '.join(sorted(unknown))}: not a phase of {given.plan}")
    if not FEWEST_SECONDS + RESERVE <= given.seconds <= MOST_SECONDS:
        parser.error(f"--seconds must be from {FEWEST_SECONDS + RESERVE} to {MOST_SECONDS}, got {given.seconds:g}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return Session(phases, given.out, given.dry_run).call(given.seconds, given.only)


def listed() -> str:
    """The phases of every plan, for --help."""
    lines = []
    for name, plan in PLANS.items():
        lines += [f"{name}:", *(f"  {phase.name:12} {phase.seconds:4} s  {phase.decides}" for phase in plan(False))]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
