"""How the GPU benchmark measures: times, rows, and the file they are kept in."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.entry import Skipped
from harness.files import write_json
from harness.targets import GPU_TARGETS
from torch import Tensor

from deqfast import graphs
from deqfast.testing import ROUNDING_UNITS, accuracy

# A graph shorter than this would show the cost of launching it.
CALLS_PER_GRAPH = 20
MAX_STATES = 512


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    device: str
    kernels: tuple[str, ...]
    warmups: int
    repeats: int
    rounds: int  # of whole solves and training steps
    copy_elements: int
    gemm_size: int
    step_shapes: tuple[tuple[int, int], ...]
    windows: tuple[int, int, int]  # pairs of Anderson; of Broyden; and of Broyden's default history
    solve_shape: tuple[int, int]
    iterations: int
    fc_sizes: tuple[int, ...]
    fc_batch: int
    fc_iterations: int
    cell_shape: tuple[int, int, int, int]
    width: int
    train_batch: int
    nc_shapes: tuple[tuple[int, int, int], ...]  # (N, D, K)


FULL = Plan(
    device="cuda",
    kernels=("triton", "cuda"),
    warmups=20,
    repeats=100,
    rounds=20,
    copy_elements=1 << 28,
    gemm_size=8192,
    step_shapes=((128, 8192), (32, 65536), (128, 1024), (128, 256), (8, 65536)),
    windows=(6, 18, 20),
    solve_shape=(128, 8192),
    iterations=20,
    fc_sizes=(256, 1024),
    fc_batch=128,
    fc_iterations=30,
    cell_shape=(128, 512, 4, 4),
    width=64,
    train_batch=128,
    nc_shapes=((50_000, 512, 10), (2_000, 8192, 100)),
)

DRY = Plan(
    device="cpu",
    kernels=("cpp",),
    warmups=1,
    repeats=2,
    rounds=1,
    copy_elements=1 << 16,
    gemm_size=64,
    step_shapes=((2, 64), (2, 129)),
    windows=(3, 4, 5),
    solve_shape=(2, 256),
    iterations=20,
    fc_sizes=(16,),
    fc_batch=2,
    fc_iterations=30,
    cell_shape=(2, 16, 4, 4),
    width=8,
    train_batch=2,
    nc_shapes=((200, 16, 3),),
)


class Clock:
    """Median times in milliseconds."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.cuda = plan, plan.device == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def wall(self, run: Callable[[], Any], rounds: int) -> float:
        """From the call until the device is done, the host's work included."""
        for _ in range(min(rounds, 3)):
            run()
        times = []
        for _ in range(rounds):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def device(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Time of one of `calls`, made one after the other without the host: replayed from a CUDA graph."""
        if not self.cuda:
            return self.wall(lambda: [call() for call in calls], self.plan.repeats) / len(calls)
        calls = [*calls] * -(-CALLS_PER_GRAPH // len(calls))

        def work() -> None:
            for call in calls:
                call()

        graphs.aside(work)
        graph = graphs.capture(work, graphs.new_pool(), graphs.new_stream())
        for _ in range(self.plan.warmups):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.plan.repeats)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / len(calls)

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Memory that `run` takes beside what is allocated already."""
        if not self.cuda:
            return None
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def copies(self, nbytes: int) -> int:
        """How many buffers of `nbytes` to rotate among, so that none is still in the cache at its next turn."""
        if not self.cuda:
            return 2
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        return max(2, min(MAX_STATES, 2 * cache // max(nbytes, 1) + 2))

    def traffic(self, run: Callable[[], Any]) -> tuple[int, int] | None:
        """Kernels and copies that `run` launches, graphs as one; times that the host waits for the device.

        None where the profiler does not see them.
        """
        if not self.cuda:
            return None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.wait()
        with torch.profiler.profile(activities=kinds) as profile:
            run()
            self.wait()
        launches = waits = 0
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CPU and event.name.startswith("cu"):
                launches += any(word in event.name for word in ("Launch", "Memcpy", "Memset"))
                waits += event.name in ("cudaStreamSynchronize", "cudaEventSynchronize")
        return (launches, waits) if launches else None


class Bench:
    """The rows measured so far; written to `path` after every row, so that nothing is lost with the process."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan, self.path, self.clock = plan, path, Clock(plan)
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": []}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    @property
    def copy_rate(self) -> float | None:
        """Bytes per second, read and write counted, as measured in this run."""
        nbytes, ms = (self.find("rates", "copy", "torch", key) for key in ("bytes", "ms"))
        return 1e3 * nbytes / ms if ms else None

    @contextmanager
    def row(self, section: str, case: str, provider: str) -> Iterator[dict[str, Any]]:
        """A row to fill in; an exception becomes its `problem`, or its `skipped`."""
        row: dict[str, Any] = {"section": section, "case": case, "provider": provider}
        try:
            yield row
        except Skipped as reason:
            row["skipped"] = str(reason)
        except Exception as error:  # one failure must not cost the other rows
            lines = str(error).strip().splitlines() or [""]
            row["problem"] = f"{type(error).__name__}: {lines[0]}"
        add_floor(row, self.copy_rate)
        self.rows.append(row)
        self.write()

    def find(self, section: str, case: str, provider: str, key: str = "ms") -> Any:
        """A value measured before, or None."""
        wanted = (section, case, provider)
        rows = (row for row in self.rows if (row["section"], row["case"], row["provider"]) == wanted)
        return next((row[key] for row in rows if key in row), None)

    def write(self) -> None:
        write_json(self.path, self.data)


def add_floor(row: dict[str, Any], copy_rate: float | None) -> None:
    """What the bytes of a row take at the copy rate, and how near its time comes."""
    if copy_rate and row["case"] != "copy" and {"bytes", "ms"} <= row.keys():
        row["floor_ms"] = 1e3 * row["bytes"] / copy_rate
        row["ratio"] = row["ms"] / row["floor_ms"]


def judge_share(bench: Bench, row: dict[str, Any]) -> None:
    """Whether a kernel moves its bytes at a share of the copy rate."""
    add_floor(row, bench.copy_rate)
    judge(row, "copy share", 1 / row["ratio"] if "ratio" in row else None)


def judge(row: dict[str, Any], name: str, value: float | None) -> None:
    """Add a target of ``GPU_TARGETS`` to a row; value: in the target's unit, None if it could not be told."""
    target = GPU_TARGETS[name]
    row.setdefault("targets", []).append({"target": target.text, "met": target.met(value)})


def compare(row: dict[str, Any], peer_ms: float | None, target: str | None = None) -> None:
    """How many times faster than torchdeq a row is; target: of ``GPU_TARGETS``, that it has to reach."""
    if peer_ms and "ms" in row:
        row["gain"] = peer_ms / row["ms"]
    if target is not None:
        judge(row, target, row.get("gain"))


def check_error(
    row: dict[str, Any], actual: Tensor, plain: Tensor, exact: Tensor, units: float = ROUNDING_UNITS
) -> None:
    """Record the error and raise where it is more than twice that of plain torch and `units` roundings."""
    row["error"], allowed = accuracy(actual, plain, exact, units=units)
    if not row["error"] <= allowed:
        raise AssertionError(f"wrong: relative error {row['error']:.2e}, allowed {allowed:.2e}; not timed")
