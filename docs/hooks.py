"""Figures of the repository in the site: pages link to them where they lie, as is right for reading them there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = Path(__file__).parent / "pages"
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
    """Point the links at the copies; one whose picture is missing is left, and fails the build."""
    return OUTSIDE.sub(lambda match: f"]({_inside(match[1])})", markdown)


def _inside(link: str) -> str:
    return "figures/" + link.removeprefix("../../").replace("/", "-")
