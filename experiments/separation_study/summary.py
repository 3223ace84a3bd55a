"""Common parts of the experiments' sections: results by task, tables of trained networks, curves of their errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import TypeVar

import numpy as np
from runs import style

from .frame import Picture, Row, Table, Unit
from .networks import Trained

R = TypeVar("R")
Kinds = list[tuple[Trained, ...]]  # the networks of each kind, by seed
Value = Callable[[Trained], float]


def by_task(results: Mapping[Unit, R]) -> dict[str, list[R]]:
    """Gather the results of every task, one per seed."""
    tasks: dict[str, list[R]] = {}
    for unit, result in results.items():
        tasks.setdefault(unit.task, []).append(result)
    return tasks


def fewest(units: Iterable[Unit]) -> int:
    """Return how many of the units the task with fewest has: its seeds."""
    return min(Counter(unit.task for unit in units).values())


def kinds(results: Iterable[R], networks: Callable[[R], Sequence[Trained]] = attrgetter("networks")) -> Kinds:
    """Gather the networks of each kind from the results of a task."""
    return list(zip(*map(networks, results), strict=True))


def best_of(candidates: Iterable[Sequence[Trained]]) -> Sequence[Trained]:
    """Choose, of networks of several kinds, each by seed, the kind with the lowest mean validation error."""
    return min(candidates, key=lambda seeds: sum(network.loss for network in seeds))


def log_ratios(networks: Sequence[Trained], others: Sequence[Trained], value: Value) -> list[float]:
    """Return log10 of the ratio of a value for each seed. Values are clipped to [1e-20, 1e20], so that failed training
    and zero errors have numbers too."""

    def bounded(network: Trained) -> float:
        return min(max(value(network), 1e-20), 1e20)

    return [math.log10(bounded(a) / bounded(b)) for a, b in zip(networks, others, strict=True)]


def spread(values: Iterable[float], digits: str = ".2e") -> str:
    """Write the median of a value over seeds, and its range if there are several."""
    ordered = sorted(values)
    between = f" ({ordered[0]:{digits}} to {ordered[-1]:{digits}})" if len(ordered) > 1 else ""
    return f"{median(ordered):{digits}}{between}"


def networks_table(title: str, source: str, tasks: Mapping[str, Kinds], columns: Mapping[str, Value]) -> Table:
    """Make a table with a row for each network of a task."""
    rows: list[Row] = []
    for task, every in tasks.items():
        for networks in every:
            flops = max(network.flops or 0 for network in networks)
            row: Row = {"task": task, "network": networks[0].name, "parameters": networks[0].parameters}
            row["FLOPs a step"] = f"{flops:.0f}" if flops else "–"
            rows.append(row | {name: spread(map(value, networks)) for name, value in columns.items()})
    return Table(title, source, rows, "Medians and ranges over seeds. The FLOPs of a DEQ are the largest of its seeds.")


def curves(
    name: str, title: str, source: str, tasks: Mapping[str, Kinds], error: str, label: str, level: float | None = None
) -> Picture:
    """Draw an error of the networks of every task against training steps, as the median over seeds, and a level."""
    figure, (axes,) = style.panels(1, len(tasks), sharey=True)
    for axis, (task, every) in zip(axes, tasks.items(), strict=True):
        for networks in every:
            errors = np.array([network.errors[error] for network in networks], dtype=float)
            look = style.look(kind := networks[0].name) | {"ls": "--" if kind.endswith("FLOPs") else "-"}
            axis.plot(networks[0].steps, np.median(errors, axis=0), label=kind, **look)
        if level is not None:
            axis.axhline(level, color=style.GREY, ls=":")
        axis.set(title=task, xlabel="step", yscale="log")
    axes[0].set_ylabel(label)
    style.legend(figure, 3, handlelength=3)
    return Picture(name, title, source, "Against training steps, median over seeds.", figure)
