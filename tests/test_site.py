"""The site: its check finds what it looks for, on small sites with one fault each; pages link to the API."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_site = script("check_site")
BROWSER = next(filter(None, map(shutil.which, check_site.BROWSERS)), None)
RIGHT = '<h1 id="a">A</h1><a href="#a">a</a> <a href="other.html#b">b</a> <a href="https://example.org/none">c</a>'


def site_of(folder: Path, content: str) -> Path:
    page = '<!doctype html><html><head><link rel="icon" href="data:,"></head><body style="margin:0">{}</body></html>'
    (folder / "index.html").write_text(page.format(content))
    (folder / "other.html").write_text(page.format('<p id="b">b</p>'))
    return folder


@pytest.mark.parametrize("link", ["none.html", "#none", "other.html#none", "none.png", "../outside.html"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, link: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.html").touch()
    assert check_site.broken_links(site_of(site, RIGHT)) == []
    found = check_site.broken_links(site_of(site, f'{RIGHT}<a href="{link}">d</a>'))
    assert found == [f"index.html: the link {link} leads nowhere"]


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
@pytest.mark.parametrize(
    "content, fault",
    [
        (RIGHT, None),
        ("<div style='width:500px'>wide</div>", "the page is 500 px wide"),
        ("<p>klzzwxh:0001</p>", "a placeholder is shown"),
        ("<script>none()</script>", "none is not defined"),
        ("<script>console.error('bad')</script>", "bad"),
        (
            "<div class='md-content' style='overflow:hidden'><table style='width:1500px'><th>T</table></div>",
            "a table of 1500 px",
        ),
    ],
)
def test_a_fault_in_the_browser_is_named(tmp_path: Path, content: str, fault: str | None) -> None:
    assert BROWSER is not None
    found = check_site.seen(site_of(tmp_path, content), BROWSER)
    if found is None:
        pytest.skip(f"{BROWSER} does not run here")
    if fault is None:
        assert found == []
    else:
        assert found and all(one.startswith("index.html at ") and fault in one for one in found)


def test_the_first_mention_of_an_object_is_linked() -> None:
    pytest.importorskip("mkdocs")
    hooks = script("hooks")
    page = "# `Auto`\n\n```python\n`Auto`\n```\n[`Auto`](a.md) `Auto()` `Auto` `Cell` `solve` `deqfast.solve(f)` `fc`\n"
    linked = hooks._linked(page, hooks._documented())
    expected = page.replace("`Auto()`", "[`Auto()`][deqfast.Auto]")
    assert linked == expected.replace("`deqfast.solve(f)`", "[`deqfast.solve(f)`][deqfast.solve.solve]")
