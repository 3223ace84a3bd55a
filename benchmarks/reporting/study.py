"""A training step of the study's DEQ beside the explicit network's: what training_step.py has recorded."""

from __future__ import annotations

from .files import File, Results, Row
from .sources import ran
from .tables import image_by_producer
from .words import absent, digits, duration, link, listed, percent, table, times, whole

COMMAND = "python benchmarks/training_step.py --size 16x32 64x128 --threads 1 --json FILE --figure FILE"


def size(run: Row) -> str:
    return f"width {run['width']}, batch {run['batch']}"


def where(file: File, run: Row) -> list[str]:
    device = "" if run["device"] == "cpu" else f", {file.gpu}, {run['precision']}"
    return [size(run) + device, whole(run["threads"]), run["adjoint"]]


def step_table(results: Results) -> list[str]:
    header = ["size", "threads", "gradient", "explicit step", "DEQ step", "evaluations", "DEQ / explicit, time",
              "operations", "time over operations", "steps timed", "file"]  # fmt: skip
    return table(header, [step_cells(file, run) for file, run in results.runs()], text=("gradient", "file"))


def step_cells(file: File, run: Row) -> list[str]:
    explicit, deq = (run["models"][name] for name in ("explicit", "deq"))
    return [
        *where(file, run), duration(explicit["ms"]), duration(deq["ms"]), whole(deq["evaluations"]),
        times(run["times_explicit"]), times(run["flop_ratio"]), times(run["over_flop"]), whole(run["steps"]),
        link(file.name, f"results/{file.name}"),
    ]  # fmt: skip


def share_table(results: Results) -> list[str]:
    header = ["size", "threads", "gradient", "NC1-NC4 of an epoch's features", "share of an explicit epoch",
              "the pass that makes the features", "paper's trainings, explicit", "DEQ"]  # fmt: skip
    return table(header, [share_cells(file, run) for file, run in results.runs()], text=("gradient",))


def share_cells(file: File, run: Row) -> list[str]:
    metrics, hours = run["metrics"], run["paper"]["hours"]
    return [
        *where(file, run), duration(metrics["nc_ms"]), percent(metrics["nc_share"]), percent(metrics["pass_share"]),
        *(f"{digits(hours[name])} h" for name in ("explicit", "deq")),
    ]  # fmt: skip


def step_sentence(file: File) -> str:
    """What a training step costs, for README."""
    ratios, over, sizes = (
        listed(found)
        for found in (
            [times(run["times_explicit"]) for run in file.runs],
            [times(run["over_flop"]) for run in file.runs],
            [size(run) for run in file.runs],
        )
    )
    shares = listed(percent(run["metrics"]["nc_share"]) for run in file.runs)
    return (
        f"A training step of the study's DEQ takes {ratios} the explicit network's ({sizes}), which is {over} the "
        f"ratio of their floating-point operations. NC1-NC4, given the features, take {shares} of an epoch"
    )


def study_section(results: Results) -> list[str]:
    """Both tables, and the figures that training_step.py has drawn."""
    if not results.runs():
        return absent("the training step of the study's networks", COMMAND)
    commands = listed(dict.fromkeys(ran(file) for file, _ in results.runs()))
    lines = [
        f"Both networks in turns, medians; {commands}. Operations are floating-point operations, with the mean number "
        "of evaluations of the steps timed.",
        "",
        *step_table(results),
        "",
    ]
    for path in dict.fromkeys(file.path for file, _ in results.runs()):
        lines += image_by_producer(results, f"{path.stem}.png", "Stacked bars: where a training step's time goes")
    trainings = results.runs()[0][1]["paper"]["trainings"]
    lines += [
        f"Neural collapse, given the features of an epoch, and the paper's {trainings} trainings, "
        "extrapolated from these steps:",
        "",
    ]
    return [*lines, *share_table(results)]
