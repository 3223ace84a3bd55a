"""The two writers of a document: escapes, columns, and a page that needs nothing else."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from nc_study.reporting.page import Bullets, Heading, Paragraph, Picture, Table, to_html, to_markdown
from PIL import Image

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'
VOID = {"meta", "img", "br", "hr"}


class Checker(HTMLParser):
    """Collects tags, texts and links; an end tag that fits no open tag is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.texts, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "tags that are never closed"

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def png():
    content = io.BytesIO()
    Image.new("RGB", (80, 40)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def blocks():
    table = Table(f"T {NASTY}", ("name", "n"), [(NASTY, "1.0"), ("x", "not run")])
    return [Heading(2, NASTY), Paragraph(NASTY), Bullets([NASTY, "two"]), table, Picture("figures/p", NASTY, png())]


def test_the_page_is_well_formed_and_takes_nothing_from_elsewhere(blocks):
    text = to_html(f"Title {NASTY}", blocks)
    found = Checker(text)
    assert not {"script", "link", "iframe", "object", "embed"} & set(found.seen)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in found.links)
    assert "@import" not in text and "url(" not in text and "http" not in text
    assert found.texts.count(NASTY) == 6, "navigation, heading, paragraph, item, cell and caption"
    assert text.count(f'<td class="n">{"1.0"}</td>') == 1 and '<img width="60" height="30"' in text


def test_markdown_keeps_its_columns_and_escapes_marks(blocks):
    text = to_markdown("Title", blocks)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert len(rows) == 4 and counts == {3}
    assert rows[1] == "| --- | ---: |"
    assert "<script>" not in text and r"a\|b" in text and r"\*c\*" in text and r"\_g\_" in text and "K_A" in text
    assert "](figures/p.png)" in text and "](figures/p.svg)" in text


def test_both_hold_the_same_cells(blocks):
    table = Table("t", ("a", "b"), [("one", "2"), ("three", "4")])
    page = Checker(to_html("x", [table])).texts
    markdown = to_markdown("x", [table])
    for cell in ("a", "b", "one", "2", "three", "4"):
        assert cell in page and f" {cell} |" in markdown


def test_a_row_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="table 't': 1 cells in a row of 2 columns"):
        Table("t", ("a", "b"), [("one",)])


def test_kinds_of_columns():
    rows = [("+1.0", "text", "not run"), ("not run", "y" * 40, "–")]
    table = Table("t", ("a", "b", "c"), rows)
    assert [table.kind(column) for column in range(3)] == ["number", "", "short"]
