"""Numbers and rows as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tabulate import tabulate

from .record import Row
from .targets import TARGETS, verdicts

Form = Callable[[float], str]
UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}  # in ms


def digits(value: float) -> str:
    """Three significant digits, with an exponent below 1e-4 and from 1e6 on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if not -4 <= exponent < 6:
        return scientific(value)
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


def scientific(value: float) -> str:
    """Two significant digits: 1.8e-2. A relative error of 0 is below the rounding of float64."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "below 2.2e-16"


def duration(ms: float) -> str:
    """Milliseconds in the largest unit that leaves a number from 1 on."""
    rounded = float(f"{ms:.2e}")  # 999.9 µs is 1.00 ms
    unit = next((unit for unit in reversed(UNITS) if abs(rounded) >= UNITS[unit]), "ns")
    return f"{digits(ms / UNITS[unit])} {unit}"


def times(value: float) -> str:
    return f"{digits(value)}×"


# Column of a measured row -> its format. Other columns are counts, or means of counts.
FORMS: dict[str, Form] = {
    **dict.fromkeys(("ms", "ms_min", "f_ms", "solver_ms"), duration),
    **dict.fromkeys(("share_of_f", "floor_x", "times_explicit", "flop_ratio", "over_flop"), times),
    **dict.fromkeys(("residual", "error"), scientific),
    "peak_bytes": lambda count: f"{digits(1e-6 * count)} MB",
    **dict.fromkeys(("busy", "nc_share", "accuracy", "accuracy_of_few"), lambda share: f"{digits(100 * share)} %"),
    "paper_hours": lambda value: f"{digits(value)} h",
}


def written(column: str, value: float | None) -> str:
    """Value of a column as text; "" for None."""
    if value is None:
        return ""
    return FORMS.get(column, digits if isinstance(value, float) else str)(value)


def span(values: Sequence[float], form: Form = times) -> str:
    """Least and largest value: "18.6 to 22.4×"; one of them if their texts are equal; "" without values."""
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low.removesuffix('×')} to {high}"


def slug(text: str) -> str:
    """Name of a row or column in the key of a number, such as "gain-over-torchdeq"."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


@dataclass(frozen=True)
class Table:
    """Table with its heading and a remark; empty columns are left out."""

    title: str
    rows: Sequence[Mapping[str, str]]  # column -> text, the name of the row first
    words: str = ""

    def texts(self, columns: Sequence[str] = (), names: Mapping[str, str] | None = None) -> list[list[str]]:
        """Heading and rows; `columns`: only these; `names`: only these rows, in this order, renamed."""
        if not self.rows:
            return []
        first, *others = self.rows[0]
        used = [name for name in columns or others if any(row[name] for row in self.rows)]
        if names is None:
            names = {row[first]: row[first] for row in self.rows}
        by_name = {name: [row for row in self.rows if row[first] == name] for name in names}
        lines = [[names[name], *(row[column] for column in used)] for name, rows in by_name.items() for row in rows]
        return [[first, *used], *lines]

    def lines(self, columns: Sequence[str] = (), names: Mapping[str, str] | None = None) -> list[str]:
        """Lines of the table in Markdown."""
        texts = self.texts(columns, names)
        texts[1:1] = [["---", *["---:"] * (len(texts[0]) - 1)]] if texts else []
        return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in texts]

    def facts(self) -> dict[str, str]:
        """Numbers by the names of table, row and column; for several rows of one name "2.71 ms and 2.37 ms"."""
        facts: dict[str, dict[str, None]] = {}  # key -> its texts, in their order
        for (_, name), *entries in (row.items() for row in self.rows):
            for column, text in filter(itemgetter(1), entries):
                facts.setdefault(".".join(map(slug, (self.title, name, column))), {})[text] = None
        return {key: " and ".join(texts) for key, texts in facts.items()}


COLUMNS = {  # heading -> column of a measured row
    "time": "ms_min",
    "of it f": "f_ms",
    "per iteration": "solver_ms",
    "over f": "share_of_f",
    "of its byte floor": "floor_x",
    "evaluations": "evaluations",
    "of samples": "sample_evaluations",
    "of the adjoint": "backward_evaluations",
    "residual": "residual",
    "error": "error",
    "cosine": "cosine",
    "memory": "peak_bytes",
    "device busy": "busy",
    "launches": "launches",
    "waits": "host_waits",
}


def table(rows: Sequence[Row], title: str = "") -> Table:
    """Table of the rows that were not skipped, with their faults; skipped rows are counted by reason."""
    skipped = Counter(f"{row['provider']}: {row['skipped']}" for row in rows if "skipped" in row)
    lines = []
    for row in rows:
        if "skipped" not in row:
            line = {"row": f"{row['section']} {row['case']} {row['provider']}"}
            shown = {"ms_min": row["ms"], **row} if "ms" in row else row
            line |= {heading: written(column, shown.get(column)) for heading, column in COLUMNS.items()}
            line["gain over"] = ", ".join(f"{peer} {times(gain)}" for peer, gain in row.get("gains", {}).items())
            lines.append(line | {"fault": row.get("fault", "")})
    notes = [f"{count} skipped, {reason}." for reason, count in skipped.items()]
    return Table(title, lines, " ".join(notes))


def summary(rows: Sequence[Row], judged: bool = True) -> list[str]:
    """Table for every section, padded for a terminal; with `judged`, also the targets that the rows decide."""
    lines = ["Least of the rounds. Rounds of all providers of a case interleave with a copy, which gives the floor."]
    for section in dict.fromkeys(row["section"] for row in rows):
        part = table([row for row in rows if row["section"] == section])
        padded = tabulate(part.texts(), tablefmt="plain", disable_numparse=True)
        lines += ["", section, *filter(None, [padded, part.words])]
    decided = verdicts(TARGETS, rows) if judged else []
    return lines + ["", "targets, set for a quiet machine"] * bool(decided) + decided
