"""Numbers with their units, sentences from lists, and GitHub-flavoured Markdown."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

WIDTH = 120
EPSILON = 2.0**-52  # of float64


class Form(Protocol):
    """How a number is written; `more`: how many digits beyond the usual ones."""

    def __call__(self, value: Any, /, more: int = 0) -> str: ...


def digits(value: float, more: int = 0) -> str:
    """Three significant digits; an exponent only below 1e-4 and from 1e6 on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.{2 + more}e}"))))
    if not -4 <= exponent < 6:
        return scientific(value, more)
    places = 2 + more - exponent
    return f"{round(value, places):.{max(0, places)}f}"


def scientific(value: float, more: int = 0) -> str:
    """Two significant digits: 1.8e-2."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    mantissa, exponent = f"{value:.{1 + more}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def error(value: float, more: int = 0) -> str:
    """A relative error that was computed in float64; 0 is one that float64 cannot tell."""
    return scientific(value, more) if value else f"below {scientific(EPSILON)}"


def tolerance(value: float) -> str:
    """1e-3."""
    return scientific(value).replace(".0e", "e")


def with_unit(value: float, units: Sequence[tuple[float, str]], more: int = 0) -> str:
    """In the largest unit that leaves a number from 1 on; units: (size, name), ascending."""
    rounded = float(f"{value:.{2 + more}e}")  # 999.9 µs is 1.00 ms
    size, name = next((unit for unit in reversed(units) if abs(rounded) >= unit[0]), units[0])
    return f"{digits(value / size, more)} {name}"


def duration(ms: float, more: int = 0) -> str:
    return with_unit(ms, [(1e-6, "ns"), (1e-3, "µs"), (1, "ms"), (1e3, "s")], more)


def size(count: float, more: int = 0) -> str:
    if count == 0:
        return "0"
    return with_unit(count, [(1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")], more)


def elapsed(seconds: float) -> str:
    return with_unit(seconds, [(1, "s"), (60, "min"), (3600, "h"), (86400, "days")])


def count(number: float) -> str:
    """Three digits, from a million on in words."""
    return with_unit(number, [(1, ""), (1e6, "million"), (1e9, "billion")]).strip()


def times(value: float, more: int = 0) -> str:
    return f"{digits(value, more)}×"


def percent(share: float, more: int = 0) -> str:
    return f"{digits(100 * share, more)} %"


def whole(value: float, more: int = 0) -> str:
    """A count: of a mean, one decimal."""
    return f"{value:.{1 + more}f}".rstrip("0").removesuffix(".")


def missing(bound: float, form: Form) -> Form:
    """`form` for values that may miss `bound`: with as many more digits as tell them from it."""

    def text(value: Any, /, more: int = 0) -> str:
        enough = more
        while value != bound and form(value, enough) == form(bound, enough):
            enough += 1
        return form(value, enough)

    return text


def span(value: Any, form: Form) -> str:
    """A value, or the least and the largest of a list of them."""
    if not isinstance(value, list):
        return form(value)
    low, high = form(min(value)), form(max(value))
    return low if low == high else f"{low} to {high}"


def typical(value: Any) -> Any:
    """The median of a list, which the runs of the same have measured; anything else as it is."""
    return statistics.median(value) if isinstance(value, list) else value


def optional(value: Any, form: Form) -> str:
    """A value, or the median of a list of them; "" where there is nothing."""
    return "" if value is None or value == [] else form(typical(value))


def gain(value: Any) -> str:
    """How many times as fast; the median of several runs with the least and the largest: "4.50× (3.88–5.12)"."""
    if not value:
        return ""
    ends = span(value, digits).replace(" to ", "–")
    return f"{optional(value, times)} ({ends})" if "–" in ends else optional(value, times)


def listed(items: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def absent(what: str, command: str) -> list[str]:
    return [f"Not measured yet: {what}. `{command}` measures it."]


def link(text: str, target: str) -> str:
    return f"[{text}]({target})"


def table(header: Sequence[str], body: Iterable[Sequence[str]], text: Collection[str] = ()) -> list[str]:
    """Without the columns that are empty throughout; the first and those named in `text` to the left, others right."""
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in body]
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    rule = ["---" if index == 0 or name in text else "---:" for index, name in enumerate(header)]
    return ["| " + " | ".join(row[index] for index in used) + " |" for row in [[*header], rule, *rows]]


def wrapped(lines: Iterable[str]) -> str:
    """Prose and list entries in lines of at most ``WIDTH``; tables, images, HTML and code as they are.

    One empty line where several follow each other.
    """
    found: list[str] = []
    for line in lines:
        if not line and found and not found[-1]:
            continue
        if len(line) <= WIDTH or line.startswith(("|", "!", "<", "`")):
            found.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            found += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(found).rstrip() + "\n"
