"""Regression gate (--gate, --update-baseline): present counters compared with a committed baseline.

Counters are exact. A baseline is a JSON file with a line for each case. Our own code does the same with every version
of torch, so ``counters.json`` applies to all of them. Some versions need fewer operations: a counter that falls passes.
The number of barriers of kernels must not change: no test without a GPU fails when Triton's kernels lose one. A
compiler's kernels have a baseline per compiler (``triton-3.9.json``); without one kernels are not judged.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from .record import provenance, read_record, stale_extensions, write_json

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
UPDATE = "--gate --update-baseline"
Rows = dict[str, dict[str, int]]  # case -> counter -> value


def differences(before: Rows, now: Rows, alike: bool = True) -> tuple[list[str], list[str]]:
    """Differences that only a new baseline accepts, and counters that have only fallen: a line for each case.

    alike: False if kernels may be compiled for other architectures: counters on one side only are then ignored.
    """
    worse: list[str] = []
    better: list[str] = []
    for case in before | now:
        old, new = before.get(case, {}), now.get(case, {})
        if not old or not new:
            worse.append(f"{case}: {'counted no more' if old else 'has no baseline'}")
            continue
        names = [name for name in old | new if alike or (name in old and name in new)]
        changes = [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
        if changes:
            rises = any(a is None or b is None or b > a or name.startswith("barriers ") for name, a, b in changes)
            text = "; ".join(f"{name} {a} -> {b}" for name, a, b in changes)
            (worse if rises else better).append(f"{case}: {text}")
    return worse, better


def judge(name: str, rows: Rows, update: bool, alike: bool = True, folder: Path = BASELINES) -> None:
    """Fail the test if counters are worse than in the baseline of this name, or write it.

    name: "counters", or a compiler with its version, as "triton-3.9"; alike: see ``differences``.
    """
    path = folder / f"{name}.json"
    if stale := stale_extensions():
        pytest.fail("; ".join(stale), pytrace=False)
    if update:
        write(path, rows)
        return
    if not alike and not path.exists():
        pytest.skip(f"no baseline for {name}: `pytest benchmarks {UPDATE}` writes one")
    data = read_record(path)
    named = ((case, zip(data["columns"], values, strict=True)) for case, *values in data["rows"])
    before = {case: {column: value for column, value in row if value is not None} for case, row in named}
    if not alike and not any(before.get(case, {}).keys() & row.keys() for case, row in rows.items()):
        pytest.skip(f"{name} was counted for other architectures")
    worse, better = differences(before, rows, alike)
    if better:
        warnings.warn("\n  ".join([f"{name}: fallen, which {UPDATE} keeps", *better]), stacklevel=2)
    if worse:
        since = f"{name}: worse than at {data['commit'][:8]} of {data['date'][:10]}"
        pytest.fail("\n  ".join([since, *worse]) + f"\naccept it with `pytest benchmarks {UPDATE}`", pytrace=False)


def write(path: Path, rows: Rows) -> None:
    """Write a line per case, with null for counters that it lacks, and commit, date and command of this run."""
    run = provenance()
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[case, *map(row.get, columns)] for case, row in rows.items()]
    head = {"commit": run["machine"]["commit"], "date": run["date"], "command": run["command"]}
    write_json(path, head | {"columns": columns, "rows": lines})
