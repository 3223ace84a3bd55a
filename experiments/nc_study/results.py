"""The paper's tables, the result of a run made from its epoch lines, and both as text."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import deqfast

from . import distributed
from .config import CLASSES, MODELS, PRESETS, Settings, flag_of
from .rundir import FORMAT, Row, RunDirectory

AVERAGED = 10
GROUPS = ("overall", "majority", "minority")
COLLAPSE = ("nc1", "nc2", "nc3", "nc4")
SOLVER_MEANS = ("iterations", "residual", "converged")

# K_A, data, R | explicit: overall, majority, minority | DEQ: the same. Percent, over the last ten epochs.
_TABLE_2 = """
3 cifar10   10 | 72.57±0.25 96.40±0.32 62.36±0.12 | 73.84±0.72 96.68±0.87 64.06±0.66
3 cifar10   50 | 44.32±0.23 96.80±0.29 21.83±0.20 | 46.08±1.06 96.63±0.98 24.42±1.32
3 cifar10  100 | 32.14±0.81 91.67±0.61 6.64±0.99 | 34.18±1.28 93.33±1.36 8.83±1.08
3 cifar100  10 | 41.41±0.56 73.03±0.62 27.86±0.39 | 43.72±0.60 74.16±0.82 30.67±0.53
3 cifar100  50 | 28.18±0.42 74.53±0.55 8.31±0.38 | 30.46±1.27 73.63±0.95 11.96±1.66
3 cifar100 100 | 23.43±0.92 73.46±0.56 1.99±1.06 | 24.78±1.93 74.89±0.88 3.31±2.45
5 cifar10   10 | 80.73±0.48 94.18±0.56 67.80±0.35 | 81.36±1.03 93.14±1.81 69.58±0.66
5 cifar10   50 | 63.08±0.87 91.02±0.89 35.14±0.65 | 65.03±1.90 90.88±2.83 39.18±1.46
5 cifar10  100 | 44.86±1.43 89.32±0.79 0.40±3.86 | 46.09±1.77 90.20±0.85 1.26±4.93
5 cifar100  10 | 52.62±0.86 74.10±1.03 31.10±0.70 | 53.31±0.98 72.90±1.65 33.72±0.79
5 cifar100  50 | 41.62±0.68 73.94±0.25 9.30±1.10 | 44.07±2.04 75.98±1.75 12.16±3.75
5 cifar100 100 | 37.33±2.29 74.24±1.13 0.42±3.04 | 39.11±2.46 75.79±0.96 2.42±5.89
7 cifar10   10 | 83.17±0.40 89.09±0.36 69.37±0.49 | 83.78±1.85 88.98±1.99 71.65±1.63
7 cifar10   50 | 66.91±0.39 80.90±0.57 34.26±0.30 | 69.47±1.86 82.91±2.22 38.12±1.61
7 cifar10  100 | 53.27±0.81 75.12±0.74 2.30±1.01 | 56.74±0.98 78.81±0.67 5.20±1.91
7 cifar100  10 | 59.11±0.84 71.93±0.65 29.20±0.92 | 60.51±0.88 72.90±1.19 31.13±0.83
7 cifar100  50 | 51.71±1.02 72.20±0.66 3.90±1.29 | 52.99±1.86 72.99±0.98 6.33±2.35
7 cifar100 100 | 50.72±0.60 72.46±0.58 0.00±0.00 | 51.79±0.92 73.98±0.66 0.00±0.00
"""
_TABLE_1 = """
cifar10  | 93.05±0.17 | 93.23±0.13
cifar100 | 64.35±0.20 | 64.77±0.36
"""

Spread = dict[str, float]
Cell = dict[str, dict[str, Spread | None]]


def _cell(columns: list[str]) -> Cell:
    cell: Cell = {}
    for model, column in zip(MODELS, columns, strict=True):
        pairs = [value.split("±") for value in column.split()]
        spreads: list[Spread | None] = [{"mean": float(mean), "std": float(std)} for mean, std in pairs]
        spreads += [None] * (len(GROUPS) - len(spreads))
        cell[model] = dict(zip(GROUPS, spreads, strict=True))
    return cell


def _paper_tables() -> dict[tuple[str, int | None, int | None], Cell]:
    tables: dict[tuple[str, int | None, int | None], Cell] = {}
    for line in _TABLE_2.strip().splitlines():
        key, *columns = line.split("|")
        majority, data, ratio = key.split()
        tables[data, int(majority), int(ratio)] = _cell(columns)
    for line in _TABLE_1.strip().splitlines():
        key, *columns = line.split("|")
        tables[key.strip(), None, None] = _cell(columns)
    return tables


PAPER = _paper_tables()
"""(data, K_A in tenths, R) to model to group to {"mean", "std"}; K_A and R are None in the balanced table."""

INCONSISTENT = frozenset({("cifar10", 5, 10, "explicit"), ("cifar10", 5, 100, "deq"), ("cifar100", 7, 10, "deq")})
"""Entries printed with an overall accuracy that is not the class mean of the other two."""


def paper_cell(settings: Settings) -> Cell | None:
    """What the paper prints for this imbalance; None if nothing."""
    return PAPER.get(_paper_key(settings.dataset, settings.majority, settings.ratio))


def _paper_key(dataset: str, majority: int | None, ratio: int | None) -> tuple[str, int | None, int | None]:
    return ("cifar10" if CLASSES[dataset] == 10 else "cifar100", majority, ratio)


def differences(settings: Settings) -> list[str]:
    """In what a run is not the paper's experiment."""
    found = []
    if settings.dataset.startswith("shapes"):
        found.append(f"{settings.dataset}, not CIFAR")
    wanted = {"solver": "broyden", "tol": 1e-3, "max_iter": 20, "momentum": 0.9, "weight_decay": 5e-4}
    # The bounds are the paper's; how it kept them it does not say.
    bounds = {"e_w": (None, 0.01), "e_h": (None, 0.01)}
    for name, allowed in bounds.items():
        if getattr(settings, name) not in allowed:
            found.append(f"{flag_of(name)[2:]} {getattr(settings, name)} instead of {allowed[-1]}")
    for name, value in {**PRESETS["paper"], **wanted}.items():
        value = value[settings.classes] if isinstance(value, dict) else value
        if name != "metrics_every" and getattr(settings, name) != value:
            found.append(f"{flag_of(name)[2:]} {getattr(settings, name)} instead of {value}")
    return found


def spread(values: list[float]) -> Spread:
    """Mean and sample standard deviation (0 for a single value)."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def summarise(rows: list[Row], majority: int) -> Row:
    """One network's share of the result, from its epoch lines; the first `majority` classes are the majority."""
    last = rows[-AVERAGED:]
    solves = [row["train"]["solver"] for row in rows if row["train"]["solver"]]
    return {
        "accuracy": {
            group: None if last[0]["test"][group] is None else spread([row["test"][group] for row in last])
            for group in GROUPS
        },
        "epochs_averaged": len(last),
        "per_class": rows[-1]["test"]["per_class"],
        "confusion": rows[-1]["test"]["confusion"],
        "train_loss": rows[-1]["train"]["loss"],
        "nc": rows[-1]["nc"],
        "solver": _solver_summary(solves) if solves else None,
        "seconds": {name: round(sum(row["seconds"][name] for row in rows), 1) for name in rows[-1]["seconds"]},
        "curves": curves(rows, majority),
    }


def _solver_summary(solves: list[Row]) -> Row:
    counts = ("max_iter", "nonfinite", "stalled", "skipped")
    return {
        **{name: _mean([solve[name] for solve in solves]) for name in SOLVER_MEANS},
        **{name: sum(solve[name] for solve in solves) for name in counts},
        "per_class": solves[-1]["per_class"],
    }


def curves(rows: list[Row], majority: int) -> Row:
    """The course of a training as columns, one value per epoch; "nc" has its own epochs, "solver" is None without one.

    A solver column of a group is the mean over the group's classes, on the training images."""
    measured = [row for row in rows if row["nc"]]
    solves = [row["train"]["solver"] for row in rows if row["train"]["solver"]]
    return {
        "epoch": [row["epoch"] for row in rows],
        "lr": [row["train"]["lr"] for row in rows],
        "loss": [row["train"]["loss"] for row in rows],
        "train_accuracy": [row["train"]["accuracy"] for row in rows],
        **{group: [row["test"][group] for row in rows] for group in GROUPS},
        "nc": {
            "epoch": [row["epoch"] for row in measured],
            **{name: [row["nc"][name] for row in measured] for name in COLLAPSE},
        },
        "solver": _solver_curves(solves, majority) if solves else None,
    }


def _solver_curves(solves: list[Row], majority: int) -> Row:
    groups = {"majority": slice(0, majority), "minority": slice(majority, None)}
    columns: Row = {name: [solve[name] for solve in solves] for name in (*SOLVER_MEANS, "skipped")}
    for group, part in groups.items():
        columns[group] = {name: [_mean(solve["per_class"][name][part]) for solve in solves] for name in SOLVER_MEANS}
    return columns


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def build_result(
    settings: Settings, run: RunDirectory, kernel: Row, counts: tuple[int, ...], parameters: Row, analyses: Row
) -> Row:
    """Everything there is to know about a finished run; `parameters` and `analyses` by network."""
    majority = settings.majority_classes
    models = {
        model: {"parameters": parameters[model], **summarise(run.rows(model), majority), **analyses[model]}
        for model in settings.models
    }
    return {
        "format": FORMAT,
        "study": settings.study,
        "command": distributed.command_line(),
        "data": settings.dataset,
        "preset": settings.preset,
        "train_images_per_class": list(counts),
        "majority_classes": majority,
        "kernel": kernel,
        "models": models,
        "paper": paper_cell(settings),
        "differences_from_paper": differences(settings),
        "settings": settings.identity(),
        "machine": machine(settings.threads, settings.device),
        "versions": versions(),
        "commit": commit(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def machine(threads: int, device: str) -> Row:
    """Where the run took place."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "processes": distributed.world_size(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "deqfast": deqfast.__version__}
    for package in ("torch", "triton", "numpy", "torchvision"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The commit of the checkout that this file is in, if it is in one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def report(result: Row) -> str:
    """A result as the text that ends a run: the table row beside the paper's, NC1-NC4, and how the solver fared."""
    return "\n\n".join((_accuracy(result), _collapse(result), _costs(result)))


def title(result: Row) -> str:
    """Data and imbalance of a run."""
    settings = result["settings"]
    if settings["majority"] is None:
        return f"{result['data']}, balanced"
    return f"{result['data']}, K_A = {settings['majority']}, R = {settings['ratio']}"


def _accuracy(result: Row) -> str:
    settings, models = result["settings"], result["models"]
    averaged = next(iter(models.values()))["epochs_averaged"]
    lines = [
        f"Test accuracy in % on {title(result)}: "
        f"mean±deviation over the last {averaged} of {settings['epochs']} epochs",
        _row("", *(GROUPS if settings["majority"] is not None else GROUPS[:1])),
    ]
    lines += [_accuracy_row(model, summary["accuracy"]) for model, summary in models.items()]
    if result["paper"] is None:
        return "\n".join([*lines, "  the paper has no entry for this imbalance"])
    key = _paper_key(result["data"], settings["majority"], settings["ratio"])
    marks = {model: "†" if (*key, model) in INCONSISTENT else "" for model in models}
    lines += [_accuracy_row(f"paper, {model}{marks[model]}", result["paper"][model]) for model in models]
    if any(marks.values()):
        lines.append("  † as printed: the overall accuracy is not the class mean of the other two")
    if result["differences_from_paper"]:
        lines.append(f"  not comparable with the paper: {', '.join(result['differences_from_paper'])}")
    return "\n".join(lines)


def _accuracy_row(name: str, accuracy: dict[str, Spread | None]) -> str:
    return _row(name, *(f"{value['mean']:.2f}±{value['std']:.2f}" for value in accuracy.values() if value))


def _row(name: str, *cells: str) -> str:
    return f"  {name:18}" + "".join(f"{cell:>14}" for cell in cells)


def _collapse(result: Row) -> str:
    epochs = result["settings"]["epochs"]
    lines = [f"Neural collapse of the training images after epoch {epochs}", _row("", "NC1", "NC2", "NC3", "NC4")]
    for model, summary in result["models"].items():
        values = [summary["nc"][name] for name in COLLAPSE]
        lines.append(_row(model, *("undefined" if value is None else f"{value:.4g}" for value in values)))
    return "\n".join(lines)


def _costs(result: Row) -> str:
    lines = []
    for model, summary in result["models"].items():
        seconds = summary["seconds"]
        lines.append(
            f"{model}: {summary['parameters']} parameters; {seconds['train']:.0f} s of training, "
            f"{seconds['test']:.0f} s of testing, {seconds['metrics']:.0f} s of metrics"
        )
        if summary["solver"]:
            lines.append(_solver(summary["solver"], result))
    return "\n".join(lines)


def _solver(solver: Row, result: Row) -> str:
    settings = result["settings"]
    return (
        f"  solver {settings['solver']}, gradient {settings['adjoint']}, kernel {result['kernel']['used']}: "
        f"{solver['iterations']:.1f} evaluations a sample, {100 * solver['converged']:.2f} % converged, "
        f"mean residual {solver['residual']:.1e};\n  {solver['max_iter']} samples stopped at {settings['max_iter']} "
        f"evaluations, {solver['nonfinite']} were not finite, {solver['skipped']} were left out of the loss"
    )
