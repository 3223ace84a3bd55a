"""Runs on a borrowed GPU: phases of limited time, in calls that continue one another. benchmarks/gpu.sh starts it.

Each phase is a process, so that a hanging kernel costs no other phase. It keeps its rows while it measures, and
continues after them in a later call. After every phase the archive is written again: it has all records, logs and the
table.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recording

ROOT = Path(__file__).resolve().parents[2]
BROUGHT = ROOT / "build" / "gpu"  # what `bring` makes: lib, objects of the extension; site, packages
ARCHIVE, TABLE, STATE = "gpu.tar.gz", "table.txt", "state.json"
PYTHON = "3.12"  # of the other machine
PACKAGES = (
    "msgspec torchdeq jaxopt pytest pytest-timeout pytest-xdist execnet pluggy iniconfig hypothesis sortedcontainers "
)
PACKAGES += "torchmetrics lightning-utilities einops setuptools ninja"
MOST_SECONDS = 560  # of a call
RESERVE = 6  # seconds of a call for its last archive
FEWEST_SECONDS = 10  # with fewer left, a phase is not begun
DECISION = "-> "  # begins a line of a log that the table repeats
FAULT = f"{DECISION}FAULT"
SAME = ("gpu", "torch", "triton", "commit")  # of all rows of a record


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    seconds: its budget in one call. decides: what depends on its result. work: "module:function" of a function from
    ``phases.Place``, and the words after further colons, to an iterator of lists of rows; or a command, in which
    "python" is this interpreter. always: it runs in every call, for instance because a machine is new.
    """

    name: str
    seconds: int
    decides: str
    work: str | tuple[str, ...]
    always: bool = False

    def command(self, out: Path, small: bool) -> list[str]:
        if isinstance(self.work, str):
            record = os.path.relpath(out / f"{self.name}.json", ROOT)
            words = [sys.executable, "benchmarks/gpu.py", "--work", self.work, "--record", record]
            return [*words, *["--dry-run"] * small]
        return [sys.executable if word == "python" else word for word in self.work]


@dataclass
class Session:
    """Calls of one run, which share a folder.

    state: phase -> {"outcome": "ok", "failed" or "stopped", "seconds", "tries"}, of the phases that were begun.
    """

    phases: Sequence[Phase]
    out: Path
    small: bool = False

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / STATE
        self.state: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def call(self, seconds: float, only: Sequence[str] = ()) -> int:
        """Run unfinished phases, those with the fewest tries first; status 1 if one failed or found a fault."""
        deadline = time.monotonic() + min(seconds, MOST_SECONDS) - RESERVE
        chosen = [
            phase for phase in self.phases if phase.name in only or phase.always or not (only or self.is_done(phase))
        ]
        begun = []
        try:
            for phase in sorted(chosen, key=lambda phase: (not phase.always, self.tries(phase))):
                left = deadline - time.monotonic()
                if left >= FEWEST_SECONDS:
                    begun.append(phase.name)
                    self.run(phase, min(phase.seconds, left))
        finally:
            self.archive()
            print("\n" + self.table(), flush=True)
        log = "".join(self.log(name) for name in begun)
        return int(FAULT in log or any(self.state[name]["outcome"] == "failed" for name in begun))

    def tries(self, phase: Phase) -> int:
        count: int = self.state.get(phase.name, {}).get("tries", 0)
        return count

    def is_done(self, phase: Phase) -> bool:
        return not phase.always and self.state.get(phase.name, {}).get("outcome") == "ok"

    def run(self, phase: Phase, seconds: float) -> None:
        """Run a phase for at most this long, and keep its log and outcome."""
        started, path = time.monotonic(), self.out / f"{phase.name}.log"
        entry = self.state.setdefault(phase.name, {"tries": 0})
        entry |= {"outcome": "stopped", "tries": entry["tries"] + 1}
        print(f"{phase.name}, at most {seconds:.0f} s", flush=True)
        paths = [os.environ.get("PYTHONPATH", ""), *[str(BROUGHT / "site")] * (not self.small)]
        with path.open("a" if phase.always else "w") as log:
            process = subprocess.Popen(
                phase.command(self.out, self.small),
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                entry["outcome"] = "failed" if process.wait(seconds) else "ok"
            except subprocess.TimeoutExpired:
                pass
            finally:
                end(process)
                entry["seconds"] = round(time.monotonic() - started, 1)
                recording.write_bytes(self.out / STATE, json.dumps(self.state, indent=1).encode())
        failed = entry["outcome"] == "failed"
        lines = self.log(phase.name).splitlines()[-15:] if failed else self.decisions(phase.name)
        print(*(f"  {line}" for line in lines), sep="\n", flush=True)
        self.archive()

    def log(self, name: str) -> str:
        path = self.out / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def decisions(self, name: str) -> list[str]:
        return [line for line in self.log(name).splitlines() if line.startswith(DECISION)]

    def table(self) -> str:
        """What became of every phase, and the decisions."""
        lines = []
        for phase in self.phases:
            entry = self.state.get(phase.name, {"outcome": "not begun", "seconds": 0})
            lines.append(
                f"{phase.name:12} {entry['outcome']:9} {entry['seconds']:6.1f} of {phase.seconds:3} s  {phase.decides}"
            )
        for phase in self.phases:
            lines += [f"{phase.name} {line}" for line in dict.fromkeys(self.decisions(phase.name))]
        left = [phase.name for phase in self.phases if not (phase.always or self.is_done(phase))]
        return "\n".join([*lines, f"left: {', '.join(left)}: call it again" if left else "all phases are finished"])

    def archive(self) -> None:
        """Write the table, and replace the archive in one step; $OUT gets a copy, if it is set."""
        recording.write_bytes(self.out / TABLE, f"{self.table()}\n".encode())
        part = self.out / f"{ARCHIVE}.part"
        with tarfile.open(part, "w:gz") as archive:
            for path in sorted(self.out.iterdir()):
                if path.is_file() and not path.name.startswith(ARCHIVE):
                    archive.add(path, path.name)
        os.replace(part, self.out / ARCHIVE)
        if (there := os.environ.get("OUT")) and Path(there).resolve() != self.out.resolve():
            shutil.copy(self.out / ARCHIVE, there)


def end(process: subprocess.Popen[Any]) -> None:
    """End a phase and all that it has started; a kernel may not let it end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def work(target: str, record: Path, small: bool) -> None:
    """Run a function of rows. The rows so far are in FILE.part, and a later try continues after them."""
    from .phases import Place, conclusions
    from .record import write_record

    module, name, *names = target.split(":")
    function = getattr(importlib.import_module(module), name)
    part = record.with_name(record.name + ".part")
    device = "cpu" if small else "cuda"
    place = Place(device, small, earlier_rows(part, device))
    write_record(part, place.rows, place.device, "the phase has not come to its end")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped phase states its conclusions
    try:
        for rows in function(place, *names):
            place.rows += rows
            write_record(part, place.rows, place.device, "the phase has not come to its end")
            for row in rows:
                print(json.dumps(row), flush=True)
    finally:
        for line in conclusions(place.rows):
            print(DECISION + line, flush=True)
    write_record(part, place.rows, place.device)
    os.replace(part, record)


def earlier_rows(part: Path, device: str) -> list[dict[str, Any]]:
    """Rows of a try that was stopped. Those of another GPU or other code stay in a file of their own."""
    from .record import machine, read_record

    if not part.is_file():
        return []
    record, now = read_record(part), machine(device)
    if all(record["machine"][name] == now[name] for name in SAME):
        rows: list[dict[str, Any]] = record["rows"]
        return rows
    name = part.name.partition(".")[0]
    names = (part.with_name(f"{name}-{number}.json") for number in itertools.count(1))
    part.rename(next(path for path in names if not path.exists()))
    return []


def bring() -> None:
    """Build the extension for sm_90, install packages without their own requirements, and copy clones of models.

    Needs nvcc, a C++ compiler and a package registry, but no GPU.
    """
    environment = os.environ | {"DEQFAST_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0"}
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", str(BROUGHT / "lib")]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--no-compile"]
    install += ["--only-binary", ":all:", "--python-version", PYTHON, "--target", str(BROUGHT / "site")]
    subprocess.run([*install, *PACKAGES.split()], check=True)
    if clones := os.environ.get("DEQFAST_MODELS"):
        shutil.copytree(clones, BROUGHT / "models", dirs_exist_ok=True)
    size = sum(path.stat().st_size for path in BROUGHT.rglob("*") if path.is_file())
    print(f"take these along: {BROUGHT.relative_to(ROOT)} ({size >> 20} MB)")
