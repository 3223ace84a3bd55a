"""Documents: Markdown from a template and tables, and one page of HTML that needs nothing else."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markdown import Markdown
from tabulate import tabulate

TEMPLATES = Path(__file__).parent / "templates"


class Source(str):
    """Text that is Markdown already; every other value is escaped where a template shows it."""


def escape(text: object) -> str:
    """Return text with nothing left that Markdown, or HTML in it, would take for a mark; underscores inside words are
    none."""
    if isinstance(text, Source):
        return text
    flat = html.escape(re.sub(r"\s+", " ", str(text)), quote=False)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", re.sub(r"([\\`*\[\]|#~$])", r"\\\1", flat))


def markdown_table(rows: Sequence[Mapping[str, object]]) -> Source:
    """Make a Markdown table of at least one row, each by the names of its columns, without those of only "–"; columns
    with a number are aligned to the right. Text is escaped unless it is `Source`."""
    columns = [column for column in rows[0] if any(row[column] != "–" for row in rows)]
    numeric = (any(re.fullmatch(r"[+\-×]?\d[^/]*", str(row[column])) for row in rows) for column in columns)
    sides = ["right" if is_number else "left" for is_number in numeric]
    entries = [[escape(row[column]) for column in columns] for row in rows]
    headers = list(map(escape, columns))
    return Source(tabulate(entries, headers, tablefmt="pipe", disable_numparse=True, colalign=sides))


def render(template: Path, **values: Any) -> str:
    """Fill in a template of Markdown; values are escaped, an unknown one is an error."""
    environment = jinja2.Environment(
        finalize=escape, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(template.read_text()).render(values, table=markdown_table)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def narrow(text: str) -> str:
    """Take the padding out of the tables of Markdown, which doubles their size."""
    return re.sub(r"(?m)^\|.*\|$", lambda row: re.sub(r"-{4,}", "---", re.sub(" {2,}", " ", row[0])), text)


def to_html(title: str, text: str, folder: Path) -> str:
    """Make one page of Markdown, with a list of its sections and its pictures, which are given relative to `folder`."""
    converter = Markdown(extensions=["tables", "toc"], extension_configs={"toc": {"toc_depth": "2-2"}})

    def inline(picture: re.Match[str]) -> str:
        content = (folder / html.unescape(picture[2])).read_bytes()
        return f'{picture[1]}data:image/png;base64,{base64.b64encode(content).decode()}"'

    body = re.sub(r'(<img [^>]*src=")([^"]+)"', inline, converter.convert(text))
    contents = converter.toc  # type: ignore[attr-defined]  # which the extension sets
    body = body.replace("<h2", f"{contents}\n<h2", 1)
    page = jinja2.Template((TEMPLATES / "page.html").read_text(), autoescape=True)
    return page.render(title=title, body=body)
