"""Figures of the repository in the site: pages link to them where they lie, as is right for reading them there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from deqfast.execution.refusals import REFUSED

PAGES = Path(__file__).parent / "pages"
TABLE = "<!-- what does not go together -->"
OUTSIDE = re.compile(r"\]\((\.\./[^)\s]+\.(?:png|gif))\)")


def on_files(files: Any, config: Any) -> Any:
    """Add every picture outside of the pages' folder that a page shows."""
    for page in list(files.documentation_pages()):
        for link in OUTSIDE.findall(page.content_string):
            path = (PAGES / link).resolve()
            if path.is_file() and files.get_file_from_path(_inside(link)) is None:
                files.append(File.generated(config, _inside(link), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write the table of refusals, and point links at the copies; a missing picture's is left, and fails the build."""
    rows = [f"| `{way}` | `{option}` | {why} |" for way, refused in REFUSED.items() for option, why in refused.items()]
    table = "\n".join(["| way of running | refuses | because |", "|---|---|---|", *rows])
    return OUTSIDE.sub(lambda match: f"]({_inside(match[1])})", markdown.replace(TABLE, table))


def _inside(link: str) -> str:
    return "figures/" + link.removeprefix("../../").replace("/", "-")
