"""MODEL of what 1, 8 and 64 GPUs would do with MDEQ on ImageNet and on a data set of the internet's size. Not measured.

    python benchmarks/internet_scale.py --markdown benchmarks/results/internet_scale.md

internet_model.py says what the model is and where its inputs come from. The same model, given the copy and product
rates of this machine, is compared with small steps measured here: that takes about 20 seconds, and --no-check leaves it
out; all else is the same in every run.

Rows of the record: sections internet scale (model), (inputs) and (check); `gain` is the rate over torchdeq's, `shares`
are of the step, `epoch_s` and `internet_s` seconds for ImageNet and for the larger data set once.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mdeq
import torch
from harness.files import write_text
from harness.maps import NEVER, Contraction
from harness.record import RESULTS, Row, joined, write_record
from harness.timing import in_turns
from internet_model import ADJOINTS, Counts, Inputs, Machine, Side, Work, count, flat, h200, sides, step, unflat
from torch.nn import functional as F

import deqfast

SECTION, INPUTS, CHECK = (f"internet scale ({part})" for part in ("model", "inputs", "check"))
GPUS = (1, 8, 64)
EFFICIENCIES = (0.3, 0.45, 0.6)


def input_rows(given: Machine | Inputs) -> list[Row]:
    return [
        {"section": INPUTS, "model": True, "case": field.name, "provider": "model", "value": getattr(given, field.name),
         **field.metadata} for field in fields(given)
    ]  # fmt: skip


def rows_of(machine: Machine, inputs: Inputs, sizes: Iterable[mdeq.Size] = mdeq.SIZES) -> Iterator[Row]:
    """MODEL rows: every size, gradient, solver and number of GPUs, torchdeq's before ours."""
    for size in sizes:
        counts = count(size, inputs.batch)
        for adjoint in ADJOINTS:
            for theirs, ours in sides(inputs):
                for gpus in GPUS:
                    peer = row_of(machine, inputs, size, counts, theirs, adjoint, gpus)
                    own = row_of(machine, inputs, size, counts, ours, adjoint, gpus)
                    own["gain"] = peer["ms"] / own["ms"]
                    yield from (peer, own)


def row_of(
    machine: Machine, inputs: Inputs, size: mdeq.Size, counts: Counts, side: Side, adjoint: str, gpus: int
) -> Row:
    def rate(machine: Machine) -> float:
        return gpus * counts.batch / step(machine, inputs, counts, side, adjoint, gpus).seconds

    found = step(machine, inputs, counts, side, adjoint, gpus)
    parts = ("f", "solver", "gradient", "optimizer", "all_reduce")
    return {
        "section": SECTION, "model": True, "case": f"{size.name}, {adjoint}, {side.solver}", "size": size.name,
        "adjoint": adjoint, "solver": side.solver, "provider": side.provider, "gpus": gpus, "batch": counts.batch,
        "dim": counts.dim, "parameters": counts.parameters, "f_gflop_per_image": counts.f.flops / counts.batch / 1e9,
        "ms": 1e3 * found.seconds, "images_per_second": rate(machine),
        "images_per_second_by_efficiency": {f"{e:g}": rate(replace(machine, efficiency=e)) for e in EFFICIENCIES},
        "shares": {name: getattr(found, name) / found.seconds for name in parts}, "bound": found.bound,
        "f_compute_share": found.compute_share, "peak_bytes": found.memory, "fits": found.memory <= machine.memory,
        "epoch_s": inputs.imagenet / rate(machine), "internet_s": inputs.internet / rate(machine),
    }  # fmt: skip


CHECK_SIZE = mdeq.Size("small MDEQ", (16, 32, 64, 128), (8, 16, 32, 64), image=128, classes=10)
CHECK_BATCH, CHECK_EVALUATIONS, CHECK_ROUNDS, CHECK_SECONDS, PRODUCT = 4, 8, 7, 15.0, 1024
ALONE = "f of the solves"  # an element-wise one


def fitted(machine: Machine, work: Work, seconds: float) -> Machine:
    """With the efficiency at which `work` takes `seconds`; between 1 % and 200 % of the product's rate."""
    low, high = 0.01, 2.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        slower = work.seconds(replace(machine, efficiency=middle)) > seconds
        low, high = (middle, high) if slower else (low, middle)
    return replace(machine, efficiency=low)


def check_calls(size: mdeq.Size, batch: int) -> dict[str, Callable[[], Any]]:
    """What is measured on this CPU: f, its product with a vector, a solve without f's work, and training steps."""
    torch.manual_seed(0)
    network = mdeq.Network(size)
    images, labels = torch.randn(batch, 3, size.image, size.image), torch.zeros(batch, dtype=torch.long)
    solver = deqfast.Anderson(NEVER, CHECK_EVALUATIONS, history_dtype=torch.bfloat16)
    broyden = deqfast.Broyden(NEVER, CHECK_EVALUATIONS, history=CHECK_EVALUATIONS - 2)  # keeps pairs, as on a GPU
    start = torch.zeros(batch, size.dim)
    with torch.no_grad():
        f = flat(network.cell, size, network.stem(images), torch.float32)
    variable = start.clone().requires_grad_()
    value, contraction = f(variable), Contraction(batch, size.dim)

    def train(block: deqfast.DEQBlock) -> None:
        network.zero_grad()
        state = block(network.stem(images), z0=unflat(start, size))
        F.cross_entropy(network.classify(state), labels).backward()

    def step_of(adjoint: Any) -> Callable[[], None]:
        return functools.partial(train, deqfast.DEQBlock(network.cell, solver, adjoint))

    return {
        "f": torch.no_grad()(lambda: f(start)),
        "product with a vector": lambda: torch.autograd.grad(value, variable, start, retain_graph=True),
        "solve, anderson m=6 bf16": lambda: deqfast.solve(contraction, start, solver),
        "solve, broyden": lambda: deqfast.solve(contraction, start, broyden),
        ALONE: lambda: [contraction(start) for _ in range(CHECK_EVALUATIONS)],
        "step, implicit": step_of(deqfast.Implicit(solver)),
        "step, jfb": step_of("jfb"),
    }


def check_rows(threads: int, size: mdeq.Size = CHECK_SIZE, batch: int = CHECK_BATCH) -> list[Row]:
    """The model of small steps on this CPU beside their measured times, all taken in turns."""
    torch.set_num_threads(threads)
    source, a, b = torch.randn(16 << 20), torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    target = source.clone()
    rates = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = in_turns(rates | check_calls(size, batch), rounds=CHECK_ROUNDS, seconds=CHECK_SECONDS)
    measured = {name: statistics.median(seconds) for name, seconds in times.items()}
    alone = measured.pop(ALONE)
    measured = {name: seconds - alone * name.startswith("solve") for name, seconds in measured.items()}
    copy_rate, product_rate = 2 * source.nbytes / measured.pop("copy"), 2 * PRODUCT**3 / measured.pop("product")
    assumed = Machine("this CPU", copy_rate, product_rate, rates_from="measured in turns with the parts")
    counts = count(size, batch, torch.float32)
    best = fitted(assumed, counts.f, measured["f"])
    models = {"assumed": check_model(assumed, counts), "fitted": check_model(best, counts)}
    shared = {
        "section": CHECK, "model": True, "provider": "deqfast", "batch": batch, "dim": size.dim,
        "dtype": "float32", "threads": threads, "copy_rate": copy_rate, "product_rate": product_rate,
        "fitted_efficiency": best.efficiency,
    }  # fmt: skip
    return [
        shared | {"case": name, "ms": 1e3 * seconds}
        | {f"{kind}_ms": 1e3 * model[name] for kind, model in models.items()}
        | {f"{kind}_over_measured": model[name] / seconds for kind, model in models.items()}
        for name, seconds in measured.items()
    ]  # fmt: skip


def check_model(machine: Machine, counts: Counts) -> dict[str, float]:
    """Seconds of what ``check_calls`` measures; the steps there end before the optimizer."""
    inputs = replace(Inputs(), forward_evaluations=CHECK_EVALUATIONS, backward_evaluations=CHECK_EVALUATIONS)
    state_bytes = counts.batch * counts.dim * inputs.state_bytes
    ours = [own for _, own in sides(inputs)]
    found = {"f": counts.f.seconds(machine), "product with a vector": counts.vjp.seconds(machine)}
    for side in ours:
        passes = side.solve_passes(CHECK_EVALUATIONS)
        found[f"solve, {side.solver}"] = passes * state_bytes / machine.copy_rate
    for adjoint in ADJOINTS:
        parts = step(machine, inputs, counts, ours[0], adjoint, 1)
        found[f"step, {adjoint}"] = parts.seconds - parts.optimizer
    return found


def table(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    """Markdown."""
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(x) + " |" for x in lines)]


def span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def percent(row: Row, *names: str) -> str:
    return f"{sum(row['shares'][name] for name in names):.0%}"


def gain(row: Row) -> str:
    return f"{row['gain']:.2f}x" if "gain" in row else ""


def markdown(machine: Machine, inputs: Inputs, rows: list[Row]) -> str:
    """The rows as text; every table says that it is a model."""
    modelled = [row for row in rows if row["section"] == SECTION]
    one = [row for row in modelled if row["gpus"] == 1]
    checks = [row for row in rows if row["section"] == CHECK]
    text = [
        "# Model: MDEQ at the size of the internet",
        "",
        f"**Nothing here was measured on a GPU.** A model of training on {machine.name} GPUs: every operation takes "
        "the longer of its bytes at the copy rate and its FLOPs at a share of a matrix product's rate; launches, host "
        "waits and reading images are left out on both sides. "
        f"{inputs.forward_evaluations} evaluations forward, {inputs.backward_evaluations} backward (implicit), "
        f"{inputs.batch} images per GPU, f in bf16, state in fp32. Copy {machine.copy_rate / 1e12:.3g} TB/s and "
        f"product {machine.product_rate / 1e12:.3g} TFLOP/s are {machine.rates_from}.",
        *table(["input", "value", "", "source"],
               ([f"`{row['case']}`", row["value"] if isinstance(row["value"], str) else f"{row['value']:,.10g}",
                 row["unit"], row["source"]] for row in rows if row["section"] == INPUTS)),
        *networks(one),
        "", "## Model: one GPU",
        *table(["model of", "library", "ms per step", "images/s", "x torchdeq", "solver", "f", "rest", "memory",
                "bound by"],
               ([row["case"], row["provider"], f"{row['ms']:.0f}", f"{row['images_per_second']:.0f}", gain(row),
                 percent(row, "solver"), percent(row, "f"), percent(row, "gradient", "optimizer", "all_reduce"),
                 f"{row['peak_bytes'] / 1e9:.1f} GB" + ("" if row["fits"] else " (does not fit)"), row["bound"]]
                for row in one)),
        *many(modelled, inputs),
        *(check_text(checks) if checks else []),
    ]  # fmt: skip
    return "\n".join(text) + "\n"


def networks(rows: list[Row]) -> list[str]:
    """What was counted of f."""
    first = {row["size"]: row for row in rows}
    return [
        *table(["model of", "state of an image", "parameters", "GFLOP per image and evaluation"],
               ([name, f"{row['dim']:,}", f"{row['parameters'] / 1e6:.1f} M", f"{row['f_gflop_per_image']:.1f}"]
                for name, row in first.items())),
        "", "Counted from the layers of benchmarks/mdeq.py. The paper's Table 2: 18, 63 and 81 million parameters.",
    ]  # fmt: skip


def many(rows: list[Row], inputs: Inputs) -> list[str]:
    """1, 8 and 64 GPUs side by side, a line for each case and library."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["provider"]), []).append(row)
    low, high = (f"{e:g}" for e in (min(EFFICIENCIES), max(EFFICIENCIES)))
    names = [f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS]
    return [
        "", "## Model: 1, 8 and 64 GPUs",
        *table(["model of", "library", *(f"images/s, {name}" for name in names),
                f"{names[-1]}, if f reaches {float(low):.0%} to {float(high):.0%}", "all-reduce",
                *(f"epoch, {name}" for name in names)],
               ([case, provider, *(f"{row['images_per_second']:,.0f}" for row in group),
                 "{:,.0f} to {:,.0f}".format(*(group[-1]["images_per_second_by_efficiency"][e] for e in (low, high))),
                 f"{group[-1]['shares']['all_reduce']:.1%}", *(span(row["epoch_s"]) for row in group)]
                for (case, provider), group in grouped.items())),
        "", "The all-reduce is the share of the step on the most GPUs; it is not overlapped: the gradient of a network "
        "that is one cell is complete only at the end of the backward pass.",
        "", f"## Model: {inputs.internet / 1e9:g} billion images, each once",
        *table(["model of", "library", *names],
               ([case, provider, *(span(row["internet_s"]) for row in group)]
                for (case, provider), group in grouped.items())),
    ]  # fmt: skip


def check_text(rows: list[Row]) -> list[str]:
    first = rows[0]
    return [
        "", "## The same model on this CPU, beside measured times",
        "", f"A small MDEQ of {first['dim']:,} elements, {first['batch']} images, {CHECK_EVALUATIONS} evaluations each "
        f"way, fp32, {first['threads']} threads. Measured in turns: copy {first['copy_rate'] / 1e9:.1f} GB/s, product "
        f"{first['product_rate'] / 1e9:.0f} GFLOP/s. Fitted: with the efficiency at which the model of f takes the "
        f"measured time, {first['fitted_efficiency']:.0%}. A solve is without f.",
        *table(["model of", "measured ms", "model ms, assumed", "model ms, fitted", "assumed / measured",
                "fitted / measured"],
               ([row["case"], f"{row['ms']:.2f}", f"{row['assumed_ms']:.2f}", f"{row['fitted_ms']:.2f}",
                 f"{row['assumed_over_measured']:.2f}", f"{row['fitted_over_measured']:.2f}"] for row in rows)),
    ]  # fmt: skip


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write; an existing one is replaced (default: "
                        "results/internet_scale.json beside this script, with --no-check none)")  # fmt: skip
    parser.add_argument("--markdown", type=Path, help="write the tables to this file instead of printing them")
    parser.add_argument("--no-check", action="store_true", help="leave out what is measured on this CPU")
    parser.add_argument("--threads", type=int, default=2, help="of the check (%(default)s)")
    parser.add_argument("--remark", help="what else is to be known of the machine, kept in the file")
    found = parser.parse_args(given)
    if found.json is None and not found.no_check:
        found.json = RESULTS / "internet_scale.json"
    if found.threads < 1:
        parser.error(f"--threads {found.threads}: from 1 on")
    for path in (found.json, found.markdown):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path.resolve().parent} is not a folder")
    return found


def main(given: list[str] | None = None) -> None:
    found = arguments(given)
    machine, inputs = h200(RESULTS / "h200.json"), Inputs()
    rows = [*input_rows(machine), *input_rows(inputs), *rows_of(machine, inputs)]
    rows += [] if found.no_check else check_rows(found.threads)
    if found.json is not None:
        unchecked = "--no-check: nothing was measured" if found.no_check else None
        write_record(found.json, rows, remark=joined(unchecked, found.remark))
    text = markdown(machine, inputs, rows)
    if found.markdown is None:
        print(text)
    else:
        write_text(found.markdown, text)
        print(found.markdown)


if __name__ == "__main__":
    main()
