"""Rows as text. Needs nothing but the standard library, so that a report works where torch does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .targets import verdicts

# Heading -> (column, format, factor).
COLUMNS = {
    "ms": ("ms_min", ".4f", 1),
    "f ms": ("f_ms", ".3f", 1),
    "solver ms/eval": ("solver_ms", ".4f", 1),
    "/ f": ("share_of_f", ".2f", 1),
    "TFLOP/s": ("tflop_per_s", ".3g", 1),
    "in place": ("in_place_ms", ".4f", 1),
    "floor ms": ("floor_ms", ".4f", 1),
    "x floor": ("floor_x", ".2f", 1),
    "evals": ("evaluations", ".3g", 1),
    "mean evals": ("mean_evaluations", ".1f", 1),
    "sample evals": ("sample_evaluations", "d", 1),
    "backward evals": ("backward_evaluations", "d", 1),
    "residual": ("residual", ".0e", 1),
    "missed": ("samples_missed", "d", 1),
    "error": ("error", ".1e", 1),
    "cosine": ("cosine", ".3f", 1),
    "MB": ("peak_bytes", ".1f", 1e-6),
    "launches": ("launches", ".1f", 1),
    "waits": ("host_waits", "d", 1),
}


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]], left: int) -> Iterable[str]:
    """Columns as wide as needed; the first `left` and the last to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first = [text.ljust(width) for text, width in zip(row[:left], widths, strict=False)]
        middle = [text.rjust(width) for text, width in zip(row[left:-1], widths[left:], strict=False)]
        yield " ".join([*first, *middle, row[-1]]).rstrip()


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of one section, with the columns that any of them has; what was skipped in a line for each reason."""
    skipped: dict[tuple[str, str], int] = {}
    for row in rows:
        if "skipped" in row:
            reason = (row["provider"], row["skipped"])
            skipped[reason] = skipped.get(reason, 0) + 1
    rows = [row for row in rows if "skipped" not in row]
    used = [heading for heading, (column, _, _) in COLUMNS.items() if any(column in row for row in rows)]
    lines = [["case", "provider", *used, "faster than"]]
    for row in rows:
        cells = []
        for heading in used:
            column, form, factor = COLUMNS[heading]
            value = row.get(column)
            cells.append(number(None if value is None else value * factor, form))
        lines.append([row["case"], row["provider"], *cells, remark(row)])
    notes = [f"{provider}: {count} skipped: {reason}" for (provider, reason), count in skipped.items()]
    return [*(aligned(lines, 2) if rows else ()), *notes]


def remark(row: dict[str, Any]) -> str:
    """How many times as fast as its peers, or what is wrong."""
    if "problem" in row:
        return f"PROBLEM {row['problem'][:120]}"
    return ", ".join(f"{peer} {gain:.2f}x" for peer, gain in row.get("gains", {}).items())


def summary(rows: Sequence[dict[str, Any]], judged: bool = True) -> list[str]:
    """A table for every section, and, where `judged`, the targets that the rows tell of."""
    lines = ["Least of the rounds, which the providers of a case take in turns with a copy that gives the floor."]
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += ["", section, *table([row for row in rows if row["section"] == section])]
    told = [verdict for verdict in verdicts(rows) if verdict[2] is not None] if judged else []
    lines += ["", "targets, which are those of a quiet machine"] * bool(told)
    lines += [f"{'met   ' if met else 'MISSED'} {target.what}: {value:.3g}" for target, value, met in told]
    return lines
