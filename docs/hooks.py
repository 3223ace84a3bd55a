"""What the site adds to the pages: figures of the repository, the table of refusals, links to the API.

Pages link to figures by their paths in the repository, so that they show there too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from deqfast.execution.refusals import REFUSED

PAGES = Path(__file__).parent / "pages"
TABLE = "<!-- what does not go together -->"
OUTSIDE = re.compile(r"\]\((\.\./[^)\s]+\.(?:png|gif))\)")
# Fenced blocks, headings and links stay as they are; a span of code may name an object, with its arguments.
PARTS = re.compile(r"^```.*?^```|^#[^\n]*|!?\[[^\]]*\]\([^)]*\)|`(?:deqfast\.)?([\w.]+)(?:\([^`\n]*\))?`", re.M | re.S)
AMBIGUOUS = {"Cell", "State", "DEQ", "fixed_point"}  # also names of other things: linked only as deqfast.NAME


def on_files(files: Any, config: Any) -> Any:
    """Add every picture outside of the pages' folder that a page shows."""
    for page in list(files.documentation_pages()):
        for link in OUTSIDE.findall(page.content_string):
            path = (PAGES / link).resolve()
            if path.is_file() and files.get_file_from_path(_inside(link)) is None:
                files.append(File.generated(config, _inside(link), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the table of refusals, link the API, and point at the figures' copies; a missing figure fails the build."""
    rows = [f"| `{way}` | `{option}` | {why} |" for way, refused in REFUSED.items() for option, why in refused.items()]
    table = "\n".join(["| way of running | refuses | because |", "|---|---|---|", *rows])
    markdown = markdown.replace(TABLE, table)
    if page.file.src_uri != "api.md":
        markdown = _linked(markdown, _documented())
    return OUTSIDE.sub(lambda match: f"]({_inside(match[1])})", markdown)


def _documented() -> dict[str, str]:
    """Names by which pages call the objects of the API page, with the objects' full names."""
    names = re.findall(r"^::: deqfast\.(.+)$", (PAGES / "api.md").read_text(), re.MULTILINE)
    return {short: f"deqfast.{name}" for name in names for short in (name, name.rpartition(".")[2])}


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
