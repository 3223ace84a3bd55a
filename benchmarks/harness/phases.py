"""Phases of the short run on a GPU: each yields the rows of a case once they are measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import deqfast
from deqfast import _extension

from . import cases, models, study_step, zoo
from . import rivals as rival
from .counters import profiled
from .entry import Skipped, fault
from .record import Row
from .session import BROUGHT, ROOT
from .solves import PEER
from .suite import SMALL_COPY, columns_of, measure
from .targets import ITERATED, TARGETS, verdicts
from .timing import ROUNDS, Copy, captured, in_turns, seconds_of

SECONDS = 1.5  # of the rounds of a case
FAULT = "FAULT"
WHILE_LIMIT = 0.020  # ms; if a pass costs more, a body should hold more iterations
# Expected before anything was measured, in ms: (section, case, provider) -> from, to.
PREDICTED = {
    ("probe", "pass of a loop with 2 kernels", "device"): (0.003, 0.008),
    ("solves", "picard-128x8192", "cuda-graph"): (0.40, 0.50),
    ("solves", "picard-fc-128x256", "cuda-graph"): (0.40, 0.50),
    ("fc", "fc-solve-128x256-fp32", "cuda"): (0.2, 0.3),
    ("rivals", "rivals-elementwise-picard-128x8192", "by-hand"): (0.2, 0.3),
    ("rivals", "rivals-elementwise-picard-128x8192", "jaxopt"): (0.4, 0.8),
    ("rivals", "rivals-elementwise-picard-128x8192", "optimistix"): (0.4, 0.8),
    ("rivals", "rivals-elementwise-picard-128x8192", "torchdeq-compiled"): (3.0, 6.0),
    ("training", "residual-anderson-jfb-32x128x4x4", "cuda"): (2.3, 2.7),
    ("whole steps", "residual-anderson-jfb-32x128x4x4", "graphed"): (1.0, 1.5),
    ("whole steps", "study, width 16, batch 32, jfb", "graphed"): (1.6, 3.0),
    ("training step", "width 64, batch 128, jfb", "deq"): (25.0, 35.0),
}


Rows = Iterator[list[Row]]


@dataclass
class Place:
    """Where a phase runs. small: tiny cases, whose times mean nothing. rows: its own so far, by all tries."""

    device: str
    small: bool
    rows: list[Row]

    @property
    def turns(self) -> dict[str, Any]:
        """Arguments of ``in_turns``."""
        return {"rounds": 2, "seconds": 0.1} if self.small else {"seconds": SECONDS}

    def has(self, section: str, case: str, provider: str | None = None) -> bool:
        """Whether an earlier try, or this one, has a row of this."""
        providers = [row["provider"] for row in self.rows if (row["section"], row["case"]) == (section, case)]
        return bool(providers) if provider is None else provider in providers

    def attempt(self, section: str, case: str, provider: str, make: Callable[[], list[Row]]) -> Rows:
        """Rows of `make`, or the fault as the provider's row; none if an earlier try has that row."""
        if self.has(section, case, provider):
            return
        try:
            rows = make()
        except Exception as error:  # one case must not cost the others their rows
            rows = [row_of(section, case, provider, **fault(error))]
        yield rows


def conclusions(rows: Sequence[Row]) -> Iterator[str]:
    """Faults, predictions next to measurements, and the targets that the rows decide."""
    for row in rows:
        key = row["section"], row["case"], row["provider"]
        if "fault" in row:
            yield f"{FAULT} {' '.join(key)}: {row['fault']}"
        if key in PREDICTED and "ms" in row:
            low, high = PREDICTED[key]
            yield f"{' '.join(key)}: {row['ms']:.4g} ms, predicted {low:g} to {high:g}"
        if "steps_per_second" in row:
            yield f"{row['case']}: {row['steps_per_second']:.4g} steps a second together, 768 before"
        if key == ("probe", "pass of a loop with 2 kernels", "device") and "ms" in row:
            far = row["ms"] > WHILE_LIMIT
            yield f"a body holds {'four iterations, or the step is captured whole' if far else 'two iterations'}"
    yield from verdicts((target for target in TARGETS if target.on_gpu), rows)


def row_of(section: str, case: str, provider: str, **columns: Any) -> Row:
    return {"section": section, "case": case, "provider": provider, **columns}


def measured(place: Place, section: str, sizes: str | tuple[str, ...] = "", without: Sequence[str] = ()) -> Rows:
    """Rows of the cases of a section whose names end with one of the sizes, without these providers."""
    copy = Copy(place.device, SMALL_COPY) if place.small else Copy(place.device)
    for case in cases.SMALL if place.small else cases.CASES:
        wanted = case.section == section and not case.full and (place.small or case.name.endswith(sizes))
        if wanted and place.device in case.devices and not place.has(case.section, case.name):
            providers = [name for name in case.providers_on(place.device) if name not in without]
            rows, _ = measure(case, providers, place.device, copy, **place.turns)
            yield [
                row_of(case.section, case.name, name, **fault(row)) if isinstance(row, Exception) else row
                for name, row in rows.items()
            ]


# The phases, which a plan of gpu.sh names, each after its helpers.


def extension(place: Place) -> Rows:
    """Use the objects brought along if they were built of these sources; else build for this GPU."""
    if place.small:
        yield [row_of("extension", "cpu", "built", sources=str(_extension.cpp_module is not None))]
        return
    current = "import deqfast._extension as built, setup; assert built.cuda_module, built.cuda_reason\n"
    current += "assert built.cuda_module.build_info()['sources'] == setup.digest('cuda'), 'built of other sources'"

    def is_current() -> bool:
        return not subprocess.run([sys.executable, "-c", current], cwd=ROOT, check=False).returncode

    how, is_right = "current", is_current()
    if not is_right and (objects := list((BROUGHT / "lib").rglob("*.so"))):
        for path in objects:
            (ROOT / "deqfast" / path.name).unlink(missing_ok=True)  # this process has the old one in its memory
            shutil.copy(path, ROOT / "deqfast")
        how, is_right = "brought along", is_current()
    if not is_right:
        how = "built here"
        arch = "{}.{}".format(*torch.cuda.get_device_capability())
        build = os.environ | {"DEQFAST_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": arch}
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, env=build, check=True)
        if not is_current():
            raise RuntimeError("the extension that was built here does not load")
    yield [row_of("extension", "cuda", how)]


def probe(place: Place) -> Rows:
    """Costs of launches, copies, waits, graphs and passes of a loop: `host` until queued, `device` until done."""
    device = place.device
    small, count = torch.zeros(128, 256, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    large, other = (torch.rand(*((2, 64) if place.small else (128, 8192)), device=device) for _ in range(2))
    yield both(place, "mul_ of 128x256", lambda: small.mul_(0.9))
    yield both(place, "addcmul of 128x8192", lambda: torch.addcmul(other, large, other))
    yield both(place, "item()", count.item)
    if device != "cuda":
        return
    pinned, event = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Event()

    def copy() -> None:
        pinned.copy_(count, non_blocking=True)

    def look(waits_after: bool = False) -> None:
        copy()
        event.record()
        if waits_after:
            event.synchronize()

    look()
    yield both(place, "4 bytes to pinned memory", copy)
    yield both(place, "event record", event.record)
    yield both(place, "event wait, idle device", event.synchronize)
    yield both(place, "4 bytes, event and wait", partial(look, waits_after=True))

    def times(number: int) -> None:
        for _ in range(number):
            small.mul_(0.9)

    for number in (1, 2, 4, 8, 16, 32, 64, 128):
        yield both(place, f"graph of {number} kernels", captured(partial(times, number)).replay)
    several = [captured(partial(times, 4)) for _ in range(10)]

    def in_turn(looks: bool) -> None:
        for graph in several:
            graph.replay()
            if looks:
                event.synchronize()
                look()

    yield both(place, "10 graphs of 4 kernels", partial(in_turn, False))
    yield both(place, "the same, with a look after each", partial(in_turn, True))
    for number in (0, 2, 8):
        yield passes(place, number, small)


def both(place: Place, case: str, call: Callable[[], Any], calls: int = 200) -> list[Row]:
    """Milliseconds of a call: `host` until it has returned, `device` until the device is done."""
    if place.has("probe", case):
        return []
    calls = 2 if place.small else calls
    times: dict[str, list[float]] = {"host": [], "device": []}
    for _ in range(5):
        for name, kept in times.items():
            kept.append(seconds_of(call, calls, place.device, waits=name == "device"))
    return [row_of("probe", case, name, **columns_of(kept)) for name, kept in times.items()]


def passes(place: Place, number: int, small: Tensor) -> list[Row]:
    """Time of one pass of a loop on the device whose body has this many small kernels, from loops of 1 and 101."""
    case, module = f"pass of a loop with {number} kernels", cast(Any, _extension.cuda_module)
    if place.has("probe", case):
        return []
    if not hasattr(module, "while_graph"):
        return [row_of("probe", case, "device", skipped="this extension has no loops")]
    left, made = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    kept, seconds = [], {}
    for length in (1, 101):

        def begin(length: int = length) -> None:
            left.fill_(length)
            made.zero_()

        def body() -> None:
            for _ in range(number):
                small.mul_(0.9)
            left.sub_(1)

        graphs = [captured(part) for part in (begin, body)]
        addresses = tuple(graph.raw_cuda_graph() for graph in graphs)
        loop = module.while_graph(addresses, ((left.data_ptr(), made.data_ptr(), 1 << 20),))
        launch = partial(module.launch_graph, loop, torch.cuda.current_stream().cuda_stream)
        launch()
        if (made.item(), left.item()) != (length, 0):
            return [row_of("probe", case, "device", fault=f"{made.item()} passes of {length}, {left.item()} left")]
        kept += [graphs, loop]
        seconds[length] = [seconds_of(launch, 50, "cuda") for _ in range(5)]
    each = [(long - short) / 100 for long, short in zip(seconds[101], seconds[1], strict=True)]
    return [row_of("probe", case, "device", **columns_of(each))]


def loops(place: Place) -> Rows:
    """Solves in one launch against eager ones, at the sizes of the targets."""
    yield from measured(
        place, "solves", (*ITERATED, "picard-fc-128x256", "anderson-m6-fc-128x256"), without=("torch", PEER)
    )


def rivals(place: Place) -> Rows:
    """Rivals at the same work, without torch.compile, at the sizes of the targets."""
    yield from measured(place, "rivals", ("8192", "128x256"), (rival.COMPILED_PEER, "compiled", "packaged"))


def compiled_peer(place: Place) -> Rows:
    """Rivals that torch.compile compiles, next to the solve in one launch. They are of section "rivals"."""
    yield from measured(place, "rivals", "128x8192", (rival.BY_HAND, *rival.JAX, "packaged", "silva-networks"))


def published(place: Place) -> Rows:
    """Training steps of published models: torchdeq's layer, ours, and ours with captured solves."""
    root = Path(os.environ.get("DEQFAST_MODELS", BROUGHT / "models"))
    for model in zoo.ROWS[2:3] if place.small else zoo.ROWS:
        make = partial(models.measure, model, root, place.device, **{"rounds": ROUNDS} | place.turns)
        yield from place.attempt(models.SECTION, model.name, models.OURS, make)
    if not place.has(models.SECTION, models.MEDIAN) and (row := models.median_row(place.rows)):
        yield [row]


def profile(place: Place) -> Rows:
    """The longest kernels of a solve, of a training step with convolutions and of the study's step."""
    by_name = {case.name: case for case in cases.CASES}
    wanted = [("picard-128x8192", "cuda"), ("picard-128x8192", "cuda-graph"), ("anderson-m6-128x8192", "cuda-graph")]
    wanted += [("residual-anderson-jfb-32x128x4x4", "cuda")]

    def make_call(name: str, provider: str) -> Callable[[], Any]:
        return by_name[name].contender(provider, place.device).call

    calls: dict[tuple[str, str], Callable[[], Callable[[], Any]]] = {key: partial(make_call, *key) for key in wanted}
    calls["study, width 64, batch 128", "deq"] = partial(study_deq_step, place, 64, 128, graphed=False)
    for (name, provider), make in {} if place.small else calls.items():
        yield from place.attempt("profile", name, provider, partial(longest_kernels, place, name, provider, make))


def longest_kernels(place: Place, case: str, provider: str, make: Callable[[], Callable[[], Any]]) -> list[Row]:
    """Row of a call, with the kernels that took the most time."""
    seen = profiled(call := make())
    if seen is None:
        raise Skipped("the profiler is not allowed to look")
    row = row_of("profile", case, provider, **columns_of(in_turns({0: call}, place.device, **place.turns)[0]))
    row |= seen.columns
    longest = sorted(seen.kernels.items(), key=lambda kernel: -kernel[1][1])[:12]
    return [row | {"busy": row["device_ms"] / row["ms_min"], "kernels": [[name, *usage] for name, usage in longest]}]


def study(place: Place) -> Rows:
    """Steps of the study's two networks."""
    sizes, seconds = ((8, 4), 0.1) if place.small else ((64, 128), 15)
    if not place.rows:
        yield study_step.measure(study_step.settings_of(*sizes, place.device), 2 if place.small else 30, seconds)


def whole_steps(place: Place) -> Rows:
    """Training steps in one launch next to eager ones: a residual layer and the study's DEQ."""
    widths = ((8, 4),) if place.small else ((16, 32), (64, 128))
    makers: dict[str, Callable[[bool], Callable[[], Any]]] = {
        "residual-anderson-jfb-32x128x4x4": partial(residual_step, place)
    }
    for width, batch in widths:
        makers[f"study, width {width}, batch {batch}, jfb"] = partial(study_deq_step, place, width, batch)
    for case, make in makers.items():
        yield from place.attempt("whole steps", case, "graphed", partial(step_rows, place, case, make))


def step_rows(place: Place, case: str, make: Callable[[bool], Callable[[], Any]]) -> list[Row]:
    """Rows of an eager step and a graphed one."""
    calls = {"eager": make(False)} | ({} if place.small else {"graphed": make(True)})
    for call in calls.values():
        for _ in range(3):  # the third is captured
            call()
    spent = in_turns(calls, place.device, **place.turns)
    return [row_of("whole steps", case, name, **columns_of(kept)) for name, kept in spent.items()]


def residual_step(place: Place, graphed: bool) -> Callable[[], Any]:
    """Step of a residual layer with JFB, whose loss is the mean square of its value."""
    shape = (2, 8, 4, 4) if place.small else (32, 128, 4, 4)
    cell = deqfast.ResidualCell(shape[1], 8 if place.small else 32).to(memory_format=torch.channels_last)
    block = deqfast.DEQBlock(cell, deqfast.Anderson(max_iter=20), warn=False).to(place.device)
    rate = torch.tensor(1e-3, device=place.device)
    optimizer = torch.optim.SGD(block.parameters(), rate, momentum=0.9, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = block(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(shape).contiguous(memory_format=torch.channels_last).to(place.device)
    return partial(deqfast.make_graphed_step(step) if graphed else step, x)


def study_deq_step(place: Place, width: int, batch: int, graphed: bool) -> Callable[[], Any]:
    """Step of the study's DEQ."""
    settings = study_step.settings_of(width, batch, place.device, eager=not graphed)
    return study_step.steppers_of(settings)["deq"].step


def together(place: Place) -> Rows:
    """Steps a second of the study's DEQ by several processes on one device, which begin together."""
    if place.rows:
        return
    count, sizes, seconds = (2, (2, 4), 0.1) if place.small else (16, (16, 32), 15.0)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes, which import torch
    spawn = get_context("spawn")
    start = spawn.Barrier(count, timeout=60)
    with ProcessPoolExecutor(count, spawn, initializer=study_step.meet_at, initargs=(start,)) as pool:
        steps = [pool.submit(study_step.steps_per_second, *sizes, place.device, seconds) for _ in range(count)]
        rates = [each.result() for each in steps]
    case = f"study, width {sizes[0]}, batch {sizes[1]}, {count} processes"
    yield [row_of("whole steps", case, "graphed", steps_per_second=sum(rates))]


def sections(place: Place, *names: str) -> Rows:
    """All cases of sections."""
    for name in names:
        yield from measured(place, name)
