"""The documentation: its Python runs, its links lead somewhere, and its commands name files that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = ("docs", "docs/pages", "benchmarks")
PAGES = [README, *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md")))]
NEEDS_A_GPU = "# needs a GPU"
SEVERAL_PROCESSES = "# torchrun"  # which tests/test_processes.py runs
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
COMMAND = r"(?:^|[ /`])(?:python3?|bash|torchrun|pytest)"
SCRIPT = re.compile(COMMAND + r" (?:-\S+ (?:\d+ )?)*((?:benchmarks|experiments)/[\w./]+)")
LONG = ("compile", "tutorial")  # pages whose code takes more than five seconds

long = pytest.mark.tier("full")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in FENCED.finditer(text)]


def python_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


def anchors_of(page: Path) -> set[str]:
    """Names of a page's headings in the form of links."""
    prose = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.filterwarnings("ignore:deqfast. in ")  # pages also show solves that do not converge
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[long] * (page.stem in LONG)) for page in PAGES if python_of(page)],
    ids=lambda page: page.name,
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for block in python_of(page):
            padded = "\n" * (block.line - 1) + block.text  # a traceback names the line of the page
            code = compile(padded, str(page), "exec")
            if block.text.startswith(SEVERAL_PROCESSES):
                continue
            if block.text.startswith(NEEDS_A_GPU) and not torch.cuda.is_available():
                continue
            exec(code, names)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md" and file in PAGES:
            assert anchor in anchors_of(file), f"{page.name}: {target} has no such heading"


@every_page
def test_commands_name_files_that_exist(page: Path) -> None:
    for script in SCRIPT.findall(page.read_text()):
        assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs" / "pages").glob("*.md"))


def test_the_notebook_is_made_of_its_page() -> None:
    """The page's Python runs above; `python docs/notebook.py` writes the notebook."""
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.with_suffix(".ipynb").read_text() == made.notebook(made.PAGE.read_text())


def test_readme_fits_and_its_test_command_is_found() -> None:
    """CI runs what stands between the marker and the end of the block."""
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    marked = re.search(r"^<!-- tests -->\n```bash\n(.*)\n```$", text, re.MULTILINE)
    assert marked is not None
    assert shlex.split(marked[1])[:3] == ["python3", "-m", "venv"]
    assert text.count("<!-- numbers: layers in short -->") == text.count("<!-- end of numbers -->") == 1


def test_the_textbooks_code_on_the_page_is_what_the_benchmarks_time() -> None:
    code = (ROOT / "benchmarks" / "harness" / "textbook.py").read_text()
    function = code[code.index("def anderson(") :].partition("\n\n\n")[0]
    assert function in (ROOT / "docs" / "pages" / "by-hand.md").read_text()
