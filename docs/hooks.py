"""What the site adds to the pages: the repository's address, its figures, the table of refusals, links to the API.

Pages link to figures and to other pages of the repository by their paths in it, so that these links work there too.
"""

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from deqfast.api.refusals import REFUSED
from deqfast.engine.refusals import name_of

PAGES = Path(__file__).parent / "pages"
API = ("api.md", "api-more.md")
TABLE = "<!-- what does not go together -->"
OUTSIDE = re.compile(r"\]\((\.\./[^)\s]+\.(?:png|gif))\)")
IN_REPOSITORY = re.compile(r"\]\(\.\./\.\./([^)\s]+\.md(?:#[^)\s]+)?)\)")
# Fenced blocks, headings and links stay as they are; a span of code may name an object, with its arguments.
PARTS = re.compile(r"^```.*?^```|^#[^\n]*|!?\[[^\]]*\]\([^)]*\)|`(?:deqfast\.)?([\w.]+)(?:\([^`\n]*\))?`", re.M | re.S)
UNIT = re.compile(r"(?<=\d) (?=(?:ms|µs|s|h|MB|GB|dB)\b|%)")
AMBIGUOUS = {"Cell", "State", "DEQ", "fixed_point"}  # also names of other things: linked only as deqfast.NAME


def on_config(config: Any) -> Any:
    """Link the repository, by the address in the metadata of the installed deqfast."""
    urls = dict(url.split(", ") for url in metadata("deqfast").get_all("Project-URL") or [])
    config.repo_url, config.repo_name = urls["Repository"], "GitHub"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add every picture outside of the pages' folder that a page shows."""
    for page in list(files.documentation_pages()):
        for link in OUTSIDE.findall(page.content_string):
            path = (PAGES / link).resolve()
            if path.is_file() and files.get_file_from_path(_inside(link)) is None:
                files.append(File.generated(config, _inside(link), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Write the table of refusals, link the API, the repository and the figures' copies.

    A missing figure fails the build. In tables a number and its unit stay on one line.
    """
    refusals = [(name_of(way), name_of(of), why) for way, refused in REFUSED.items() for of, why in refused.items()]
    rows = [f"| `{way}` | `{option}` | {why} |" for way, option, why in refusals]
    table = "\n".join(["| way of running | refuses | because |", "|---|---|---|", *rows])
    lines = markdown.replace(TABLE, table).split("\n")
    markdown = "\n".join(UNIT.sub("\N{NO-BREAK SPACE}", line) if line.startswith("|") else line for line in lines)
    if page.file.src_uri not in API:
        markdown = _linked(markdown, _documented())
    markdown = IN_REPOSITORY.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)
    return OUTSIDE.sub(lambda match: f"]({_inside(match[1])})", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the objects that docstrings name on the API pages, except `fixed_point`, which is also a hook of a cell."""
    if page.file.src_uri not in API:
        return html
    targets = {name: target for name, target in _documented().items() if name != "fixed_point"}
    pages = {name: file.removesuffix(".md") + ".html" for file in API for name in _objects(file)}

    def link(code: re.Match[str]) -> str:
        target = targets.get(code[1])
        return f'<a href="{pages[target]}#{target}">{code[0]}</a>' if target else code[0]

    return re.sub(r"(?<!<b>)<code>(?:deqfast\.)?([\w.]+)</code>", link, html)


def _documented() -> dict[str, str]:
    """Names by which pages call the objects of the API pages, with the objects' full names."""
    names = [name for file in API for name in _objects(file)]
    return {short: name for name in names for short in (name.removeprefix("deqfast."), name.rpartition(".")[2])}


def _objects(file: str) -> list[str]:
    return re.findall(r"^::: (deqfast\..+)$", (PAGES / file).read_text(), re.MULTILINE)


def _linked(markdown: str, documented: dict[str, str]) -> str:
    """The page with a link at its first mention of each documented object."""
    left = set(documented.values())

    def link(part: re.Match[str]) -> str:
        name = part[1] or ""
        word = name.islower() and "_" not in name  # such as `solve`
        target = documented.get(name)
        if target not in left or ((word or name in AMBIGUOUS) and not part[0].startswith("`deqfast.")):
            return part[0]
        left.remove(target)
        return f"[{part[0]}][{target}]"

    return PARTS.sub(link, markdown)


def _inside(link: str) -> str:
    return "figures/" + link.removeprefix("../../").replace("/", "-")
