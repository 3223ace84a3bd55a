"""A document as a list of blocks, and two writers of it: Markdown, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHORT = 22


@dataclass(frozen=True)
class Heading:
    """A heading of level 2 or 3; the page's title is its level 1."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of plain texts, as long as `columns`, under a caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.caption!r}: {len(row)} cells in a row of {len(self.columns)} columns")

    def kind(self, column: int) -> str:
        """Of a column: "number" (marks such as "not run" aside), "short" texts that stay on a line, or ""."""
        texts = [row[column] for row in self.rows]
        if any(map(_starts_as_number, texts)) and all(_starts_as_number(text) or len(text) < 10 for text in texts):
            return "number"
        return "short" if max(map(len, texts), default=0) <= SHORT else ""


@dataclass(frozen=True)
class Picture:
    """A figure: its file without ending, relative to the document, its bytes as PNG, and whether there is an SVG."""

    stem: str
    caption: str
    png: bytes
    vector: bool = True


Block = Heading | Paragraph | Bullets | Table | Picture


def _starts_as_number(text: str) -> bool:
    return re.match(r"[+\-×]?\d", text) is not None


def to_markdown(title: str, blocks: Iterable[Block]) -> str:
    """The document in GitHub's Markdown; pictures are files beside it."""
    return "\n\n".join([f"# {_escape(title)}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_escape(block.text)}"
        case Paragraph():
            return _escape(block.text)
        case Bullets():
            return "\n".join(f"- {_escape(item)}" for item in block.items)
        case Table():
            return _markdown_table(block)
        case Picture():
            caption = _escape(block.caption)
            vector = f" ([vector graphics]({block.stem}.svg))" if block.vector else ""
            return f"![{caption}]({block.stem}.png)\n\n{caption}{vector}"


def _markdown_table(table: Table) -> str:
    rules = ["---:" if table.kind(column) == "number" else "---" for column in range(len(table.columns))]
    rows = [[_escape(text) for text in row] for row in (table.columns, *table.rows)]
    lines = [" | ".join(row) for row in (rows[0], rules, *rows[1:])]
    return f"**{_escape(table.caption)}**\n\n" + "\n".join(f"| {line} |" for line in lines)


def _escape(text: str) -> str:
    """Text with nothing left that Markdown or HTML in it would take for a mark; underscores inside words are none."""
    flat = re.sub(r"\s+", " ", text)
    marked = re.sub(r"([\\`*\[\]|#~$])", r"\\\1", flat)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --line: #c9c9c9; --band: #f3f4f6; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181b; --line: #474b50; --band: #22262a; --link: #7db8f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.3rem; line-height: 1.3; margin-top: 2.5rem;
  border-bottom: 1px solid var(--line); } h3 { font-size: 1.08rem; margin-top: 1.8rem; }
a { color: var(--link); } nav ul { padding-left: 1.2rem; } li { margin: 0.25rem 0; }
.box { overflow-x: auto; margin: 0.4rem 0 1.4rem; } figure { margin: 1.2rem 0 2rem; }
.caption, figcaption { font-weight: 600; margin: 1.2rem 0 0.2rem; } figcaption { font-weight: 400; margin: 0.3rem 0; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: 0.28rem 0.55rem; text-align: left; vertical-align: top;
  overflow-wrap: normal; } td { min-width: 10rem; max-width: 34rem; }
th { background: var(--band); } .n { text-align: right; }
td.n, td.s { white-space: nowrap; min-width: 0; } th.n, th.s { max-width: 9rem; }
img { display: block; background: #ffffff; max-width: none; }
@media (min-width: 60rem) { img { max-width: 100%; height: auto; } }
""".strip()


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The document as one page: style and pictures are part of it, there is no script."""
    contents = [
        f'<li><a href="#s{number}">{html.escape(block.text)}</a></li>'
        for number, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level == 2
    ]
    body = "\n".join(_html(block, number) for number, block in enumerate(blocks))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<nav><ul>
{chr(10).join(contents)}
</ul></nav>
{body}
</body>
</html>
"""


def _html(block: Block, number: int) -> str:
    match block:
        case Heading():
            return f'<h{block.level} id="s{number}">{html.escape(block.text)}</h{block.level}>'
        case Paragraph():
            return f"<p>{html.escape(block.text)}</p>"
        case Bullets():
            return "<ul>\n" + "\n".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "\n</ul>"
        case Table():
            return _html_table(block)
        case Picture():
            return _html_picture(block)


def _html_table(table: Table) -> str:
    kinds = [table.kind(column) for column in range(len(table.columns))]
    marks = [f' class="{kind[0]}"' if kind else "" for kind in kinds]

    def line(cells: Sequence[str], tag: str) -> str:
        pairs = zip(cells, marks, strict=True)
        return "<tr>" + "".join(f"<{tag}{mark}>{html.escape(cell)}</{tag}>" for cell, mark in pairs) + "</tr>"

    rows = "\n".join(line(row, "td") for row in table.rows)
    head = line(table.columns, "th")
    caption = html.escape(table.caption)
    return (
        f'<p class="caption">{caption}</p>\n'
        f'<div class="box" tabindex="0" role="region" aria-label="{caption}"><table>\n'
        f"<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _html_picture(picture: Picture) -> str:
    caption = html.escape(picture.caption)
    width, height = (int.from_bytes(picture.png[start : start + 4], "big") for start in (16, 20))  # IHDR of the PNG
    source = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    # Shown at three quarters of its pixels, so that it stays sharp on dense screens; a narrow page scrolls its box.
    size = f'width="{width * 3 // 4}" height="{height * 3 // 4}"'
    image = f'<img {size} src="{source}" alt="{caption}" loading="lazy">'
    return f'<figure><div class="box" tabindex="0">{image}</div>\n<figcaption>{caption}</figcaption></figure>'
